"""Shards: a microbatch cut into a fixed number of parts, whose sums are added pairwise in one fixed order.

Equal bits on any number of devices and processes need three things. The same terms: the rows of a microbatch are cut
into M shards, whatever the devices. The same arithmetic in each: a shard is computed by the body of a loop, which is a
computation of its own (`step/loops.py`), so that what stands around it changes nothing in it. The same order: shard 0
with 1, 2 with 3, then these sums, and from microbatch to microbatch of a window by the same rule. So a window of K
microbatches of M shards has the bits of one microbatch of K M shards with the same rows.

Devices that share the shards evenly hold neighbours: each adds its own, then devices that are 1, 2, 4 apart add theirs.
Others hand every shard's sum around, and all add them up alike. Where a batch is more than its rows, such as in a
BatchNorm, nobody can cut it: every device then computes all of it as one shard.

Sums whose number is not known beforehand are kept in levels: level l holds the sum of 2**l terms where bit l of their
number so far is set.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from nnx_jax.core.errors import StepError
from nnx_jax.step.loops import once
from nnx_jax.step.state import strong
from nnx_jax.step.tidy import tidied

One = Callable[[Any, Any, Any], Any]
"""(what every shard needs, a shard's rows, its number int32) -> tree of sums."""


class Shards:
    """The cut of a microbatch into shards, and the sum over them.

    Args:
        count: M, a power of two.
        sharding: a ShardingSpec of the devices; None for one device.
        pads: rows that are missing for equal shards may be added, with weight 0.
        rows: of a full microbatch, before any were added for an equal number on each device; None: as many as come.
        whole: why no shard can be computed without the others' rows; every device then computes the whole microbatch.

    Raises:
        StepError: M is no power of two, or there are more devices than shards.
    """

    gathers = False
    """Every device is handed all rows of a microbatch, and picks those of its shards."""
    inside = False
    """A hook takes part between the forward and the backward pass, of whole microbatches."""

    def __init__(
        self, count: int, sharding: Any = None, *, pads: bool = True, rows: int | None = None, whole: str = ""
    ) -> None:
        self.pads, self.rows, self.whole = pads, rows, whole
        self.count = 1 if whole else count
        self.mesh = None if sharding is None else sharding.mesh
        self.axes = () if sharding is None else sharding.row_axes
        self.parts = 1 if sharding is None or whole else sharding.parts
        if count < 1 or count & (count - 1):
            raise StepError(f"reduction_shards is {count}; write a power of two, such as {1 << count.bit_length()}")
        if self.parts > self.count:
            raise StepError(
                f"reduction_shards is {count}, which leaves {self.parts - count} of {self.parts} devices without a "
                f"shard; write {1 << (self.parts - 1).bit_length()} or more, or use {count} devices or fewer"
            )
        self.gathers = bool(whole) or self.count % self.parts > 0

    def of_window(self, length: int) -> Shards:
        """The shards of an update as those of one batch: an evaluation in batches of its rows is the same in each."""
        return self._but(count=self.count * length if length & (length - 1) == 0 and not self.whole else self.count)

    def of_rows(self, rows: int | None, *, pads: bool) -> Shards:
        """The cut of microbatches of so many rows; of all rows at once where it would not be even."""
        made = self._but(rows=rows, pads=pads)
        uneven = rows is not None and rows % self.count and not pads
        return made.as_whole(f"batches of {rows} rows cannot be cut into {self.count} equal parts") if uneven else made

    def of_all(self) -> Shards:
        """The same shards, where every device is handed all rows."""
        return self._but(gathers=True)

    def as_whole(self, why: str) -> Shards:
        """Every microbatch is one shard, which every device computes."""
        return self._but(count=1, parts=1, whole=why, gathers=True)

    def with_hooks_inside(self, why: str) -> Shards:
        """Every microbatch is one shard, between whose forward and backward pass a hook takes part."""
        return (self if self.whole else tell_whole(self.as_whole(why)))._but(inside=True)

    def on_one(self) -> Shards:
        """The same shards on one device."""
        return self._but(mesh=None, axes=(), parts=1)

    def _but(self, **changes: Any) -> Shards:
        made = copy.copy(self)
        vars(made).update(changes)
        return made

    @property
    def places(self) -> PartitionSpec:
        """How the rows lie that `total` is handed."""
        return PartitionSpec() if self.gathers else PartitionSpec(self.axes)

    def handed(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A microbatch as the devices are handed it: the same rows on any number of them.

        Raises:
            StepError: rows are missing and may not be added.
        """
        found = {name: column[: self.rows] for name, column in batch.items()}
        return found if self.gathers else self.filled(found)

    def filled(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with rows of weight 0, copies of the first one, up to a multiple of the shards.

        Raises:
            StepError: rows are missing and may not be added.
        """
        rows = batch["mask"].shape[0]
        missing = -rows % self.count
        if not missing:
            return dict(batch)
        if not self.pads:
            raise StepError(
                f"a batch of {rows} rows cannot be cut into {self.count} equal shards, and this loss leaves no row "
                f"out; give batches of a multiple of {self.count} rows, or other reduction_shards"
            )
        more = {name: jnp.repeat(column[:1], missing, axis=0) for name, column in batch.items()}
        more["mask"] = jnp.zeros_like(more["mask"])
        return {name: jnp.concatenate([column, more[name]]) for name, column in batch.items()}

    def shapes(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shapes of the columns of one shard, and of all of them, where `total` is handed this batch."""
        shards = self.count if self.gathers else self.count // self.parts
        rows = -(-batch["mask"].shape[0] // shards)

        def of(many: int) -> dict[str, Any]:
            return {n: jax.ShapeDtypeStruct((many * rows, *c.shape[1:]), c.dtype) for n, c in batch.items()}

        return of(1), of(self.count)

    def everywhere(self, one: One, given: Any, batch: Mapping[str, Any], zero: Any) -> Any:
        """`total`, of arrays that lie anywhere on the devices; the sum is whole on each of them.

        Args:
            given: what every shard needs besides its rows; each device puts it together.
        """
        batch = self.handed(batch)
        if self.mesh is None:
            return self.total(one, given, batch, zero)
        local = jax.shard_map(
            lambda given, batch, zero: self.total(one, given, batch, zero),
            mesh=self.mesh,
            in_specs=(PartitionSpec(), self.places, PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return local(given, batch, zero)

    def total(self, one: One, given: Any, batch: Mapping[str, Any], zero: Any) -> Any:
        """The sum of `one` over all shards, equal on every device; called by each of them (in a `jax.shard_map`).

        Args:
            given: what every shard needs besides its rows, whole.
            batch: the rows from `handed`: all of them, or those of this device.
            zero: int32 scalar that is 0, as XLA must not know; see `loops.once`.
        """
        single, one = once(zero), tidied(one)
        if self.whole:
            blank = _blank(one, given, batch, jnp.int32(0))
            return _alone(one, given, blank, single)(batch, jnp.int32(0))
        slots = -(-self.count // self.parts)
        first = jax.lax.axis_index(self.axes) * slots if self.parts > 1 else jnp.int32(0)
        batch = self.filled(batch) if self.gathers else batch
        held = self.count if self.gathers else slots
        stacked = {name: column.reshape(held, -1, *column.shape[1:]) for name, column in batch.items()}
        blank = _blank(one, given, {name: column[0] for name, column in stacked.items()}, first)
        alone = _alone(one, given, blank, single)

        def term(number: Any) -> Any:
            """The sums of one of this device's shards; of the last one where there is none."""
            shard = jnp.minimum(first + number, self.count - 1).astype(jnp.int32)
            at = shard if self.gathers else number
            rows = {name: jax.lax.dynamic_index_in_dim(c, at, keepdims=False) for name, c in stacked.items()}
            return alone(rows, shard)

        trips = jnp.zeros_like(single), single * slots
        if self.count % self.parts:
            put = lambda at, kept: jax.tree.map(lambda k, t: k.at[at].set(t), kept, term(at))  # noqa: E731
            each = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), blank)
            return self._around(jax.lax.fori_loop(*trips, put, each), slots)
        add = lambda number, levels: add_to(levels, term(number), number)  # noqa: E731
        levels = jax.lax.fori_loop(*trips, add, empty_levels(blank, slots))
        return self._between(jax.tree.map(lambda level: level[-1], levels))

    def _between(self, tree: Any) -> Any:
        """The sum over the devices: each adds that of the device 1, then 2, then 4 ... places away."""
        apart = 1
        while apart < self.parts:
            pairs = [(place, place ^ apart) for place in range(self.parts)]
            other = jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, self.axes, pairs), tree)  # noqa: B023
            tree, apart = jax.tree.map(jnp.add, tree, other), 2 * apart
        return tree

    def _around(self, each: Any, slots: int) -> Any:
        """The sum over shards that lie unevenly: one after the other goes to all devices, which add it alike.

        Args:
            each: [slots, ...], the sums of this device's shards.
        """
        here = jax.lax.axis_index(self.axes)

        def step(number: Any, levels: Any) -> Any:
            told = jax.tree.map(lambda leaf: _from(leaf[number % slots], here == number // slots, self.axes), each)
            return add_to(levels, told, number)

        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), each)
        levels = jax.lax.fori_loop(jnp.int32(0), jnp.int32(self.count), step, empty_levels(blank, self.count))
        return jax.tree.map(lambda level: level[-1], levels)


class WholeBatches(UserWarning):
    """A canonical reduction computes every microbatch whole on every device."""


def tell_whole(shards: Shards) -> Shards:
    """Warn of what `shards.whole` costs, once, where it is found out."""
    warnings.warn(
        f"reduction: canonical computes each microbatch whole on every device, since {shards.whole}: the numbers are "
        "the same on any devices, but more devices are not faster, and each needs the memory for all rows",
        WholeBatches,
        stacklevel=2,
    )
    return shards


def _blank(one: One, given: Any, rows: Any, shard: Any) -> Any:
    shape = jax.eval_shape(one, given, rows, shard)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)


def _alone(one: One, given: Any, blank: Any, single: Any) -> Callable[[Any, Any], Any]:
    """`one(given, rows, shard)` as the body of a loop that runs once."""

    def body(_: Any, carry: Any) -> Any:
        _, rows, shard = carry
        # Zeros, so that the rows change and XLA moves nothing that depends on them alone out of the loop.
        return strong(one(given, rows, shard)), jax.tree.map(jnp.zeros_like, rows), shard

    return lambda rows, shard: jax.lax.fori_loop(jnp.zeros_like(single), single, body, (blank, rows, shard))[0]


def _from(value: jax.Array, mine: Any, axes: Any) -> jax.Array:
    """The value of the one device whose `mine` is true, bit for bit: a float's -0 + 0 would be 0."""
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{value.dtype.itemsize * 8}"))
    told = jax.lax.psum(jnp.where(mine, bits, jnp.zeros_like(bits)), axes)
    return jax.lax.bitcast_convert_type(told, value.dtype)


def empty_levels(like: Any, most: int) -> Any:
    """Levels for up to `most` terms: every leaf [levels, ...]."""
    return jax.tree.map(lambda leaf: jnp.zeros((most.bit_length(), *leaf.shape), leaf.dtype), like)


def add_to(levels: Any, term: Any, count: Any) -> Any:
    """The levels with one more term; `count` (int32) terms are in them already."""
    top = jax.lax.population_count(count & ~(count + 1))  # the lowest level that is not filled

    def up(place: Any, carry: Any) -> Any:
        held = jax.tree.map(lambda level: jax.lax.dynamic_index_in_dim(level, place, keepdims=False), levels)
        return jax.tree.map(jnp.add, held, carry)

    carry = jax.lax.fori_loop(jnp.zeros_like(top), top, up, term)
    return jax.tree.map(lambda level, value: jax.lax.dynamic_update_index_in_dim(level, value, top, 0), levels, carry)


def sum_of(levels: Any, count: Any) -> Any:
    """The sum of the `count` terms in the levels, the lowest level first."""
    depth = jax.tree.leaves(levels)[0].shape[0]
    total, begun = jax.tree.map(lambda level: jnp.zeros_like(level[0]), levels), jnp.bool_(False)
    for place in range(depth):
        filled = (count >> place) & 1 == 1
        pick = lambda level, old, at=place, f=filled, b=begun: jnp.where(  # noqa: E731
            f, jnp.where(b, level[at] + old, level[at]), old
        )
        total, begun = jax.tree.map(pick, levels, total), begun | filled
    return total


def as_levels(levels: Any, total: Any, count: Any) -> Any:
    """Levels of `count` terms whose sum is `total`: all of it in the highest one that is filled."""
    top = 31 - jax.lax.clz(count)
    blank = jax.tree.map(jnp.zeros_like, levels)
    return jax.tree.map(lambda level, value: jax.lax.dynamic_update_index_in_dim(level, value, top, 0), blank, total)
