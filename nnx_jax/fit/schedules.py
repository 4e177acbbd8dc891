"""The schedules of a run by the clock that moves them: the host's once an epoch, or the step's at every update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nnx_jax.optim.epochs import EpochSchedule, FormulaSchedule
from nnx_jax.optim.schedules import Schedule
from nnx_jax.optim.specs import build_epoch_schedule, build_epoch_schedules, build_schedule, build_schedules
from nnx_jax.params.run import RunSpec


class NamedClocks:
    """Schedules of several optimizers on the epoch clock, moved together."""

    def __init__(self, clocks: Mapping[str, EpochSchedule]) -> None:
        self.clocks = dict(clocks)

    @property
    def rate(self) -> dict[str, float]:
        """Rate of the epoch to come, by optimizer."""
        return {name: clock.rate for name, clock in self.clocks.items()}

    def step(self, value: float | None = None) -> dict[str, float]:
        """One epoch passed; `value` is the monitored value, for plateaus."""
        return {name: clock.step(value) for name, clock in self.clocks.items()}

    def state(self) -> dict[str, Any]:
        """JSON state."""
        return {name: clock.state() for name, clock in self.clocks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        for name, clock in self.clocks.items():
            clock.restore(state[name])


@dataclass(frozen=True)
class RunSchedules:
    """The schedules of one run.

    Attributes:
        clock: what the loop moves once an epoch; None when every schedule is on the update clock.
        updates: schedules on the update clock by optimizer: rate from the optimizer's own count.
    """

    clock: EpochSchedule | NamedClocks | None = None
    updates: dict[str, Schedule] = field(default_factory=dict)

    def check_epochs(self, end: int) -> None:
        """Check that every schedule on the epoch clock reaches epoch `end`."""
        clocks = self.clock.clocks.values() if isinstance(self.clock, NamedClocks) else [self.clock]
        for clock in clocks:
            if isinstance(clock, FormulaSchedule):
                clock.schedule.check(end)

    def check_updates(self, end: int) -> None:
        """Check that every schedule on the update clock reaches update `end`."""
        for schedule in self.updates.values():
            schedule.check(end)

    def check_counts(self, counts: Mapping[str, int]) -> None:
        """Check that every schedule on the update clock has reached no further than it goes, by optimizer."""
        for name, schedule in self.updates.items():
            schedule.check(counts[name])

    def state(self, spec: RunSpec) -> dict[str, Any]:
        """Plain description, compared on resume."""
        training = spec.training
        found = {}
        for name, scheduler in training.schedules.items():
            schedule = self.updates.get(name)
            described = scheduler.state() if schedule is None else schedule.state()
            found[name] = {"clock": scheduler.clock, "max_lr": training.optimizers[name].max_lr, **described}
        return found if spec.trainer is not None else next(iter(found.values()))


def make_schedules(
    spec: RunSpec,
    batches: int | None,
    *,
    direction: Any = None,
    carries: bool = False,
    owns_windows: bool = True,
) -> RunSchedules:
    """Build the schedules of a run.

    Args:
        batches: microbatches of an epoch; None when it is not known.
        direction: the better direction of the run's monitor; used by plateaus where there is a monitor.
        carries: a window goes on over an epoch's end.
        owns_windows: the run itself makes an update of every window, so that their number can be planned.

    Raises:
        ConfigError: a schedule needs a length that is not known, or ends before the run does.
    """
    training = spec.training
    horizon = training.planned_updates(batches, carries=carries) if owns_windows else None
    epochs = training.n_epochs
    if epochs is None and training.max_steps is not None and batches is not None:
        epochs = -(-training.max_steps // -(-batches // training.window))
    monitor = training.monitor
    plateau = {} if monitor is None else {"monitor_mode": direction, "min_delta": monitor.min_delta}
    if spec.trainer is not None:
        clocks = build_epoch_schedules(spec.trainer, epochs, **plateau)
        found = RunSchedules(NamedClocks(clocks) if clocks else None, build_schedules(spec.trainer, horizon))
    elif spec.train.scheduler.clock == "optimizer_update":
        found = RunSchedules(None, {"main": build_schedule(spec.train.scheduler, spec.train.optim.max_lr, horizon)})
    else:
        found = RunSchedules(build_epoch_schedule(spec.train.scheduler, spec.train.optim.max_lr, epochs, **plateau))
    if spec.precision == "float64":
        wide = {name: dataclasses.replace(schedule, dtype="float64") for name, schedule in found.updates.items()}
        found = dataclasses.replace(found, updates=wide)
    if horizon is not None:
        found.check_updates(horizon)
    return found
