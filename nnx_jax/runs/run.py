"""`NNRun`: a stored run as its readers see it, up to LAST and never further; reading changes no file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import NnxError, ResumePointError, nearest
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.history import read_history
from nnx_jax.runs.layout import BEST, LAST, RunPaths
from nnx_jax.runs.lease import live_owner
from nnx_jax.runs.pointers import Pointer, list_pointers
from nnx_jax.runs.provenance import ResumeStatus
from nnx_jax.runs.resume import ResumePoint, read_point
from nnx_jax.runs.store import status_of


@dataclass(frozen=True)
class NNRun:
    """One run, read at one moment.

    The history can be long, so `columns` and `records` are read and verified on first use, up to where LAST stood at
    that moment, and then kept. They raise HistoryCorruptionError when the file is not what LAST said of it.

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

    @cached_property
    def _history(self) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
        return read_history(RunPaths(self.root, self.id).history, self.last.history if self.last else None)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the history's columns; none before the first commit."""
        return self._history[0]

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dict per committed row; a missing value is None."""
        return self._history[1]

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
        """Return the values of one history column, None where a row has none."""
        if name not in self.columns:
            raise ResumePointError(f"run {self.id!r} has no history column {name!r}{nearest(name, self.columns)}")
        return [record[name] for record in self.records]


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
