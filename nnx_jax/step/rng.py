"""Random streams: one key for each purpose and microbatch, never dependent on who looked when."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

DROPOUT = 2
"""Dropout and every other noise of the training forward pass."""
EVALUATION = 3
"""The key an evaluation forward pass gets; the same for every batch, so scoring twice gives the same numbers."""
HOOKS = 4
"""What update hooks draw."""
OWN_STEP = 5
"""What a step of the user's own draws."""

_IMPL = "threefry2x32"


def run_key(seed: int) -> np.ndarray:
    """Key data of a run, uint32 [2], from any integer seed (taken modulo 2**64)."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def stream_key(key_data: Any, purpose: int, count: Any = 0) -> jax.Array:
    """Typed key of one purpose at one microbatch: `fold_in(fold_in(run key, purpose), count)`.

    Args:
        key_data: uint32 [2], see `run_key`.
        purpose: one of the constants of this module.
        count: int32 scalar, the number of microbatches before this one.
    """
    key = jax.random.wrap_key_data(jax.numpy.asarray(key_data, jax.numpy.uint32), impl=_IMPL)
    return jax.random.fold_in(jax.random.fold_in(key, purpose), count)
