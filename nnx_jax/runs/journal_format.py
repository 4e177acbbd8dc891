"""The journal's files: immutable chunks of records, a chained index of them, summary rows, and the manifest.

    chunk-%08d.jsonl   records, one JSON object a line, without the columns that have no value
    index.jsonl        a line per chunk, with its SHA-256
    epochs.jsonl       the rows that sum up an epoch or a validation: {"at": records before it, "row": {...}}
    journal.json       the manifest: columns, sizes, and what of the files above counts

Index and summary lines are chained: the chain of a line is the SHA-256 of the chain before it (hex) and the line.
JSON has no numbers that are not finite: they are written as {"float": "nan"}, "inf" or "-inf".
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nnx_jax.core import codec
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import CheckpointError
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs.history import plain_value

FORMAT, VERSION = "nnx_jax.history-journal", 1
MANIFEST, INDEX, EPOCHS = "journal.json", "index.jsonl", "epochs.jsonl"
START = "0" * 64
"""The chain before the first line."""
SUMMARIES = ("epoch", "eval")
"""Kinds of rows that are no records: they sum up many."""
CHUNK_NAME = re.compile(r"chunk-([0-9]{8,})\.jsonl")

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST = 10**codec.MAX_DIGITS
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class JournalExtent:
    """How much of a journal counts; kept by LAST, so that a newer manifest on disk changes nothing for readers.

    Attributes:
        chunks, records: how many, from the first on.
        index_bytes, index_chain: length of `index.jsonl` and the chain of its last line.
        epochs, epochs_bytes, epochs_chain: the same of `epochs.jsonl`, which has `epochs` lines.
        manifest: SHA-256 of the manifest that says exactly this.
    """

    chunks: int = 0
    records: int = 0
    index_bytes: int = 0
    index_chain: str = START
    epochs: int = 0
    epochs_bytes: int = 0
    epochs_chain: str = START
    manifest: str = ""

    @property
    def rows(self) -> int:
        """Rows of the same history as a table: records and summary rows."""
        return self.records + self.epochs


@dataclass(frozen=True)
class Chunk:
    """One line of the index: chunk `seq` holds `records` records from record number `first` on, `bytes` bytes long.

    The epochs and updates of its first and last record are None where the rows do not say them.
    """

    seq: int
    file: str
    records: int
    first: int
    bytes: int
    first_epoch: int | None
    last_epoch: int | None
    first_step: int | None
    last_step: int | None
    sha256: str

    def line(self) -> bytes:
        return codec.canonical_json({field.name: getattr(self, field.name) for field in fields(self)}) + b"\n"


class RowCodec:
    """Writes rows as JSON lines and reads them back, for one set of columns."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self._keys = [(name, f"{codec.canonical_json(name).decode()}:") for name in columns]
        self._texts: dict[str, str] = {}

    def object(self, row: Mapping[str, Any]) -> str:
        """Return the JSON object of a row; a column without a value is left out.

        Raises:
            CheckpointError: a value that no history can hold.
        """
        cells = [key + self._cell(name, value) for name, key in self._keys if (value := row.get(name)) is not None]
        return "{" + ",".join(cells) + "}"

    def objects(self, table: Mapping[str, Any], n_rows: int) -> list[str]:
        """Return the JSON objects of rows given by column, as `object` makes them of the rows."""
        cells: list[list[str]] = []
        for name, key in self._keys:
            values = table.get(name)
            if isinstance(values, list):
                cells.append(["" if value is None else key + self._cell(name, value) for value in values])
            elif values is not None:
                cells.append([key + self._cell(name, values)] * n_rows)
        return ["{" + ",".join(filter(None, row)) + "}" for row in zip(*cells, strict=True)] or ["{}"] * n_rows

    def row(self, obj: Any) -> dict[str, Any]:
        """Return the row of a parsed object, every column in its order; ValueError says what is wrong with it."""
        if not isinstance(obj, dict) or not set(obj).issubset(self.columns):
            raise ValueError("is not a row of the journal's columns")
        return {name: _value(obj.get(name)) for name in self.columns}

    def _cell(self, name: str, value: Any) -> str:
        kind = type(value)
        if kind is float:
            return repr(value) if math.isfinite(value) else f'{{"float":"{value!r}"}}'
        if kind is int and -_MOST < value < _MOST:
            return repr(value)
        if kind is bool:
            return "true" if value else "false"
        if kind is str:
            if value not in self._texts and len(self._texts) < 100:
                self._texts[value] = codec.canonical_json(value).decode()
            return self._texts.get(value) or codec.canonical_json(value).decode()
        if kind is int:
            raise CheckpointError(f"history column {name!r}: an integer of more than {codec.MAX_DIGITS} digits")
        return self._cell(name, plain_value(value))


def _value(obj: Any) -> Any:
    if isinstance(obj, dict):
        if list(obj) != ["float"] or obj["float"] not in _NOT_FINITE:
            raise ValueError(f"has {obj!r:.80}, which is no value")
        return _NOT_FINITE[obj["float"]]
    if isinstance(obj, list):
        raise ValueError("has a list, which is no value")
    return obj


def is_summary(row: Mapping[str, Any]) -> bool:
    """Return whether the row sums up many records."""
    return row.get("kind") in SUMMARIES


def chunk_name(seq: int) -> str:
    """Return the file name of chunk `seq`."""
    return f"chunk-{seq:08d}.jsonl"


def chained(chain: str, lines: Iterable[bytes]) -> str:
    """Return the chain of the last line; every line ends with its line feed."""
    for line in lines:
        chain = hashlib.sha256(chain.encode() + line).hexdigest()
    return chain


def manifest_bytes(
    spec: HistoryJournal, columns: Sequence[str], extent: JournalExtent, *, was: HistoryJournal | None = None
) -> bytes:
    """Return the bytes of `journal.json`: they follow from the settings, the columns and what counts.

    Args:
        was: the settings of the commit before, where a start changed them; without these a kill between this manifest
            and LAST would leave a LAST whose own settings nobody knows.
    """
    obj = {"format": FORMAT, "version": VERSION, **settings(spec)}
    counts = {field.name: getattr(extent, field.name) for field in fields(extent) if field.name != "manifest"}
    before = {} if was is None else {"was": settings(was)}
    return durable_json({**obj, **before, "columns": list(columns), **counts}, source=MANIFEST, people=True)


def settings(spec: HistoryJournal) -> dict[str, int]:
    """Return the settings as the manifest has them."""
    return {"retention": spec.retention, "chunk_size": spec.chunk}


def check_extent(extent: JournalExtent) -> None:
    """Raise ValueError when numbers and digests from a file cannot be what a journal wrote."""
    for field in fields(extent):
        value = getattr(extent, field.name)
        if field.name in ("index_chain", "epochs_chain", "manifest"):
            if not isinstance(value, str) or not _DIGEST.fullmatch(value):
                raise ValueError(f"history {field.name} is not 64 hex digits")
        elif type(value) is not int or value < 0:
            raise ValueError(f"history {field.name} is not a whole number >= 0")


def parse_chunk(obj: Any) -> Chunk:
    """Return one line of the index; ValueError, TypeError or KeyError when it is no such line."""
    chunk = Chunk(**obj)
    numbers = (chunk.seq, chunk.records, chunk.first, chunk.bytes)
    if any(type(number) is not int or number < 0 for number in numbers) or chunk.file != chunk_name(chunk.seq):
        raise ValueError("is not a line of the index")
    if not isinstance(chunk.sha256, str) or not _DIGEST.fullmatch(chunk.sha256):
        raise ValueError("a digest is not 64 hex digits")
    return chunk
