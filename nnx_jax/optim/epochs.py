"""Schedules on the epoch clock: host objects moved once an epoch, with state that survives a restart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from nnx_jax.core.errors import ComponentRestoreError, ConfigError
from nnx_jax.optim.schedules import Schedule


class EpochSchedule(Protocol):
    """What the loop holds on the epoch clock."""

    @property
    def rate(self) -> float:
        """The rate of the current epoch."""
        ...

    def step(self, value: float | None = None) -> float:
        """End an epoch (with its monitored value) and return the next epoch's rate."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything needed to go on, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        ...


class FormulaSchedule:
    """A schedule whose rate is a function of the number of finished epochs."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.epoch = 0

    @property
    def rate(self) -> float:
        return self.schedule.at(self.epoch)

    def step(self, value: float | None = None) -> float:
        """Advance one epoch; the value is not used.

        Warns:
            UserWarning: once, past the period of a cosine whose period was not chosen.
        """
        self.epoch += 1
        self.schedule.check(self.epoch)
        return self.rate

    def state(self) -> dict[str, Any]:
        return {"clock": "epoch", "epoch": self.epoch, "schedule": self.schedule.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the stored epoch.

        Raises:
            ComponentRestoreError: when the stored schedule is another one; nothing is changed.
        """
        _refuse_other({"clock": "epoch", "schedule": self.schedule.state()}, state)
        self.epoch = int(state["epoch"])


class PlateauSchedule:
    """Lower the rate when the monitored value stops improving (torch.optim.lr_scheduler.ReduceLROnPlateau).

    More than `patience` epochs in a row without improvement multiply the rate by `factor`, not below `min_lr`; then
    `cooldown` epochs count no bad ones. Improvement is beating the best by `threshold` of it ("rel") or by `threshold`
    ("abs"). A missing value (None) is no step at all; a value that is not finite is a bad epoch.
    """

    def __init__(
        self,
        base_lr: float,
        *,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.95,
        patience: int = 8,
        cooldown: int = 2,
        threshold: float = 1e-3,
        threshold_mode: Literal["rel", "abs"] = "rel",
        min_lr: float = 1e-7,
    ) -> None:
        if not 0.0 < factor < 1.0:
            raise ConfigError(f"reduce_on_plateau factor must be above 0 and below 1, got {factor}")
        if mode not in ("min", "max"):
            raise ConfigError(f"reduce_on_plateau mode is {mode!r}; write 'min' or 'max'")
        if threshold_mode not in ("rel", "abs"):
            raise ConfigError(f"reduce_on_plateau threshold_mode is {threshold_mode!r}; write 'rel' or 'abs'")
        self._rate = float(base_lr)
        self.settings = {
            "base": float(base_lr),
            "mode": mode,
            "factor": float(factor),
            "patience": int(patience),
            "cooldown": int(cooldown),
            "threshold": float(threshold),
            "threshold_mode": threshold_mode,
            "min_lr": float(min_lr),
        }
        self.best: float | None = None
        self.bad_epochs = 0
        self.cooling = 0
        self.epoch = 0

    @property
    def rate(self) -> float:
        return self._rate

    def step(self, value: float | None = None) -> float:
        """End an epoch with its monitored value and return the next epoch's rate."""
        if value is None:
            return self._rate
        self.epoch += 1
        if self._improves(value):
            self.best, self.bad_epochs = float(value), 0
        else:
            self.bad_epochs += 1
        if self.cooling > 0:
            self.cooling -= 1
            self.bad_epochs = 0
        if self.bad_epochs > self.settings["patience"]:
            self.cooling, self.bad_epochs = self.settings["cooldown"], 0
            lower = max(self._rate * self.settings["factor"], self.settings["min_lr"])
            if self._rate - lower > 1e-8:  # torch's eps: a smaller change is not made
                self._rate = lower
        return self._rate

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        threshold = self.settings["threshold"]
        sign = 1.0 if self.settings["mode"] == "max" else -1.0
        if self.settings["threshold_mode"] == "rel":
            bar = self.best * (1.0 + sign * threshold)
        else:
            bar = self.best + sign * threshold
        return sign * value > sign * bar

    def state(self) -> dict[str, Any]:
        return {
            "clock": "epoch",
            "epoch": self.epoch,
            "schedule": {"kind": "reduce_on_plateau", **self.settings},
            "rate": self._rate,
            "best": self.best,
            "bad_epochs": self.bad_epochs,
            "cooling": self.cooling,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the stored rate, best value and counts.

        Raises:
            ComponentRestoreError: when the stored schedule is another one; nothing is changed.
        """
        _refuse_other({"clock": "epoch", "schedule": self.state()["schedule"]}, state)
        self._rate = float(state["rate"])
        self.best = None if state["best"] is None else float(state["best"])
        self.epoch, self.bad_epochs, self.cooling = (int(state[key]) for key in ("epoch", "bad_epochs", "cooling"))


def _refuse_other(mine: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    problems = []
    for key, value in mine.items():
        theirs = stored.get(key)
        if isinstance(value, Mapping) and isinstance(theirs, Mapping):
            names = [name for name in {**value, **theirs} if value.get(name) != theirs.get(name)]
            problems += [
                f"schedule {name}: stored {theirs.get(name)!r}, configured {value.get(name)!r}" for name in names
            ]
        elif value != theirs:
            problems.append(f"schedule {key}: stored {theirs!r}, configured {value!r}")
    if problems:
        raise ComponentRestoreError(problems)
