"""Metric sums that stay exact over millions of rows although the device adds in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def zero_sums(size: int) -> jax.Array:
    """An empty running sum: float32 [2, size], the rounded sum and what rounding left over."""
    return jnp.zeros((2, size), jnp.float32)


def add_sums(total: jax.Array, update: jax.Array) -> jax.Array:
    """Add one batch's sums (float32 [size]) to a running sum without losing the rounding error (Knuth's two-sum).

    A plain float32 count stops at 2**24 = 16777216; this one is exact to 2**47.
    """
    high, low = total[0], total[1]
    added = high + update
    other = added - high
    error = (high - (added - other)) + (update - other)
    return jnp.stack([added, low + error])


def read_sums(total: np.ndarray | jax.Array) -> np.ndarray:
    """The value of a running sum on the host: float64 [size]."""
    both = np.asarray(total, np.float64)
    return both[0] + both[1]
