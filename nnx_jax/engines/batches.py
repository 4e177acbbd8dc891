"""How training batches reach the device: gathered there, stacked on the host, or one a call; always the same rows."""

from __future__ import annotations

from typing import Any

from nnx_jax.core.errors import DataError
from nnx_jax.step import place_columns, place_table, stack_batches
from nnx_jax.step.dispatch import Dispatch
from nnx_jax.step.programs import Carry, StepPrograms


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
        self._columns: Any = place_columns(feed.arrays()) if dispatch.resident else None
        self._table: Any = None
        self._iterator: Any = None
        self._at: tuple[int, int] | None = None

    def run(self, carry: Carry, epoch: int, first: int, count: int, *, closes: bool) -> None:
        """Run microbatches `first .. first + count - 1` of `epoch`; `closes` says the last one ends its window."""
        if self.dispatch.resident:
            if self._at is None or self._at[0] != epoch:
                self._table = place_table(self.feed.order(epoch))
            self.programs.span_resident(carry, self._columns, self._table, first, count)
        else:
            self._seek(epoch, first)
            self._hand_over(carry, [self._next(epoch, first + place) for place in range(count)], closes)
        self._at = (epoch, first + count)

    def position(self, epoch: int, batch: int) -> dict[str, Any]:
        """Where the data stands: the iterator's own state, which the device-resident path shares."""
        if self._iterator is not None and self._at == (epoch, batch):
            return dict(self._iterator.state())
        return {"epoch": epoch, "next": batch}

    def _hand_over(self, carry: Carry, batches: list[Any], closes: bool) -> None:
        if self.dispatch.mode == "span" and len({len(batch["mask"]) for batch in batches}) == 1:
            capacity = self.windows * self.programs.accumulate
            self.programs.span_stacked(carry, stack_batches(batches, capacity), len(batches))
            return
        for place, batch in enumerate(batches, 1):
            self.programs.step(carry, batch, closes=closes and place == len(batches))

    def _seek(self, epoch: int, first: int) -> None:
        if self._iterator is None or self._at != (epoch, first):
            if self._iterator is not None:
                self._iterator.close()
            self._iterator = self.feed.batches(epoch, first)

    def _next(self, epoch: int, place: int) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            raise DataError(f"epoch {epoch} ended after {place} batches; every epoch must give as many") from None
