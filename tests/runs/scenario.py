"""A tiny run for tests of the store: three leaves, one history row an epoch; also a program that can be killed.

`python tests/runs/scenario.py ROOT [EPOCHS] [RUN_ID]` opens the run (or continues it) and commits up to EPOCHS epochs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.runs import pointers
from nnx_jax.runs.commit import CommitPoint
from nnx_jax.runs.store import RunStore

RUN_ID = "a1b2c3d4e5f60718"
COLUMNS = ("epoch", "step", "loss", "note")
SPEC: dict[str, Any] = {"model": {"net": {"kind": "feed_forward"}}, "train": {"n_epochs": 4}}
STEPS = 5  # updates an epoch
PLANNED = 4  # epochs the phase pointers are planned for


def leaves(epoch: int) -> dict[str, np.ndarray]:
    """Return what the run holds after `epoch`: a matrix, a counter, and words of a random key."""
    rng = np.random.default_rng(epoch)
    return {
        "params/dense.kernel": rng.standard_normal((16, 8)).astype(np.float32),
        "opt/count": np.asarray((epoch + 1) * STEPS, np.int32),
        "rng": rng.integers(0, 2**32, 4, dtype=np.uint32),
    }


def row(epoch: int) -> dict[str, Any]:
    """Return the history row of an epoch; the note is text that CSV has to quote."""
    return {"epoch": epoch, "step": (epoch + 1) * STEPS, "loss": 1.0 / (epoch + 1), "note": f'say "{epoch}", twice'}


def point(epoch: int, **changes: Any) -> CommitPoint:
    """Return the commit of an epoch: every epoch improves, so BEST moves with it unless `best=False`."""
    fields: dict[str, Any] = {
        "epoch": epoch,
        "step": (epoch + 1) * STEPS,
        "batch": (epoch + 1) * STEPS,
        "arrays": leaves(epoch),
        "host": {"position": {"epoch": epoch + 1, "batch": 0}, "components": {}},
        "names": pointers.phase_names(epoch, PLANNED),
        "best": True,
        "score": 1.0 / (epoch + 1),
    }
    return CommitPoint(**{**fields, **changes})


def open_store(root: str | Path, run_id: str = RUN_ID, **changes: Any) -> RunStore:
    """Open the scenario's run."""
    return RunStore.open(root, run_id, SPEC, COLUMNS, **changes)


def commit_epoch(store: RunStore, epoch: int, *, drain: bool = True, **changes: Any) -> None:
    """Write the row of an epoch and commit it."""
    store.history.append([row(epoch)])
    store.committer.commit(point(epoch, **changes))
    if drain:
        store.committer.drain()


def run(root: str | Path, epochs: int = 2, run_id: str = RUN_ID, **changes: Any) -> None:
    """Continue the run where its LAST stands, up to `epochs` epochs in all."""
    with open_store(root, run_id, **changes) as store:
        for epoch in range(store.point.epoch + 1 if store.point else 0, epochs):
            commit_epoch(store, epoch, drain=False)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2, *sys.argv[3:4])
