"""The smallest training there is, a line through 64 points, and callbacks that write down what they are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx_jax.core.registry import register
from nnx_jax.data.dataset import InMemoryDataset
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.loop.step_builtin import StepCallback
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.training_loop import TrainingLoop


@register("scene_line")
class Line(InMemoryDataset):
    """`rows` points of y = slope * x + 1, x from -1 to 1."""

    rows: int = 64
    slope: float = 2.0

    def load(self) -> Mapping[str, Any]:
        x = np.linspace(-1, 1, self.rows, dtype=np.float32)[:, None]
        return {"x": x, "y": np.float32(self.slope) * x + np.float32(1)}


def model(seed: int = 0, dropout: float = 0.0) -> NNXModelOp:
    """An MLP 1-16-1 with fresh weights."""
    net = FeedForwardParams(input_dim=1, hidden_dims=(16,), output_dim=1, dropout_prob=dropout)
    return NNXModelOp(net=net, seed=seed)


def loop(**changes: Any) -> TrainingLoop:
    """A TrainingLoop of 20 updates of 16 rows."""
    fields: dict[str, Any] = {
        "model_op": model(), "dataset": Line(), "loss": "mse", "max_steps": 20, "batch_size": 16, "quiet": True,
        "optimizer_config": {"name": "adam", "lr": 1e-2},
    }  # fmt: skip
    return TrainingLoop(**{**fields, **changes})


def weights(operator: Any) -> dict[str, np.ndarray]:
    """Copies of an operator's weights."""
    return {name: np.array(value) for name, value in operator.arrays().items()}


class Diary:
    """Writes down (name, event, step) into a list that several may share."""

    def __init__(self, name: str = "", log: list[Any] | None = None) -> None:
        self.name, self.log = name, [] if log is None else log

    def note(self, event: str, state: Any) -> None:
        self.log.append((self.name, event, state.step))

    def on_train_begin(self, loop: Any, state: Any) -> None:
        self.note("begin", state)

    def on_step_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.note("step", state)

    def on_epoch_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.note("epoch", state)

    def on_eval_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.note("eval", state)

    def on_train_end(self, loop: Any, state: Any) -> None:
        self.note("end", state)


class Writer:
    """A metric writer that keeps its records, and notes them in a list that others share."""

    def __init__(self, log: list[Any] | None = None) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.log, self.closed = [] if log is None else log, 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records.append((step, dict(metrics)))
        self.log.append(("writer", "eval" if all(name.startswith("eval/") for name in metrics) else "write", step))

    def close(self) -> None:
        self.closed += 1


class Tracker:
    """An experiment tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start_run(self, name: str, config: Mapping[str, Any]) -> dict[str, str]:
        self.calls.append(("start", name, dict(config)))
        return {"run_id": "t-1"}

    def log_metrics(self, run: Any, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append(("log", dict(metrics), step))

    def end_run(self, run: Any, status: str) -> None:
        self.calls.append(("end", status))


@register("scene_counter")
class Counter(StepCallback):
    """A registered callback: stops the run after `most` updates."""

    most: int

    def on_step_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        if state.step >= self.most:
            state.request_stop(f"{self.most} are enough")
