"""Arithmetic on lists of tensors, each one call of torch for the whole list; the names with _ change the first list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_TORCH: Any = torch  # what follows has no place in torch's own stubs
add_: Callable[..., None] = _TORCH._foreach_add_
copy_: Callable[..., None] = _TORCH._foreach_copy_
mul: Callable[..., list[torch.Tensor]] = _TORCH._foreach_mul
mul_: Callable[..., None] = _TORCH._foreach_mul_
norms: Callable[..., list[torch.Tensor]] = _TORCH._foreach_norm
sign: Callable[..., list[torch.Tensor]] = _TORCH._foreach_sign
sign_: Callable[..., None] = _TORCH._foreach_sign_


def length(tensors: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Global norm of a list that is not empty, a scalar."""
    found = norms(tensors) if dtype is None else norms(tensors, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(list(found)))


def largest(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Largest absolute value of each tensor; not finite where an element is not."""
    return [found.float() for found in _TORCH._foreach_norm(tensors, float("inf"))]
