"""Space: the few array operations that hooks use, by numpy's names; `ctx.xp` under torch."""

from __future__ import annotations

from typing import Any

import torch


class Space:
    """Operations on tensors of one device; a bool or a number stands for a tensor of its value.

    What a hook of the built-in kind needs to compute the same numbers as under JAX, where `ctx.xp` is `jax.numpy`.
    Everything else is torch's own.
    """

    floating = "floating"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def asarray(self, value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor on the device."""
        return torch.as_tensor(value, dtype=dtype, device=self.device)

    def astype(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """In another number format."""
        return value.to(dtype)

    def issubdtype(self, dtype: torch.dtype, kind: str) -> bool:
        """Whether a number format is of a kind; the only one is `floating`."""
        return kind == self.floating and dtype.is_floating_point

    def logical_not(self, flag: Any) -> torch.Tensor:
        """Not, as a tensor."""
        return torch.logical_not(self.asarray(flag))

    def logical_and(self, a: Any, b: Any) -> torch.Tensor:
        """Both, as a tensor."""
        return torch.logical_and(self.asarray(a), self.asarray(b))

    def logical_or(self, a: Any, b: Any) -> torch.Tensor:
        """Either, as a tensor."""
        return torch.logical_or(self.asarray(a), self.asarray(b))

    def where(self, flag: Any, new: Any, old: Any) -> torch.Tensor:
        """`new` where `flag`, else `old`."""
        if not isinstance(new, torch.Tensor) and not isinstance(old, torch.Tensor):
            new = self.asarray(new)
        return torch.where(self.asarray(flag), new, old)

    def isfinite(self, value: Any) -> torch.Tensor:
        """Neither NaN nor infinite."""
        return torch.isfinite(self.asarray(value))

    def maximum(self, a: Any, b: Any) -> torch.Tensor:
        """The larger one; NaN where one is NaN."""
        first, second = self._pair(a, b)
        return torch.maximum(first, second)

    def minimum(self, a: Any, b: Any) -> torch.Tensor:
        """The smaller one; NaN where one is NaN."""
        first, second = self._pair(a, b)
        return torch.minimum(first, second)

    def clip(self, value: torch.Tensor, low: Any = None, high: Any = None) -> torch.Tensor:
        """Brought into the range."""
        return torch.clamp(value, low, high)

    def sqrt(self, value: Any) -> torch.Tensor:
        """Square root."""
        return torch.sqrt(self.asarray(value))

    def abs(self, value: Any) -> torch.Tensor:
        """Absolute value."""
        return torch.abs(self.asarray(value))

    def sum(self, value: Any) -> torch.Tensor:
        """Sum of all elements."""
        return torch.sum(self.asarray(value))

    def zeros_like(self, value: torch.Tensor) -> torch.Tensor:
        """Zeros of the same shape and format."""
        return torch.zeros_like(value)

    def _pair(self, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as tensors; a number takes the format of the other."""
        like = a if isinstance(a, torch.Tensor) else b
        dtype = like.dtype if isinstance(like, torch.Tensor) else None
        return tuple(v if isinstance(v, torch.Tensor) else self.asarray(v, dtype) for v in (a, b))  # type: ignore[return-value]
