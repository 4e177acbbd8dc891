"""The shape of a network: one class per built-in kind; sizes left out are taken from the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field

from nnx_jax.core.registry import register
from nnx_jax.core.spec import Spec
from nnx_jax.params.builders import Builder
from nnx_jax.params.fields import Activation, Fraction, Norm, Size


class NNParams(Spec):
    """Family `net`: what a network looks like. `NNParams(kind="feed_forward", ...)` builds the member of that kind."""

    family: ClassVar[str] = "net"
    also_called: ClassVar[Mapping[str, str]] = {"dropout": "dropout_prob", "hidden": "hidden_dims"}

    @classmethod
    def builder(cls) -> NetBuilder:
        """Return an empty builder."""
        return NetBuilder()


@register("feed_forward")
class FeedForwardParams(NNParams):
    """Dense layers; inputs of any shape are flattened to [B, input_dim], the outputs are [B, output_dim]."""

    input_dim: Size | None = None
    """Number of input values per row; none: from the data."""
    output_dim: Size | None = None
    """Number of outputs per row; none: from the data."""
    hidden_dims: tuple[Size, ...] = (64,)
    """Widths of the hidden layers."""
    activation: Activation = "relu"
    """Function after every hidden layer."""
    dropout_prob: Fraction = 0.0
    """Probability of dropping a hidden value while training."""
    norm: Norm | None = None
    """Normalisation before every activation."""


@register("conv")
class ConvParams(NNParams):
    """Convolution blocks, then dense layers; inputs [B, H, W, C], outputs [B, output_dim]."""

    input_shape: tuple[Size, Size, Size] | None = None
    """(height, width, channels) of one row; none: from the data."""
    output_dim: Size | None = None
    """Number of outputs per row; none: from the data."""
    channels: Annotated[tuple[Size, ...], Field(min_length=1)] = (16, 32)
    """Output channels of each convolution block."""
    kernel_size: Size = 3
    """Side of the square kernels."""
    hidden_dims: tuple[Size, ...] = (64,)
    """Widths of the dense layers after the convolutions."""
    activation: Activation = "relu"
    """Function after every hidden layer."""
    dropout_prob: Fraction = 0.0
    """Probability of dropping a hidden value while training."""
    norm: Norm | None = None
    """Normalisation before every activation."""


@register("transformer_lm")
class TransformerLMParams(NNParams):
    """A decoder-only language model; inputs are tokens [B, T], outputs logits [B, T, vocab_size]."""

    vocab_size: Size | None = None
    """Number of tokens; none: from the data."""
    context_length: Size | None = None
    """Longest input in tokens; none: from the data."""
    d_model: Size = 128
    """Width of the residual stream."""
    n_layers: Size = 2
    """Number of blocks."""
    n_heads: Size = 4
    """Attention heads; divides d_model."""
    mlp_ratio: Size = 4
    """Width of the feed-forward part in units of d_model."""
    dropout_prob: Fraction = 0.0
    """Probability of dropping a value while training."""
    tie_embeddings: bool = True
    """Whether the output layer is the transposed embedding table."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """The heads share d_model evenly."""
        yield from super().problems()
        if self.d_model % self.n_heads:
            yield "n_heads", f"got {self.n_heads}, which does not divide d_model={self.d_model}"


class NetBuilder(Builder[NNParams]):
    """Builds network shapes."""

    target = NNParams
    variants = ("feed_forward", "conv", "transformer_lm")
    modifiers = ("dropout_prob",)

    def feed_forward(
        self,
        *,
        input_dim: int | None = None,
        output_dim: int | None = None,
        hidden_dims: Sequence[int] | None = None,
        activation: str | None = None,
        norm: str | None = None,
    ) -> Self:
        """Choose dense layers."""
        return self._choose(
            "feed_forward",
            input_dim=input_dim,
            output_dim=output_dim,
            hidden_dims=hidden_dims,
            activation=activation,
            norm=norm,
        )

    def conv(
        self,
        *,
        input_shape: Sequence[int] | None = None,
        output_dim: int | None = None,
        channels: Sequence[int] | None = None,
        kernel_size: int | None = None,
        hidden_dims: Sequence[int] | None = None,
        activation: str | None = None,
        norm: str | None = None,
    ) -> Self:
        """Choose convolution blocks."""
        return self._choose(
            "conv",
            input_shape=input_shape,
            output_dim=output_dim,
            channels=channels,
            kernel_size=kernel_size,
            hidden_dims=hidden_dims,
            activation=activation,
            norm=norm,
        )

    def transformer_lm(
        self,
        *,
        vocab_size: int | None = None,
        context_length: int | None = None,
        d_model: int | None = None,
        n_layers: int | None = None,
        n_heads: int | None = None,
        mlp_ratio: int | None = None,
        tie_embeddings: bool | None = None,
    ) -> Self:
        """Choose a decoder-only language model."""
        return self._choose(
            "transformer_lm",
            vocab_size=vocab_size,
            context_length=context_length,
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            mlp_ratio=mlp_ratio,
            tie_embeddings=tie_embeddings,
        )

    def dropout_prob(self, probability: float) -> Self:
        """Set the dropout of whichever network is built."""
        return self._modify(dropout_prob=probability)
