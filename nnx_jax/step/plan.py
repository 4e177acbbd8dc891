"""HookPlan: the hooks of one step, in the order they are called, and where each keeps its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.hooks import TracedHook, TrainingUpdateHook, owns
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.step.context import StepContext
from nnx_jax.step.state import strong


@dataclass(frozen=True)
class HookPlan:
    """The hooks of one step and where each keeps its state.

    Attributes:
        update: update hooks in the order they are called.
        traced: traced hooks in the order they were registered.
        model_keys: names of the models in the parameters' paths; none for a single model.
        compute_dtype: dtype of the matrix products, for hooks that ask.
        taps: "loss", "gradients", "predictions": what the host wants to look at after each microbatch.
        world: processes or devices one update stands for, in `global_step_count`.
        concrete: values are concrete while the Python of the hooks runs (`step/concrete.py`), so it may keep state.
        mesh: the devices of a deferred reduction (`step/local.py`); None to reduce every microbatch.
        by_default: nobody asked for the deferred reduction, so going without it needs no warning.
        sharding: a ShardingSpec of the devices that the step runs on; None for one device.
        observer: called at every stage of a microbatch, in place, where values are concrete.
    """

    update: tuple[TrainingUpdateHook, ...] = ()
    traced: tuple[TracedHook, ...] = ()
    model_keys: tuple[str, ...] = ()
    compute_dtype: Any = jnp.float32
    taps: frozenset[str] = frozenset()
    world: int = 1
    concrete: bool = False
    mesh: Any = None
    by_default: bool = False
    sharding: Any = None
    observer: Callable[[Stage, StepContext], None] | None = None
    keys: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts: dict[str, int] = {}
        for hook in (*self.update, *self.traced):
            name = type(hook).__name__
            counts[name] = counts.get(name, 0) + 1
            self.keys[id(hook)] = name if counts[name] == 1 else f"{name}.{counts[name]}"

    @property
    def empty(self) -> bool:
        """The step has no hook and nobody looks into it."""
        return not (self.update or self.traced or self.taps or self.concrete or self.mesh)

    def key(self, hook: Any) -> str:
        """The hook's name in `TrainState.slots`: its class, numbered from the second of a class on."""
        return self.keys[id(hook)]

    def owner(self, stage: Stage) -> TracedHook | None:
        """The traced hook that does a replacement stage itself."""
        return next((hook for hook in self.traced if owns(hook, stage)), None)

    @property
    def adds_means(self) -> bool:
        """A window's gradient is made of its microbatches' mean gradients, not of the sum over all its targets."""
        return any(getattr(hook, "normalize", "weight") != "weight" for hook in self.update)

    def init(self, params: Mapping[str, Any], model_state: Any = ()) -> dict[str, Any]:
        """First slots of all hooks that have one, by name; no array is shared with what is given.

        A hook that has `init_slot(params, model_state, model_keys)` is asked that instead of `init_state(params)`.
        """

        def first(hook: Any) -> Any:
            if hasattr(hook, "init_slot"):
                return hook.init_slot(params, model_state, self.model_keys)
            return hook.init_state(params)

        slots = {self.key(hook): first(hook) for hook in (*self.update, *self.traced)}
        held = {id(leaf) for leaf in jax.tree.leaves((params, model_state))}
        fresh = lambda leaf: jnp.array(leaf, copy=True) if id(leaf) in held else jnp.asarray(leaf)  # noqa: E731
        return {name: strong(jax.tree.map(fresh, slot)) for name, slot in slots.items() if jax.tree.leaves(slot)}
