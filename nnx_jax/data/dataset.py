"""A dataset is a specification that can hand out its rows: named columns, whole batches, one identity.

Every dataset of the project has the same few questions answered here: how many rows, which columns, what the network
must know about them (`info`), the rows of an index array at once (`take`), and a hash of what the rows *are*. The path
they came from is never part of that hash: moving a file does not change a run's id, editing it does.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol, Self

import numpy as np
from pydantic import PrivateAttr

from nnx_jax.core.errors import ConfigError, DataError, nearest
from nnx_jax.core.hashing import content_hash, hash_arrays
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import lookup
from nnx_jax.data.dtypes import Columns, settle_columns

SPLITS = ("train", "val", "test")

_HASH_CHUNK = 4096  # rows hashed at a time for datasets that are not in memory


@dataclass(frozen=True, slots=True)
class ColumnInfo:
    """What one row holds in one column: its shape without the row axis, and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class TrainingDataset(Operator):
    """Base of every dataset (family `dataset`); columns are named, `x` is the input and `y` the target by custom.

    A subclass gives `__len__` and `take`; everything else has a default. Subclasses whose rows are all in memory derive
    from `InMemoryDataset` instead, those whose rows only come one after another from `StreamingDataset`.
    """

    family: ClassVar[str] = "dataset"
    never_called: ClassVar[str] = "a dataset is iterated, not called; what is done with its rows is dataset.map(op)"
    _wide: bool = PrivateAttr(default=False)

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""
        raise NotImplementedError(f"{type(self).__name__} must define __len__ (the number of rows)")

    @abc.abstractmethod
    def take(self, indices: np.ndarray) -> Columns:
        """Return the rows `indices` [B] of every column, each [B, ...], in the order asked for."""
        raise NotImplementedError(f"{type(self).__name__} must define take(indices) (the rows of every column)")

    def __bool__(self) -> bool:
        """Return True: an empty dataset is still a dataset (`if params.val:` asks whether one was given)."""
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: there is nothing to call."""
        raise TypeError(
            f"{type(self).__name__} is not called, it is iterated: `for x, y in dataset`; take(indices) gives a batch"
        )

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:  # type: ignore[override]
        """Yield one tuple a row, in row order: `(x, y)`, or every column in order when there is no such pair."""
        for chunk in self.chunks():
            yield from zip(*(chunk[name] for name in _in_order(chunk)), strict=True)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        """Return row `index` (counted from the end when negative) as iterating yields it; `IndexError` behind it."""
        row = self.take(np.array([range(len(self))[index]]))
        return tuple(row[name][0] for name in _in_order(row))

    @property
    def indexable(self) -> bool:
        """Whether rows can be asked for by number; False for a dataset that can only be iterated."""
        return True

    def chunks(self, start: int = 0) -> Iterator[Columns]:
        """Yield the rows of one pass from row `start` on, in row order, some at a time: every column [n, ...]."""
        for first in range(start, len(self), _HASH_CHUNK):
            yield self.take(np.arange(first, min(first + _HASH_CHUNK, len(self))))

    def with_split(self, split: str) -> TrainingDataset:
        """Return the part `split` ("train", "val" or "test") of this data; this dataset stays as it is.

        A dataset with a field `split` of its own is made again with another one. Of any other dataset it is eight
        tenths, one tenth and one tenth of the rows as they stand (see `splits` for another order).

        Raises:
            ConfigError: (a ValueError) another name; or rows that cannot be asked for by number, and no such field.
        """
        if split not in SPLITS:
            raise ConfigError(f"split must be one of {', '.join(SPLITS)}, found {split!r}", path="split")
        if "split" in type(self).model_fields:
            return self.replace(split=split).widened(self.wide)
        return self.splits()[SPLITS.index(split)]

    def splits(self, seed: int | None = None) -> tuple[TrainingDataset, TrainingDataset, TrainingDataset]:
        """Return (train, val, test): eight tenths, one tenth and one tenth of this dataset's rows, each row once.

        Args:
            seed: the tenths are cut from a permutation of the rows, a function of this seed; None cuts them from the
                rows as they stand.
        """
        if not self.indexable:
            raise ConfigError(f"the rows of {type(self).__name__} have no numbers, so they cannot be cut into parts")
        found = [lookup("dataset", "split")(source=self, split=split, seed=seed) for split in SPLITS]
        train, val, test = (part.widened(self.wide) for part in found)
        return train, val, test

    def map(self, op: Any, *, on: str = "x", batched: bool = False, op_id: str | None = None) -> TrainingDataset:
        """Return the dataset whose rows went through `op`; see `MappedDataset`. `dataset | op` is the same."""
        return lookup("dataset", "map")(source=self, op=op, on=on, batched=batched, op_id=op_id).widened(self.wide)

    def __or__(self, op: Any) -> Any:
        """Return `self.map(op)`."""
        if isinstance(op, TrainingDataset):
            raise TypeError(f"a dataset cannot come after another one: {type(self).__name__} | {type(op).__name__}")
        return self.map(op) if callable(op) else NotImplemented

    @property
    def names(self) -> tuple[str, ...]:
        """The column names, `x` and `y` first."""
        return _in_order(self.columns)

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        """Name -> shape and dtype of one row."""
        sample = self.take(np.arange(min(1, len(self))))
        return {name: ColumnInfo(value.shape[1:], value.dtype) for name, value in sample.items()}

    @property
    def augments(self) -> bool:
        """Whether `augment` changes anything."""
        return type(self).augment is not TrainingDataset.augment

    def augment(self, batch: Columns, rng: np.random.Generator) -> Columns:
        """Return the training batch, changed at random; override it for augmentation. The default changes nothing.

        `rng` is made anew for every batch from the run's data seed, the epoch and the batch's place, so the result is
        the same on every run, after a resume, and for any number of workers. Draw from it and from nothing else.
        Evaluation does not augment.
        """
        del rng
        return batch

    @property
    def wide(self) -> bool:
        """Whether columns of float64 stay so, for training in float64; else they become float32."""
        return self._wide

    def widened(self, wide: bool = True) -> Self:
        """Return the same rows with columns of float64 as they are (or narrowed again), under a hash of their own.

        What this dataset keeps in `_kept` (rows, a hash) the other one finds for itself.
        """
        if wide == self._wide:
            return self
        other = self.model_copy()
        other._wide = wide
        if (kept := type(self).__private_attributes__.get("_kept")) is not None:
            other._kept = kept.get_default(call_default_factory=True)  # rows and hashes are others
        return other

    def arrays(self) -> Columns | None:
        """Return every column whole, or None when the rows are not in memory (nor could be on the device)."""
        return None

    @property
    def info(self) -> dict[str, Any]:
        """What a network needs to know: `input_shape` (of one row), and where known `input_dim`, `target_shape`,
        `n_classes`, `output_dim`, `vocab_size`, `context_length`."""
        columns = self.columns
        return {"input_shape": columns["x"].shape} if "x" in columns else {}

    def content_hash(self) -> str:
        """Return 64 hex digits of the rows themselves (every column's dtype, shape and bytes, in row order).

        This default reads every row once. Two datasets with equal rows have equal hashes wherever the rows came from;
        no memory address or path takes part, so the hash is the same in every process.
        """
        return hash_rows(self)


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: ("x", "y").index(name) if name in ("x", "y") else 2))


class HasRows(Protocol):
    """What can be hashed and dealt: a number of rows, and the rows of every column."""

    def __len__(self) -> int: ...
    def take(self, indices: np.ndarray) -> Columns: ...


def hash_rows(dataset: HasRows) -> str:
    """Return 64 hex digits of every column's dtype, shape and bytes, in row order; reads every row once."""
    rows = len(dataset)
    chunks = [
        hash_arrays(dataset.take(np.arange(start, min(start + _HASH_CHUNK, rows))))
        for start in range(0, rows, _HASH_CHUNK)
    ]
    return content_hash({"rows": rows, "chunks": chunks})


class InMemoryDataset(TrainingDataset):
    """A dataset whose columns are whole arrays; a subclass gives `load()`, called once, on first use.

    A field or class attribute `n_classes` declares the number of classes; otherwise it is read off the targets.
    """

    _kept: dict[str, Any] = PrivateAttr(default_factory=dict)

    @abc.abstractmethod
    def load(self) -> Mapping[str, Any]:
        """Return name -> array [N, ...]; dtypes are settled and lengths compared by the caller."""
        raise NotImplementedError(f"{type(self).__name__} must define load()")

    def _loaded(self) -> Columns:
        if "columns" not in self._kept:
            settled = settle_columns(self.load(), getattr(self, "path", type(self).__name__), wide=self._wide)
            columns = {name: column.view() for name, column in settled.items()}
            for column in columns.values():
                column.setflags(write=False)  # the hash would lie after a change in place
            self._kept["columns"] = columns
        return self._kept["columns"]

    def __len__(self) -> int:
        """Return the number of rows."""
        columns = self._loaded()
        return len(next(iter(columns.values())))

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        """Name -> shape and dtype of one row."""
        return {name: ColumnInfo(value.shape[1:], value.dtype) for name, value in self._loaded().items()}

    def take(self, indices: np.ndarray) -> Columns:
        """Return the rows `indices` [B] of every column."""
        return {name: column[indices] for name, column in self._loaded().items()}

    def arrays(self) -> Columns:
        """Return every column whole (read-only views)."""
        return dict(self._loaded())

    @property
    def info(self) -> dict[str, Any]:
        """What a network needs to know (see `TrainingDataset.info`)."""
        return describe(self._loaded(), getattr(self, "n_classes", None))

    def content_hash(self) -> str:
        """Return 64 hex digits of the columns and the class count; independent of memory order and of the file."""
        if "hash" not in self._kept:
            columns = self._kept.get("digest") or hash_arrays(self._loaded())
            self._kept["hash"] = content_hash({"columns": columns, "n_classes": self.info.get("n_classes")})
        return self._kept["hash"]


def describe(columns: Mapping[str, np.ndarray], n_classes: int | None = None) -> dict[str, Any]:
    """Return `info` for whole columns.

    Whole-number targets of one value a row are class labels: `n_classes` (and `output_dim`) is `max + 1` unless it was
    declared. Other targets give `output_dim`, the number of values a row.
    """
    info: dict[str, Any] = {}
    if "x" in columns:
        info["input_shape"] = tuple(columns["x"].shape[1:])
        info["input_dim"] = int(np.prod(columns["x"].shape[1:], dtype=np.int64))
    if "y" in columns:
        info["target_shape"] = tuple(columns["y"].shape[1:])
    if n_classes is not None:
        info["n_classes"] = n_classes
    elif "y" in columns and columns["y"].dtype.kind in "iu" and columns["y"].ndim == 1 and len(columns["y"]):
        info["n_classes"] = int(max(columns["y"].max(), 0)) + 1
    if "n_classes" in info:
        info["output_dim"] = info["n_classes"]
    elif "y" in columns:
        info["output_dim"] = int(np.prod(columns["y"].shape[1:], dtype=np.int64))
    return info


def describe_row(columns: Mapping[str, ColumnInfo]) -> dict[str, Any]:
    """Return `info` as far as one row tells: sizes of x, and of targets that are values; not how many classes."""
    info: dict[str, Any] = {}
    if "x" in columns:
        shape = columns["x"].shape
        info |= {"input_shape": shape, "input_dim": int(np.prod(shape, dtype=np.int64))}
    if "y" in columns:
        info["target_shape"] = columns["y"].shape
        if columns["y"].dtype.kind not in "biu":
            info["output_dim"] = int(np.prod(columns["y"].shape, dtype=np.int64))
    return info


def require_columns(wanted: tuple[str, ...], found: Mapping[str, Any] | tuple[str, ...], where: str) -> None:
    """Raise `DataError` naming the first wanted column that is missing, and what there is."""
    for name in wanted:
        if name not in found:
            raise DataError(f"{where} has no column {name!r}{nearest(name, found)} (columns: {', '.join(found)})")
