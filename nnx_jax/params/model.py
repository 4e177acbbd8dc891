"""A model is a network, the loss it is trained with, the metrics it is judged by, and its number format."""

from __future__ import annotations

from collections.abc import Iterator

from nnx_jax.core.spec import Spec
from nnx_jax.params.fields import Precision, Text
from nnx_jax.params.losses import CrossEntropyParams, LossParams
from nnx_jax.params.metrics import RESERVED, MetricParams
from nnx_jax.params.net import NNParams


class NNModelParams(Spec):
    """What is trained."""

    net: NNParams | None = None
    """The network; none when a module is given from Python."""
    loss: LossParams = CrossEntropyParams()
    """The loss: a kind, or a mapping with its options."""
    metrics: tuple[MetricParams, ...] = ()
    """The metrics: kinds, or mappings with their options."""
    precision: Precision = "float32"
    """Number format of the forward and backward pass; weights and sums are float32; with `float64` they are float64
    too, for which a program of your own switches on JAX_ENABLE_X64."""

    freeze: tuple[Text, ...] = ()
    """Glob patterns of parameters that are not trained, such as `layers.0.*`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Metric names are unique and free."""
        yield from super().problems()
        yield from metric_name_problems([metric.key for metric in self.metrics])


def metric_name_problems(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield a problem for every name that is reserved or given twice."""
    for index, name in enumerate(names):
        if name in RESERVED:
            yield f"metrics[{index}]", f"'{name}' is recorded by the trainer itself; give the metric another `name`"
        elif name in names[:index]:
            yield f"metrics[{index}]", f"the name '{name}' is given twice; drop one, or give it another `name`"
