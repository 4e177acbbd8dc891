"""Tidy: the same computation with everything that is computed twice written once, for any number of devices alike.

XLA simplifies by counting uses: on a CPU `a / broadcast(b)` becomes `a * broadcast(1 / b)` where b has one use. For
several devices it first merges equal instructions, for one device it simplifies first. So in the gradient of a softmax,
which divides twice by one sum, the second division is by the sum on several devices and a product on one, and the last
bits differ. Where nothing is left to merge, both count the same uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_RULES_DONE = ("custom_jvp_call", "custom_vjp_call")
"""Functions with a derivative of their own; it has been taken, or is not needed."""
_REWRITTEN = ("scan", "while", "cond", "checkpoint", "remat2")
"""Primitives whose inner computations are tidied too; those of others are left as they are."""
_SPREADING = frozenset(
    (
        "add", "add_any", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter", "eq", "ne", "lt", "le",
        "gt", "ge", "and", "or", "xor", "select_n", "clamp",
    )
)  # fmt: skip
"""Primitives that repeat an operand along an axis of length 1 when they are compiled, once for each of them."""


def tidied(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the same values whose trace repeats nothing. Not to be differentiated."""

    def call(*args: Any) -> Any:
        flat, structure = jax.tree.flatten(args)
        trace = jax.make_jaxpr(lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), return_shape=True)
        closed, shape = trace(*flat)
        return jax.tree.unflatten(jax.tree.structure(shape), _run(closed.jaxpr, closed.consts, flat))

    return call


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = {
        **dict(zip(jaxpr.constvars, consts, strict=True)),
        **dict(zip(jaxpr.invars, args, strict=True)),
    }
    known: dict[Any, tuple[list[Any], list[Any]]] = {}
    """Results, and the operands: held, so that no other value gets their identity."""
    for equation in jaxpr.eqns:
        values = [atom.val if isinstance(atom, Literal) else env[atom] for atom in equation.invars]
        inner = _inlined(equation)
        if inner is not None:
            found = _run(inner.jaxpr, inner.consts, values)
        else:
            key = _key(equation, values)
            if key is None or key not in known:
                found = _bind(equation, values, known)
                if key is not None:
                    known[key] = found, values
            else:
                found = known[key][0]
        env.update(zip(equation.outvars, found, strict=True))
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]


def _inlined(equation: Any) -> ClosedJaxpr | None:
    name = equation.primitive.name
    inner = equation.params.get("call_jaxpr" if name in _RULES_DONE else _INLINED.get(name, ""))
    return inner if isinstance(inner, ClosedJaxpr) else None


def _key(equation: Any, values: Sequence[Any]) -> Any:
    """Equal for two equations that give the same; None for one that stands for itself."""
    if equation.effects:
        return None
    operands = tuple(
        (repr(atom.val), str(atom.aval)) if isinstance(atom, Literal) else id(value)
        for atom, value in zip(equation.invars, values, strict=True)
    )
    key = (equation.primitive, tuple(sorted(equation.params.items(), key=lambda item: item[0])), operands)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _bind(equation: Any, values: Sequence[Any], known: dict[Any, tuple[list[Any], list[Any]]]) -> list[Any]:
    primitive, params = equation.primitive, equation.params
    if primitive.name in _REWRITTEN:
        params = {name: _again(value) for name, value in params.items()}
    if primitive.name in _SPREADING:
        values = [_spread(value, equation.outvars[0].aval.shape, known) for value in values]
    name = str(equation.source_info.name_stack)
    with equation.ctx.manager, jax.named_scope(name) if name else nullcontext():
        found = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(found) if primitive.multiple_results else [found]


def _spread(value: Any, shape: tuple[int, ...], known: dict[Any, tuple[list[Any], list[Any]]]) -> Any:
    """The value in this shape, repeated along its axes of length 1."""
    if jnp.ndim(value) != len(shape) or jnp.shape(value) == shape:
        return value
    key = ("spread", id(value), shape)
    if key not in known:
        known[key] = [jax.lax.broadcast_in_dim(value, shape, tuple(range(len(shape))))], [value]
    return known[key][0][0]


def _again(value: Any) -> Any:
    """A parameter of a primitive, tidied where it is a computation, or several."""
    if isinstance(value, ClosedJaxpr):
        return jax.make_jaxpr(lambda *args: _run(value.jaxpr, value.consts, args))(*value.in_avals)
    if isinstance(value, Jaxpr):
        return jax.make_jaxpr(lambda *args: _run(value, (), args))(*[variable.aval for variable in value.invars]).jaxpr
    return tuple(map(_again, value)) if isinstance(value, tuple) else value
