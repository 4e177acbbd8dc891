"""A small convolutional network for images in the order height, width, channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from nnx_jax.core.errors import ModelError
from nnx_jax.nets.feed_forward import FeedForward
from nnx_jax.nets.layers import ShardingRules, activation, as_features, norm_layer, split_inputs, split_outputs


class Conv(nnx.Module):
    """Blocks of convolution, norm, activation and 2 x 2 max pooling, then a feed-forward head.

    Takes x [B, H, W, C] ([B, H, W] is one channel; [B, H * W * C] is reshaped; uint8 becomes [0, 1]) and returns
    [B, output_dim]. A side of one pixel is not pooled further. Parameters are `convs.<i>.kernel|bias`,
    `norms.<i>.scale|bias` and `head.*`.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        output_dim: int,
        *,
        channels: Sequence[int] = (16, 32),
        kernel_size: int = 3,
        hidden_dims: Sequence[int] = (64,),
        activation_name: str = "relu",
        dropout_prob: float = 0.0,
        norm: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        height, width, depth = input_shape
        sizes = (depth, *channels)
        self.input_shape = tuple(input_shape)
        self.activation = activation(activation_name)
        self.convs = nnx.List(
            nnx.Conv(size, out, (kernel_size, kernel_size), rngs=rngs)
            for size, out in zip(sizes[:-1], sizes[1:], strict=True)
        )
        self.norms = nnx.List(norm_layer(norm, out, rngs=rngs) for out in sizes[1:]) if norm else None
        for _ in channels:
            height, width = max(1, height // 2), max(1, width // 2)
        self.head = FeedForward(
            height * width * sizes[-1],
            output_dim,
            hidden_dims=hidden_dims,
            activation_name=activation_name,
            dropout_prob=dropout_prob,
            norm=norm,
            rngs=rngs,
        )

    def sharding_rules(self) -> ShardingRules:
        """Convolutions in pairs, split by outputs and then by inputs; the head as a feed-forward network."""
        rules: ShardingRules = {}
        for index in range(len(self.convs)):
            layer, norm = f"convs.{index}", f"norms.{index}"
            rules |= split_inputs(layer, 4) if index % 2 else split_outputs(layer, norm, 4)
        return rules | self.head.sharding_rules("head.")

    def __call__(self, x: Any, mask: jax.Array | None = None) -> jax.Array:
        """x [B, H, W, C] -> [B, output_dim]; mask [B] leaves rows out of batch statistics.

        Raises:
            ModelError: when a row is not an image of `input_shape`.
        """
        x = as_features(x, self.head.head.kernel.dtype)
        wanted = (x.shape[0], *self.input_shape)
        if x.shape != wanted:
            if x.ndim > 1 and x.size == x.shape[0] * self.input_shape[0] * self.input_shape[1] * self.input_shape[2]:
                x = x.reshape(wanted)
            else:
                raise ModelError(f"conv was built for rows of {self.input_shape}, the batch has {x.shape[1:]}")
        for index, layer in enumerate(self.convs):
            x = layer(x)
            if self.norms is not None:
                x = self.norms[index](x, mask)
            window = tuple(2 if side > 1 else 1 for side in x.shape[1:3])
            x = nnx.max_pool(self.activation(x), window, strides=window)
        return self.head(x, mask)
