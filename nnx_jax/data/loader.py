"""The user's own batches as a feed: any re-iterable of `(x, y)` pairs or of dicts, in the order it gives them.

The position in such a loader is counted, and a resume skips that many batches. That is exact when the loader gives the
same epoch again; a loader that shuffles should seed itself in `set_epoch(epoch)`, called before each epoch is iterated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from nnx_jax.core.errors import DataError
from nnx_jax.data.dataset import ColumnInfo
from nnx_jax.data.dtypes import MASK, Columns, check_finite, settle, settle_columns
from nnx_jax.data.pipeline import Batch, Position, read_position


class LoaderFeed:
    """Batches from `loader`: the same interface as `Feed`, without `order` (there is no table of rows).

    Args:
        loader: iterated once an epoch. Its items are `(x, y)`, `{"x": ..., "y": ...}` (a `mask` [B] in it weighs the
            rows) or a bare array x, each with B rows. `len(loader)`, where it has one, is the batches an epoch.
        data_id: a name of the data for the run's identity and for resume; what is in the loader cannot be hashed.
        pad: batches with fewer rows than the first are filled up with copies of their row 0 and weight 0, so that one
            compiled program serves all; False hands them on as they are.
        wide: columns of float64 stay so, in place of float32.

    Raises:
        TypeError: `loader` is not iterable.
    """

    rows: int | None = None

    def __init__(
        self, loader: Iterable[Any], *, data_id: str | None = None, pad: bool = True, wide: bool = False
    ) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(f"a loader gives batches when iterated, found {type(loader).__name__}")
        if wide and hasattr(loader, "widened"):
            loader = loader.widened()  # type: ignore[attr-defined]  # a dealt loader, whose batches are settled already
        self._loader, self.data_id, self.pad, self.wide = loader, data_id, pad, wide
        self._size: int | None = None  # rows of the first batch ever seen
        self._signature: dict[str, ColumnInfo] | None = None
        self._opened: tuple[int, Iterator[Any], Any] | None = None  # the epoch signature() began, with its first item
        self.began: Any = None
        """What was kept of the moment before `signature` began an epoch; nobody here looks at it."""

    @property
    def n_batches(self) -> int | None:
        """Batches an epoch, or None when the loader does not say."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def arrays(self) -> Columns | None:
        """Return None: a loader's rows are not in memory."""
        return None

    def batches(self, epoch: int = 0, start: int = 0) -> LoaderIterator:
        """Return an iterator over batches `start`.. of `epoch`: `set_epoch`, then `start` batches are skipped.

        Raises:
            DataError: the loader gives nothing (naming the epoch), or fewer than `start` batches.
        """
        return LoaderIterator(self, epoch, start)

    def signature(self, epoch: int = 0) -> dict[str, ColumnInfo]:
        """Return name -> (shape with the batch axis, dtype) of the first batch.

        The first call begins `epoch`; `batches(epoch)` goes on with what was begun, so each epoch is iterated once.
        Later calls repeat the answer and leave the loader alone: it may be in the middle of an epoch.
        """
        if self._signature is None and self.partition is not None and self.n_batches == 0:
            self._signature = dict(self._loader.signature())  # type: ignore[attr-defined]  # a shard without a row
        if self._signature is None:
            source, first = self._open(epoch)
            self._opened = (epoch, source, first)
            batch = self._batch(first, epoch, 0)
            self._signature = {name: ColumnInfo(value.shape, value.dtype) for name, value in batch.items()}
        return dict(self._signature)

    @property
    def looked_at(self) -> bool:
        """`signature` was asked before."""
        return self._signature is not None

    def forget(self) -> None:
        """Begin anew the epoch that `signature` began; a one-shot iterator goes on, since it cannot."""
        if not self.one_shot:
            self._opened = None

    def descriptor(self) -> dict[str, Any]:
        """Return what a stored position depends on (JSON), as far as a loader tells; the same in every process."""
        told = {"n_batches": self.n_batches} if self.partition is None else {"partition": self.partition}
        return {"data_id": self.data_id} | told

    @property
    def info(self) -> dict[str, Any]:
        """What the loader tells a network about its data (`TrainingDataset.info`); {} for one that tells nothing."""
        found = getattr(self._loader, "info", None)
        return dict(found) if isinstance(found, Mapping) else {}

    @property
    def one_shot(self) -> bool:
        """The loader is an iterator: what is taken from it is gone."""
        return isinstance(self._loader, Iterator)

    @property
    def rank(self) -> int | None:
        """The process that the loader's rows are dealt to, where it tells."""
        return getattr(self._loader, "rank", None)

    @property
    def partition(self) -> dict[str, Any] | None:
        """How the loader deals its rows to processes (`deal.dealt_loader`); None for one that does not."""
        found = getattr(self._loader, "partition", None)
        return dict(found) if isinstance(found, Mapping) else None

    def _open(self, epoch: int) -> tuple[Iterator[Any], Any]:
        """Return the epoch's iterator and its first item."""
        one_shot = self.one_shot
        if self._opened is not None and (one_shot or self._opened[0] == epoch):
            _, source, first = self._opened
            self._opened = None
            return source, first
        self._announce(epoch)
        source = iter(self._loader)
        try:
            return source, next(source)
        except StopIteration:
            hint = (
                "it is a one-shot iterator, used up; give something that can be iterated again, such as a list"
                if one_shot
                else "give at least one batch an epoch"
            )
            raise DataError(f"the loader gave no batch in epoch {epoch}: {hint}") from None

    def _announce(self, epoch: int) -> None:
        """Tell the loader which epoch is iterated next."""
        set_epoch = getattr(self._loader, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def _batch(self, item: Any, epoch: int, index: int) -> Batch:
        """Return one item of the loader as named columns with a mask."""
        where = f"batch {index} of epoch {epoch}"
        named = as_columns(item, where)
        columns = settle_columns({name: value for name, value in named.items() if name != MASK}, where, wide=self.wide)
        rows = len(next(iter(columns.values())))
        if rows == 0:
            raise DataError(f"{where} has no rows")
        if self._size is None:
            if self.partition is None:
                check_finite(columns, where)  # the first batch only: reading every value of every batch is not free
            self._size = rows
        mask = np.ones(rows, np.float32)
        if MASK in named:
            mask = settle(MASK, named[MASK], where).astype(np.float32)
            if mask.shape != (rows,):
                raise DataError(f"{where}: the mask has shape {mask.shape}, the batch has {rows} rows")
        batch = columns | {MASK: mask}
        missing = self._size - rows
        return _filled(batch, missing) if self.pad and missing > 0 else batch


class LoaderIterator:
    """The batches of one epoch of a `LoaderFeed`."""

    def __init__(self, feed: LoaderFeed, epoch: int, start: int = 0) -> None:
        self._feed = feed
        self._seek(epoch, start)

    def _seek(self, epoch: int, start: int) -> None:
        finds: Any = getattr(self._feed._loader, "batches_from", None)
        if start and finds is not None:  # a stream, which need not be read up to there
            self._source, self._waiting, self._epoch, self._next = finds(epoch, start), [], epoch, start
            return
        source, first = self._feed._open(epoch)
        waiting: list[Any] = [first] if start == 0 else []
        left = start - 1
        if hasattr(source, "skip") and left > 0:
            left -= source.skip(left)  # type: ignore[attr-defined]  # a dealt loader's reads nothing meanwhile
        while left > 0 and next(source, _END) is not _END:
            left -= 1
        if left > 0:
            given = start - left
            raise DataError(f"the loader gave {given} batches in epoch {epoch}; the position asked for is {start}")
        self._source, self._waiting, self._epoch, self._next = source, waiting, epoch, start

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        item = self._waiting.pop() if self._waiting else next(self._source)
        batch = self._feed._batch(item, self._epoch, self._next)
        self._next += 1
        return batch

    def state(self) -> Position:
        """Return `{"epoch", "next"}`: the batches delivered so far."""
        return {"epoch": self._epoch, "next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin the stored epoch again and skip what was delivered; `DataError` when the loader has less."""
        self._seek(*read_position(state))

    def close(self) -> None:
        """Let go of the loader's iterator."""
        self._source, self._waiting = iter(()), []


_END = object()


def as_columns(item: Any, where: str) -> Mapping[str, Any]:
    """Return `(x, y)`, a dict or an array as columns by name; `DataError` for anything else."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple | list) and len(item) == 2:
        return {"x": item[0], "y": item[1]}
    if hasattr(item, "shape"):
        return {"x": item}
    raise DataError(f"{where} is {type(item).__name__}; a batch is (x, y), a dict of columns, or an array x")


def _filled(batch: Batch, missing: int) -> Batch:
    filled = {name: np.concatenate([a, np.repeat(a[:1], missing, axis=0)]) for name, a in batch.items()}
    filled[MASK][-missing:] = 0.0
    return filled
