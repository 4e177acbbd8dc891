"""Mixup over torch modules: mixtures of two rows, each owed its share of the loss; see `objectives.paradigms.mixup`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.objectives.objective import Objective, ObjectiveResult
from nnx_jax.objectives.paradigms.mixup import mixed_terms
from nnx_jax.objectives.paradigms.rows import column, positive
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.targets import widened


def mixup_objective(alpha: float = 0.2, loss: Any = None, *, nonfinite: str = "fail") -> Objective:
    """Mixup (Zhang et al. 2018, arXiv:1710.09412) with the model's loss, or another.

    What it computes, draws and records is said in `objectives.paradigms.mixup.mixup_objective`; the draws are torch's,
    so other ones. Padded rows are partners of nobody.

    Args:
        alpha: of the Beta distribution, above 0; the larger, the more even the mixtures.
        loss: a loss in place of the model's, see `torch.losses.build_loss`.

    Raises:
        ConfigError: (a ValueError) alpha out of range.
    """
    return _Mixup(alpha, loss, nonfinite)


class _Mixup(Objective):
    scores, labels = "loss", True

    def __init__(self, alpha: float, loss: Any, nonfinite: str) -> None:
        super().__init__(nonfinite=nonfinite)
        self.alpha = positive(alpha, "alpha", "mixup_objective")
        self.loss: Any = None if loss is None else build_loss(loss)

    def __call__(self, ctx: Any) -> ObjectiveResult:
        if self.loss is None:
            raise ConfigError("mixup_objective() takes the model's loss when it is trained; give one to call it")
        if not ctx.train:
            outputs = ctx.apply()
            return ObjectiveResult(self.loss(outputs, ctx.batch), outputs=outputs)
        share = self.share(ctx.rng)
        partner = partners(ctx.rng, ctx.mask > 0)
        other = {name: values[partner] for name, values in ctx.batch.items()}
        inputs: Any = column(ctx.batch, "x", "mixup_objective")
        outputs = ctx.apply(mixed(inputs, other["x"], share))
        terms = mixed_terms(self.loss(outputs, ctx.batch), self.loss(outputs, other), share)  # type: ignore[arg-type]
        return ObjectiveResult(terms, record={"mixup_share": share}, outputs=outputs)

    def share(self, rng: torch.Generator) -> float:
        """The larger share of a mixture: drawn on the host, where a number costs no wait for the device."""
        drawn = float(np.random.default_rng(rng.initial_seed() % 2**64).beta(self.alpha, self.alpha))
        return max(drawn, 1.0 - drawn)

    def bind(self, loss: Any) -> Objective:
        return self if self.loss is not None else _Mixup(self.alpha, loss, self.nonfinite)


def partners(rng: torch.Generator, real: Tensor) -> Tensor:
    """Return a random permutation of the real rows, int64 [B]; every other row is its own partner."""
    draws = torch.rand(len(real), generator=rng, device=real.device)
    shuffled = torch.where(real, draws, torch.inf).argsort()  # the real rows, in random order, before all others
    return torch.where(real, shuffled[real.cumsum(0) - 1], torch.arange(len(real), device=real.device))


def mixed(x: Tensor, other: Tensor, share: float) -> Tensor:
    """`share * x + (1 - share) * other`, in the type of x; bytes (images) are rounded.

    Raises:
        DataError: whole numbers that are no bytes, or bools: between two of them there is nothing.
    """
    both = share * widened(x) + (1.0 - share) * widened(other)
    if x.dtype == torch.uint8:
        return both.round().to(x.dtype)
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise DataError(f"mixup_objective mixes real numbers or bytes, but column 'x' is {kind}; give floats")
    return both.to(x.dtype)
