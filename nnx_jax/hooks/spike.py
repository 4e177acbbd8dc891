"""Skipping spikes: an update whose gradient norm or loss jumps is not applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from nnx_jax.core.precision import sum_dtype
from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import StatefulHookSpec


@register("spike_skip")
class SpikeSkipHook(StatefulHookSpec):
    """Vetoes an update whose metric is more than `factor` times its running mean, or not finite.

    A rejected batch leaves no trace: not in parameters, moments, schedule, averages, nor in the running mean. The mean
    learns from updates that were applied and from no others: what another hook rejects, earlier or later, what holds no
    valid target, and what the step itself drops teach it nothing. With several devices the metric is that of the whole
    batch, so that all decide alike.

    Attributes:
        factor: how many times the running mean is a spike.
        decay: of the running mean, m <- decay m + (1 - decay) x; it starts at the first value of an applied update.
        warmup: applied updates before anything finite is rejected.
        metric: "grad_norm", the global norm of the window's gradient before clipping, or "loss", the mean of the losses
            of its microbatches, less those that were left out or hold no valid target.
        max_consecutive: more rejections than this in a row, with no applied update between, stop the run; None for no
            limit.

    Slot: {"mean": float, "n": int32 applied updates, "skips": int32 updates this hook rejected, "row": int32 of them
    in a row}, scalars. For "loss" also the "sum" and "count" of the open window's losses, for "grad_norm" the "norm" of
    the update that is being judged; all three are 0 when the window is over.
    """

    priority = 40

    factor: float = Field(default=5.0, gt=0)
    decay: float = Field(default=0.99, ge=0, lt=1)
    warmup: int = Field(default=100, ge=0)
    metric: Literal["grad_norm", "loss"] = "grad_norm"
    max_consecutive: int | None = Field(default=20, ge=0)

    def init_state(self, params: Mapping[str, Any]) -> Any:
        """Nothing seen yet."""
        zero = np.zeros((), sum_dtype(*(value.dtype for value in params.values())))
        slot = {"mean": zero, "n": np.int32(0), "skips": np.int32(0), "row": np.int32(0)}
        if self.metric == "loss":
            return {**slot, "sum": zero, "count": np.int32(0)}
        return {**slot, "norm": zero}

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: Any) -> tuple[Any, Any]:
        """Judge the update, and learn from it once it was applied."""
        if stage is TrainingStage.DO_OPTIMIZER_STEP:
            if self.metric == "loss":
                self._add(ctx)
            return (True if will_skip is True else self._judge(ctx, will_skip)), ctx.loss
        if stage is TrainingStage.AFTER_OPTIMIZER_STEP:
            if will_skip is not True:
                self._learn(ctx, will_skip)
            self._forget(ctx)
        return True, ctx.loss

    def _add(self, ctx: Any) -> None:
        """Add this microbatch's loss to its window's."""
        xp, slot = ctx.xp, ctx.state
        counts = xp.logical_and(ctx.kept, ctx.has_rows)
        ctx.state = {
            **slot,
            "sum": xp.where(ctx.zeroed, 0, slot["sum"]) + xp.where(counts, ctx.loss, 0),
            "count": xp.where(ctx.zeroed, 0, slot["count"]) + counts,
        }

    def _value(self, slot: Mapping[str, Any], xp: Any) -> Any:
        if self.metric == "loss":
            return slot["sum"] / xp.maximum(slot["count"], 1)
        return slot["norm"]

    def _judge(self, ctx: Any, will_skip: Any) -> Any:
        xp = ctx.xp
        if self.metric == "grad_norm":
            norm = ctx.metrics["grad_norm"] if "grad_norm" in ctx.metrics else ctx.global_norm()
            ctx.state = {**ctx.state, "norm": norm}
        slot, value = ctx.state, self._value(ctx.state, xp)
        # Written so that NaN, of which every comparison is False, is rejected.
        fine = ((slot["n"] < self.warmup) | (value <= self.factor * slot["mean"])) & xp.isfinite(value)
        if self.metric == "loss":
            fine = fine | (slot["count"] == 0)  # nothing to judge
        rejected = xp.logical_not(will_skip) & ~fine
        row = slot["row"] + rejected
        ctx.state = {**slot, "skips": slot["skips"] + rejected, "row": row}
        if self.max_consecutive is not None:
            ctx.stop = ctx.stop | (rejected & (row > self.max_consecutive))
        return fine

    def _learn(self, ctx: Any, will_skip: Any) -> None:
        xp, slot = ctx.xp, ctx.state
        value, applied = self._value(slot, xp), xp.logical_not(will_skip)
        mean = xp.where(slot["n"] == 0, value, self.decay * slot["mean"] + (1 - self.decay) * value)
        ctx.state = {
            **slot,
            "mean": xp.where(applied, mean, slot["mean"]),
            "n": slot["n"] + applied,
            "row": xp.where(applied, 0, slot["row"]),
        }

    def _forget(self, ctx: Any) -> None:
        """Leave nothing of a window behind when it is over."""
        if self.metric == "grad_norm":
            ctx.state = {**ctx.state, "norm": ctx.xp.zeros_like(ctx.state["norm"])}
            return
        # A window that another hook keeps open has no end known here; then the next one that starts from zero resets.
        over = ctx.window_closes if ctx.window_size > 1 or ctx.zeroed is True else False
        slot = ctx.state
        zero = {name: ctx.xp.zeros_like(slot[name]) for name in ("sum", "count")}
        ctx.state = {**slot, **ctx.where(over, zero, {name: slot[name] for name in zero})}
