"""Losses, loss terms, metrics and objectives: sums over rows, in float32, for any batching."""

from nnx_jax.objectives.checks import check_labels, check_targets
from nnx_jax.objectives.compose import BaseLossFunction, ComposedLossFunction, KeyedLoss
from nnx_jax.objectives.losses import LOSSES, Loss, build_loss, wrap_user_loss
from nnx_jax.objectives.metrics import METRIC_MODES, Metric, build_metric, metric_mode
from nnx_jax.objectives.objective import (
    Objective,
    ObjectiveContext,
    ObjectiveResult,
    kd_objective,
    supervised_objective,
)
from nnx_jax.objectives.paradigms.diffusion import ddpm_objective, ddpm_sample, noise_schedule
from nnx_jax.objectives.paradigms.mixup import mixup_objective
from nnx_jax.objectives.paradigms.preference import dpo_objective, reference_columns, sequence_log_probs
from nnx_jax.objectives.paradigms.simclr import simclr_objective
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
    "Objective",
    "ObjectiveContext",
    "ObjectiveResult",
    "PiecewiseWeight",
    "WeightSchedule",
    "build_loss",
    "build_metric",
    "check_labels",
    "check_targets",
    "check_terms",
    "ddpm_objective",
    "ddpm_sample",
    "dpo_objective",
    "kd_objective",
    "merge_terms",
    "metric_mode",
    "mixup_objective",
    "noise_schedule",
    "reference_columns",
    "sequence_log_probs",
    "simclr_objective",
    "supervised_objective",
    "term_value",
    "total_value",
    "wrap_user_loss",
]
