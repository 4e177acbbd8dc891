"""StepPrograms: the compiled programs of one step and the Carry they move forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import DataError, HaltedElsewhere, NonFiniteError, StepError, VetoError
from nnx_jax.step import batches, records, state
from nnx_jax.step.loops import Fetch, once, run_rows
from nnx_jax.step.places import Places
from nnx_jax.step.records import Records
from nnx_jax.step.rng import run_key
from nnx_jax.step.state import TrainState, leaf_paths, match_named
from nnx_jax.step.watch import CompileWatch

if TYPE_CHECKING:
    from nnx_jax.step.body import StepBody


class Carry:
    """The state of a run as the flat list of leaves that programs take and give back, and what the host knows of it.

    A program call replaces `leaves`; arrays taken out before are then gone (donated). Copy what must outlive a call.

    Attributes:
        leaves: device arrays: the state, the record ring, (rows written, halt code).
        batch: microbatches handed over so far.
        micro: microbatches in the open window.
        written, unread: record rows written so far, and since the last read.
    """

    def __init__(self, leaves: list[jax.Array], batch: int, micro: int) -> None:
        self.leaves, self.batch, self.micro = leaves, batch, micro
        self.written = self.unread = 0
        self.in_flight: deque[jax.Array] = deque()


class StepPrograms:
    """The programs of one step. All keep the same numbers bit for bit; they differ in how much one call does.

    Attributes:
        layout: columns of the records.
        watch: compile counts.
        paths: names of the state's leaves in flat order.
        accumulate: microbatches in a full window.
        dynamic: hooks decide batch by batch what is accumulated; `accumulate` is then 1.
        max_in_flight: calls that may wait on the device before the next one waits for the oldest.
    """

    def __init__(self, body: StepBody, init: Any, given: Any, *, max_in_flight: int = 4, sharding: Any = None) -> None:
        """`sharding`: a ShardingSpec of the devices that the programs run on; None for the default device."""
        self.layout, self.max_in_flight = body.layout, max_in_flight
        self.dynamic = body.dynamic
        self.accumulate = 1 if body.dynamic else body.accumulate
        self.watch = CompileWatch()
        self._given, self._body = given, body
        shapes = jax.eval_shape(init, given, jax.ShapeDtypeStruct((2,), jnp.uint32))
        self._treedef, self._state_treedef = jax.tree.structure(shapes), jax.tree.structure(shapes[0])
        self.paths = leaf_paths(shapes[0])
        self._n = len(self.paths)
        self._at = Places(sharding, [*self.paths, "", ""], jax.tree.leaves(shapes), getattr(body, "spread", ()))
        self._like = self._at.shapes(jax.tree.leaves(shapes))
        self._init = jax.jit(lambda parts, key: jax.tree.leaves(init(parts, key)), **self._at.out(self._at.leaves))
        names = [*self.paths, "records/rows", "records/status"]
        jit = partial(self.watch.jit, **self._at.out((self._at.leaves, self._at.whole)))
        self._micro = jit("micro", self._one_micro, [names, "batch"], donate_argnums=0)
        self._apply = jit("apply", self._one_apply, [names, "batch"], donate_argnums=0)
        self._stacked = jit("span_stacked", self._span_stacked, [names, "block", "trip"], donate_argnums=0)
        inputs = [names, "columns", "table", "trip"]
        self._resident = jit("span_resident", self._span_resident, inputs, donate_argnums=0)
        self._new_epoch = jax.jit(_new_epoch, donate_argnums=0, **self._at.out(self._at.whole))
        self._counters_at = self.paths.index("counters")

    @property
    def body(self) -> StepBody:
        """The traced parts, for a program that is put together elsewhere."""
        return self._body

    # -- making and opening a carry

    def init(
        self,
        params: Mapping[str, Any],
        model_state: Any,
        *,
        frozen: Mapping[str, Any] | None = None,
        slots: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> Carry:
        """A fresh carry; the arrays given stay the caller's.

        Raises:
            StepError: an array has another path, shape or dtype than the one the step was built for.
        """
        parts = (dict(params), dict(frozen or {}), model_state, dict(slots or {}))
        names = ("params", "frozen", "model_state", "slots")
        wanted = dict(zip(names, self._given, strict=True))
        given = jax.tree.map(_shaped, dict(zip(names, parts, strict=True)))
        found = dict(zip(leaf_paths(given), jax.tree.leaves(given), strict=True))
        match_named(found, leaf_paths(wanted), jax.tree.leaves(wanted))
        leaves = self._init(self._at.start(parts), run_key(seed))
        return Carry(_unshared(leaves, jax.tree.leaves(parts), self._at), 0, 0)

    def state(self, carry: Carry) -> TrainState:
        """The carry's arrays as a TrainState, without a copy; they are gone after the next call."""
        return jax.tree.unflatten(self._state_treedef, carry.leaves[: self._n])

    def put(self, carry: Carry, train: TrainState) -> None:
        """Put changed arrays (a learning rate, weights) into the carry.

        Raises:
            StepError: an array has another path, shape or dtype; nothing is changed.
        """
        leaves = jax.tree.leaves(train)
        found = dict(zip(leaf_paths(train), (_shaped(leaf) for leaf in leaves), strict=True))
        match_named(found, self.paths, self._like[: self._n])
        fresh = [place for place, leaf in enumerate(leaves) if leaf is not carry.leaves[place]]
        for place, leaf in zip(fresh, self._at.own([leaves[place] for place in fresh], fresh), strict=True):
            carry.leaves[place] = leaf

    def named(self, carry: Carry) -> dict[str, jax.Array]:
        """Every leaf of the state by name: what a checkpoint holds."""
        return {path: leaf for path, leaf in zip(self.paths, carry.leaves, strict=False) if not _passing(path)}

    def abstract(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype name of every leaf by name."""
        like = self._like[: self._n]
        stored = [(path, leaf) for path, leaf in zip(self.paths, like, strict=True) if not _passing(path)]
        return {path: (tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in stored}

    def placed(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every leaf of a carry by name, with its place; the records have no name of their own."""
        return dict(zip([*self.paths, "records/rows", "records/status"], self._like, strict=True))

    def load_named(self, named: Mapping[str, Any]) -> Carry:
        """A carry from saved leaves, exactly as they were; the arrays given stay the caller's.

        Raises:
            StepError: names, shapes or dtypes differ; names the first differing path. Nothing is made.
        """
        like = dict(zip(self.paths, self._like, strict=False))
        passing = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in like.items() if _passing(path)}
        leaves = match_named({**named, **passing}, self.paths, self._like[: self._n])
        counters = np.asarray(named["counters"])
        blank = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._like[self._n :]]
        micro = 0 if self._body.dynamic else int(counters[state.MICRO])
        return Carry(self._at.own([*leaves, *blank]), int(counters[state.BATCH]), micro)

    # -- moving it forward

    def micro(self, carry: Carry, batch: Mapping[str, Any]) -> None:
        """Accumulate one microbatch; the window stays open.

        Raises:
            StepError: the window would be full; close it with `apply`.
        """
        if carry.micro + 1 >= self.accumulate:
            raise StepError(f"microbatch {carry.micro + 1} of {self.accumulate} closes the window; call apply")
        self._advance(carry, 1, 0, self._micro, batch)
        carry.micro += 1

    def apply(self, carry: Carry, batch: Mapping[str, Any]) -> None:
        """Take the last microbatch of a window, full or shorter, and commit the window."""
        self._advance(carry, 1, 1, self._apply, batch)
        carry.micro = 0

    def step(self, carry: Carry, batch: Mapping[str, Any], *, closes: bool = False) -> None:
        """`apply` when the window is full or `closes` says that it ends here, else `micro`."""
        (self.apply if closes or carry.micro + 1 == self.accumulate else self.micro)(carry, batch)

    def span_resident(self, carry: Carry, columns: Mapping[str, Any], table: Any, start: int, micros: int) -> None:
        """Run microbatches `start .. start + micros - 1` of a device table; the last one closes its window.

        Args:
            columns: device arrays [n, ...], see `batches.place_columns`.
            table: int32 [batches, B], row numbers, -1 for padding; see `batches.place_table`.
        """
        trip, windows = self._trip(carry, start, micros)
        self._advance(carry, micros, windows, self._resident, columns, table, trip)
        carry.micro = 0

    def span_stacked(self, carry: Carry, block: Mapping[str, Any], micros: int) -> None:
        """Run the first `micros` batches of a stacked block; the last one closes its window.

        Args:
            block: host or device arrays [capacity, B, ...], see `batches.stack_batches`; one capacity, one compile.
        """
        trip, windows = self._trip(carry, 0, micros)
        self._advance(carry, micros, windows, self._stacked, block, trip)
        carry.micro = 0

    def start_epoch(self, carry: Carry, epoch: int = 0) -> None:
        """Set the epoch, and the counts of its updates and microbatches to 0."""
        carry.leaves[self._counters_at] = self._new_epoch(carry.leaves[self._counters_at], np.int32(epoch))

    # -- looking at it

    def room(self, carry: Carry) -> int:
        """Record rows that can still be written before `read_records` must be called."""
        return self.layout.capacity - carry.unread

    def read_records(self, carry: Carry, *, check: bool = True) -> Records:
        """Records since the last call, in one transfer: the only read of training from the device.

        Raises:
            NonFiniteError: training stopped at a non-finite window, or at too many in a row.
            VetoError: a hook rejected too many updates in a row.
            DataError: a microbatch held impossible labels.
            HaltedElsewhere: a process could not read its rows of a microbatch; that one knows why.
            (All only with `check`; the state is as before the window named, and stays so.)
        """
        rows = np.array(carry.leaves[self._n])
        places = np.arange(carry.written - carry.unread, carry.written) % self.layout.capacity
        found = self.layout.read(rows[places])
        carry.unread = 0
        if check:
            self.raise_if_halted(found)
        return found

    def raise_if_halted(self, found: Records) -> None:
        """Raise the error for the first halt among `found`, if there is one; see `read_records`."""
        halted = np.flatnonzero(found.ints["halt"])
        if not len(halted):
            return
        row = int(halted[0])
        at = {name: int(column[row]) for name, column in found.ints.items()}
        update = at["step"] + 1
        if at["halt"] == records.HALT_LOST:
            raise HaltedElsewhere(
                f"one of the processes could not read its rows of microbatch {at['batch']} (update {update}); nothing "
                "of its window was applied on any of them"
            )
        if at["halt"] == records.HALT_INVALID:
            raise DataError(
                f"microbatch {at['batch'] - 1} has {at['invalid']} labels that no class has (update {update}); nothing "
                "of its window was applied; correct the labels, or give the loss an ignore_index"
            )
        if at["halt"] >= records.HALT_HOOK:
            hook: Any = self._body.hooks.update[at["halt"] - records.HALT_HOOK]  # type: ignore[attr-defined]  # only hooks halt this way
            raise VetoError(
                f"{type(hook).__name__} rejected update {update} (microbatch {at['batch'] - 1}), too many in a row; "
                "the state is as before it; look at the data and the rate, or raise the hook's max_consecutive"
            )
        what = [f"loss term {self.layout.terms[at['bad_term']]!r}"] if at["bad_term"] >= 0 else []
        if at["bad_leaf"] >= 0:
            what.append(f"the gradient of {self._gradient_path(at['bad_leaf'])!r}")
        after = "" if at["halt"] == records.HALT_NONFINITE else f" after {at['consecutive']} bad windows in a row"
        raise NonFiniteError(
            f"update {update}, microbatch {at['bad_batch']}: {' and '.join(what) or 'the gradient norm'} is not "
            f"finite{after}; the state is as before that update; lower the rate, clip, or set nonfinite to 'skip'"
        )

    def lower(self, kind: str, *args: Any) -> Any:
        """`jax.stages.Lowered` of the program "micro", "apply", "stacked" or "resident" for these arguments.

        `args` are what the method of that name takes after the carry, as arrays or shapes; the trip counts are added.
        """
        jitted = {"micro": self._micro, "apply": self._apply, "stacked": self._stacked, "resident": self._resident}
        trip = [] if kind in ("micro", "apply") else [jax.ShapeDtypeStruct((4,), jnp.int32)]
        return jitted[kind].lower(list(self._like), *self._at.inputs(kind, args), *trip)

    def _gradient_path(self, leaf: int) -> str:
        return leaf_paths(self._given[0])[leaf]

    def _trip(self, carry: Carry, start: int, micros: int) -> tuple[np.ndarray, int]:
        """(start, windows, length of the first, length of the last), and the windows."""
        if micros < 1:
            raise StepError(f"a span has at least one microbatch, got {micros}")
        first = min(self.accumulate - carry.micro, micros)
        more, tail = divmod(micros - first, self.accumulate)
        windows = 1 + more + (tail > 0)
        return np.array([start, windows, first, tail or self.accumulate], np.int32), windows

    def _advance(self, carry: Carry, micros: int, windows: int, program: Any, *args: Any) -> None:
        rows = micros if self.layout.every == "batch" else windows
        if carry.unread + rows > self.layout.capacity:
            raise StepError(
                f"{carry.unread} unread record rows and {rows} more do not fit the ring of {self.layout.capacity}; "
                "call read_records first or build with a larger capacity"
            )
        while len(carry.in_flight) >= self.max_in_flight:
            carry.in_flight.popleft().block_until_ready()
        carry.leaves, token = program(carry.leaves, *args)
        carry.in_flight.append(token)
        carry.batch += micros
        carry.unread += rows
        carry.written += rows

    # -- traced

    def _shut(self, carry: Any) -> tuple[list[Any], Any]:
        """Flat leaves, and a token: an output of its own that no later call takes away, to wait on."""
        leaves, treedef = jax.tree.flatten(state.strong(carry))
        if treedef != self._treedef:
            raise StepError(f"the step changed the structure of its state from {self._treedef} to {treedef}")
        return leaves, -carry[2][0]

    def _one_micro(self, leaves: list[Any], batch: Any) -> Any:
        carry = jax.tree.unflatten(self._treedef, leaves)
        one = once(carry[0].counters[state.RESERVED])
        return self._shut(run_rows(self._body.micro, lambda row: batch, jnp.int32(0), carry, one, one)[1])

    def _one_apply(self, leaves: list[Any], batch: Any) -> Any:
        carry = jax.tree.unflatten(self._treedef, leaves)
        one = once(carry[0].counters[state.RESERVED])
        if self._body.split and self.accumulate > 1:
            return self._shut(run_rows(self._body.last, lambda row: batch, jnp.int32(0), carry, one, one)[1])
        return self._windows(leaves, lambda row: batch, (jnp.int32(0), one, one, one))

    def _span_resident(self, leaves: list[Any], columns: Any, table: Any, trip: Any) -> Any:
        fetch = lambda row: batches.gather(columns, jax.lax.dynamic_index_in_dim(table, row, keepdims=False))  # noqa: E731
        return self._windows(leaves, fetch, trip, getattr(self._body, "inner", self._body))

    def _span_stacked(self, leaves: list[Any], block: Any, trip: Any) -> Any:
        return self._windows(leaves, lambda row: batches.take(block, row), trip)

    def _windows(self, leaves: list[Any], fetch: Fetch, trip: Any, body: Any = None) -> Any:
        """Run windows; `trip` is (first row, windows, length of the first, length of the last)."""
        body = body or self._body
        start, windows, first, last = trip[0], trip[1], trip[2], trip[3]
        carry = jax.tree.unflatten(self._treedef, leaves)
        one = once(carry[0].counters[state.RESERVED])
        if self.accumulate == 1:
            return self._shut(run_rows(body.apply, fetch, start, carry, windows, one)[1])

        def window(number: Any, state: Any) -> Any:
            length = jnp.where(number == 0, first, jnp.where(number == windows - 1, last, self.accumulate))
            if body.split:
                row, carry = run_rows(body.micro, fetch, state[0], state[1], length - 1, one)
                return run_rows(body.last, fetch, row, carry, one, one)
            row, carry = run_rows(body.micro, fetch, state[0], state[1], length, one)
            return row, body.commit(carry)

        return self._shut(jax.lax.fori_loop(jnp.zeros_like(windows), windows, window, (start, carry))[1])


def _passing(path: str) -> bool:
    """What hosts look at after a microbatch is of no later use, and is not stored."""
    return path.startswith("accum/taps/")


def _new_epoch(counters: Any, epoch: Any) -> Any:
    counters = counters.at[state.EPOCH_STEP].set(0).at[state.EPOCH_BATCH].set(0)
    return counters.at[state.EPOCH].set(epoch)


def _shaped(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _unshared(leaves: list[jax.Array], given: list[Any], at: Places) -> list[jax.Array]:
    """The leaves with every buffer that is held twice, or by the caller, copied: each can be given away alone."""
    if at.spans:  # every process does the same, and addresses are its own
        return at.own(leaves)
    held = {pointer for leaf in given if isinstance(leaf, jax.Array) for pointer in _pointers(leaf)}
    out = []
    for number, leaf in enumerate(leaves):
        out.append(at.own([leaf], [number])[0] if held.intersection(_pointers(leaf)) and leaf.size else leaf)
        held.update(_pointers(out[-1]))
    return out


def _pointers(leaf: jax.Array) -> list[int]:
    """Where this process holds the array's parts."""
    return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
