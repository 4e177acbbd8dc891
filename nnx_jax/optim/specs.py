"""From configuration to optimizer and schedule: thin builders that only unpack specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from nnx_jax.core.errors import ConfigError
from nnx_jax.optim.build import Group, Optimizer, Schedule, make_optimizer
from nnx_jax.optim.epochs import EpochSchedule, FormulaSchedule, PlateauSchedule
from nnx_jax.optim.schedules import Schedule as UpdateSchedule
from nnx_jax.optim.schedules import make_schedule
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.trainer import NNTrainerParams

T = TypeVar("T")

_SCHEDULE_FIELDS = ("min_lr", "factor", "step_size", "T_max", "total_steps", "warmup_steps")
_PLATEAU_FIELDS = ("min_lr", "factor", "patience", "cooldown", "threshold")


def build_optimizer(params: NNOptimParams, schedule: Schedule | None, like: Mapping[str, Any]) -> Optimizer:
    """Build the optimizer of an NNOptimParams for the trainable parameters `like` (path -> array or its shape).

    Args:
        schedule: on the update clock, the rate from the count of committed updates; None on the epoch clock, where the
            rate starts at `max_lr` and the host sets it.

    Raises:
        ConfigError: when a pattern matches nothing or an option is unknown.
    """
    groups = [
        Group(rule.patterns, params.lr_scale_of(index), rule.weight_decay)
        for index, rule in enumerate(params.param_groups)
    ]
    return make_optimizer(
        params.kind,
        like,
        rate=params.max_lr,
        schedule=schedule,
        mask=params.decay_mask,
        groups=groups,
        **_given(params, ("momentum", "nesterov", "betas", "eps", "weight_decay", "options")),
    )


def build_schedule(params: NNSchedulerParams, base_lr: float, horizon: int | None) -> UpdateSchedule:
    """Build the schedule of an NNSchedulerParams over `horizon` planned updates (or epochs); see `make_schedule`."""
    return make_schedule(params.kind, base_lr, horizon, **_given(params, _SCHEDULE_FIELDS))


def build_epoch_schedule(
    params: NNSchedulerParams,
    base_lr: float,
    n_epochs: int | None,
    *,
    monitor_mode: Literal["min", "max"] | None = None,
    min_delta: float | None = None,
) -> EpochSchedule:
    """Build the schedule of an NNSchedulerParams on the epoch clock.

    Args:
        monitor_mode: direction of a named monitor; reduce_on_plateau then uses the monitor's `min_delta` as an absolute
            threshold in place of its own relative one.
    """
    if params.kind != "reduce_on_plateau":
        return FormulaSchedule(build_schedule(params, base_lr, n_epochs))
    settings = _given(params, _PLATEAU_FIELDS)
    if monitor_mode is not None:
        settings |= {"mode": monitor_mode, "threshold": min_delta or 0.0, "threshold_mode": "abs"}
    return PlateauSchedule(base_lr, **settings)


def build_schedules(params: NNTrainerParams, horizon: int | None) -> dict[str, UpdateSchedule]:
    """Build the schedules of a Trainer on the update clock, by the optimizer's name.

    Args:
        horizon: planned updates of each optimizer; None where a step of the user's own decides when they step.

    Raises:
        ConfigError: a schedule needs a length and none is known; the error names the optimizer.
    """
    return _each(params, "optimizer_update", lambda spec, rate: build_schedule(spec, rate, horizon))


def build_epoch_schedules(
    params: NNTrainerParams,
    n_epochs: int | None,
    *,
    monitor_mode: Literal["min", "max"] | None = None,
    min_delta: float | None = None,
) -> dict[str, EpochSchedule]:
    """Build the schedules of a Trainer on the epoch clock, by the optimizer's name; see `build_epoch_schedule`.

    Raises:
        ConfigError: a schedule needs a length and none is known; the error names the optimizer.
    """

    def build(spec: NNSchedulerParams, rate: float) -> EpochSchedule:
        return build_epoch_schedule(spec, rate, n_epochs, monitor_mode=monitor_mode, min_delta=min_delta)

    return _each(params, "epoch", build)


def _each(params: NNTrainerParams, clock: str, build: Callable[[NNSchedulerParams, float], T]) -> dict[str, T]:
    """What `build` makes of every schedule on a clock; nothing where schedules are not stepped."""
    built: dict[str, T] = {}
    for name, spec in params.schedules.items() if params.auto_step_schedulers else ():
        if spec.clock == clock:
            try:
                built[name] = build(spec, params.optims[name].max_lr)
            except ConfigError as error:
                raise ConfigError(str(error.args[0]), path=f"trainer.{params.places(name)[1]}") from error
    return built


def _given(spec: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The settings that are not None: None means that the kind has no such setting, or that the plan decides."""
    return {name: getattr(spec, name) for name in names if getattr(spec, name) is not None}
