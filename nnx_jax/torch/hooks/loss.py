"""ChangedLoss: from the sums of a microbatch to the values that are differentiated, as hooks left its loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.torch.hooks.calls import TorchCalls
from nnx_jax.torch.hooks.context import TorchContext, check_loss
from nnx_jax.torch.hooks.window import HookWindow
from nnx_jax.torch.window import Plan


class ChangedLoss:
    """Shows hooks one loss, this microbatch's mean, and lets them change it; see `step.forward.HookedForward`.

    Nobody changed it: the plain sums are differentiated, bit for bit as without hooks. Else, for terms that share a
    denominator d, the changed loss times d. Where terms have denominators of their own, T(L, parameters) is split into
    s L + R with s = dT/dL: every term's sum is differentiated s times, and the rest R goes with the first term.
    """

    def __init__(self, plan: Plan, calls: TorchCalls) -> None:
        self.plan, self.calls = plan, calls

    def factors(self, den: torch.Tensor) -> torch.Tensor:
        """weight / denominator of each term, [terms]; the weight alone if additive, 0 if nothing was valid."""
        weights = den.new_tensor(self.plan.weights)
        additive = torch.tensor(self.plan.additive, device=den.device)
        divided = torch.where(den > 0, weights / torch.where(den > 0, den, 1.0), 0.0)
        return torch.where(additive, weights, divided)

    def values(
        self, ctx: TorchContext, num: list[torch.Tensor], den: torch.Tensor, terms: Sequence[LossTerm],
        window: HookWindow,
    ) -> tuple[list[torch.Tensor], int]:  # fmt: skip
        """AFTER_LOSS to DO_BACKWARD.

        Returns:
            What to differentiate, one scalar a group, and the power of two it was divided by.
        """
        den = den.to(window.device)
        loss = (torch.stack(num) * self.factors(den)).sum()
        self._show(ctx, loss, den, terms)
        changed = self._chain(ctx)
        if changed is loss:
            return window.scalars(num, den), 1
        plan = self.plan
        if len(plan.groups) == 1:
            if plan.fused or all(plan.additive):
                return [changed], 1
            times = _reference(ctx.batch, self.calls.plan.world)
            return [changed * (den[0] / (plan.weights[0] or 1.0) / times)], times
        slope = self._slope(changed, loss)
        first = plan.groups[0][0]
        weight = 1.0 if plan.additive[first] else den[first] / (plan.weights[first] or 1.0)
        times = _reference(ctx.batch, self.calls.plan.world)
        values = [value * slope for value in window.scalars(num, den)]
        values[0] = values[0] + (changed - slope * loss) * weight
        return [value / times for value in values], times

    def _show(self, ctx: TorchContext, loss: torch.Tensor, den: torch.Tensor, terms: Sequence[LossTerm]) -> None:
        """AFTER_LOSS and BEFORE_BACKWARD: the loss as traced hooks leave it."""
        ctx.enter(
            loss=loss,
            raw_loss=loss,
            weight=den,
            losses={
                "total_loss": loss,
                "per_component_unweighted": {term.name: _value(term) for term in terms},
                "per_component_weight": {t.name: t.weight if t.scale is None else t.weight * t.scale for t in terms},
            },
        )
        for stage in (Stage.AFTER_LOSS, Stage.BEFORE_BACKWARD):
            self.calls.at(ctx, stage)

    def _chain(self, ctx: TorchContext) -> torch.Tensor:
        """DO_BACKWARD: the loss as every hook in turn left it."""
        self.calls.watch(ctx, Stage.DO_BACKWARD)
        for hook in self.calls.plan.update:
            ctx.enter(loss=check_loss(self.calls.ask(ctx, hook, Stage.DO_BACKWARD, False)[1], hook))
        return ctx.loss

    def _slope(self, changed: torch.Tensor, loss: torch.Tensor) -> torch.Tensor | float:
        if not (changed.requires_grad and loss.requires_grad):
            return 0.0
        (slope,) = torch.autograd.grad(changed, loss, retain_graph=True, allow_unused=True)
        return 0.0 if slope is None else slope


def _value(term: LossTerm) -> Any:
    """A term's mean over the microbatch, without its derivative; 0 where nothing was valid."""
    top = torch.as_tensor(term.numerator).detach().float()
    if term.denominator is None:
        return top
    below = torch.as_tensor(term.denominator, device=top.device).detach().float()
    return torch.where(below > 0, top / torch.where(below > 0, below, 1.0), 0.0)


def _reference(batch: Any, world: int) -> int:
    """A power of two near the number of targets of all processes, as many as here in each: keeps the sums of a 16-bit
    backward pass in its range."""
    count = max(1, batch.get("y", batch["mask"]).numel()) * world
    return 2 ** max(0, round(math.log2(count)))
