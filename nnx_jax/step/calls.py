"""Calling a hook: its own slot in `ctx.state`, its stage in the trace, and errors that name it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import HookTypeError, StepError, TraceBoundaryError, TraceStateError
from nnx_jax.core.hooks import TrainingUpdateHook, describe, owns, runs_on
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.step import gates
from nnx_jax.step.context import StepContext
from nnx_jax.step.plan import HookPlan


class HookCalls:
    """Calls the hooks of one plan."""

    def __init__(self, plan: HookPlan) -> None:
        self.plan = plan
        self._order = list(plan.keys.values())

    def known(self, flag: gates.Flag) -> gates.Flag:
        """The flag as a Python bool where values are concrete."""
        return bool(flag) if self.plan.concrete else flag

    def fold(self, ctx: StepContext, stage: Stage) -> tuple[gates.Flag, Any]:
        """Ask every update hook whether to proceed; see `gates.fold`."""
        steps = stage is Stage.DO_OPTIMIZER_STEP

        def call(hook: Any, skip: Any) -> tuple[Any, Any]:
            before = ctx.__dict__.get("grads")
            go, loss = self.ask(ctx, hook, stage, self.known(skip))
            if steps and ctx.grads is not before and self.scale(ctx, hook) is not None:
                ctx.enter(loss_scale=None, unscaled=ctx.grads)
            return (bool(gates.check_flag(go, hook, stage)) if self.plan.concrete else go), loss

        if steps:
            self.watch(ctx, stage)
        found = gates.fold(self.plan.update, stage, call)
        if stage is Stage.BEFORE_BATCH:
            ctx.__dict__.pop("loss", None)
        return found

    def scale(self, ctx: StepContext, hook: TrainingUpdateHook) -> Any:
        """What the hook multiplies the loss with, None if it does not."""
        return hook.loss_scale(ctx.slot(self.plan.key(hook)))

    def scales(self, ctx: StepContext) -> list[tuple[int, Any]]:
        """(index, scale) of every update hook that multiplies the loss."""
        found = [(index, self.scale(ctx, hook)) for index, hook in enumerate(self.plan.update)]
        return [(index, scale) for index, scale in found if scale is not None]

    def screen(self, ctx: StepContext) -> gates.Flag:
        """Whether every hook that looks at microbatches one by one lets this one into its window."""
        keep: gates.Flag = True
        for hook in self.plan.update:
            if hook.screens:
                answer = self.call_one(ctx, hook, Stage.AFTER_BACKWARD, function=hook.keeps_microbatch)
                keep = gates.and_(keep, gates.check_flag(answer, hook, Stage.AFTER_BACKWARD))
        return self.known(keep)

    def watch(self, ctx: StepContext, stage: Stage) -> None:
        if self.plan.observer is not None:
            ctx.enter(_stage=stage.name)
            self.plan.observer(stage, ctx)

    def ask(self, ctx: StepContext, hook: TrainingUpdateHook, stage: Stage, will_skip: gates.Flag) -> tuple[Any, Any]:
        if "loss" not in ctx.__dict__:
            ctx.enter(loss=None)
        answer = self.call_one(ctx, hook, stage, will_skip)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise HookTypeError(
                f"{type(hook).__name__} returned {describe(answer)} at {stage.name}; return (proceed, loss)"
            )
        return answer

    def at(self, ctx: StepContext, stage: Stage) -> None:
        self.watch(ctx, stage)
        for hook in self.plan.traced:
            if runs_on(hook, stage) and not owns(hook, stage):
                self.call_one(ctx, hook, stage)

    def call_one(self, ctx: StepContext, hook: Any, stage: Stage, *will_skip: Any, function: Any = None) -> Any:
        """Call one hook with its own slot in `ctx.state`; what it left there is checked and kept."""
        name, slots = self.plan.key(hook), ctx.__dict__["slots"]
        order = self._order.index(name)
        ctx.enter(_stage=stage.name, state=slots.get(name, ()), hook=hook, hook_index=order, owns=owns(hook, stage))
        before, stop = _snapshot(hook), ctx.stop
        try:
            with jax.named_scope(stage.name):
                answer = hook(ctx, stage, *will_skip) if function is None else function(ctx)
        except jax.errors.TracerBoolConversionError as error:
            raise TraceBoundaryError(
                f"{type(hook).__name__} at {stage.name} asks a value of the step in a Python `if`, but it is not known "
                "while the step is traced; use ctx.where(flag, a, b), or run with dispatch 'staged' or 'eager'"
            ) from error
        if not self.plan.concrete and _snapshot(hook) != before:
            changed = sorted(k for k, v in _snapshot(hook).items() if before.get(k, _snapshot) != v)
            raise TraceStateError(
                f"{type(hook).__name__} changed its attribute {', '.join(changed)} at {stage.name}; the step is traced "
                "once and not called once a step, so this would count traces; keep it in ctx.state (init_state makes "
                "its first value), or run with dispatch 'eager'"
            )
        if ctx.stop is not stop:
            said = ctx.__dict__.get("stopper", jnp.int32(0))
            ctx.enter(stopper=jnp.where(stop, said, self.plan.update.index(hook)))
        if name in slots:
            slots[name] = _same_slot(name, ctx.state, slots[name])
        elif jax.tree.leaves(ctx.state):
            raise StepError(f"{type(hook).__name__} has no slot; give its first state in init_state")
        return answer


def _same_slot(name: str, new: Any, old: Any) -> Any:
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise StepError(f"{name} changed the structure of its state; keep the keys of init_state")

    def leaf(path: Any, fresh: Any, held: Any) -> Any:
        fresh = jnp.asarray(fresh)
        if fresh.shape != held.shape or not _fits(fresh.dtype, held.dtype):
            raise StepError(
                f"{name} changed {jax.tree_util.keystr(path)} of its state from {held.dtype}{list(held.shape)} to "
                f"{fresh.dtype}{list(fresh.shape)}"
            )
        return fresh.astype(held.dtype)

    return jax.tree_util.tree_map_with_path(leaf, new, old)


def _fits(new: Any, old: Any) -> bool:
    return new == old or (jnp.issubdtype(new, jnp.integer) or new == jnp.bool_) == jnp.issubdtype(old, jnp.integer)


def _snapshot(hook: Any) -> dict[str, Any]:
    """The hook's attributes, containers copied; a change of any is a change of state."""
    found = {}
    for name, value in getattr(hook, "__dict__", {}).items():
        if isinstance(value, dict | list | set):
            found[name] = (type(value), str(value))
        elif isinstance(value, np.ndarray):
            found[name] = value.tobytes()
        else:
            found[name] = value if isinstance(value, int | float | str | bool | type(None)) else id(value)
    return found
