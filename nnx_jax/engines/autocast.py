"""Lets a Flax module compute in a 16-bit type, with norms in float32, or all of it in float64."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from nnx_jax.core.precision import in_full_precision

NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)
_PROMOTE = dtypes.promote_dtype  # what layers have unless they were given another


def lower(module: nnx.Module, dtype: Any, kept: Collection[str] = ()) -> None:
    """Make a module, whose parameters stay float32, compute in `dtype`; to be called on one made for a single trace.

    * A layer that was given no dtype casts its input and its parameters to `dtype`, also after a norm. (Flax's rule for
      such a layer is the wider of the two, so that one float32 norm would turn all that follows to float32.)
    * A norm casts them to float32.
    * Any other parameter is cast when it is read.
    * A layer with a dtype of its own, and one with a parameter in `kept`, is left alone. `nnx.Embed` always has one,
      so float32 counts as none there.
    * Inside `full_precision()` all of this is float32.

    Args:
        kept: names of parameters, module paths joined by dots.
    """
    named = {_name(path): variable for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    fixed = {id(named[name]) for name in kept}
    parts: list[Any] = [part for _, part in nnx.iter_modules(module)]
    for part in parts:
        own = [variable for variable in vars(part).values() if isinstance(variable, nnx.Param)]
        if isinstance(part, NORMS):
            fixed.update(id(variable) for variable in own)
            if part.dtype is None:
                _give(part, _to_float32)
        elif isinstance(part, nnx.MultiHeadAttention) and part.attention_fn is nnx.dot_product_attention:
            if part.dtype is None:
                part.attention_fn = partial(nnx.dot_product_attention, promote_dtype=_promote(dtype))
        elif getattr(part, "promote_dtype", None) is _PROMOTE:
            if _has_dtype(part) or any(id(variable) in fixed for variable in own):
                fixed.update(id(variable) for variable in own)
            else:
                _give(part, _promote(dtype))
    for variable in named.values():
        if id(variable) not in fixed:
            object.__setattr__(variable, "__class__", _read_as(type(variable), dtype))


def widen(module: nnx.Module) -> None:
    """Make a module compute in float64, as its parameters and inputs are; to be called on one made for a single trace.

    A layer that says float32, as norms and `nnx.Embed` do, computes in float64; one that says 16 bits is left alone.
    """
    parts: list[Any] = [part for _, part in nnx.iter_modules(module)]
    for part in parts:
        if getattr(part, "dtype", None) is not None and jnp.dtype(part.dtype) == jnp.float32:
            part.dtype = jnp.float64


def _give(layer: Any, promote: Any) -> None:
    layer.promote_dtype = promote


def _name(path: Any) -> str:
    return ".".join(str(part) for part in path)


def _has_dtype(layer: Any) -> bool:
    """Whether somebody chose the type the layer computes in."""
    dtype = getattr(layer, "dtype", None)
    return dtype is not None and not (isinstance(layer, nnx.Embed) and dtype == jnp.float32)


@cache
def _promote(dtype: Any) -> Any:
    """What layers call to bring their input and parameters to one type."""

    def promote(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
        return _to(jnp.float32 if in_full_precision() else low, args)

    low = dtype
    return promote


def _to_float32(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    return _to(jnp.float32, args)


def _to(dtype: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(arg is not None and jnp.issubdtype(jnp.result_type(arg), jnp.complexfloating) for arg in args):
        return _PROMOTE(args)
    return tuple(None if arg is None else jnp.asarray(arg, dtype) for arg in args)


@cache
def _read_as(kind: type[nnx.Variable[Any]], dtype: Any) -> type[nnx.Variable[Any]]:
    """A kind of variable whose float32 value is cast when it is read."""

    class Lowered(kind):
        def get_value(self, **options: Any) -> Any:
            value = super().get_value(**options)
            if in_full_precision() or not isinstance(value, jax.Array) or value.dtype != jnp.float32:
                return value
            return value.astype(dtype)

    Lowered.__name__ = Lowered.__qualname__ = f"{kind.__name__}As{jnp.dtype(dtype).name}"
    return Lowered
