"""Rows dealt to the processes of a group: each process serves its own, and all make the same number of batches.

A batch of the group is made of the processes' batches, in the order of their ranks: `world * batch_size` rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import numpy as np

from nnx_jax.core.errors import DataError
from nnx_jax.data.arrays import as_dataset
from nnx_jax.data.checks import check_batching
from nnx_jax.data.dataset import ColumnInfo, TrainingDataset, hash_rows
from nnx_jax.data.dtypes import MASK, Columns
from nnx_jax.data.loader import as_columns
from nnx_jax.data.partition import GENERATOR, POLICIES, batch_table, deal, epoch_order, validation_rows
from nnx_jax.data.pipeline import AugmentKeys, Batch, EpochBatches, settled

ONCE = "once"
"""The policy of validation rows: every row is scored by exactly one process."""


class DealtLoader:
    """One process's batches, epoch after epoch: `dealt_loader` and `validation_shard` make them.

    Every batch is a dict of the dataset's columns [batch_size, ...] and `mask`, float32 [batch_size]: 0 for the rows
    that fill up the last batch of an epoch, copies of row 0 of the dataset. Iterating serves the epoch that
    `set_epoch` named last, 0 before the first; going back to an epoch gives its order again.

    Attributes:
        batch_size: rows of a batch in this process.
        policy: what is done so that every process has as many rows: "pad" or "drop"; "once" deals them unevenly.
        seed: of the order; None for rows in order.
        rank, world: this process, and how many there are.
    """

    def __init__(self, dataset: Any, batch_size: int, *, policy: str, seed: int | None, rank: int, world: int) -> None:
        self._rows = _with_rows(dataset)
        self.batch_size, self.policy, self.seed, self.rank, self.world = batch_size, policy, seed, rank, world
        check_batching(len(self._rows), batch_size, "pad", type(dataset).__name__)
        self._count, self._epoch = len(self._mine(0)), 0
        if not self._count and policy != ONCE:
            raise DataError(
                f"policy 'drop' leaves {len(self._rows)} rows to {world} processes, so none; use policy='pad', more "
                "rows or fewer processes"
            )

    def widened(self, wide: bool = True) -> DealtLoader:
        """Return the same batches with columns of float64 as they are; see `TrainingDataset.widened`."""
        options: Any = {"policy": self.policy, "seed": self.seed, "rank": self.rank, "world": self.world}
        return DealtLoader(self._rows.widened(wide), self.batch_size, **options)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is iterated next."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return this process's batches an epoch; with "once" another process may have one more, or one less."""
        return -(-self._count // self.batch_size)

    def __iter__(self) -> DealtBatches:
        return DealtBatches(EpochBatches(self._rows, self.order(self._epoch), augment=self._augment(self._epoch)))

    def order(self, epoch: int) -> np.ndarray:
        """Return the row numbers of this process's batches, int32 [len(self), batch_size]; -1 fills the last one up."""
        return batch_table(self._mine(epoch), self.batch_size, "pad")

    def arrays(self) -> Columns | None:
        """Return the columns whole, of all processes; None where they are not in memory, or batches are augmented."""
        if not isinstance(self._rows, TrainingDataset) or self._rows.augments:
            return None
        whole = self._rows.arrays()
        return None if whole is None else settled(whole, self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns whole, as far as one row tells."""
        row = [info for name, info in self.signature().items() if name != MASK]
        return len(self._rows) * sum(math.prod(info.shape[1:]) * info.dtype.itemsize for info in row)

    def signature(self) -> dict[str, ColumnInfo]:
        """Return name -> (shape with the batch axis, dtype) of a batch, `mask` included; also where there is none."""
        row = settled(self._rows.take(np.arange(1)), self._rows)
        columns = {name: ColumnInfo((self.batch_size, *value.shape[1:]), value.dtype) for name, value in row.items()}
        return columns | {MASK: ColumnInfo((self.batch_size,), np.dtype(np.float32))}

    @cached_property
    def partition(self) -> dict[str, Any]:
        """How the rows are dealt, as JSON: equal in every process, and kept with the position in the data."""
        longest = -(-len(self._rows) // self.world) if self.policy == ONCE else self._count
        return {
            "rows": len(self._rows),
            "batch_size": self.batch_size,
            "policy": self.policy,
            "seed": self.seed,
            "world": self.world,
            "order": "rows" if self.seed is None else GENERATOR,
            "batches": -(-longest // self.batch_size),
            "dataset": self._rows.content_hash(),
        }

    def _mine(self, epoch: int) -> np.ndarray:
        """Row numbers of this process in one epoch."""
        if self.seed is None:
            return validation_rows(len(self._rows), self.rank, self.world)
        return deal(epoch_order(len(self._rows), self.seed, epoch), self.rank, self.world, self.policy)

    def _augment(self, epoch: int) -> AugmentKeys | None:
        """Keys that differ from batch to batch of the whole group."""
        if self.seed is None or not getattr(self._rows, "augments", False):
            return None
        return AugmentKeys(self.seed + epoch, self.rank, self.world)


class DealtBatches:
    """The batches of one epoch of a `DealtLoader`."""

    def __init__(self, source: EpochBatches) -> None:
        self._source, self._next = source, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._next >= len(self._source):
            raise StopIteration
        self._next += 1
        return self._source[self._next - 1]

    def skip(self, count: int) -> int:
        """Leave out so many batches without reading them; return how many there were to leave out."""
        left = min(count, len(self._source) - self._next)
        self._next += left
        return left


def dealt_loader(
    dataset: Any, batch_size: int, *, policy: str = "pad", seed: int = 0, rank: int = 0, world: int = 1
) -> DealtLoader:
    """Return the training batches of one of `world` processes.

    An epoch's order is a permutation, a function of `seed + epoch`; process `rank` gets `order[rank::world]`. Before
    that the order is made a multiple of `world` long: "pad" repeats its leading rows, and those are trained on and
    counted like any other; "drop" leaves its last rows out. (Data of a configuration repeats no row: what fills up a
    batch there has weight 0.) A process's last batch is filled up with rows of weight 0.

    Args:
        dataset: a dataset, `{name: array}`, `(x, y)` arrays, an array, or a sequence of items that are `(x, y)`, dicts
            or arrays.
        batch_size: rows of a batch in this process; the group's batch has `world` times as many.

    Raises:
        ValueError: no row, a batch size below 1, another policy, a negative seed, a rank that is not of this world.
        TypeError: a dataset without a length.
    """
    if policy not in POLICIES:
        raise DataError(f"policy must be one of {', '.join(POLICIES)}, found {policy!r}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise DataError(f"seed must be a whole number of 0 or more, found {seed!r}")
    return DealtLoader(dataset, batch_size, policy=policy, seed=int(seed), rank=rank, world=world)


def validation_shard(dataset: Any, batch_size: int, *, rank: int = 0, world: int = 1) -> DealtLoader:
    """Return the validation batches of one of `world` processes: rows `rank::world` in order, each row in one process.

    Processes may have different numbers of rows, one more or one less, or none.

    Args and errors: as of `dealt_loader`.
    """
    return DealtLoader(dataset, batch_size, policy=ONCE, seed=None, rank=rank, world=world)


def _with_rows(dataset: Any) -> Any:
    """The dataset, or what was given as one."""
    arrays = isinstance(dataset, Mapping | tuple) or (hasattr(dataset, "shape") and hasattr(dataset, "dtype"))
    if isinstance(dataset, _Items):
        return dataset
    if isinstance(dataset, TrainingDataset) or arrays:
        return as_dataset(dataset)
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"rows are dealt by their number, and {type(dataset).__name__} has no length; give a dataset, arrays, or a "
            "sequence of items"
        )
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"rows are dealt by their number, and {type(dataset).__name__} cannot be asked for row i")
    return _Items(dataset)


class _Items:
    """A sequence of items, each `(x, y)`, a dict or an array, as rows of named columns."""

    def __init__(self, items: Any, *, wide: bool = False) -> None:
        self._items, self.wide = items, wide

    def widened(self, wide: bool = True) -> _Items:
        return _Items(self._items, wide=wide)

    def __len__(self) -> int:
        return len(self._items)

    def take(self, indices: np.ndarray) -> Columns:
        rows = [as_columns(self._items[int(index)], f"item {int(index)}") for index in indices]
        return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in (rows[0] if rows else ())}

    def content_hash(self) -> str:
        return hash_rows(self)
