"""Hooks: policies compiled into the step, and watchers around it; names come in when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_NAMES = {
    "CheckpointHook": "nnx_jax.hooks.checkpoint",
    "CheckpointableHook": "nnx_jax.core.hooks",
    "DDPHook": "nnx_jax.hooks.ddp",
    "EMAHook": "nnx_jax.hooks.ema",
    "GradientAccumulationHook": "nnx_jax.hooks.accumulation",
    "GradientClipHook": "nnx_jax.hooks.clip",
    "Hook": "nnx_jax.core.hooks",
    "HookRegistry": "nnx_jax.core.hook_registry",
    "HookSpec": "nnx_jax.hooks.base",
    "MixedPrecisionHook": "nnx_jax.hooks.precision",
    "ModulePatchHook": "nnx_jax.hooks.finetune",
    "ProfilerHook": "nnx_jax.hooks.profiler",
    "SkipNonFinite": "nnx_jax.hooks.nonfinite",
    "SpikeSkipHook": "nnx_jax.hooks.spike",
    "StageTimingHook": "nnx_jax.hooks.timing",
    "StatefulUpdateHook": "nnx_jax.core.hooks",
    "TorchProfilerHook": "nnx_jax.hooks.torch_profiler",
    "TracedHook": "nnx_jax.core.hooks",
    "TrainableParameterHook": "nnx_jax.hooks.finetune",
    "TrainingStage": "nnx_jax.core.stages",
    "TrainingUpdateHook": "nnx_jax.core.hooks",
    "TrainingUpdateOrchestrator": "nnx_jax.core.hooks",
    "full_precision": "nnx_jax.core.precision",
}

if TYPE_CHECKING:
    from nnx_jax.core.hook_registry import HookRegistry
    from nnx_jax.core.hooks import (
        CheckpointableHook,
        Hook,
        StatefulUpdateHook,
        TracedHook,
        TrainingUpdateHook,
        TrainingUpdateOrchestrator,
    )
    from nnx_jax.core.precision import full_precision
    from nnx_jax.core.stages import TrainingStage
    from nnx_jax.hooks.accumulation import GradientAccumulationHook
    from nnx_jax.hooks.base import HookSpec
    from nnx_jax.hooks.checkpoint import CheckpointHook
    from nnx_jax.hooks.clip import GradientClipHook
    from nnx_jax.hooks.ddp import DDPHook
    from nnx_jax.hooks.ema import EMAHook
    from nnx_jax.hooks.finetune import ModulePatchHook, TrainableParameterHook
    from nnx_jax.hooks.nonfinite import SkipNonFinite
    from nnx_jax.hooks.precision import MixedPrecisionHook
    from nnx_jax.hooks.profiler import ProfilerHook
    from nnx_jax.hooks.spike import SpikeSkipHook
    from nnx_jax.hooks.timing import StageTimingHook
    from nnx_jax.hooks.torch_profiler import TorchProfilerHook

__all__ = [
    "CheckpointHook",
    "CheckpointableHook",
    "DDPHook",
    "EMAHook",
    "GradientAccumulationHook",
    "GradientClipHook",
    "Hook",
    "HookRegistry",
    "HookSpec",
    "MixedPrecisionHook",
    "ModulePatchHook",
    "ProfilerHook",
    "SkipNonFinite",
    "SpikeSkipHook",
    "StageTimingHook",
    "StatefulUpdateHook",
    "TorchProfilerHook",
    "TracedHook",
    "TrainableParameterHook",
    "TrainingStage",
    "TrainingUpdateHook",
    "TrainingUpdateOrchestrator",
    "full_precision",
    "register_builtin",
]


def register_builtin() -> None:
    """Import every built-in hook, so that a configuration can name it by its kind."""
    for module in sorted({name for name in _NAMES.values() if name.startswith("nnx_jax.hooks.")}):
        importlib.import_module(module)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
