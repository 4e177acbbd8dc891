"""A tiny run with a journal for tests of the store: 4 records an epoch; also a program that kills itself.

`python -m tests.runs.journals ROOT EPOCHS MOMENT` continues the run up to EPOCHS epochs and dies at MOMENT of the last.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.core import fsio
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs.commit import CommitPoint
from nnx_jax.runs.journal import JournalWriter
from nnx_jax.runs.journal_format import JournalExtent
from nnx_jax.runs.store import RunStore

RUN_ID = "a1b2c3d4e5f60718"
COLUMNS = ("kind", "epoch", "batch", "step", "lr", "train_loss", "val_loss", "monitor")
SPEC: dict[str, Any] = {"model": {}, "train": {"n_epochs": 9}}
JOURNAL = HistoryJournal(retention=6, chunk_size=3)
BATCHES = 4


def table(epoch: int) -> dict[str, Any]:
    """Return the records of an epoch by column."""
    steps = [epoch * BATCHES + batch + 1 for batch in range(BATCHES)]
    losses = [1.0 / step for step in steps]
    return {"kind": "batch", "epoch": epoch, "batch": list(range(BATCHES)), "step": steps, "train_loss": losses}


def records(*epochs: int) -> list[dict[str, Any]]:
    """Return the records of epochs as they are read: every column, in order."""
    found = []
    for epoch in epochs:
        for place in range(BATCHES):
            row = {name: value[place] if isinstance(value, list) else value for name, value in table(epoch).items()}
            found.append({name: row.get(name) for name in COLUMNS})
    return found


def epoch_row(epoch: int) -> dict[str, Any]:
    """Return the row that sums up an epoch."""
    row = {"kind": "epoch", "epoch": epoch, "step": (epoch + 1) * BATCHES, "val_loss": 2.0 / (epoch + 1)}
    return {name: row.get(name) for name in COLUMNS}


def fill(history: Any, epoch: int) -> None:
    """Append an epoch as the loop does: its records, then its row."""
    history.append_table(table(epoch), BATCHES)
    history.append([epoch_row(epoch)])


def write(directory: Path, epochs: int, spec: HistoryJournal = JOURNAL) -> JournalExtent:
    """Write a journal of whole epochs, committed one by one."""
    writer = JournalWriter(directory, COLUMNS, spec)
    for epoch in range(epochs):
        fill(writer, epoch)
        writer.flush()
        writer.settle()
    return writer.committed


def open_store(
    root: str | Path, run_id: str = RUN_ID, journal: HistoryJournal | None = JOURNAL, **more: Any
) -> RunStore:
    return RunStore.open(root, run_id, SPEC, COLUMNS, journal=journal, **more)


def point(epoch: int, **changes: Any) -> CommitPoint:
    steps = (epoch + 1) * BATCHES
    arrays = {"w": np.full(3, epoch, np.float32)}
    host = {"position": {"epoch": epoch + 1, "batch": 0}}
    return CommitPoint(**{"epoch": epoch, "step": steps, "batch": steps, "arrays": arrays, "host": host, **changes})


def commit_epoch(store: RunStore, epoch: int, **changes: Any) -> None:
    """Append an epoch and commit it."""
    fill(store.history, epoch)
    store.committer.commit(point(epoch, **changes))
    store.committer.drain()


def run(root: str | Path, epochs: int, run_id: str = RUN_ID, **more: Any) -> None:
    """Continue the run where its LAST stands, up to `epochs` epochs in all."""
    with open_store(root, run_id, **more) as store:
        for epoch in range(store.point.epoch + 1 if store.point else 0, epochs):
            commit_epoch(store, epoch)


MOMENTS = {
    "chunk": (fsio, "create_file", "chunk-"),
    "LAST": (fsio, "atomic_write", "LAST"),
}
"""What a commit is about to write when it is killed."""


def die_before(moment: str) -> None:
    """Kill this process where `moment` would be written; of a chunk the second time, with one on disk already."""
    module, name, wanted = MOMENTS[moment]
    real, seen = getattr(module, name), []

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path).name.startswith(wanted):
            seen.append(path)
            if len(seen) == 1 + (moment == "chunk"):
                os.kill(os.getpid(), signal.SIGKILL)
        return real(path, *args, **kwargs)

    setattr(module, name, call)


if __name__ == "__main__":
    wanted_epochs = int(sys.argv[2])
    run(sys.argv[1], wanted_epochs - 1)
    with open_store(sys.argv[1]) as opened:
        die_before(sys.argv[3])
        commit_epoch(opened, wanted_epochs - 1)
