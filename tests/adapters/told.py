"""What both adapters are tested with: rows of a line, and a callback that writes down what it is told."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnx_jax.data import ArrayDataset, Feed

ROWS, BATCH, STEPS = 10, 4, 7
X = np.linspace(-1, 1, ROWS, dtype=np.float32)[:, None]
Y = 2 * X + 1
DATA = ArrayDataset(X, Y)
HALF = ArrayDataset({"x": X, "y": Y, "weight": (X[:, 0] > 0).astype(np.float32)})
"""The same rows, of which those with a negative x count for nothing."""


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """The first batches of a loop with seed 0: two passes of ten rows are five batches of four."""
    feed = Feed(DATA, batch_size=BATCH, tail="straddle", seed=0)
    rows = np.concatenate([feed.order(epoch) for epoch in range(4)])
    return [(X[each], Y[each]) for each in rows]


class Notes:
    """Writes down every event."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[str] = []
        self.losses: list[float] = []
        self.stop_at = stop_at

    def on_train_begin(self, loop: Any, state: Any) -> None:
        self.events.append("begin")

    def on_step_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.events.append(f"step:{state.step}")
        self.losses.append(metrics["loss"])
        if state.step == self.stop_at:
            state.request_stop("enough")

    def on_epoch_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.events.append(f"epoch:{state.epoch}")

    def on_eval_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.events.append(f"eval:{state.step}")

    def on_train_end(self, loop: Any, state: Any) -> None:
        self.events.append("end")
        self.model = state.model


WANTED = [
    "begin", "step:1", "step:2", "step:3", "epoch:1", "eval:3", "step:4", "step:5", "step:6", "epoch:2", "eval:6",
    "step:7", "eval:7", "end",
]  # fmt: skip
"""Events of STEPS updates with `steps_per_epoch` 3 and an evaluation every 3."""
