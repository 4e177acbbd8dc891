"""TorchHooks: the hooks of a torch engine, in the order they are called, and the first state of each."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from nnx_jax.core.hook_registry import HookRegistry
from nnx_jax.engines.hook_plan import plan_hooks
from nnx_jax.params.run import RunSpec
from nnx_jax.step.plan import HookPlan
from nnx_jax.torch.hooks.trees import as_tensor, leaves, tree_map


@dataclass(frozen=True)
class TorchHooks(HookPlan):
    """A HookPlan whose slots are tensors.

    Attributes:
        precision: what the model computes in, by name.
        dynamic: a hook decides at BEFORE_BATCH, microbatch by microbatch, what is kept.
    """

    precision: str = "float32"

    def slots(self, params: Mapping[str, Any], model_state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """First slots by the hook's name, each a tree of tensors that are nobody else's."""
        found: dict[str, Any] = {}
        for hook in (*self.update, *self.traced):
            asks = getattr(hook, "init_slot", None)
            slot = hook.init_state(params) if asks is None else asks(params, model_state, self.model_keys)
            if leaves(slot):
                found[self.key(hook)] = tree_map(lambda leaf: as_tensor(leaf, device).clone(), slot)
        return found

    @property
    def screens(self) -> bool:
        """A hook looks at microbatches one by one."""
        return any(hook.screens for hook in self.update)

    @property
    def own(self) -> tuple[Any, ...]:
        """Hooks that are not built in: nobody knows what they look at."""
        return tuple(h for h in (*self.update, *self.traced) if not type(h).__module__.startswith("nnx_jax.hooks."))


def plan_torch(
    registry: HookRegistry,
    spec: RunSpec,
    *,
    taps: frozenset[str],
    observer: Callable[[Any, Any], None],
    world: int,
    own_step: bool = False,
) -> TorchHooks | None:
    """Return the hooks of an engine; None when nothing takes part in a microbatch and nobody looks into it.

    Raises:
        ConfigError: the configuration and a hook name different windows or precisions.
    """
    found = plan_hooks(registry, spec, taps=taps, own_step=own_step, world=world)
    if found is None or not (registry.update or registry.traced or taps):
        return None
    given = {each.name: getattr(found, each.name) for each in fields(HookPlan) if each.name != "keys"}
    mixed = next((hook for hook in found.update if hook.exclusive_key == "mixed_precision"), None)
    precision = spec.precision if mixed is None else getattr(mixed, "precision", spec.precision)
    given |= {"observer": observer if taps else None, "taps": taps, "concrete": True, "mesh": None}
    return TorchHooks(**{**given, "compute_dtype": getattr(torch, precision)}, precision=precision)


def decides(hooks: Sequence[Any], ask: Callable[[], tuple[Any, Any]]) -> bool:
    """Whether a hook may keep what is accumulated by its own decision; the hooks are asked once, without a trace.

    Args:
        ask: calls every hook at BEFORE_BATCH with counts that have no value; gives what they decided, and what an
            accumulation window alone decides.
    """
    try:
        with untouched(hooks) as changed:
            kept, window = ask()
    except Exception:  # it asked for a value: it decides by values; an error of its own comes again in the first batch
        return True
    return bool(changed) or not (kept is True or kept is window)


@contextlib.contextmanager
def untouched(hooks: Sequence[Any]) -> Iterator[list[str]]:
    """Let hooks be called for a look; what they change of themselves is undone, and named in what is given."""
    held, changed = (dict, list, set), list[str]()
    before = [
        {name: copy.copy(value) if isinstance(value, held) else value for name, value in vars(hook).items()}
        if hasattr(hook, "__dict__")
        else None
        for hook in hooks
    ]
    try:
        yield changed
    finally:
        for hook, kept in zip(hooks, before, strict=True):
            if kept is not None:
                now = hook.__dict__
                changed += [n for n in {**kept, **now} if n not in kept or n not in now or not _same(kept[n], now[n])]
                hook.__dict__.clear()
                hook.__dict__.update(kept)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict | list | set):
        return type(a) is type(b) and len(a) == len(b)
    plain = (int, float, str, bool, type(None))
    return a == b if isinstance(a, plain) and isinstance(b, plain) else a is b
