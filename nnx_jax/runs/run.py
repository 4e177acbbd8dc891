"""`NNRun`: a stored run as its readers see it, up to LAST and never further; reading changes no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import NnxError, ResumePointError, nearest
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.experiment import Attempt, ProvenanceRecord, read_provenance
from nnx_jax.runs.extra import EXTRA, unpack
from nnx_jax.runs.history import read_history
from nnx_jax.runs.journal_format import JournalExtent, is_summary
from nnx_jax.runs.journal_read import JournalReader
from nnx_jax.runs.layout import BEST, LAST, RunPaths
from nnx_jax.runs.lease import live_owner
from nnx_jax.runs.pointers import Pointer, list_pointers
from nnx_jax.runs.provenance import ResumeStatus
from nnx_jax.runs.resume import ResumePoint, read_point
from nnx_jax.runs.store import status_of


@dataclass(frozen=True)
class NNRun:
    """One run, read at one moment.

    The history can be long, so `columns`, `records` and `epochs` are read and verified on first use, up to where LAST
    stood at that moment, and then kept. They raise HistoryCorruptionError when it is not what LAST said of it.

    Attributes:
        id: the run id, also the directory's name.
        root: the runs directory, absolute.
        state: the configuration in `run.yaml`.
        metadata: the environment in `metadata.yaml`.
        pointers: LAST, BEST, phases and tags; empty before the first commit.
    """

    id: str
    root: Path
    state: dict[str, Any]
    metadata: dict[str, Any]
    pointers: dict[str, Pointer]

    @classmethod
    def load(cls, run_id: str, root: str | Path = "runs") -> NNRun:
        """Read a run.

        Raises:
            UnsafePathError: (a ValueError) the id could leave `root`; no file is touched.
            ResumePointError: (a ValueError) there is no such run, or LAST is empty, damaged or foreign.
        """
        paths = RunPaths(root, run_id)
        if not paths.run.is_dir():
            raise ResumePointError(f"there is no run {run_id!r} in {paths.root}{nearest(run_id, run_ids(paths.root))}")
        found = list_pointers(paths)
        state, metadata = (_read_yaml(path) for path in (paths.config, paths.metadata))
        return cls(paths.run_id, paths.root, state, metadata, found)

    @classmethod
    def all(cls, root: str | Path = "runs") -> list[NNRun]:
        """Read every run below `root`, in id order; the first damaged one raises (list them with `run_ids`)."""
        return [cls.load(run_id, root) for run_id in run_ids(RunPaths(root, "_").root)]

    @property
    def history(self) -> Path:
        """Where the history is: the file `idps.csv`, or the directory of the run's journal."""
        paths = RunPaths(self.root, self.id)
        has_journal = isinstance(self.last.history, JournalExtent) if self.last else paths.journal.is_dir()
        return paths.journal if has_journal else paths.history

    @property
    def committed_rows(self) -> int:
        """How many rows the whole committed history has; nothing is read for it."""
        return self.last.history.rows if self.last else 0

    @cached_property
    def _journal(self) -> JournalReader | None:
        """The committed part of the journal, None for a run without one."""
        extent = self.last.history if self.last else None
        return JournalReader(self.history, extent) if isinstance(extent, JournalExtent) else None

    @cached_property
    def _history(self) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
        extent = self.last.history if self.last else None
        if self._journal is not None:
            return self._journal.columns, self._journal.tail(self._journal.spec.retention)
        return read_history(self.history, None if isinstance(extent, JournalExtent) else extent)

    @property
    def stored_columns(self) -> tuple[str, ...]:
        """The columns the history is stored under; none before the first commit."""
        return self._journal.columns if self._journal is not None else self._history[0]

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the values in `records`, also of those a validation of the user's own returned."""
        stored = self.stored_columns
        if EXTRA not in stored:
            return stored
        place = stored.index(EXTRA)
        own = sorted({name for row in self.summaries for name in row}.difference(stored))
        return (*stored[:place], *own, *stored[place + 1 :])

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """One dict per committed row; a missing value is None.

        Of a run with a journal the last `retention` records, without `summaries`; `iter_history` has them all.
        """
        return [unpack(row) for row in self._history[1]]

    @cached_property
    def summaries(self) -> list[dict[str, Any]]:
        """The committed rows that sum up an epoch or a validation inside one, all of them in their order."""
        if self._journal is not None:
            return [unpack(row) for _, row in self._journal.summaries()]
        return [row for row in self.records if is_summary(row)]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The committed rows that sum up an epoch, one per finished epoch."""
        return [row for row in self.summaries if row["kind"] == "epoch"]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every committed row in its order; of a journal a piece at a time."""
        return map(unpack, self.stored_rows())

    def stored_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows with the columns they are stored under."""
        return self._journal.rows() if self._journal is not None else iter(self._history[1])

    @property
    def path(self) -> Path:
        return self.root / self.id

    @property
    def last(self) -> Pointer | None:
        return self.pointers.get(LAST)

    @property
    def best(self) -> Pointer | None:
        return self.pointers.get(BEST)

    @property
    def status(self) -> str:
        """finished | running (its lease is held by a live process) | interrupted | fresh (nothing committed)."""
        status = status_of(self.last)
        if status != "finished" and live_owner(RunPaths(self.root, self.id)) is not None:
            return "running"
        return status

    @property
    def resume_status(self) -> ResumeStatus:
        return ResumeStatus.from_state(self.metadata.get("resume", {}))

    @property
    def provenance(self) -> ProvenanceRecord | None:
        """What the run is said to come from, as its files say now; None when nobody said it.

        Raises:
            ResumePointError: (a ValueError) a file is not what was written; everything else of the run reads on.
        """
        return read_provenance(RunPaths(self.root, self.id))

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt at a run with provenance, None without; raises like `provenance`."""
        known = self.provenance
        return known.attempt if known is not None else None

    @property
    def artifact(self) -> dict[str, Any] | None:
        """What the finished run wrote as its result, None before."""
        path = RunPaths(self.root, self.id).artifact
        return codec.load_json(path) if self.last is not None and self.last.final else None

    def checkpoints(self) -> list[str]:
        """Return the names that can be loaded, LAST first."""
        return list(self.pointers)

    def checkpoint(self, name: str = LAST) -> ResumePoint:
        """Return checkpoint `name` (or a step in digits), every file verified."""
        return read_point(RunPaths(self.root, self.id), name)

    def column(self, name: str) -> list[Any]:
        """Return the values of one column of `records`, None where a row has none."""
        if name not in self.columns:
            raise ResumePointError(f"run {self.id!r} has no history column {name!r}{nearest(name, self.columns)}")
        return [record.get(name) for record in self.records]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        obj = codec.parse_yaml(fsio.read_bytes(path), source=str(path))
    except FileNotFoundError:
        return {}
    except (OSError, NnxError) as error:
        raise ResumePointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(obj, dict):
        raise ResumePointError(f"{path}: holds {type(obj).__name__}, expected a mapping")
    return obj
