"""Small pieces every built-in network shares: input types, activations by name, norms in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_jax.core.errors import ConfigError, nearest

Activation = Callable[[jax.Array], jax.Array]

ACTIVATIONS: dict[str, Activation] = {
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "identity": lambda x: x,
}


def activation(name: str) -> Activation:
    """The activation of a name.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"there is no activation '{name}'{nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def as_features(x: Any, dtype: Any) -> jax.Array:
    """Input of a network that computes: uint8 (images) becomes float in [0, 1], everything else float as it is.

    Args:
        dtype: the type of the network's weights, so that 16-bit weights see 16-bit input.
    """
    x = jnp.asarray(x)
    if x.dtype == jnp.uint8:
        return (x.astype(jnp.promote_types(jnp.float32, dtype)) / 255.0).astype(dtype)
    return x.astype(dtype)


class BatchNorm(nnx.BatchNorm):
    """Batch norm that leaves out rows whose mask is 0, so that padding moves nothing.

    Statistics and scaling are float32, the result has the input's type. Running statistics keep 0.9 of the old value
    each microbatch (torch's momentum 0.1); a microbatch without a single real row leaves them as they are.
    """

    def __init__(self, size: int, *, rngs: nnx.Rngs) -> None:
        super().__init__(size, momentum=0.9, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:  # type: ignore[override]
        """x [B, ..., size] -> the same shape and type; mask [B]."""
        if mask is None:
            return super().__call__(x).astype(x.dtype)
        real = mask > 0
        some = jnp.any(real)
        old = self.mean[...], self.var[...]
        rows = (real | ~some).reshape((-1,) + (1,) * (x.ndim - 1))
        y = super().__call__(x, mask=rows).astype(x.dtype)
        if not self.use_running_average:
            self.mean[...] = jnp.where(some, self.mean[...], old[0])
            self.var[...] = jnp.where(some, self.var[...], old[1])
        return y


class LayerNorm(nnx.LayerNorm):
    """Layer norm with float32 statistics and scaling; the result has the input's type."""

    def __init__(self, size: int, *, rngs: nnx.Rngs) -> None:
        super().__init__(size, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:  # type: ignore[override]
        """x [B, ..., size] -> the same shape and type; the mask is not needed."""
        return super().__call__(x).astype(x.dtype)


NORMS: dict[str, Callable[..., nnx.Module]] = {"batch": BatchNorm, "layer": LayerNorm}


def norm_layer(kind: str, size: int, *, rngs: nnx.Rngs) -> Any:
    """A norm by name, called with (x, mask).

    Raises:
        ConfigError: for an unknown name.
    """
    if kind not in NORMS:
        raise ConfigError(f"there is no norm '{kind}'{nearest(kind, NORMS)}")
    return NORMS[kind](size, rngs=rngs)


ShardingRules = dict[str, tuple[str | None, ...]]
"""Patterns of parameter paths to what splits each dimension, by the name of a mesh's axis."""


def split_outputs(layer: str, norm: str, dims: int = 2) -> ShardingRules:
    """Each device computes its own share of a layer's outputs, from all of its inputs."""
    return {
        f"{layer}.kernel": (*[None] * (dims - 1), "tensor"),
        f"{layer}.bias": ("tensor",),
        f"{norm}.scale": ("tensor",),
        f"{norm}.bias": ("tensor",),
    }


def split_inputs(layer: str, dims: int = 2) -> ShardingRules:
    """Each device computes its own share of every sum over a layer's inputs; the shares are then added."""
    return {f"{layer}.kernel": (*[None] * (dims - 2), "tensor", None)}


def maybe_dropout(rate: float, *, rngs: nnx.Rngs) -> nnx.Dropout | None:
    """A dropout layer, or none at all at rate 0, so that such a network carries no random state."""
    return nnx.Dropout(rate, rngs=rngs) if rate > 0 else None
