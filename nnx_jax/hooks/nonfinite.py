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
    loss scale made infinite is that hook's affair and is not counted here.

    Attributes:
        drop: "window" drops the whole update; "microbatch" leaves the bad microbatch out of its accumulation window, as
            if it had no valid target, and updates with the others.
        max_consecutive: more of them than this in a row stop the run, with nothing applied; None for no limit.

    Slot: {"row": int32 dropped updates in a row, "skips": int32 all of them}, scalars.
    """

    priority = 35

    max_consecutive: int | None = Field(default=10, ge=0)
    drop: Literal["window", "microbatch"] = "window"

    def init_state(self, params: Mapping[str, Any]) -> Any:
        """Nothing dropped yet."""
        return {"row": np.int32(0), "skips": np.int32(0)}

    @property
    def screens(self) -> bool:
        """Whether microbatches are looked at one by one."""
        return self.drop == "microbatch"

    def keeps_microbatch(self, ctx: Any) -> Any:
        """Leave out a microbatch whose own loss or gradient is not finite."""
        return ctx.all_finite(ctx.micro_grads) & ctx.xp.isfinite(ctx.loss)

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: Any) -> tuple[Any, Any]:
        """Veto what is not finite."""
        if stage is not TrainingStage.DO_OPTIMIZER_STEP or will_skip is True:
            return True, ctx.loss
        xp, slot = ctx.xp, ctx.state
        fine = ctx.all_finite() if self.screens else ctx.all_finite() & xp.isfinite(ctx.loss)
        live = xp.logical_not(will_skip)
        dropped = live & ~fine
        row = xp.where(dropped, slot["row"] + 1, xp.where(live, 0, slot["row"]))
        ctx.state = {"row": row, "skips": slot["skips"] + dropped}
        if self.max_consecutive is not None:
            ctx.stop = ctx.stop | (dropped & (row > self.max_consecutive))
        return fine, ctx.loss
