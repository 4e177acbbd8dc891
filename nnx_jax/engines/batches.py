"""How training batches reach the device: gathered there, stacked on the host, or one a call; always the same rows."""

from __future__ import annotations

from typing import Any

import jax

from nnx_jax.core.errors import HaltedElsewhere
from nnx_jax.engines.placement import Placement
from nnx_jax.engines.reading import Reader, Ready
from nnx_jax.step.dispatch import CALL_SECONDS, Dispatch
from nnx_jax.step.programs import Carry, StepPrograms

_EAGER_ROWS = 1 << 20
"""Up to this many rows the next epoch's order is drawn while the device still trains; it may be drawn for nothing."""


class TrainBatches:
    """Feeds microbatches of one feed, epoch after epoch, to the step's programs.

    Args:
        programs: the compiled step.
        feed: the training feed.
        dispatch: "step", "span" over stacked batches, or "span" over columns on the device; and windows a call.
        placement: where batches go; default: to the one device.
        prefetch: batches that a thread makes ready ahead, where data is not on the device anyway; None: 2, and 0 on a
            CPU, where no way of doing so was faster (a batch that jit takes from the host costs nothing there).
        n_batches: microbatches of an epoch, where they are fewer than the feed's.
    """

    def __init__(
        self,
        programs: StepPrograms,
        feed: Any,
        dispatch: Dispatch,
        placement: Placement | None = None,
        *,
        prefetch: int | None = None,
        n_batches: int | None = None,
    ) -> None:
        self.programs, self.feed, self.dispatch = programs, feed, dispatch
        self.place = placement or Placement()
        self.windows = dispatch.windows
        if dispatch.windows * programs.accumulate * dispatch.seconds > CALL_SECONDS:
            programs.max_in_flight = 1  # long calls hide the host's time, and a signal waits for those in flight
        self._columns: Any = self.place.columns(feed.arrays()) if dispatch.resident else None
        self._table: tuple[int, Any] = (-1, None)
        self._next_order: tuple[int, Any] = (-1, None)
        ahead = (0 if jax.default_backend() == "cpu" else 2) if prefetch is None else prefetch
        self._reader = Reader(self.place, feed, ahead=ahead, places=dispatch.mode == "step", length=n_batches)
        self._ahead: tuple[tuple[int, int], Ready] | None = None
        self._last: tuple[tuple[int, int], Ready] | None = None

    @property
    def failure(self) -> Exception | None:
        """Why this process could not read its rows, among several: every process halts there, and this one knows."""
        return self._reader.failure

    @property
    def waited(self) -> float:
        """Seconds that training waited for a batch to be read, so far."""
        return self._reader.waited

    def cause(self, halted: Exception) -> Exception:
        """The error to raise for a halt: this process's own, where that is what halted all of them."""
        return self.failure or halted if isinstance(halted, HaltedElsewhere) else halted

    def run(self, carry: Carry, epoch: int, first: int, count: int, *, closes: bool) -> None:
        """Run microbatches `first .. first + count - 1` of `epoch`; `closes` says the last one ends its window.

        Otherwise a window that is not full at the end stays open: its microbatches go one a call.
        """
        whole = count if closes else max(self._whole(carry, count), 0)
        if whole:
            self._run(carry, epoch, first, whole, closes)
        if whole < count:
            self._one_by_one(carry, [self._next(epoch, first + place) for place in range(whole, count)], closes=False)

    def look(self, epoch: int, place: int) -> Any:
        """Columns of the microbatch that comes next, or of the last one, read-only; None for another."""
        if self.dispatch.mode == "span":
            return None
        if self._last is None or self._last[0] != (epoch, place):
            self._ahead = (epoch, place), self._next(epoch, place)
        found = self._ahead or self._last
        return {name: _read_only(column) for name, column in found[1].batch.items()} if found is not None else {}

    def _whole(self, carry: Carry, count: int) -> int:
        """How many of the next `count` microbatches end on a window's border."""
        length = self.programs.accumulate
        return (carry.micro + count) // length * length - carry.micro

    def _run(self, carry: Carry, epoch: int, first: int, count: int, closes: bool) -> None:
        if self.dispatch.resident:
            self.programs.span_resident(carry, self._columns, self._order(epoch), first, count)
            if first + count == self.feed.n_batches and self.feed.rows <= _EAGER_ROWS:
                self._next_order = epoch + 1, self.place.table(self.feed.order(epoch + 1))
        else:
            self._hand_over(carry, [self._next(epoch, first + place) for place in range(count)], closes)

    def position(self, epoch: int, batch: int) -> dict[str, Any]:
        """Where the data stands: the iterator's own state, which the device-resident path shares."""
        return self._reader.state(epoch, batch)

    def _order(self, epoch: int) -> Any:
        """The epoch's index table on the device."""
        if self._table[0] != epoch:
            ready, self._next_order = self._next_order, (-1, None)
            self._table = ready if ready[0] == epoch else (epoch, self.place.table(self.feed.order(epoch)))
        return self._table[1]

    def _hand_over(self, carry: Carry, batches: list[Ready], closes: bool) -> None:
        if self.dispatch.mode == "span" and len({(len(ready.batch["mask"]), ready.rows) for ready in batches}) == 1:
            capacity = self.windows * self.programs.accumulate
            block = self.place.block([ready.batch for ready in batches], capacity, batches[0].rows)
            self.programs.span_stacked(carry, block, len(batches))
            return
        self._one_by_one(carry, batches, closes=closes)

    def _one_by_one(self, carry: Carry, batches: list[Ready], *, closes: bool) -> None:
        for place, ready in enumerate(batches, 1):
            batch = self.place.batch(ready.batch, ready.rows) if ready.placed is None else ready.placed
            self.programs.step(carry, batch, closes=closes and place == len(batches))

    def _next(self, epoch: int, place: int) -> Ready:
        """The next microbatch; the one looked at before, if it is that."""
        at, ready = self._ahead or (None, None)
        self._ahead = None
        if ready is None or at != (epoch, place):
            ready = self._reader.read(epoch, place)
        self._last = (epoch, place), ready
        return ready


def _read_only(column: Any) -> Any:
    view = column.view()
    view.flags.writeable = False
    return view
