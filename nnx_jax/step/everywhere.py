"""Everywhere: a step body that every device computes alike on the whole state, wherever the state is stored.

What a compiler does to a sum over an array that is cut over devices depends on the cut. So parameters, moments and all
else that is stored in parts is put together before a microbatch, every device computes the same on it, and each keeps
its parts of what comes out. Only the shards of a microbatch are dealt out (`step/shards.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from nnx_jax.step import state
from nnx_jax.step.body import State
from nnx_jax.step.loops import once
from nnx_jax.step.shards import Shards
from nnx_jax.step.split_update import SplitUpdate
from nnx_jax.step.state import leaf_paths, strong
from nnx_jax.step.tidy import tidied

_WHOLE = PartitionSpec()


class Everywhere:
    """The bodies of a canonical step on all devices of a mesh, or on the only one.

    Args:
        body: computes a microbatch as one device does.
        shards: of the reduction, which say how the rows of a microbatch are handed over.
        sharding: where the state is stored; None for one device.
        split: an optimizer that works on the parts of its state, which are then not put together; None for another.
    """

    def __init__(self, body: Any, shards: Shards, sharding: Any, split: SplitUpdate | None) -> None:
        self._body, self._shards, self._sharding, self._split = body, shards, sharding, split

    def __getattr__(self, name: str) -> Any:
        if name == "_body":  # nothing is delegated before there is something to delegate to
            raise AttributeError(name)
        return getattr(self._body, name)

    def micro(self, carry: State, batch: Mapping[str, Any]) -> State:
        """As the body's."""
        return self._run(self._body.micro, carry, batch)

    def last(self, carry: State, batch: Mapping[str, Any]) -> State:
        """As the body's."""
        return self._run(self._body.last, carry, batch)

    def apply(self, carry: State, batch: Mapping[str, Any]) -> State:
        """As the body's."""
        return self._run(self._body.apply, carry, batch)

    def commit(self, carry: State) -> State:
        """As the body's."""
        return self._run(self._body.commit, carry)

    def _run(self, function: Callable[..., State], carry: State, *batch: Mapping[str, Any]) -> State:
        batch = tuple(self._shards.handed(rows) for rows in batch)
        if self._sharding is None:
            return _alone(function, carry, *batch)
        leaves, structure = jax.tree.flatten(carry)
        paths = [*leaf_paths(carry[0]), "", ""]
        stored = self._sharding.leaves(paths, [leaf.shape for leaf in leaves])
        parts = lambda path: self._split is not None and path.startswith("opt_state/")  # noqa: E731
        handed = [place.spec if parts(path) else _WHOLE for path, place in zip(paths, stored, strict=True)]
        specs = jax.tree.unflatten(structure, handed)
        found = jax.shard_map(
            lambda carry, *batch: _alone(function, carry, *batch),
            mesh=self._sharding.mesh,
            in_specs=(specs, *(self._shards.places for _ in batch)),
            out_specs=specs,
            check_vma=False,
        )(carry, *batch)
        return jax.lax.with_sharding_constraint(found, jax.tree.unflatten(structure, stored))


def _alone(function: Callable[..., State], carry: State, *batch: Any) -> State:
    """`function(carry, *batch)` as the body of a loop that runs once, in which it does not matter how arrays came."""
    function, single = tidied(function), once(carry[0].counters[state.RESERVED])

    def body(_: Any, held: tuple[State, Any]) -> tuple[State, Any]:
        carry, batch = held
        return strong(function(carry, *batch)), jax.tree.map(jnp.zeros_like, batch)

    return jax.lax.fori_loop(jnp.zeros_like(single), single, body, (strong(carry), batch))[0]
