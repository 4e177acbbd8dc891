"""Skipping spikes: an update whose gradient norm or loss jumps is not applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import StatefulHookSpec


@register("spike_skip")
class SpikeSkipHook(StatefulHookSpec):
    """Vetoes an update whose metric is more than `factor` times its running mean, or not finite.

    A rejected batch leaves no trace: not in parameters, moments, schedule, averages, nor in the running mean. With
    several devices the metric is that of the whole batch, so that all decide alike.

    Attributes:
        factor: how many times the running mean is a spike.
        decay: of the running mean, m <- decay m + (1 - decay) x; it starts at the first accepted value.
        warmup: accepted updates before anything finite is rejected.
        metric: "grad_norm", the global norm of the window's gradient before clipping, or "loss", the mean of its
            microbatches' losses.
        max_consecutive: more rejections than this in a row stop the run; None for no limit.

    Slot: {"mean": float32, "n": int32 accepted updates, "skips": int32 rejected ones, "row": int32 of them in a row},
    scalars; for "loss" also the sum and number of the open window's losses.
    """

    priority = 40

    factor: float = Field(default=5.0, gt=0)
    decay: float = Field(default=0.99, ge=0, lt=1)
    warmup: int = Field(default=100, ge=0)
    metric: Literal["grad_norm", "loss"] = "grad_norm"
    max_consecutive: int | None = Field(default=20, ge=0)

    def init_state(self, params: Mapping[str, Any]) -> Any:
        """Nothing seen yet."""
        slot = {"mean": np.float32(0), "n": np.int32(0), "skips": np.int32(0), "row": np.int32(0)}
        if self.metric == "loss":
            slot.update(sum=np.float32(0), count=np.int32(0))
        return slot

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: Any) -> tuple[Any, Any]:
        """Judge the update, and learn from it if it is applied."""
        if stage is TrainingStage.BEFORE_BATCH and self.metric == "loss":
            new = ctx.window_starts
            zero = {"sum": ctx.xp.zeros_like(ctx.state["sum"]), "count": ctx.xp.zeros_like(ctx.state["count"])}
            ctx.state = {**ctx.state, **ctx.where(new, zero, {name: ctx.state[name] for name in zero})}
        if stage is not TrainingStage.DO_OPTIMIZER_STEP:
            return True, ctx.loss
        if self.metric == "loss":
            ctx.state = {**ctx.state, "sum": ctx.state["sum"] + ctx.loss, "count": ctx.state["count"] + 1}
        return (True if will_skip is True else self._judge(ctx, will_skip)), ctx.loss

    def _value(self, ctx: Any) -> Any:
        if self.metric == "loss":
            return ctx.state["sum"] / ctx.state["count"]
        return ctx.metrics["grad_norm"] if "grad_norm" in ctx.metrics else ctx.global_norm()

    def _judge(self, ctx: Any, will_skip: Any) -> Any:
        xp, slot, value = ctx.xp, ctx.state, self._value(ctx)
        live = xp.logical_not(will_skip)
        # Written so that NaN, of which every comparison is False, is rejected.
        fine = ((slot["n"] < self.warmup) | (value <= self.factor * slot["mean"])) & xp.isfinite(value)
        used, rejected = live & fine, live & ~fine
        mean = xp.where(slot["n"] == 0, value, self.decay * slot["mean"] + (1 - self.decay) * value)
        row = xp.where(rejected, slot["row"] + 1, xp.where(used, 0, slot["row"]))
        ctx.state = {
            **slot,
            "mean": xp.where(used, mean, slot["mean"]),
            "n": slot["n"] + used,
            "skips": slot["skips"] + rejected,
            "row": row,
        }
        if self.max_consecutive is not None:
            ctx.stop = ctx.stop | (rejected & (row > self.max_consecutive))
        return fine
