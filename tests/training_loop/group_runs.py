"""What the processes of a group do in `test_group.py`: every function runs in each of them and returns JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnx_jax import distributed
from tests.training_loop.scenes import Diary, Line, Writer, loop, model


def told(state: Any, operator: Any, diary: Diary, writer: Writer) -> dict[str, Any]:
    """A training's end as JSON: weights by their exact numbers."""
    return {
        "weights": {name: np.asarray(value, np.float64).tolist() for name, value in operator.arrays().items()},
        "step": state.step,
        "metrics": {name: float(value) for name, value in state.metrics.items()},
        "events": [event for _, event, _ in diary.log],
        "written": [step for step, _ in writer.records],
    }


def trains(folder: str, alone: bool = False) -> dict[str, Any]:
    """Ten updates, dropout included, in two calls: the second goes on where the first ended."""
    diary, writer = Diary(), Writer()
    diary.distributed = "all"  # type: ignore[attr-defined]
    given = {
        "model_op": model(dropout=0.2), "val_dataset": Line(rows=20), "callbacks": (diary,), "metric_writer": writer,
        "checkpoint_dir": folder, "eval_every_n_steps": 5, "log_every_n_steps": 5, "sharding": {"data": 2},
        "distributed": None if alone else distributed.DDP(),
    }  # fmt: skip
    loop(max_steps=4, **given)(None, None)
    operator, state = loop(max_steps=10, **given)(None, None)
    return told(state, operator, diary, writer)


def refused(folder: str) -> list[str]:
    """What is said of a loop without a directory in common, and of one without a DDP."""
    said = []
    for given in ({"distributed": distributed.DDP()}, {"checkpoint_dir": folder}):
        try:
            loop(**given)(None, None)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
