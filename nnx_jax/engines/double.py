"""float64: what it asks of the process and of a model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError, ModelError


def check_enabled(precision: Any) -> None:
    """Refuse float64 where JAX would silently make float32 of it.

    Raises:
        ConfigError: precision is float64, and 64-bit numbers are off.
    """
    if jnp.dtype(precision) == jnp.float64 and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            "got 'float64', but JAX makes float32 of it unless told otherwise; set JAX_ENABLE_X64=1 before Python "
            'starts, or call jax.config.update("jax_enable_x64", True) before any array is made',
            path="precision",
        )


def check_parameters(params: Mapping[str, Any], precision: Any) -> None:
    """Refuse to train float64 parameters in less: their gradients and moments would be float32.

    Raises:
        ModelError: a parameter is float64 and precision is not.
    """
    if jnp.dtype(precision) == jnp.float64:
        return
    for name, value in params.items():
        if value.dtype == jnp.float64:
            raise ModelError(
                f"parameter '{name}' is float64, but precision is '{jnp.dtype(precision).name}'; write "
                "precision: float64, or make the parameters float32 (param_dtype, or arrays with a dtype of their own)"
            )


def widened(named: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays, or shapes of arrays, with every real one in float64."""
    return {name: _wide(value) for name, value in named.items()}


def _wide(value: Any) -> Any:
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.update(dtype=jnp.float64)
    return value.astype(jnp.float64)
