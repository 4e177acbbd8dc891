"""A hook of your own: leave out updates whose gradient is much longer than usual. Start from the folder above this one.

In a configuration:  imports: [examples.custom_hook]  and  hooks: [{kind: skip_big, factor: 4.0}]
From Python:         model.train(params, data=data, hooks=[SkipBig(factor=4.0)])
"""

import numpy as np

from nnx_jax import register
from nnx_jax.hooks import TrainingStage
from nnx_jax.hooks.base import StatefulHookSpec


@register("skip_big")
class SkipBig(StatefulHookSpec):
    """Veto an update whose gradient norm is more than `factor` times its running mean, after `warmup` accepted ones."""

    priority = 25  # before clipping (30), which would hide how long the gradient was
    factor: float = 5.0
    warmup: int = 20

    def init_state(self, params):
        return {"mean": np.float32(0), "accepted": np.int32(0), "skipped": np.int32(0)}

    def __call__(self, ctx, stage, will_skip):
        if stage is not TrainingStage.DO_OPTIMIZER_STEP or will_skip is True:
            return True, ctx.loss
        xp, slot, norm = ctx.xp, ctx.state, ctx.global_norm()
        fine = (norm <= self.factor * slot["mean"]) | (slot["accepted"] < self.warmup)
        fine = fine & xp.isfinite(norm)
        live = xp.logical_not(will_skip)  # where another hook has vetoed, nothing is learned
        mean = xp.where(slot["accepted"] == 0, norm, 0.9 * slot["mean"] + 0.1 * norm)
        ctx.state = {
            "mean": xp.where(live & fine, mean, slot["mean"]),
            "accepted": slot["accepted"] + (live & fine),
            "skipped": slot["skipped"] + (live & ~fine),
        }
        return fine, ctx.loss
