"""From registered hooks and a configuration to the HookPlan of one step; and a hook's state as the host reads it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hook_registry import HookRegistry, describe_hook
from nnx_jax.params.run import RunSpec
from nnx_jax.spmd.mesh import ShardingSpec, make_sharding
from nnx_jax.spmd.rules import DATA, as_rules
from nnx_jax.step.places import on_host
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.programs import Carry, StepPrograms

CONCRETE = ("staged", "eager")
"""Values of `train.dispatch` that are executors with concrete values."""


def plan_hooks(
    registry: HookRegistry,
    spec: RunSpec,
    *,
    taps: frozenset[str] = frozenset(),
    world: int | None = None,
    model_keys: tuple[str, ...] = (),
    observer: Callable[[Any, Any], None] | None = None,
    own_step: bool = False,
    adds_rows: bool = False,
) -> HookPlan | None:
    """Return the plan of the step, None when nothing takes part in it, on one device, and nobody looks into it.

    `accumulate_grad_batches` becomes an accumulation hook where other hooks take part, or several devices: windows are
    vetoes then, and their gradients are reduced once where that is possible.

    Args:
        own_step: a step of the user's own makes the updates; its windows are its own.
        adds_rows: the loss is a sum over rows, so that each device can add up its own over a window.
        world: what an update counts for in `global_step_count`; default: the devices that rows are split over.

    Raises:
        ConfigError: the configuration and a hook name different windows, precisions or devices, or devices that are not
            there.
    """
    update = () if registry.update is None else tuple(registry.update.iter_hooks())
    window, asked = _only(update, "accumulation"), spec.training.window
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
    concrete = spec.training.dispatch in CONCRETE
    sharding = sharding_of(registry, spec)
    if concrete and sharding is not None:
        raise ConfigError(
            f"got '{spec.training.dispatch}', which runs on one device; write step, span or auto, or leave mesh out",
            path="train.dispatch",
        )
    if not (update or registry.traced or taps or concrete or sharding):
        return None
    by_default = window is None
    if window is None and asked > 1 and not own_step:
        from nnx_jax.hooks.accumulation import GradientAccumulationHook

        window = GradientAccumulationHook(asked, defer_reduce=adds_rows)
        update = tuple(sorted((window, *update), key=lambda hook: hook.priority))
    return HookPlan(
        update=update,
        traced=registry.traced,
        model_keys=model_keys,
        compute_dtype=jnp.dtype(spec.precision if mixed is None else mixed.precision),
        taps=frozenset() if concrete else taps,
        world=world or (1 if sharding is None else sharding.parts),
        mesh=sharding.mesh if sharding is not None and _defers(window, sharding, by_default) else None,
        by_default=by_default,
        sharding=sharding,
        observer=observer if concrete else None,
    )


def sharding_of(registry: HookRegistry, spec: RunSpec) -> ShardingSpec | None:
    """The devices of a run: the configuration's `mesh`, else a DDPHook's; None for one device.

    Raises:
        ConfigError: devices that are not there, or two numbers of them.
    """
    found = make_sharding(spec.mesh, rules=spec.sharding)
    for hook in registry:
        split = getattr(hook, "split_over", ())
        if not split:
            continue
        if not spec.mesh:
            return make_sharding({DATA: len(split)}, split)
        parts = 1 if found is None else found.parts
        if hook.devices not in (None, parts):
            raise ConfigError(
                f"got {{{DATA}: {parts}}}, but {type(hook).__name__} has devices={hook.devices}; write it in one place",
                path="mesh",
            )
    return found


def fit_sharding(hooks: HookPlan | None, pure: Any, module: Any) -> HookPlan | None:
    """The plan with the net's own rules, checked against every parameter.

    A net has rules where it has a method `sharding_rules()`: patterns of parameter paths to axes, for `tensor`.

    Raises:
        ConfigError: a rule that does not fit the parameters.
    """
    if hooks is None or hooks.sharding is None:
        return hooks
    own: Callable[[], Any] = getattr(module, "sharding_rules", dict)
    sharding = dataclasses.replace(hooks.sharding, net_rules=as_rules(own()))
    sharding.params({name: tuple(value.shape) for name, value in {**pure.params, **pure.frozen}.items()})
    return dataclasses.replace(hooks, sharding=sharding)


def _defers(window: Any, sharding: ShardingSpec, by_default: bool) -> bool:
    """Windows of several microbatches whose gradients are to be reduced once."""
    asked = window is not None and window.k > 1 and getattr(window, "defer_reduce", False)
    if asked and not sharding.replicates and not by_default:
        warnings.warn(
            "defer_reduce does nothing here: the model is split over devices, so gradients are reduced at every "
            "microbatch; the numbers are the same",
            UserWarning,
            stacklevel=3,
        )
    return asked and sharding.replicates


def window_length(plan: HookPlan | None, spec: RunSpec) -> int:
    """Microbatches of a full window."""
    hook = _only(plan.update if plan is not None else (), "accumulation")
    return spec.training.window if hook is None else hook.k


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
            told = {name: value for name, value in told.items() if name not in ("k", "defer_reduce")}
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
        """The state now, as host arrays; waits for the device, and for every process where it lies over several."""
        return jax.tree.map(lambda leaf: np.array(on_host(leaf), copy=True), self._held())

    def write(self, state: Any) -> None:
        """Put a state of the same shapes.

        Raises:
            StepError: another structure or shape; nothing is changed.
        """
        train, held = self._programs.state(self._carry), self._held()
        if jax.tree.structure(state) == jax.tree.structure(held):
            state = jax.tree.map(lambda new, old: np.asarray(new, old.dtype), state, held)
        slots = {**train.slots, self._key: state}
        self._programs.put(self._carry, dataclasses.replace(train, slots=slots))

    def _held(self) -> Any:
        return self._programs.state(self._carry).slots[self._key]
