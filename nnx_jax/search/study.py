"""search: try values of a plan's settings, one fit each, within a budget; stop anywhere and go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.core.errors import ConfigError
from nnx_jax.fit.job import metric_direction
from nnx_jax.loop.progress import Progress, make_progress
from nnx_jax.params.train import MonitorSpec
from nnx_jax.plan import ExperimentPlan, PlanError
from nnx_jax.plan.checks import data_of, kind_of, read
from nnx_jax.plan.fitting import refuse_group
from nnx_jax.plan.identity import identity
from nnx_jax.search.outcomes import Direction, SearchBudget, SearchResult, TrialOutcome, short
from nnx_jax.search.pruners import Pruner
from nnx_jax.search.samplers import RandomSampler, Sampler
from nnx_jax.search.space import SearchSpace
from nnx_jax.search.storage import StudyStore, open_study
from nnx_jax.search.trial import Judge, no_value, run_trial
from nnx_jax.search.vmapped import VmappedTrial, vmapped_trials

Apply = Callable[[ExperimentPlan, Mapping[str, Any]], ExperimentPlan]
"""From the plan and a trial's values to the plan of that trial."""


def search(
    plan: ExperimentPlan,
    space: SearchSpace,
    *,
    apply: Apply,
    monitor: MonitorSpec,
    budget: SearchBudget,
    study_name: str,
    storage: str | Path | None = None,
    sampler: Sampler | None = None,
    pruner: Pruner | None = None,
    clock: Callable[[], float] = time.monotonic,
    runs_dir: str | Path = "runs",
    quiet: bool = False,
    vmapped: bool = False,
) -> SearchResult:
    """Fit the plan once for each trial, and compare the fits by the monitor's value at their best epoch.

    The same call goes on with a stored study: trials that were finished count, one that was interrupted continues from
    its last commit. A fit that raises is a failed trial; anything else that raises, `apply` first, ends the search.

    Args:
        plan: what is tried; valid by itself.
        space: the values of every name.
        apply: `(plan, values) -> plan`, such as `lambda plan, v: plan.with_optim(NNOptimParams(max_lr=v["lr"]))`.
        monitor: what is compared, on the validation split; every trial's BEST follows it.
        budget: trials of the whole study, updates of each, and the time for this call.
        study_name: a name for the study, also part of its runs' identity.
        storage: directory of studies, one JSON file a trial; None keeps the study in memory.
        sampler: where values come from; by default `RandomSampler(0)`.
        pruner: which trials are ended early; by default none.
        clock: seconds, from any beginning; only differences count.
        runs_dir: where the trials' runs live.
        quiet: no line for each trial.
        vmapped: train all trials at once, as one program; they may differ in rate and seed alone, and leave no runs.
            See `vmapped_trials`.

    Raises:
        ProcessGroupError: (a RuntimeError) this process is one of several; nothing was called or written.
        ConfigError, PlanError: (ValueErrors, before any trial) the plan has problems, its monitor is another, its
            loaders would be shared by all trials, or the stored study is of another plan, space or monitor.
        LeaseHeldError: another process is at this study.
    """
    refuse_group("search")
    _check_types(plan, space, apply, monitor, budget)
    if vmapped and (pruner is not None or budget.deadline_seconds is not None):
        name = "pruner" if pruner is not None else "budget.deadline_seconds"
        raise ConfigError("trials that train as one program end together; leave it out", path=name)
    planned = _comparable(plan, monitor)
    if problems := plan.validate() or planned.validate():
        raise PlanError(problems)
    spec, _ = read(planned.settings)
    assert spec is not None
    direction = metric_direction(spec, monitor)
    known = {
        "plan": identity(planned.settings, spec),
        "space": space.state(),
        "monitor": monitor.state(),
        "updates_per_trial": budget.updates_per_trial,
    }
    with open_study(storage, study_name, known) as store:
        study = Study(planned, space, apply, monitor, budget, direction, store, sampler or RandomSampler(), pruner)
        if vmapped:
            return study.run_together(make_progress(quiet))
        return study.run(clock, Path(runs_dir), make_progress(quiet))


@dataclass
class Study:
    """One call of `search` that has passed every check."""

    plan: ExperimentPlan
    space: SearchSpace
    apply: Apply
    monitor: MonitorSpec
    budget: SearchBudget
    direction: Direction
    store: StudyStore
    sampler: Sampler
    pruner: Pruner | None

    def run(self, clock: Callable[[], float], runs_dir: Path, progress: Progress) -> SearchResult:
        """Run trials until something ends the call."""
        start, seconds = clock(), self.budget.deadline_seconds
        while True:
            if not (waiting := self._waiting()) and len(self.store.trials) >= self.budget.trials:
                return self._result("trials")
            if seconds is not None and clock() - start >= seconds:
                return self._result("deadline")
            trial = waiting or self._next(self.store.trials)
            if trial is None:
                return self._result("exhausted")
            candidate = self._candidate(trial.values)
            self.store.put(trial)
            done = run_trial(
                candidate,
                trial,
                cap=self.budget.updates_per_trial,
                judge=self._judge(trial.number),
                runs_dir=runs_dir,
                quiet=True,
            )
            self.store.put(done)
            progress.message(self._line(done))

    def run_together(self, progress: Progress) -> SearchResult:
        """Run every trial that is left at once."""
        trials = [trial for trial in self.store.trials if trial.state == "running"]
        reason = "trials"
        while len(known := {trial.number: trial for trial in (*self.store.trials, *trials)}) < self.budget.trials:
            if (trial := self._next(tuple(known.values()))) is None:
                reason = "exhausted"
                break
            trials.append(trial)
        if trials:
            candidates = [self._candidate(trial.values) for trial in trials]
            cap = self.budget.updates_per_trial
            for trial, found in zip(trials, vmapped_trials(candidates, updates=cap), strict=True):
                done = outcome_of(found, trial, cap)
                self.store.put(done)
                progress.message(self._line(done))
        return self._result(reason)

    def _waiting(self) -> TrialOutcome | None:
        """A trial that an earlier call began and did not end."""
        return next((trial for trial in self.store.trials if trial.state == "running"), None)

    def _next(self, trials: tuple[TrialOutcome, ...]) -> TrialOutcome | None:
        number = trials[-1].number + 1 if trials else 0
        values = self.sampler.ask(self.space, number, trials, self.direction)
        if values is None:
            return None
        if set(values) != set(self.space):
            raise ConfigError(f"the sampler gave {sorted(values)}, the space has {sorted(self.space)}")
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
        attempt = f"{self.store.name}-{self.store.key}-{number:05d}"
        return TrialOutcome(number, plain, attempt_id=attempt)

    def _candidate(self, values: Mapping[str, Any]) -> ExperimentPlan:
        found = self.apply(self.plan, dict(values))
        if not isinstance(found, ExperimentPlan):
            raise TypeError(f"apply returned {type(found).__name__}; it must return the plan of the trial")
        return _comparable(found, self.monitor)

    def _judge(self, number: int) -> Judge | None:
        pruner, before = self.pruner, [trial for trial in self.store.trials if trial.number != number]
        return None if pruner is None else lambda seen: pruner.prune(number, seen, before, self.direction)

    def _line(self, trial: TrialOutcome) -> str:
        values = ", ".join(f"{name} {short(value)}" for name, value in trial.values.items())
        what = trial.message if trial.state == "failed" else f"{monitor_name(self.monitor)} {short(trial.value)}"
        return f"trial {trial.number + 1}/{self.budget.trials} {trial.state}: {what} ({values})"

    def _result(self, reason: str) -> SearchResult:
        return SearchResult(self.store.name, monitor_name(self.monitor), self.direction, self.store.trials, reason)


def outcome_of(found: VmappedTrial, trial: TrialOutcome, cap: int | None) -> TrialOutcome:
    """Return a trial as trained among others."""
    reason = "update_cap" if cap is not None and found.updates >= cap else "finished"
    done = trial.with_(updates=found.updates, epochs=found.epochs, measured=found.measured, reason=reason)
    if found.error or found.best is None:
        return done.with_(
            state="failed", reason="failed", message=found.error or no_value(found.updates, reason == "update_cap")
        )
    return done.with_(state="complete", value=found.best)


def monitor_name(monitor: MonitorSpec) -> str:
    """Return the name of the monitored value in histories, such as "val_loss"."""
    return f"{monitor.split}_{monitor.metric}"


def _check_types(plan: Any, space: Any, apply: Any, monitor: Any, budget: Any) -> None:
    wanted = {"plan": ExperimentPlan, "space": SearchSpace, "monitor": MonitorSpec, "budget": SearchBudget}
    given = {"plan": plan, "space": space, "monitor": monitor, "budget": budget}
    for name, cls in wanted.items():
        if not isinstance(given[name], cls):
            raise ConfigError(f"expected {cls.__name__}, got {type(given[name]).__name__}", path=name)
    if not callable(apply):
        raise ConfigError(f"expected a function (plan, values) -> plan, got {type(apply).__name__}", path="apply")
    if monitor.split != "val":
        raise ConfigError(f"got '{monitor.split}'; trials are compared on the validation split", path="monitor.split")


def _comparable(plan: ExperimentPlan, monitor: MonitorSpec) -> ExperimentPlan:
    """Return the plan with the study's monitor, once it can be compared with other trials'.

    Raises:
        ConfigError: it follows another monitor, or its trials would share a loader.
    """
    own = plan.settings.state_of("train").get("monitor")
    if own is not None and own != monitor:
        shown = own.state() if isinstance(own, MonitorSpec) else own
        text = f"the plan follows {shown}, the study {monitor.state()}; give both the same, or the study alone"
        raise ConfigError(text, path="train.monitor")
    for split, data in data_of(plan.settings).items():
        if kind_of(data) == "loader":
            raise ConfigError(
                "a loader would be shared by all trials; give a function that returns a new one", path=f"data.{split}"
            )
    return plan.with_monitor(monitor)
