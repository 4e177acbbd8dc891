"""From registered hooks and a configuration to the HookPlan of one step; and a hook's state as the host reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hook_registry import HookRegistry, describe_hook
from nnx_jax.params.run import RunSpec
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.programs import Carry, StepPrograms

CONCRETE = ("staged", "eager")
"""Values of `train.dispatch` that are executors with concrete values."""


def plan_hooks(
    registry: HookRegistry,
    spec: RunSpec,
    *,
    taps: frozenset[str] = frozenset(),
    world: int = 1,
    model_keys: tuple[str, ...] = (),
    observer: Callable[[Any, Any], None] | None = None,
) -> HookPlan | None:
    """Return the plan of the step, None when nothing takes part in it and nobody looks into it.

    `accumulate_grad_batches` becomes an accumulation hook where other hooks take part: windows are vetoes then.

    Raises:
        ConfigError: the configuration and a hook name different windows or precisions.
    """
    update = () if registry.update is None else tuple(registry.update.iter_hooks())
    window, asked = _only(update, "accumulation"), spec.train.optim.accumulate_grad_batches
    if window is not None and asked not in (1, window.k):
        raise ConfigError(
            f"got {asked}, but {type(window).__name__} has k={window.k}; write it in one place",
            path="train.optim.accumulate_grad_batches",
        )
    mixed = _only(update, "mixed_precision")
    if mixed is not None and spec.precision not in ("float32", mixed.precision):
        raise ConfigError(
            f"got '{spec.precision}', but {type(mixed).__name__} has '{mixed.precision}'; write it in one place",
            path="train.precision",
        )
    concrete = spec.train.dispatch in CONCRETE
    if not (update or registry.traced or taps or concrete):
        return None
    if window is None and asked > 1:
        from nnx_jax.hooks.accumulation import GradientAccumulationHook

        update = tuple(sorted((GradientAccumulationHook(asked), *update), key=lambda hook: hook.priority))
    return HookPlan(
        update=update,
        traced=registry.traced,
        model_keys=model_keys,
        compute_dtype=jnp.dtype(spec.precision if mixed is None else mixed.precision),
        taps=frozenset() if concrete else taps,
        world=world,
        observer=observer if concrete else None,
    )


def window_length(plan: HookPlan | None, spec: RunSpec) -> int:
    """Microbatches of a full window."""
    hook = _only(plan.update if plan is not None else (), "accumulation")
    return spec.train.optim.accumulate_grad_batches if hook is None else hook.k


def carries(plan: HookPlan | None) -> bool:
    """A window that is not full at the epoch's end goes on in the next."""
    hook = _only(plan.update if plan is not None else (), "accumulation")
    return hook is not None and hook.on_partial == "carry"


def float32_layers(plan: HookPlan | None) -> tuple[str, ...]:
    """Glob patterns of parameters whose layers compute in float32 whatever the others do."""
    hook = _only(plan.update if plan is not None else (), "mixed_precision")
    return () if hook is None else tuple(getattr(hook, "keep_fp32", ()))


def described(plan: HookPlan | None) -> dict[str, Any]:
    """The hooks that a stored state fits, by name: class and settings; without those that only watch."""
    found: dict[str, Any] = {}
    for hook in (*plan.update, *plan.traced) if plan is not None else ():
        told = describe_hook(hook)
        if getattr(hook, "exclusive_key", None) == "accumulation":  # its length is the topology's `accumulate`
            told = {name: value for name, value in told.items() if name != "k"}
            if set(told) == {"class", "kind"}:
                continue
        if not getattr(hook, "observes", False):
            found[plan.key(hook)] = told  # type: ignore[union-attr]
    return found


def _only(hooks: tuple[Any, ...], key: str) -> Any:
    return next((hook for hook in hooks if hook.exclusive_key == key), None)


class StateSlot:
    """One hook's state in the training state of a run."""

    def __init__(self, programs: StepPrograms, carry: Carry, key: str) -> None:
        self._programs, self._carry, self._key = programs, carry, key

    def read(self) -> Any:
        """The state now, as host arrays; waits for the device."""
        return jax.tree.map(lambda leaf: np.array(leaf, copy=True), self._held())

    def write(self, state: Any) -> None:
        """Put a state of the same shapes.

        Raises:
            StepError: another structure or shape; nothing is changed.
        """
        train, held = self._programs.state(self._carry), self._held()
        if jax.tree.structure(state) == jax.tree.structure(held):
            state = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), state, held)
        slots = {**train.slots, self._key: state}
        self._programs.put(self._carry, dataclasses.replace(train, slots=slots))

    def _held(self) -> Any:
        return self._programs.state(self._carry).slots[self._key]
