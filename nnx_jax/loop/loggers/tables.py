"""CSVLogger and JSONLLogger: one file for the rows of one run or of many, whole again after a kill and a resume."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import ConfigError
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.loggers.base import Logger
from nnx_jax.runs.history import format_header, format_row, parse_csv

FIRST = ("run", "kind", "epoch", "step")
"""What every row begins with."""

_LIMIT = 4 * 1024**3
Row = Mapping[str, Any]


class _TableLogger(Logger, ABC):
    """What the two forms share: rows wait until they are flushed; a session begins by cutting what was lost.

    Rows of other runs stay, so one file can hold many.
    """

    def __init__(self, path: str | Path, every: str = "epoch") -> None:
        super().__init__(every)
        self.path = Path(path)
        self._run = ""
        self._rows: list[Row] = []

    def open(self, ctx: TrainContext) -> None:
        """Keep the rows of other runs, and those of this run that its last commit covers."""
        self._run, self._rows = ctx.run_id, []
        fsio.make_dir(self.path.parent)
        if not self.path.exists():
            return
        data = fsio.read_bytes(self.path, _LIMIT)
        whole = data[: data.rfind(b"\n") + 1]  # a kill may have torn the last line
        try:
            rows = self._parse(whole)
            if foreign := [row for row in rows if not isinstance(row, Mapping) or not row.keys() >= set(FIRST)]:
                raise ValueError(f"it holds {str(foreign[0])[:80]}")
            kept = [row for row in rows if row["run"] != self._run or _before(row, ctx)]
        except (ValueError, KeyError, TypeError) as error:
            told = f"{type(self).__name__}: {self.path} is not a file of this logger ({error}); give another path"
            raise ConfigError(told) from error
        if ctx.step == 0:
            kept = [row for row in kept if row["run"] != self._run]
        if len(kept) < len(rows) or len(whole) < len(data):
            self._rewrite(kept)

    def log(self, kind: str, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Add a row."""
        self._rows.append({"run": self._run, "kind": kind, "epoch": epoch, "step": step, **values})

    def flush(self) -> None:
        """Append the rows to the file."""
        rows, self._rows = self._rows, []
        if rows:
            self._append(rows)

    def close(self, ctx: TrainContext) -> None:
        """Write what is left."""
        self.flush()

    @abstractmethod
    def _parse(self, data: bytes) -> Sequence[Row]:
        """The rows of whole lines; ValueError for what is none."""

    @abstractmethod
    def _append(self, rows: Sequence[Row]) -> None:
        """Put rows at the end of the file."""

    @abstractmethod
    def _rewrite(self, rows: Sequence[Row]) -> None:
        """Make the file anew."""


class JSONLLogger(_TableLogger):
    """Append one JSON object a line to a file: `{"epoch": 0, "kind": "epoch", "lr": 0.1, "run": ..., ...}`.

    Args:
        path: the file; its directory is made. Rows of other runs in it stay.
        every: "epoch" for a row an epoch; "update" for one of every update and validation too.

    A value that is not finite is null. Text that is no file of this logger is refused when training begins.
    """

    def _parse(self, data: bytes) -> Sequence[Row]:
        return codec.parse_json_lines(data, source=str(self.path))

    def _append(self, rows: Sequence[Row]) -> None:
        fsio.append_bytes(self.path, _lines(rows))

    def _rewrite(self, rows: Sequence[Row]) -> None:
        fsio.atomic_write(self.path, _lines(rows))


class CSVLogger(_TableLogger):
    """Append rows to a CSV file: run, kind, epoch, step, then every value by name; a row without one leaves it empty.

    Args:
        path: the file; its directory is made. Rows of other runs in it stay.
        every: "epoch" for a row an epoch; "update" for one of every update and validation too.

    A value that comes up later gets a column of its own, for which the file is written anew. A file that is not of this
    logger is refused when training begins.
    """

    def __init__(self, path: str | Path, every: str = "epoch") -> None:
        super().__init__(path, every)
        self._columns: tuple[str, ...] = FIRST

    def _parse(self, data: bytes) -> Sequence[Row]:
        header, *rows = parse_csv(data) if data else [list(FIRST)]
        if tuple(header[: len(FIRST)]) != FIRST:
            raise ValueError(f"its columns are {', '.join(map(str, header))}")
        self._columns = tuple(map(str, header))
        return [dict(zip(self._columns, row, strict=True)) for row in rows]

    def open(self, ctx: TrainContext) -> None:
        """As of every table, with the columns the file has."""
        self._columns = FIRST
        super().open(ctx)

    def _append(self, rows: Sequence[Row]) -> None:
        new = [name for row in rows for name in row if name not in self._columns]
        if new or not self.path.exists():
            old = self._parse(fsio.read_bytes(self.path, _LIMIT)) if self.path.exists() else ()
            self._columns = (*self._columns, *dict.fromkeys(new))
            self._rewrite([*old, *rows])
            return
        fsio.append_bytes(self.path, b"".join(format_row(row, self._columns) for row in rows))

    def _rewrite(self, rows: Sequence[Row]) -> None:
        fsio.atomic_write(
            self.path, b"".join([format_header(self._columns), *(format_row(row, self._columns) for row in rows)])
        )


def _before(row: Row, ctx: TrainContext) -> bool:
    """Return whether a row is of before the session; an epoch to come may have made no update, and count as many."""
    return row["step"] <= ctx.step and not (row["kind"] == "epoch" and row["epoch"] >= ctx.epoch)


def _lines(rows: Sequence[Row]) -> bytes:
    return b"".join(codec.canonical_json({n: _finite(value) for n, value in row.items()}) + b"\n" for row in rows)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
