"""How training batches reach the device: gathered there, stacked on the host, or one a call; always the same rows."""

from __future__ import annotations

from typing import Any

from nnx_jax.core.errors import DataError
from nnx_jax.step import place_columns, place_table, stack_batches
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
    """

    def __init__(self, programs: StepPrograms, feed: Any, dispatch: Dispatch) -> None:
        self.programs, self.feed, self.dispatch = programs, feed, dispatch
        self.windows = dispatch.windows
        if dispatch.windows * programs.accumulate * dispatch.seconds > CALL_SECONDS:
            programs.max_in_flight = 1  # long calls hide the host's time, and a signal waits for those in flight
        self._columns: Any = place_columns(feed.arrays()) if dispatch.resident else None
        self._table: tuple[int, Any] = (-1, None)
        self._next_order: tuple[int, Any] = (-1, None)
        self._iterator: Any = None
        self._at: tuple[int, int] | None = None  # of the iterator: the batch it gives next
        self._ahead: tuple[tuple[int, int], Any] | None = None
        self._last: tuple[tuple[int, int], Any] | None = None

    def run(self, carry: Carry, epoch: int, first: int, count: int, *, closes: bool) -> None:
        """Run microbatches `first .. first + count - 1` of `epoch`; `closes` says the last one ends its window.

        Otherwise a window that is not full at the end stays open: its microbatches go one a call.
        """
        whole = count if closes else max(self._whole(carry, count), 0)
        if whole:
            self._run(carry, epoch, first, whole, closes)
        if whole < count:
            self._seek(epoch, first + whole)
            self._one_by_one(carry, [self._next(epoch, first + place) for place in range(whole, count)], closes=False)

    def look(self, epoch: int, place: int) -> Any:
        """Columns of the microbatch that comes next, or of the last one, read-only; None for another."""
        if self.dispatch.mode == "span":
            return None
        if self._last is None or self._last[0] != (epoch, place):
            self._seek(epoch, place)
            if self._ahead is None:
                self._ahead = (epoch, place), self._next(epoch, place)
        _, batch = self._ahead or self._last or (None, {})
        return {name: _read_only(column) for name, column in batch.items()}

    def _whole(self, carry: Carry, count: int) -> int:
        """How many of the next `count` microbatches end on a window's border."""
        length = self.programs.accumulate
        return (carry.micro + count) // length * length - carry.micro

    def _run(self, carry: Carry, epoch: int, first: int, count: int, closes: bool) -> None:
        if self.dispatch.resident:
            self.programs.span_resident(carry, self._columns, self._order(epoch), first, count)
            if first + count == self.feed.n_batches and self.feed.rows <= _EAGER_ROWS:
                self._next_order = epoch + 1, place_table(self.feed.order(epoch + 1))
        else:
            self._seek(epoch, first)
            self._hand_over(carry, [self._next(epoch, first + place) for place in range(count)], closes)

    def position(self, epoch: int, batch: int) -> dict[str, Any]:
        """Where the data stands: the iterator's own state, which the device-resident path shares."""
        if self._iterator is not None and self._at == (epoch, batch):
            return dict(self._iterator.state())
        return {"epoch": epoch, "next": batch}

    def _order(self, epoch: int) -> Any:
        """The epoch's index table on the device."""
        if self._table[0] != epoch:
            ready, self._next_order = self._next_order, (-1, None)
            self._table = ready if ready[0] == epoch else (epoch, place_table(self.feed.order(epoch)))
        return self._table[1]

    def _hand_over(self, carry: Carry, batches: list[Any], closes: bool) -> None:
        if self.dispatch.mode == "span" and len({len(batch["mask"]) for batch in batches}) == 1:
            capacity = self.windows * self.programs.accumulate
            self.programs.span_stacked(carry, stack_batches(batches, capacity), len(batches))
            return
        self._one_by_one(carry, batches, closes=closes)

    def _one_by_one(self, carry: Carry, batches: list[Any], *, closes: bool) -> None:
        for place, batch in enumerate(batches, 1):
            self.programs.step(carry, batch, closes=closes and place == len(batches))

    def _seek(self, epoch: int, first: int) -> None:
        if self._ahead is not None and self._ahead[0] == (epoch, first):
            return
        if self._iterator is None or self._at != (epoch, first):
            if self._iterator is not None:
                self._iterator.close()
            self._iterator, self._ahead, self._at = self.feed.batches(epoch, first), None, (epoch, first)

    def _next(self, epoch: int, place: int) -> Any:
        if self._ahead is not None:
            (_, batch), self._ahead = self._ahead, None
        else:
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise DataError(f"epoch {epoch} ended after {place} batches; every epoch must give as many") from None
            self._at = (epoch, place + 1)
        self._last = (epoch, place), batch
        return batch


def _read_only(column: Any) -> Any:
    view = column.view()
    view.flags.writeable = False
    return view
