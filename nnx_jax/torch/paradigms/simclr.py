"""SimCLR over torch modules: two views of a row, nearer to each other than to all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nnx_jax.core.errors import ModelError
from nnx_jax.objectives.objective import Objective, ObjectiveResult
from nnx_jax.objectives.paradigms.rows import column, positive
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.torch.targets import item_weight, weighted_sum, widened

Augment = Callable[[torch.Generator, Tensor], Tensor]

_NEVER = -1e30  # finite, so that a row without any other has a gradient


def simclr_objective(augment: Augment, temperature: float = 0.5, *, nonfinite: str = "fail") -> Objective:
    """SimCLR's contrastive loss, NT-Xent (Chen et al. 2020, arXiv:2002.05709).

    What it computes and records is said in `objectives.paradigms.simclr.simclr_objective`. Unlike there, `augment` is
    given all rows of the batch at once.

    Args:
        augment: (torch.Generator, rows [B, ...]) -> a random view of every row.
        temperature: T, above 0.

    Raises:
        ConfigError: (a ValueError) a temperature out of range.
        TypeError: `augment` cannot be called.
    """
    return _SimCLR(augment, temperature, nonfinite)


class _SimCLR(Objective):
    def __init__(self, augment: Augment, temperature: float, nonfinite: str) -> None:
        super().__init__(nonfinite=nonfinite)
        if not callable(augment):
            told = "augment is a function (generator, rows) -> rows"
            raise TypeError(f"simclr_objective: {told}, got {type(augment).__name__}")
        self.augment, self.temperature = augment, positive(temperature, "temperature", "simclr_objective")

    def __call__(self, ctx: Any) -> ObjectiveResult:
        x: Any = column(ctx.batch, "x", "simclr_objective")
        first, second = (self._embedded(ctx, self.augment(ctx.rng, x)) for _ in range(2))
        weight = item_weight(ctx.batch, widened(first.detach())[:, 0])
        losses, found = nt_xent(first, second, weight > 0, self.temperature)
        views = torch.cat([weight, weight])
        count = views.sum()
        term = LossTerm("nt_xent", weighted_sum(losses, views), count)
        return ObjectiveResult(term, record={"pair_accuracy": (weighted_sum(found, views), count)})

    def _embedded(self, ctx: Any, view: Tensor) -> Tensor:
        outputs = ctx.apply(view)
        if getattr(outputs, "ndim", 0) != 2 or outputs.shape[:1] != view.shape[:1]:
            shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ModelError(f"simclr_objective needs outputs [B, D] for x {list(view.shape)}, the model gave {shape}")
        return outputs


def nt_xent(first: Tensor, second: Tensor, real: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (loss, 1 where the partner is the nearest) of every view, float32 [2 B]; first views before second.

    Args:
        first, second: outputs [B, D] for the two views of every row.
        real: bool [B]; of other rows neither view is compared with, and their own values mean nothing.
    """
    kept = torch.cat([real, real])
    # Outputs of rows that do not count may be anything: 0 times infinity in the backward pass would spoil the others.
    views = torch.where(kept[:, None], widened(torch.cat([first, second])), 0.0)
    unit = views * views.square().sum(-1, keepdim=True).clamp(min=1e-24).rsqrt()
    with torch.autocast(views.device.type, enabled=False):
        likeness = unit @ unit.T / temperature
    same = torch.eye(len(views), dtype=torch.bool, device=views.device)
    partner = same.roll(len(first), 1)
    logits = torch.where(kept[None, :] & ~same, likeness, _NEVER)
    losses = logits.logsumexp(-1) - torch.where(partner, likeness, 0.0).sum(-1)
    return losses, (logits.argmax(-1) == partner.to(torch.uint8).argmax(-1)).to(losses.dtype)
