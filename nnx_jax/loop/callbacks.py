"""Callbacks watch the lifecycle on the host: begin in order, end in reverse, every cleanup tried."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from nnx_jax.core.errors import ConfigError
from nnx_jax.loop.components import ComponentSpec
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.history_access import ReadBack, Sight, check_access
from nnx_jax.loop.updates import UpdateEvent
from nnx_jax.runs.transforms import NNCheckpointTransform


class Callback:
    """Base of host callbacks; override any of its methods.

    A callback with state to continue after a resume sets `component_name` (or overrides `component_spec`), and gives
    `component_state()` and `load_component_state(state)`; see `StatefulComponent`.

    Attributes:
        distributed: where it runs when several processes train one model: "all" (it then writes nothing, and decides
            the same everywhere), "writer" (the one process that writes the run; it then decides nothing and has no
            state), "unsupported" (nowhere: it writes when it is made). Undeclared is refused there, and means nothing
            in a single process.
        history_access: in a run with a journal, whether `ctx.records` are its newest records ("window"), or at the ends
            of epochs and of the training all of them ("full"), which are read back each time.
        component_name: name of the state in a generation; None for a callback without state.
        component_version: schema of the state; a generation with a newer one is refused.
        component_required: a resume without this state (on either side) is refused, instead of starting it fresh.
        component_named: the name was chosen by the user, so it must be unique; other names are numbered.
    """

    distributed: ClassVar[Literal["all", "writer", "unsupported"] | None] = None
    history_access: str = "window"
    component_name: str | None = None
    component_version: int = 1
    component_required: bool = False
    component_named: bool = False

    def on_train_begin(self, ctx: TrainContext) -> None:
        """Called once, before the first epoch of this session."""

    def on_epoch_begin(self, ctx: TrainContext) -> None:
        """Called before each epoch's first batch."""

    def on_optimizer_update(self, ctx: TrainContext, event: UpdateEvent) -> None:
        """Called once per committed update, in order, before anything later is trained.

        Overriding it makes the host read after every update, which costs small models their speed; `on_updates` is
        told the same of many updates at once.
        """

    def on_updates(self, ctx: TrainContext, events: Sequence[UpdateEvent]) -> None:
        """Called when updates were read from the device, with all of them; nothing is read for its sake."""

    def on_validation(self, ctx: TrainContext) -> None:
        """Called after each validation, with the monitor's decision in `ctx.decision`; inside an epoch too."""

    def on_epoch_end(self, ctx: TrainContext) -> None:
        """Called after validation, monitor and schedules, before the epoch is committed."""

    def on_train_end(self, ctx: TrainContext) -> None:
        """Called once, in reverse order, also after a failure."""

    def checkpoint_transforms(self) -> Sequence[NNCheckpointTransform]:
        """Return what `on_train_end` did to the network's topology, for whoever rebuilds the model from LAST."""
        return ()

    def component_spec(self) -> ComponentSpec | None:
        """Return what the state is called; None for a callback without state."""
        if self.component_name is None:
            return None
        numbered = not self.component_named
        return ComponentSpec(self.component_name, self.component_version, self.component_required, numbered)

    def component_state(self) -> dict[str, Any]:
        """Return the state a generation keeps: numbers, text, arrays, and lists and dicts of them."""
        return {}

    def load_component_state(self, state: Mapping[str, Any], *, version: int = 1) -> None:
        """Continue from `component_state()` stored as `version`; raise ValueError when it does not fit."""


class FunctionCallback(Callback):
    """A plain function, called with the history rows at each epoch's end."""

    distributed = "writer"

    def __init__(self, function: Callable[[Sequence[Mapping[str, Any]]], Any]) -> None:
        self.function = function

    def on_epoch_end(self, ctx: TrainContext) -> None:
        self.function(ctx.records)


class CallbackList:
    """Calls the hooks in the lifecycle's order and keeps who has begun.

    Attributes:
        read_back: returns all records of a run with a journal, for the callbacks that ask for them; else None.
    """

    def __init__(self, callbacks: Iterable[Callback | Callable[..., Any]]) -> None:
        self.callbacks = [self._adapt(callback) for callback in callbacks]
        self.watching = [each for each in self.callbacks if overrides(each, "on_optimizer_update")]
        """Who acts on every single update."""
        self.reading = [each for each in self.callbacks if overrides(each, "on_updates")]
        """Who is told of updates when they are read."""
        self.watched_each = bool(self.watching)
        """Somebody acts on every single update, here or on the process that writes."""
        self.begun: list[Callback] = []
        self.read_back: ReadBack | None = None
        self.transforms: list[NNCheckpointTransform] = []
        """What the ends of callbacks did to the network, in that order."""

    def leave_to_writer(self) -> None:
        """Keep only those that run on every process; this process is not the one that writes the run."""
        for kept in (self.callbacks, self.watching, self.reading):
            kept[:] = [each for each in kept if each.distributed == "all"]

    def check_history(self) -> None:
        """Check that no callback needs what a run with a journal does not have; see `check_access`."""
        check_access(self.callbacks, FunctionCallback)

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
        self.transforms = []
        for callback in self.callbacks:
            callback.on_train_begin(ctx)
            self.begun.append(callback)

    def epoch_begin(self, ctx: TrainContext) -> None:
        """Before an epoch, in order."""
        for callback in self.callbacks:
            callback.on_epoch_begin(ctx)

    def optimizer_update(self, ctx: TrainContext, event: UpdateEvent) -> None:
        """After a committed update, in order."""
        for callback in self.watching:
            callback.on_optimizer_update(ctx, event)

    def updates(self, ctx: TrainContext, events: Sequence[UpdateEvent]) -> None:
        """After updates were read, in order."""
        for callback in self.reading:
            callback.on_updates(ctx, events)

    def validation(self, ctx: TrainContext) -> None:
        """After a validation, in order."""
        for callback in self.callbacks:
            callback.on_validation(ctx)

    def epoch_end(self, ctx: TrainContext) -> None:
        """After an epoch, in order."""
        with Sight(ctx, self.read_back) as sight:
            for callback in self.callbacks:
                sight.show(callback)
                callback.on_epoch_end(ctx)

    def train_end(self, ctx: TrainContext, error: BaseException | None) -> None:
        """End in reverse, trying every one.

        With a training error each cleanup error becomes a RuntimeWarning, since the training error is the one to
        raise; without, the first cleanup error is raised and the others are warnings. An interrupt in one of them (a
        second Ctrl-C) does not keep the others from ending either.
        """
        failures: list[BaseException] = []
        ctx.error = error
        with Sight(ctx, self.read_back, ending=True) as sight:
            for callback in reversed(self.begun):
                try:
                    sight.show(callback)
                    callback.on_train_end(ctx)
                    if error is None:
                        self.transforms += _checked(callback)
                except BaseException as failure:  # every cleanup is tried, whatever the one before did
                    failures.append(failure)
        self.begun = []
        raise_first(failures, error, "on_train_end failed")


def raise_first(failures: Sequence[BaseException], error: BaseException | None, where: str) -> None:
    """Raise the first of the cleanups' errors, an interrupt before others; what is not raised becomes a warning.

    With an `error` on its way already none is raised.
    """
    first = next((each for each in failures if not isinstance(each, Exception)), failures[0] if failures else None)
    for failure in failures:
        if error is not None or failure is not first:
            warnings.warn(f"{where}: {type(failure).__name__}: {failure}", RuntimeWarning, stacklevel=3)
    if error is None and first is not None:
        raise first


def overrides(callback: Callback, name: str) -> bool:
    """Return whether a callback has a method of its own in place of Callback's, in its class or set on it."""
    return getattr(getattr(callback, name), "__func__", None) is not getattr(Callback, name)


def _checked(callback: Callback) -> list[NNCheckpointTransform]:
    """What a callback says it did to the network."""
    found = list(callback.checkpoint_transforms())
    for each in found:
        if not isinstance(each, NNCheckpointTransform):
            told = f"{type(callback).__name__}.checkpoint_transforms() returned {type(each).__name__}"
            raise TypeError(f"{told}; return NNCheckpointTransform objects")
    return found
