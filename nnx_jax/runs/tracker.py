"""An experiment tracker in a directory: one record a run, its values line by line, its files beside them."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from pydantic import PrivateAttr

from nnx_jax.core import codec, fsio
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.core.hashing import content_hash
from nnx_jax.core.positional import PositionalOperator
from nnx_jax.core.registry import register
from nnx_jax.params.fields import Count
from nnx_jax.runs.registry import Directory

RECORD, METRICS, FILES = "run.json", "metrics.jsonl", "artifacts"
STATUSES = ("running", "completed", "failed", "interrupted")
_LIMIT = 4 * 2**30


@runtime_checkable
class ExperimentTracker(Protocol):
    """Where runs are logged; any object with these methods is one."""

    def start_run(self, name: str, config: Mapping[str, Any]) -> Any:
        """Begin a run; return what the other methods take."""
        ...

    def log_metrics(self, run: Any, metrics: Mapping[str, float], step: int) -> None:
        """Log values at an update."""
        ...

    def log_artifact(self, run: Any, path: str | Path, name: str) -> None:
        """Keep a file."""
        ...

    def end_run(self, run: Any, status: str) -> None:
        """End a run."""
        ...


@dataclass
class Run:
    """One run of a tracker.

    Attributes:
        run_id: its name in the tracker's directory.
        name: what the user calls it; several runs may have one name.
        pipeline_hash: SHA-256 of the configuration.
        config: plain values.
        metrics: the last value of every name.
        artifacts: files by name, relative to the run's directory.
        started_at, ended_at: ISO-8601 in UTC; the end is None while it runs.
        status: one of `STATUSES`.
    """

    run_id: str
    name: str = ""
    pipeline_hash: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    started_at: str = ""
    ended_at: str | None = None
    status: str = "running"


@register("file")
class FileTracker(PositionalOperator):
    """Keeps runs under `root/<run_id>/`: `run.json`, `metrics.jsonl` and `artifacts/`.

    A run that is still "running" when nobody works on it was killed: its values up to the last flush are there.
    """

    family: ClassVar[str] = "experiment_tracker"
    never_called: ClassVar[str] = "an experiment tracker is given to LogToExperiment"

    root: Directory
    """The directory; made at the first run."""
    flush_every: Count = 100
    """Records of values that may wait before they are on the disk."""

    _waiting: dict[str, list[bytes]] = PrivateAttr(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(self, root: str | Path, flush_every: int = 100, **data: Any) -> None: ...

    def start_run(self, name: str, config: Mapping[str, Any] | None = None) -> Run:
        """Begin a run under a new id.

        Raises:
            ConfigError: the configuration holds something JSON cannot.
        """
        now = datetime.now(UTC)
        run = Run(f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}", str(name), started_at=now.isoformat())
        run.config = codec.parse_json(codec.canonical_json(dict(config or {})))
        run.pipeline_hash = content_hash(run.config)
        fsio.make_dir(Path(self.root, run.run_id))
        self._record(run)
        return run

    def log_metrics(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        """Add a line of values; one that is not finite is null."""
        values = {str(name): float(value) for name, value in metrics.items()}
        finite = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        run.metrics.update({name: value for name, value in finite.items() if value is not None})
        waiting = self._waiting.setdefault(run.run_id, [])
        waiting.append(codec.canonical_json({"step": int(step), "metrics": finite}) + b"\n")
        if len(waiting) >= self.flush_every:
            self._flush(run)

    def log_artifact(self, run: Run, path: str | Path, name: str | None = None) -> None:
        """Keep a copy of a file under a name, its own by default."""
        kept = fsio.safe_name(name or Path(path).name, "artifact name")
        folder = fsio.make_dir(Path(self.root, run.run_id, FILES))
        fsio.atomic_write(fsio.safe_join(folder, kept), fsio.read_bytes(path, _LIMIT, follow=True))
        run.artifacts[kept] = f"{FILES}/{kept}"
        self._record(run)

    def end_run(self, run: Run, status: str = "completed") -> None:
        """Write what waits, and how the run ended.

        Raises:
            ConfigError: no such status.
        """
        if status not in STATUSES:
            raise ConfigError(f"a run does not end {status!r}{nearest(status, STATUSES)}")
        self._flush(run)
        run.status, run.ended_at = status, datetime.now(UTC).isoformat()
        self._record(run)

    def load_run(self, run_id: str) -> Run:
        """Return the record of a run; KeyError for none."""
        path = fsio.safe_join(self.root, fsio.safe_name(run_id, "run id"), RECORD)
        if not path.exists():
            raise KeyError(f"the tracker has no run {run_id!r}")
        return Run(**codec.load_json(path))

    def history(self, run_id: str) -> list[dict[str, Any]]:
        """Return the lines of values of a run: {"step": ..., "metrics": {...}}; a line torn by a kill is left out."""
        path = fsio.safe_join(self.root, fsio.safe_name(run_id, "run id"), METRICS)
        data = fsio.read_bytes(path, _LIMIT) if path.exists() else b""
        return codec.parse_json_lines(data[: data.rfind(b"\n") + 1], source=str(path))

    def runs(self) -> tuple[str, ...]:
        """Return the ids of the runs, oldest first."""
        root = Path(self.root)
        return tuple(sorted(each.parent.name for each in root.glob(f"*/{RECORD}")))

    def _flush(self, run: Run) -> None:
        waiting = self._waiting.get(run.run_id)
        if waiting:
            fsio.append_bytes(Path(self.root, run.run_id, METRICS), b"".join(waiting))
            del self._waiting[run.run_id]

    def _record(self, run: Run) -> None:
        path = Path(self.root, run.run_id, RECORD)
        fsio.atomic_write(path, durable_json(dataclasses.asdict(run), source=str(path), people=True))
