"""Apart: whether a function computes every row of a batch from that row alone, as its trace shows.

Every traced value either has an axis of rows, or is the same for all of them; what each primitive does to that axis is
known for the usual ones. A reduction, a product or a scan along it compares rows. What is not known is not taken for
apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

ELEMENTWISE = frozenset(
    (
        "abs", "acos", "add", "add_any", "and", "asin", "atan2", "cbrt", "ceil", "clamp", "convert_element_type",
        "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
        "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
        "mul", "ne", "neg", "nextafter", "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n",
        "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
    )
)  # fmt: skip
_REDUCING = frozenset(
    ("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum")
)
_ALONG = {"cumlogsumexp": "axis", "cummax": "axis", "cummin": "axis", "cumprod": "axis", "cumsum": "axis",
          "sort": "dimension"}  # fmt: skip
INNER = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr",
    "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
}  # fmt: skip

Rows = int | frozenset[int]
"""Of a value that has rows, their axis; of one that has none, the axes along which it repeats itself."""
NOTHING: frozenset[int] = frozenset()


class _Mixed(Exception):
    """Rows are compared with each other."""


class _Unknown(Exception):
    """Nobody knows what becomes of the rows."""


def apart(function: Callable[[Any, Any], Any], given: Any, batch: Any, parts: int) -> bool | None:
    """Whether each row of `function(given, batch)` depends on the same row of the batch alone; nothing is computed.

    Args:
        given: arrays, or their shapes, that are the same for every row.
        batch: arrays, or their shapes, [B, ...].
        parts: how many the batch is to be cut into; it must not matter to the function either.

    Returns:
        True: each does. False: rows are compared. None: the trace does not tell.
    """
    count = len(jax.tree.leaves(given))
    part = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // parts, *leaf.shape[1:]), leaf.dtype), batch)
    try:
        whole, less = (jax.make_jaxpr(function)(given, rows).jaxpr for rows in (batch, part))
    except Exception:  # of the caller's function, which takes so many rows and no others
        return None
    try:
        if any(found != 0 for found in _run(whole, [NOTHING if at < count else 0 for at in range(len(whole.invars))])):
            return None
    except _Mixed:
        return False
    except _Unknown:
        return None
    # A number of rows that is calculated with is another one in a part.
    return _numbers(whole) == _numbers(less) or None


def _numbers(jaxpr: Any) -> list[str]:
    """Every number that is written in a trace, in order."""
    found: list[str] = []
    for equation in jaxpr.eqns:
        found += [repr(atom.val) for atom in equation.invars if isinstance(atom, Literal)]
        inner = equation.params.get(INNER.get(equation.primitive.name, ""))
        found += [] if inner is None else _numbers(_opened(inner))
    return found


def _opened(inner: Any) -> Any:
    return inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner


def _run(jaxpr: Any, rows: Sequence[Rows]) -> list[Rows]:
    known: dict[Any, Rows] = dict.fromkeys(jaxpr.constvars, NOTHING)
    known.update(zip(jaxpr.invars, rows, strict=True))
    read = lambda atom: NOTHING if isinstance(atom, Literal) else known[atom]  # noqa: E731
    for equation in jaxpr.eqns:
        known.update(zip(equation.outvars, _through(equation, [read(atom) for atom in equation.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _through(equation: Any, rows: list[Rows]) -> list[Rows]:
    """The rows of the results."""
    name, params = equation.primitive.name, equation.params
    shapes = [tuple(atom.aval.shape) for atom in equation.invars]
    if name in INNER:
        return _run(_opened(params[INNER[name]]), rows)
    if not any(isinstance(each, int) for each in rows):
        return [_repeats(equation, rows, shapes)] * len(equation.outvars)
    if name in ELEMENTWISE:
        found: Rows = _same(rows, shapes)
    elif name in _REDUCING:
        found = _reduced(_same(rows, shapes), params["axes"])
    elif name in _ALONG:
        found = _same(rows, shapes)
        if found == params[_ALONG[name]] % len(shapes[0]):
            raise _Mixed
    elif name in _RULES:
        found = _RULES[name](equation, params, rows, shapes)
    else:
        raise _Unknown
    return [int(found)] * len(equation.outvars)


def _repeats(equation: Any, rows: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> frozenset[int]:
    """The axes along which a value without rows repeats itself, as far as is easily known."""
    name, out = equation.primitive.name, range(len(equation.outvars[0].aval.shape))
    if name == "broadcast_in_dim":
        at = equation.params["broadcast_dimensions"]
        once = {to for place, to in enumerate(at) if shapes[0][place] == 1 or place in rows[0]}
        return frozenset(axis for axis in out if axis not in at or axis in once)
    if name in ELEMENTWISE:
        each = list(zip(rows, shapes, strict=True))
        return frozenset(axis for axis in out if all(_even(axis, found, shape) for found, shape in each))
    return NOTHING


def _even(axis: int, repeats: frozenset[int], shape: tuple[int, ...]) -> bool:
    return not shape or shape[axis] == 1 or axis in repeats


def _same(rows: Sequence[Rows], shapes: Sequence[tuple[int, ...]]) -> int:
    """The axis of rows of operands of one shape, which all of them have or repeat themselves along."""
    found = {each for each in rows if isinstance(each, int)}
    if len(found) != 1:
        raise _Mixed  # a row meets another one
    axis = found.pop()
    for each, shape in zip(rows, shapes, strict=True):
        if not isinstance(each, int) and not _even(axis, each, shape):
            raise _Unknown  # what a row meets depends on its place
    return axis


def _reduced(axis: int, gone: Sequence[int]) -> int:
    if axis in gone:
        raise _Mixed
    return axis - sum(each < axis for each in gone)


def _dot(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
    (contracted, batched), out = params["dimension_numbers"], set()
    for side, (axis, gone, kept) in enumerate(zip(rows, contracted, batched, strict=True)):
        if not isinstance(axis, int):
            continue
        if axis in gone:
            raise _Mixed
        if axis in kept:
            place = list(kept).index(axis)
            other = rows[1 - side]
            if not isinstance(other, int) and batched[1 - side][place] not in other:
                raise _Unknown
            out.add(place)
            continue
        free = [at for at in range(len(shapes[side])) if at not in gone and at not in kept]
        before = len(kept) + (len(shapes[0]) - len(contracted[0]) - len(batched[0]) if side else 0)
        out.add(before + free.index(axis))
    if len(out) != 1:
        raise _Mixed
    return out.pop()


def _conv(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
    numbers = params["dimension_numbers"]
    if isinstance(rows[1], int) or rows[0] != numbers.lhs_spec[0] or params["batch_group_count"] != 1:
        raise _Unknown
    return numbers.out_spec[0]


def _reshape(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
    new, old, axis = tuple(equation.outvars[0].aval.shape), shapes[0], rows[0]
    before = math.prod(old[:axis])
    for at, size in enumerate(new):
        if size == old[axis] and math.prod(new[:at]) == before:
            return at
    raise _Unknown


def _broadcast(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
    return params["broadcast_dimensions"][rows[0]]


def _transpose(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
    return list(params["permutation"]).index(rows[0])


def _squeeze(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
    return _reduced(rows[0], params["dimensions"])


def _along(name: str) -> Callable[[Any, Any, Any, Any], int]:
    """Put together or cut along an axis that is not that of the rows."""

    def rule(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
        axis = _same(rows, shapes)
        if axis == params[name]:
            raise _Unknown
        return axis

    return rule


def _cut(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
    """A part of each row, the same one."""
    axis, *rest = rows
    if not isinstance(axis, int) or any(isinstance(each, int) for each in rest):
        raise _Unknown
    if equation.outvars[0].aval.shape[axis] != shapes[0][axis]:
        raise _Unknown
    return axis


def _pad(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
    if not isinstance(rows[0], int) or any(params["padding_config"][rows[0]]):
        raise _Unknown
    return rows[0]


def _pool(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
    axis = rows[0]
    if not isinstance(axis, int) or params["window_dimensions"][axis] != 1 or params["window_strides"][axis] != 1:
        raise _Unknown
    if any(params["padding"][axis]) or params["base_dilation"][axis] != 1:
        raise _Unknown
    return axis


def _gather(equation: Any, params: Any, rows: Any, shapes: Any) -> int:
    """A look into a table that is the same for all rows, as an embedding has."""
    numbers, axis = params["dimension_numbers"], rows[1]
    if isinstance(rows[0], int) or axis == len(shapes[1]) - 1:
        raise _Unknown
    rank = len(equation.outvars[0].aval.shape)
    return [at for at in range(rank) if at not in numbers.offset_dims][axis]


_RULES: dict[str, Callable[[Any, Any, Any, Any], int]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "conv_general_dilated": _conv,
    "dot_general": _dot,
    "dynamic_slice": _cut,
    "gather": _gather,
    "pad": _pad,
    "reduce_window_max": _pool,
    "reduce_window_sum": _pool,
    "reshape": _reshape,
    "slice": _cut,
    "split": _along("axis"),
    "squeeze": _squeeze,
    "transpose": _transpose,
}
