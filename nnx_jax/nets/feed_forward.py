"""A dense network: linear layers with norm, activation and dropout between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from nnx_jax.core.errors import ModelError
from nnx_jax.nets.layers import (
    ShardingRules,
    activation,
    as_features,
    maybe_dropout,
    norm_layer,
    split_inputs,
    split_outputs,
)


class FeedForward(nnx.Module):
    """Linear layers with norm, activation and dropout between them.

    Takes x [B, ...] of any number type, flattened to [B, input_dim] (uint8 becomes [0, 1]), and returns
    [B, output_dim]. Parameters are `layers.<i>.kernel|bias`, `norms.<i>.scale|bias` and `head.kernel|bias`.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        hidden_dims: Sequence[int] = (64,),
        activation_name: str = "relu",
        dropout_prob: float = 0.0,
        norm: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = (input_dim, *hidden_dims)
        self.input_dim = input_dim
        self.activation = activation(activation_name)
        self.layers = nnx.List(
            nnx.Linear(size, hidden, rngs=rngs) for size, hidden in zip(sizes[:-1], sizes[1:], strict=True)
        )
        self.norms = nnx.List(norm_layer(norm, hidden, rngs=rngs) for hidden in sizes[1:]) if norm else None
        self.dropout = maybe_dropout(dropout_prob, rngs=rngs)
        self.head = nnx.Linear(sizes[-1], output_dim, rngs=rngs)

    def sharding_rules(self, prefix: str = "") -> ShardingRules:
        """Layers in pairs, split by outputs and then by inputs, so that each pair adds up its results once."""
        rules: ShardingRules = {}
        for index in range(len(self.layers)):
            layer, norm = f"{prefix}layers.{index}", f"{prefix}norms.{index}"
            rules |= split_inputs(layer) if index % 2 else split_outputs(layer, norm)
        return rules | (split_inputs(f"{prefix}head") if len(self.layers) % 2 else {})

    def __call__(self, x: Any, mask: jax.Array | None = None) -> jax.Array:
        """x [B, ...] -> [B, output_dim]; mask [B] leaves rows out of batch statistics.

        Raises:
            ModelError: when a row does not have `input_dim` numbers.
        """
        x = as_features(x, self.head.kernel.dtype)
        x = x.reshape(x.shape[0], -1)
        if x.shape[-1] != self.input_dim:
            raise ModelError(f"feed_forward was built for {self.input_dim} inputs a row, the batch has {x.shape[-1]}")
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.norms is not None:
                x = self.norms[index](x, mask)
            x = self.activation(x)
            if self.dropout is not None:
                x = self.dropout(x)
        return self.head(x)
