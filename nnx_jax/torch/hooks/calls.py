"""Calling a hook under torch: its own slot in `ctx.state`, the fold of vetoes, and errors that name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnx_jax.core.errors import HookError, HookTypeError, StepError
from nnx_jax.core.hooks import TrainingUpdateHook, describe, owns, runs_on
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.torch.hooks.context import Shown, TorchContext, check_flag
from nnx_jax.torch.hooks.plan import TorchHooks
from nnx_jax.torch.hooks.trees import as_tensor, leaves, structure, tree_map


class TorchCalls:
    """Calls the hooks of one engine.

    Args:
        plan: the hooks.
        params: the trained parameters; between microbatches and while hooks run none has a `.grad`.
        agree: what all processes make of a decision; a veto of one is a veto of all.
    """

    def __init__(
        self, plan: TorchHooks, params: list[torch.nn.Parameter], agree: Callable[[bool], bool] = lambda go: go
    ) -> None:
        self.plan, self.params, self.agree = plan, params, agree
        self._order = list(plan.keys.values())
        self._strict = {id(hook) for hook in plan.own}
        self.calling: Any = None
        """The hook that is being called."""

    def fold(self, ctx: TorchContext, stage: Stage) -> tuple[Any, int]:
        """Ask every update hook whether to proceed; any False vetoes, and the hooks after it see `will_skip`.

        Returns:
            Whether to proceed (at BEFORE_BATCH the accumulation's own answer, where nobody else said no), and the
            number of the first hook that vetoed, -1 for none.
        """
        steps = stage is Stage.DO_OPTIMIZER_STEP
        if steps:
            self.watch(ctx, stage)
        proceed, first = True, -1
        for index, hook in enumerate(self.plan.update):
            before = ctx.__dict__.get("grads")
            go = check_flag(self.ask(ctx, hook, stage, not proceed)[0], hook, stage.name)
            new = steps and ctx.replaced("grads") and ctx.grads is not before
            if new and self.scale(ctx, hook) is not None:
                ctx.enter(loss_scale=None, unscaled=ctx.grads)
            if id(hook) in self._strict:
                go = self.agree(go)
            if proceed and not go:
                first = index
            proceed = proceed and go
        if stage is Stage.BEFORE_BATCH:
            ctx.__dict__.pop("loss", None)
        return proceed, first

    def scale(self, ctx: TorchContext, hook: TrainingUpdateHook) -> Any:
        """What the hook multiplies the loss with, None if it does not."""
        return hook.loss_scale(ctx.slot(self.plan.key(hook)))

    def scales(self, ctx: TorchContext) -> list[tuple[int, Any]]:
        """(number, scale) of every update hook that multiplies the loss."""
        found = [(index, self.scale(ctx, hook)) for index, hook in enumerate(self.plan.update)]
        return [(index, scale) for index, scale in found if scale is not None]

    def screen(self, ctx: TorchContext) -> bool:
        """Whether every hook that looks at microbatches one by one lets this one into its window."""
        keep = True
        for hook in self.plan.update:
            if hook.screens:
                answer = self.call_one(ctx, hook, Stage.AFTER_BACKWARD, function=hook.keeps_microbatch)
                keep = check_flag(answer, hook, Stage.AFTER_BACKWARD.name) and keep
        return self.agree(keep)

    def watch(self, ctx: TorchContext, stage: Stage) -> None:
        """Hooks that watch, at the very place of their stage."""
        if self.plan.observer is not None:
            ctx.enter(_stage=stage.name)
            shown: Any = Shown(ctx)
            with torch.no_grad():
                self.plan.observer(stage, shown)

    def ask(self, ctx: TorchContext, hook: TrainingUpdateHook, stage: Stage, will_skip: bool) -> tuple[Any, Any]:
        """One update hook's answer (proceed, loss).

        Raises:
            HookTypeError: it is no such pair.
        """
        if "loss" not in ctx.__dict__:
            ctx.enter(loss=None)
        answer = self.call_one(ctx, hook, stage, will_skip)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise HookTypeError(
                f"{type(hook).__name__} returned {describe(answer)} at {stage.name}; return (proceed, loss)"
            )
        return answer

    def at(self, ctx: TorchContext, stage: Stage) -> None:
        """Watchers, then the traced hooks of a stage."""
        self.watch(ctx, stage)
        for hook in self.plan.traced:
            if runs_on(hook, stage) and not owns(hook, stage):
                self.call_one(ctx, hook, stage)

    def call_one(self, ctx: TorchContext, hook: Any, stage: Stage, *will_skip: bool, function: Any = None) -> Any:
        """Call one hook with its own slot in `ctx.state`; what it left there is checked and kept.

        Raises:
            HookError: it differentiated the loss itself.
            StepError: it changed the structure, a shape or the kind of its state.
        """
        name, slots = self.plan.key(hook), ctx.__dict__["slots"]
        place = {"hook": hook, "hook_index": self._order.index(name), "owns": owns(hook, stage)}
        ctx.enter(_stage=stage.name, state=slots.get(name, ()), **place)
        stop, outer, self.calling = ctx.stop, self.calling, hook
        try:
            answer = hook(ctx, stage, *will_skip) if function is None else function(ctx)
        finally:
            self.calling = outer
        if id(hook) in self._strict and any(value.grad is not None for value in self.params):
            raise HookError(
                f"{type(hook).__name__} called backward() at {stage.name}; the run does that once, after DO_BACKWARD: "
                "return the loss that is to be differentiated there"
            )
        if ctx.stop is not stop and not bool(stop):
            ctx.enter(stopper=hook)
        if name in slots:
            if ctx.state is not slots[name]:
                live = {t.data_ptr() for t in (*ctx.params.values(), *ctx.model_state.values())}
                slots[name] = _same_slot(name, ctx.state, slots[name], live)
        elif ctx.state != () and leaves(ctx.state):
            raise StepError(f"{type(hook).__name__} has no slot; give its first state in init_state")
        return answer


def _same_slot(name: str, new: Any, old: Any, live: set[int]) -> Any:
    """What a hook left in its slot, as it was before in structure, shapes and formats.

    What lies where the model's own tensors do (`live`) is copied: those change in place.
    """
    if structure(new) != structure(old):
        raise StepError(f"{name} changed the structure of its state; keep the keys of init_state")

    def kept(leaf: Any, held: torch.Tensor) -> torch.Tensor:
        if leaf is held:
            return held
        found = as_tensor(leaf, held.device)
        if found.shape != held.shape or not _fits(found.dtype, held.dtype):
            raise StepError(f"{name} changed a part of its state from {_form(held)} to {_form(found)}; keep its form")
        found = found.clone() if found.data_ptr() in live else found
        return found if found.dtype == held.dtype else found.to(held.dtype)

    return tree_map(kept, new, old)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _fits(new: torch.dtype, old: torch.dtype) -> bool:
    return new == old or new.is_floating_point == old.is_floating_point
