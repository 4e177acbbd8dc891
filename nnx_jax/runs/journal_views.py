"""Whole histories as streams, a piece in memory at a time: over a run, over a line of runs, and out to a CSV file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnx_jax.core import fsio
from nnx_jax.core.errors import ResumePointError
from nnx_jax.runs.history import format_header, format_row
from nnx_jax.runs.journal_format import is_summary
from nnx_jax.runs.run import NNRun

Place = tuple[int, int]
"""Epoch and microbatch of a row; a row that sums up an epoch comes after all of them."""


def iter_history(
    run_id: str, runs_dir: str | Path = "runs", *, lineage: bool = False, summaries: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the committed records of a run, oldest first; a missing value is None.

    Works for runs with a journal, which is read a piece at a time, and for those with `idps.csv`.

    Args:
        lineage: the records of the run it was resumed from come first, up to where it was, and so on back to the first
            of the line; no epoch comes twice.
        summaries: the rows that sum up an epoch or a validation come too, in their place.

    Raises:
        ResumePointError: (a ValueError) there is no such run, or one of its line is gone.
        HistoryCorruptionError: (a ValueError) when a part that is not what was committed is reached.
    """
    run = NNRun.load(run_id, runs_dir)
    line = _line(run) if lineage else [run]
    ends = [_end(parent, child) for parent, child in zip(line, line[1:], strict=False)]
    return _rows(line, [*ends, None], summaries)


def export_history_csv(run_id: str, path: str | Path, runs_dir: str | Path = "runs") -> Path:
    """Write the committed history as the `idps.csv` of a run without a journal has it, byte for byte; return the path.

    Raises:
        ResumePointError: (a ValueError) there is no such run, or nothing is committed.
        HistoryCorruptionError: (a ValueError) the history is not what was committed; an existing file is as before.
    """
    run, target = NNRun.load(run_id, runs_dir), Path(path)
    if run.last is None:
        raise ResumePointError(f"run {run_id!r} in {run.root} has no commit, so there is no history to export")
    columns = run.stored_columns
    fsio.atomic_write(target, (part for part in _csv(run, columns)))
    return target


def _csv(run: NNRun, columns: tuple[str, ...]) -> Iterator[bytes]:
    yield format_header(columns)
    for row in run.stored_rows():
        yield format_row(row, columns)


def _line(run: NNRun) -> list[NNRun]:
    """Return the run and those it was resumed from, the oldest first."""
    line = [run]
    while (source := line[0].resume_status.source_run_id) is not None:
        if any(source == known.id for known in line):
            raise ResumePointError(f"run {run.id!r} descends from itself by its metadata.yaml; the file was changed")
        try:
            line.insert(0, NNRun.load(source, run.root))
        except ResumePointError as error:
            raise ResumePointError(f"the line of run {run.id!r} goes back to {source!r}: {error}") from error
    return line


def _end(parent: NNRun, child: NNRun) -> Place | None:
    """Return the place from which on the parent's rows are not the child's: its first record, or the epoch after."""
    first = next((place for row in child.rows() if (place := _place(row)) is not None), None)
    epoch = child.resume_status.source_epoch
    recorded = None if epoch is None else (epoch + 1, 0)
    return min((place for place in (first, recorded) if place is not None), default=None)


def _rows(line: list[NNRun], ends: list[Place | None], summaries: bool) -> Iterator[dict[str, Any]]:
    for run, end in zip(line, ends, strict=True):
        for row in run.rows():
            if end is not None and not _before(row, end):
                break
            if summaries or not is_summary(row):
                yield row


def _place(row: dict[str, Any]) -> Place | None:
    """Return where a record stands; None for a row that is no record of a microbatch."""
    epoch, batch = row.get("epoch"), row.get("batch")
    return None if is_summary(row) or epoch is None else (epoch, batch or 0)


def _before(row: dict[str, Any], end: Place) -> bool:
    place = _place(row)
    if place is not None:
        return place < end
    # A validation inside the epoch goes with the records before it; the epoch's own row comes after all of them.
    return row.get("epoch", 0) < end[0] + (row.get("kind") == "eval")
