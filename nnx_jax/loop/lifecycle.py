"""The order of a run: begin, epochs, validate, decide, tick clocks, callbacks, commit, finalize."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nnx_jax.core.stages import TrainingStage
from nnx_jax.loop.callbacks import CallbackList, TrainContext
from nnx_jax.loop.clocks import Cadence, span_batches
from nnx_jax.loop.engine import Engine, Span
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.loop.monitors import MonitorRecord, MonitorTracker, as_dict
from nnx_jax.loop.progress import Progress
from nnx_jax.loop.records import RecordKeeper, Rows
from nnx_jax.loop.signals import Interrupted, StopRequest
from nnx_jax.loop.watched import SessionWatch
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.commit import CommitPoint
from nnx_jax.runs.pointers import phase_names
from nnx_jax.runs.store import RunStore


class EpochClock(Protocol):
    """A schedule on the epoch clock, moved by the host."""

    @property
    def rate(self) -> float:
        """Learning rate of the epoch to come."""
        ...

    def step(self, value: float | None = None) -> float:
        """One epoch passed; `value` is the monitored value, for a plateau."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON state."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        ...


@dataclass
class StartPoint:
    """Where a session starts: epoch and microbatch, and what a resumed one carries.

    Attributes:
        seen: updates up to which host events were done, fewer than `step` when a signal came before them.
        stopped: a callback had already ended this run.
        open_sums: record sums of the window that was open.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    totals: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, Any] | None = None
    monitor: Mapping[str, Any] | None = None
    clock: Mapping[str, Any] | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    rate: float | None = None
    seen: int | None = None
    stopped: bool = False
    open_sums: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class LoopPlan:
    """Everything one session needs, made by a face (NNModel, Trainer, TrainingLoop).

    Attributes:
        state: the engine's state, fresh or restored.
        end_epoch: epoch to stop before (absolute); None when only `max_steps` ends the run.
        hooks: the run's hooks, entered already; None for none.
    """

    spec: RunSpec
    engine: Engine
    state: Any
    store: RunStore
    callbacks: CallbackList
    tracker: MonitorTracker
    progress: Progress
    start: StartPoint
    end_epoch: int | None
    max_steps: int | None
    clock: EpochClock | None = None
    model: Any = None
    records: Rows = field(default_factory=Rows)
    hooks: HookEvents | None = None


@dataclass(frozen=True)
class LoopResult:
    """What a finished session leaves: the engine's state, whole-epoch values, and where it stands."""

    state: Any
    values: dict[str, float]
    epoch: int
    step: int
    records: Rows


class Session:
    """One call of `train()`: from `on_train_begin` to the last commit."""

    def __init__(self, plan: LoopPlan) -> None:
        self.plan, self.engine, self.state = plan, plan.engine, plan.state
        train, checkpoint = plan.spec.train, plan.spec.checkpoint
        self.cadence = Cadence(
            log=train.log_every_n_steps,
            evaluate=train.eval_every_n_steps,
            commit=checkpoint.every_n_steps,
            max_steps=plan.max_steps,
            hooks=plan.hooks.cadences if plan.hooks is not None else (),
        )
        start = plan.start
        first = start.epoch * self.engine.n_batches + start.batch
        # Microbatches are counted from the run's own beginning; one that took over weights begins at a later epoch.
        self.shift = first - self.engine.batch_count(plan.state)
        self.keeper = RecordKeeper(
            self.engine.summarize, n_batches=self.engine.n_batches, every=train.record_every, shift=self.shift
        )
        self.keeper.resume(start.open_sums)
        self.epoch, self.batch, self.step = start.epoch, start.batch, start.step
        self.read_batch = first
        self.committed_step = start.step
        self.validated = -1
        self.seen = start.step if start.seen is None else start.seen
        """Updates up to which the host events inside epochs (log, evaluation, commit) were done."""
        self.ctx = TrainContext(plan.store.paths.run_id, plan.model, start.epoch, start.step, dict(start.values))
        self.ctx.should_stop, self.ctx.rate = start.stopped, start.rate
        self.ctx.records, self.ctx.sync = plan.records, lambda: self.engine.trained(self.state)
        self.stop = StopRequest()
        self.watch = None if plan.hooks is None else SessionWatch(self, plan.hooks)

    def run(self) -> LoopResult:
        """Train to the plan's end.

        Raises:
            Interrupted: a signal asked to stop; the last finished update is committed.
            NnxError and whatever a callback or a dataset raises: after every cleanup was tried.
        """
        plan, ctx, error = self.plan, self.ctx, None
        plan.progress.start(ctx.run_id, self._planned_epochs(), self.engine.n_batches)
        with self.stop:
            try:
                plan.callbacks.train_begin(ctx)
                self._restore_components()
                begins = self._pending() or not self._finished()
                if begins:
                    self._event(TrainingStage.BEFORE_TRAINING)
                while self._pending() or not self._finished():
                    self._epoch()
                if begins:
                    self._event(TrainingStage.AFTER_TRAINING)
            except BaseException as failure:
                error = failure
                raise
            finally:
                self._finalize(error)
            if self.stop:
                raise Interrupted(self.stop.number or 0)  # it came too late for an update; LAST is whole
        current = self.validated == self.step or plan.start.step == self.step
        values = {n: v for n, v in ctx.values.items() if current or n.startswith("train_")}
        return LoopResult(self.state, values, self.epoch, self.step, plan.records)

    # -- one epoch ---------------------------------------------------------------------------------------------

    def _epoch(self) -> None:
        self.ctx.epoch = self.epoch
        resumed = self.batch > 0
        self.keeper.begin_epoch(self.plan.start.totals if resumed else None)
        if not resumed and self.plan.clock is not None:
            self.state = self.engine.set_rate(self.state, self.plan.clock.rate)
        self.plan.callbacks.epoch_begin(self.ctx)
        if not resumed:
            self._event(TrainingStage.BEFORE_EPOCH)
        if resumed and self._pending() and self.batch < self.engine.n_batches:
            self._mid_epoch()
        while self.batch < self.engine.n_batches and not self._finished():
            self._span()
            if self.batch < self.engine.n_batches:
                self._mid_epoch()
        if self.batch >= self.engine.n_batches:
            self._end_epoch()

    def _span(self) -> None:
        target = self.cadence.next_step(self.step)
        count = span_batches(
            step=self.step,
            target=target,
            batch=self.batch,
            n_batches=self.engine.n_batches,
            accumulate=self.engine.accumulate,
            open_batches=self.engine.open_batches(self.state),
        )
        closes = not self.engine.carries or self.batch + count < self.engine.n_batches
        if self.watch is not None and self.watch.per_batch:
            self.watch.span(count, closes=closes)
        else:
            span = Span(self.epoch, self.batch, count, closes)
            self.state, done = self.engine.run_span(self.state, span, self._poll)
            self.batch += done
        if self.stop:
            self._read()
            self._commit()
            self.plan.store.committer.drain()
            raise Interrupted(self.stop.number or 0)

    def _event(self, stage: TrainingStage) -> None:
        """Fire a stage that belongs to no microbatch, and commit if a hook asked for it at one that has no commit."""
        if self.watch is not None:
            self.watch.event(stage)
            if stage in (TrainingStage.BEFORE_TRAINING, TrainingStage.BEFORE_EPOCH):
                self.watch.serve()

    def _asked(self) -> bool:
        """A hook asked for a commit."""
        return self.watch is not None and bool(self.watch.commits)

    def _poll(self, done: int) -> bool:
        self.plan.progress.advance(self.epoch, self.batch + done)
        return bool(self.stop)

    def _read(self) -> None:
        """Fetch the records: the host's only read from the device; the true update count comes with them."""
        found, failure = self.engine.read_records(self.state)
        for records in found:
            if not len(records):
                continue
            self.step = self.ctx.step = int(records.step[-1])
            self.read_batch = int(records.batch[-1]) + 1 + self.shift
            updates = records.committed.nonzero()[0]
            if len(updates):
                self.ctx.rate = float(records.rate[updates[-1]])
            if self.watch is not None:
                self.watch.note(records)
            table = self.keeper.table(records)
            self.plan.store.history.append_table(table, len(records))
            self.plan.records.append_table(table, len(records))
        if failure is not None:
            self._keep_progress()
            raise failure
        if self.watch is not None:
            self.watch.read()

    def _keep_progress(self) -> None:
        """Training halted: commit the updates before the one that failed, so that nothing done is lost."""
        self.batch = self.read_batch - self.epoch * self.engine.n_batches
        if self.step > self.committed_step:
            self._commit()

    def _write(self, row: dict[str, Any]) -> None:
        self.plan.store.history.append([row])
        self.plan.records.append(row)

    def _mid_epoch(self) -> None:
        """Host events inside an epoch: log, evaluate, commit, in this order."""
        self._read()
        seen, self.seen = self.seen, self.step
        self._summarize()
        if self.watch is not None:
            self.watch.at_boundary(seen)
        due = self.cadence.due
        ends = self._finished()
        decision = None
        if due(self.cadence.evaluate, seen, self.step) or ends:
            decision = self._validate()
            self._write(self._values_row("eval", decision))
        if due(self.cadence.log, seen, self.step) or decision is not None:
            self.plan.progress.values(self.epoch, self.step, self.ctx.values, epoch_end=False)
        improved = decision is not None and decision.improved
        if due(self.cadence.commit, seen, self.step) or improved or ends or self._asked():
            self._commit(best=improved)

    def _end_epoch(self) -> None:
        """Validate, decide, tick the epoch clock, call back, commit: the order of the founding document."""
        self._read()
        seen, self.seen = self.seen, self.step
        self._summarize()
        if self.watch is not None:
            self.watch.at_boundary(seen)
            self.watch.event(TrainingStage.AFTER_EPOCH)
        train, checkpoint, epoch = self.plan.spec.train, self.plan.spec.checkpoint, self.epoch
        last = self._last_epoch(epoch)
        every = train.eval_every_n_epochs
        by_epoch = every is not None and (epoch + 1) % every == 0
        decision = None
        if by_epoch or last or self.cadence.due(self.cadence.evaluate, seen, self.step):
            decision = self._validate()
        if self.plan.clock is not None:
            self.plan.clock.step(decision.value if decision is not None else None)
        self._write(self._values_row("epoch", decision))
        self.plan.callbacks.epoch_end(self.ctx)
        fresh = {n: v for n, v in self.ctx.values.items() if decision is not None or n.startswith("train_")}
        self.plan.progress.values(epoch, self.step, fresh, epoch_end=True)
        self.epoch, self.batch = epoch + 1, 0
        self.keeper.begin_epoch()
        improved = decision is not None and decision.improved
        due = (
            bool(checkpoint.every_n_epochs and (epoch + 1) % checkpoint.every_n_epochs == 0)
            or self.cadence.due(self.cadence.commit, seen, self.step)
            or last
            or improved
            or self.ctx.should_stop
            or bool(self.stop)
            or bool(self.ctx.deferred)
            or self._asked()
            or bool(self._phases(epoch))
        )
        if due:
            self._commit(best=improved, phases=self._phases(epoch))
        if self.stop:
            self.plan.store.committer.drain()
            raise Interrupted(self.stop.number or 0)

    def _summarize(self) -> None:
        """Whole-epoch training values so far; an epoch without an update has none, not the last epoch's."""
        kept = {name: value for name, value in self.ctx.values.items() if not name.startswith("train_")}
        self.ctx.values = {**self.keeper.summary(), **kept}

    def _validate(self) -> MonitorRecord | None:
        """Score the validation split and take the one decision on it."""
        evaluation = self.engine.evaluate(self.state, "val")
        if evaluation is not None:
            self.ctx.values.update({f"val_{name}": value for name, value in evaluation.values.items()})
        self.validated = self.step
        self.ctx.decision = self.plan.tracker.decide(self.ctx.values)
        self.plan.callbacks.validation(self.ctx)
        if self.watch is not None and evaluation is not None:
            self.watch.validated(dict(evaluation.values), evaluation.count)
        return self.ctx.decision

    def _values_row(self, kind: str, decision: MonitorRecord | None) -> dict[str, Any]:
        row: dict[str, Any] = {"kind": kind, "epoch": self.epoch, "batch": None, "step": self.step, "lr": self.ctx.rate}
        names = [n for n in self.ctx.values if n.startswith("train_") or decision is not None]
        row.update({name: self.ctx.values[name] for name in names})
        if decision is not None:
            row.update(monitor=decision.value, improved=int(decision.improved))
        return row

    # -- ends --------------------------------------------------------------------------------------------------

    def _pending(self) -> bool:
        """A signal came at this very update, before what was due at it was done."""
        return self.seen < self.step

    def _finished(self) -> bool:
        if self.plan.max_steps is not None and self.step >= self.plan.max_steps:
            return True
        if self.ctx.should_stop:
            return True
        return self.plan.end_epoch is not None and self.epoch >= self.plan.end_epoch

    def _last_epoch(self, epoch: int) -> bool:
        if self.plan.max_steps is not None and self.step >= self.plan.max_steps:
            return True
        return self.plan.end_epoch is not None and epoch + 1 >= self.plan.end_epoch

    def _planned_epochs(self) -> int:
        if self.plan.end_epoch is not None:
            return self.plan.end_epoch
        updates = -(-self.engine.n_batches // self.engine.accumulate)
        return -(-(self.plan.max_steps or 0) // updates)

    def _phases(self, epoch: int) -> tuple[str, ...]:
        train = self.plan.spec.train
        if not train.save_phase_checkpoints:
            return ()
        first = self.plan.records[0]["epoch"] if self.plan.records else 0
        return phase_names(epoch - first, self._planned_epochs() - first)

    # -- state of the run --------------------------------------------------------------------------------------

    def _restore_components(self) -> None:
        start = self.plan.start
        if start.components is not None:
            self.plan.callbacks.load(start.components)
            if self.plan.hooks is not None:
                self.plan.hooks.load(start.components)
        if start.monitor is not None:
            self.plan.tracker.load(start.monitor)
        if self.plan.hooks is not None:
            self.engine.bind(self.state)

    def _commit(self, *, best: bool = False, phases: tuple[str, ...] = ()) -> None:
        """Hand one generation to the run store, with everything that continues the run bit for bit."""
        snapshot = self.engine.snapshot(self.state, self.epoch, self.batch)
        clock = self.plan.clock
        host = {
            "position": {"epoch": self.epoch, "batch": self.batch, "data": snapshot.position},
            "step": self.step,
            "seen": self.seen,
            "stopped": self.ctx.should_stop,
            "totals": storable(self.keeper.epoch.totals),
            "values": storable(self.ctx.values),
            "rate": storable(self.ctx.rate),
            "length": {"end_epoch": self.plan.end_epoch, "max_steps": self.plan.max_steps},
            "clock": clock.state() if clock is not None else None,
            "monitor": self.plan.tracker.state(),
            "decision": storable(as_dict(self.ctx.decision)) if self.ctx.decision else None,
            "components": self.plan.callbacks.state(),
            "topology": snapshot.topology,
        }
        if open_sums := self.keeper.open:
            host["open"] = storable(open_sums)
        retired, wait = (), False
        if self.watch is not None:
            host["components"].update(self.watch.events.state())
            retired, wait = self.watch.served()
        deferred, self.ctx.deferred = tuple(self.ctx.deferred), []
        point = CommitPoint(
            epoch=self.epoch if self.batch else max(self.epoch - 1, 0),
            step=self.step,
            batch=self.epoch * self.engine.n_batches + self.batch,
            arrays=snapshot.arrays,
            host=host,
            names=phases,
            best=best,
            score=self._score(best),
            deferred=deferred,
            retired=retired,
        )
        self.plan.store.committer.commit(point)
        if wait:
            self.plan.store.committer.drain()
        self.committed_step = self.step

    def _score(self, best: bool) -> float | None:
        """Rank in `runs/best`: only runs without a monitor of their own are comparable."""
        decision = self.ctx.decision
        return decision.value if best and decision is not None and self.plan.spec.train.monitor is None else None

    def _finalize(self, error: BaseException | None) -> None:
        """End callbacks in reverse, refresh LAST after a clean end, wait for the commit in flight, mask nothing."""
        failures: list[Exception] = []
        try:
            for end in (self._end_callbacks, lambda _: self.plan.store.committer.drain()):
                try:
                    end(error)
                except Exception as failure:  # whatever a cleanup did, the commit in flight is waited for
                    failures.append(failure)
        finally:
            self.plan.progress.stop()
        for failure in failures if error is not None else failures[1:]:
            warnings.warn(f"while stopping: {type(failure).__name__}: {failure}", RuntimeWarning, stacklevel=2)
        if error is None and failures:
            raise failures[0]

    def _end_callbacks(self, error: BaseException | None) -> None:
        if error is None or isinstance(error, Interrupted):
            self.engine.trained(self.state)
        self.plan.callbacks.train_end(self.ctx, error)
        if error is None:
            self.state = self.engine.absorb(self.state)
            self._commit()


def storable(value: Any) -> Any:
    """JSON values with non-finite floats spelled as text, since JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {name: storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
    return value


def restored(value: Any) -> Any:
    """The inverse of `storable` for values that hold only numbers."""
    if isinstance(value, str):
        return float(value)
    if isinstance(value, Mapping):
        return {name: restored(item) for name, item in value.items()}
    return [restored(item) for item in value] if isinstance(value, list) else value


def train(plan: LoopPlan) -> LoopResult:
    """Run one session."""
    return Session(plan).run()
