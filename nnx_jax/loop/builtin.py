"""The built-in callbacks, and from a callback's configuration to the callback."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.fsio import safe_name
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.loggers.tables import CSVLogger, JSONLLogger
from nnx_jax.loop.loggers.tensorboard import TensorBoardCallback
from nnx_jax.loop.loggers.weights_and_biases import WandbCallback
from nnx_jax.loop.monitors import MonitorTracker
from nnx_jax.params.callbacks import (
    CSVLoggerParams,
    EarlyStoppingParams,
    JSONLLoggerParams,
    LRMonitorParams,
    ModelCheckpointParams,
    TensorBoardParams,
    WandbParams,
)
from nnx_jax.params.train import MonitorSpec


class EarlyStopping(Callback):
    """Stop after `patience` measurements without improvement.

    Args:
        monitor: a MonitorSpec, a name like "val_loss", or None for the run's own monitor decision.
        patience: measurements without improvement before stopping; 0 and 1 behave alike.
        min_delta: least change that counts, for a monitor given by name.
        mode: "min" or "max", for a monitor given by name; None is the metric's own direction.
        name: component name when several are used.

    Raises:
        ConfigError: a wrong patience, mode or monitor, at construction.
    """

    distributed = "all"

    def __init__(
        self,
        monitor: MonitorSpec | str | None = None,
        patience: int = 10,
        min_delta: float = 0.0,
        mode: str | None = None,
        name: str | None = None,
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 0:
            raise ConfigError(f"EarlyStopping.patience must be a whole number >= 0, got {patience!r}")
        if mode not in (None, "min", "max"):
            raise ConfigError(f"EarlyStopping.mode must be 'min' or 'max', got {mode!r}")
        if isinstance(monitor, str):
            split, _, metric = monitor.partition("_")
            if split not in ("train", "val") or not metric or "." in metric:
                raise ConfigError(f"EarlyStopping.monitor must look like 'val_loss', got {monitor!r}")
            monitor = MonitorSpec(metric=metric, split=split, mode=mode, min_delta=min_delta)
        elif min_delta != 0.0 or mode is not None:
            raise ConfigError("EarlyStopping takes min_delta and mode from its MonitorSpec; set them there")
        self.monitor, self.patience = monitor, patience
        self.component_name, self.component_named = name or "early_stopping", name is not None
        self.wait = 0
        self.stopped_epoch: int | None = None
        self.direction = (monitor.mode if monitor else None) or "min"
        self._tracker = self._fresh_tracker()

    def on_train_begin(self, ctx: TrainContext) -> None:
        self.wait, self.stopped_epoch = 0, None
        self._tracker = self._fresh_tracker()

    def _fresh_tracker(self) -> MonitorTracker | None:
        return MonitorTracker(self.monitor, self.direction) if self.monitor else None

    def on_validation(self, ctx: TrainContext) -> None:
        decision = self._tracker.decide(ctx.values) if self._tracker else ctx.decision
        if decision is None or decision.status == "missing":
            return
        self.wait = 0 if decision.improved else self.wait + 1
        if not decision.improved and self.wait >= self.patience:
            self.stopped_epoch = ctx.epoch
            ctx.should_stop = True

    def component_state(self) -> dict[str, Any]:
        rule = self.monitor.state() if self.monitor else None
        return {"monitor": rule, "wait": self.wait, "best": self._tracker.best if self._tracker else None}

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        """Return what is wrong with a stored state: it watched something else."""
        rule = self.monitor.state() if self.monitor else None
        return [] if state["monitor"] == rule else [f"it watched {state['monitor']}, this one watches {rule}"]

    def load_component_state(self, state: Mapping[str, Any], *, version: int = 1) -> None:
        self.wait = state["wait"]
        if self._tracker:
            self._tracker.best = state["best"]


class ModelCheckpoint(Callback):
    """Keep the checkpoint of given epochs under `<tag>_e<epoch>`, written after LAST and BEST.

    Args:
        epochs: 0-based epochs to keep; None keeps every epoch.
        tag: name prefix, safe as a file name.

    Raises:
        UnsafePathError: a tag with a separator or another unsafe character.
    """

    distributed = "writer"

    def __init__(self, epochs: Iterable[int] | None = None, tag: str = "custom") -> None:
        self.epochs = None if epochs is None else frozenset(epochs)
        self.tag = safe_name(tag, "ModelCheckpoint tag")

    def on_epoch_end(self, ctx: TrainContext) -> None:
        if self.epochs is None or ctx.epoch in self.epochs:
            ctx.deferred.append(f"{self.tag}_e{ctx.epoch}")


class LRMonitor(Callback):
    """Record learning rates: of every epoch's last update, and on the update clock of every update.

    Args:
        bounded: in a run with a HistoryJournal keep only the last `retention` epochs, and their updates.

    Attributes:
        history: one rate per epoch.
        update_history: (update, rate after that update's schedule step), on the update clock; filled at each epoch's
            end. Of several optimizers, the alphabetically first.
    """

    distributed = "all"
    component_name = "lr_monitor"
    component_version = 3

    def __init__(self, bounded: bool = True) -> None:
        self.bounded = bounded
        self.history: list[float | None] = []
        self.update_history: list[tuple[int, float]] = []
        self._counts: list[int] = []  # updates of each epoch in `history`

    def on_train_begin(self, ctx: TrainContext) -> None:
        self.history, self.update_history, self._counts = [], [], []

    def on_epoch_end(self, ctx: TrainContext) -> None:
        known = ctx.optimizer
        self.history.append(ctx.rate if known is None else known.rate)
        updates = ctx.update_lrs
        self.update_history += updates
        self._counts.append(len(updates))
        if self.bounded and ctx.history_retention is not None and len(self.history) > ctx.history_retention:
            del self.update_history[: sum(self._counts[: -ctx.history_retention])]
            del self.history[: -ctx.history_retention], self._counts[: -ctx.history_retention]

    def component_state(self) -> dict[str, Any]:
        # As arrays: host.json holds a limited number of values, and a run may have more updates than that.
        steps, rates = zip(*self.update_history, strict=True) if self.update_history else ((), ())
        history = [math.nan if rate is None else rate for rate in self.history]
        updates = {"steps": np.asarray(steps, np.int64), "rates": np.asarray(rates, np.float64)}
        return {"history": np.asarray(history), "updates": updates, "counts": np.asarray(self._counts, np.int64)}

    def load_component_state(self, state: Mapping[str, Any], *, version: int = 1) -> None:
        self.history = [None if rate is None or math.isnan(rate) else float(rate) for rate in state["history"]]
        updates = state.get("updates", ())
        pairs = zip(updates["steps"], updates["rates"], strict=True) if isinstance(updates, Mapping) else updates
        self.update_history = [(int(update), float(rate)) for update, rate in pairs]
        self._counts = [int(count) for count in state.get("counts", [0] * len(self.history))]


def build_callback(params: Any) -> Callback:
    """Return the callback of a built-in configuration, or what the user's own `params()` returns."""
    match params:
        case EarlyStoppingParams():
            return EarlyStopping(params.monitor, params.patience, name=params.name)
        case ModelCheckpointParams():
            return ModelCheckpoint(params.epochs, params.tag)
        case LRMonitorParams():
            return LRMonitor(params.bounded)
        case TensorBoardParams():
            return TensorBoardCallback(params.log_dir, params.flush_each_epoch, every=params.every)
        case WandbParams():
            mode = {} if params.mode is None else {"mode": params.mode}
            return WandbCallback(params.project, every=params.every, **mode)
        case CSVLoggerParams():
            return CSVLogger(params.path, params.every)
        case JSONLLoggerParams():
            return JSONLLogger(params.path, params.every)
    return params()
