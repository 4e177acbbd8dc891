"""Committed updates as events on the host, made of the records that are read anyway."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nnx_jax.loop.engine import Records

if TYPE_CHECKING:
    from nnx_jax.loop.lifecycle import Session

Losses = Callable[[Sequence[float]], tuple[float, Mapping[str, float]]]
"""From the sums of a window, every numerator and then every denominator, to its loss and its terms."""


@dataclass(frozen=True)
class UpdateEvent:
    """One committed update of one optimizer.

    Attributes:
        optimizer: name of the optimizer that stepped; "main" where there is only one.
        update_idx: updates of this optimizer so far, this one included.
        epoch_idx: 0-based epoch.
        batch_idx: 0-based microbatch of the epoch that closed the window.
        microbatches: how many made the update.
        losses: value of every loss term over the window: divided by its denominator, not weighted.
        loss: the terms weighted and added.
        lr: learning rate the update used.
    """

    optimizer: str
    update_idx: int
    epoch_idx: int
    batch_idx: int
    microbatches: int
    losses: Mapping[str, float]
    loss: float
    lr: float


@dataclass(frozen=True)
class Commit:
    """What one window made: the update of every optimizer that stepped, and the run's count of updates after it."""

    step: int
    events: tuple[UpdateEvent, ...]


class UpdateSource:
    """Turns records into commits, oldest first; a window may be spread over several reads.

    Args:
        names: the optimizers.
        losses: see `Losses`.
        n_batches, shift: microbatches of an epoch, and what is added to a record's own count of them.
        last: microbatch that closed the window before the first record.
        counts: updates each optimizer has made before, where they do not step together.
        open_sums: loss sums of the window that is open at the start, one row per microbatch.
        joined: a window goes on until it becomes an update, as where hooks decide what is kept.
    """

    def __init__(
        self,
        names: Sequence[str],
        losses: Losses,
        *,
        n_batches: int,
        shift: int,
        last: int,
        counts: Mapping[str, int] | None = None,
        open_sums: Sequence[Sequence[float]] = (),
        joined: bool = False,
    ) -> None:
        self.names, self.losses, self.joined = tuple(names), losses, joined
        self.n_batches, self.shift = n_batches, shift
        self.counts = {name: int((counts or {}).get(name, 0)) for name in self.names}
        self._last = last
        self._open: Any = np.sum(np.asarray(open_sums, np.float64), axis=0)

    def take(self, records: Records, *, build: bool = True) -> list[Commit]:
        """Return the commits among these records; without `build` only keep count."""
        ends = np.flatnonzero(records.committed if self.joined else records.closed)
        found, begin, sums = [], 0, records.sums["loss"]
        before = dict(self.counts)
        self._count(records)
        for row in ends.tolist() if build else ends[-1:].tolist():
            batch = int(records.batch[row])
            if build and records.committed[row]:
                whole = self._open + sums[begin : row + 1].sum(axis=0)
                commit = self._commit(records, row, batch - self._last, whole, before)
                found += [commit] if commit.events else []  # a step of the user's own may report none
            self._last, self._open, begin = batch, 0.0, row + 1
        self._open = self._open + sums[begin:].sum(axis=0)
        return found

    def _count(self, records: Records) -> None:
        made = np.flatnonzero(records.committed)
        for name in self.names if len(made) else ():
            if records.updates is None:
                self.counts[name] = int(records.step[made[-1]])
            else:
                self.counts[name] += int(records.updates[name].sum())

    def _commit(
        self, records: Records, row: int, microbatches: int, sums: np.ndarray, counts: dict[str, int]
    ) -> Commit:
        loss, losses = self.losses(sums.tolist())
        epoch, batch = divmod(int(records.batch[row]) + self.shift, self.n_batches)
        step, events = int(records.step[row]), []
        for name in self.names:
            made = 1 if records.updates is None else int(records.updates[name][row])
            rate = float((records.rate if records.rates is None else records.rates[name])[row])
            first = step if records.updates is None else counts[name] + 1
            counts[name] = first + made - 1
            events += [
                UpdateEvent(name, count, epoch, batch, microbatches, losses, loss, rate)
                for count in range(first, first + made)
            ]
        return Commit(step, tuple(events))


class RateTrace:
    """The rates of an epoch's updates; what a schedule gave after each is only worked out when somebody asks."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._rates: list[float] = []

    def begin_epoch(self, rates: Sequence[float] = (), count: int = 0) -> None:
        """Forget the epoch before; or continue one whose updates up to `count` used these rates."""
        self._steps, self._rates = list(range(count - len(rates) + 1, count + 1)), list(rates)

    def add(self, records: Records, name: str, count: int) -> None:
        """Note the updates of one optimizer among these records, which had made `count` before them."""
        if records.updates is None or records.rates is None:
            self._steps += records.step[records.committed].tolist()
            self._rates += records.rate[records.committed].tolist()
            return
        made = records.updates[name]
        self._steps += range(count + 1, count + 1 + int(made.sum()))
        self._rates += np.repeat(records.rates[name], made).tolist()

    def after(self, schedule: Callable[[int], float] | None, upto: int) -> list[tuple[int, float]]:
        """Return (update, rate after it) up to update `upto`; empty without a schedule."""
        if schedule is None:
            return []
        pairs = [(step, after) for step, after in zip(self._steps, self._rates[1:], strict=False) if step <= upto]
        if len(pairs) < len(self._steps) and self._steps[len(pairs)] <= upto:
            step = self._steps[len(pairs)]
            pairs.append((step, float(schedule(step))))
        return pairs


class Updates:
    """Calls who watches committed updates, in order, all of one commit before the next."""

    def __init__(self, session: Session) -> None:
        plan, engine, start = session.plan, session.engine, session.plan.start
        self.ctx, self.callbacks, self._together = session.ctx, plan.callbacks, session.together
        self.after, self._check = plan.after_update, plan.check_counts
        self.rates = RateTrace()
        self._began: dict[str, int] = {}
        self._owns_windows = getattr(engine, "owns_windows", True)
        self.source = UpdateSource(
            tuple(self.ctx.optimizers),
            engine.losses,
            n_batches=engine.n_batches,
            shift=session.shift,
            last=engine.batch_count(session.state) - engine.open_batches(session.state) - 1,
            counts=start.updates,
            open_sums=start.open_sums.get("loss", ()),
            joined=getattr(engine, "dynamic", False),
        )

    def begin_epoch(self, epoch: int, since: Callable[[int], Sequence[Mapping[str, Any]]] | None = None) -> None:
        """Start an epoch, or continue one whose records are the last of what `since(epoch)` returns."""
        self._began = dict(self.source.counts)
        first = self.ctx.optimizer
        column = "lr" if len(self.source.names) == 1 or first is None else f"lr_{first.name}"
        rates: list[float] = []
        for row in reversed(since(epoch)) if since is not None and first is not None and first.schedule else ():
            if row["epoch"] != epoch:
                break
            if row["kind"] in ("update", "batch") and row[column] is not None:
                rates.append(row[column])
        self.rates.begin_epoch(rates[::-1], 0 if first is None else first.updates)

    def end_epoch(self, epoch: int) -> None:
        """Warn of every schedule on the update clock that stood still, where a step of the user's own reports updates.

        Warns:
            UserWarning: naming the optimizer and the epoch.
        """
        for name, view in self.ctx.optimizers.items():
            still = view.schedule is not None and self.source.counts[name] == self._began[name]
            if still and not self._owns_windows:
                message = f"no update of '{name}' was reported in epoch {epoch}, so its schedule stands still; "
                warnings.warn(message + "call ctx.report_update() in the step", UserWarning, stacklevel=2)

    @property
    def each(self) -> bool:
        """Somebody acts on every single update, so each is read before the next is made."""
        listened = self.ctx.update_listeners or self._together.listened
        return bool(listened or self.callbacks.watched_each or self.after)

    def trace(self) -> list[tuple[int, float]]:
        """What `ctx.update_lrs` shows."""
        first = self.ctx.optimizer
        return [] if first is None else self.rates.after(first.schedule, first.updates)

    def deliver(self, records: Records) -> None:
        """Tell everybody of the updates among these records."""
        first = self.ctx.optimizer
        if first is not None and first.schedule is not None:
            self.rates.add(records, first.name, self.source.counts[first.name])
        wanted = self.each or bool(self.callbacks.reading)
        commits = self.source.take(records, build=wanted)
        if self._check is not None:
            self._check(self.source.counts)
        events = [event for commit in commits for event in commit.events]
        if events and self.callbacks.reading:
            self.callbacks.updates(self.ctx, events)
        step, rate = self.ctx.step, self.ctx.rate
        for commit in commits if self.each else ():
            self._tell(commit)
        self.ctx.step, self.ctx.rate = step, rate  # as of the last update, and of the first optimizer
        self._note(records)

    def _tell(self, commit: Commit) -> None:
        ctx = self.ctx
        ctx.step = commit.step
        if self.after is not None:
            self.after(commit.events)
        for event in commit.events:
            view = ctx.optimizers[event.optimizer]
            view.updates, view.rate = event.update_idx, event.lr
            ctx.rate = event.lr
            self.callbacks.optimizer_update(ctx, event)
        for listener in list(ctx.update_listeners):
            listener(ctx)

    def _note(self, records: Records) -> None:
        """The views as of the last update."""
        for name, view in self.ctx.optimizers.items():
            made = records.committed if records.updates is None else records.updates[name] > 0
            rows = np.flatnonzero(made)
            if len(rows):
                rates = records.rate if records.rates is None else records.rates[name]
                view.updates, view.rate = self.source.counts[name], float(rates[rows[-1]])
