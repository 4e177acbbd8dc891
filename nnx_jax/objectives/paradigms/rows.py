"""What objectives that draw or pair rows have in common: noise by row, which rows are real, settings in range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.core.precision import widened


def row_keys(key: jax.Array, n_rows: int) -> jax.Array:
    """One key for each row [n_rows], which does not depend on how many rows there are: padding changes no draw."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(n_rows, dtype=jnp.uint32))


def column(batch: Mapping[str, Any], name: str, who: str) -> jax.Array:
    """One column of the batch.

    Raises:
        DataError: there is none of that name.
    """
    if name not in batch:
        raise DataError(f"{who} needs column '{name}'; the batch has {', '.join(sorted(batch))}")
    return batch[name]


def floats(x: jax.Array, who: str) -> jax.Array:
    """`x` in float32, or in float64 as it is.

    Raises:
        DataError: it holds whole numbers, which noise cannot be added to.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise DataError(f"{who} computes with real numbers, but column 'x' is {x.dtype}; scale it to floats first")
    return widened(x)


def positive(value: float, name: str, who: str) -> float:
    """`value` as a float.

    Raises:
        ConfigError: it is not a finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise ConfigError(f"{who}: {name} is {value!r}; give a number above 0")
    return float(value)
