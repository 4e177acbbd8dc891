"""The order of a run: begin, epochs, validate, decide, tick clocks, callbacks, commit, finalize."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nnx_jax.core.stages import TrainingStage
from nnx_jax.loop import committing
from nnx_jax.loop.callbacks import CallbackList, TrainContext
from nnx_jax.loop.clocks import Cadence, Pace, span_batches
from nnx_jax.loop.components import Components
from nnx_jax.loop.context import OptimizerView
from nnx_jax.loop.engine import Engine, Evaluation, Span
from nnx_jax.loop.history_access import JournalRecords
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.loop.idle import check_idle
from nnx_jax.loop.monitors import MonitorRecord, MonitorTracker
from nnx_jax.loop.progress import Progress, tell_wait
from nnx_jax.loop.records import RecordKeeper, Rows
from nnx_jax.loop.shared_stop import make_stop
from nnx_jax.loop.signals import Interrupted
from nnx_jax.loop.together import Together
from nnx_jax.loop.updates import UpdateEvent, Updates
from nnx_jax.loop.watched import SessionWatch
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.extra import pack
from nnx_jax.runs.pointers import phase_names
from nnx_jax.runs.store import RunStore
from nnx_jax.spmd.world import ALONE, World


class EpochClock(Protocol):
    """A schedule on the epoch clock, moved by the host."""

    @property
    def rate(self) -> Any:
        """Learning rate of the epoch to come; by name where there are several optimizers."""
        ...

    def step(self, value: float | None = None) -> Any:
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
        updates: updates of every optimizer, where they do not step together.
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
    updates: Mapping[str, int] = field(default_factory=dict)


@dataclass
class LoopPlan:
    """Everything one session needs, made by a face (NNModel, Trainer, TrainingLoop).

    Attributes:
        state: the engine's state, fresh or restored.
        end_epoch: epoch to stop before (absolute); None when only `max_steps` ends the run.
        hooks: the run's hooks, entered already; None for none.
        schedules: on the update clock, every optimizer's rate for the update after so many.
        after_update: told of every commit's updates before callbacks are; None for nobody.
        check_counts: raises where an optimizer made more updates than its schedule has rates for; None where the number
            of updates was planned.
        world: the processes that run this session together.
        geometry: processes and devices, as generations hold them; None for one device.
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
    records: Rows | JournalRecords = field(default_factory=Rows)
    hooks: HookEvents | None = None
    components: Components = field(default_factory=Components)
    schedules: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    after_update: Callable[[Sequence[UpdateEvent]], Any] | None = None
    check_counts: Callable[[Mapping[str, int]], None] | None = None
    world: World = ALONE
    geometry: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class LoopResult:
    """What a finished session leaves: the engine's state, whole-epoch values, and where it stands.

    Attributes:
        stopped_at: the update at which a callback ended the run inside an epoch. The rest is then of the last commit,
            but for the state; None for any other end.
    """

    state: Any
    values: dict[str, float]
    epoch: int
    step: int
    records: Rows | JournalRecords
    stopped_at: int | None = None


class Session:
    """One call of `train()`: from `on_train_begin` to the last commit."""

    def __init__(self, plan: LoopPlan) -> None:
        self.plan, self.engine, self.state = plan, plan.engine, plan.state
        train, checkpoint = plan.spec.training, plan.spec.checkpoint
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
            self.engine.summarize,
            self.engine.values,
            n_batches=self.engine.n_batches,
            every=train.record_every,
            shift=self.shift,
        )
        self.keeper.resume(start.open_sums)
        self.epoch, self.batch, self.step = start.epoch, start.batch, start.step
        self.read_batch, self.last_update = first, self.engine.batch_count(plan.state)
        self.committed_step, self.kept = start.step, (dict(start.values), start.epoch, start.step)
        self.validated = -1
        self.seen = start.step if start.seen is None else start.seen
        """Updates up to which the host events inside epochs (log, evaluation, commit) were done."""
        self.ctx = TrainContext(plan.store.paths.run_id, plan.model, start.epoch, start.step, dict(start.values))
        self.ctx.should_stop, self.ctx.rate = start.stopped, start.rate
        self.ctx.scheduler, self.ctx.runs_dir = plan.clock, plan.store.paths.root
        self.ctx.optimizers = {
            name: OptimizerView(name, params, start.updates.get(name, start.step), start.rate, plan.schedules.get(name))
            for name, params in train.optimizers.items()
        }
        self.together = Together(self, plan.world)
        self.updates = Updates(self)
        self.ctx.trace = self.updates.trace
        self.ctx.records, self.ctx.history_retention = plan.records.view, plan.records.retention
        self.ctx.sync = self._weights
        self.cut = False
        """The run was ended inside an epoch; LAST stays where it is."""
        self.stop = make_stop(plan.world)
        self.watch = None if plan.hooks is None else SessionWatch(self, plan.hooks)
        shown = plan.world.alone and not (plan.callbacks.reading or self.watch)  # nobody else waits for log events
        self.pace = Pace(self.cadence.log) if self.cadence.log and shown else None

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
                self.together("callbacks begin", lambda: plan.callbacks.train_begin(ctx))
                self.together("components are restored", self._restore_components)
                begins = self._pending() or not self._finished()
                if begins:
                    self._event(TrainingStage.BEFORE_TRAINING)
                while not self._cut() and (self._pending() or not self._finished()):
                    self._epoch()
                self.cut = self._cut()
                if self.cut:
                    self._give_up()
                if begins:
                    self._event(TrainingStage.AFTER_TRAINING)
            except BaseException as failure:
                error = failure
                plan.world.notice(failure)
                raise
            finally:
                committing.finalize(self, error)
            if self.stop.settle():
                raise Interrupted(self.stop.signal or 0)  # it came too late for an update; LAST is whole
        if self.cut:
            return LoopResult(self.state, *self.kept, plan.records, stopped_at=self.step)
        return LoopResult(self.state, self._values(), self.epoch, self.step, plan.records)

    # -- one epoch ---------------------------------------------------------------------------------------------

    def _epoch(self) -> None:
        self.ctx.epoch = self.epoch
        resumed = self.batch > 0
        self.keeper.begin_epoch(self.plan.start.totals if resumed else None)
        self.updates.begin_epoch(self.epoch, self.plan.records.since if resumed else None)
        if not resumed and self.plan.clock is not None:
            self.state = self.engine.set_rate(self.state, self.plan.clock.rate)
        self.together("callbacks before an epoch", lambda: self.plan.callbacks.epoch_begin(self.ctx))
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
        target = self.step + 1 if self.updates.each else self.cadence.next_step(self.step)
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
            if not self._cut():
                self._commit()
            self.plan.store.committer.drain()
            raise Interrupted(self.stop.signal or 0)

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
        return self.stop.poll()

    def _read(self) -> None:
        """Fetch the records: the host's only read from the device; the true update count comes with them."""
        failure = self.together("records", self._read_here)
        if failure is not None:
            self.together("records", lambda: self._halt(failure))  # it commits, which is a conversation too

    def _read_here(self) -> Exception | None:
        self.ctx.data_seconds = getattr(self.engine, "data_seconds", 0.0)
        tell_wait(self.plan.progress, self.ctx.data_seconds)
        found, failure = self.engine.read_records(self.state)
        for records in found:
            if not len(records):
                continue
            if records.step[-1] > self.step:
                self.last_update = int(records.batch[records.step == records.step[-1]][0]) + 1
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
            self.updates.deliver(records)
        if failure is None:
            if self.watch is not None:
                self.watch.read()
            check_idle(self, None if self.watch is None else self.watch.vetoer)
        return failure

    def _halt(self, failure: Exception) -> None:
        """Training halted: commit the updates before the one that failed, so that nothing done is lost."""
        self.batch = self.read_batch - self.epoch * self.engine.n_batches
        if self.step > self.committed_step:
            self._commit()
        raise failure

    def _write(self, row: dict[str, Any]) -> None:
        self.plan.store.history.append([pack(row, self.plan.store.history.columns)])
        self.plan.records.append(row)

    def _mid_epoch(self) -> None:
        """Host events inside an epoch: log, evaluate, commit, in this order."""
        self._read()
        if self._cut():
            return
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
            if self.pace is not None:
                self.cadence = self.pace.after(self.cadence, self.step, time.monotonic())
        improved = decision is not None and decision.improved
        if due(self.cadence.commit, seen, self.step) or improved or ends or self._asked():
            self._commit(best=improved)

    def _end_epoch(self) -> None:
        """Validate, decide, tick the epoch clock, call back, commit: the order of the founding document."""
        self._read()
        self.updates.end_epoch(self.epoch)
        seen, self.seen = self.seen, self.step
        self._summarize()
        if self.watch is not None:
            self.watch.at_boundary(seen)
            self.watch.event(TrainingStage.AFTER_EPOCH)
        train, checkpoint, epoch = self.plan.spec.training, self.plan.spec.checkpoint, self.epoch
        last = self._planned_end(epoch + 1)
        every = train.eval_every_n_epochs
        by_epoch = every is not None and (epoch + 1) % every == 0
        decision = None
        if by_epoch or last or self.cadence.due(self.cadence.evaluate, seen, self.step):
            decision = self._validate()
        if self.plan.clock is not None:
            self.plan.clock.step(decision.value if decision is not None else None)
        self._write(self._values_row("epoch", decision))
        self.together("callbacks after an epoch", lambda: self.plan.callbacks.epoch_end(self.ctx))
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
            or self.ctx.stop_at_update
            or bool(self.stop)
            or bool(self.ctx.deferred)
            or self._asked()
            or bool(self._phases(epoch))
        )
        if due:
            self._commit(best=improved, phases=self._phases(epoch))
        if self.stop:
            self.plan.store.committer.drain()
            raise Interrupted(self.stop.signal or 0)

    def _summarize(self) -> None:
        """Whole-epoch training values so far; an epoch without an update has none, not the last epoch's."""
        kept = {name: value for name, value in self.ctx.values.items() if not name.startswith("train_")}
        self.ctx.values = {**self.keeper.summary(), **kept}

    def _validate(self) -> MonitorRecord | None:
        """Score the validation split and take the one decision on it."""
        evaluation = self.engine.evaluate(self.state, "val")
        if evaluation is not None:
            before = {name: value for name, value in self.ctx.values.items() if not name.startswith("val_")}
            self.ctx.values = before | {f"val_{name}": value for name, value in evaluation.values.items()}
        self.validated = self.step
        self.ctx.decision = self.plan.tracker.decide(self.ctx.values)
        self.together("callbacks after a validation", lambda: self._tell_validation(evaluation))
        return self.ctx.decision

    def _tell_validation(self, evaluation: Evaluation | None) -> None:
        self.plan.callbacks.validation(self.ctx)
        if self.watch is not None and evaluation is not None:
            self.watch.validated(dict(evaluation.values), evaluation.count)

    def _values(self) -> dict[str, float]:
        """Whole-epoch values by name, without those of a validation before the last update."""
        current = self.validated == self.step or self.plan.start.step == self.step
        return {n: v for n, v in self.ctx.values.items() if current or n.startswith("train_")}

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
        return self.ctx.should_stop or self.ctx.stop_at_update or self._planned_end(self.epoch)

    def _planned_end(self, epoch: int) -> bool:
        """The run is as long as it was planned, before this epoch."""
        if self.plan.max_steps is not None and self.step >= self.plan.max_steps:
            return True
        return self.plan.end_epoch is not None and epoch >= self.plan.end_epoch

    def _weights(self) -> Any:
        """What `ctx.sync()` gives; parts of a model that lie on other processes come only where all ask for them."""
        axes = (self.plan.geometry or {}).get("mesh", {})
        if any(size > 1 for name, size in axes.items() if name != "data"):
            self.together("ctx.sync(), which every process must call where the model is split", lambda: None)
        return self.engine.trained(self.state)

    def _cut(self) -> bool:
        """A callback ended the run inside an epoch, so what no commit holds is given up."""
        inside = 0 < self.batch < self.engine.n_batches
        return self.ctx.stop_at_update and inside and not self._planned_end(self.epoch)

    def _give_up(self) -> None:
        """Drop the records that no commit holds."""
        store = self.plan.store
        store.committer.drain()
        store.history.discard()
        self.plan.records.cut(store.committer.last.history.rows if store.committer.last is not None else 0)

    def _planned_epochs(self) -> int:
        if self.plan.end_epoch is not None:
            return self.plan.end_epoch
        updates = -(-self.engine.n_batches // self.engine.accumulate)
        return -(-(self.plan.max_steps or 0) // updates)

    def _phases(self, epoch: int) -> tuple[str, ...]:
        train = self.plan.spec.training
        if not train.save_phase_checkpoints:
            return ()
        first = self.plan.records.first_epoch or 0
        return phase_names(epoch - first, self._planned_epochs() - first)

    # -- state of the run --------------------------------------------------------------------------------------

    def _restore_components(self) -> None:
        start = self.plan.start
        if start.components is not None:
            hooks, stored = self.plan.hooks, start.components
            then = (lambda: None) if hooks is None else (lambda: hooks.load(stored))
            self.plan.components.load(stored, then=then)
        if start.monitor is not None:
            self.plan.tracker.load(start.monitor)
        if self.plan.hooks is not None:
            self.engine.bind(self.state)

    def _commit(self, **more: Any) -> None:
        """Hand one generation to the run store; see `committing.commit`."""
        committing.commit(self, **more)
        self.committed_step, self.kept = self.step, (self._values(), self.epoch, self.step)


def train(plan: LoopPlan) -> LoopResult:
    """Run one session."""
    return Session(plan).run()
