"""From configuration to optimizer and schedule: thin builders that only unpack specs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from nnx_jax.core.errors import ConfigError
from nnx_jax.optim.build import Group, Optimizer, Schedule, make_optimizer
from nnx_jax.optim.epochs import EpochSchedule, FormulaSchedule, PlateauSchedule
from nnx_jax.optim.schedules import Schedule as UpdateSchedule
from nnx_jax.optim.schedules import make_schedule

_SCHEDULE_FIELDS = ("min_lr", "factor", "step_size", "T_max", "max_lr", "total_steps", "warmup_steps")
_PLATEAU_FIELDS = ("min_lr", "factor", "patience", "cooldown", "threshold")


def build_optimizer(params: Any, schedule: Schedule | None, like: Mapping[str, Any]) -> Optimizer:
    """Build the optimizer of an NNOptimParams for the trainable parameters `like` (path -> array or its shape).

    Args:
        schedule: on the update clock, the rate from the count of committed updates; None on the epoch clock, where the
            rate starts at `max_lr` and the host sets it.

    Raises:
        ConfigError: when a pattern matches nothing or an option is unknown.
    """
    settings = {
        name: _get(params, name) for name in ("momentum", "nesterov", "betas", "eps", "weight_decay", "options")
    }
    return make_optimizer(
        params.kind,
        like,
        rate=params.max_lr,
        schedule=schedule,
        mask=_get(params, "decay_mask") or "auto",
        groups=[_group(spec, params.max_lr) for spec in _get(params, "param_groups") or ()],
        **{name: value for name, value in settings.items() if value is not None},
    )


def _group(spec: Any, base_lr: float) -> Group:
    patterns = _get(spec, "patterns") or _get(spec, "pattern")
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    scale, own = _get(spec, "lr_scale"), _get(spec, "max_lr")
    if own is not None:
        if not base_lr:
            raise ConfigError(
                f"group {patterns} has max_lr {own} but the optimizer's max_lr is 0; a group's rate is a share"
            )
        scale = own / base_lr
    return Group(patterns, 1.0 if scale is None else float(scale), _get(spec, "weight_decay"))


def build_schedule(params: Any, base_lr: float, horizon: int | None) -> UpdateSchedule:
    """Build the schedule of an NNSchedulerParams over `horizon` planned updates (or epochs); see `make_schedule`."""
    settings = {name: _get(params, name) for name in _SCHEDULE_FIELDS}
    return make_schedule(params.kind, base_lr, horizon, **{k: v for k, v in settings.items() if v is not None})


def build_epoch_schedule(
    params: Any,
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
    settings = {name: _get(params, name) for name in _PLATEAU_FIELDS}
    settings = {name: value for name, value in settings.items() if value is not None}
    if monitor_mode is not None:
        settings |= {"mode": monitor_mode, "threshold": min_delta or 0.0, "threshold_mode": "abs"}
    return PlateauSchedule(base_lr, **settings)


def _get(spec: Any, name: str) -> Any:
    return getattr(spec, name, None)
