"""Equinox's BatchNorm with padded rows left out of its statistics."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nnx_jax.core.errors import ModelError
from nnx_jax.engines.equinox_net import load_equinox


def with_rows(module: Any, rows: jax.Array | None) -> Any:
    """Return the module with every `equinox.nn.BatchNorm` computing in float32 at least, without masked rows.

    Args:
        rows: float32 [B], 0 on the rows to leave out; None: every row counts.
    """
    kind = load_equinox().nn.BatchNorm
    swap = lambda part: _swapped(part, rows) if type(part) is kind else part  # noqa: E731
    return jax.tree.map(swap, module, is_leaf=lambda part: type(part) is kind)


def _swapped(norm: Any, rows: jax.Array | None) -> Any:
    made = object.__new__(_row_norm())
    for name, value in vars(norm).items():
        object.__setattr__(made, name, value)
    object.__setattr__(made, "rows", rows)
    return made


@cache
def _row_norm() -> type:
    """The class, made once Equinox is needed."""
    eqx = load_equinox()

    class RowBatchNorm(eqx.nn.BatchNorm):
        """As `equinox.nn.BatchNorm`, whose rules these are; `rows` is a leaf, so that it goes wherever the layer goes.

        Equinox takes the mean over the axis of rows with `pmean`; here it is a sum over the rows that count, divided by
        their number. A batch without such a row leaves the running statistics as they are.
        """

        rows: Any

        def __call__(self, x: Any, state: Any, *, key: Any = None, inference: bool | None = None) -> tuple[Any, Any]:
            inference = self.inference if inference is None else inference
            low = x.dtype in (jnp.bfloat16, jnp.float16)
            wide = x.astype(jnp.float32) if low else x
            if inference or self.rows is None:
                out, state = super().__call__(wide, state, inference=inference)
            else:
                out, state = self._train(wide, state)
            return (out.astype(x.dtype) if low else out), state

        def _train(self, x: Any, state: Any) -> tuple[Any, Any]:
            some, mean, var = self._statistics(x)
            index = self.ema_state_index if self.mode == "ema" else self.batch_state_index
            old, decay = state.get(index), self.momentum
            if self.mode == "ema":
                first = state.get(self.ema_first_time_index)
                mean = jnp.where(first, mean, (1 - decay) * mean + decay * old[0])
                var = jnp.where(first, var, (1 - decay) * var + decay * old[1])
                new, (counted, count) = (mean, var), (self.ema_first_time_index, first & ~some)
            else:
                new = (old[0] * decay + mean * (1 - decay), old[1] * decay + var * (1 - decay))
                counted, count = self.batch_counter, state.get(self.batch_counter) + some
            state = state.set(index, tuple(jnp.where(some, b, a) for a, b in zip(old, new, strict=True)))
            state = state.set(counted, count)
            shape = (-1,) + (1,) * (x.ndim - 1)
            out = (x - mean.reshape(shape)) / jnp.sqrt(var.reshape(shape) + self.eps)
            if self.channelwise_affine:
                out = out * self.weight.reshape(shape) + self.bias.reshape(shape)
            return out, state

        def _statistics(self, x: Any) -> tuple[Any, Any, Any]:
            """(whether a row counts, mean [C], variance [C]) over the rows that count; over all where none does."""
            size = lax.psum(1, self.axis_name)
            if size != self.rows.shape[0]:
                raise ModelError(
                    f"BatchNorm sees {size} rows along {self.axis_name!r} but the batch has {self.rows.shape[0]}, so "
                    "padded rows cannot be left out; use data.tail: drop, or map over the rows of the batch"
                )
            some = jnp.any(self.rows > 0)
            counts = (self.rows[lax.axis_index(self.axis_name)] > 0) | ~some
            number = lax.psum(counts.astype(x.dtype), self.axis_name)
            inner = tuple(range(1, x.ndim))
            over = lambda value: lax.psum(jnp.where(counts, jnp.mean(value, inner), 0), self.axis_name) / number  # noqa: E731
            mean = over(x)
            off = x - mean.reshape((-1,) + (1,) * (x.ndim - 1))
            return some, mean, jnp.maximum(0.0, over(off * jnp.conj(off)))

    return RowBatchNorm
