"""HookEvents: calls host hooks at their stages, enters and leaves all hooks of a run, and keeps their host state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from nnx_jax.core.errors import ComponentRestoreError
from nnx_jax.core.hook_registry import HookRegistry, class_path
from nnx_jax.core.hooks import CheckpointableHook, StatefulUpdateHook, runs_on
from nnx_jax.core.stages import TrainingStage
from nnx_jax.loop.components import plain, revived
from nnx_jax.loop.hook_context import HookContext

STAGES = tuple(TrainingStage)
TAPS = ("gradients", "predictions")
"""What `needs` may name and the step must then hand out."""


class HookEvents:
    """The hooks of one run as the loop calls them.

    A host hook may set `cadence_steps = n` (called at its stage when an update lands on a multiple of n) or
    `cadence_epochs = n` (after every n-th epoch); neither needs calls in between. Without one it is called whenever the
    count of updates is a multiple of its `frequency`.

    Used as a context: hooks are entered in their order and left in reverse, each whatever the others do; nested uses
    enter once.
    """

    def __init__(self, registry: HookRegistry, *, workflow: Any = None, world: int = 1, global_rank: int = 0) -> None:
        self.registry, self.workflow, self.world, self.global_rank = registry, workflow, world, global_rank
        self.hooks = registry.host
        self.cadences = tuple(sorted({hook.cadence_steps for hook in self.hooks if _cadence(hook, "steps")}))
        self.observe: Callable[[TrainingStage, Any], None] = lambda stage, ctx: None
        """Called at every stage of a microbatch by an executor that runs hooks in place."""
        self._at = {s: tuple(h for h in self.hooks if not _timed(h, s) and runs_on(h, s)) for s in STAGES}
        self._entered: list[Any] = []
        self._depth = 0

    # -- who watches what --------------------------------------------------------------------------------------

    @property
    def per_batch(self) -> bool:
        """Somebody watches microbatches, so the run goes one by one."""
        return any(self._at[stage] for stage in STAGES if stage.of_batch)

    @property
    def taps(self) -> frozenset[str]:
        """What the step must hand out after each microbatch."""
        if not self.per_batch:
            return frozenset()
        named = {name for hook in self.hooks for name in getattr(hook, "needs", ())}
        return frozenset({"loss", *named.intersection(TAPS)})

    def watching(self, *stages: TrainingStage) -> list[Any]:
        """Hooks called at one of these stages, each once, in order."""
        ids = {id(hook) for stage in stages for hook in self._at[stage]}
        return [hook for hook in self.hooks if id(hook) in ids]

    # -- calling -----------------------------------------------------------------------------------------------

    def fire(self, stage: TrainingStage, ctx: HookContext, due: Callable[[Any], bool]) -> None:
        """Call the hooks of a stage for which `due(hook)`."""
        for hook in self._at[stage]:
            if due(hook):
                hook(ctx.at(stage, hook), stage)

    def fire_timed(
        self, kind: str, stages: tuple[TrainingStage, ...], ctx: HookContext, due: Callable[[int], bool]
    ) -> None:
        """Call the hooks with a cadence in `kind` ("steps" or "epochs") that stand at one of these stages."""
        for hook in self.hooks:
            every = _cadence(hook, kind)
            for stage in stages:
                if every and due(every) and runs_on(hook, stage):
                    hook(ctx.at(stage, hook), stage)

    def setup(self, models: Mapping[str, Any]) -> None:
        """SETUP: the networks are there, nothing was built from them yet."""
        for hook in self.registry:
            prepare = getattr(hook, "prepare_strategy", None)
            if callable(prepare):
                prepare(self.workflow)
        ctx = self.context(_Setup(models, self.world))
        self.fire(TrainingStage.SETUP, ctx, lambda hook: True)
        ctx.close()

    def context(self, view: Any, **known: Any) -> HookContext:
        """A context of one event, or of one microbatch."""
        return HookContext(view, workflow=self.workflow, global_rank=self.global_rank, **known)

    # -- entering and leaving ----------------------------------------------------------------------------------

    def __enter__(self) -> HookEvents:
        self._depth += 1
        if self._depth > 1:
            return self
        try:
            for hook in self.registry.entries:
                if hasattr(hook, "__enter__"):
                    hook.__enter__()
                self._entered.append(hook)
        except BaseException as error:
            self._depth = 0
            self._leave(error)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._leave(error)

    def take_over(self, old: HookEvents) -> None:
        """Go on where `old` stood with fewer hooks: what it entered stays entered, what is new is entered now."""
        self._depth, self._entered = old._depth, old._entered
        old._depth, old._entered = 0, []
        held = {id(hook) for entry in self._entered for hook in _single(entry)}
        for hook in (hook for entry in self.registry.entries for hook in _single(entry)) if self._depth else ():
            if id(hook) not in held:
                if hasattr(hook, "__enter__"):
                    hook.__enter__()
                self._entered.append(hook)

    def _leave(self, error: BaseException | None) -> None:
        """Leave what was entered, last first; a cleanup's error never hides the one that ended the run."""
        failures: list[BaseException] = []
        entered, self._entered = self._entered, []
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        for hook in reversed(entered):
            try:
                if hasattr(hook, "__exit__"):
                    hook.__exit__(kind, error, trace)
                elif callable(getattr(hook, "close", None)):
                    hook.close()
            except BaseException as failure:
                failures.append(failure)
        for failure in failures if error is not None else failures[1:]:
            message = f"leaving a hook failed: {type(failure).__name__}: {failure}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        if error is None and failures:
            raise failures[0]

    # -- host state --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State of the hooks that keep some on the host, as components of a generation, by class and occurrence."""
        return {
            name: {"version": 1, "required": False, "state": plain(hook.state_dict(), f"hook {class_path(hook)}")}
            for name, hook in self._checkpointable().items()
        }

    def load(self, stored: Mapping[str, Any]) -> None:
        """Give every hook its stored state back; a hook without one, and a state without a hook, are left alone.

        Raises:
            ComponentRestoreError: a hook refused its state.
        """
        problems = []
        for name, hook in self._checkpointable().items():
            if name not in stored:
                continue
            try:
                hook.load_state_dict(revived(stored[name]["state"]))
            except (ValueError, KeyError, TypeError) as problem:
                problems.append(f"{name}: {problem}")
        if problems:
            raise ComponentRestoreError(problems)

    def _checkpointable(self) -> dict[str, Any]:
        named: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for hook in self.registry:
            if isinstance(hook, CheckpointableHook) and not isinstance(hook, StatefulUpdateHook):
                path = class_path(hook)
                counts[path] = counts.get(path, 0) + 1
                named[f"hook {path}" + (f".{counts[path]}" if counts[path] > 1 else "")] = hook
        return named


class _Setup:
    """The view of SETUP: the models, and nothing else yet."""

    def __init__(self, models: Mapping[str, Any], world: int) -> None:
        self.models, self.world = dict(models), world

    def step_count(self) -> int:
        return 0

    def look(self, name: str) -> Any:
        return self.models if name == "models" else None

    def request(self, what: str, tag: str | None = None) -> None:
        """Nothing to commit, nothing to stop."""


def _cadence(hook: Any, kind: str) -> int | None:
    return getattr(hook, f"cadence_{kind}", None)


def _timed(hook: Any, stage: TrainingStage) -> bool:
    """The hook is called at this stage by its cadence, and not whenever the stage comes."""
    if stage.of_batch:
        return bool(_cadence(hook, "steps") or _cadence(hook, "epochs"))
    return bool(_cadence(hook, "epochs")) and stage is TrainingStage.AFTER_EPOCH


def _single(entry: Any) -> tuple[Any, ...]:
    """The hooks of an entry: those of an orchestrator, which is a new object with every hook it takes in."""
    return tuple(entry.iter_hooks()) if hasattr(entry, "iter_hooks") else (entry,)
