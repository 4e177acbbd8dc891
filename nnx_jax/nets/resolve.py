"""A net's configuration with every size filled in from the data, so that a stored run can rebuild its net alone."""

from __future__ import annotations

from nnx_jax.nets import sizes
from nnx_jax.nets.sizes import Info, settle
from nnx_jax.params.net import ConvParams, FeedForwardParams, NNParams, TransformerLMParams


def resolve(params: NNParams, info: Info) -> NNParams:
    """Return the same configuration with no size left open; nets of the user's own are returned as they are.

    Raises:
        ModelError: configuration and data disagree, or neither gives a size.
    """
    match params:
        case FeedForwardParams():
            return params.replace(
                input_dim=settle("input_dim", params.input_dim, sizes.input_dim(info), net="feed_forward"),
                output_dim=settle("output_dim", params.output_dim, sizes.output_dim(info), net="feed_forward"),
            )
        case ConvParams():
            return params.replace(
                input_shape=sizes.image_shape(params.input_shape, info),
                output_dim=settle("output_dim", params.output_dim, sizes.output_dim(info), net="conv"),
            )
        case TransformerLMParams():
            vocabulary = info.get("vocab_size", info.get("n_classes"))
            context = settle("context_length", params.context_length, info.get("context_length"), net="transformer_lm")
            size = settle("vocab_size", params.vocab_size, vocabulary, net="transformer_lm")
            return params.replace(vocab_size=size, context_length=context)
    return params
