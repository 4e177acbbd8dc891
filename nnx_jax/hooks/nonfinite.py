"""Dropping updates whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import StatefulHookSpec


@register("skip_non_finite")
class SkipNonFinite(StatefulHookSpec):
    """Vetoes an update whose gradient, or whose last microbatch's loss, holds NaN or infinity.

    Parameters, moments, schedule and averages are then as if the batch had not been there. A gradient that float16's
    loss scale made infinite is that hook's affair and is not counted here. It judges the gradient after that hook (20)
    and before clipping (30), which by value would make an infinity a number.

    Attributes:
        drop: "window" drops the whole update; "microbatch" leaves the bad microbatch out of its accumulation window, as
            if it had no valid target, and updates with the others. Under a loss scale a microbatch is judged by its
            loss alone: one whose gradient is infinite stays in, so that its window is dropped and the scale falls.
        max_consecutive: more of them than this in a row stop the run, with nothing applied; None for no limit.

    Slot: {"row": int32 dropped ones in a row, "skips": int32 all of them}, scalars: updates, or microbatches; for
    "microbatch" also "windows": int32 updates dropped in a row whose gradient was not finite all the same.
    """

    priority = 25

    max_consecutive: int | None = Field(default=10, ge=0)
    drop: Literal["window", "microbatch"] = "window"

    def init_state(self, params: Mapping[str, Any]) -> Any:
        """Nothing dropped yet."""
        names = ("row", "skips", "windows") if self.screens else ("row", "skips")
        return {name: np.int32(0) for name in names}

    @property
    def screens(self) -> bool:
        """Whether microbatches are looked at one by one."""
        return self.drop == "microbatch"

    def keeps_microbatch(self, ctx: Any) -> Any:
        """Leave out, and count, a microbatch whose own loss or gradient is not finite."""
        xp, slot = ctx.xp, ctx.state
        fine = xp.isfinite(ctx.loss)
        if not ctx.scaled:
            fine = fine & ctx.all_finite(ctx.micro_grads)
        ctx.state = {**slot, "row": xp.where(fine, 0, slot["row"] + 1), "skips": slot["skips"] + ~fine}
        return fine

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: Any) -> tuple[Any, Any]:
        """Veto what is not finite."""
        if stage is not TrainingStage.DO_OPTIMIZER_STEP:
            return True, ctx.loss
        if self.screens and self.max_consecutive is not None:
            ctx.stop = ctx.stop | (ctx.state["row"] > self.max_consecutive)
        if will_skip is True:
            return True, ctx.loss
        xp, slot = ctx.xp, ctx.state
        # The loss of a microbatch that is left out is none of the window's.
        fine = ctx.all_finite() & (xp.isfinite(ctx.loss) | xp.logical_not(ctx.kept))
        live, name = xp.logical_not(will_skip), "windows" if self.screens else "row"
        dropped = live & ~fine
        row = xp.where(dropped, slot[name] + 1, xp.where(live, 0, slot[name]))
        ctx.state = {**slot, name: row}
        if not self.screens:
            ctx.state = {**ctx.state, "skips": slot["skips"] + dropped}
        if self.max_consecutive is not None:
            ctx.stop = ctx.stop | (dropped & (row > self.max_consecutive))
        return fine, ctx.loss
