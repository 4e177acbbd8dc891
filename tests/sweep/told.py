"""A backend whose trainings come to what their task says: the loss, or an error."""

from __future__ import annotations

from typing import Any

from nnx_jax.backends import Trained, TrainerCarryState

RUNS: list[float] = []
"""Tasks of the trainings so far."""


def run(loop: Any, state: TrainerCarryState | None) -> Trained:
    """One training."""
    loss = loop.task
    RUNS.append(loss)
    if loss < 0:
        raise FloatingPointError(f"loss is {loss}")
    metrics = {"loss": None if loss == 100 else loss}
    return Trained(loop.model_op, TrainerCarryState(loop.model_op), {"backend": "told", "final_metrics": metrics})
