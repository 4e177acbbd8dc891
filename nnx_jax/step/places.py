"""Places: on which devices the leaves, inputs and outputs of a step's programs lie; nothing at all for one device.

Nothing here waits for another process, unless it is about an array that lies over several: `jax.device_put` onto
devices of several processes compares the value on all of them first, and a process alone would wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.step.state import leaf_paths, own, strong

_INPUTS = {"micro": ("rows",), "apply": ("rows",), "stacked": ("stacked",), "resident": ("whole", "stacked")}
"""How the arguments of a program lie, by attribute of the sharding."""


class Places:
    """The places of one step's leaves.

    Args:
        sharding: a ShardingSpec, None for the default device.
        paths: names of the leaves.
        like: their shapes.
        spread: prefixes of the names of leaves that have a part of their own on each device.

    Attributes:
        leaves: one place for each leaf; whole: of what lies on every device. None without a sharding.

    Raises:
        ConfigError: a rule of the sharding does not fit the parameters.
    """

    def __init__(self, sharding: Any, paths: Sequence[str], like: Sequence[Any], spread: Sequence[str] = ()) -> None:
        self._sharding, self._paths, self._spread = sharding, list(paths), tuple(spread)
        self._shapes = [tuple(leaf.shape) for leaf in like]
        self.leaves: Any = None if sharding is None else sharding.leaves(paths, self._shapes, spread)
        self.whole: Any = None if sharding is None else sharding.whole

    @property
    def spans(self) -> bool:
        """The devices are those of several processes."""
        return self.whole is not None and not self.whole.is_fully_addressable

    def out(self, places: Any) -> dict[str, Any]:
        """Options for `jax.jit`: left to itself XLA may place an output elsewhere, and the next call would compile."""
        return {} if self._sharding is None else {"out_shardings": places}

    def shapes(self, like: Sequence[Any]) -> list[Any]:
        """The shapes of the leaves, with their places."""
        if self._sharding is None:
            return list(like)
        return [_placed(leaf, place) for leaf, place in zip(like, self.leaves, strict=True)]

    def inputs(self, kind: str, args: Sequence[Any]) -> list[Any]:
        """The shapes of a program's arguments, with their places."""
        if self._sharding is None:
            return list(args)
        places = [getattr(self._sharding, name) for name in _INPUTS[kind]]
        return [
            jax.tree.map(lambda leaf, at=place: _placed(leaf, at), arg) for arg, place in zip(args, places, strict=True)
        ]

    def start(self, parts: tuple[Any, ...]) -> Any:
        """(parameters, frozen, model_state, slots) from any device, each where the step has it."""
        if self._sharding is None:
            return parts
        tree = dict(zip(("params", "frozen", "model_state", "slots"), parts, strict=True))
        leaves, structure = jax.tree.flatten(tree)
        paths, shapes = leaf_paths(tree), [np.shape(leaf) for leaf in leaves]
        places = self._sharding.leaves(paths, shapes)
        placed = [put(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
        found = jax.tree.unflatten(structure, placed)
        return tuple(found[name] for name in ("params", "frozen", "model_state", "slots"))

    def own(self, leaves: list[Any], numbers: Sequence[int] | None = None) -> list[jax.Array]:
        """Fresh copies (`state.own`) at the places of all leaves, or of those with these numbers."""
        if self._sharding is None:
            return own(leaves)
        places = self.leaves if numbers is None else [self.leaves[number] for number in numbers]
        return _copier(tuple(places))([put(leaf, place) for leaf, place in zip(leaves, places, strict=True)])


def put(value: Any, place: Any) -> jax.Array:
    """An array at a place: of a host value, or of an array of this process, that is the same on every process.

    Of an array that lies over processes already every process must ask at once: its parts change places.
    """
    if place.is_fully_addressable:
        return jax.device_put(value, place)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        same = value.sharding.is_equivalent_to(place, value.ndim)
        return value if same else _mover(place)(value)
    host = np.asarray(value, dtype=jnp.result_type(value))
    # A copy of each part: on a CPU an array may be the host's memory, and this one is given away.
    return jax.make_array_from_callback(host.shape, place, lambda index: np.array(host[index], copy=True))


def on_host(value: Any) -> Any:
    """The value of an array on the host. Of one that is cut over processes every process must ask at once."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    mesh: Any = value.sharding.mesh  # type: ignore[attr-defined]  # only named shardings lie over processes
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return np.asarray(_mover(everywhere)(value))


@lru_cache(maxsize=256)
def _copier(places: tuple[Any, ...]) -> Any:
    return jax.jit(lambda leaves: strong([jnp.copy(leaf) for leaf in leaves]), out_shardings=list(places))


@lru_cache(maxsize=256)
def _mover(place: Any) -> Any:
    return jax.jit(lambda value: value, out_shardings=place)


def _placed(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


class Gathering:
    """A forward pass that first puts together the parameters that are cut over the devices of different rows."""

    def __init__(self, forward: Any, sharding: Any) -> None:
        self._forward, self._sharding = forward, sharding

    def __call__(self, params: Any, *rest: Any) -> Any:
        """As the forward pass."""
        return self._forward(self._sharding.gathered(params), *rest)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._forward, name)
        return found if name != "at" else lambda counters: Gathering(found(counters), self._sharding)


def gathering(forward: Any, sharding: Any) -> Any:
    """The forward pass on the devices of a ShardingSpec; itself for one device, or where each holds the whole model."""
    return forward if sharding is None or sharding.replicates else Gathering(forward, sharding)
