"""Batches as tensors on the device: real rows only, gathered from columns that are there, or read from the feed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from nnx_jax.core.errors import DataError
from nnx_jax.data.deal import DealtLoader
from nnx_jax.data.dtypes import MASK
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.reading import Ahead
from nnx_jax.spmd.world import ALONE, World
from nnx_jax.torch.rows import UNKNOWN, Rows, Span, span_of_column

Batch = dict[str, torch.Tensor]

RESIDENT_BYTES = 256 * 1024**2
"""Columns up to this size are kept on a device that is not the host, and rows that are dealt on any."""


def as_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A column on the device: whole numbers of 32 bits become int64, torch's type of labels and indices.

    On the CPU it shares the array's memory where the type stays, so nobody may write into it.
    """
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":
        found = _shared(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    elif array.dtype == np.uint16:
        found = torch.from_numpy(array.astype(np.int32))
    else:
        found = _shared(np.ascontiguousarray(array))
    wide = found.to(torch.int64) if found.dtype == torch.int32 else found
    return wide if device.type == "cpu" else wide.to(device, non_blocking=True)


def _shared(array: np.ndarray) -> torch.Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it cannot be written, which nobody does
        return torch.from_numpy(array)


def real_rows(batch: Mapping[str, np.ndarray], device: torch.device) -> Batch:
    """A batch's rows whose mask is above 0; rows that fill a batch up never reach the model."""
    mask = np.asarray(batch[MASK])
    real = mask > 0
    columns = batch if real.all() else {name: column[real] for name, column in batch.items()}
    once = bool((columns[MASK] == 1).all())
    placed = {name: as_tensor(column, device) for name, column in columns.items()}
    return Rows(placed, span_of_column(columns) if once else UNKNOWN)


def dealt(feed: Any) -> DealtLoader | None:
    """The loader of a feed, where it is one that deals rows, none that changes what is served, and of few bytes: every
    process would have the rows of all."""
    loader = getattr(feed, "_loader", None)
    return loader if type(loader) is DealtLoader and loader.nbytes <= RESIDENT_BYTES else None


class Source:
    """The batches of one feed as tensors, from any position on.

    Args:
        feed: a Feed or LoaderFeed.
        device: where batches go.
        ahead: batches that a thread reads ahead, of a Feed whose columns are not on the device.
        begins: called before an epoch of a loader is opened at its beginning (first argument True) or in its middle;
            what it returns is called when the position is reached.
        world: of every batch of a Feed each process has its part of the rows, in their order; a loader gives each its
            own.

    Attributes:
        resident: the columns are on the device, and nothing is read.
        waited: seconds that callers waited for a batch.
    """

    def __init__(
        self,
        feed: Any,
        device: torch.device,
        *,
        ahead: int = 0,
        begins: Callable[[bool], Callable[[], None] | None] | None = None,
        world: World = ALONE,
    ) -> None:
        self.feed, self.device, self.waited = feed, device, 0.0
        self._ahead = ahead if isinstance(feed, Feed) else 0
        self._begins = begins
        self._rank, self._size = (world.rank, world.size) if isinstance(feed, Feed) else (0, 1)
        self._span: Span = UNKNOWN
        self._rows: Any = feed if isinstance(feed, Feed) else dealt(feed)
        self._columns = None if self._rows is None else self._place(self._rows)
        self._table: tuple[int, list[torch.Tensor]] = -1, []
        self._masks: dict[int, torch.Tensor] = {}
        self._iterator: Any = None
        self._at: tuple[int, int] | None = None  # what the iterator gives next
        self._last: tuple[tuple[int, int], Batch] | None = None
        self._next: tuple[tuple[int, int], Batch] | None = None

    @property
    def resident(self) -> bool:
        """The columns are on the device."""
        return self._columns is not None

    def read(self, epoch: int, place: int) -> Batch:
        """Batch `place` of `epoch`: its real rows, [n, ...] with 0 <= n <= B.

        Raises:
            DataError: the epoch has no such batch; and whatever the data raises.
        """
        began = time.perf_counter()
        at = epoch, place
        if self._next is not None and self._next[0] == at:
            batch = self._next[1]
        elif self._columns is not None:
            batch = self._gather(epoch, place)
        else:
            batch = real_rows(self._part(self._read(epoch, place)), self.device)
        self._next, self._last = None, (at, batch)
        self.waited += time.perf_counter() - began
        return batch

    def whole(self) -> Iterator[Batch]:
        """One pass of the feed from its beginning, as far as it goes, without the batches that hold no real row."""
        if self._columns is None:
            batches: Iterator[Batch] = (real_rows(self._part(each), self.device) for each in self.feed.batches(0))
        else:
            batches = (self._gather(0, place) for place in range(self.feed.n_batches))
        yield from (batch for batch in batches if len(batch[MASK]))

    def look(self, epoch: int, place: int) -> Batch | None:
        """The batch to come, or the last one; None for another."""
        at = epoch, place
        if self._last is not None and self._last[0] == at:
            return dict(self._last[1])
        if self._next is None or self._next[0] != at:
            kept, last = self.read(epoch, place), self._last
            self._next, self._last = last, None
            return dict(kept)
        return dict(self._next[1])

    def close(self) -> None:
        """Let go of the feed's iterator."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()
        self._iterator = self._at = None

    def _place(self, rows: Any) -> Batch | None:
        columns = rows.arrays()
        if columns is None:
            return None
        if self.device.type != "cpu" and sum(column.nbytes for column in columns.values()) > RESIDENT_BYTES:
            return None
        self._span = span_of_column(columns)
        return {name: as_tensor(column, self.device) for name, column in columns.items()}

    def _gather(self, epoch: int, place: int) -> Batch:
        if self._table[0] != epoch:
            self._table = epoch, self._indices(epoch)
        table = self._table[1]
        if not 0 <= place < len(table):
            raise DataError(f"epoch {epoch} ended after {len(table)} batches; every epoch must give as many")
        index = table[place]
        assert self._columns is not None
        batch = {name: column.index_select(0, index) for name, column in self._columns.items()}
        batch[MASK] = self._mask(index.shape[0])
        return Rows(batch, self._span)

    def _mask(self, rows: int) -> torch.Tensor:
        """A mask of ones, made anew where somebody wrote into it."""
        found = self._masks.get(rows)
        if found is None or found._version:
            found = self._masks[rows] = torch.ones(rows, device=self.device)
        return found

    def _indices(self, epoch: int) -> list[torch.Tensor]:
        """The rows of every batch of an epoch that are this process's."""
        order = self._rows.order(epoch)
        real = order >= 0
        count, place = real.sum(axis=1, keepdims=True), real.cumsum(axis=1) - 1
        first, end = (rank * count // self._size for rank in (self._rank, self._rank + 1))
        mine = real & (first <= place) & (place < end)
        packed = torch.from_numpy(np.ascontiguousarray(order[mine]).astype(np.int64)).to(self.device)
        return list(packed.split(mine.sum(axis=1).tolist()))

    def _part(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """This process's rows of a batch, dealt as `_gather` does: real rows alone are counted."""
        if self._size == 1:
            return batch
        real = np.flatnonzero(np.asarray(batch[MASK]) > 0)
        mine = real[self._rank * len(real) // self._size : (self._rank + 1) * len(real) // self._size]
        return {name: column[mine] for name, column in batch.items()}

    def _read(self, epoch: int, place: int) -> Mapping[str, np.ndarray]:
        if self._iterator is None or self._at != (epoch, place):
            self._open(epoch, place)
        iterator: Any = self._iterator
        batch = next(iterator, None)
        if batch is None:
            raise DataError(f"epoch {epoch} ended after {place} batches; every epoch must give as many")
        self._at = epoch, place + 1
        return batch

    def _open(self, epoch: int, place: int) -> None:
        self.close()
        reached = None if self._begins is None else self._begins(place == 0)
        iterator: Any = self.feed.batches(epoch, place)
        self._iterator = Ahead(iterator, self._ahead) if self._ahead else iterator
        self._at = epoch, place
        if reached is not None:
            reached()
