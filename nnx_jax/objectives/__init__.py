"""Losses, loss terms and metrics: sums over rows, in float32, for any batching."""

from nnx_jax.objectives.checks import check_labels, check_targets
from nnx_jax.objectives.compose import BaseLossFunction, ComposedLossFunction, KeyedLoss
from nnx_jax.objectives.losses import LOSSES, Loss, build_loss, wrap_user_loss
from nnx_jax.objectives.metrics import METRIC_MODES, Metric, build_metric, metric_mode
from nnx_jax.objectives.terms import LossTerm, check_terms, merge_terms, term_value, total_value
from nnx_jax.objectives.weights import ConstantWeight, CosineWeight, LinearWeight, PiecewiseWeight, WeightSchedule

__all__ = [
    "LOSSES",
    "METRIC_MODES",
    "BaseLossFunction",
    "ComposedLossFunction",
    "ConstantWeight",
    "CosineWeight",
    "KeyedLoss",
    "LinearWeight",
    "Loss",
    "LossTerm",
    "Metric",
    "PiecewiseWeight",
    "WeightSchedule",
    "build_loss",
    "build_metric",
    "check_labels",
    "check_targets",
    "check_terms",
    "merge_terms",
    "metric_mode",
    "term_value",
    "total_value",
    "wrap_user_loss",
]
