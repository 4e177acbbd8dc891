"""From a net's configuration and the data's sizes to a Flax NNX module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError, nearest
from nnx_jax.nets import sizes
from nnx_jax.nets.conv import Conv
from nnx_jax.nets.feed_forward import FeedForward
from nnx_jax.nets.sizes import Info, settle
from nnx_jax.nets.transformer import TransformerLM
from nnx_jax.params.net import ConvParams, FeedForwardParams, NNParams, TransformerLMParams


def build_net(params: NNParams, *, rngs: nnx.Rngs, info: Info | None = None) -> nnx.Module:
    """Build the module of an NNParams; input and output sizes left out are taken from the data.

    Args:
        params: a spec of kind feed_forward, conv or transformer_lm, or a registered class of the user's with a method
            `build(*, rngs, info)` that returns a module.
        rngs: streams `params` (weights) and, with dropout, `dropout`.
        info: what the dataset knows of itself: input_dim or input_shape, n_classes or output_dim, vocab_size,
            context_length.

    Returns:
        A module called with x [B, ...] that returns logits or values.

    Raises:
        ConfigError: for a kind that cannot be built.
        ModelError: when configuration and data disagree, or neither gives a size.
    """
    kind = str(getattr(params, "kind", type(params).__name__))
    if kind in NETS:
        return NETS[kind](params, rngs, info or {})
    own = getattr(params, "build", None)
    if not callable(own):
        raise ConfigError(
            f"there is no net '{kind}'{nearest(kind, NETS)}; a class of your own defines build(rngs, info)"
        )
    module = own(rngs=rngs, info=info or {})
    if not isinstance(module, nnx.Module):
        raise ModelError(f"net '{kind}' built a {type(module).__name__}; build(rngs, info) returns a flax.nnx.Module")
    return module


def _feed_forward(params: FeedForwardParams, rngs: nnx.Rngs, info: Info) -> nnx.Module:
    return FeedForward(
        settle("input_dim", params.input_dim, sizes.input_dim(info), net="feed_forward"),
        settle("output_dim", params.output_dim, sizes.output_dim(info), net="feed_forward"),
        hidden_dims=params.hidden_dims,
        activation_name=params.activation,
        dropout_prob=params.dropout_prob,
        norm=params.norm,
        rngs=rngs,
    )


def _conv(params: ConvParams, rngs: nnx.Rngs, info: Info) -> nnx.Module:
    return Conv(
        sizes.image_shape(params.input_shape, info),
        settle("output_dim", params.output_dim, sizes.output_dim(info), net="conv"),
        channels=params.channels,
        kernel_size=params.kernel_size,
        hidden_dims=params.hidden_dims,
        activation_name=params.activation,
        dropout_prob=params.dropout_prob,
        norm=params.norm,
        rngs=rngs,
    )


def _transformer_lm(params: TransformerLMParams, rngs: nnx.Rngs, info: Info) -> nnx.Module:
    vocabulary = info.get("vocab_size", info.get("n_classes"))
    return TransformerLM(
        settle("vocab_size", params.vocab_size, vocabulary, net="transformer_lm"),
        settle("context_length", params.context_length, info.get("context_length"), net="transformer_lm"),
        d_model=params.d_model,
        n_layers=params.n_layers,
        n_heads=params.n_heads,
        mlp_ratio=params.mlp_ratio,
        dropout_prob=params.dropout_prob,
        tie_embeddings=params.tie_embeddings,
        rngs=rngs,
    )


NETS: dict[str, Callable[[Any, nnx.Rngs, Info], nnx.Module]] = {
    "feed_forward": _feed_forward,
    "conv": _conv,
    "transformer_lm": _transformer_lm,
}
