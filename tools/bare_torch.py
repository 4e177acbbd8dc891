"""The loop that `tools/bench_torch.py` compares with: the same step written by hand in torch, alone or under DDP."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]


class BareTorch:
    """zero_grad, forward, cross entropy, backward, step of torch's Adam; no history, no files, no checks.

    Args:
        weights: of the first layer to the last, `<name>.weight` and `<name>.bias`; between them is a ReLU.
        data: columns `x` [N, width] and `y` [N].
        order: rows of every batch of an epoch, [batches, rows].
        rate: of Adam.
        device: where it computes; rows are gathered there.
        dtype: of the forward pass under autocast, float16 with a GradScaler; None for float32.
    """

    def __init__(
        self,
        weights: Mapping[str, Any],
        data: Mapping[str, Any],
        order: Callable[[int], Any],
        rate: float,
        device: str = "cpu",
        dtype: Any = None,
    ) -> None:
        self.net = sequential(weights).to(device)
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.world > 1 else 0
        self._call: Any = torch.nn.parallel.DistributedDataParallel(self.net) if self.world > 1 else self.net
        self._optimizer = torch.optim.Adam(self.net.parameters(), rate)
        self._x = torch.from_numpy(data["x"]).to(device)
        self._y = torch.from_numpy(data["y"]).long().to(device)
        self._order, self._device, self._dtype = order, device, dtype
        self._scaler = torch.amp.GradScaler(device.partition(":")[0], enabled=dtype is torch.float16)
        self._step = self._plain if dtype is None else self._mixed

    def epoch(self, number: int) -> tuple[float, float, float]:
        """Run one epoch; return its seconds, and the losses of its first and its last batch over all processes."""
        table = torch.from_numpy(self._order(number)).to(self._device)
        share = table.shape[1] // self.world
        table = table[:, self.rank * share : (self.rank + 1) * share]
        first = last = torch.zeros(())
        start = time.perf_counter()
        for place, rows in enumerate(table):
            last = self._step(self._x[rows], self._y[rows])
            first = last.detach() if place == 0 else first
        last.item()  # the device has finished
        seconds = time.perf_counter() - start
        return seconds, self._mean(first), self._mean(last.detach())

    def _plain(self, x: Any, y: Any) -> Any:
        self._optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self._call(x), y)
        loss.backward()
        self._optimizer.step()
        return loss

    def _mixed(self, x: Any, y: Any) -> Any:
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, self._dtype):
            loss = F.cross_entropy(self._call(x), y)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss

    def _mean(self, loss: Any) -> float:
        if self.world > 1:
            loss = loss.clone()
            dist.all_reduce(loss)
        return loss.item() / self.world


def sequential(weights: Mapping[str, Any]) -> Any:
    """Linear layers with ReLU between them, of copies of the given weights."""
    names = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    layers: list[Any] = []
    for name in names:
        out, wide = weights[f"{name}.weight"].shape
        layer = torch.nn.Linear(wide, out)
        layer.load_state_dict({part: torch.as_tensor(weights[f"{name}.{part}"]) for part in ("weight", "bias")})
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])
