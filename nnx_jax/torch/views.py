"""What hooks and callbacks see of the torch engine: the last batch, copied values, torch's optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnx_jax.torch.batches import Source
from nnx_jax.torch.module import Net
from nnx_jax.torch.optim import Optimizers
from nnx_jax.torch.state import TorchState


class SeenByHooks:
    """The part of an engine that answers hooks; the attributes are TorchEngine's."""

    carries = False
    in_place = False
    hooks: Any = None
    dynamic = False
    net: Net
    source: Source
    optimizers: Optimizers
    schedules: dict[str, Any]

    if TYPE_CHECKING:

        def trained(self, state: TorchState) -> torch.nn.Module:
            """The module, which has the state's weights."""
            ...

    @property
    def data_seconds(self) -> float:
        """Seconds that training waited for batches, so far."""
        return self.source.waited

    def bind(self, state: TorchState) -> None:
        """Hooks that watch have no state of their own here."""

    def hook_name(self, number: int) -> str:
        """Nobody vetoes."""
        return "nobody"

    def batch(self, epoch: int, place: int) -> Any:
        """Columns of the microbatch to come, or of the last one; None where they are not kept."""
        return self.source.look(epoch, place)

    def look(self, state: TorchState, name: str) -> Any:
        """A value for hooks that watch; None where there is none."""
        if name == "models":
            return {"main": self.trained(state)}
        if name == "params":
            return {n: value.detach().clone() for n, value in {**self.net.frozen, **self.net.params}.items()}
        return torch.tensor(self.optimizers.first.used) if name == "learning_rate" else None

    def parts(self) -> dict[str, Any]:
        """torch's optimizers, and the schedule of their rates where the step drives it."""
        optimizers = [part.torch for part in self.optimizers.parts.values()]
        return {"optimizers": optimizers, "lr_schedulers": list(self.schedules.values()) or [None]}
