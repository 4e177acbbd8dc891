"""Callbacks in the (loop, state, metrics) form, told of updates by one callback of the loop's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, Protocol

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.loop import callbacks as own
from nnx_jax.loop.components import ComponentSpec
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.updates import UpdateEvent
from nnx_jax.spmd.world import ALONE, World

HOOKS = ("on_train_begin", "on_step_end", "on_epoch_end", "on_eval_end", "on_train_end")
EVALUATION = "eval/"
"""What the names of an evaluation's values begin with where they stand among those of the training."""


class Callback(Protocol):
    """All that a callback of a TrainingLoop may have; one with some of these methods is a callback too.

    That is why this Protocol is not runtime-checkable: `isinstance(x, Callback)` raises TypeError. The methods are
    looked up by name. `loop` is the TrainingLoop, `state` a StepState; `metrics` is a dict of the callback's own.

    A callback that continues after a resume has `component_state() -> dict` (numbers, text, arrays, lists and dicts of
    them) and `load_component_state(state)`, which is called after `on_train_begin`. Among several processes it says
    where it runs by a class attribute `distributed`: "all" or "writer".
    """

    def on_train_begin(self, loop: Any, state: StepState) -> None:
        """Called once, in the order of the callbacks, before the first update of this session."""
        ...

    def on_step_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
        """Called after every committed update; having it makes the host read after every one."""
        ...

    def on_epoch_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
        """Called after every `steps_per_epoch` updates, never where the loop has none."""
        ...

    def on_eval_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
        """Called after an evaluation, with its values: "val_loss", "val_<metric>"."""
        ...

    def on_train_end(self, loop: Any, state: StepState) -> None:
        """Called once, in reverse order, also after a failure: `state.error` says which."""
        ...


class StepState:
    """Where a run stands, as its callbacks see it.

    Attributes:
        step: committed updates so far.
        epoch: times that `steps_per_epoch` updates were made; 0 where the loop has no such number.
        error: what ended the training, in `on_train_end` after a failure; else None.
        stop_reason: the first reason that was given to `request_stop`, or None.
        writes: this process is the one that writes.
    """

    def __init__(self, make_model: Callable[[TrainContext], Any] | None = None, writes: bool = True) -> None:
        self.step, self.epoch, self.writes = 0, 0, writes
        self.error: BaseException | None = None
        self.stop_reason: str | None = None
        self._metrics: Mapping[str, float] = MappingProxyType({})
        self._make_model = make_model
        self._context: TrainContext | None = None
        self._model: Any = None

    @property
    def metrics(self) -> Mapping[str, float]:
        """Values of the last update that was read, by name; it cannot be written to."""
        return self._metrics

    @property
    def model(self) -> Any:
        """The model as an operator with the weights of this moment, made when it is asked for and kept till the next.

        None where the loop has no operator of its own to show.
        """
        if self._model is None and self._make_model is not None and self._context is not None:
            self._model = self._make_model(self._context)
        return self._model

    def request_stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after this update, as soon as what is due at it was done; the first reason is kept."""
        if not isinstance(reason, str) or not reason:
            raise ConfigError(f"request_stop takes the reason as text, got {reason!r}")
        self.stop_reason = self.stop_reason or reason
        if self._context is not None:
            self._context.should_stop = True

    def move(self, ctx: TrainContext, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Stand at an update; a model of an earlier moment is let go."""
        self._context, self._model, self.step = ctx, None, step
        if metrics is not None:
            self._metrics = MappingProxyType(dict(metrics))


class StepCallbacks(own.Callback):
    """Tells callbacks of the (loop, state, metrics) form, and a metric writer, what happens in a run.

    Give it to the loop as one of its callbacks: `StepCallbacks(loop, callbacks, metric_writer, log_every, make_model)`.
    Within one update the order is: the writer, every `on_step_end`, every `on_epoch_end`; then, when one is due, the
    evaluation with every `on_eval_end`, then the commit, then the end if somebody asked for it. Callbacks are called in
    their order, `on_train_end` in reverse. Metrics are "loss", the differentiated scalar, and every loss term by name.

    A writer also gets "lr", the rate that the update used, where the run knows it.

    The device is read after every single update only when some callback has `on_step_end`, or an `on_epoch_end` falls
    between two reads. Otherwise the values come with the reads that are made anyway.

    Args:
        loop: handed to every callback.
        callbacks: objects with at least one of `HOOKS`.
        metric_writer: a MetricWriter; gets the training values at multiples of `log_every` and of the last update, and
            those of evaluations under names that begin with "eval/". Closed once, at the end of the run.
        log_every: updates between two records of the writer.
        make_model: makes the operator that `state.model` shows from the loop's context, whose `sync()` brings the
            weights up to date and returns the trained module. It is called once for every moment somebody asks at. An
            operator that callbacks may keep has to hold a copy: the module goes on being trained.
        steps_per_epoch: updates between two `on_epoch_end`; None for none.
        read_every: the loop reads the device at multiples of this many updates at the latest (its own
            `log_every_n_steps`), or None when that is not known.
        rates: the run knows its rates; it does not where a transformation of optax is given, which has its own.
        world: the processes of the run. One that does not write calls no writer, and no callback that says
            `distributed = "writer"`.

    Attributes:
        state: the StepState; after the run its `model` is the very object that the last callback saw.

    Raises:
        ConfigError: a class in place of an instance, a callback without any hook, one of another kind, one that does
            not say where it runs among several processes; a cadence that is no whole number from 1.
        TypeError: a metric writer without `write` or `close`.
    """

    distributed = "all"

    def __init__(
        self,
        loop: Any,
        callbacks: Iterable[Any] = (),
        metric_writer: Any = None,
        log_every: int = 100,
        make_model: Callable[[TrainContext], Any] | None = None,
        *,
        steps_per_epoch: int | None = None,
        read_every: int | None = None,
        rates: bool = True,
        world: World = ALONE,
    ) -> None:
        _check_cadences(log_every=log_every, steps_per_epoch=steps_per_epoch, read_every=read_every)
        if metric_writer is not None and not all(callable(getattr(metric_writer, n, None)) for n in ("write", "close")):
            raise TypeError(f"metric_writer is {type(metric_writer).__name__}; a MetricWriter has write and close")
        given = [_checked(callback, world) for callback in callbacks]
        self.callbacks = [each for each in given if world.writes or getattr(each, "distributed", "") != "writer"]
        self.loop = loop
        self.writer: Any = metric_writer if world.writes else None
        self.log_every, self.steps_per_epoch = log_every, steps_per_epoch
        self.state = StepState(make_model, world.writes)
        self._begun: list[Any] = []
        self._written, self._rate, self._rates = -1, math.nan, rates
        self._stateful = _named([c for c in given if _is_stateful(c)])
        self.component_name = "step_callbacks" if self._stateful else None
        epochs = steps_per_epoch is not None and any(_has(c, "on_epoch_end") for c in given)
        exact = read_every is not None and steps_per_epoch is not None and steps_per_epoch % read_every == 0
        if any(_has(each, "on_step_end") for each in given) or (epochs and not exact):
            self.on_optimizer_update = self._one_update  # set here, so that nothing is read where nobody asks for it
        elif given or metric_writer is not None:
            self.on_updates = self._several_updates

    # -- a run -------------------------------------------------------------------------------------------------

    def on_train_begin(self, ctx: TrainContext) -> None:
        state, self._begun, self._written = self.state, [], ctx.step
        state.error = state.stop_reason = None
        state.move(ctx, ctx.step, {})
        state.epoch = self._epochs(ctx.step)
        try:
            for callback in self.callbacks:
                _tell(callback, "on_train_begin", self.loop, state)
                self._begun.append(callback)
        except BaseException as error:  # the loop does not end what did not begin, so those that did are ended here
            self._end(error)
            raise

    def on_validation(self, ctx: TrainContext) -> None:
        values = {name: value for name, value in ctx.values.items() if name.startswith("val_")}
        if not values:
            return  # there is nothing to evaluate on
        self._stand(ctx)
        if self.writer is not None:
            self.writer.write(ctx.step, {f"{EVALUATION}{name}": value for name, value in values.items()})
        self._tell_all("on_eval_end", values)

    def on_train_end(self, ctx: TrainContext) -> None:
        self._stand(ctx)
        self._end(ctx.error)

    # -- updates -----------------------------------------------------------------------------------------------

    def _one_update(self, ctx: TrainContext, event: UpdateEvent) -> None:
        """An update, before anything later is trained; of several optimizers that step together the first tells."""
        if ctx.step != self.state.step:
            self._updated(ctx, ctx.step, event)

    def _several_updates(self, ctx: TrainContext, events: Sequence[UpdateEvent]) -> None:
        """Updates that were read together; no callback of single updates is there."""
        for _, found in groupby(events, key=lambda event: (event.epoch_idx, event.batch_idx)):
            event = list(found)[-1]
            self._updated(ctx, event.update_idx, event)

    def _updated(self, ctx: TrainContext, step: int, event: UpdateEvent) -> None:
        metrics, self._rate = {**event.losses, "loss": event.loss}, event.lr
        self.state.move(ctx, step, metrics)
        if self.writer is not None and step % self.log_every == 0:
            self._write()
        self._tell_all("on_step_end", metrics)
        self.state.epoch = self._epochs(step)
        if self.steps_per_epoch is not None and step % self.steps_per_epoch == 0:
            self._tell_all("on_epoch_end", metrics)

    def _stand(self, ctx: TrainContext) -> None:
        """Stand at the context's update, which was told of already unless nobody is told of updates."""
        if ctx.step != self.state.step:
            self.state.move(ctx, ctx.step)
            self.state.epoch = self._epochs(ctx.step)

    def _epochs(self, step: int) -> int:
        return 0 if self.steps_per_epoch is None else step // self.steps_per_epoch

    def _tell_all(self, hook: str, metrics: Mapping[str, float]) -> None:
        for callback in self.callbacks:
            _tell(callback, hook, self.loop, self.state, dict(metrics))  # a copy each: what one writes is its own

    def _write(self) -> None:
        rate = {"lr": self._rate} if self._rates else {}
        self.writer.write(self.state.step, {**self.state.metrics, **rate})
        self._written = self.state.step

    # -- the end -----------------------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> None:
        """End in reverse whatever happens, and close the writer; a training error is never hidden."""
        self.state.error = error
        last, close = (self._write_last, self.writer.close) if self.writer is not None else (lambda: None, lambda: None)
        tells = [lambda each=each: _tell(each, "on_train_end", self.loop, self.state) for each in reversed(self._begun)]
        self._begun = []
        failures: list[BaseException] = []
        for end in (last, *tells, close):
            try:
                end()
            except BaseException as failure:  # every cleanup is tried, whatever the one before did
                failures.append(failure)
        own.raise_first(failures, error, "on_train_end failed")

    def _write_last(self) -> None:
        """The last update has a record even where it is on no multiple."""
        if self.state.metrics and self.state.step > self._written:
            self._write()

    # -- state -------------------------------------------------------------------------------------------------

    def component_spec(self) -> ComponentSpec | None:
        return ComponentSpec("step_callbacks", 1, required=False, numbered=True) if self._stateful else None

    def component_state(self) -> dict[str, Any]:
        return {name: callback.component_state() for name, callback in self._stateful.items()}

    def load_component_state(self, state: Mapping[str, Any], *, version: int = 1) -> None:
        for name, callback in self._stateful.items():
            if name in state:
                callback.load_component_state(state[name])


def _check_cadences(**given: int | None) -> None:
    for name, value in given.items():
        optional = name != "log_every" and value is None
        if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} is {value!r}; give a whole number of updates from 1")


def _checked(callback: Any, world: World) -> Any:
    if isinstance(callback, type):
        raise ConfigError(f"callback {callback.__name__} is a class; pass an instance: {callback.__name__}()")
    if isinstance(callback, own.Callback):
        told = f"{type(callback).__name__} is a callback of the (ctx) form"
        raise ConfigError(f"{told}; give it to the training itself, beside StepCallbacks")
    if not any(_has(callback, hook) for hook in HOOKS):
        named = [name for name in dir(callback) if name.startswith("on_")]
        hint = f"; it has {named[0]}{nearest(named[0], HOOKS)}" if named else ""
        raise ConfigError(f"{type(callback).__name__} is no callback; it needs one of {', '.join(HOOKS)}{hint}")
    if not world.alone and getattr(callback, "distributed", None) not in ("all", "writer"):
        raise ConfigError(
            f"{type(callback).__name__} does not say where it runs among {world.size} processes; set "
            "`distributed = 'all'` (it writes nothing) or 'writer' in its class"
        )
    return callback


def _has(callback: Any, hook: str) -> bool:
    return callable(getattr(callback, hook, None))


def _tell(callback: Any, hook: str, *arguments: Any) -> None:
    if _has(callback, hook):
        getattr(callback, hook)(*arguments)


def _is_stateful(callback: Any) -> bool:
    return _has(callback, "component_state") and _has(callback, "load_component_state")


def _named(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Callbacks by class, numbered where there are several of one."""
    found: dict[str, Any] = {}
    for callback in callbacks:
        name, count = type(callback).__name__, 2
        while name in found:
            name, count = f"{type(callback).__name__}.{count}", count + 1
        found[name] = callback
    return found
