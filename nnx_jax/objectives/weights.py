"""Schedules of loss weights: a factor for every update, or for every epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError


@runtime_checkable
class WeightSchedule(Protocol):
    """What a loss may be weighted with.

    Attributes:
        per_epoch: it follows the epoch, not the count of committed updates.
    """

    per_epoch: bool

    def __call__(self, step: Any, epoch: Any) -> Any:
        """The weight at `step` committed updates in `epoch`: numbers, or int32 scalars of the step being traced."""
        ...

    def to_spec(self) -> dict[str, Any]:
        """The schedule as plain values."""
        ...


class _Schedule:
    """Where a built-in schedule stands: at the update, or at the epoch."""

    per_epoch: bool

    def __call__(self, step: Any, epoch: Any) -> Any:
        return self.value_at(step, epoch, jnp.float32)

    def value_at(self, step: Any, epoch: Any, dtype: Any) -> Any:
        """The weight; in `dtype` where it is traced."""
        at = epoch if self.per_epoch else step
        if isinstance(at, int | float | np.ndarray | np.generic):
            return self._value(np.asarray(at, np.float64), np)
        return jnp.asarray(self._value(jnp.asarray(at, dtype), jnp), dtype)

    def _value(self, at: Any, xp: Any) -> Any:
        raise AssertionError("a schedule says its value")

    @property
    def settled(self) -> int:
        """From here on the weight stays."""
        return 0

    def to_spec(self) -> dict[str, Any]:
        """The schedule as plain values."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}  # type: ignore[attr-defined]
        return {"kind": type(self).__name__, **fields}


@dataclass(frozen=True)
class ConstantWeight(_Schedule):
    """The same weight throughout."""

    value: float
    per_epoch: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _finite(self, "value", self.value)

    def _value(self, at: Any, xp: Any) -> Any:
        return self.value + 0.0 * at


@dataclass(frozen=True)
class _Ramp(_Schedule):
    start: float
    end: float
    num_steps: int
    per_epoch: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _finite(self, "start", self.start)
        _finite(self, "end", self.end)
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ConfigError(f"{type(self).__name__}: num_steps is {self.num_steps!r}; give a whole number from 1")

    @property
    def settled(self) -> int:
        return self.num_steps

    def _gone(self, at: Any, xp: Any) -> Any:
        return xp.clip(at / self.num_steps, 0.0, 1.0)


class LinearWeight(_Ramp):
    """Straight from `start` at 0 to `end` at `num_steps`, and `end` from there on."""

    def _value(self, at: Any, xp: Any) -> Any:
        return self.start + (self.end - self.start) * self._gone(at, xp)


class CosineWeight(_Ramp):
    """By half a cosine from `start` at 0 to `end` at `num_steps`, and `end` from there on."""

    def _value(self, at: Any, xp: Any) -> Any:
        return self.start + (self.end - self.start) * xp.square(xp.sin(0.5 * math.pi * self._gone(at, xp)))


@dataclass(frozen=True)
class PiecewiseWeight(_Schedule):
    """`values[i]` from `boundaries[i - 1]` on, up to `boundaries[i]`; `values[0]` before the first boundary."""

    boundaries: Sequence[int]
    values: Sequence[float]
    per_epoch: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        bounds, values = tuple(self.boundaries), tuple(self.values)
        object.__setattr__(self, "boundaries", bounds)
        object.__setattr__(self, "values", values)
        if len(values) != len(bounds) + 1:
            raise ConfigError(
                f"PiecewiseWeight: {len(bounds)} boundaries and {len(values)} values; give one value more than "
                "boundaries"
            )
        if any(isinstance(b, bool) or not isinstance(b, int) or b < 0 for b in bounds) or list(bounds) != sorted(
            set(bounds)
        ):
            raise ConfigError(f"PiecewiseWeight: boundaries are {list(bounds)}; give whole numbers that grow")
        for value in values:
            _finite(self, "a value", value)

    @property
    def settled(self) -> int:
        return max(self.boundaries, default=0)

    def _value(self, at: Any, xp: Any) -> Any:
        value = self.values[0] + 0.0 * at
        for bound, after in zip(self.boundaries, self.values[1:], strict=True):
            value = xp.where(at >= bound, after, value)
        return value


def weight_at(weight: Any, step: Any, epoch: Any, dtype: Any) -> Any:
    """A weight of `as_schedule` at an update and an epoch; that of a built-in schedule is as wide as `dtype`."""
    if isinstance(weight, _Schedule):
        return weight.value_at(step, epoch, dtype)
    return weight if isinstance(weight, float) else weight(step, epoch)


def as_schedule(weight: Any) -> Any:
    """Return a number as it is and a schedule as it is.

    Raises:
        TypeError: for a bool, or anything that is neither.
        ConfigError: for a number that is not finite.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float | WeightSchedule):
        raise TypeError(f"a loss weight is a number or a schedule such as LinearWeight, got {weight!r}")
    if isinstance(weight, int | float):
        if not math.isfinite(weight):
            raise ConfigError(f"a loss weight is a finite number, got {weight!r}")
        return float(weight)
    if not isinstance(getattr(weight, "per_epoch", None), bool):
        raise TypeError(
            f"{type(weight).__name__}.per_epoch is {weight.per_epoch!r}; a weight schedule says True or False"
        )
    return float(weight.value) if isinstance(weight, ConstantWeight) else weight


def check_sum(weights: Sequence[Any]) -> None:
    """Check that weights which are divided by their sum have one above 0, wherever the run will stand.

    Raises:
        ConfigError: naming the update or epoch.
    """
    constant = sum(weight for weight in weights if isinstance(weight, float))
    moving = [weight for weight in weights if not isinstance(weight, float)]
    by_step, by_epoch = (_sums([w for w in moving if w.per_epoch is per]) for per in (False, True))
    # Update k and epoch j can only meet when k >= j: every epoch has an update, or its weights are not asked.
    lowest = np.minimum.accumulate(by_step[::-1])[::-1]
    for epoch, value in enumerate(by_epoch):
        least = lowest[min(epoch, len(lowest) - 1)] + value + constant
        if not (math.isfinite(least) and least > 0):
            where = f" of epoch {epoch}" if len(by_epoch) > 1 else ""
            raise ConfigError(
                f"the loss weights add up to {least:g} at some update{where}; "
                "they are divided by their sum, so keep it above 0, or write normalize_weights=False"
            )


def _sums(schedules: Sequence[Any]) -> np.ndarray:
    """The sum of schedules at 0, 1, ..., up to where all of them stay."""
    ends = [getattr(schedule, "settled", 0) for schedule in schedules]
    places = np.arange(max(ends, default=0) + 1)
    total = np.zeros(len(places))
    for schedule in schedules:
        found = [schedule(int(at), int(at)) for at in places] if not isinstance(schedule, _Schedule) else None
        total = total + np.asarray(schedule(places, places) if found is None else found, np.float64)
    return total


def _finite(schedule: Any, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{type(schedule).__name__}: {name} is {value!r}; give a finite number")
