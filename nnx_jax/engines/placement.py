"""Placement: how batches reach the devices of a step, and how its weights come back; the same rows on any of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import DataError
from nnx_jax.data.partition import Share
from nnx_jax.data.pipeline import Feed
from nnx_jax.spmd.mesh import ShardingSpec
from nnx_jax.step import place_columns, place_table, stack_batches
from nnx_jax.step.batches import LOST
from nnx_jax.step.places import on_host, put
from nnx_jax.step.plan import HookPlan

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of arrays by name."""


class Placement:
    """One device: batches are handed over as they are."""

    @property
    def sharding(self) -> ShardingSpec | None:
        """Devices and places; None for the default device."""
        return None

    def signature(self, columns: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch as the step gets it, from those that its feed tells."""
        return {name: jax.ShapeDtypeStruct(column.shape, column.dtype) for name, column in columns.items()}

    def feed(self, feed: Any) -> Any:
        """The feed with these shapes."""
        return feed

    @property
    def shared(self) -> bool:
        """The devices are those of several processes."""
        return False

    def of(self, feed: Any) -> Placement:
        """Where the batches of another feed go."""
        del feed
        return self

    def open(self, feed: Any, epoch: int, start: int) -> Any:
        """The feed's iterator from a position on, over what this process needs of every batch."""
        return feed.batches(epoch, start)

    def rows(self, feed: Any, index: int) -> int | None:
        """Rows of the whole batch, where a process holds some of them; None where it holds all."""
        del feed, index

    def check(self, feed: Any, batch: Mapping[str, Any], rows: int | None, where: str) -> None:
        """Check that a batch fits what the other processes hand over at the same time; alone there is nothing to fit.

        Raises:
            DataError: it does not.
        """

    def lost(self, feed: Any, index: int, mask: float = LOST) -> Any:
        """What takes the place of a batch that this process has not, as `reading.Ready`."""
        raise AssertionError("a process alone raises its own error")

    def batch(self, batch: Mapping[str, Any], rows: int | None = None) -> Mapping[str, Any]:
        """A host batch as the step gets it; `rows` as told by the method of that name."""
        del rows
        return batch

    def ahead(self, batch: Mapping[str, Any], rows: int | None = None) -> Mapping[str, Any]:
        """The same on the device already: the transfer is under way while the device computes."""
        del rows
        return jax.device_put(dict(batch))

    def block(self, batches: Sequence[Mapping[str, Any]], capacity: int, rows: int | None = None) -> Mapping[str, Any]:
        """Host batches of one shape, stacked."""
        del rows
        return stack_batches(batches, capacity)

    def columns(self, columns: Mapping[str, Any]) -> dict[str, jax.Array]:
        """A dataset's columns on the device."""
        return place_columns(columns)

    def table(self, order: Any) -> jax.Array:
        """An epoch's row numbers on the device."""
        return place_table(order)

    def home(self, tree: Any) -> Any:
        """Arrays of the state as the user's own objects hold them."""
        return tree


class SplitRows(Placement):
    """Several devices: each holds the model and gets an equal part of every batch's rows.

    A number of rows that cannot be cut into equal parts is filled up with rows of weight 0, copies of the first one, as
    every incomplete batch is.

    Args:
        sharding: devices and places.
        pads: batches may be filled up; else a short one that cannot be cut is whole on all devices.
        must: every batch must be cut.
    """

    dealt = False
    """A feed's batches are one process's of several."""

    def __init__(self, sharding: ShardingSpec, *, pads: bool = True, must: bool = False) -> None:
        self._sharding, self.pads, self.must = sharding, pads, must

    @property
    def sharding(self) -> ShardingSpec:
        """Devices and places."""
        return self._sharding

    def signature(self, columns: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch with the rows that fill it up.

        Raises:
            DataError: rows that do not fit, and a loss that leaves none out.
        """
        full = self.filled(columns["mask"].shape[0])
        return {name: jax.ShapeDtypeStruct((full, *c.shape[1:]), c.dtype) for name, c in columns.items()}

    @property
    def cuts(self) -> int:
        """Parts that a feed's batch is cut into."""
        return self.sharding.parts

    def filled(self, rows: int) -> int:
        """Rows of a feed's full batch once it is filled up.

        Raises:
            DataError: rows that do not fit, and a loss that leaves none out.
        """
        return self._rows(rows, must=True)

    def feed(self, feed: Any) -> Any:
        """The feed with these shapes."""
        return _Seen(feed, self)

    def batch(self, batch: Mapping[str, Any], rows: int | None = None) -> Mapping[str, Any]:
        """A host batch with each device's rows on it.

        Raises:
            DataError: it cannot be cut and must be.
        """
        del rows
        filled, whole = self._filled(batch)
        return jax.device_put(filled, self.sharding.whole if whole else self.sharding.rows)

    def ahead(self, batch: Mapping[str, Any], rows: int | None = None) -> Mapping[str, Any]:
        """As `batch`."""
        return self.batch(batch, rows)

    def block(self, batches: Sequence[Mapping[str, Any]], capacity: int, rows: int | None = None) -> Mapping[str, Any]:
        """Host batches of one shape, stacked, with each device's rows on it."""
        del rows
        found = [self._filled(batch) for batch in batches]
        block = stack_batches([filled for filled, _ in found], capacity)
        return jax.device_put(block, self.sharding.whole if found[0][1] else self.sharding.stacked)

    def columns(self, columns: Mapping[str, Any]) -> dict[str, jax.Array]:
        """A dataset's columns, whole on every device: rows are gathered where they are needed."""
        return jax.device_put({name: np.array(column) for name, column in columns.items()}, self.sharding.whole)

    def table(self, order: Any) -> jax.Array:
        """An epoch's row numbers, each device's on it; -1 fills up."""
        order = np.asarray(order, np.int32)
        missing = self.sharding.padded(order.shape[1]) - order.shape[1]
        return jax.device_put(np.pad(order, ((0, 0), (0, missing)), constant_values=-1), self.sharding.stacked)

    def home(self, tree: Any) -> Any:
        """Arrays on the default device: what a run leaves behind does not tell on how many devices it was made."""
        return jax.tree.map(lambda leaf: jnp.array(on_host(leaf)), tree)

    def _rows(self, rows: int, *, must: bool) -> int:
        """Rows of a batch once it is filled up; as they are where they cannot be cut and need not."""
        parts, full = self.sharding.parts, self.sharding.padded(rows)
        if rows == full or self.pads:
            return full
        if not must:
            return rows
        less = f"{rows // parts * parts} or {full}" if rows > parts else f"{full}"
        raise DataError(
            f"a batch of {rows} rows does not split over {parts} devices ({rows} = {parts} x {rows // parts} + "
            f"{rows % parts}); give batches of {less} rows, or have rows of weight 0 added: by data.tail: pad, or "
            "for a strategy's loader by a built-in loss"
        )

    def _filled(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The batch with rows that fill it up, and whether it cannot be cut."""
        rows = len(batch["mask"])
        missing = self._rows(rows, must=self.must) - rows
        if not missing:
            return dict(batch), rows != self.sharding.padded(rows)
        return filled_up(batch, missing), False


class ProcessRows(SplitRows):
    """Devices of several processes: each process hands over the rows of its own, as its part of arrays that span all.

    Every process makes the same calls in the same order, and none waits for another.

    Args:
        sharding, pads, must: as of SplitRows.
        dealt: every process has batches of its own, and the batch of all is made of them; else each process gathers
            its rows of the batch of all.

    Raises:
        DataError: processes hold the same rows, so that they cannot have batches of their own; or a short last batch
            of `feed` that must be cut and cannot.
    """

    def __init__(
        self, sharding: ShardingSpec, *, pads: bool = True, must: bool = False, dealt: bool = False, feed: Any = None
    ) -> None:
        super().__init__(sharding, pads=pads, must=must)
        self.dealt = dealt
        held = _parts_by_process(sharding)
        self.share = Share(sharding.parts, tuple(sorted(held[jax.process_index()])), pads)
        if dealt and (sum(map(len, held.values())) != sharding.parts or len(set(map(len, held.values()))) != 1):
            told = ", ".join(f"process {rank} has {sorted(parts)}" for rank, parts in sorted(held.items()))
            raise DataError(
                f"rows are split into {sharding.parts} parts over the mesh {dict(sharding.mesh.shape)}: {told}; "
                "loaders of every process's own rows need as many parts in each, and no part in two: name the data in "
                "`data`, or let the axes that split rows come before the others"
            )
        if must and isinstance(feed, Feed):
            self._rows(feed.size(feed.n_batches - 1), must=True)

    @property
    def shared(self) -> bool:
        """The devices are those of several processes."""
        return True

    def of(self, feed: Any) -> Placement:
        """Where the batches of another feed go."""
        dealt = not isinstance(feed, Feed)
        return self if dealt == self.dealt else ProcessRows(self.sharding, pads=self.pads, must=self.must, dealt=dealt)

    @property
    def cuts(self) -> int:
        """Parts that a feed's batch is cut into."""
        return len(self.share.mine) if self.dealt else self.sharding.parts

    def filled(self, rows: int) -> int:
        """Rows of a feed's full batch once it is filled up."""
        return self._dealt_rows(rows)[0] if self.dealt else super().filled(rows)

    def signature(self, columns: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch of all processes with the rows that fill it up."""
        if not self.dealt:
            return super().signature(columns)
        full = self._dealt_rows(columns["mask"].shape[0])[1]
        return {name: jax.ShapeDtypeStruct((full, *c.shape[1:]), c.dtype) for name, c in columns.items()}

    def open(self, feed: Any, epoch: int, start: int) -> Any:
        """The feed's iterator, over this process's rows of every batch."""
        return feed.batches(epoch, start) if self.dealt else feed.batches(epoch, start, self.share)

    def rows(self, feed: Any, index: int) -> int | None:
        """Rows of the whole batch; None where every process has its own."""
        return None if self.dealt else feed.size(index)

    def check(self, feed: Any, batch: Mapping[str, Any], rows: int | None, where: str) -> None:
        """Check that a batch has the names, shapes and types of the first.

        Raises:
            DataError: with what was found and expected.
        """
        wanted = self._own(feed, rows)
        found = {name: (tuple(column.shape), np.dtype(column.dtype)) for name, column in batch.items()}
        if found != wanted:
            told = [", ".join(f"{n} {t}{list(s)}" for n, (s, t) in sorted(each.items())) for each in (found, wanted)]
            raise DataError(f"{where} has {told[0]}; among several processes every batch has {told[1]}")

    def lost(self, feed: Any, index: int, mask: float = LOST) -> Any:
        """A batch of the right shape, every row of it with this mask, and the rows of the whole batch."""
        rows = self.rows(feed, index)
        batch = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._own(feed, rows).items()}
        batch["mask"][:] = mask
        return batch, rows

    def batch(self, batch: Mapping[str, Any], rows: int | None = None) -> Mapping[str, Any]:
        """This process's rows, as its part of arrays over all devices."""
        local, full = self._local(batch, rows)
        return {name: self._spanning(column, full, 0) for name, column in local.items()}

    def block(self, batches: Sequence[Mapping[str, Any]], capacity: int, rows: int | None = None) -> Mapping[str, Any]:
        """This process's rows of several batches, stacked."""
        found = [self._local(batch, rows) for batch in batches]
        block = stack_batches([local for local, _ in found], capacity)
        return {name: self._spanning(column, found[0][1], 1) for name, column in block.items()}

    def columns(self, columns: Mapping[str, Any]) -> dict[str, jax.Array]:
        """A dataset's columns, whole on every device; every process has read them itself."""
        return {name: put(np.asarray(column), self.sharding.whole) for name, column in columns.items()}

    def table(self, order: Any) -> jax.Array:
        """An epoch's row numbers, each device's on it; -1 fills up."""
        order = np.asarray(order, np.int32)
        missing = self.sharding.padded(order.shape[1]) - order.shape[1]
        return put(np.pad(order, ((0, 0), (0, missing)), constant_values=-1), self.sharding.stacked)

    def _own(self, feed: Any, rows: int | None) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and type of this process's part of a batch, by column."""
        told = feed.signature()
        count = told["mask"].shape[0] if rows is None else len(self.share.places(rows))
        return {name: ((count, *column.shape[1:]), np.dtype(column.dtype)) for name, column in told.items()}

    def _dealt_rows(self, rows: int) -> tuple[int, int]:
        """Rows of a process's own batch once it is filled up, and of all processes' together."""
        mine = len(self.share.mine)
        own = -(-rows // mine) * mine
        if own != rows and not self.pads:
            raise DataError(f"a batch of {rows} rows does not split over {mine} devices; give batches of {own} rows")
        return own, own // mine * self.share.parts

    def _local(self, batch: Mapping[str, Any], rows: int | None) -> tuple[Mapping[str, Any], int | None]:
        """The rows to place, and how many the whole batch has; None for one that every process holds."""
        if rows is not None:
            return batch, self.share.full(rows)
        own, full = self._dealt_rows(len(batch["mask"]))
        return filled_up(batch, own - len(batch["mask"])), full

    def _spanning(self, column: np.ndarray, full: int | None, axis: int) -> jax.Array:
        """An array over all devices, whose rows along `axis` are this process's."""
        if full is None:
            return put(column, self.sharding.whole)
        per, mine = full // self.share.parts, self.share.mine

        def part(index: Any) -> np.ndarray:
            at = mine.index((index[axis].start or 0) // per) * per
            return column[(slice(None),) * axis + (slice(at, at + per),)]

        shape = (*column.shape[:axis], full, *column.shape[axis + 1 :])
        return jax.make_array_from_callback(shape, (self.sharding.rows, self.sharding.stacked)[axis], part)


def _parts_by_process(sharding: ShardingSpec) -> dict[int, set[int]]:
    """Numbers of the parts of a batch that lie in each process."""
    held: dict[int, set[int]] = {}
    for device, index in sharding.rows.devices_indices_map((sharding.parts,)).items():
        held.setdefault(device.process_index, set()).add(index[0].start or 0)
    return held


def filled_up(batch: Mapping[str, Any], missing: int) -> dict[str, Any]:
    """The batch with so many copies of its first row, of weight 0, at its end."""
    if not missing:
        return dict(batch)
    more = {name: np.repeat(column[:1], missing, axis=0) for name, column in batch.items()}
    more["mask"] = np.zeros_like(more["mask"])
    return {name: np.concatenate([column, more[name]]) for name, column in batch.items()}


class _Seen:
    """A feed whose batches have the shapes that the step gets."""

    def __init__(self, feed: Any, placement: SplitRows) -> None:
        self._feed, self._placement = feed, placement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def signature(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self._placement.signature(self._feed.signature())


def full_rows(feed: Any, sharding: Any) -> int | None:
    """Rows of a feed's full batch on any devices; None where every process makes batches of its own."""
    dealt = sharding is not None and not sharding.whole.is_fully_addressable and not isinstance(feed, Feed)
    return None if dealt else feed.signature()["mask"].shape[0]


def make_placement(hooks: HookPlan | None, feed: Any) -> Placement:
    """Where the batches of this step go.

    Raises:
        DataError: batches that do not split.
    """
    if hooks is None or hooks.sharding is None:
        return Placement()
    pads = getattr(feed, "pad", getattr(feed, "tail", "pad") == "pad")
    must = hooks.mesh is not None
    if hooks.sharding.whole.is_fully_addressable:
        placement = SplitRows(hooks.sharding, pads=pads, must=must)
    else:
        placement = ProcessRows(hooks.sharding, pads=pads, must=must, dealt=not isinstance(feed, Feed), feed=feed)
    rows, parts = feed.signature()["mask"].shape[0], placement.cuts
    full = placement.filled(rows)
    if rows != full:
        where = "devices of each process" if placement.dealt else "devices"
        warnings.warn(
            f"batches of {rows} rows are computed as {full} on {parts} {where}, {full - rows} of them of weight 0; a "
            f"batch size that {parts} divides wastes none",
            UserWarning,
            stacklevel=2,
        )
    return placement


def refit(named: Mapping[str, Any], like: Shapes, spread: bool) -> dict[str, Any]:
    """Stored arrays in the shapes of this run, where only the number of devices of an open window is another.

    The sums that devices have made of a window each by themselves are added, and go on as the first device's.

    Args:
        like: shape and dtype of every array of the state, by name.
        spread: its window has a leading axis of devices.
    """
    found = dict(named)
    for name, shape, base in _windows(like, spread):
        value = found.get(name)
        if value is None or tuple(value.shape) == shape:
            continue
        whole = np.asarray(value)
        whole = whole.sum(axis=0) if whole.shape[1:] == base and whole.ndim else whole
        if whole.shape == base:
            rest = np.zeros((shape[0] - 1, *base), whole.dtype) if spread else None
            found[name] = whole if rest is None else np.concatenate([whole[None], rest])
    return found


def readable(like: Shapes, stored: Mapping[str, Any], spread: bool) -> Shapes:
    """What to read from a checkpoint for this state: the stored shape where `refit` can bring it to the state's."""
    found = dict(like)
    for name, shape, base in _windows(like, spread):
        old = tuple(stored[name].shape) if name in stored else shape
        if old in (base, (*old[:1], *base)):
            found[name] = old, like[name][1]
    return found


def in_place(shapes: Shapes, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes; of the leaves that are cut over devices with their places, so that nobody ever holds all of one."""
    return {
        name: leaves[name] if _cut(leaves.get(name)) and tuple(shape) == leaves[name].shape else (shape, dtype)
        for name, (shape, dtype) in shapes.items()
    }


def _cut(leaf: Any) -> bool:
    return getattr(leaf, "sharding", None) is not None and not leaf.sharding.is_fully_replicated


def _windows(like: Shapes, spread: bool) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(name, shape, shape without an axis of devices) of the gradient sums of the open window."""
    for name, (shape, _) in like.items():
        if name.startswith("accum/window/grads/"):
            yield name, tuple(shape), tuple(shape[1:] if spread else shape)
