"""When the next host event falls: counted in committed updates, planned so that no step is read in between."""

from __future__ import annotations

from dataclasses import dataclass, replace

LINES_A_SECOND = 2
"""More than these nobody reads while they come."""
EXACT_LINES = 10
"""Log events of a session that are never left out."""


@dataclass(frozen=True)
class Cadence:
    """Host events inside an epoch, in committed updates; None means only at the epoch's end.

    A span is planned as if no window would be skipped, so it can end early but never late: `step` grows by at most
    one per window. After a span that ended on a target the true count is read and the rest is planned again.
    """

    log: int | None = None
    evaluate: int | None = None
    commit: int | None = None
    max_steps: int | None = None
    hooks: tuple[int, ...] = ()

    def next_step(self, step: int) -> int | None:
        """The least update count above `step` at which something is due; None when nothing is."""
        due = [step - step % every + every for every in (self.log, self.evaluate, self.commit, *self.hooks) if every]
        if self.max_steps is not None:
            due.append(self.max_steps)
        return min((target for target in due if target > step), default=None)

    def due(self, every: int | None, before: int, step: int) -> bool:
        """Has the cadence `every` passed a multiple in (before, step]?"""
        return bool(every) and step // every > before // every


class Pace:
    """Keeps the log events of quick updates to some a second, where only a display follows them.

    An event stays on a multiple of the cadence asked for, and the first ten are those asked for.
    """

    def __init__(self, log: int) -> None:
        self.log, self._events = log, 0
        self._step, self._since = 0, 0.0

    def after(self, cadence: Cadence, step: int, now: float) -> Cadence:
        """The cadence to go on with after the log event at `step`, at `now` seconds."""
        self._events += 1
        rate = (step - self._step) / max(now - self._since, 1e-9)
        self._step, self._since = step, now
        if self._events < EXACT_LINES:
            return cadence
        return replace(cadence, log=self.log * max(1, int(rate / LINES_A_SECOND / self.log)))


def span_batches(
    *, step: int, target: int | None, batch: int, n_batches: int, accumulate: int, open_batches: int = 0
) -> int:
    """Microbatches from `batch` to the target update, where a window ends, or to the epoch's end.

    `open_batches` of the first window were done before. At least one, whatever the counters say.
    """
    left = n_batches - batch
    if target is None:
        return left
    return min(left, max((target - step) * accumulate - open_batches, 1))
