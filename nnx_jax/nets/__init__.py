"""Built-in networks, Flax NNX: perceptron, small image network, decoder-only language model."""

from nnx_jax.nets.build import NETS, build_net
from nnx_jax.nets.conv import Conv
from nnx_jax.nets.feed_forward import FeedForward
from nnx_jax.nets.layers import ACTIVATIONS, activation
from nnx_jax.nets.transformer import TransformerLM

__all__ = ["ACTIVATIONS", "NETS", "Conv", "FeedForward", "TransformerLM", "activation", "build_net"]
