"""Batches inside a program: rows gathered from columns that live on the device, or taken from a stacked host block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import StepError

Batch = Mapping[str, Any]

LOST = -1.0
"""Mask of the rows that a process could not read: no mask is negative, and the step halts at it on every process."""


def gather(columns: Batch, rows: jax.Array) -> dict[str, jax.Array]:
    """One batch from device columns.

    Args:
        columns: arrays [n, ...] by name.
        rows: int32 [B], row numbers; -1 is padding.

    Returns:
        The columns' rows [B, ...] (padding is a copy of row 0, as in host batches), and "mask" float32 [B], 1 for real
        rows.
    """
    index = jnp.maximum(rows, 0)
    picked = {name: jnp.take(column, index, axis=0, mode="clip") for name, column in columns.items()}
    return {**picked, "mask": (rows >= 0).astype(jnp.float32)}


def take(block: Batch, row: Any) -> dict[str, jax.Array]:
    """Batch number `row` of a stacked block."""
    return {name: jax.lax.dynamic_index_in_dim(part, row, keepdims=False) for name, part in block.items()}


def stack_batches(batches: Sequence[Batch], capacity: int) -> dict[str, np.ndarray]:
    """Stack host batches into one block of `capacity` places; the places beyond the last batch are never read.

    The block is new memory each time: a CPU program may read the host's buffer in place while it runs.

    Raises:
        StepError: no batch, more than `capacity`, or batches of different shapes.
    """
    if not 0 < len(batches) <= capacity:
        raise StepError(f"a block holds 1 to {capacity} batches, got {len(batches)}; hand over fewer at a time")
    block = {}
    for name, first in batches[0].items():
        first = np.asarray(first)
        out = np.empty((capacity, *first.shape), first.dtype)
        for place, batch in enumerate(batches):
            part = np.asarray(batch[name])
            if part.shape != first.shape or part.dtype != first.dtype:
                raise StepError(
                    f"batch {place} has {name!r} {part.dtype}{list(part.shape)}, the first {first.dtype}"
                    f"{list(first.shape)}; pad batches to one shape"
                )
            out[place] = part
        block[name] = out
    return block


def place_columns(columns: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Copies of a dataset's columns on the default device, for `gather`."""
    return {name: jnp.array(column, copy=True) for name, column in columns.items()}


def place_table(order: Any) -> jax.Array:
    """An epoch's index table int32 [batches, B] on the device; -1 is padding."""
    return jnp.array(order, dtype=jnp.int32, copy=True)
