"""Modules of one's own, with BatchNorm, dropout and whole-number weights; streams of ten rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax.data.iterable import IterableDataset
from nnx_jax.engines.operators import NNXModelOp


class Net(nnx.Module):
    """An MLP of one hidden layer; where asked for with dropout, BatchNorm, a table of numbers and a bfloat16 scale."""

    def __init__(
        self, seed: int = 0, dropout: float = 0.0, norm: bool = False, odd: bool = False, width: int = 16
    ) -> None:
        rngs = nnx.Rngs(seed)
        self.first, self.last = nnx.Linear(1, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs) if norm else None
        self.table = nnx.Variable(jnp.arange(3)) if odd else None
        self.scale = nnx.Param(jnp.ones((), jnp.bfloat16)) if odd else None

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nnx.relu(self.first(x))
        if self.norm is not None:
            hidden = self.norm(hidden)
        out = self.last(self.dropout(hidden))
        return out if self.scale is None else out * self.scale[...].astype(out.dtype)


def own(seed: int = 0, **options: Any) -> NNXModelOp:
    """A module of the user's own as an operator."""
    return NNXModelOp(Net(seed, **options))


def same(left: Any, right: Any) -> bool:
    """Whether two operators have equal weights, bit for bit."""
    mine, theirs = left.arrays(), right.arrays()
    return set(mine) == set(theirs) and all(np.array_equal(mine[name], theirs[name]) for name in mine)


def ten(log: list[int] | None = None, rows: int = 10, buffer: int = 0) -> IterableDataset:
    """A stream of ten rows that can be read again, and writes down what was read."""

    def source() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for row in range(rows):
            if log is not None:
                log.append(row)
            yield np.float32([row / rows]), np.float32([2 * row / rows + 1])

    return IterableDataset(source=source, data_id=f"{rows} rows", shuffle_buffer=buffer)
