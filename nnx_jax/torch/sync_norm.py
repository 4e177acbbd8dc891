"""Batch norms of a group: statistics of the rows of all processes, forward and backward, as one process has of all.

With n, the rows of all processes, x^ = (x - mean) / sqrt(var + eps) and g = dL/dy, L being the sum of all processes'
losses: dL/dx = weight / sqrt(var + eps) * (g - (sum g + x^ * sum g x^) / n), the sums over all rows of all processes.
torch's own SyncBatchNorm does the same on GPUs alone, and takes no process without a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nnx_jax.torch.layers import BatchNorm, wide


class SyncNorms:
    """The batch norms of one network while several processes train it; the network itself stays as it is.

    Args:
        parts: the layers.
        size: how many processes there are.
    """

    def __init__(self, parts: Sequence[Any], size: int) -> None:
        self.parts, self.size = tuple(parts), size
        forward: Any = torch.compiler.disable(self._forward)  # no program holds what all processes do together
        self._forwards = [partial(forward, part) for part in parts]  # one object each, or torch compiles anew
        self._counts = True

    @contextmanager
    def lent(self, *, counts: bool) -> Iterator[None]:
        """While it is open the layers compute by the rows of all processes, where they are in training mode.

        Every process opens it for as many forward and backward passes.

        Args:
            counts: False where this process has no row, and others stand in for them: these change nothing.
        """
        self._counts = counts
        for part, forward in zip(self.parts, self._forwards, strict=True):
            part.forward = forward
        try:
            yield
        finally:
            self._counts = True
            for part in self.parts:
                part.__dict__.pop("forward", None)

    def _forward(self, part: Any, input: Tensor) -> Tensor:
        """x [N, C, ...] -> the same shape and type."""
        if not part.training:
            return type(part).forward(part, input)
        part._check_input_dim(input)
        x = wide(input)
        weight = None if part.weight is None else part.weight.to(x)
        bias = None if part.bias is None else part.bias.to(x)
        y, mean, var, n = _Normed.apply(x, weight, bias, part.eps, self._counts, self.size)
        with torch.no_grad():
            _remember(part, mean, var, n)
        return y.to(input.dtype)


class _Normed(torch.autograd.Function):
    """(x [N, C, ...], weight [C], bias [C]) -> (y, mean [C], biased variance [C], rows)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, eps: float, counts: bool, size: int) -> Any:
        channels, over = x.shape[1], [axis for axis in range(x.ndim) if axis != 1]
        mine = torch.zeros(2 * channels + 1, dtype=_sums(x), device=x.device)
        if counts and x.numel():
            var, mean = torch.var_mean(x, over, correction=0)
            rows = x.numel() // channels
            mine[0], mine[1 : channels + 1], mine[channels + 1 :] = rows, mean, var * rows
        all_rows, means, squares = _gathered(mine, size).split([1, channels, channels], dim=1)
        n = all_rows.sum()
        mean = (all_rows * means).sum(0) / n.clamp(min=1.0)
        var = (squares + all_rows * (means - mean).square()).sum(0) / n.clamp(min=1.0)
        scale = torch.rsqrt(var + eps).to(x.dtype)
        shape = [1, channels, *([1] * (x.ndim - 2))]
        ctx.save_for_backward(x, weight, mean.to(x.dtype), scale, n)
        ctx.over, ctx.shape, ctx.counts, ctx.size = over, shape, counts, size
        y = (x - mean.to(x.dtype).view(shape)) * scale.view(shape)
        if weight is not None:
            y = y * weight.view(shape)
        if bias is not None:
            y = y + bias.view(shape)
        ctx.mark_non_differentiable(mean, var, n)
        return y, mean, var, n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:  # type: ignore[override]
        x, weight, mean, scale, n = ctx.saved_tensors
        shape, channels = ctx.shape, len(mean)
        xhat = (x - mean.view(shape)) * scale.view(shape)
        mine = torch.zeros(2 * channels, dtype=_sums(x), device=x.device)
        if ctx.counts and x.numel():
            mine[:channels], mine[channels:] = grad.sum(ctx.over), (grad * xhat).sum(ctx.over)
        by_bias, by_weight = mine.to(x.dtype).split(channels)
        of_x = None
        if ctx.needs_input_grad[0]:
            sums = (_gathered(mine, ctx.size).sum(0) / n.clamp(min=1.0)).to(x.dtype)
            of_bias, of_weight = sums.split(channels)
            outer = scale if weight is None else scale * weight
            of_x = outer.view(shape) * (grad - of_bias.view(shape) - xhat * of_weight.view(shape))
            of_x = of_x if ctx.counts else torch.zeros_like(x)
        weighs, adds = ctx.needs_input_grad[1:3]
        return of_x, by_weight if weighs else None, by_bias if adds else None, None, None, None


def _gathered(mine: Tensor, size: int) -> Tensor:
    """[size, n]: what every process has, in the order of the ranks, so that all add it up alike."""
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine)
    return torch.stack(found)


def _sums(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def _remember(part: Any, mean: Tensor, var: Tensor, n: Tensor) -> None:
    """Move running statistics as the layer itself does; not at all where no process had a row.

    torch's own layers take the unbiased variance, and refuse a single value of a channel; here it counts as 0.
    """
    share = (n > 0).to(mean.dtype)
    count: Tensor = part.num_batches_tracked
    if not isinstance(part, BatchNorm):  # which counts none
        var = var * n / (n - 1).clamp(min=1.0)
        count.add_((n > 0).to(count.dtype))
    share = share / count.clamp(min=1) if part.momentum is None else share * part.momentum
    held: Any = part
    for running, new in ((held.running_mean, mean), (held.running_var, var)):
        running.copy_(running * (1 - share) + new * share)
