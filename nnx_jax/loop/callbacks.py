"""Callbacks watch the lifecycle on the host: begin in order, end in reverse, every cleanup tried."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnx_jax.core.errors import ComponentRestoreError, ConfigError
from nnx_jax.core.fsio import safe_name
from nnx_jax.loop.monitors import MonitorRecord, MonitorTracker
from nnx_jax.params.train import MonitorSpec


@dataclass
class TrainContext:
    """What a callback sees; valid during one `train()`.

    Attributes:
        run_id: id of the run.
        model: the model being trained; its weights are brought up to date when a callback asks `ctx.sync()`.
        epoch: the epoch just run, 0-based.
        step: committed updates so far.
        values: whole-epoch values by name ("train_loss", "val_accuracy", ...).
        decision: the monitor's decision of this epoch, None before the first.
        records: history rows of the run so far.
        rates: learning rate of the last update.
        should_stop: set True to end the run at the next commit: this epoch's, or at once after a validation inside it.
        deferred: tags to write as checkpoints after BEST (ModelCheckpoint appends here).
    """

    run_id: str
    model: Any = None
    epoch: int = 0
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    decision: MonitorRecord | None = None
    records: Sequence[Mapping[str, Any]] = ()
    rate: float | None = None
    should_stop: bool = False
    deferred: list[str] = field(default_factory=list)
    sync: Callable[[], Any] = lambda: None


class Callback:
    """Base of host callbacks; override any of the four hooks.

    A callback with state to continue after a resume gives `component_name`, `component_state()` and
    `load_component_state(state)`.

    Attributes:
        component_name: name of the state in a generation; None for a callback without state.
        component_version: schema of the state; a generation with a newer one is refused.
        component_required: a resume without this state (on either side) is refused, instead of starting it fresh.
        component_named: the name was chosen by the user, so it must be unique; other names are numbered.
    """

    component_name: str | None = None
    component_version: int = 1
    component_required: bool = False
    component_named: bool = False

    def on_train_begin(self, ctx: TrainContext) -> None:
        """Called once, before the first epoch of this session."""

    def on_epoch_begin(self, ctx: TrainContext) -> None:
        """Called before each epoch's first batch."""

    def on_validation(self, ctx: TrainContext) -> None:
        """Called after each validation, with the monitor's decision in `ctx.decision`; inside an epoch too."""

    def on_epoch_end(self, ctx: TrainContext) -> None:
        """Called after validation, monitor and schedules, before the epoch is committed."""

    def on_train_end(self, ctx: TrainContext) -> None:
        """Called once, in reverse order, also after a failure."""

    def component_state(self) -> dict[str, Any]:
        """JSON state a generation keeps."""
        return {}

    def load_component_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `component_state()`; raise ValueError when it does not fit."""


class FunctionCallback(Callback):
    """A plain function, called with the history rows at each epoch's end."""

    def __init__(self, function: Callable[[Sequence[Mapping[str, Any]]], Any]) -> None:
        self.function = function

    def on_epoch_end(self, ctx: TrainContext) -> None:
        self.function(ctx.records)


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

    def load_component_state(self, state: Mapping[str, Any]) -> None:
        rule = self.monitor.state() if self.monitor else None
        if state["monitor"] != rule:
            raise ValueError(f"it watched {state['monitor']}, this one watches {rule}")
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

    def __init__(self, epochs: Iterable[int] | None = None, tag: str = "custom") -> None:
        self.epochs = None if epochs is None else frozenset(epochs)
        self.tag = safe_name(tag, "ModelCheckpoint tag")

    def on_epoch_end(self, ctx: TrainContext) -> None:
        if self.epochs is None or ctx.epoch in self.epochs:
            ctx.deferred.append(f"{self.tag}_e{ctx.epoch}")


class LRMonitor(Callback):
    """Record the learning rate of every epoch's last update in `history`."""

    component_name = "lr_monitor"

    def __init__(self) -> None:
        self.history: list[float | None] = []

    def on_train_begin(self, ctx: TrainContext) -> None:
        self.history = []

    def on_epoch_end(self, ctx: TrainContext) -> None:
        self.history.append(ctx.rate)

    def component_state(self) -> dict[str, Any]:
        return {"history": list(self.history)}

    def load_component_state(self, state: Mapping[str, Any]) -> None:
        self.history = list(state["history"])


class CallbackList:
    """Calls the hooks in the lifecycle's order and keeps who has begun."""

    def __init__(self, callbacks: Iterable[Callback | Callable[..., Any]]) -> None:
        self.callbacks = [self._adapt(callback) for callback in callbacks]
        self.begun: list[Callback] = []

    @staticmethod
    def _adapt(callback: Callback | Callable[..., Any]) -> Callback:
        if isinstance(callback, type):
            raise ConfigError(f"callback {callback.__name__} is a class; pass an instance: {callback.__name__}()")
        if isinstance(callback, Callback):
            return callback
        if callable(callback):
            return FunctionCallback(callback)
        raise ConfigError(f"a callback must be a Callback or a function, got {type(callback).__name__}")

    def train_begin(self, ctx: TrainContext) -> None:
        """Begin in order; one that fails is not finalized."""
        for callback in self.callbacks:
            callback.on_train_begin(ctx)
            self.begun.append(callback)

    def epoch_begin(self, ctx: TrainContext) -> None:
        """Before an epoch, in order."""
        for callback in self.callbacks:
            callback.on_epoch_begin(ctx)

    def validation(self, ctx: TrainContext) -> None:
        """After a validation, in order."""
        for callback in self.callbacks:
            callback.on_validation(ctx)

    def epoch_end(self, ctx: TrainContext) -> None:
        """After an epoch, in order."""
        for callback in self.callbacks:
            callback.on_epoch_end(ctx)

    def train_end(self, ctx: TrainContext, error: BaseException | None) -> None:
        """End in reverse, trying every one.

        With a training error each cleanup error becomes a RuntimeWarning, since the training error is the one to
        raise; without, the first cleanup error is raised and the others are warnings.
        """
        failures: list[BaseException] = []
        for callback in reversed(self.begun):
            try:
                callback.on_train_end(ctx)
            except Exception as failure:  # every cleanup is tried, whatever the one before did
                failures.append(failure)
        self.begun = []
        for failure in failures if error is not None else failures[1:]:
            message = f"on_train_end failed: {type(failure).__name__}: {failure}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        if error is None and failures:
            raise failures[0]

    def components(self) -> dict[str, Callback]:
        """Callbacks with state, by component name; the second of a name nobody chose gets ".2"."""
        named: dict[str, Callback] = {}
        for callback in self.callbacks:
            if callback.component_name is None:
                continue
            name, count = callback.component_name, 2
            while name in named:
                if callback.component_named:
                    raise ConfigError(f"two callbacks are named {name!r}; give each a name of its own")
                name, count = f"{callback.component_name}.{count}", count + 1
            named[name] = callback
        return named

    def state(self) -> dict[str, Any]:
        """Every component's state, version and whether a resume needs it, by name."""
        return {
            name: {
                "version": callback.component_version,
                "required": callback.component_required,
                "state": callback.component_state(),
            }
            for name, callback in self.components().items()
        }

    def load(self, stored: Mapping[str, Any]) -> None:
        """Restore components, all or none; one that the stored point does not know starts fresh.

        Raises:
            ComponentRestoreError: listing every problem: a required state missing on either side, a newer version, a
                state that does not fit. Every component is then as before.
        """
        components = self.components()
        problems = [
            f"component {name}: the checkpoint needs it and this run has no such callback"
            for name, entry in stored.items()
            if entry["required"] and name not in components
        ]
        before = {name: callback.component_state() for name, callback in components.items()}
        for name, callback in components.items():
            problems += self._load_one(name, callback, stored.get(name))
        if problems:
            for name, callback in components.items():
                callback.load_component_state(before[name])
            raise ComponentRestoreError(problems)

    @staticmethod
    def _load_one(name: str, callback: Callback, entry: Mapping[str, Any] | None) -> list[str]:
        if entry is None:
            return [f"component {name}: the checkpoint has no state for it"] if callback.component_required else []
        if entry["version"] > callback.component_version:
            return [f"component {name}: stored as version {entry['version']}, known is {callback.component_version}"]
        try:
            callback.load_component_state(entry["state"])
        except (ValueError, KeyError, TypeError) as problem:
            return [f"component {name}: {problem}"]
        return []
