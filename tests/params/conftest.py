"""Stand-ins for families whose classes live on higher floors; tests name them by kind."""

from __future__ import annotations

from typing import ClassVar

from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.params.metrics import MetricParams


class Rows(Operator):
    """Stands for the dataset family, which lives on a higher floor."""

    family: ClassVar[str] = "dataset"


@register("test_rows")
class PlainRows(Rows):
    """`n` rows of one value; `path` says where they lie, which is no part of what they are."""

    n: int = 100
    value: float = 0.0
    path: str = "here"

    def __len__(self) -> int:
        return self.n

    def __bool__(self) -> bool:
        return True

    def content_hash(self) -> str:
        return f"{self.n} rows of {self.value}"


class Hook(Operator):
    family: ClassVar[str] = "hook"


@register("test_ema")
class Ema(Hook):
    decay: float = 0.9


@register("test_watcher")
class Watcher(Hook):
    observes: ClassVar[bool] = True


@register("test_blank_metric")
class BlankMetric(MetricParams):
    """A metric that does not say which direction is better."""
