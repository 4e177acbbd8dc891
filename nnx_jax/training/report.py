"""What a strategy will do, in words: which hook runs where, what it keeps, and where the host waits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nnx_jax.core.hooks import TracedHook, TrainingUpdateHook, owns, runs_on
from nnx_jax.core.stages import UPDATE_STAGES, TrainingStage


def explain(strategy: Any, engine: Any, state: Any) -> str:
    """Stages with their hooks, slots with their bytes, the step's programs, and the expected waits."""
    lines = ["stages"]
    for stage in TrainingStage:
        found = [_label(hook, stage) for hook in strategy.registry if _takes_part(hook, stage)]
        if found:
            lines.append(f"  {stage.value:2d} {stage.name}: {', '.join(found)}")
    if len(lines) == 1:
        lines.append("  no hook")
    lines.append("slots")
    slots = {} if engine is None else engine.programs.state(state).slots
    for name, slot in slots.items():
        size = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(slot))
        lines.append(f"  {name}: {size} bytes")
    if not slots:
        lines.append("  none" if engine is not None else "  known once training begins")
    lines += ["programs", *_programs(strategy, engine), "waits", *_waits(strategy)]
    return "\n".join(lines)


def _takes_part(hook: Any, stage: TrainingStage) -> bool:
    if isinstance(hook, TrainingUpdateHook):
        return stage in UPDATE_STAGES
    return runs_on(hook, stage)


def _label(hook: Any, stage: TrainingStage) -> str:
    if isinstance(hook, TrainingUpdateHook):
        return f"{type(hook).__name__} (traced, priority {hook.priority})"
    if isinstance(hook, TracedHook):
        return f"{type(hook).__name__} (traced{', owner' if owns(hook, stage) else ''})"
    every = getattr(hook, "cadence_steps", None) or getattr(hook, "cadence_epochs", None)
    return f"{type(hook).__name__} (host{f', every {every}' if every else ''})"


def _programs(strategy: Any, engine: Any) -> list[str]:
    if engine is None:
        return ["  known once training begins"]
    window = engine.accumulate
    if window == 1:
        return ["  apply: forward, backward and update of every microbatch"]
    return [
        f"  micro: forward and backward, no optimizer, for {window - 1} of {window} microbatches",
        f"  apply: the last of {window} microbatches, with the update",
    ]


def _waits(strategy: Any) -> list[str]:
    """Where the host reads the device while training."""
    lines = []
    watching = [hook for hook in strategy.registry if not isinstance(hook, TrainingUpdateHook | TracedHook)]
    per_batch = [hook for hook in watching if any(runs_on(hook, stage) for stage in TrainingStage if stage.of_batch)]
    per_batch = [hook for hook in per_batch if getattr(hook, "cadence_steps", None) is None]
    if per_batch:
        names = ", ".join(type(hook).__name__ for hook in per_batch)
        lines.append(f"  microbatch by microbatch for {names}; a read for every value they ask for")
    for hook in watching:
        if every := getattr(hook, "cadence_steps", None):
            lines.append(f"  about one read for every {every} updates ({type(hook).__name__})")
    config = strategy.validation_config
    if config is not None and config.every_n_steps is not None:
        lines.append(f"  about one read for every {config.every_n_steps} updates (validation)")
    lines.append("  one read at every epoch's end")
    return lines
