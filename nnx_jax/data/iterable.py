"""Data that only comes one row after another: generators, loaders, streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import numpy as np
from pydantic import Field, PrivateAttr, field_validator

from nnx_jax.core.errors import DataError, OperatorTypeError
from nnx_jax.core.registry import register
from nnx_jax.data.dataset import ColumnInfo, describe_row
from nnx_jax.data.dtypes import Columns
from nnx_jax.data.loader import as_columns
from nnx_jax.data.splits import PartitionedDataset

DataId = Annotated[str, Field(min_length=1)]
Buffer = Annotated[int, Field(ge=0)]


class StreamingDataset(PartitionedDataset):
    """Base of data without row numbers: it can be iterated, and that is all.

    A subclass gives `__iter__`, one pass of `(x, y)` pairs from the beginning; or `chunks(start)`, where it can begin
    in the middle or has many rows at hand. It is trained on in the order it comes, pass after pass (`StreamLoader`).
    The default hash is of the class and its fields, so they must tell which data it is.
    """

    shuffle_buffer: Buffer = 0
    """Rows that are held at a time, and handed on in an order of their own when the run shuffles; 0 keeps the order."""

    _kept: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def indexable(self) -> bool:
        """False: there are no row numbers."""
        return False

    @property
    def one_shot(self) -> bool:
        """Whether there is one pass only, because what was read is gone."""
        return False

    @property
    def pass_rows(self) -> int | None:
        """Rows of one pass, where they are known beforehand."""
        return None

    def __len__(self) -> int:
        """Refuse: nobody knows how many rows will come."""
        self._no_numbers("has no length")

    def take(self, indices: np.ndarray) -> Columns:
        """Refuse: rows have no numbers."""
        del indices
        self._no_numbers("cannot be asked for rows by number")

    def _no_numbers(self, what: str) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} {what}: it is not indexable, its rows only come one after another. Iterate it, or "
            "collect it first (ArrayDataset)"
        )

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield one tuple a row, `(x, y)`, of one pass.

        Raises:
            NotImplementedError: the class defines neither `__iter__` nor `chunks`.
        """
        if type(self).chunks is StreamingDataset.chunks:
            raise NotImplementedError(f"{type(self).__name__} must define __iter__ (one pass of (x, y) pairs)")
        return super().__iter__()

    def chunks(self, start: int = 0) -> Iterator[Columns]:
        """Yield the rows of one pass from row `start` on, some at a time; the default reads over what comes before."""
        yield from chunks_of(iter(self), type(self).__name__, skip=start)

    def first_rows(self) -> Columns:
        """Return the first row of a pass, or a few, without taking them away from it."""
        first = next(self.chunks(), None)
        if first is None:
            raise DataError(f"{type(self).__name__} gave no row")
        return first

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        """Name -> shape and dtype of one row, of the first row of a pass."""
        if "columns" not in self._kept:
            first = self.first_rows()
            self._kept["columns"] = {name: ColumnInfo(value.shape[1:], value.dtype) for name, value in first.items()}
        return dict(self._kept["columns"])

    @property
    def info(self) -> dict[str, Any]:
        """What a network needs to know, as far as the first row tells."""
        return describe_row(self.columns)


def chunks_of(items: Iterable[Any], where: str, *, batched: bool = False, skip: int = 0) -> Iterator[Columns]:
    """Yield each item as columns [n, ...], n = 1 for rows, after the first `skip` rows.

    Args:
        items: rows, or batches with `batched`: `(x, y)`, a dict of columns, or an array x.
        where: how messages call the source.

    Raises:
        DataError: an item that is neither, or a batch whose columns have different lengths; it says which.
    """
    items = iter(items)
    if skip and not batched:
        next(itertools.islice(items, skip - 1, skip), None)
        first, skip = skip, 0
    else:
        first = 0
    for index, item in enumerate(items, first):
        named = as_columns(item, f"{where}: item {index}")
        columns = {name: np.array(value) for name, value in named.items()}  # a source may fill the same array again
        if not batched:
            yield {name: value[None] for name, value in columns.items()}
            continue
        lengths = {value.shape[:1] for value in columns.values()}
        if len(lengths) != 1 or () in lengths:
            told = ", ".join(f"{name} {value.shape}" for name, value in columns.items())
            raise DataError(f"{where}: item {index} is no batch; its columns need one length: {told}")
        (rows,) = lengths.pop()
        if skip < rows:
            yield {name: value[skip:] for name, value in columns.items()}
        skip = max(skip - rows, 0)


@register("iterable")
class IterableDataset(StreamingDataset):
    """Rows of any iterable, in its order, under a name that says which data it is.

    Args:
        source: an iterable of rows, each `(x, y)`, a dict of columns or an array x; or a function without arguments
            that returns one, anew for every pass. An iterator can be read once; what needs a second pass is refused
            with `DataError`.
        data_id: which data this is, for the run's identity and for resume: what comes out of an iterable cannot be
            hashed. Two sources with different rows need different ids.
        batched: the items are batches, every column [n, ...], of any number of rows.

    It is not cut into parts: `split` and `seed` are told to the hash only, so that one source may be made for each.

    Raises:
        OperatorTypeError: (a TypeError) `source` is neither iterable nor a function.
        ConfigError: (a ValueError) an empty `data_id`.
    """

    source: Any = Field(exclude=True)
    data_id: DataId
    batched: bool = False

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: Any) -> Any:
        if isinstance(source, str | bytes) or not (isinstance(source, Iterable) or callable(source)):
            raise OperatorTypeError(
                f"expected an iterable of rows, or a function that returns one; got a {type(source).__name__}"
            )
        return Once(source) if isinstance(source, Iterator) else source

    @property
    def one_shot(self) -> bool:
        """Whether the source is an iterator."""
        return isinstance(self.source, Once)

    def chunks(self, start: int = 0) -> Iterator[Columns]:
        """Yield the rows of one pass from row `start` on; an iterator is read from its beginning, and only once.

        Raises:
            DataError: an iterator that was read before.
        """
        if self.one_shot:
            items = self.source.items(self._where)
        else:
            items = self.source if isinstance(self.source, Iterable) else self.source()
        return chunks_of(items, self._where, batched=self.batched, skip=start)

    def first_rows(self) -> Columns:
        """Return the first row or batch, which an iterator still gives afterwards."""
        if not self.one_shot:
            return super().first_rows()
        return next(chunks_of([self.source.first(self._where)], self._where, batched=self.batched))

    @property
    def _where(self) -> str:
        return f"iterable {self.data_id!r}"


class Once:
    """An iterator whose first item can be looked at, and which knows that it was read.

    Copies of a dataset share it, so that none of them loses what another one has looked at.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._first: list[Any] | None = None
        self._used = False

    def __iter__(self) -> Iterator[Any]:
        return self.items("the iterator")

    def first(self, where: str) -> Any:
        """Return the first item, also after all were taken."""
        if not (first := self._looked_at()):
            raise DataError(f"{where} gave no row")
        return first[0]

    def items(self, where: str) -> Iterator[Any]:
        """Return all items, once.

        Raises:
            DataError: the second time.
        """
        if self._used:
            raise DataError(
                f"{where}: its source is an iterator, which was read before, and what was read is gone; give a "
                "function that returns a new one"
            )
        self._used = True
        return itertools.chain(self._looked_at(), self._iterator)

    def _looked_at(self) -> list[Any]:
        if self._first is None:
            self._first = list(itertools.islice(self._iterator, 1))
        return self._first


def stack_rows(rows: Sequence[Mapping[str, Any]], numbers: Iterable[int], where: str) -> Columns:
    """Return rows of named values as columns [B, ...]; {} for no row.

    Raises:
        DataError: rows with other names or shapes than the first one, naming the row.
    """
    if not rows:
        return {}
    arrays = [{name: np.asarray(value) for name, value in row.items()} for row in rows]
    first = {name: value.shape for name, value in arrays[0].items()}
    for number, row in zip(numbers, arrays, strict=True):
        found = {name: value.shape for name, value in row.items()}
        if found != first:
            raise DataError(f"{where}: row {int(number)} has shapes {found}, the rows before it {first}")
    return {name: np.stack([row[name] for row in arrays]) for name in first}


def row_shapes(columns: Columns) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of one row."""
    return {name: value.shape[1:] for name, value in columns.items()}


def check_shapes(columns: Columns, wanted: dict[str, tuple[int, ...]], where: str) -> None:
    """Raise `DataError` when rows have other names or shapes than those before them."""
    if (found := row_shapes(columns)) != wanted:
        raise DataError(f"{where} has rows of shapes {found}, the ones before it {wanted}")


def joined(parts: list[Columns]) -> Columns:
    """Return columns of equal names and shapes one below the other."""
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
