"""Which metrics a model is judged by, under which name, and which direction is better."""

from __future__ import annotations

from typing import ClassVar, Literal

from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.params.fields import Count, Name

RESERVED = ("loss", "error")
"""Names that the trainer records itself."""


class MetricParams(Operator):
    """Family `metric`. A metric of your own: register a subclass, and set `mode` if a monitor shall follow it."""

    family: ClassVar[str] = "metric"
    mode: ClassVar[Literal["min", "max"] | None] = None

    name: Name | None = None
    """Name in records and monitors; none: made from the kind and its options."""

    @property
    def key(self) -> str:
        """The name under which the value is recorded."""
        return self.name or self._default_key()

    def _default_key(self) -> str:
        return getattr(self, "kind", "") or type(self).__name__


@register("accuracy")
class AccuracyParams(MetricParams):
    """Share of rows whose most likely class is the label."""

    mode = "max"


@register("top_k")
class TopKParams(MetricParams):
    """Share of rows whose label is among the k most likely classes; recorded as `top_<k>`."""

    mode = "max"

    k: Count = 5
    """How many classes may hold the label."""

    def _default_key(self) -> str:
        return f"top_{self.k}"


class _AveragedParams(MetricParams):
    """What precision, recall and F1 share."""

    mode = "max"

    average: Literal["macro", "micro"] = "macro"
    """macro: mean over classes; micro: over all rows (recorded as `<kind>_micro`)."""
    zero_division: Literal[0, 1] = 0
    """Value for a class without any row to divide by."""

    def _default_key(self) -> str:
        return super()._default_key() + ("_micro" if self.average == "micro" else "")


@register("precision")
class PrecisionParams(_AveragedParams):
    """Of the rows given a class, the share that has it."""


@register("recall")
class RecallParams(_AveragedParams):
    """Of the rows that have a class, the share given it."""


@register("f1")
class F1Params(_AveragedParams):
    """Harmonic mean of precision and recall."""


@register("nll")
class NLLParams(MetricParams):
    """Mean negative log-likelihood of the labels, in nats."""

    mode = "min"


@register("brier")
class BrierParams(MetricParams):
    """Mean squared distance between probabilities and the label's one-hot vector, summed over classes."""

    mode = "min"


@register("mse")
class MSEMetricParams(MetricParams):
    """Mean squared error over all outputs."""

    mode = "min"


@register("mae")
class MAEMetricParams(MetricParams):
    """Mean absolute error over all outputs."""

    mode = "min"


@register("perplexity")
class PerplexityParams(MetricParams):
    """exp of the mean negative log-likelihood per token."""

    mode = "min"
