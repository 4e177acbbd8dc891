"""Built-in networks in torch: the same parameters, inputs, outputs and first distributions as the Flax ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnx_jax.core.errors import ConfigError, ModelError, nearest
from nnx_jax.params.net import ConvParams, FeedForwardParams, NNParams, TransformerLMParams
from nnx_jax.torch.layers import LayerNorm, Maker, activation, as_features, gelu, maybe_dropout, normed, same_pad

INIT_STD = 0.02  # GPT-2; layers that add to the residual stream get it divided by sqrt(2 * n_layers)


def build_net(params: NNParams, seed: int | None, *, info: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the torch module of an NNParams whose sizes are settled (`nnx_jax.nets.resolve.resolve`), on the CPU.

    Args:
        params: a spec of kind feed_forward, conv or transformer_lm, or a registered class of the user's with a method
            `build_torch(*, seed, info)` that returns a module.
        seed: of the first weights; the same seed gives the same weights, and torch's global generator stays as it is.
            None: on the `meta` device, names and shapes alone.
        info: what the dataset knows of itself, for a class of the user's.

    Returns:
        A module called with x [B, ...] that returns logits or values.

    Raises:
        ConfigError: for a kind that cannot be built.
        ModelError: for a size that is not settled.
    """
    kind = str(getattr(params, "kind", type(params).__name__))
    if kind in NETS:
        return NETS[kind](params, Maker(seed))
    own = getattr(params, "build_torch", None)
    if not callable(own):
        raise ConfigError(
            f"there is no torch net '{kind}'{nearest(kind, NETS)}; a class of your own defines build_torch(seed, info)"
        )
    module = own(seed=seed, info=info or {})
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"net '{kind}' built a {type(module).__name__}; build_torch(seed, info) returns a torch.nn.Module"
        )
    return module


class FeedForward(nn.Module):
    """Linear layers with norm, activation and dropout between them.

    Takes x [B, ...] of any number type, flattened to [B, input_dim] (uint8 becomes [0, 1]), and returns
    [B, output_dim]. Parameters are `layers.<i>.weight|bias`, `norms.<i>.weight|bias` and `head.weight|bias`.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        make: Maker,
        *,
        hidden_dims: Sequence[int] = (64,),
        activation_name: str = "relu",
        dropout_prob: float = 0.0,
        norm: str | None = None,
    ) -> None:
        super().__init__()
        sizes = (input_dim, *hidden_dims)
        self.input_dim = input_dim
        self.activation = activation(activation_name)
        self.layers = nn.ModuleList(make.linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True))
        self.norms = nn.ModuleList(make.norm(norm, size) for size in sizes[1:]) if norm else None
        self.dropout = maybe_dropout(dropout_prob)
        self.head = make.linear(sizes[-1], output_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, ...] -> [B, output_dim].

        Raises:
            ModelError: when a row does not have `input_dim` numbers.
        """
        x = as_features(x, self.head.weight.dtype)
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        if x.shape[-1] != self.input_dim:
            raise ModelError(f"feed_forward was built for {self.input_dim} inputs a row, the batch has {x.shape[-1]}")
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.norms is not None:
                x = self.norms[index](x)
            x = self.activation(x)
            if self.dropout is not None:
                x = self.dropout(x)
        return self.head(x)


class Conv(nn.Module):
    """Blocks of convolution, norm, activation and 2 x 2 max pooling, then a feed-forward head.

    Takes x [B, H, W, C] ([B, H, W] is one channel; [B, H * W * C] is reshaped; uint8 becomes [0, 1]) and returns
    [B, output_dim]. A side of one pixel is not pooled further. Between layers values stay [B, H, W, C] in memory
    (torch's channels_last), so the head sees them in the order H, W, C as the Flax net's head does. Parameters are
    `convs.<i>.weight|bias`, `norms.<i>.weight|bias` and `head.*`.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        output_dim: int,
        make: Maker,
        *,
        channels: Sequence[int] = (16, 32),
        kernel_size: int = 3,
        hidden_dims: Sequence[int] = (64,),
        activation_name: str = "relu",
        dropout_prob: float = 0.0,
        norm: str | None = None,
    ) -> None:
        super().__init__()
        height, width, depth = input_shape
        sizes = (depth, *channels)
        self.input_shape = tuple(input_shape)
        self.kernel_size = kernel_size
        self.activation = activation(activation_name)
        self.convs = nn.ModuleList(make.conv(a, b, kernel_size) for a, b in zip(sizes[:-1], sizes[1:], strict=True))
        self.norms = nn.ModuleList(make.norm(norm, size) for size in sizes[1:]) if norm else None
        for _ in channels:
            height, width = max(1, height // 2), max(1, width // 2)
        self.head = FeedForward(
            height * width * sizes[-1],
            output_dim,
            make,
            hidden_dims=hidden_dims,
            activation_name=activation_name,
            dropout_prob=dropout_prob,
            norm=norm,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, W, C] -> [B, output_dim].

        Raises:
            ModelError: when a row is not an image of `input_shape`.
        """
        x = as_features(x, self.head.head.weight.dtype)
        if tuple(x.shape[1:]) != self.input_shape:
            if x.ndim < 2 or math.prod(x.shape[1:]) != math.prod(self.input_shape):
                raise ModelError(f"conv was built for rows of {self.input_shape}, the batch has {tuple(x.shape[1:])}")
            x = x.reshape(x.shape[0], *self.input_shape)
        for index, layer in enumerate(self.convs):
            x = layer(same_pad(x.permute(0, 3, 1, 2), self.kernel_size)).permute(0, 2, 3, 1)
            if self.norms is not None:
                x = normed(self.norms[index], x)
            window = tuple(2 if side > 1 else 1 for side in x.shape[1:3])
            x = F.max_pool2d(self.activation(x).permute(0, 3, 1, 2), window, window).permute(0, 2, 3, 1)
        return self.head(x)


class TransformerLM(nn.Module):
    """Token ids x [B, T] (any integer type) -> logits [B, T, vocab_size]; position t sees ids 0..t only.

    Parameters: `embed.weight`, `positions`, `blocks.<i>.{norm_1,qkv,out,norm_2,up,down}.*`, `norm.*`, and
    `head.weight` when the output is not tied to the embedding.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        make: Maker,
        *,
        d_model: int = 128,
        n_layers: int = 2,
        n_heads: int = 4,
        mlp_ratio: float = 4,
        dropout_prob: float = 0.0,
        tie_embeddings: bool = True,
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ModelError(f"d_model {d_model} does not split into {n_heads} heads; choose a multiple of {n_heads}")
        self.context_length = context_length
        self.embed = make.embedding(vocab_size, d_model, std=INIT_STD)
        self.positions = make.parameter(context_length, d_model, std=INIT_STD)
        self.dropout = maybe_dropout(dropout_prob)
        self.blocks = nn.ModuleList(
            Block(d_model, n_heads, int(mlp_ratio * d_model), n_layers, make, dropout_prob) for _ in range(n_layers)
        )
        self.norm = LayerNorm(d_model, device=make.device)
        self.head = None if tie_embeddings else make.linear(d_model, vocab_size, bias=False, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """x int [B, T] -> [B, T, vocab_size] in the type of the weights.

        Raises:
            ModelError: for ids that are not integers, or more of them than `context_length`.
        """
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool or x.ndim != 2:
            raise ModelError(f"transformer_lm needs integer ids [batch, time], got {x.dtype} {tuple(x.shape)}")
        length = x.shape[1]
        if length > self.context_length:
            raise ModelError(f"transformer_lm has context_length {self.context_length}, the batch has {length} tokens")
        h = self.embed(x.to(torch.int64))
        h = h + self.positions[:length].to(h.dtype)
        if self.dropout is not None:
            h = self.dropout(h)
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        return F.linear(h, self.embed.weight) if self.head is None else self.head(h)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on the normed stream and added back to it."""

    def __init__(
        self, d_model: int, n_heads: int, hidden: int, n_layers: int, make: Maker, dropout_prob: float
    ) -> None:
        super().__init__()
        back = INIT_STD / math.sqrt(2 * n_layers)
        self.n_heads = n_heads
        self.norm_1 = LayerNorm(d_model, device=make.device)
        self.qkv = make.linear(d_model, 3 * d_model, std=INIT_STD)
        self.out = make.linear(d_model, d_model, std=back)
        self.norm_2 = LayerNorm(d_model, device=make.device)
        self.up = make.linear(d_model, hidden, std=INIT_STD)
        self.down = make.linear(hidden, d_model, std=back)
        self.dropout = maybe_dropout(dropout_prob)

    def forward(self, h: Tensor) -> Tensor:
        """h [B, T, d_model] -> the same shape and type."""
        h = h + self._drop(self._attend(self.norm_1(h)))
        return h + self._drop(self.down(gelu(self.up(self.norm_2(h)))))

    def _attend(self, h: Tensor) -> Tensor:
        """softmax(q k / sqrt(size)) v over positions up to one's own; the outputs of `qkv` are [3, heads, size]."""
        batch, length, width = h.shape
        parts = self.qkv(h).reshape(batch, length, 3, self.n_heads, width // self.n_heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.permute(0, 2, 1, 3).reshape(batch, length, width))

    def _drop(self, h: Tensor) -> Tensor:
        return h if self.dropout is None else self.dropout(h)


def _settled(params: NNParams, *names: str) -> tuple[Any, ...]:
    """The sizes of these names; those of a stored run, or of `resolve`, are all there."""
    open_ = [name for name in names if getattr(params, name) is None]
    if open_:
        raise ModelError(f"{params.kind} has no {' and no '.join(open_)}; write it, or take the data's with `resolve`")
    return tuple(getattr(params, name) for name in names)


def _feed_forward(params: FeedForwardParams, make: Maker) -> nn.Module:
    input_dim, output_dim = _settled(params, "input_dim", "output_dim")
    return FeedForward(
        input_dim,
        output_dim,
        make,
        hidden_dims=params.hidden_dims,
        activation_name=params.activation,
        dropout_prob=params.dropout_prob,
        norm=params.norm,
    )


def _conv(params: ConvParams, make: Maker) -> nn.Module:
    input_shape, output_dim = _settled(params, "input_shape", "output_dim")
    return Conv(
        input_shape,
        output_dim,
        make,
        channels=params.channels,
        kernel_size=params.kernel_size,
        hidden_dims=params.hidden_dims,
        activation_name=params.activation,
        dropout_prob=params.dropout_prob,
        norm=params.norm,
    )


def _transformer_lm(params: TransformerLMParams, make: Maker) -> nn.Module:
    vocab_size, context_length = _settled(params, "vocab_size", "context_length")
    return TransformerLM(
        vocab_size,
        context_length,
        make,
        d_model=params.d_model,
        n_layers=params.n_layers,
        n_heads=params.n_heads,
        mlp_ratio=params.mlp_ratio,
        dropout_prob=params.dropout_prob,
        tie_embeddings=params.tie_embeddings,
    )


NETS: dict[str, Callable[[Any, Maker], nn.Module]] = {
    "feed_forward": _feed_forward,
    "conv": _conv,
    "transformer_lm": _transformer_lm,
}
