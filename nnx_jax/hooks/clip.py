"""Gradient clipping, by element and by global norm."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import UpdateHookSpec


@register("gradient_clip")
class GradientClipHook(UpdateHookSpec):
    """Limits the gradient of an update; the record's gradient norm is the one before.

    It sees the gradient of the whole window, unscaled, and protects against nothing: of an infinite element `max_norm`
    makes NaN, and `max_value` an ordinary number. Add `SkipNonFinite`, which looks before anything is clipped. torch's
    `clip_grad_norm_` adds 1e-6 to the norm; this does not.

    Attributes:
        max_norm: largest Euclidean norm over all elements; a longer gradient is multiplied by max_norm / norm.
        max_value: largest absolute value of an element; applied before `max_norm`.

    None and infinity are no limit; with neither limit the hook only reports the norm.
    """

    priority = 30

    max_norm: float | None = Field(default=None, gt=0)
    max_value: float | None = Field(default=None, gt=0)

    @field_validator("max_norm", "max_value", mode="before")
    @classmethod
    def _unlimited(cls, value: Any) -> Any:
        return None if isinstance(value, float) and value == float("inf") else value

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: Any) -> tuple[Any, Any]:
        """Replace the gradient this update uses; the accumulator stays as it is."""
        if stage is not TrainingStage.DO_OPTIMIZER_STEP or will_skip is True:
            return True, ctx.loss
        xp, limit = ctx.xp, self.max_value
        if "grad_norm" not in ctx.metrics:
            ctx.metrics["grad_norm"] = ctx.global_norm()
        if limit is not None:
            ctx.grads = ctx.tree_map(lambda g: xp.clip(g, -limit, limit), ctx.grads)
        if self.max_norm is not None:
            norm = ctx.global_norm()
            factor = xp.where(norm > self.max_norm, self.max_norm / norm, 1.0)
            ctx.grads = ctx.tree_map(lambda g: g * factor, ctx.grads)
        return True, ctx.loss
