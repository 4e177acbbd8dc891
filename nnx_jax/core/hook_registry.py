"""HookRegistry: the hooks of one run, checked when they are registered; update hooks share one orchestrator."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from nnx_jax.core.errors import HookError, HookTypeError
from nnx_jax.core.hooks import (
    TracedHook,
    TrainingUpdateHook,
    TrainingUpdateOrchestrator,
    check_distinct,
    describe,
    owns,
    runs_on,
)
from nnx_jax.core.stages import REPLACEMENT_STAGES, TrainingStage

NEEDS = ("gradients", "params", "predictions")
"""What a host hook sees only if it names it in `needs`."""

_OF_MICROBATCH = ("gradients", "predictions")
"""What of `NEEDS` is there only while a microbatch is."""


class HookRegistry:
    """An ordered list of hooks: host hooks, traced hooks, and one orchestrator for all update hooks.

    The orchestrator stands where the first update hook stood. Registering is all or nothing: what cannot be registered
    leaves the list as it was.

    Args:
        hooks: registered together, in order.
        owner: handed to every hook's `on_register`.

    Raises:
        HookError: (a ValueError) a wrong frequency, a hook registered twice, a second owner of a replacement stage, a
            second orchestrator, `stage=` with an update hook.
        HookTypeError: (a TypeError) something that is no hook, a hook without a stage, or one of another enumeration.
    """

    def __init__(self, hooks: Iterable[Any] = (), *, owner: Any = None) -> None:
        self.owner = owner
        self._entries: tuple[Any, ...] = ()
        self._explicit: tuple[TrainingUpdateOrchestrator, ...] = ()
        if not isinstance(hooks, Iterable):
            raise HookTypeError(f"hooks is a list of hooks, got {describe(hooks)}")
        self._register([(hook, None) for hook in hooks])

    def add(self, hook: Any, stage: TrainingStage | None = None) -> None:
        """Register one hook more; `stage` becomes the stage of a host or traced hook.

        Raises:
            HookError, HookTypeError: see the class; nothing is changed.
        """
        self._register([(hook, stage)])

    # -- what is registered ------------------------------------------------------------------------------------

    @property
    def entries(self) -> tuple[Any, ...]:
        """Everything in order, the orchestrator in its place."""
        return self._entries

    @property
    def update(self) -> TrainingUpdateOrchestrator | None:
        """The one orchestrator; None without update hooks."""
        return next((entry for entry in self._entries if isinstance(entry, TrainingUpdateOrchestrator)), None)

    @property
    def traced(self) -> tuple[TracedHook, ...]:
        """The traced hooks, in order."""
        return tuple(entry for entry in self._entries if isinstance(entry, TracedHook))

    @property
    def host(self) -> tuple[Any, ...]:
        """The hooks that only watch, in order."""
        kinds = TracedHook | TrainingUpdateOrchestrator
        return tuple(entry for entry in self._entries if not isinstance(entry, kinds))

    def __iter__(self) -> Iterator[Any]:
        """Every single hook: the orchestrator's own, in the order they are called, in its place."""
        for entry in self._entries:
            if isinstance(entry, TrainingUpdateOrchestrator):
                yield from entry.iter_hooks()
            else:
                yield entry

    def __len__(self) -> int:
        return len(self._entries)

    def identity(self, known: Iterable[Any] = ()) -> list[dict[str, Any]]:
        """What a run's id must know of hooks that are no configuration: classes, their text and plain settings.

        Hooks that only watch change no number and are left out, and so is what `known` names already.
        """
        told = {id(hook) for hook in known}
        found = []
        for hook in self:
            takes_part = isinstance(hook, TrainingUpdateHook | TracedHook) and not getattr(hook, "observes", False)
            if takes_part and id(hook) not in told:
                found.append({**describe_hook(hook), "text": _text_digest(hook)})
        return found

    # -- registering -------------------------------------------------------------------------------------------

    def _register(self, more: list[tuple[Any, TrainingStage | None]]) -> None:
        with contextlib.ExitStack() as undo:
            for hook, stage in more:
                _check_one(hook, stage, undo)
            entries, explicit = self._merged([hook for hook, _ in more])
            _check_owners(entries)
            for hook in (each for added, _ in more for each in _members(added)):
                announce = getattr(hook, "on_register", None)
                if announce is not None:
                    announce(self.owner)
            undo.pop_all()
        self._entries, self._explicit = entries, explicit

    def _merged(self, more: list[Any]) -> tuple[tuple[Any, ...], tuple[TrainingUpdateOrchestrator, ...]]:
        """The list with the new hooks in it; every update hook in the orchestrator, at the place of the first."""
        both = [*self._entries, *more]
        updates = [hook for hook in both if isinstance(hook, TrainingUpdateHook | TrainingUpdateOrchestrator)]
        explicit = (*self._explicit, *(hook for hook in more if isinstance(hook, TrainingUpdateOrchestrator)))
        if len(explicit) > 1:
            raise HookError(
                "there is one orchestrator already; compose them into one with +: TrainingUpdateOrchestrator(a) + "
                "TrainingUpdateOrchestrator(b)"
            )
        check_distinct([hook for hook in both if not isinstance(hook, TrainingUpdateHook | TrainingUpdateOrchestrator)])
        if not updates:
            return tuple(both), explicit
        alone = updates[0] if len(updates) == 1 else None
        one = alone if isinstance(alone, TrainingUpdateOrchestrator) else TrainingUpdateOrchestrator(*updates)
        place = next(at for at, hook in enumerate(both) if hook is updates[0])
        kept = {id(hook) for hook in updates}
        entries = [one if at == place else hook for at, hook in enumerate(both) if at == place or id(hook) not in kept]
        return tuple(entries), explicit


def class_path(hook: Any) -> str:
    """Module and name of a hook's class."""
    return f"{type(hook).__module__}.{type(hook).__qualname__}"


def describe_hook(hook: Any) -> dict[str, Any]:
    """Class and settings of a hook as plain values: its configuration, or else its public attributes."""
    if hasattr(type(hook), "model_fields") and callable(getattr(hook, "state", None)):
        return {"class": class_path(hook), **hook.state()}
    plain = int | float | str | bool | tuple | None
    held = {
        name: repr(value) if isinstance(value, plain) else type(value).__name__
        for name, value in sorted(vars(hook).items())
        if not name.startswith("_")
    }
    return {"class": class_path(hook), "settings": held}


def _text_digest(hook: Any) -> str:
    try:
        text = inspect.getsource(type(hook))
    except (OSError, TypeError):
        text = ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_one(hook: Any, stage: TrainingStage | None, undo: contextlib.ExitStack) -> None:
    """Check a hook by itself, and give it the stage it is registered at."""
    name = type(hook).__name__
    if isinstance(hook, type):
        raise HookTypeError(f"hook {hook.__name__} is a class; register an object: {hook.__name__}()")
    if not callable(hook):
        raise HookTypeError(f"a hook is called as hook(ctx, stage); got {describe(hook)}")
    if isinstance(hook, TrainingUpdateHook | TrainingUpdateOrchestrator):
        if stage is not None:
            raise HookError(
                f"{name} takes part in the update at stages of its own; register it without stage= (got {stage!r})"
            )
    else:
        if stage is not None:
            _check_stage(name, stage)
            if _fixes_stage(hook):
                raise HookError(f"{name} decides itself at which stage it is called; register it without stage=")
            before = getattr(hook, "stage", None)
            object.__setattr__(hook, "stage", stage)
            undo.callback(object.__setattr__, hook, "stage", before)
        _check_place(hook, name)
    for each in _members(hook):
        announce = getattr(each, "on_register", None)
        if announce is not None and not callable(announce):
            kind = type(each).__name__
            raise HookTypeError(f"{kind}.on_register is {describe(announce)}; make it a method, or leave it out")


def _members(hook: Any) -> tuple[Any, ...]:
    """The hook itself, or the hooks of an orchestrator."""
    return hook.registered if isinstance(hook, TrainingUpdateOrchestrator) else (hook,)


def _check_place(hook: Any, name: str) -> None:
    """A host or traced hook stands at stages of this enumeration, and watches or owns, not both by accident."""
    stage = getattr(hook, "stage", None)
    chooses = hasattr(hook, "_runs_on_stage")
    if isinstance(hook, TracedHook):
        chooses = type(hook)._runs_on_stage is not TracedHook._runs_on_stage
    if stage is not None:
        _check_stage(name, stage)
    elif not chooses:
        raise HookTypeError(f"{name} has no stage assigned; set `stage`, or give it a method _runs_on_stage(stage)")
    claims = bool(getattr(hook, "claims_replacement", False))
    if isinstance(hook, TracedHook):
        if stage is not None and not stage.traced:
            raise HookTypeError(
                f"{name} is compiled into the step, and {stage.name} is not part of it; choose a stage between "
                "BEFORE_BATCH and AFTER_OPTIMIZER_STEP, or a host hook"
            )
    else:
        _check_calls(hook, name)
    if stage in REPLACEMENT_STAGES and not claims and not chooses:
        which = stage.name.removeprefix("DO_")
        raise HookError(
            f"{name} stands at {stage.name}, which one owner does in place of the step; to watch, use BEFORE_{which} "
            f"or AFTER_{which}; to own it, set claims_replacement = True in a TracedHook"
        )


def _check_calls(hook: Any, name: str) -> None:
    """How often a host hook is called, and what it wants to see."""
    for setting in ("frequency", "cadence_steps", "cadence_epochs"):
        value = getattr(hook, setting, None)
        if value is None and setting != "frequency":
            continue
        value = getattr(hook, setting, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise HookError(f"{name}.{setting} must be a positive integer, got {value!r}")
    needs = getattr(hook, "needs", ())
    unknown = [needs] if isinstance(needs, str) else [need for need in needs if need not in NEEDS]
    if unknown:
        raise HookError(f"{name}.needs names {unknown[0]!r}; it is a tuple of some of {', '.join(NEEDS)}")
    inside = [need for need in needs if need in _OF_MICROBATCH]
    if inside and getattr(hook, "cadence_steps", None):
        raise HookError(
            f"{name}.needs names {inside[0]!r}, which only a hook that is called at every microbatch can see; take "
            "cadence_steps out, and use frequency"
        )
    inner = next((stage for stage in TrainingStage if stage.of_batch and runs_on(hook, stage)), None)
    if inner is not None and getattr(hook, "cadence_epochs", None):
        raise HookError(
            f"{name}.cadence_epochs counts finished epochs, so at {inner.name} it would never be called; choose "
            "AFTER_EPOCH, or cadence_steps"
        )


def _fixes_stage(hook: Any) -> bool:
    """The class says at which stage its hooks are called, in a way that an object cannot change."""
    fixed = inspect.getattr_static(type(hook), "stage", None)
    return isinstance(fixed, property) or "stage" in getattr(type(hook), "__class_vars__", ())


def _check_stage(name: str, stage: Any) -> None:
    if isinstance(stage, TrainingStage):
        return
    found = f"{type(stage).__name__}.{stage.name}" if isinstance(stage, Enum) else describe(stage)
    raise HookTypeError(f"{name} stands at {found}; a stage is a member of TrainingStage")


def _check_owners(entries: Iterable[Any]) -> None:
    """At most one owner of each replacement stage; the orchestrator owns both."""
    listed = list(entries)
    for stage in REPLACEMENT_STAGES:
        owners = [hook for hook in listed if owns(hook, stage)]
        names = " and ".join(type(hook).__name__ for hook in owners)
        if len(owners) > 1:
            raise HookError(f"at most one hook may claim {stage.name}; {names} do")
        if owners and any(isinstance(hook, TrainingUpdateOrchestrator) for hook in listed):
            raise HookError(
                f"at most one hook may claim {stage.name}; {names} does, and so does the orchestrator of the update "
                "hooks: make it a TrainingUpdateHook, or leave the update hooks out"
            )
        if owners and not isinstance(owners[0], TracedHook | TrainingUpdateOrchestrator):
            raise HookTypeError(
                f"{names} claims {stage.name}, which is compiled into the step; derive it from TracedHook"
            )
