"""What a hook is: the protocols, the update hooks that take part in the step, the one orchestrator that orders them.

Nothing here knows a framework: update hooks reach arrays only through the context they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from nnx_jax.core.errors import HookError, HookTypeError
from nnx_jax.core.stages import REPLACEMENT_STAGES, UPDATE_STAGES, TrainingStage


@runtime_checkable
class Hook(Protocol):
    """A host hook: watches, never takes part.

    It is called at `stage`, or wherever `_runs_on_stage(stage)` says True when it has that method, each time the count
    of updates is a multiple of `frequency`. At a traced stage it is called after the step with lazy values.

    Optional: `needs = ("gradients", "params", "predictions")` for values the step must hand out; `on_register(owner)`,
    called once; `__enter__`/`__exit__`, around a run, or `close()`; `observes = True`, for a hook that changes no
    number.
    """

    frequency: int
    stage: Any

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Watch `stage`."""
        ...


@runtime_checkable
class CheckpointableHook(Protocol):
    """A hook whose state belongs into checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """State to store: numbers, text and arrays."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state."""
        ...


class TracedHook:
    """A hook compiled into the step: its Python runs once, while the step is traced.

    It is called at the traced stages for which `_runs_on_stage` is True, by default its `stage`. It may replace
    `ctx.batch` at BEFORE_FORWARD, `ctx.predictions` at AFTER_FORWARD, `ctx.loss` up to BEFORE_BACKWARD, and
    `ctx.grads` at AFTER_BACKWARD and BEFORE_OPTIMIZER_STEP. What it remembers from step to step is a slot: `init_state`
    makes it, `ctx.state` reads and replaces it.

    Attributes:
        claims_replacement: it does DO_BACKWARD or DO_OPTIMIZER_STEP itself, in place of the step.
    """

    stage: Any = None
    claims_replacement: ClassVar[bool] = False

    def init_state(self, params: Mapping[str, Any]) -> Any:
        """First state: a tree of arrays, () for none."""
        return ()

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage is self.stage

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Look at, or change, what the stage has."""


class TrainingUpdateHook:
    """A policy that takes part in the update; lower `priority` first, ties in the order of registration.

    It is called at BEFORE_BATCH, DO_BACKWARD, DO_OPTIMIZER_STEP and AFTER_OPTIMIZER_STEP, always, also after another
    hook's veto, which `will_skip` tells. It returns `(proceed, loss)`:

    * BEFORE_BATCH: `proceed` False keeps what is accumulated instead of starting from zero;
    * DO_BACKWARD: `loss` is what is differentiated;
    * DO_OPTIMIZER_STEP: `proceed` False vetoes the update; `ctx.grads` may be replaced for this update;
    * AFTER_OPTIMIZER_STEP: both are ignored.

    `proceed` is a bool, or a bool array of the step; so is `will_skip`. Founding document 3, "Stage constraints".

    Attributes:
        priority: 10 accumulation, 20 mixed precision, 25 what is not finite, 30 clipping, 40 spike skipping, 50
            averages and the rest.
        exclusive_key: at most one hook of a key takes part.
        screens: it is asked by `keeps_microbatch` about every microbatch.
    """

    priority: int = 50
    exclusive_key: ClassVar[str | None] = None

    @property
    def screens(self) -> bool:
        """Whether the hook looks at microbatches one by one."""
        return False

    def keeps_microbatch(self, ctx: Any) -> Any:
        """After the backward pass: False leaves the microbatch out of its window; see `ctx.micro_grads`, `ctx.loss`."""
        return True

    def init_state(self, params: Mapping[str, Any]) -> Any:
        """First state of the hook: a tree of arrays, () for none; `ctx.state` reads and replaces it."""
        return ()

    def loss_scale(self, slot: Any) -> Any:
        """What the hook multiplies every loss with, given its state, for `ctx.unscaled_grads`; None if it does not."""
        return None

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: Any) -> tuple[Any, Any]:
        """Take part in `stage`."""
        return True, ctx.loss


class Slot(Protocol):
    """The place of one hook's state in the training state, as the host reads and writes it."""

    def read(self) -> Any:
        """The state now, as host arrays."""
        ...

    def write(self, state: Any) -> None:
        """Put a state of the same shapes."""
        ...


class StatefulUpdateHook(TrainingUpdateHook):
    """An update hook with state: `init_state` makes it, `ctx.state` reads and replaces it, checkpoints hold it."""

    _slot: Slot | None = None
    _pending: Any = None
    _last_written: Any = None

    def bind(self, slot: Slot) -> None:
        """Called by the run once the training state exists; hands over a state that was loaded since the last run."""
        pending = self._pending
        if self._last_written is not None and not _same(self._held(), self._last_written):
            pending = None  # it was loaded during a run, which went on from it
        if pending is not None:
            slot.write(self._merged(slot.read(), pending))
        self._keep(slot, None, None)

    def state_dict(self) -> dict[str, Any]:
        """The slot as `{"state": tree}`; empty before the first run."""
        if self._slot is not None:
            return {"state": self._slot.read()}
        return {} if self._pending is None else {"state": self._pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a stored slot back: into the run there is, and into the next if this one does not go on."""
        if "state" in state:
            self._load(state["state"])

    def _load(self, state: Any) -> None:
        """Write into the slot there is, and remember for the next one."""
        slot, held, written = self._slot, self._held(), None
        if slot is not None and held is not None:
            slot.write(self._merged(held, state))
            written = slot.read()
        self._keep(slot, state, written)

    def _held(self) -> Any:
        """The slot's state; None without a slot, or where a run that failed took its arrays with it."""
        try:
            return None if self._slot is None else self._slot.read()
        except RuntimeError:
            return None

    def _merged(self, slot: Any, state: Any) -> Any:
        """The slot with a loaded state in it."""
        return state

    def _keep(self, slot: Slot | None, pending: Any, written: Any) -> None:
        for name, value in (("_slot", slot), ("_pending", pending), ("_last_written", written)):
            object.__setattr__(self, name, value)


def _same(a: Any, b: Any) -> bool:
    """Whether two states hold the same values, NaN among them."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class TrainingUpdateOrchestrator:
    """Runs the update hooks of one strategy in one order; it alone zeroes, differentiates, and steps.

    Made automatically for bare update hooks. `a + b` composes hooks and orchestrators into a flat one.

    Raises:
        HookTypeError: an argument is no update hook or orchestrator.
        HookError: the same hook twice, or two hooks of one exclusive key.
    """

    frequency = 1
    stage = None

    def __init__(self, *hooks: TrainingUpdateHook | TrainingUpdateOrchestrator) -> None:
        flat: list[TrainingUpdateHook] = []
        for place, hook in enumerate(hooks):
            if isinstance(hook, TrainingUpdateOrchestrator):
                flat.extend(hook.registered)
            elif isinstance(hook, TrainingUpdateHook):
                flat.append(hook)
            else:
                raise HookTypeError(
                    f"argument {place} of TrainingUpdateOrchestrator is {describe(hook)}; give update hooks, each as "
                    "an argument of its own"
                )
        check_distinct(flat)
        _check_exclusive(flat)
        self.registered = tuple(flat)
        self._ordered = tuple(sorted(flat, key=lambda hook: hook.priority))
        self.optimizer_step_skipped: bool | None = None

    def iter_hooks(self) -> Iterator[TrainingUpdateHook]:
        """The hooks in the order they are called."""
        return iter(self._ordered)

    def __add__(self, other: Any) -> TrainingUpdateOrchestrator:
        if not isinstance(other, TrainingUpdateHook | TrainingUpdateOrchestrator):
            return NotImplemented
        return TrainingUpdateOrchestrator(self, other)

    def __radd__(self, other: Any) -> TrainingUpdateOrchestrator:
        if not isinstance(other, TrainingUpdateHook):
            return NotImplemented
        return TrainingUpdateOrchestrator(other, self)

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in UPDATE_STAGES

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Host side: nothing to do, the step calls the hooks while it is traced."""

    def __enter__(self) -> TrainingUpdateOrchestrator:
        entered: list[Any] = []
        try:
            for hook in self._ordered:
                if hasattr(hook, "__enter__"):
                    hook.__enter__()  # type: ignore[attr-defined]
                entered.append(hook)
        except BaseException as error:
            leave(entered, error)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        leave(self._ordered, error)

    def close(self) -> None:
        """Close every hook, last first."""
        leave(self._ordered, None)


def _compose(self: TrainingUpdateHook, other: Any) -> TrainingUpdateOrchestrator:
    if not isinstance(other, TrainingUpdateHook):
        return NotImplemented
    return TrainingUpdateOrchestrator(self, other)


TrainingUpdateHook.__add__ = _compose  # type: ignore[attr-defined]


def leave(hooks: Any, error: BaseException | None) -> None:
    """Exit or close hooks, last first, whatever the others do.

    Raises the first failure; where `error` is on its way already, every failure becomes a note on it.
    """
    failures: list[BaseException] = []
    kind, trace = (type(error), error.__traceback__) if error is not None else (None, None)
    for hook in reversed(list(hooks)):
        try:
            if hasattr(hook, "__exit__"):
                hook.__exit__(kind, error, trace)
            elif hasattr(hook, "close"):
                hook.close()
        except BaseException as failure:
            failures.append(failure)
    first = failures.pop(0) if failures and error is None else error
    if first is None:
        return
    for failure in failures:
        first.add_note(f"then also: {type(failure).__name__}: {failure}")
    if first is not error:
        raise first


def runs_on(hook: Any, stage: TrainingStage) -> bool:
    """Whether a hook is called at a stage: `_runs_on_stage` alone decides where there is one."""
    if hasattr(hook, "_runs_on_stage"):
        return bool(hook._runs_on_stage(stage))
    return getattr(hook, "stage", None) is stage


def owns(hook: Any, stage: TrainingStage) -> bool:
    """Whether a hook does a replacement stage itself; watching one is never owning it."""
    claims = bool(getattr(hook, "claims_replacement", False))
    return stage in REPLACEMENT_STAGES and claims and runs_on(hook, stage)


def describe(value: Any) -> str:
    """A value as errors print it: its class, and itself where that is short."""
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 40 else type(value).__name__


def check_distinct(hooks: list[Any]) -> None:
    """Raise HookError when one hook object is registered twice."""
    seen: set[int] = set()
    for hook in hooks:
        if id(hook) in seen:
            raise HookError(f"duplicate: this {type(hook).__name__} is registered already; make a second object")
        seen.add(id(hook))


def _check_exclusive(hooks: list[TrainingUpdateHook]) -> None:
    holders: dict[str, TrainingUpdateHook] = {}
    for hook in hooks:
        key = hook.exclusive_key
        if key is None:
            continue
        if key in holders:
            names = sorted({type(hook).__name__, type(holders[key]).__name__})
            raise HookError(f"at most one {' / '.join(names)} takes part in an update; remove one")
        holders[key] = hook
