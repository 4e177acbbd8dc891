"""Training strategies: named models, composed losses, hooks and validation over the one loop; names come in lazily."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_jax.core.stages import TrainingStage
    from nnx_jax.hooks.checkpoint import CheckpointHook
    from nnx_jax.hooks.ema import EMAHook
    from nnx_jax.hooks.precision import MixedPrecisionHook
    from nnx_jax.objectives.compose import BaseLossFunction, ComposedLossFunction
    from nnx_jax.objectives.weights import ConstantWeight, CosineWeight, LinearWeight, PiecewiseWeight
    from nnx_jax.training.optimizers import (
        OptimizerConfig,
        setup_optimizers,
        step_lr_schedulers,
        step_optimizers,
        zero_gradients,
    )
    from nnx_jax.training.strategy import TrainingStrategy
    from nnx_jax.training.validation import ValidationConfig, ValidationLoop

_NAMES = {
    "BaseLossFunction": "objectives.compose",
    "CheckpointHook": "hooks.checkpoint",
    "ComposedLossFunction": "objectives.compose",
    "ConstantWeight": "objectives.weights",
    "CosineWeight": "objectives.weights",
    "EMAHook": "hooks.ema",
    "LinearWeight": "objectives.weights",
    "MixedPrecisionHook": "hooks.precision",
    "OptimizerConfig": "training.optimizers",
    "PiecewiseWeight": "objectives.weights",
    "TrainingStage": "core.stages",
    "TrainingStrategy": "training.strategy",
    "ValidationConfig": "training.validation",
    "ValidationLoop": "training.validation",
    "setup_optimizers": "training.optimizers",
    "step_lr_schedulers": "training.optimizers",
    "step_optimizers": "training.optimizers",
    "zero_gradients": "training.optimizers",
}

__all__ = [
    "BaseLossFunction",
    "CheckpointHook",
    "ComposedLossFunction",
    "ConstantWeight",
    "CosineWeight",
    "EMAHook",
    "LinearWeight",
    "MixedPrecisionHook",
    "OptimizerConfig",
    "PiecewiseWeight",
    "TrainingStage",
    "TrainingStrategy",
    "ValidationConfig",
    "ValidationLoop",
    "setup_optimizers",
    "step_lr_schedulers",
    "step_optimizers",
    "zero_gradients",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"nnx_jax.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
