"""What hooks and callbacks see of the Flax engine: their slots, the last batch, copied values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from nnx_jax.engines.hook_plan import CONCRETE, StateSlot
from nnx_jax.engines.nnx_forward import ModuleCopies
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.programs import Carry, StepPrograms
from nnx_jax.step.state import own


class SeenByHooks:
    """The part of an engine that answers hooks; the attributes are FlaxEngine's."""

    spec: Any
    module: Any
    programs: StepPrograms
    hooks: HookPlan | None
    batches: Any
    _batches: Any
    optimizer: Any
    rates: Any

    if TYPE_CHECKING:

        def trained(self, state: Carry) -> Any:
            """The module with copies of the state's weights."""
            ...

    @property
    def in_place(self) -> bool:
        """Host hooks at stages inside the step are called by the step itself."""
        return self.spec.training.dispatch in CONCRETE

    @property
    def data_seconds(self) -> float:
        """Seconds that training waited for batches to be read, so far."""
        return 0.0 if self._batches is None else self._batches.waited

    def bind(self, state: Carry) -> None:
        """Give every hook with state its slot in this state, and the averages something to be made from."""
        hooks: tuple[Any, ...] = (*self.hooks.update, *self.hooks.traced) if self.hooks is not None else ()
        for hook in hooks:
            if hasattr(hook, "attach"):
                hook.attach(self.copies())
            if hasattr(hook, "bind") and (slot := self.slot(state, hook)) is not None:
                hook.bind(slot)

    @property
    def dynamic(self) -> bool:
        """Hooks decide batch by batch what is accumulated, so no window has a length that is known here."""
        return self.programs.dynamic

    def copies(self) -> Any:
        """What an average makes its model from."""
        return ModuleCopies(self.module)

    def slot(self, state: Carry, hook: Any) -> StateSlot | None:
        """Where a hook's state lives; None for a hook without any."""
        if self.hooks is None or self.hooks.keys.get(id(hook)) not in self.programs.state(state).slots:
            return None
        return StateSlot(self.programs, state, self.hooks.key(hook))

    def hook_name(self, number: int) -> str:
        """Class of the update hook with this number in `Records.veto`."""
        return type(self.hooks.update[number]).__name__ if self.hooks is not None else "nobody"

    def batch(self, epoch: int, place: int) -> Any:
        """Columns of the microbatch to come, or of the last one, read-only; None where they are not kept."""
        return self.batches.look(epoch, place)

    def look(self, state: Carry, name: str) -> Any:
        """A value for hooks that watch, copied on the device; None where there is none."""
        if name == "models":
            return {"main": self.trained(state)}
        if name == "grad_scaler":
            scaling = [hook for hook in self.hooks.update if getattr(hook, "scaling", False)] if self.hooks else []
            return self.slot(state, scaling[0]) if scaling else None
        train = self.programs.state(state)
        held = {
            "params": {**train.frozen, **train.params},
            "learning_rate": getattr(train.opt_state, "rate", None),
            **train.accum.get("taps", {}),
        }.get(name)
        leaves, structure = jax.tree.flatten(held)
        return jax.tree.unflatten(structure, own(leaves))

    def parts(self) -> dict[str, Any]:
        """The optimizer, and the schedule of its rate where the step drives it."""
        return {"optimizers": [self.optimizer], "lr_schedulers": list(self.rates.schedules.values()) or [None]}
