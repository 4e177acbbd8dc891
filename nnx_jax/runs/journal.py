"""The writer of a journal: records leave memory in immutable chunks, and a commit makes what was written count."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, overload

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import CheckpointError, CommitError, HistoryCorruptionError
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs.history import check_table, other_columns, refuse_unknown
from nnx_jax.runs.journal_format import (
    CHUNK_NAME,
    EPOCHS,
    INDEX,
    MANIFEST,
    Chunk,
    JournalExtent,
    RowCodec,
    chained,
    chunk_name,
    is_summary,
    manifest_bytes,
    settings,
)
from nnx_jax.runs.journal_read import JournalReader, read_chunk, read_index


class Window(Sequence[Mapping[str, Any]]):
    """The newest records of a run, live: it follows the training and cannot be changed."""

    def __init__(self, records: deque[Mapping[str, Any]]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        return [*self._records][index] if isinstance(index, slice) else self._records[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._records)


@dataclass(frozen=True)
class _Line:
    """A line for the index or the summaries; `rows` is how many rows there were when it was complete."""

    rows: int
    text: bytes
    chunk: Chunk | None = None


class _Pending(NamedTuple):
    """A record that waits for its chunk; `rows` as in `_Line`."""

    rows: int
    text: bytes
    epoch: int | None
    step: int | None


class JournalWriter:
    """The writer's end of `history/`; the caller holds the run's lease.

    Records are encoded as they come, so a value that cannot be stored fails at once, and wait for a chunk. A chunk is
    written when more than its size wait (never the newest record), at an epoch's end, and at a `mark`. What a chunk
    file holds is never written again. `flush`, called by a commit, syncs the new chunks, appends to the index and the
    summary rows and replaces the manifest. After a failed commit `rollback` puts back the manifest before; the chunks
    stay, and the next flush names them.

    Thread safe like `runs.history.History`: one thread appends and marks, another one flushes, settles or rolls back.

    Args:
        directory: of the journal.
        columns: column names, fixed for the life of the run.
        spec: the settings; None keeps those the journal was written with.
        extent: what LAST covers; None starts the journal anew. What lies beyond is cut off.
        check: called before a chunk is written; raises when the run belongs to another process now.

    Attributes:
        window: the newest `retention` records.

    Raises:
        HistoryCorruptionError: the covered part is not what LAST says of it; nothing was changed.
        CheckpointError: `columns` differ from those of the first start.
    """

    def __init__(
        self,
        directory: Path,
        columns: Sequence[str],
        spec: HistoryJournal | None = None,
        *,
        extent: JournalExtent | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        if len(set(columns)) != len(columns) or not columns:
            raise CheckpointError(f"history columns must be distinct and at least one, got {list(columns)}")
        self.directory, self.columns = directory, tuple(columns)
        self._known, self._codec, self._ours = frozenset(columns), RowCodec(columns), check
        self._mutex = threading.Lock()
        self._pending: list[_Pending] = []
        self._index: list[_Line] = []
        self._epochs: list[_Line] = []
        self._unsettled: tuple[list[_Line], list[_Line]] = ([], [])
        self._doubt = False
        self._was: HistoryJournal | None = None
        self.first_epoch: int | None = None
        tail: list[dict[str, Any]] = []
        if extent is None:
            self.spec = spec or HistoryJournal()
            fsio.make_dir(directory)
            self._manifest = manifest_bytes(self.spec, columns, JournalExtent())
            extent = JournalExtent(manifest=hashlib.sha256(self._manifest).hexdigest())
        else:
            reader = JournalReader(directory, extent)
            if reader.columns != self.columns:
                raise other_columns(directory, str(list(reader.columns)), columns)
            reader.check()
            self.spec = spec or reader.spec
            self._was = None if settings(self.spec) == settings(reader.spec) else reader.spec
            tail = reader.tail(self.spec.retention)
            self.first_epoch = reader.chunks[0].first_epoch if reader.chunks else None
            self._manifest = manifest_bytes(reader.spec, columns, extent)
        _cut(directory, extent, self._manifest)
        self._base = self._end = extent
        self._base_manifest = self._manifest
        self._count_from(extent)
        self._window: deque[Mapping[str, Any]] = deque(tail, maxlen=self.spec.retention)
        self.window = Window(self._window)

    def _count_from(self, extent: JournalExtent) -> None:
        self._seq, self._records, self._rows = extent.chunks, extent.records, extent.rows

    @property
    def committed(self) -> JournalExtent:
        """The part the standing LAST covers."""
        return self._base

    @property
    def rows(self) -> int:
        """Number of rows, records and summary rows, written or waiting so far."""
        return self._rows

    # -- appending ----------------------------------------------------------------------------------------------

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows; a column a row leaves out is None.

        Raises:
            CheckpointError: an unknown column, or a value no history can hold.
            CommitError: (an OSError) a chunk cannot be written; its records keep waiting.
        """
        for row in rows:
            refuse_unknown(self._known, row)
            self._add(row)

    def append_table(self, table: Mapping[str, Any], n_rows: int) -> None:
        """Add `n_rows` rows given by column: each value is a list of that length, or one value for all rows."""
        check_table(self._known, table, n_rows)
        if isinstance(table.get("kind"), list) or is_summary(table):
            for place in range(n_rows):
                self._add(_row(table, place))
            return
        epochs, steps = (_numbers(table.get(name), n_rows) for name in ("epoch", "step"))
        for text, epoch, step in zip(self._codec.objects(table, n_rows), epochs, steps, strict=True):
            self._add_record(text, epoch, step)
        for place in range(max(n_rows - self.spec.retention, 0), n_rows):
            row = _row(table, place)
            self._window.append({name: row.get(name) for name in self.columns})
        self._write_chunks(self.spec.chunk)

    def _add(self, row: Mapping[str, Any]) -> None:
        text = self._codec.object(row)
        if is_summary(row):
            if row.get("kind") == "epoch":
                self._write_chunks(0)
            self._rows += 1
            line = f'{{"at":{self._records},"row":{text}}}\n'.encode()
            with self._mutex:
                self._epochs.append(_Line(self._rows, line))
            return
        self._add_record(text, _number(row.get("epoch")), _number(row.get("step")))
        self._window.append({name: row.get(name) for name in self.columns})
        self._write_chunks(self.spec.chunk)

    def _add_record(self, text: str, epoch: int | None, step: int | None) -> None:
        self._rows += 1
        self._records += 1
        if self.first_epoch is None:
            self.first_epoch = epoch
        self._pending.append(_Pending(self._rows, text.encode() + b"\n", epoch, step))

    def mark(self) -> int:
        """Close the open chunk and return the number of rows so far, as a place up to which `flush` can write."""
        self._write_chunks(0)
        return self._rows

    def _write_chunks(self, waiting: int) -> None:
        """Write chunks until at most `waiting` records wait."""
        while len(self._pending) > waiting:
            self._write_chunk(self._pending[: self.spec.chunk])

    def _write_chunk(self, part: list[_Pending]) -> None:
        data = b"".join(record.text for record in part)
        chunk = Chunk(
            seq=self._seq,
            file=chunk_name(self._seq),
            records=len(part),
            first=self._records - len(self._pending),
            bytes=len(data),
            first_epoch=part[0].epoch,
            last_epoch=part[-1].epoch,
            first_step=part[0].step,
            last_step=part[-1].step,
            sha256=hashlib.sha256(data).hexdigest(),
        )
        self._ours()
        try:
            fsio.create_file(self.directory / chunk.file, data)
        except OSError as error:
            raise CommitError(f"the history's next chunk cannot be written: {error}") from error
        self._seq += 1
        del self._pending[: len(part)]
        with self._mutex:
            self._index.append(_Line(part[-1].rows, chunk.line(), chunk))

    # -- committing ---------------------------------------------------------------------------------------------

    def flush(self, rows: int | None = None) -> JournalExtent:
        """Make what was appended durable, the manifest last; return the extent a LAST written now has to name.

        Args:
            rows: what `mark` returned at the moment to write; None for everything appended so far.
        """
        if rows is None:
            rows = self.mark()
        with self._mutex:
            index = [line for line in self._index if line.rows <= rows]
            epochs = [line for line in self._epochs if line.rows <= rows]
        end = self._sync(index, epochs)
        with self._mutex:
            self._index, self._epochs = self._index[len(index) :], self._epochs[len(epochs) :]
            self._unsettled = ([*self._unsettled[0], *index], [*self._unsettled[1], *epochs])
            self._end = end
        return end

    def _sync(self, index: list[_Line], epochs: list[_Line]) -> JournalExtent:
        """Sync the new chunks, append the lines, replace the manifest; return what counts then."""
        chunks = [line.chunk for line in index if line.chunk is not None]
        doubt, self._doubt = self._doubt, True  # until they are safe
        for chunk in chunks:
            if doubt:
                self._write_again(chunk)
            else:
                fsio.sync_file(self.directory / chunk.file)
        if chunks:
            fsio.sync_dir(self.directory)
        self._doubt = False
        before = self._end
        lines = [line.text for line in index], [line.text for line in epochs]
        end = replace(
            before,
            chunks=before.chunks + len(chunks),
            records=before.records + sum(chunk.records for chunk in chunks),
            index_bytes=before.index_bytes + _append(self.directory / INDEX, before.index_bytes, lines[0]),
            index_chain=chained(before.index_chain, lines[0]),
            epochs=before.epochs + len(epochs),
            epochs_bytes=before.epochs_bytes + _append(self.directory / EPOCHS, before.epochs_bytes, lines[1]),
            epochs_chain=chained(before.epochs_chain, lines[1]),
        )
        manifest = manifest_bytes(self.spec, self.columns, end, was=self._was)
        if manifest != self._manifest:
            self._publish(manifest)
        return replace(end, manifest=hashlib.sha256(manifest_bytes(self.spec, self.columns, end)).hexdigest())

    def _write_again(self, chunk: Chunk) -> None:
        """Secure a chunk after a sync that failed: a second sync may succeed although the disk never got the bytes."""
        path = self.directory / chunk.file
        data = fsio.read_bytes(path, chunk.bytes)
        if hashlib.sha256(data).hexdigest() != chunk.sha256:
            raise HistoryCorruptionError(f"{path}: a chunk was lost before it was committed; start again from LAST")
        fsio.atomic_write(path, data)

    def _publish(self, manifest: bytes) -> None:
        self._manifest = manifest  # also when it fails: what stands on disk is then unknown
        fsio.atomic_write(self.directory / MANIFEST, manifest)

    def settle(self) -> None:
        """LAST now covers everything flushed."""
        with self._mutex:
            self._base, self._base_manifest, self._unsettled = self._end, self._manifest, ([], [])
            self._was = None

    def rollback(self, *, on_disk: bool = True) -> None:
        """Put back the manifest of what LAST covers; what was flushed since waits for the next flush.

        With `on_disk=False` no file is touched: they belong to another writer now.
        """
        with self._mutex:
            self._index = [*self._unsettled[0], *self._index]
            self._epochs = [*self._unsettled[1], *self._epochs]
            self._unsettled = ([], [])
            self._end = self._base
            if not on_disk:
                return
            if self._manifest != self._base_manifest:
                self._publish(self._base_manifest)
            _shorten(self.directory / INDEX, self._base.index_bytes)
            _shorten(self.directory / EPOCHS, self._base.epochs_bytes)

    def discard(self) -> None:
        """Forget the rows that LAST does not cover, in the window and on disk; no commit may be in flight."""
        self._ours()
        self.rollback()
        self._pending, self._index, self._epochs = [], [], []
        _cut(self.directory, self._base, self._base_manifest)
        self._count_from(self._base)
        reader = JournalReader(self.directory, self._base)
        self.first_epoch = reader.chunks[0].first_epoch if reader.chunks else None
        self._window.clear()
        self._window.extend(reader.tail(self.spec.retention))

    # -- reading back -------------------------------------------------------------------------------------------

    def read_back(self, epoch: int | None = None) -> tuple[dict[str, Any], ...]:
        """Return every record of the run so far, committed or not, read from the chunks; grows with the run.

        Args:
            epoch: leave out chunks that end before this epoch.

        Raises:
            HistoryCorruptionError: (a ValueError) a chunk or the index is not what was written.
        """
        with self._mutex:
            chunks = read_index(self.directory, self._end)
            chunks += [line.chunk for line in self._index if line.chunk is not None]
        if epoch is not None:
            chunks = [chunk for chunk in chunks if chunk.last_epoch is None or chunk.last_epoch >= epoch]
        found = [record for chunk in chunks for record in read_chunk(self.directory, chunk, self._codec)]
        waiting = b"".join(record.text for record in self._pending)  # more than the window after a full disk
        return (*found, *map(self._codec.row, codec.parse_json_lines(waiting, source="records that wait")))


def _row(table: Mapping[str, Any], place: int) -> dict[str, Any]:
    return {name: values[place] if isinstance(values, list) else values for name, values in table.items()}


def _numbers(values: Any, n_rows: int) -> list[int | None]:
    return [_number(value) for value in values] if isinstance(values, list) else [_number(values)] * n_rows


def _number(value: Any) -> int | None:
    """Return a row's epoch or step where it is a whole number."""
    value = value.item() if hasattr(value, "item") else value
    return value if type(value) is int else None


def _append(path: Path, at: int, lines: list[bytes]) -> int:
    """Append and sync lines at byte `at`, cutting off what a failed attempt left there; return their length."""
    data = b"".join(lines)
    if data:
        _shorten(path, at)
        fsio.append_bytes(path, data)
    return len(data)


def _shorten(path: Path, size: int) -> None:
    if path.exists() and path.stat().st_size > size:
        fsio.truncate(path, size)


def _cut(directory: Path, extent: JournalExtent, manifest: bytes) -> None:
    """Remove what no commit stands behind: later chunks, longer lists, another manifest, stranded temporaries."""
    for entry in sorted(directory.iterdir()):
        chunk = CHUNK_NAME.fullmatch(entry.name)
        if (fsio.is_temporary(entry) and not entry.is_dir()) or (chunk and int(chunk[1]) >= extent.chunks):
            entry.unlink()
    for name, size in ((INDEX, extent.index_bytes), (EPOCHS, extent.epochs_bytes)):
        _shorten(directory / name, size)
    path = directory / MANIFEST
    if not path.exists() or fsio.read_bytes(path) != manifest:
        fsio.atomic_write(path, manifest)
    fsio.sync_dir(directory)
