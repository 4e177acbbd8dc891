"""One update by torch's fused kernels, called as the optimizer's own step calls them but without what is around that.

The wrapper, the hooks and the grouping by device that surround a step of `torch.optim` take longer than the kernel does
for a small model. Where none of them has anything to do, the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.optim.optimizer as _optim

_TORCH: Any = torch  # the kernels have no place in torch's own stubs
_HOOKS: Any = _optim
Step = Callable[[], bool]
"""Makes one update of the gradients in `.grad`; False where it is not its case, and nothing has been done."""


def fused_step(optimizer: torch.optim.Optimizer) -> Step | None:
    """How to make an update without the optimizer's own step; None where it has no fused kernel."""
    kernels = {torch.optim.Adam: _adam, torch.optim.AdamW: _adam, torch.optim.SGD: _sgd}
    kernel = kernels.get(type(optimizer))
    if kernel is None or not optimizer.defaults.get("fused") or not hasattr(torch, "_fused_adam_"):
        return None
    kinds = {(value.device, value.dtype) for group in optimizer.param_groups for value in group["params"]}
    if len(kinds) != 1:
        return None

    def step() -> bool:
        if _watched(optimizer):
            return False
        groups = [([value.grad for value in group["params"]], group) for group in optimizer.param_groups]
        if any(group.get("amsgrad") or not _dense(grads) for grads, group in groups):
            return False
        with torch.no_grad():
            for grads, group in groups:
                kernel(optimizer, group, grads)
        return True

    return step


def _watched(optimizer: Any) -> bool:
    """Somebody is to be told of a step, or has put another one in its place."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    everyones = _HOOKS._global_optimizer_pre_hooks or _HOOKS._global_optimizer_post_hooks
    return bool(own or everyones or "step" in optimizer.__dict__ or torch.autograd.profiler._is_profiler_enabled)


def _dense(grads: Any) -> bool:
    """There is a gradient of every parameter, as the kernels take it."""
    return all(grad is not None and not grad.is_sparse for grad in grads)


def _adam(optimizer: torch.optim.Optimizer, group: Any, grads: Any) -> None:
    params = group["params"]
    states = [optimizer.state[value] for value in params]
    steps = [state["step"] for state in states]
    all_steps = steps[0]._base
    if all_steps is not None and len(all_steps) == len(steps) and all(step._base is all_steps for step in steps):
        all_steps.add_(1)
    else:
        _TORCH._foreach_add_(steps, 1)
    kernel = _TORCH._fused_adamw_ if isinstance(optimizer, torch.optim.AdamW) else _TORCH._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )


def _sgd(optimizer: torch.optim.Optimizer, group: Any, grads: Any) -> None:
    params, momentum = group["params"], group["momentum"]
    moments = [optimizer.state[value]["momentum_buffer"] for value in params] if momentum else []
    _TORCH._fused_sgd_(
        params,
        grads,
        moments,
        weight_decay=group["weight_decay"],
        momentum=momentum,
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )
