"""Reads a journal up to an extent: chains and digests first, then records, one chunk in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import HistoryCorruptionError, NnxError
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs.journal_format import (
    EPOCHS,
    FORMAT,
    INDEX,
    MANIFEST,
    START,
    VERSION,
    Chunk,
    JournalExtent,
    RowCodec,
    chained,
    manifest_bytes,
    parse_chunk,
)

_LIMIT = 4 * 1024**3
Summary = tuple[int, dict[str, Any]]
"""Records before it, and the row."""


class JournalReader:
    """The part of a journal that an extent covers; reading changes nothing.

    Attributes:
        spec: the settings it was written with.
        columns: names of the columns.
        chunks: the lines of the index.

    Raises:
        HistoryCorruptionError: (a ValueError) manifest or index are missing, altered, or shorter than the extent says.
    """

    def __init__(self, directory: Path, extent: JournalExtent) -> None:
        self.directory, self.extent = directory, extent
        self.spec, self.columns = read_manifest(directory, extent)
        self.chunks = read_index(directory, extent)
        self._rows = RowCodec(self.columns)

    def records(self, *, first: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the records from number `first` on, a chunk at a time; raises when a chunk is not what was written."""
        for chunk in self.chunks:
            if chunk.first + chunk.records > first:
                yield from read_chunk(self.directory, chunk, self._rows)[max(first - chunk.first, 0) :]

    def tail(self, count: int) -> list[dict[str, Any]]:
        """Return the last `count` records; only their chunks are read."""
        return list(self.records(first=max(self.extent.records - count, 0)))

    def summaries(self) -> list[Summary]:
        """Return the rows that sum up, each with the number of records before it; raises when they were altered."""
        path, found = self.directory / EPOCHS, []
        data = _prefix(path, self.extent.epochs_bytes)
        lines = data.splitlines(keepends=True)
        if chained(START, lines) != self.extent.epochs_chain:
            raise HistoryCorruptionError(f"{path}: its first {len(data)} bytes are not what LAST committed")
        try:
            for obj in codec.parse_json_lines(data, source=str(path)):
                found.append((int(obj["at"]), self._rows.row(obj["row"])))
        except (NnxError, ValueError, TypeError, KeyError) as error:
            raise HistoryCorruptionError(f"{path}: row {len(found) + 1}: {error}") from error
        if len(found) != self.extent.epochs:
            raise HistoryCorruptionError(f"{path}: LAST names {self.extent.epochs} rows, the file has {len(found)}")
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield records and summary rows in the order they were written."""
        waiting = iter(self.summaries())
        due = next(waiting, None)
        for number, record in enumerate(self.records()):
            while due is not None and due[0] <= number:
                yield due[1]
                due = next(waiting, None)
            yield record
        if due is not None:
            yield due[1]
        yield from (row for _, row in waiting)

    def check(self) -> None:
        """Compare every chunk with its digest, and the summary rows with their chain, without keeping anything."""
        for chunk in self.chunks:
            path = self.directory / chunk.file
            try:
                found = fsio.digest_file(path)
            except (OSError, NnxError) as error:
                raise HistoryCorruptionError(f"{path}: a committed chunk cannot be read: {error}") from error
            if found != (chunk.sha256, chunk.bytes):
                raise _altered(path)
        self.summaries()


def read_manifest(directory: Path, extent: JournalExtent) -> tuple[HistoryJournal, tuple[str, ...]]:
    """Return the settings and columns that LAST committed; the file may be of a later, uncommitted moment."""
    path = directory / MANIFEST
    try:
        obj = codec.load_json(path)
        if obj["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT!r}, found {obj['format']!r:.80}")
        if type(obj["version"]) is int and obj["version"] > VERSION:
            raise ValueError(f"version {obj['version']} is newer than {VERSION}, which this nnx_jax reads; upgrade it")
        specs = [
            HistoryJournal(retention=o["retention"], chunk_size=o["chunk_size"]) for o in (obj, obj.get("was")) if o
        ]
        columns = tuple(str(name) for name in obj["columns"])
    except (OSError, NnxError, ValueError, TypeError, KeyError) as error:
        raise HistoryCorruptionError(f"{path}: the journal's manifest cannot be read: {error}") from error
    for spec in specs:
        if hashlib.sha256(manifest_bytes(spec, columns, extent)).hexdigest() == extent.manifest:
            return spec, columns
    raise HistoryCorruptionError(f"{path}: its settings or columns are not those that LAST committed")


def read_index(directory: Path, extent: JournalExtent) -> list[Chunk]:
    """Return the index lines that the extent covers, after checking their chain, order and sums."""
    path = directory / INDEX
    data = _prefix(path, extent.index_bytes)
    if chained(START, data.splitlines(keepends=True)) != extent.index_chain:
        raise HistoryCorruptionError(f"{path}: its first {extent.index_bytes} bytes are not what LAST committed")
    chunks: list[Chunk] = []
    try:
        for obj in codec.parse_json_lines(data, source=str(path)):
            chunk = parse_chunk(obj)
            if (chunk.seq, chunk.first) != (len(chunks), sum_of(chunks)):
                raise ValueError("is out of order")
            chunks.append(chunk)
    except (NnxError, ValueError, TypeError, KeyError) as error:
        raise HistoryCorruptionError(f"{path}: line {len(chunks) + 1}: {error}") from error
    if (len(chunks), sum_of(chunks)) != (extent.chunks, extent.records):
        raise HistoryCorruptionError(
            f"{path}: LAST names {extent.chunks} chunks of {extent.records} records, the index has {len(chunks)} of "
            f"{sum_of(chunks)}"
        )
    return chunks


def sum_of(chunks: list[Chunk]) -> int:
    """Return the number of records in all chunks, which follow each other."""
    return chunks[-1].first + chunks[-1].records if chunks else 0


def read_chunk(directory: Path, chunk: Chunk, rows: RowCodec) -> list[dict[str, Any]]:
    """Return the records of one chunk after comparing its bytes with the index.

    Raises:
        HistoryCorruptionError: the file is missing or altered.
    """
    path = directory / chunk.file
    try:
        data = fsio.read_bytes(path, chunk.bytes)
    except (OSError, NnxError) as error:
        raise HistoryCorruptionError(f"{path}: a committed chunk cannot be read: {error}") from error
    if len(data) != chunk.bytes or hashlib.sha256(data).hexdigest() != chunk.sha256:
        raise _altered(path)
    try:
        found = [rows.row(obj) for obj in codec.parse_json_lines(data, source=str(path))]
    except (NnxError, ValueError) as error:
        raise HistoryCorruptionError(f"{path}: {error}") from error
    if len(found) != chunk.records:
        raise HistoryCorruptionError(f"{path}: the index names {chunk.records} records, the chunk has {len(found)}")
    return found


def _altered(path: Path) -> HistoryCorruptionError:
    return HistoryCorruptionError(f"{path}: its bytes are not what was committed (SHA-256 differs)")


def _prefix(path: Path, size: int) -> bytes:
    """Return the first `size` bytes of a file that may have grown since; nothing is read when none count."""
    if size == 0:
        return b""
    try:
        data = fsio.read_bytes(path, _LIMIT)
    except (OSError, NnxError) as error:
        raise HistoryCorruptionError(f"{path}: the committed history cannot be read: {error}") from error
    if len(data) < size:
        raise HistoryCorruptionError(f"{path}: LAST covers {size} bytes, the file has {len(data)}")
    return data[:size]
