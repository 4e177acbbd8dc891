"""The end of the commonest window in few steps: one microbatch of whole rows, one process, one optimizer, all finite.

What is around a step takes longer than the step where the model is small. The numbers are those of the long way, which
is taken wherever there is anything to decide.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nnx_jax.torch.records import Row
from nnx_jax.torch.window import Window

if TYPE_CHECKING:
    from nnx_jax.torch.engine import TorchEngine
    from nnx_jax.torch.state import TorchState


def is_common(engine: TorchEngine, window: Window) -> bool:
    """A window of this engine is one microbatch, and its gradient is divided already and where the optimizer looks."""
    plan = engine.plan
    return window.takes_whole and window.on_host and plan.fused and engine.own is None and not engine.several


def close(engine: TorchEngine, state: TorchState) -> bool:
    """Make the update and its record; False where something is to be looked at, and nothing has been done."""
    window, counters = state.window, state.counters
    row = window.read[0]
    loss, count, invalid, norm = row[0], row[1], row[-2], row[-1]
    if len(window) != 1 or invalid or not (count > 0 and math.isfinite(loss + norm)) or not window.is_full():
        return False
    part = engine.optimizers.first
    engine.optimizers.apply(norm)
    counters["step"] += 1
    counters["epoch_step"] += 1
    counters["consecutive"] = counters["micro"] = 0
    engine.wrote = True
    engine.ledger.add(Row(counters["batch"] - 1, counters["step"], True, True, part.used, norm, row))
    window.clear()
    return True
