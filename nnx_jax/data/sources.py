"""Any source of pairs as a dataset: lists, sequences, grain's datasets, functions and iterators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from pydantic import Field, PrivateAttr, field_validator

from nnx_jax.core.errors import ConfigError, DataError, OperatorTypeError
from nnx_jax.core.registry import register
from nnx_jax.data.arrays import ArrayDataset, as_dataset
from nnx_jax.data.dataset import TrainingDataset, hash_rows
from nnx_jax.data.dtypes import Columns
from nnx_jax.data.iterable import (
    DataId,
    IterableDataset,
    StreamingDataset,
    check_shapes,
    chunks_of,
    joined,
    row_shapes,
    stack_rows,
)
from nnx_jax.data.loader import as_columns

_ENDLESS = 2**31  # rows; grain gives a repeated dataset the length 2**63 - 1


@register("sequence")
class SequenceDataset(TrainingDataset):
    """Rows of any object with `len(source)` and `source[i]`: a list, a torch Dataset, grain's MapDataset.

    Args:
        source: gives row i as `(x, y)`, a dict of columns or an array x; the same every time.
        data_id: a name of the data for its hash; without one every row is read for it, once.

    Raises:
        OperatorTypeError: (a TypeError) `source` has no length, or no items by number.
        DataError: a source without end, a row that is none, rows of different shapes (naming them).
    """

    source: Any = Field(exclude=True)
    data_id: DataId | None = None

    _kept: dict[str, Any] = PrivateAttr(default_factory=dict)

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: Any) -> Any:
        if isinstance(source, str | bytes | Mapping) or not _is_sequence(source):
            name = type(source).__name__
            raise OperatorTypeError(f"expected an object with a length and rows by number; got a {name}")
        return source

    def __len__(self) -> int:
        """Return the number of rows."""
        rows = len(self.source)
        if rows >= _ENDLESS:
            raise DataError(f"{type(self).__name__}: a source of {rows} rows has no end; give it before it is repeated")
        return rows

    def take(self, indices: np.ndarray) -> Columns:
        """Return the rows `indices` [B], each column stacked."""
        numbers = np.arange(len(self))[indices]  # checks the range, and resolves negative ones
        return stack_rows([self._row(int(number)) for number in numbers], numbers, type(self).__name__) or (
            {name: np.zeros((0, *info.shape), info.dtype) for name, info in self.columns.items()} if len(self) else {}
        )

    def _row(self, number: int) -> Mapping[str, Any]:
        item = self.source[number]
        if item is None:  # grain's MapDataset after filter()
            raise DataError(
                f"{type(self).__name__}: row {number} is None, as of a source that filters; filter before rows are "
                "numbered, or give it as a stream (IterableDataset)"
            )
        return as_columns(item, f"{type(self).__name__}: row {number}")

    def content_hash(self) -> str:
        """Return 64 hex digits: of the `data_id`, else of all rows."""
        if self.data_id is not None:
            return super(TrainingDataset, self).content_hash()
        if "hash" not in self._kept:
            self._kept["hash"] = hash_rows(self)
        return self._kept["hash"]


@register("grain")
class GrainDataset(StreamingDataset):
    """Rows of a grain dataset: by number from a MapDataset, one after another from an IterDataset.

    Args:
        source: the grain dataset, before `batch` (or after it, with `batched`, for an IterDataset), `shuffle` and
            `repeat`: the run makes batches, orders and passes itself, so that it can continue in the middle.
        data_id: which data this is; an IterDataset needs it, of a MapDataset every row is read for the hash otherwise.

    Raises:
        OperatorTypeError: (a TypeError) `source` is neither.
        ConfigError: an IterDataset without `data_id`.
    """

    source: Any = Field(exclude=True)
    data_id: DataId | None = None
    batched: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        """The rules about the source."""
        yield from super().problems()
        name = type(self.source).__name__
        if not (_is_sequence(self.source) or hasattr(self.source, "mp_prefetch")):
            raise OperatorTypeError(f"expected a grain MapDataset or IterDataset; got a {name}", path="source")
        if not self.indexable and self.data_id is None:
            yield "data_id", f"what a {name} gives cannot be hashed; give a name that says which data it is"
        if self.indexable and self.batched:
            yield "batched", "rows of a MapDataset are asked for by number; give it before `batch`"

    @property
    def indexable(self) -> bool:
        """Whether the source is a MapDataset."""
        return _is_sequence(self.source)

    @property
    def _rows(self) -> SequenceDataset:
        if "rows" not in self._kept:
            self._kept["rows"] = SequenceDataset(source=self.source, data_id=self.data_id)
        return self._kept["rows"]

    def __len__(self) -> int:
        """Return the number of rows of a MapDataset."""
        return len(self._rows) if self.indexable else super().__len__()

    def take(self, indices: np.ndarray) -> Columns:
        """Return the rows `indices` [B] of a MapDataset."""
        return self._rows.take(indices) if self.indexable else super().take(indices)

    def chunks(self, start: int = 0) -> Iterator[Columns]:
        """Yield the rows of one pass from row `start` on."""
        if self.indexable:
            return TrainingDataset.chunks(self, start)
        return chunks_of(self.source, type(self.source).__name__, batched=self.batched, skip=start)

    def with_split(self, split: str) -> TrainingDataset:
        """Return eight tenths, one or one of a MapDataset; of an IterDataset, the same under another name."""
        return SequenceDataset.with_split(self._rows, split) if self.indexable else super().with_split(split)

    def content_hash(self) -> str:
        """Return 64 hex digits: of the `data_id`, else of all rows."""
        return self._rows.content_hash() if self.indexable else super().content_hash()


def _is_sequence(source: Any) -> bool:
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def adapt(source: Any, *, data_id: str | None = None, batched: bool = False) -> TrainingDataset:
    """Return any source of pairs as a dataset, the most capable one that it can be.

    * a dataset, arrays `(X, Y)`, a dict of arrays, an array: as `as_dataset`; a list of rows: `ArrayDataset`; both are
      hashed by content.
    * grain's MapDataset and IterDataset: `GrainDataset`; other objects with a length and items: `SequenceDataset`.
    * other iterables, and functions that return one: `IterableDataset`, which needs a `data_id`.

    Args:
        batched: the items of the source are batches (a dict or pair of columns [n, ...] each), not rows.

    Raises:
        DataError, ConfigError: a source without rows, rows that do not fit together, a `data_id` that is missing.
        OperatorTypeError: (a TypeError) none of these.
    """
    arrays = isinstance(source, tuple) and len(source) == 2 and all(hasattr(part, "shape") for part in source)
    if (
        isinstance(source, TrainingDataset | Mapping)
        or arrays
        or (hasattr(source, "shape") and hasattr(source, "dtype"))
    ):
        return as_dataset(source)
    if isinstance(source, list | tuple):
        return ArrayDataset(_collected(source, batched))
    if hasattr(source, "mp_prefetch") or hasattr(source, "to_iter_dataset"):  # both of grain's have one of these
        return GrainDataset(source=source, data_id=data_id, batched=batched)
    if _is_sequence(source) and not batched:
        return SequenceDataset(source=source, data_id=data_id)
    if data_id is None and (isinstance(source, Iterable) or callable(source)):
        raise ConfigError(f"what a {type(source).__name__} gives cannot be hashed; give data_id, a name of the data")
    return IterableDataset(source=source, data_id=data_id or "none", batched=batched)


def _collected(items: list[Any] | tuple[Any, ...], batched: bool) -> Columns:
    if not items:
        raise DataError("an empty list has no rows; there is nothing to make a dataset of")
    if not batched:
        rows = [as_columns(item, f"item {number}") for number, item in enumerate(items)]
        return stack_rows(rows, range(len(items)), "the list")
    parts = list(chunks_of(items, "the list", batched=True))
    for number, part in enumerate(parts):
        check_shapes(part, row_shapes(parts[0]), f"the list: item {number}")
    return joined(parts)
