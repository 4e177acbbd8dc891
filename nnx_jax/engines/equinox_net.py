"""EquinoxNet: an Equinox module and its State as named leaves that can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ModelError

Arrays = dict[str, Any]


def load_equinox() -> Any:
    """Import Equinox and return it.

    Raises:
        ImportError: it is not installed; names the extra.
    """
    try:
        import equinox
    except ImportError as error:
        raise ImportError("Equinox is not installed; pip install 'nnx_jax[equinox]'", name="equinox") from error
    return equinox


class EquinoxNet:
    """An Equinox module, with its State where it has one; training, callbacks and hooks share this object.

    Equinox modules never change, so what changes is which module this object holds. Leaves are named by their path,
    as in "layers.0.weight", and those of the State by the path of their StateIndex, as in "norm.batch_counter".

    Args:
        module: any `equinox.Module` that can be called; it is read, never changed.
        state: the `equinox.nn.State` that `equinox.nn.make_with_state` made beside it.

    Raises:
        TypeError: something else than a module, or than a State.
        ModelError: (a ValueError) a module with state without its State, or with that of another module; or two leaves
            of one name.
    """

    def __init__(self, module: Any, state: Any = None) -> None:
        eqx = load_equinox()
        if not isinstance(module, eqx.Module) or not callable(module):
            raise TypeError(f"expected an eqx.Module that can be called, got {type(module).__name__}")
        if state is not None and not isinstance(state, eqx.nn.State):
            raise TypeError(f"the state beside a module is an eqx.nn.State, got {type(state).__name__}")
        self.module, self.state = module, state
        _check_state(eqx, module, state)
        names = [*_module_names(module), *_state_names(module, state)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ModelError(f"two leaves of {type(module).__name__} have the name '{twice}'; rename one")

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return the net of a module, of a pair (module, state), or of a net, whose weights it then shares."""
        if isinstance(given, EquinoxNet):
            return cls(given.module, given.state)
        if isinstance(given, tuple) and len(given) == 2:
            return cls(*given)
        return cls(given)

    @property
    def called(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__

    @property
    def kind(self) -> Any:
        """What is equal for nets that differ in their arrays alone."""
        leaves, tree = jax.tree.flatten(self.module)
        return tree, [None if _is_array(leaf) else leaf for leaf in leaves]

    def sharding_rules(self) -> Any:
        """The module's own rules where it has some, see `hook_plan.fit_sharding`."""
        own: Callable[[], Any] = getattr(self.module, "sharding_rules", dict)
        return own()

    def arrays(self) -> Arrays:
        """Every array of the module by name; random keys as their data, uint32."""
        return dict(zip(_module_names(self.module), map(_stored, _arrays_of(self.module)), strict=True))

    def state_arrays(self) -> Arrays:
        """Every array of the State by name."""
        found = [] if self.state is None else jax.tree.leaves(self.state)
        return dict(zip(_state_names(self.module, self.state), map(_stored, found), strict=True))

    def layers(self, kind: Any) -> dict[str, Any]:
        """The layers of a class by name."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.module, is_leaf=lambda part: isinstance(part, kind))
        return {_name(path): part for path, part in leaves if isinstance(part, kind)}

    def rebuilt(self, named: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return (module, state) with these leaves in place of their own, traced ones too; others keep theirs."""
        leaves, tree = jax.tree.flatten(self.module)
        names = iter(_module_names(self.module))
        put = [_held(named, next(names), leaf) if _is_array(leaf) else leaf for leaf in leaves]
        module = jax.tree.unflatten(tree, put)
        if self.state is None:
            return module, None
        leaves, tree = jax.tree.flatten(self.state)
        state_names = _state_names(self.module, self.state)
        return module, tree.unflatten([_held(named, n, leaf) for n, leaf in zip(state_names, leaves, strict=True)])

    def put(self, named: Mapping[str, Any]) -> None:
        """Replace these leaves by copies of the given ones; a leaf of integers that is the same stays the very leaf."""
        held = {**self.arrays(), **self.state_arrays()}
        changed = {
            name: jnp.array(value, copy=True)
            for name, value in named.items()
            if jnp.issubdtype(held[name].dtype, jnp.inexact) or not np.array_equal(held[name], value)
        }
        self.module, self.state = self.rebuilt(changed)


class EquinoxCopies:
    """Copies of one net that hold other weights: what `EMAHook.attach` takes."""

    def __init__(self, net: EquinoxNet) -> None:
        self.net = net

    def copy(self, key: str) -> EquinoxNet:
        """A net whose weights can be replaced without changing this one's."""
        return EquinoxNet.of(self.net)

    def write(self, key: str, module: EquinoxNet, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        """Put copies of these arrays into a copy; what is not named keeps its value."""
        module.put({**params, **buffers})


def is_key(leaf: Any) -> bool:
    """A typed random key."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_array(leaf: Any) -> bool:
    """An array of numbers, of JAX or NumPy, or a random key."""
    return isinstance(leaf, jax.Array) or (
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMmV"
    )


def _stored(leaf: Any) -> jax.Array:
    return jax.random.key_data(leaf) if is_key(leaf) else jnp.asarray(leaf)


def _held(named: Mapping[str, Any], name: str, leaf: Any) -> Any:
    """The leaf of this name, as the module holds it."""
    if name not in named:
        return leaf
    return jax.random.wrap_key_data(named[name], impl=jax.random.key_impl(leaf)) if is_key(leaf) else named[name]


def _arrays_of(module: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(module) if _is_array(leaf)]


def _module_names(module: Any) -> list[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(module)
    return [_name(path) for path, leaf in leaves if _is_array(leaf)]


def _indices(module: Any) -> dict[Any, str]:
    """The name of every StateIndex by its marker."""
    kind = load_equinox().nn.StateIndex
    leaves, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda part: isinstance(part, kind))
    return {part.marker: _name(path) for path, part in leaves if isinstance(part, kind)}


def _state_names(module: Any, state: Any) -> list[str]:
    """Names of the State's leaves: of their StateIndex, and the path within its value."""
    if state is None:
        return []
    names, (values, markers) = _indices(module), state.tree_flatten()
    found = []
    for marker, value in zip(markers, values, strict=True):
        leaves, _ = jax.tree_util.tree_flatten_with_path(value)
        found += [".".join(part for part in (names[marker], _name(path)) if part) for path, _ in leaves]
    return found


def _check_state(eqx: Any, module: Any, state: Any) -> None:
    """Check that a module with state has its own, and one without has none.

    Raises:
        ModelError: naming the layer.
    """
    called, names = type(module).__name__, _indices(module)
    if names and state is None:
        raise ModelError(
            f"{called} keeps state ('{next(iter(names.values()))}'), which was not given; make both with "
            f"model, state = eqx.nn.make_with_state({called})(...), and give the pair (model, state)"
        )
    held = set() if state is None else set(state.tree_flatten()[1])
    if odd := held.symmetric_difference(names):
        told = names.get(next(iter(odd)), next(iter(odd)))
        raise ModelError(f"the state given is not that of this {called}: '{told}' is in one of them only")


def _name(path: Sequence[Any]) -> str:
    """A path as text: attributes, positions and keys joined by dots."""
    return ".".join(str(getattr(part, "name", getattr(part, "key", getattr(part, "idx", part)))) for part in path)
