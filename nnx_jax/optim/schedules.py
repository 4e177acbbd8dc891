"""Learning-rate schedules: one formula each, read by the optimizer's own count or moved by the epoch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError, StepError, nearest
from nnx_jax.params.scheduler import SchedulerKind

SCHEDULES: tuple[str, ...] = get_args(SchedulerKind)
_NEEDS_HORIZON = ("step", "cosine", "one_cycle", "linear_warmup_decay", "warmup_cosine")
_ENDS = ("one_cycle", "linear_warmup_decay", "warmup_cosine")

# torch.optim.lr_scheduler.OneCycleLR: rise for 30 % of the way from max/25, then fall to max/25/10000.
_RISE, _START_DIVISOR, _END_DIVISOR = 0.3, 25.0, 1e4


class ScheduleError(StepError, ValueError):
    """A schedule was asked for a rate past its end."""


def planned_updates(n_epochs: int, n_batches: int, accumulate: int = 1) -> int:
    """Updates of a run: the last window of an epoch may be shorter, so each epoch rounds up."""
    for name, value in (("n_epochs", n_epochs), ("n_batches", n_batches), ("accumulate", accumulate)):
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more, got {value}")
    return n_epochs * -(-n_batches // accumulate)


@dataclass(frozen=True)
class Schedule:
    """A rate for every position k: the number of committed updates (or finished epochs) before the one it is used for.

    Called with an int32 array it traces to a rate of `dtype`; `at(k)` gives the same on the host in float64.

    Attributes:
        kind: see `SCHEDULES`; all but reduce_on_plateau.
        base: the optimizer's rate, the highest one.
        horizon: how many positions the run plans, or None for an endless run.
        period: step size, cosine period, or the total of the kinds that end; 0 where it means nothing.
        warmup: positions of the rise.
        chosen: whether the user gave the cosine period; it then comes round again as in torch, else it stays low.
    """

    kind: str
    base: float
    horizon: int | None = None
    period: int = 0
    warmup: int = 0
    min_lr: float = 0.0
    factor: float = 0.1
    chosen: bool = False
    dtype: str = "float32"
    _warned: list[bool] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, count: jax.Array) -> jax.Array:
        return jnp.asarray(_FORMULAS[self.kind](self, jnp.asarray(count).astype(self.dtype), jnp), self.dtype)

    def at(self, position: int) -> float:
        """The rate at `position`, for the host."""
        return float(_FORMULAS[self.kind](self, np.float64(position), np))

    def check(self, updates: int) -> None:
        """Refuse or remark that `updates` positions in all have been asked for; call it before they are used.

        Raises:
            ScheduleError: past the total of one_cycle, linear_warmup_decay or warmup_cosine.

        Warns:
            UserWarning: once, past the period of a cosine whose period was not chosen.
        """
        if self.kind in _ENDS and updates > self.period:
            raise ScheduleError(
                f"{self.kind} ends after {self.period} updates and cannot give a rate for update {self.period + 1}; "
                f"set total_steps to {updates} or more"
            )
        if self.kind == "cosine" and not self.chosen and updates > self.period and not self._warned:
            self._warned.append(True)
            warnings.warn(
                f"the cosine schedule planned {self.period} positions and is at {updates}; the rate stays at "
                f"{self.min_lr}; set T_max to choose the period",
                UserWarning,
                stacklevel=2,
            )

    def state(self) -> dict[str, Any]:
        """What must be equal on resume, as JSON."""
        return {
            "kind": self.kind,
            "base": self.base,
            "period": self.period,
            "chosen": self.chosen,
            "warmup": self.warmup,
            "min_lr": self.min_lr,
            "factor": self.factor,
        }


def _half_cosine(left: Any, xp: Any) -> Any:
    """(1 - cos(pi left)) / 2 without its cancellation near 0: 1 where all is left, 0 at the end."""
    return xp.square(xp.sin(0.5 * math.pi * left))


def _constant(s: Schedule, k: Any, xp: Any) -> Any:
    return s.base + 0.0 * k


def _step(s: Schedule, k: Any, xp: Any) -> Any:
    # Floors at min_lr, which is 0 unless given.
    return xp.maximum(s.base * s.factor ** xp.floor(k / s.period), min(s.min_lr, s.base))


def _cosine(s: Schedule, k: Any, xp: Any) -> Any:
    at = k if s.chosen else xp.minimum(k, s.period)
    return s.min_lr + (s.base - s.min_lr) * _half_cosine((s.period - at) / s.period, xp)


def _one_cycle(s: Schedule, k: Any, xp: Any) -> Any:
    start, end = s.base / _START_DIVISOR, s.base / _START_DIVISOR / _END_DIVISOR
    top, last = _RISE * s.period - 1.0, s.period - 1.0
    k = xp.minimum(k, last)
    rise = k / (top if top > 0 else 1.0)
    left = (last - k) / (last - top)
    up = s.base + (start - s.base) * _half_cosine(1.0 - rise, xp)
    down = end + (s.base - end) * _half_cosine(left, xp)
    return xp.where(k <= top, up, down)


def _rise(s: Schedule, k: Any) -> Any:
    return s.base * (k + 1.0) / max(s.warmup, 1)


def _warmup_left(s: Schedule, k: Any, xp: Any) -> Any:
    """The part of the way that is left after the warm-up: 1 at its end, 0 at the total."""
    return xp.clip((s.period - k) / max(s.period - s.warmup, 1), 0.0, 1.0)


def _linear_warmup_decay(s: Schedule, k: Any, xp: Any) -> Any:
    return xp.where(k < s.warmup, _rise(s, k), s.base * _warmup_left(s, k, xp))


def _warmup_cosine(s: Schedule, k: Any, xp: Any) -> Any:
    fall = s.min_lr + (s.base - s.min_lr) * _half_cosine(_warmup_left(s, k, xp), xp)
    return xp.where(k < s.warmup, _rise(s, k), fall)


_FORMULAS: dict[str, Callable[[Schedule, Any, Any], Any]] = {
    "constant": _constant,
    "step": _step,
    "cosine": _cosine,
    "one_cycle": _one_cycle,
    "linear_warmup_decay": _linear_warmup_decay,
    "warmup_cosine": _warmup_cosine,
}


def make_schedule(
    kind: str,
    base_lr: float,
    horizon: int | None,
    *,
    min_lr: float = 0.0,
    factor: float = 0.1,
    step_size: int | None = None,
    T_max: int | None = None,  # torch's name, and the configuration's
    total_steps: int | None = None,
    warmup_steps: int | None = None,
) -> Schedule:
    """Fill in what was left out from the horizon: step size a third, cosine period and totals all, warm-up a tenth.

    Rates, with k counted from 0: step `base * factor^(k // step_size)`; cosine `min + (base - min)(1 + cos(pi k /
    T_max)) / 2`; one_cycle torch's (without its momentum cycle); the warm-ups `base (k + 1) / warmup`, so the first
    rate is never 0, then straight to 0 at the total, or by half a cosine to `min_lr`.

    Raises:
        ConfigError: for an unknown kind, reduce_on_plateau (it belongs to the epoch clock, see `EpochSchedule`), a
            missing horizon, a total below the planned updates, or a warm-up longer than the total.
    """
    if kind not in _FORMULAS:
        if kind == "reduce_on_plateau":
            raise ConfigError("reduce_on_plateau follows a validation value; write clock: epoch")
        raise ConfigError(f"there is no schedule '{kind}'{nearest(kind, SCHEDULES)}")
    if kind in _ENDS and total_steps is not None and horizon is not None and total_steps < horizon:
        raise ConfigError(f"total_steps is {total_steps} and {horizon} updates are planned; write {horizon} or more")
    given = {"step": step_size, "cosine": T_max}.get(kind, total_steps)
    if kind in _NEEDS_HORIZON and given is None and horizon is None:
        name = {"step": "step_size", "cosine": "T_max"}.get(kind, "total_steps")
        raise ConfigError(f"the length of this run is not known beforehand; give {name} for '{kind}'")
    schedule = Schedule(kind, float(base_lr), horizon, min_lr=float(min_lr), factor=float(factor))
    if kind == "constant":
        return schedule
    total = given if given is not None else int(horizon or 0)
    if total < 1:
        raise ConfigError(f"schedule '{kind}' needs a length of 1 or more, got {total}")
    if kind == "step":
        return replace(schedule, period=total if given is not None else max(1, total // 3))
    if kind == "cosine":
        return replace(schedule, period=total, chosen=given is not None)
    if kind == "one_cycle":
        return replace(schedule, period=total)
    warmup = max(1, total // 10) if warmup_steps is None else warmup_steps
    if warmup > total:
        raise ConfigError(f"warmup_steps is {warmup} and the schedule has {total} steps; write {total} or fewer")
    return replace(schedule, period=total, warmup=warmup)
