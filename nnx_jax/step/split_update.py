"""Split update: an optimizer that moves each value by itself works on a device's parts, so that moments stay cut.

An optimizer that compares values, such as by the norm of a parameter, needs all of them in one order, and gets them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from nnx_jax.core.precision import sum_dtype
from nnx_jax.step.apart import ELEMENTWISE, INNER
from nnx_jax.step.state import leaf_paths


class SplitUpdate:
    """An optimizer on one device's parts of parameters that every device holds whole.

    Args:
        optimizer: whose update moves each value by itself.
        places: PartitionSpec of every parameter by name.
        mesh: the devices.
    """

    def __init__(self, optimizer: Any, places: Mapping[str, Any], mesh: Any) -> None:
        self._optimizer, self._places, self._mesh = optimizer, dict(places), mesh

    def update(self, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """As the optimizer's, of whole gradients and parameters and this device's parts of the state."""
        parts = {name: self._part(value, self._places[name]) for name, value in params.items()}
        own = {name: self._part(value, self._places[name]) for name, value in grads.items()}
        found, opt_state = self._optimizer.update(own, opt_state, parts)
        return {name: self._put_together(value, self._places[name]) for name, value in found.items()}, opt_state

    def _part(self, value: jax.Array, places: Any) -> jax.Array:
        for axis, names in _cuts(places):
            size = value.shape[axis] // math.prod(self._mesh.shape[name] for name in names)
            value = jax.lax.dynamic_slice_in_dim(value, jax.lax.axis_index(names) * size, size, axis)
        return value

    def _put_together(self, value: jax.Array, places: Any) -> jax.Array:
        for axis, names in _cuts(places):
            value = jax.lax.all_gather(value, names, axis=axis, tiled=True)
        return value


def split_update(optimizer: Any, given: Any, sharding: Any) -> SplitUpdate | None:
    """The optimizer on parts of its state, None where it needs the whole or nothing is cut.

    Args:
        given: shapes of trained and of frozen parameters by name, and more.
    """
    if sharding is None:
        return None
    params, frozen = given[:2]
    shapes = {name: tuple(leaf.shape) for name, leaf in {**params, **frozen}.items()}
    places = {name: place.spec for name, place in sharding.params(shapes).items() if name in params}
    if all(not list(_cuts(spec)) for spec in places.values()):
        return None
    dtype = sum_dtype(*(leaf.dtype for leaf in params.values()))
    grads = {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in params.items()}
    state = jax.eval_shape(optimizer.init, params)
    if not elementwise(optimizer.update, grads, state, params):
        return None
    tree = {"params": params, "frozen": frozen, "opt_state": state}
    leaves, structure = jax.tree.flatten(tree)
    stored = sharding.leaves(leaf_paths(tree), [leaf.shape for leaf in leaves])
    cut = [place.shard_shape(leaf.shape) for place, leaf in zip(stored, leaves, strict=True)]
    local = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in zip(cut, leaves, strict=True)]
    part = jax.tree.unflatten(structure, local)
    own = {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in part["params"].items()}
    try:
        moved = jax.eval_shape(optimizer.update, own, part["opt_state"], part["params"])
    except (TypeError, ValueError):  # a state of a parameter's shape that is stored otherwise
        return None
    wanted = part["params"], part["opt_state"]
    if [leaf.shape for leaf in jax.tree.leaves(moved)] != [leaf.shape for leaf in jax.tree.leaves(wanted)]:
        return None
    return SplitUpdate(optimizer, places, sharding.mesh)


def elementwise(function: Callable[..., Any], *shapes: Any) -> bool:
    """Whether each value of every result is made of the values at the same place, and of single numbers, alone.

    Read off the trace; what is not known is not taken for elementwise.
    """
    return _all_elementwise(jax.make_jaxpr(function)(*shapes))


def _all_elementwise(closed: ClosedJaxpr) -> bool:
    return not any(jax.numpy.ndim(const) for const in closed.consts) and all(map(_is_one, closed.jaxpr.eqns))


def _is_one(equation: Any) -> bool:
    name, ranks = equation.primitive.name, {atom.aval.ndim for atom in (*equation.invars, *equation.outvars)}
    inner = equation.params.get(INNER.get(name, ""))
    if inner is not None:
        return _all_elementwise(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()))
    if name in ELEMENTWISE or ranks == {0}:
        return True
    return name == "broadcast_in_dim" and equation.invars[0].aval.ndim == 0


def _cuts(places: Any) -> list[tuple[int, tuple[str, ...]]]:
    """(dimension, the axes that cut it) of a PartitionSpec."""
    named = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in places]
    return [(axis, names) for axis, names in enumerate(named) if names]
