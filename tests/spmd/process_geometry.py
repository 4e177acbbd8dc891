"""Runs of one geometry taken on by another, through the public API; called by `tests.processes` and by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.loop.callbacks import Callback
from nnx_jax.runs.run import NNRun
from tests.e2e.group_runs import error, train

SAVED = {"fsdp": 4}
"""The mesh of the run that others take on: two processes of two devices."""


class Begins(Callback):
    """Keeps the weights that training begins with."""

    distributed = "all"

    def __init__(self) -> None:
        self.weights: dict[str, np.ndarray] = {}

    def on_train_begin(self, ctx: Any) -> None:
        self.weights = {name: np.asarray(value) for name, value in PureModule(ctx.sync()).params.items()}


def save(folder: str) -> dict[str, Any]:
    """Train on two processes of two devices, the parameters split over all of them; what its LAST holds."""
    _, run = train(Path(folder), epochs=1, call={"mesh": SAVED})
    point = run.checkpoint()
    return {
        "id": run.id,
        "geometry": point.host["geometry"],
        "shards": sorted(name for name, leaf in point.leaves.items() if leaf.shards),
        "names": sorted(point.leaves),
    }


def take_on(folder: str, source: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Go on from the run in both modes; what was said, what was made, and whether the weights came exactly."""
    root, begins = Path(folder), Begins()
    before = {path.name for path in root.iterdir()}
    call: dict[str, Any] = {"mesh": mesh}
    told = error(lambda: train(root, Begins(), epochs=2, resume_from_run_id=source, call=dict(call)))
    salt = "-".join(["w", str(jax.process_count()), *map(str, mesh.values())])
    more: dict[str, Any] = {"resume_from_run_id": source, "resume_mode": "weights_only", "salt": salt}
    _, run = train(root, begins, epochs=1, call=dict(call), **more)
    untouched = {path.name for path in root.iterdir()} == before | {run.id}
    stored = NNRun.load(source, root).checkpoint().load_all()
    exact = {
        name: np.array_equal(array, begins.weights[name.removeprefix("params/")])
        for name, array in stored.items()
        if name.startswith("params/")
    }
    return {**told, "untouched": untouched, "status": run.status, "exact": exact}
