"""HookedState: a training state with the slots of hooks in it, and a slot as the host reads and writes it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nnx_jax.core.errors import StepError
from nnx_jax.torch.hooks.trees import as_tensor, named_leaves, on_host, structure, tree_map
from nnx_jax.torch.hooks.window import HookWindow
from nnx_jax.torch.state import TorchState


@dataclass
class HookedState(TorchState):
    """A TorchState with slots; none of their tensors is ever changed in place by the engine.

    Attributes:
        slots: state of hooks by the hook's name, each a tree of tensors; stored as `slots/<hook>/<path>`.
        opened_slots: as they were when the window opened.
        make_slots: gives the first ones.
    """

    window: HookWindow  # pyright: ignore[reportIncompatibleVariableOverride]  # its engine makes no other
    slots: dict[str, Any] = field(default_factory=dict)
    opened_slots: dict[str, Any] = field(default_factory=dict)
    make_slots: Callable[[], dict[str, Any]] = dict

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by the name a checkpoint has for it; see `TorchState.tensors`."""
        found = super().tensors()
        for hook, slot in self.slots.items():
            found |= named_leaves(slot, f"slots/{hook}")
        return found

    def reset(self) -> None:
        """A training that has not begun."""
        super().reset()
        self.slots = self.make_slots()
        self.opened_slots = dict(self.slots)

    def rewind(self) -> None:
        """Give the open window up; hooks remember nothing of it either."""
        super().rewind()
        self.slots = dict(self.opened_slots)


class TorchSlot:
    """One hook's state in the training state of a run."""

    def __init__(self, state: HookedState, key: str) -> None:
        self._state, self._key = state, key

    def read(self) -> Any:
        """The state now, as host arrays."""
        return on_host(self._state.slots[self._key])

    def write(self, state: Any) -> None:
        """Put a state of the same shapes.

        Raises:
            StepError: another structure or shape; nothing is changed.
        """
        held = self._state.slots[self._key]
        if structure(state) != structure(held):
            raise StepError(f"the state of {self._key} has another structure than its slot; load one of the same hook")

        def placed(new: Any, old: torch.Tensor) -> torch.Tensor:
            found = as_tensor(new, old.device).to(old.dtype).clone()
            if found.shape != old.shape:
                told = f"{list(old.shape)} expected, {list(found.shape)} given"
                raise StepError(f"the state of {self._key} has a leaf of another shape: {told}")
            return found

        self._state.slots = {**self._state.slots, self._key: tree_map(placed, state, held)}


class ModuleCopies:
    """Copies of one module that hold other weights: what `EMAHook.attach` takes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def copy(self, key: str) -> torch.nn.Module:
        """A copy that shares no memory with the module, as torch's AveragedModel makes it."""
        made = copy.deepcopy(self.module)
        for value in made.parameters():
            value.grad = None
        return made

    def write(self, key: str, module: torch.nn.Module, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        """Put copies of these arrays into a copy; what is not named keeps its value."""
        named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, value in {**params, **buffers}.items():
                named[name].copy_(as_tensor(value, named[name].device))
