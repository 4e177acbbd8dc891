"""The run's history: an append-only CSV whose committed part is named by LAST; readers never look further.

The file is RFC 4180 CSV with line feeds. Text is always quoted and nothing else is, so values come back as written:
an empty cell is None, `nan`, `inf` and `-inf` are spelled, floats are the shortest text that reads back to the same
64-bit number. No time of day is written: two equal runs write equal bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nnx_jax.core import fsio
from nnx_jax.core.errors import CheckpointError, HistoryCorruptionError, NnxError, nearest

_CELL = re.compile(rb'(?:"((?:[^"]|"")*)"|([^",\n]*))(,|\n)')
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_LIMIT = 16 * 1024**3
_WORDS: dict[str, Any] = {"": None, "true": True, "false": False}


@dataclass(frozen=True)
class Extent:
    """How much of the file counts: its first `bytes` bytes, `rows` data rows, and the SHA-256 of those bytes."""

    bytes: int
    rows: int
    sha256: str


class HistoryWriter(Protocol):
    """What a run's history is for those that write it: this file's, or a journal.

    `append` buffers, `flush` makes durable and is called by a commit, `settle` follows once LAST covers it, and after a
    failed commit `rollback` goes back to what LAST covers and keeps the rows for the next one.
    """

    @property
    def rows(self) -> int:
        """Rows appended so far."""
        ...

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows."""
        ...

    def append_table(self, table: Mapping[str, Any], n_rows: int) -> None:
        """Add rows given by column."""
        ...

    def mark(self) -> int:
        """Return the number of rows so far, as a place up to which `flush` can write."""
        ...

    def flush(self, rows: int | None = None) -> Any:
        """Write up to a mark, durably; return the extent a LAST written now has to name."""
        ...

    def settle(self) -> None:
        """LAST covers what was flushed."""
        ...

    def rollback(self, *, on_disk: bool = True) -> None:
        """Go back to what LAST covers."""
        ...

    def discard(self) -> None:
        """Forget the rows that LAST does not cover."""
        ...


@dataclass
class _Part:
    """Rows appended together: their CSV lines, or the table to make them from."""

    rows: int
    content: bytes | Mapping[str, Any]


class History:
    """The writer's end of `idps.csv`; the caller holds the run's lease.

    `append` only buffers; `flush` makes the rows durable and is called by a commit. After a failed commit `rollback`
    cuts the file to what LAST covers and keeps the rows in the buffer, so that the next commit has no gap.
    Thread safe: the commit's waiter thread may flush and roll back while the training thread appends.

    Args:
        path: the CSV file.
        columns: column names, fixed for the life of the run; no duplicates.
        extent: what LAST covers; None starts the file anew with a header only.

    Raises:
        HistoryCorruptionError: the covered part is shorter than or different from what LAST says.
        CheckpointError: `columns` differ from the header already written.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, extent: Extent | None = None) -> None:
        if len(set(columns)) != len(columns) or not columns:
            raise CheckpointError(f"history columns must be distinct and at least one, got {list(columns)}")
        self.path, self.columns = path, tuple(columns)
        self._known = frozenset(columns)
        self._mutex = threading.Lock()
        self._buffer: list[_Part] = []
        self._unsettled: list[_Part] = []
        header = format_header(columns)
        if extent is None:
            fsio.atomic_write(path, header)
            self._hash = hashlib.sha256(header)
            self._base_hash = self._hash.copy()
            self._base = self._end = Extent(len(header), 0, self._hash.hexdigest())
            return
        data = read_prefix(path, extent)
        if not data.startswith(header):
            raise other_columns(path, data.split(b"\n", 1)[0].decode("utf-8", "replace"), columns)
        if path.stat().st_size != extent.bytes:
            fsio.truncate(path, extent.bytes)
        self._base = self._end = extent
        self._hash = hashlib.sha256(data)
        self._base_hash = self._hash.copy()

    @property
    def committed(self) -> Extent:
        """The part the standing LAST covers; `.rows` is where a caller cuts its own records after a failure."""
        return self._base

    @property
    def rows(self) -> int:
        """Number of rows written or buffered so far."""
        with self._mutex:
            return self._end.rows + sum(part.rows for part in self._buffer)

    def mark(self) -> int:
        """Return the number of rows so far, as a place up to which `flush` can write."""
        return self.rows

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Buffer rows; a column a row leaves out is None. Unknown columns raise CheckpointError."""
        lines = [self._line(row) for row in rows]
        with self._mutex:
            self._buffer.append(_Part(len(lines), b"".join(lines)))

    def append_table(self, table: Mapping[str, Any], n_rows: int) -> None:
        """Buffer `n_rows` rows given by column: each value is a list of that length, or one value for all rows.

        The values become text when they are flushed, and must not be changed any more.
        """
        check_table(self._known, table, n_rows)
        with self._mutex:
            self._buffer.append(_Part(n_rows, table))

    def flush(self, rows: int | None = None) -> Extent:
        """Append what is buffered, sync it, and return the extent a LAST written now has to name.

        Args:
            rows: what `mark` returned at the moment to write; None for everything appended so far.
        """
        with self._mutex:
            end, count = self._end.rows, 0
            for part in self._buffer:
                if rows is not None and end >= rows:
                    break
                end, count = end + part.rows, count + 1
            parts = self._buffer[:count]
        data = b"".join(self._text(part) for part in parts)
        with self._mutex:
            self._buffer = self._buffer[count:]
            self._unsettled = [*self._unsettled, *parts]
            if data:
                fsio.append_bytes(self.path, data)
                self._hash.update(data)
            self._end = Extent(self._end.bytes + len(data), end, self._hash.hexdigest())
            return self._end

    def settle(self) -> None:
        """LAST now covers everything flushed."""
        with self._mutex:
            self._base, self._base_hash, self._unsettled = self._end, self._hash.copy(), []

    def rollback(self, *, on_disk: bool = True) -> None:
        """Cut the file back to what LAST covers; the rows cut off wait in the buffer for the next flush.

        With `on_disk=False` the file is left alone: it belongs to another writer now.
        """
        with self._mutex:
            self._buffer = [*self._unsettled, *self._buffer]
            self._unsettled = []
            self._end, self._hash = self._base, self._base_hash.copy()
            if on_disk and self.path.stat().st_size != self._base.bytes:
                fsio.truncate(self.path, self._base.bytes)

    def discard(self) -> None:
        """Forget the rows that LAST does not cover; no commit may be in flight."""
        self.rollback()
        with self._mutex:
            self._buffer = []

    def _text(self, part: _Part) -> bytes:
        """The part's lines; made once, in the thread that writes them."""
        if not isinstance(part.content, bytes):
            table = part.content
            cells = [_column_cells(table.get(name), part.rows) for name in self.columns]
            part.content = "".join([",".join(row) + "\n" for row in zip(*cells, strict=True)]).encode()
        return part.content

    def _line(self, row: Mapping[str, Any]) -> bytes:
        refuse_unknown(self._known, row)
        return format_row(row, self.columns)


def refuse_unknown(known: frozenset[str], names: Iterable[str]) -> None:
    """Raise CheckpointError for a name that is none of the columns fixed when the run started."""
    if not known.issuperset(names):
        name = next(name for name in names if name not in known)
        raise CheckpointError(f"history column {name!r} was not declared when the run started{nearest(name, known)}")


def check_table(known: frozenset[str], table: Mapping[str, Any], n_rows: int) -> None:
    """Raise CheckpointError for an unknown column, or one that has not `n_rows` values."""
    refuse_unknown(known, table)
    for name, values in table.items():
        if isinstance(values, list) and len(values) != n_rows:
            raise CheckpointError(f"history column {name!r} has {len(values)} values for {n_rows} rows")


def other_columns(path: Path, found: str, wanted: Sequence[str]) -> CheckpointError:
    """Return the error of a start that asks for other columns than the run has."""
    return CheckpointError(
        f"{path}: the run's columns were fixed at its first start as {found}; this start asks for "
        f"{list(wanted)}. Use the same metrics and callbacks, or another salt for a new run"
    )


def read_history(path: Path, extent: Extent | None) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return (columns, rows) of the committed part of a history; with no extent (no LAST) there are zero rows.

    Raises:
        HistoryCorruptionError: the committed part is missing, shorter or different from what LAST says of it.
    """
    if extent is None:
        return (), []
    data = read_prefix(path, extent)
    try:
        lines = parse_csv(data)
    except ValueError as error:
        raise HistoryCorruptionError(f"{path}: {error}") from error
    if not lines or len(lines) - 1 != extent.rows:
        raise HistoryCorruptionError(f"{path}: LAST names {extent.rows} rows, the file has {len(lines) - 1}")
    columns = tuple(str(name) for name in lines[0])
    return columns, [dict(zip(columns, line, strict=True)) for line in lines[1:]]


def read_prefix(path: Path, extent: Extent) -> bytes:
    """Return the committed bytes of a history after checking their length and digest."""
    try:
        data = fsio.read_bytes(path, _LIMIT)
    except (OSError, NnxError) as error:
        raise HistoryCorruptionError(f"{path}: the committed history cannot be read: {error}") from error
    if len(data) < extent.bytes:
        raise HistoryCorruptionError(f"{path}: LAST covers {extent.bytes} bytes, the file has {len(data)}")
    prefix = data[: extent.bytes]
    if hashlib.sha256(prefix).hexdigest() != extent.sha256:
        raise HistoryCorruptionError(f"{path}: its first {extent.bytes} bytes are not what LAST committed")
    return prefix


def format_header(columns: Sequence[str]) -> bytes:
    """Return the header line: names as they are, quoted where CSV needs it."""
    return (",".join(_quote(name) if re.search(r'[",\r\n]', name) else name for name in columns) + "\n").encode()


def format_row(row: Mapping[str, Any], columns: Sequence[str]) -> bytes:
    """Return the line of a row; a column it leaves out is None."""
    return (",".join(_cells(map(row.get, columns))) + "\n").encode()


def format_cell(value: Any) -> str:
    """Return one value as CSV text; array scalars count as the Python number they hold."""
    value = plain_value(value)
    if value is None:
        return ""
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def plain_value(value: Any) -> str | int | float | bool | None:
    """Return a value as Python's own text, number, boolean or None; an array scalar is the number it holds.

    Raises:
        CheckpointError: anything else; no history can hold it.
    """
    plain = value
    if not isinstance(value, str) and hasattr(value, "item"):
        with contextlib.suppress(TypeError, ValueError):  # more than one number
            plain = value.item()
    for kind in (bool, int, float, str):
        if isinstance(plain, kind):
            return plain if type(plain) is kind else kind(plain)
    if plain is None:
        return None
    found = f"{type(value).__name__}: {value!r:.200}"
    raise CheckpointError(f"history values are numbers, text, booleans or None, got {found}")


def parse_csv(data: bytes) -> list[list[Any]]:
    """Return the rows of strict CSV written by `History`, header first as text; ValueError names the first bad line."""
    simple = _parse_simple(data)
    if simple is not None:
        return simple
    rows: list[list[Any]] = []
    row: list[Any] = []
    position = 0
    while position < len(data):
        cell = _CELL.match(data, position)
        if cell is None:
            raise ValueError(f"line {len(rows) + 1} is torn or not CSV")
        quoted, bare, end = cell.groups()
        row.append(_parse_cell(quoted, bare, header=not rows))
        position = cell.end()
        if end == b"\n":
            if rows and len(row) != len(rows[0]):
                raise ValueError(f"line {len(rows) + 1} has {len(row)} cells, the header has {len(rows[0])}")
            rows.append(row)
            row = []
    if row:
        raise ValueError(f"line {len(rows) + 1} does not end")
    return rows


def _parse_simple(data: bytes) -> list[list[Any]] | None:
    """Return the rows when no text holds a comma, a quote or a line feed and nothing is wrong; else None."""
    lines = data.split(b"\n")
    if not data or lines.pop() or b'"' in lines[0]:
        return None
    rows: list[list[Any]] = [[name.decode() for name in lines[0].split(b",")]]
    texts: dict[bytes, str] = {}
    for line in lines[1:]:
        row: list[Any] = []
        for cell in line.split(b","):
            if cell.isdigit() and (len(cell) == 1 or cell[:1] != b"0"):
                row.append(int(cell))
            elif cell[:1] != b'"':
                if b'"' in cell:
                    return None
                row.append(_parse_cell(None, cell, header=False))
            elif cell in texts or (len(cell) > 1 and cell[-1:] == b'"' and cell.count(b'"') == 2):
                row.append(texts.setdefault(cell, cell[1:-1].decode()))
            else:
                return None
        if len(row) != len(rows[0]):
            return None
        rows.append(row)
    return rows


def _parse_cell(quoted: bytes | None, bare: bytes | None, *, header: bool) -> Any:
    if quoted is not None:
        return quoted.decode().replace('""', '"')
    text = (bare or b"").decode()
    if header:
        return text
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if _INTEGER.fullmatch(text) else float(text)


def _quote(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _column_cells(values: Any, n_rows: int) -> list[str]:
    if not isinstance(values, list):
        return [format_cell(values)] * n_rows
    return [format_cell(values[0])] * n_rows if _constant(values) else _cells(values)


def _constant(values: list[Any]) -> bool:
    """All values are written alike; 1, 1.0 and True are equal and are not, nor are 0.0 and -0.0."""
    first = values[0] if values else 0.0
    return values.count(first) == len(values) and len(set(map(type, values))) == 1 and first != 0.0


def _cells(values: Iterable[Any]) -> list[str]:
    """CSV texts; a row is written for every update, so None and Python's numbers take a short way."""
    return [
        "" if value is None else repr(value) if type(value) is float or type(value) is int else format_cell(value)
        for value in values
    ]
