"""Metric writers: where a training's values go, one call a record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, runtime_checkable

from pydantic import Field, PlainValidator, PrivateAttr

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import ConfigError
from nnx_jax.core.positional import PositionalOperator
from nnx_jax.core.registry import register
from nnx_jax.loop.loggers.event_files import EventFile
from nnx_jax.params.fields import Count, Text
from nnx_jax.runs.history import format_header, format_row, parse_csv

_LIMIT = 4 * 1024**3
_COLUMNS = ("step", "timestamp")


@runtime_checkable
class MetricWriter(Protocol):
    """What a training writes its values to; any object with these two methods is one."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the values of one update by name; those of an evaluation have names that begin with "eval/"."""
        ...

    def close(self) -> None:
        """Bring everything to where it is read; called once at the end of a run, and harmless a second time."""
        ...


class Sink(PositionalOperator):
    """Base of the built-in writers (family `metric_writer`). What is open is no part of the settings: two writers of
    one place are equal, and a closed one may be written to again."""

    family: ClassVar[str] = "metric_writer"
    never_called: ClassVar[str] = "a metric writer is written to; give it to the loop's `metric_writer`"


def _path(value: Any) -> str:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("expected the path of a file")
    return str(value)


class _FileSink(Sink):
    """Records wait in memory until there are `flush_every` of them; then they are appended and synced."""

    path: Annotated[str, PlainValidator(_path)]
    """The file; its directory is made, and what it holds stays."""
    flush_every: Count = 100
    """Records that may wait before they are on the disk."""

    _rows: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    _opened: bool = PrivateAttr(default=False)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a record; see MetricWriter."""
        values = {str(name): float(value) for name, value in metrics.items()}
        self._rows.append({"step": int(step), "metrics": values, "timestamp": datetime.now(UTC).isoformat()})
        if len(self._rows) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Append what waits; it is kept, and written the next time, if that fails."""
        if not self._rows:
            return
        if not self._opened:
            fsio.make_dir(Path(self.path).parent)
            _mend(Path(self.path))
            self._opened = True
        self._append(self._rows)
        self._rows = []

    def close(self) -> None:
        """Append what waits; the next record opens the file again."""
        self.flush()
        self._opened = False

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        raise AssertionError("a file sink says how rows are written")


def _mend(path: Path) -> None:
    """Cut off a last line that a kill has torn."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        file.seek(-1, 2)
        if file.read(1) == b"\n":
            return
    data = fsio.read_bytes(path, _LIMIT)
    fsio.truncate(path, data.rfind(b"\n") + 1)


@register("jsonl")
class JSONLWriter(_FileSink):
    """One JSON object a line: `{"metrics": {"loss": 0.5}, "step": 10, "timestamp": "2026-01-01T00:00:00+00:00"}`.

    A value that is not finite is null, since JSON has no word for it.
    """

    if TYPE_CHECKING:

        def __init__(self, path: str | Path, flush_every: int = 100, **data: Any) -> None: ...

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = [{**row, "metrics": {n: _finite(value) for n, value in row["metrics"].items()}} for row in rows]
        fsio.append_bytes(self.path, b"".join(codec.canonical_json(line) + b"\n" for line in lines))


@register("csv")
class CSVWriter(_FileSink):
    """A CSV file: step, timestamp, then every value by name; a record without one leaves its cell empty.

    A value that comes up later gets a column of its own, for which the file is written anew.

    Raises:
        ConfigError: the file is there and is none of this writer.
    """

    _columns: tuple[str, ...] = PrivateAttr(default=())

    if TYPE_CHECKING:

        def __init__(self, path: str | Path, flush_every: int = 100, **data: Any) -> None: ...

    def close(self) -> None:
        super().close()
        self._columns = ()

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        path, flat = Path(self.path), [{**row["metrics"], **{n: row[n] for n in _COLUMNS}} for row in rows]
        if any(name not in self._columns for row in flat for name in row):
            columns, old = self._read(path)
            self._columns = (*columns, *dict.fromkeys(name for row in flat for name in row if name not in columns))
            if self._columns != columns or not old:
                lines = [format_header(self._columns), *(format_row(row, self._columns) for row in [*old, *flat])]
                fsio.atomic_write(path, b"".join(lines))
                return
        fsio.append_bytes(path, b"".join(format_row(row, self._columns) for row in flat))

    @staticmethod
    def _read(path: Path) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
        """The columns and rows of the file as it is."""
        if not path.exists() or not path.stat().st_size:
            return _COLUMNS, []
        try:
            header, *rows = parse_csv(fsio.read_bytes(path, _LIMIT))
        except ValueError as error:
            raise ConfigError(f"CSVWriter: {path} is not CSV ({error}); give another path") from error
        columns = tuple(map(str, header))
        if columns[: len(_COLUMNS)] != _COLUMNS:
            raise ConfigError(f"CSVWriter: {path} has the columns {', '.join(columns)}; give another path")
        return columns, [dict(zip(columns, row, strict=True)) for row in rows]


@register("tensorboard")
class TensorBoardWriter(Sink):
    """TensorBoard's event files, written without TensorFlow; look at them with `tensorboard --logdir <log_dir>`.

    A session that goes on from an earlier one makes TensorBoard leave out what the earlier one wrote beyond.
    """

    log_dir: Annotated[str, PlainValidator(_path)]
    """Directory of the files."""
    flush_every: Count = 100
    """Records that may wait before they are on the disk."""

    _file: EventFile | None = PrivateAttr(default=None)
    _waiting: int = PrivateAttr(default=0)

    if TYPE_CHECKING:

        def __init__(self, log_dir: str | Path, flush_every: int = 100, **data: Any) -> None: ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point to the curve of every name; see MetricWriter."""
        if self._file is None:
            self._file = EventFile(Path(self.log_dir), int(step))
        self._file.add(int(step), {name: float(value) for name, value in metrics.items()})
        self._waiting += 1
        if self._waiting >= self.flush_every:
            self._waiting = 0
            self._file.flush()

    def close(self) -> None:
        """Write what waits; the next record begins another file."""
        file, self._file, self._waiting = self._file, None, 0
        if file is not None:
            file.flush()


@register("wandb")
class WandbWriter(Sink):
    """A run of Weights & Biases (`pip install 'nnx_jax[wandb]'`), begun at the first record and finished by `close`.

    Raises:
        ImportError: wandb is not installed, at the first record.
    """

    project: Text | None = None
    """Project of the run."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """More for `wandb.init`, as {"mode": "offline"}."""

    _run: Any = PrivateAttr(default=None)

    if TYPE_CHECKING:

        def __init__(
            self, project: str | None = None, settings: Mapping[str, Any] | None = None, **data: Any
        ) -> None: ...  # fmt: skip

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row; see MetricWriter."""
        if self._run is None:
            try:
                import wandb  # pyright: ignore[reportMissingImports]
            except ImportError as error:
                raise ImportError("WandbWriter needs wandb: pip install 'nnx_jax[wandb]'") from error
            self._run = wandb.init(**{"project": self.project, **self.settings})
        self._run.log({name: float(value) for name, value in metrics.items()}, step=int(step))

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


@register("mlflow")
class MLflowWriter(Sink):
    """A run of MLflow (`pip install 'nnx_jax[mlflow]'`), begun at the first record and ended by `close`.

    Raises:
        ImportError: mlflow is not installed, at the first record.
    """

    experiment: Text = "nnx_jax"
    """Name of the experiment, which is made if it is not there."""
    run_name: Text | None = None
    """Name of the run; none: one that MLflow makes up."""
    tracking_uri: Text | None = None
    """Where to; none: as MLflow is configured."""

    _client: Any = PrivateAttr(default=None)
    _run_id: str = PrivateAttr(default="")

    if TYPE_CHECKING:

        def __init__(
            self, experiment: str = "nnx_jax", run_name: str | None = None, tracking_uri: str | None = None, **data: Any
        ) -> None: ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log every value; see MetricWriter."""
        if self._client is None:
            self._begin()
        client: Any = self._client
        for name, value in metrics.items():
            client.log_metric(self._run_id, name, float(value), step=int(step))

    def _begin(self) -> None:
        try:
            from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("MLflowWriter needs mlflow: pip install 'nnx_jax[mlflow]'") from error
        client = MlflowClient(tracking_uri=self.tracking_uri)
        known = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if known is None else known.experiment_id
        self._run_id = client.create_run(experiment, run_name=self.run_name).info.run_id
        self._client = client

    def close(self) -> None:
        """End the run."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run_id)


def _writers(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("expected metric writers")
    made = tuple(Sink.from_state(each) if isinstance(each, Mapping) else each for each in value)
    for each in made:
        if not isinstance(each, MetricWriter):
            raise TypeError(f"{type(each).__name__} is no MetricWriter; it needs write(step, metrics) and close()")
    return made


@register("several")
class MultiWriter(Sink):
    """Writes every record to several writers, in order; closing tries all of them and raises the first error."""

    writers: Annotated[Any, PlainValidator(_writers)]
    """The writers."""

    if TYPE_CHECKING:

        def __init__(self, writers: Sequence[Any], **data: Any) -> None: ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write to all; see MetricWriter."""
        for writer in self.writers:
            writer.write(step, dict(metrics))

    def close(self) -> None:
        """Close all."""
        failures: list[BaseException] = []
        for writer in self.writers:
            try:
                writer.close()
            except BaseException as failure:  # the others are closed all the same
                failures.append(failure)
        if failures:
            raise failures[0]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
