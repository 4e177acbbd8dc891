"""Batches of a dataset in a reproducible order, through grain, with an exact position at every batch.

Grain iterates over *batches*, not rows: its source is one epoch's table of row numbers and each element is one whole
batch that numpy gathers at once (217 us for 128 x 784, against 5676 us row by row). A batch therefore never spans two
epochs, and its content does not depend on prefetching or on worker processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from nnx_jax.core.errors import DataError
from nnx_jax.data.checks import check
from nnx_jax.data.dataset import ColumnInfo, TrainingDataset
from nnx_jax.data.dtypes import MASK, Columns, settle
from nnx_jax.data.partition import GENERATOR, Share, batch_table, epoch_order

Batch = dict[str, np.ndarray]
Position = dict[str, int]  # {"epoch", "next"}: the next batch to be delivered; JSON


@runtime_checkable
class BatchIterator(Protocol):
    """The batches of one epoch from some position on; `state()` may be asked between any two of them."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> Batch: ...
    def state(self) -> Position: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class BatchFeed(Protocol):
    """What a run asks of its data: `Feed` over a dataset, `LoaderFeed` over the user's own batches."""

    @property
    def n_batches(self) -> int | None: ...
    @property
    def rows(self) -> int | None: ...
    def batches(self, epoch: int = 0, start: int = 0) -> BatchIterator: ...
    def arrays(self) -> Columns | None: ...
    def signature(self, epoch: int = 0) -> dict[str, ColumnInfo]: ...
    def descriptor(self) -> dict[str, Any]: ...


class Feed:
    """Batches of `dataset`, epoch after epoch.

    Args:
        dataset: the rows.
        batch_size: rows a batch, B.
        tail: the last, incomplete batch of a pass is filled up with padding (`pad`), left out (`drop`), served
            short (`keep`: another shape, so a second compile), or filled up with the first rows of the next pass
            (`straddle`: an epoch is then as many passes as end together with a batch).
        shuffle: a new permutation each pass, a function of `seed` and the pass's number (`partition.epoch_order`);
            False serves the rows in order.
        seed: whole number >= 0.
        prefetch: batches gathered ahead in a thread; 0 gathers when asked.
        workers: processes that gather (spawned, as JAX threads do not survive a fork: a script needs its
            `if __name__ == "__main__"`, and each worker holds a copy of the dataset). 0 is faster for arrays in memory.
        augment: whether the dataset's `augment` is asked, where it has one.
        n_batches: batches of an epoch, for `straddle`: epoch e begins at batch e * n_batches of the passes in a row.

    Every batch is a dict of the dataset's columns [B, ...] and `mask`, float32 [B]: 1 for a row of the data, 0 for
    padding. Padding rows are copies of row 0 of the dataset (real values, so that no net sees something outside its
    domain); they carry no weight. Dtypes are those of `dtypes.settle`, also for datasets of your own.

    Raises:
        DataError: from `checks.check`, before anything is compiled.
    """

    def __init__(
        self,
        dataset: TrainingDataset,
        *,
        batch_size: int,
        tail: str = "pad",
        shuffle: bool = True,
        seed: int = 0,
        prefetch: int = 0,
        workers: int = 0,
        augment: bool = True,
        n_batches: int | None = None,
    ) -> None:
        check(dataset, batch_size=batch_size, tail=tail)
        for name, number in {"seed": seed, "prefetch": prefetch, "workers": workers}.items():
            if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
                raise DataError(f"{name} must be a whole number of 0 or more, found {number!r}")
        self.dataset, self.batch_size, self.tail = dataset, int(batch_size), tail
        self.shuffle, self.seed, self.prefetch, self.workers = shuffle, int(seed), prefetch, workers
        if n_batches is not None and (tail != "straddle" or n_batches < 1):
            raise DataError(f"n_batches must be 1 or more, with the tail straddle; found {n_batches} with {tail}")
        self._n_batches = n_batches
        self.augments = augment and dataset.augments

    @classmethod
    def evaluation(cls, dataset: TrainingDataset, *, batch_size: int, prefetch: int = 0) -> Feed:
        """Return the feed that scores every row exactly once: row order, last batch padded, whatever training does."""
        return cls(dataset, batch_size=batch_size, tail="pad", shuffle=False, prefetch=prefetch, augment=False)

    @property
    def rows(self) -> int:
        """Rows of the dataset (served an epoch: this, less the dropped tail)."""
        return len(self.dataset)

    @property
    def n_batches(self) -> int:
        """Batches an epoch."""
        if self._n_batches is not None:
            return self._n_batches
        full, rest = divmod(self.rows * self.passes, self.batch_size)
        return full + (rest > 0 and self.tail != "drop")

    @property
    def passes(self) -> int:
        """Passes over the rows that make an epoch: one, but for `straddle`."""
        return math.lcm(self.rows, self.batch_size) // self.rows if self.tail == "straddle" else 1

    @property
    def pad(self) -> bool:
        """Whether every batch has `batch_size` rows, none of them left out."""
        return self.tail in ("pad", "straddle")

    def order(self, epoch: int) -> np.ndarray:
        """Return the row numbers of one epoch, int32 [n_batches, B]; -1 is padding (`pad`) or no row (`keep`).

        The device-resident path gathers rows `maximum(order, 0)` of `arrays()` with weight `order >= 0`: the batches of
        `batches(epoch)`, value for value.
        """
        if self._n_batches is not None:
            return batch_table(self._stretch(epoch * self._n_batches), self.batch_size, self.tail)
        first, passes = epoch * self.passes, self.passes
        found = [epoch_order(self.rows, self.seed, first + each, shuffle=self.shuffle) for each in range(passes)]
        return batch_table(found[0] if passes == 1 else np.concatenate(found), self.batch_size, self.tail)

    def _stretch(self, batch: int) -> np.ndarray:
        """The rows of an epoch that begins at a batch, counted over all passes."""
        start, end = (place * self.batch_size for place in (batch, batch + self.n_batches))
        first = start // self.rows
        passes = range(first, -(-end // self.rows))
        found = np.concatenate([epoch_order(self.rows, self.seed, each, shuffle=self.shuffle) for each in passes])
        return found[start - first * self.rows : end - first * self.rows]

    def size(self, index: int) -> int:
        """Rows of batch `index` of an epoch, with the padding."""
        short = self.tail == "keep" and index == self.n_batches - 1
        return (self.rows - 1) % self.batch_size + 1 if short else self.batch_size

    def batches(self, epoch: int = 0, start: int = 0, share: Share | None = None) -> FeedIterator:
        """Return a fresh iterator over batches `start`.. of `epoch`; the same rest as one that ran up to there.

        Args:
            share: the rows that are wanted of every batch, one process's of several; only those are gathered. Where
                the dataset augments, whole batches are gathered, augmented and then cut, so that the union of all
                processes' rows is what one process would see.
        """
        return FeedIterator(self, epoch, start, share)

    def arrays(self) -> Columns | None:
        """Return the dataset's columns whole, or None when it is not in memory or its batches are augmented."""
        whole = None if self.augments else self.dataset.arrays()
        return None if whole is None else settled(whole, self.dataset)

    def signature(self, epoch: int = 0) -> dict[str, ColumnInfo]:
        """Return name -> (shape with the batch axis, dtype) of a full batch, `mask` included."""
        del epoch  # every epoch is alike
        size = min(self.batch_size, self.rows) if self.tail == "keep" else self.batch_size
        row = settled(self.dataset.take(np.arange(1)), self.dataset)
        columns = {name: ColumnInfo((size, *value.shape[1:]), value.dtype) for name, value in row.items()}
        return columns | {MASK: ColumnInfo((size,), np.dtype(np.float32))}

    def descriptor(self) -> dict[str, Any]:
        """Return what a stored position depends on (JSON); see `compare_descriptors`.

        Prefetch and workers are left out: they change no batch.
        """
        return {
            "rows": self.rows,
            "batch_size": self.batch_size,
            "tail": self.tail,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
            "order": GENERATOR if self.shuffle else "rows",
            "dataset": self.dataset.content_hash(),
        } | ({} if self._n_batches is None else {"n_batches": self._n_batches})


class EpochBatches:
    """Grain's random-access source: element i is line i of a table of row numbers, as a batch.

    Its repr is the content of the data, never an address: grain compares it (case F15).

    Args:
        dataset: the rows.
        table: row numbers [n, B]; -1 is padding.
        keep: padding is left out.
        augment: (index of a batch) -> the key of its augmentation, two whole numbers; None for none.
        share: the rows wanted of every batch; None for all.
    """

    def __init__(
        self,
        dataset: Any,
        table: np.ndarray,
        *,
        keep: bool = False,
        augment: Callable[[int], list[int]] | None = None,
        share: Share | None = None,
    ) -> None:
        self._dataset, self._table, self._keep = dataset, table, keep
        self._augment, self._share = augment, share

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Batch:
        rows = self._table[index]
        if self._keep:
            rows = rows[rows >= 0]
        wanted, places = rows, None
        if self._share is not None:
            places = self._share.places(len(rows))
            wanted = np.where(places >= 0, rows[np.maximum(places, 0)], -1)
        if self._augment is None:
            batch = self._dataset.take(np.maximum(wanted, 0))
        else:
            generator = np.random.Generator(np.random.Philox(key=self._augment(index)))
            batch = self._dataset.augment(self._dataset.take(np.maximum(rows, 0)), generator)
            if places is not None:
                batch = {name: column[np.maximum(places, 0)] for name, column in batch.items()}
        return settled(batch, self._dataset) | {MASK: (wanted >= 0).astype(np.float32)}

    def __repr__(self) -> str:
        return f"batches of {type(self._dataset).__name__} {self._dataset.content_hash()[:16]}"


@dataclass(frozen=True)
class AugmentKeys:
    """The key of a batch's augmentation: the data's seed plus the epoch, and the batch's place in the epoch.

    Attributes:
        seed: with the epoch added.
        first, every: place of the table's first line, and how far apart two lines are.
    """

    seed: int
    first: int = 0
    every: int = 1

    def __call__(self, index: int) -> list[int]:
        return [self.seed, self.first + self.every * index]


def settled(columns: Mapping[str, np.ndarray], dataset: Any) -> Columns:
    """The columns in their documented dtypes."""
    wide = bool(getattr(dataset, "wide", False))
    return {name: settle(name, value, type(dataset).__name__, wide=wide) for name, value in columns.items()}


class FeedIterator:
    """The batches of one epoch of a `Feed`; the position is grain's own, saved and set through its state."""

    def __init__(self, feed: Feed, epoch: int, start: int = 0, share: Share | None = None) -> None:
        self._feed, self._share = feed, share
        self._seek(epoch, start)

    def _seek(self, epoch: int, start: int) -> None:
        if not 0 <= start <= self._feed.n_batches:
            raise DataError(f"batch {start} of epoch {epoch}: an epoch has {self._feed.n_batches} batches")
        table = self._feed.order(epoch)
        if self._feed.workers:  # grain's state of workers depends on their number; the source begins at `start` instead
            self._first, table = start, table[start:]
        else:
            self._first = 0
        self._epoch, self._delivered = epoch, 0
        feed = self._feed
        augment = AugmentKeys(feed.seed + epoch, self._first) if feed.augments else None
        source = EpochBatches(feed.dataset, table, keep=feed.tail == "keep", augment=augment, share=self._share)
        self._grain = _grain_iterator(source, self._feed.prefetch, self._feed.workers)
        if not self._feed.workers:
            self._grain.set_state({"next_index": start})

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = next(self._grain)
        self._delivered += 1
        if self._feed.workers:  # grain lends shared memory, which goes away with its array
            return {name: np.array(value, subok=False) for name, value in batch.items()}
        return batch

    def state(self) -> Position:
        """Return `{"epoch", "next"}`: JSON, counted in batches (microbatches), exact between any two batches."""
        if self._feed.workers:
            return {"epoch": self._epoch, "next": self._first + self._delivered}
        return {"epoch": self._epoch, "next": int(self._grain.get_state()["next_index"])}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored `state()`, of this or another process, worker count or epoch.

        Raises:
            DataError: not a position of this feed; nothing has changed then.
        """
        epoch, start = read_position(state)
        if not self._feed.workers and epoch == self._epoch and start <= self._feed.n_batches:
            self._grain.set_state({"next_index": start})
            return
        stale = self._grain
        self._seek(epoch, start)
        stale.close()

    def close(self) -> None:
        """Stop prefetching threads and workers."""
        self._grain.close()


def _grain_iterator(source: EpochBatches, prefetch: int, workers: int) -> Any:
    """Return grain's iterator over `source`; the one place that imports grain."""
    import grain

    reading = grain.ReadOptions(num_threads=min(prefetch, 2), prefetch_buffer_size=prefetch)
    dataset = grain.MapDataset.source(source).to_iter_dataset(reading)
    if workers and len(source):
        _mark_absl_flags_parsed()
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=min(workers, len(source))))
    return iter(dataset)


def _mark_absl_flags_parsed() -> None:
    """Let grain's workers start in a program that does not use absl (google/grain#1355, case F14)."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def read_position(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return (epoch, next batch) of a stored position; `DataError` when it is not one."""
    wanted = ("epoch", "next")
    whole = isinstance(state, Mapping) and all(type(state.get(key)) is int and state[key] >= 0 for key in wanted)
    if not whole or set(state) != set(wanted):
        raise DataError(f"a position is {{'epoch': int, 'next': int}}, both 0 or more; found {state!r}")
    return state["epoch"], state["next"]


def compare_descriptors(stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise `DataError` naming every field in which the data of a stored position differs from the data given now."""
    different = [
        f"{name} was {stored.get(name)!r}, is {current.get(name)!r}"
        for name in dict.fromkeys((*stored, *current))
        if stored.get(name) != current.get(name)
    ]
    if different:
        raise DataError(
            f"the stored data position does not fit this data: {'; '.join(different)}. "
            "Give the data the run started with, or start from its weights only"
        )
