"""Which loss a model is trained with; the arithmetic lives in `objectives`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.params.fields import NonNegative, Positive

Smoothing = Annotated[float, Field(ge=0, le=1)]
Label = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]


class LossParams(Operator):
    """Family `loss`. A loss of your own: register a subclass and define `__call__(outputs, batch)` in it."""

    family: ClassVar[str] = "loss"


@register("cross_entropy")
class CrossEntropyParams(LossParams):
    """Softmax cross entropy for integer labels; outputs [..., C], labels [...]."""

    label_smoothing: Smoothing = 0.0
    """Share of the target spread evenly over all classes."""
    ignore_index: Label | None = -100
    """Label of rows or tokens that do not count; none: every label counts."""
    class_weights: Annotated[tuple[NonNegative, ...], Field(min_length=1)] | None = None
    """One weight per class; none: all 1."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Some class must count."""
        yield from super().problems()
        if self.class_weights is not None and not any(self.class_weights):
            yield "class_weights", "all weights are 0, so no row would count; write at least one above 0"


@register("binary_cross_entropy")
class BinaryCrossEntropyParams(LossParams):
    """Sigmoid cross entropy from logits; targets in [0, 1], of the outputs' shape."""


@register("mse")
class MSEParams(LossParams):
    """Mean squared error over all outputs."""


@register("mae")
class MAEParams(LossParams):
    """Mean absolute error over all outputs."""


@register("huber")
class HuberParams(LossParams):
    """Squared error near 0, absolute error beyond `delta`."""

    delta: Positive = 1.0
    """Where the two halves meet, in units of the target."""
