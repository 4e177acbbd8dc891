"""What the processes of a group do together inside a step of the user's own, each with its own rows.

The rules of `DDP(allow=["step"])`:

- A step that calls `default_train_step` makes one process's updates of the union, as without a step.
- Any other sees its process's rows, maybe none, and every process calls it for every microbatch. Gradients are averaged
  over the processes, each counting as much, when an optimizer is about to step: by `ctx.update` before it clips, or by
  torch's own `step()`. A parameter that has a gradient on one process has one on all.
- `ctx.mean` divides by the rows of all processes and multiplies by their number, so that the average is the mean over
  the union, however many rows each has. A mean of one's own counts each process as much, as is usual with torch.
- A loss or value that is recorded without a count is averaged over processes, as gradients are; sums and counts are
  added up. What is not finite on one process undoes the microbatch on all.
- Every process calls `ctx.mean`, `ctx.update`, `step()` and `ctx.report_update` as often and in the same order; what
  differs is a StepError on all of them.
- `ctx.model` is the module itself. What a step does to weights without an optimizer, it has to do alike everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from nnx_jax.core.errors import StepError
from nnx_jax.spmd.world import World

_MEAN, _UPDATE, _END = range(3)


class Together:
    """The processes inside one step of the user's own.

    Args:
        called: the step's name, for messages.
        optimizers: their names.
        device: where the network is.
    """

    def __init__(self, world: World, called: str, optimizers: Sequence[str], device: torch.device) -> None:
        self.world, self.size, self.called, self.device = world, world.size, called, device
        self._optimizers = tuple(optimizers)

    def count(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of a scalar over all processes."""
        self._meet(_MEAN)
        return torch.stack(self._gathered(rows.detach().reshape(1))).sum().to(rows.dtype)

    def average(self, optimizer: str, params: Mapping[str, torch.Tensor]) -> None:
        """Put the average of all processes into every parameter's `.grad`; nothing where no process has one."""
        self._meet(_UPDATE, self._optimizers.index(optimizer))
        values = list(params.values())
        parts = [torch.zeros_like(value) if value.grad is None else value.grad for value in values]
        there = torch.tensor([value.grad is not None for value in values], dtype=parts[0].dtype, device=self.device)
        flat = torch.cat([*(part.reshape(-1) for part in parts), there])
        dist.all_reduce(flat)
        *found, there = flat.split([*(value.numel() for value in values), len(values)])
        for value, part, some in zip(values, found, there.tolist(), strict=True):
            value.grad = (part / self.size).view_as(value) if some else None

    def ended(self, numbers: Sequence[float], reports: Mapping[str, int]) -> list[list[float]]:
        """What every process measured in its microbatch, in the order of the ranks.

        Raises:
            StepError: they report other updates.
        """
        self._meet(_END)
        mine = torch.tensor([*numbers, *reports.values()], dtype=torch.float64, device=self.device)
        found = [each.tolist() for each in self._gathered(mine)]
        told = [each[len(numbers) :] for each in found]
        if any(each != told[0] for each in told):
            counts = [dict(zip(reports, map(round, each), strict=True)) for each in told]
            raise StepError(
                f"{self.called} reports {self._listed(counts)} in one microbatch; every process makes the same updates"
            )
        return [each[: len(numbers)] for each in found]

    def same(self, what: str, mine: object) -> None:
        """Check that the step does the same everywhere, as far as one look tells.

        Raises:
            StepError: it does not.
        """
        found = self.world.gather(f"what {self.called} does", mine)
        if any(each != found[0] for each in found):
            raise StepError(f"{self.called} {what} {self._listed(found)}; a step does the same on every process")

    def _meet(self, what: int, which: int = 0) -> None:
        """Check that every process is about to do the same, before they exchange anything that would not fit.

        Raises:
            StepError: they are not.
        """
        found = [each.tolist() for each in self._gathered(torch.tensor([what, which], device=self.device))]
        if any(each != found[0] for each in found):
            said = {_MEAN: "takes a mean", _UPDATE: "steps", _END: "has ended"}
            told = [said[code] + (f" '{self._optimizers[at]}'" if code == _UPDATE else "") for code, at in found]
            raise StepError(f"{self.called} {self._listed(told)}; a step does the same on every process, in one order")

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return found

    def _listed(self, found: Sequence[object]) -> str:
        return ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(found))
