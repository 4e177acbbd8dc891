"""What hooks see of an engine that calls them: their slots, the loss scale, the averages' models."""

from __future__ import annotations

from typing import Any, cast

import torch

from nnx_jax.torch.hooks.state import HookedState, ModuleCopies, TorchSlot
from nnx_jax.torch.state import TorchState
from nnx_jax.torch.views import SeenByHooks


class SeenByUpdateHooks(SeenByHooks):
    """The part of a HookedEngine that answers hooks; the attributes are its own."""

    in_place = True
    shows_all = True
    """Hooks that watch see every value, asked for beforehand or not."""
    module: torch.nn.Module

    def bind(self, state: TorchState) -> None:
        """Give every hook with state its slot in this state, and the averages something to be made from."""
        for hook in (*self.hooks.update, *self.hooks.traced):
            if hasattr(hook, "attach"):
                hook.attach(ModuleCopies(self.module))
            if hasattr(hook, "bind") and (slot := self.slot(state, hook)) is not None:
                hook.bind(slot)

    def slot(self, state: TorchState, hook: Any) -> TorchSlot | None:
        """Where a hook's state lives; None for a hook without any."""
        key = self.hooks.keys.get(id(hook))
        held = cast(HookedState, state)
        return TorchSlot(held, key) if key is not None and key in held.slots else None

    def hook_name(self, number: int) -> str:
        """Class of the update hook with this number in `Records.veto`."""
        return type(self.hooks.update[number]).__name__

    def look(self, state: TorchState, name: str) -> Any:
        """A value for hooks that watch; None where there is none."""
        if name == "grad_scaler":
            scaling = next((hook for hook in self.hooks.update if getattr(hook, "scaling", False)), None)
            return None if scaling is None else self.slot(state, scaling)
        return None if name in ("loss", "losses", "predictions", "gradients") else super().look(state, name)
