"""Every hook by its public name, under the name the training documents use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx_jax import hooks

if TYPE_CHECKING:
    from nnx_jax.hooks import (
        CheckpointHook,
        DDPHook,
        EMAHook,
        GradientAccumulationHook,
        GradientClipHook,
        MixedPrecisionHook,
        ModulePatchHook,
        ProfilerHook,
        SkipNonFinite,
        SpikeSkipHook,
        StageTimingHook,
        StatefulUpdateHook,
        TorchProfilerHook,
        TracedHook,
        TrainableParameterHook,
        TrainingUpdateHook,
        TrainingUpdateOrchestrator,
    )

__all__ = [
    "CheckpointHook",
    "DDPHook",
    "EMAHook",
    "GradientAccumulationHook",
    "GradientClipHook",
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
    "TrainingUpdateHook",
    "TrainingUpdateOrchestrator",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(hooks, name)


def __dir__() -> list[str]:
    return sorted(__all__)
