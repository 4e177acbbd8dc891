"""Metrics of torch outputs: added up on the device without a gradient, divided once on the host by the same code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nnx_jax.core.errors import ConfigError
from nnx_jax.objectives import metrics as host
from nnx_jax.objectives.metrics import METRIC_MODES, Metric, metric_mode
from nnx_jax.objectives.targets import Batch
from nnx_jax.params.metrics import MetricParams
from nnx_jax.torch import sums
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.targets import widened

__all__ = ["METRIC_MODES", "Metric", "build_metric", "metric_mode", "user_metric"]


def build_metric(spec: Any, n_outputs: int, *, loss: Any = "cross_entropy") -> Metric:
    """Build the metric of a MetricParams spec or of a kind's name: see `objectives.metrics.build_metric`.

    Its `update(outputs, batch)` takes torch tensors and gives float32 [size] (float64 for float64 outputs) on their
    device. A metric of the user's, a MetricParams subclass or a registration, computes with torch.

    Raises:
        ConfigError: for an unknown kind, or one that makes no sense for the loss.
    """
    plain = isinstance(spec, str) or type(spec).__module__ == MetricParams.__module__
    return _without_gradient(host.built_metric(spec, n_outputs, build_loss(loss), sums), plain=plain)


def user_metric(name: str, fn: Callable[[Any, Batch], Any]) -> Metric:
    """Wrap a function of the user's: `(outputs, batch) -> [B]` values, one a row; the metric is their mean.

    Raises:
        ConfigError: for a function that is not called so; when it is called, for a result without one value a row.
    """
    return _without_gradient(host.user_metric(name, fn, sums))


def _without_gradient(metric: Metric, *, plain: bool = False) -> Metric:
    """The metric with its sums checked; `plain`: it computes with outputs and targets alone, whose gradients are off
    already where the outputs are detached."""

    def update(outputs: Any, batch: Batch) -> Tensor:
        if torch.is_grad_enabled() and not (plain and isinstance(outputs, Tensor) and not outputs.requires_grad):
            with torch.no_grad():
                return update(outputs, batch)
        found = metric.update(outputs, batch)
        found = widened(found if isinstance(found, Tensor) else torch.as_tensor(found))
        if tuple(found.shape) != (metric.size,):  # torch would stretch it while adding
            raise ConfigError(f"metric '{metric.name}' keeps {metric.size} sums, its update gave {tuple(found.shape)}")
        return found

    return replace(metric, update=update)
