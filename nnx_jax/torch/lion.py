"""Optimizers that torch does not have: Lion and SignSGD, as torch optimizers with optax's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from nnx_jax.torch import foreach


class _Simple(torch.optim.Optimizer):
    """An optimizer whose step is one function of a group's tensors."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update by the gradients that are there."""
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                values = [value for value in group["params"] if value.grad is not None]
                if values:
                    self._move(group, values, [value.grad for value in values])
        return loss

    def _move(self, group: dict[str, Any], values: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        raise TypeError(f"{type(self).__name__} has no step of its own")


class Lion(_Simple):
    """Lion (Chen et al. 2023, arXiv:2302.06675): the sign of a mix of momentum and gradient, decoupled decay.

    Args:
        params: tensors or groups of them.
        lr: the rate.
        betas: shares of the momentum in the update's direction and in the next momentum.
        weight_decay: share of the weights taken away per update, times the rate.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _move(self, group: dict[str, Any], values: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        (first, second), decay = group["betas"], group["weight_decay"]
        for value in values:
            if "exp_avg" not in self.state[value]:
                self.state[value]["exp_avg"] = torch.zeros_like(value)
        moments = [self.state[value]["exp_avg"] for value in values]
        moves = foreach.mul(moments, first)
        foreach.add_(moves, grads, alpha=1.0 - first)
        foreach.sign_(moves)
        if decay:
            foreach.add_(moves, values, alpha=decay)
        foreach.mul_(moments, second)
        foreach.add_(moments, grads, alpha=1.0 - second)
        foreach.add_(values, moves, alpha=-group["lr"])


class SignSGD(_Simple):
    """The sign of the gradient times the rate (Bernstein et al. 2018, arXiv:1802.04434)."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    def _move(self, group: dict[str, Any], values: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        foreach.add_(values, foreach.sign(grads), alpha=-group["lr"])
