"""Gradient accumulation: several microbatches become one update."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import UpdateHookSpec


@register("accumulation")
class GradientAccumulationHook(UpdateHookSpec):
    """Vetoes the update of every microbatch but the k-th; `accumulate_grad_batches: k` in short.

    The veto is known while the step is traced, so the program of the other microbatches holds no optimizer.

    Attributes:
        k: microbatches of a window.
        normalize: what the window's gradient is. "weight": the sum over all targets divided by their number, as one
            large batch would give. "mean": the mean of the microbatches' own mean gradients, however many targets each
            had (one without any counts as 0). "sum": the sum of those.
        on_partial: what becomes of a window that the end of the data cuts short: "flush" updates with what is there,
            "carry" goes on with it in the next epoch. None leaves it to the trainer.
        defer_reduce: with several devices, add up on each and reduce once at the window's end. For losses that are sums
            over rows; a model with BatchNorm or dropout reduces every microbatch all the same, with a warning.
    """

    priority = 10
    exclusive_key: ClassVar[str | None] = "accumulation"

    k: int = Field(ge=1)
    normalize: Literal["weight", "mean", "sum"] = "weight"
    on_partial: Literal["flush", "carry"] | None = None
    defer_reduce: bool = False

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: Any) -> tuple[Any, Any]:
        """Keep what is accumulated inside a window; let the optimizer step at its end."""
        if stage is TrainingStage.BEFORE_BATCH:
            return ctx.window_starts, ctx.loss
        if stage is not TrainingStage.DO_OPTIMIZER_STEP:
            return True, ctx.loss
        if self.normalize == "mean" and self.k > 1 and ctx.window_closes is not False:
            # The step summed the microbatches' means; a window cut short divides by the number it has.
            count = ctx.window_count
            ctx.grads = ctx.tree_map(lambda g: g / count, ctx.grads)
        return ctx.window_closes, ctx.loss
