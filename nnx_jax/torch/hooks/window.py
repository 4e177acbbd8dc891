"""HookWindow: the open window where hooks take part; each microbatch's gradients are apart until they are let in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nnx_jax.torch import foreach
from nnx_jax.torch.window import _NARROW, Window

Grads = list[list[torch.Tensor | None]]
"""One list in the parameters' order for each group of terms; None where nothing came."""


class HookWindow(Window):
    """A window whose sums are in buffers of their own, never in `.grad`; the numbers are those of `Window`.

    Attributes:
        whole: one buffer holds the gradient, so it is divided when it is applied and not before.
        den: denominators so far, [terms].
        kept: microbatches that were let in, where hooks look at them one by one.
        joined: hooks decide microbatch by microbatch what is kept, so it has no length of its own.
        pending: (joined) its last microbatch made no update.
    """

    joined = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.whole, self.plain = self.plain, False
        self.clear()

    def clear(self) -> None:
        """An empty window."""
        super().clear()
        self.den = torch.zeros(len(self.plan.terms), device=self.device, dtype=self.dtype)
        self.kept, self.pending = 0, False

    # -- a microbatch ------------------------------------------------------------------------------------------

    def differentiate(self, scalars: Sequence[torch.Tensor], times: int = 1) -> Grads:
        """Gradients of one microbatch, multiplied by a power of two that the scalars were divided by."""
        found: Grads = []
        for group, scalar in enumerate(scalars):
            if scalar.requires_grad:
                scalar.backward(retain_graph=group + 1 < len(scalars))
            found.append([self._taken(value, times) for value in self.params])
        return found

    def _taken(self, value: torch.nn.Parameter, times: int) -> torch.Tensor | None:
        grad, value.grad = value.grad, None
        if grad is None:
            return None
        grad = grad.float() if grad.dtype in _NARROW else grad
        return grad if times == 1 else grad.mul_(times)

    def scalars(self, num: Sequence[torch.Tensor], den: torch.Tensor) -> list[torch.Tensor]:
        """The values to differentiate where no hook changed the loss, one a group."""
        return self._scalars(num, den)

    def add(self, micro: Grads, den: torch.Tensor) -> None:
        """Let a microbatch in."""
        for held, grads in zip(self.held, micro, strict=True):
            for place, grad in enumerate(grads):
                own = held[place]
                if grad is not None:
                    held[place] = grad if own is None else own.add_(grad)
        self.den = self.den + den

    def noted(self, sums: torch.Tensor | None, *, scaled: bool) -> None:
        """Keep what a microbatch measured, and whether the sums are finite; of scaled ones no square is made."""
        if not scaled:
            self.note(sums)
            return
        if sums is None:
            sums = torch.zeros(self.n_sums, device=self.device, dtype=self.dtype)
        mark = torch.where(all_finite(self._present(), self.device), 0.0, torch.nan).to(self.dtype)
        self.rows.append(torch.cat([sums, mark.reshape(1)]))

    def settle(self) -> None:
        """Go on with a window that hooks keep: what it measured so far is one row."""
        if len(self.read) > 1:
            self.read = [[*(sum(column) for column in zip(*(row[:-1] for row in self.read), strict=True)), 0.0]]
            self.told = len(self.read)

    # -- its gradient ------------------------------------------------------------------------------------------

    def divided(self, grads: Grads, factors: torch.Tensor) -> list[torch.Tensor]:
        """A gradient from sums: every group divided, then added; `factors` [terms], see `Plan.factors`."""
        total: list[torch.Tensor] | None = None
        with torch.no_grad():
            for group, each in zip(self.plan.groups, grads, strict=True):
                filled = self._filled(each)
                if not self.plan.fused and not self.plan.additive[group[0]]:
                    factor = factors[group[0]]
                    filled = [grad * factor for grad in filled]
                total = filled if total is None else [a + b for a, b in zip(total, filled, strict=True)]
        assert total is not None
        return total

    def replace(self, grads: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
        """Put sums whose division by the weight so far gives what a hook put in place of the gradient."""
        self.held[0] = [grad.detach() * factor for grad in grads]

    def gradient(self, factors: Sequence[float]) -> tuple[list[torch.Tensor], float, float]:
        """The window's gradient; see `Window.gradient`."""
        if not self.whole:
            return super().gradient(factors)
        with torch.no_grad():
            grads = self.sync.gradients(self._filled(self.held[0]), reduced=False)
            group = self.plan.groups[0]
            factor = 1.0 if self.plan.fused or self.plan.additive[group[0]] else factors[group[0]]
            norm = self.read[-1][-1] if self.sync.size == 1 else self.length(grads).item()
            return grads, factor, norm * abs(factor)

    # -- stored ------------------------------------------------------------------------------------------------

    def arrays(self, capacity: int) -> dict[str, torch.Tensor]:
        """The open window by name; see `Window.arrays`."""
        self.settle() if self.joined else None
        found = super().arrays(capacity)
        if self.joined:
            found |= {"count": torch.tensor(len(self)), "pending": torch.tensor(self.pending)}
        return found | {"kept": torch.tensor(self.kept)}

    def put(self, arrays: Mapping[str, torch.Tensor], count: int, told: int) -> None:
        """Go on with a stored window."""
        super().put(arrays, int(arrays["count"]) if self.joined else count, told)
        self.kept = int(arrays["kept"])
        if self.joined:
            self.pending = bool(arrays["pending"])
        n = len(self.plan.terms)
        for row in self.read:
            self.den = self.den + torch.tensor(row[n : 2 * n], device=self.device, dtype=self.dtype)


def all_finite(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """bool scalar: every element of all of them is finite."""
    if not tensors:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.isfinite(torch.stack(foreach.largest(list(tensors)))).all()
