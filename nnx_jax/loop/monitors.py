"""One decision per validation: plateau, BEST and every EarlyStopping of the same monitor read it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nnx_jax.core.errors import NnxError
from nnx_jax.params.train import MonitorSpec

SCORES = ("val_error", "val_loss", "train_error", "train_loss")
"""What a run without a monitor goes by, the first that is finite."""


class MonitorUnavailableError(NnxError, ValueError):
    """The monitored value is missing or not finite and the monitor says that is an error."""

    layer = "monitor"


@dataclass(frozen=True)
class MonitorRecord:
    """The choice of one validation: `status` is ok, missing or nonfinite."""

    name: str
    value: float | None
    status: str
    improved: bool
    best: float | None


def default_score(values: Mapping[str, float]) -> tuple[str, float | None]:
    """Return the first finite of `SCORES` (lower is better), with its name."""
    for split in ("val", "train"):
        accuracy = values.get(f"{split}_accuracy")
        if accuracy is not None and math.isfinite(accuracy):
            return f"{split}_error", 1.0 - accuracy
        loss = values.get(f"{split}_loss")
        if loss is not None and math.isfinite(loss):
            return f"{split}_loss", loss
    return "none", None


class MonitorTracker:
    """Keeps the best value of one monitor and says whether a new one improves.

    The first finite value improves; a later one must beat the best by more than `min_delta` (strictly). Ties and
    non-finite values never improve. Without a spec the default score of `default_score` is minimised; where another
    score had to stand in for the one that `best` is of, it says nothing about better or worse.
    """

    def __init__(self, spec: MonitorSpec | None, direction: str = "min") -> None:
        self.spec = spec
        self.direction = direction
        self.best: float | None = None
        self._named: str | None = None
        """Which value `best` is."""
        self._warned: set[str] = set()

    def decide(self, values: Mapping[str, float]) -> MonitorRecord:
        """Judge the values of one validation, named like "val_loss".

        Raises:
            MonitorUnavailableError: the value is missing or not finite and the spec calls that an error.
        """
        if self.spec is None:
            name, value = default_score(values)
            min_delta = 0.0
        else:
            name, min_delta = f"{self.spec.split}_{self.spec.metric}", self.spec.min_delta
            value = values.get(name)
        status = "missing" if value is None else "ok" if math.isfinite(value) else "nonfinite"
        self._complain(name, value, status)
        improved = status == "ok" and value is not None and self._beats(name, value, min_delta)
        if improved:
            self.best, self._named = value, name
        return MonitorRecord(name, value, status, improved, self.best)

    def _beats(self, name: str, value: float, min_delta: float) -> bool:
        if self.best is None:
            return True
        if self.spec is None and self._named not in (None, name):
            return SCORES.index(name) < SCORES.index(str(self._named))  # the better kind of score is back
        return value < self.best - min_delta if self.direction == "min" else value > self.best + min_delta

    def _complain(self, name: str, value: float | None, status: str) -> None:
        if self.spec is None or status == "ok":
            return
        rule = self.spec.on_missing if status == "missing" else self.spec.on_nonfinite
        if rule == "error":
            raise MonitorUnavailableError(f"{name} is {status} ({value}); set on_{status}='skip' to train on")
        if status not in self._warned:
            self._warned.add(status)
            warnings.warn(f"monitor {name} is {status} ({value}): no improvement counted", RuntimeWarning, stacklevel=4)

    def state(self) -> dict[str, Any]:
        """What a generation keeps: the rule and the best value so far."""
        return {"rule": self.rule(), "best": self.best, "named": self._named}

    def rule(self) -> dict[str, Any]:
        """The rule a stored best belongs to; another rule cannot continue it."""
        return {"spec": self.spec.state() if self.spec else None, "direction": self.direction}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored best; the caller has compared the rules."""
        self.best, self._named = state["best"], state.get("named")


def as_dict(record: MonitorRecord) -> dict[str, Any]:
    """Return the record as JSON values."""
    return asdict(record)
