"""Moves the history of a stored run from `idps.csv` to a journal; the run keeps its id, checkpoints and rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nnx_jax.core.errors import CheckpointError, ResumePointError, nearest
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs import lease, pointers
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.history import Extent, read_history
from nnx_jax.runs.journal import JournalWriter
from nnx_jax.runs.journal_format import JournalExtent
from nnx_jax.runs.layout import LAST, RunPaths
from nnx_jax.runs.pointers import Pointer
from nnx_jax.runs.run import NNRun


def migrate_history(
    run_id: str, *, spec: HistoryJournal, runs_dir: str | Path = "runs", discard_uncommitted: bool = False
) -> NNRun:
    """Move the history of a finished or interrupted run to a journal; return the run.

    The journal is written beside the file, then the checkpoints' pointers name it, LAST as the final one, and then
    the file is removed. Stopped at any moment, the run is whole in one form or the other, and another call goes on.

    Args:
        spec: the journal's settings.
        discard_uncommitted: whether rows that no commit covers, left by a run that was killed, may be dropped.

    Raises:
        TypeError: `spec` is no HistoryJournal.
        ResumePointError: (a ValueError) there is no such run.
        LeaseHeldError: it is being written now.
        CheckpointError: nothing is committed, or rows are uncommitted; nothing was changed.
        HistoryCorruptionError: (a ValueError) the history is not what LAST says; nothing was changed.
    """
    if not isinstance(spec, HistoryJournal):
        raise TypeError(f"spec must be a HistoryJournal, got {type(spec).__name__}")
    paths = RunPaths(runs_dir, run_id)
    if not paths.run.is_dir():
        raise ResumePointError(f"there is no run {run_id!r} in {paths.root}{nearest(run_id, run_ids(paths.root))}")
    floor = last.fencing if (last := pointers.read_pointer(paths)) else 0
    with lease.acquire(paths, floor=floor):
        found = pointers.list_pointers(paths)
        last = found.get(LAST)
        if last is None:
            raise CheckpointError(f"run {run_id!r} has no commit; start it again with the journal")
        if isinstance(last.history, Extent):
            _move(paths, spec, found, last.history, discard_uncommitted)
        paths.history.unlink(missing_ok=True)
    return NNRun.load(run_id, paths.root)


def _move(
    paths: RunPaths, spec: HistoryJournal, found: dict[str, Pointer], extent: Extent, discard_uncommitted: bool
) -> None:
    columns, rows = read_history(paths.history, extent)
    spare = paths.history.stat().st_size - extent.bytes
    if spare and not discard_uncommitted:
        raise CheckpointError(
            f"{paths.history}: its last {spare} bytes belong to no commit; give discard_uncommitted=True to drop them"
        )
    writer = JournalWriter(paths.journal, columns, spec)
    extents: dict[int, JournalExtent] = {}
    for count in sorted({pointer.history.rows for pointer in found.values() if pointer.history.rows <= len(rows)}):
        writer.append(rows[writer.rows : count])
        extents[count] = writer.flush()
    for name, pointer in sorted(found.items(), key=lambda item: item[0] == LAST):
        if pointer.history.rows in extents:
            pointers.write_pointer(paths, name, replace(pointer, history=extents[pointer.history.rows]))
