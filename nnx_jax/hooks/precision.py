"""Mixed precision: which type the model computes in, and the dynamic loss scale of float16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from nnx_jax.core.precision import precision_name
from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import StatefulHookSpec


@register("mixed_precision")
class MixedPrecisionHook(StatefulHookSpec):
    """The model computes in `precision`; parameters, gradients and the optimizer stay float32.

    Under float16 the loss is multiplied by a scale before it is differentiated, so that small gradients survive, and
    the gradient divided by it before the update. A gradient that is not finite vetoes the update and lowers the scale;
    `growth_interval` updates in a row raise it. Inside an accumulation window nothing of this happens before its end.
    The numbers are those of `torch.amp.GradScaler`. A later hook's veto leaves the scale and its count alone.

    Attributes:
        precision: "float32", "bfloat16" or "float16"; see `core.precision.precision_name` for other spellings.
        init_scale: first loss scale.
        growth_factor: raises the scale; above 1.
        backoff_factor: lowers it; between 0 and 1.
        growth_interval: updates in a row after which it is raised.
        min_scale: the scale does not fall below; by default the smallest that can still be divided by.
        keep_fp32: patterns of parameter names whose layers compute in float32 all the same.

    Slot (float16 only): {"scale": float32 scalar, "good": int32 scalar, updates since the scale last changed}.
    """

    priority = 20
    exclusive_key: ClassVar[str | None] = "mixed_precision"

    precision: str
    init_scale: float = Field(default=65536.0, gt=0, le=2.0**127)
    growth_factor: float = Field(default=2.0, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    growth_interval: int = Field(default=2000, ge=1)
    min_scale: float = Field(default=2.0**-126, gt=0)
    keep_fp32: tuple[str, ...] = ()

    @field_validator("precision", mode="before")
    @classmethod
    def _named(cls, value: Any) -> str:
        return precision_name(value)

    @property
    def scaling(self) -> bool:
        """Whether the loss is scaled."""
        return self.precision == "float16"

    def init_state(self, params: Mapping[str, Any]) -> Any:
        """The first scale; nothing to keep unless the loss is scaled."""
        return {"scale": np.float32(self.init_scale), "good": np.int32(0)} if self.scaling else ()

    def loss_scale(self, slot: Any) -> Any:
        """What the loss, and so `ctx.grads` before this hook's turn, is multiplied by; None for nothing."""
        return slot["scale"] if self.scaling else None

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: Any) -> tuple[Any, Any]:
        """Scale, unscale, and move the scale."""
        # A veto known while tracing is an open window: nothing is unscaled and the scale rests.
        if not self.scaling or will_skip is True:
            return True, ctx.loss
        if stage is TrainingStage.DO_BACKWARD:
            return True, ctx.loss * ctx.state["scale"]
        if stage is TrainingStage.DO_OPTIMIZER_STEP:
            return self._unscale(ctx, will_skip), ctx.loss
        if stage is TrainingStage.AFTER_OPTIMIZER_STEP:
            self._grow(ctx, will_skip)
        return True, ctx.loss

    def _unscale(self, ctx: Any, will_skip: Any) -> Any:
        """Divide the gradient by the scale; lower the scale if it is not finite. Returns whether it is.

        The scale falls here and not after the final decision: another hook that also rejects such a gradient must not
        keep it up for ever.
        """
        scale, good = ctx.state["scale"], ctx.state["good"]
        finite = ctx.all_finite()
        # Not times 1 / scale: of a scale above 2**126 that is subnormal, and compiled code takes it for 0.
        ctx.grads = ctx.tree_map(lambda g: g / scale, ctx.grads)
        falls = ctx.xp.logical_not(will_skip) & ~finite
        lower = ctx.xp.maximum(scale * self.backoff_factor, self.min_scale)
        ctx.state = {"scale": ctx.xp.where(falls, lower, scale), "good": ctx.xp.where(falls, 0, good)}
        return finite

    def _grow(self, ctx: Any, will_skip: Any) -> None:
        """Count an update, and raise the scale at the last of the interval unless it would overflow."""
        scale, ran = ctx.state["scale"], ctx.xp.logical_not(will_skip)
        good = ctx.state["good"] + ran
        full = ran & (good == self.growth_interval)
        higher = scale * self.growth_factor
        ctx.state = {
            "scale": ctx.xp.where(full & ctx.xp.isfinite(higher), higher, scale),
            "good": ctx.xp.where(full, 0, good),
        }
