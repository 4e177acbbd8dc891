"""Trials that differ in rate and seed alone, trained as one program over an axis of trials.

Every trial has its own weights, order of rows, noise and rate; the data and the program are shared. Each trial's
arithmetic is the sequential one's; only the matrix products of all trials are made in one call, which on a CPU may add
in another order. No run directory is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError, DataError, NnxError
from nnx_jax.data.partition import batch_table, epoch_order
from nnx_jax.engines.compile_cache import enable_compile_cache
from nnx_jax.engines.feeds import data_info, make_feeds, sizes_for
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.fit.job import metric_direction
from nnx_jax.fit.schedules import RunSchedules, make_schedules
from nnx_jax.loop.monitors import MonitorTracker
from nnx_jax.loop.records import RecordKeeper
from nnx_jax.objectives.losses import build_loss
from nnx_jax.params.run import RunSpec
from nnx_jax.plan import ExperimentPlan
from nnx_jax.plan.fitting import build_model
from nnx_jax.plan.seeding import seeded
from nnx_jax.search.alike import specs_alike
from nnx_jax.step import batches, place_columns, state
from nnx_jax.step.body import State, StepBody
from nnx_jax.step.loops import once, run_rows
from nnx_jax.step.state import TrainState


@dataclass(frozen=True)
class VmappedTrial:
    """What one of the trials came to.

    Attributes:
        max_lr, seed: what tells it from the others.
        losses: float64 [updates], the loss of every update.
        values: the last whole-epoch values by name ("train_loss", "val_accuracy", ...).
        best: the monitor's best value, None when there was no finite one; `best_epoch` its epoch.
        measured: (epoch, updates, value) of every validation with a finite value.
        updates: committed updates; `epochs` those that were finished.
        error: what ended it early ("NonFiniteError: ..."), "" for a trial that was trained to its end.
    """

    max_lr: float
    seed: int
    losses: np.ndarray
    values: Mapping[str, float]
    best: float | None
    best_epoch: int | None
    measured: tuple[tuple[int, int, float], ...]
    updates: int
    epochs: int
    error: str = ""


def vmapped_trials(plans: Sequence[ExperimentPlan], *, updates: int | None = None) -> tuple[VmappedTrial, ...]:
    """Train plans that differ in `train.optim.max_lr` and `train.seed` alone, all at once, and return them in order.

    Args:
        plans: such as `[plan.with_seed(seed) for seed in range(8)]`; their data are datasets in memory. A test split is
            not scored: fit the one you choose.
        updates: updates after which all end; the epoch that this cuts short is not validated.

    Raises:
        ConfigError, PlanError: (ValueErrors, before anything is compiled) the plans cannot be trained together.
        DataError, ModelError: as `ExperimentPlan.fit`.
    """
    specs = specs_alike(plans)
    if updates is not None and specs[0].train.nonfinite == "skip":
        raise ConfigError("skipped updates do not count, so trials would end apart; leave out updates or 'skip'")
    enable_compile_cache()
    return _Together(plans, specs).run(updates)


class _Together:
    """The trials of one call: one engine for what they share, and a row of the stacked state for each."""

    def __init__(self, plans: Sequence[ExperimentPlan], specs: Sequence[RunSpec]) -> None:
        shared = specs[0].train.replace(record_every="update", dispatch="auto")
        feeds = make_feeds(specs[0])
        self.feed: Any = feeds["train"]
        columns = self.feed.arrays()
        if columns is None or (self.feed.tail == "keep" and self.feed.rows % self.feed.batch_size):
            raise DataError("trials that train as one program need their rows in memory, in batches of one size")
        loss = build_loss(specs[0].model.loss if plans[0].settings.loss is None else plans[0].settings.loss)
        sizes = sizes_for(loss, data_info(feeds))
        modules = [_module(plan, spec, sizes) for plan, spec in zip(plans, specs, strict=True)]
        freeze = specs[0].model.freeze
        # No schedules: the step reads the rate that `_training` has put into the optimizer's state.
        self.engine = FlaxEngine(specs[0].with_training(shared), modules[0], loss, feeds, freeze=freeze)
        self.window = self.engine.accumulate
        self.per_epoch = -(-self.engine.n_batches // self.window)
        self.columns = place_columns(columns)
        mapped = jax.vmap(_training(self.engine.programs.body, self.window), in_axes=(0, 0, 0, None, None, None))
        self.program = jax.jit(mapped, donate_argnums=0)
        dtype = jnp.dtype(specs[0].precision)
        pures = [PureModule(m, freeze=freeze, compute_dtype=dtype, mask_rows=True) for m in modules]
        carries = [self._first(pure, spec.train.seed) for pure, spec in zip(pures, specs, strict=True)]
        self.carry: State = jax.tree.map(lambda *leaves: jnp.stack(leaves), *carries)
        self.trials = [_Trial(spec, self.engine) for spec in specs]
        self.written = 0

    def run(self, cap: int | None) -> tuple[VmappedTrial, ...]:
        """Train all of them to their end, or to update `cap`."""
        train = self.trials[0].spec.train
        assert train.n_epochs is not None
        for epoch in range(train.n_epochs):
            left = self.per_epoch if cap is None else min(self.per_epoch, cap - self.written)
            if left < 1:
                break
            self._epoch(epoch, left)
            if left == self.per_epoch:
                due = train.eval_every_n_epochs is not None and (epoch + 1) % train.eval_every_n_epochs == 0
                self._end_epoch(epoch, validates=due or epoch + 1 == train.n_epochs)
        return tuple(trial.result() for trial in self.trials)

    def _first(self, pure: PureModule, seed: int) -> State:
        """One trial's first state."""
        carry = self.engine.programs.init(pure.params, pure.model_state, frozen=pure.frozen, seed=seed)
        return self.engine.programs.state(carry), carry.leaves[-2], carry.leaves[-1]

    def _epoch(self, epoch: int, windows: int) -> None:
        """The first `windows` updates of an epoch, in calls that the record ring has room for."""
        train, rows, status = self.carry
        marks = jnp.array([state.EPOCH_STEP, state.EPOCH_BATCH, state.EPOCH])
        begun = train.counters.at[:, marks].set(jnp.array([0, 0, epoch], jnp.int32))
        self.carry = dataclasses.replace(train, counters=begun), rows, status
        rates = jnp.asarray(np.stack([trial.rates() for trial in self.trials]))
        tables = jnp.asarray(np.stack([self._order(trial.spec.data_seed, epoch) for trial in self.trials]))
        capacity = self.engine.programs.layout.capacity
        for trial in self.trials:
            trial.keeper.begin_epoch()
        for first in range(0, windows, capacity):
            count = min(capacity, windows - first)
            start, end = first * self.window, min((first + count) * self.window, self.engine.n_batches)
            trip = np.array([start, count, end - start - (count - 1) * self.window, 0], np.int32)
            self.carry = self.program(self.carry, rates, tables, self.columns, trip[:3], trip[3])
            self._read(count)

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        feed = self.feed
        return batch_table(epoch_order(feed.rows, seed, epoch, shuffle=feed.shuffle), feed.batch_size, feed.tail)

    def _read(self, count: int) -> None:
        """Fetch the rows of the last `count` windows of every trial."""
        programs = self.engine.programs
        rows = np.asarray(self.carry[1])
        places = np.arange(self.written, self.written + count) % programs.layout.capacity
        self.written += count
        for trial, ring in zip(self.trials, rows, strict=True):
            if trial.error:
                continue
            found = programs.layout.read(ring[places])
            records = self.engine.rows.read(found)
            trial.note(records)
            try:
                programs.raise_if_halted(found)
            except NnxError as failure:
                trial.error = f"{type(failure).__name__}: {failure}"

    def _end_epoch(self, epoch: int, *, validates: bool) -> None:
        train: TrainState = self.carry[0]
        for place, trial in enumerate(self.trials):
            if trial.error:
                continue
            scores: Mapping[str, float] | None = None
            if validates and "val" in self.engine.feeds:
                own = jax.tree.map(
                    lambda leaf, place=place: leaf[place], (train.frozen, train.params, train.model_state)
                )
                scores = self.engine.scorer.score({**own[0], **own[1]}, own[2], self.engine.feeds["val"]).values
            trial.end_epoch(epoch, scores, validates=validates)


@dataclass
class _Trial:
    """One trial as the host follows it: the decisions of `loop.lifecycle`, without what belongs to a run."""

    spec: RunSpec
    engine: FlaxEngine
    losses: list[np.ndarray] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    measured: list[tuple[int, int, float]] = field(default_factory=list)
    best_epoch: int | None = None
    updates: int = 0
    epochs: int = 0
    error: str = ""

    def __post_init__(self) -> None:
        monitor = self.spec.train.monitor
        direction = metric_direction(self.spec)
        self.tracker, batches = MonitorTracker(monitor, direction), self.engine.n_batches
        self.keeper = RecordKeeper(self.engine.summarize, self.engine.values, n_batches=batches, every="update")
        self.schedules: RunSchedules = make_schedules(
            self.spec, batches, direction=None if monitor is None else direction
        )
        self.table, self.dtype = None, np.dtype("float64" if self.spec.precision == "float64" else "float32")
        for schedule in self.schedules.updates.values():
            total = (self.spec.train.n_epochs or 0) * -(-batches // self.engine.accumulate)
            self.table = np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(total)), self.dtype)

    def rates(self) -> np.ndarray:
        """[n]: the rate by count of committed updates; one for all on the epoch clock."""
        clock: Any = self.schedules.clock
        return np.array([clock.rate], self.dtype) if self.table is None else self.table

    def note(self, records: Any) -> None:
        """Take the records of windows in."""
        self.keeper.table(records)
        self.losses.append(records.loss[records.committed])
        if len(records):
            self.updates = int(records.step[-1])

    def end_epoch(self, epoch: int, scores: Mapping[str, float] | None, *, validates: bool) -> None:
        """Summary, decision and epoch clock, in the order of a run."""
        self.values = {**self.values, **self.keeper.summary()}
        decision = None
        if validates:
            self.values.update({f"val_{name}": value for name, value in (scores or {}).items()})
            decision = self.tracker.decide(self.values)
            if decision.status == "ok" and decision.value is not None:
                self.measured.append((epoch, self.updates, decision.value))
            self.best_epoch = epoch if decision.improved else self.best_epoch
        if self.schedules.clock is not None:
            self.schedules.clock.step(None if decision is None else decision.value)
        self.epochs = epoch + 1

    def result(self) -> VmappedTrial:
        """What the trial came to."""
        return VmappedTrial(
            max_lr=self.spec.train.optim.max_lr,
            seed=self.spec.train.seed,
            losses=np.concatenate([np.empty(0), *self.losses]),
            values=self.values,
            best=self.tracker.best,
            best_epoch=self.best_epoch,
            measured=tuple(self.measured),
            updates=self.updates,
            epochs=self.epochs,
            error=self.error,
        )


def _training(body: StepBody, accumulate: int) -> Callable[..., State]:
    """The program of one trial: `(carry, rates, table, columns, trip, zero) -> carry`, to be mapped over trials.

    `rates` [n] by committed updates, `table` int32 [batches, B] row numbers, `trip` (first microbatch, windows,
    length of the last), `zero` an int32 that is always 0.
    """

    def rated(carry: State, rates: Any) -> State:
        train, rows, status = carry
        rate = rates[jnp.minimum(train.opt_state.count, rates.shape[0] - 1)]
        return dataclasses.replace(train, opt_state=train.opt_state._replace(rate=rate)), rows, status

    def program(carry: State, rates: Any, table: Any, columns: Any, trip: Any, zero: Any) -> State:
        one = once(zero)
        fetch = lambda row: batches.gather(columns, jax.lax.dynamic_index_in_dim(table, row, keepdims=False))  # noqa: E731
        if accumulate == 1:
            step = lambda carry, batch: body.apply(rated(carry, rates), batch)  # noqa: E731
            return run_rows(step, fetch, trip[0], carry, trip[1], one)[1]

        def window(number: Any, at: tuple[Any, State]) -> tuple[Any, State]:
            length = jnp.where(number == trip[1] - 1, trip[2], accumulate)
            row, carry = run_rows(body.micro, fetch, at[0], rated(at[1], rates), length, one)
            return row, body.commit(carry)

        return jax.lax.fori_loop(jnp.zeros_like(zero), trip[1], window, (trip[0], carry))[1]

    return program


@jax.jit
def _one(tree: Any, place: Any) -> Any:
    """The arrays of one trial."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), tree)


def _module(plan: ExperimentPlan, spec: RunSpec, sizes: Mapping[str, Any]) -> Any:
    """A trial's own network with its first weights."""
    with seeded(spec.train.seed):
        return build_model(plan.settings, spec).build(sizes, spec.train.seed)
