"""Hooks that prepare a model before training: put other modules into it, and choose what is trained."""

from __future__ import annotations

import fnmatch
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableSequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from nnx_jax.core.errors import HookError, HookStateError, HookTypeError, nearest
from nnx_jax.core.hashing import hash_arrays
from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import HookSpec
from nnx_jax.params.fields import Text

Patterns = Annotated[tuple[Text, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


class _Preparation(HookSpec):
    """A hook that does its work before training; it claims no stage."""

    observes: ClassVar[bool] = False
    frequency: ClassVar[int] = 1
    stage: ClassVar[None] = None

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return False

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Never called: everything is done before training."""


@register("module_patch")
class ModulePatchHook(_Preparation):
    """Replace or add modules inside a model, before the optimizer is built.

    A target is `<model>.<path>.<child>`, as in `main.head` or `main.layers.1`; a single model is called `main`. Every
    target is looked up before the first is changed.

    Raises (before training):
        KeyError: no model of that name.
        AttributeError: the module that should hold the child is not there.
        HookTypeError: (a TypeError) what is there, or what is given, is no module.
        HookStateError: (a RuntimeError) the optimizer is built already.
    """

    patches: Any = Field(default_factory=dict, exclude=True)
    """Python only: module, or a function that makes one, by target."""

    _made: dict[str, Any] = PrivateAttr(default_factory=dict)
    _owners: list[weakref.ref[Any]] = PrivateAttr(default_factory=list)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Targets with a model, and a child of it."""
        yield from super().problems()
        if not isinstance(self.patches, Mapping) or not self.patches:
            yield "patches", "expected a mapping from targets such as 'main.head' to modules"
            return
        for target in self.patches:
            if not isinstance(target, str) or not all(target.split(".")) or "." not in target:
                yield "patches", f"got target {target!r}; expected '<model>.<child>' such as 'main.head'"

    def on_register(self, owner: Any) -> None:
        """Patch the models of a trainer that has them; one that builds its model later is patched then."""
        if getattr(owner, "training_began", False) and not self._knows(owner):
            raise HookStateError("ModulePatchHook came after the optimizer was built; give it before training starts")
        self.prepare_strategy(owner)

    def prepare_strategy(self, owner: Any) -> None:
        """Patch the trainer's models, once; called before its optimizer is built."""
        models = getattr(owner, "models", None)
        if models and not self._knows(owner):
            self.apply(models)
            self._owners.append(weakref.ref(owner))

    def _knows(self, owner: Any) -> bool:
        return any(known() is owner for known in self._owners)

    def apply(self, models: Mapping[str, Any]) -> None:
        """Patch these models, all targets or none."""
        places = [(target, *_locate(models, target)) for target in self.patches]
        modules = self.modules()
        made = [(*place, modules[place[0]]) for place in places]
        seen: dict[int, str] = {}
        for target, _, _, module in made:
            if id(module) in seen:
                warnings.warn(
                    f"ModulePatchHook puts one and the same module at {seen[id(module)]} and {target}; they will share "
                    "its weights",
                    UserWarning,
                    stacklevel=3,
                )
            seen[id(module)] = target
        for _, parent, child, module in made:
            if isinstance(child, int):
                parent[child] = module
            else:
                setattr(parent, child, module)

    def modules(self) -> dict[str, Any]:
        """The modules by target, made once."""
        for target in self.patches:
            if target not in self._made:
                self._made[target] = self._module(target)
        return self._made

    def state(self, *, environment: bool = False) -> dict[str, Any]:
        """What a run id knows of the patches: the class and the weights of every module."""
        digests = {
            target: f"{type(module).__qualname__}:{hash_arrays(_weights(module))[:16]}"
            for target, module in sorted(self.modules().items())
        }
        return {**super().state(environment=environment), "patches": digests}

    def _module(self, target: str) -> Any:
        given = self.patches[target]
        module = given() if callable(given) and not is_module(given) and not isinstance(given, type) else given
        if not is_module(module):
            raise HookTypeError(
                f"patch {target!r} is a {type(module).__name__}; give a module, or a function making one"
            )
        return module


@register("trainable_parameters")
class TrainableParameterHook(_Preparation):
    """Choose by glob patterns over `<model>.<parameter>` (`main.layers.0.kernel`) what is trained.

    `freeze_patterns` alone: everything else is trained. `trainable_patterns` alone: nothing else is. Both: what is
    frozen and not named as trainable stays as it is.

    Raises (before training):
        HookError: (a ValueError) a pattern that matches nothing, or nothing left to train.
    """

    freeze_patterns: Patterns = ()
    """What is not trained."""
    trainable_patterns: Patterns = ()
    """What is, whatever `freeze_patterns` says."""
    freeze_mode: Literal["requires_grad", "optimizer_only"] = "requires_grad"
    """No gradients at all, or gradients that no update uses; neither has optimizer state."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """At least one pattern."""
        yield from super().problems()
        if not (self.freeze_patterns or self.trainable_patterns):
            yield "freeze_patterns", "neither freeze_patterns nor trainable_patterns is given; give one or both"

    def on_register(self, owner: Any) -> None:
        """Say so when it is too late for this trainer's optimizer."""
        if getattr(owner, "training_began", False):
            warnings.warn(
                "TrainableParameterHook came after the optimizer was built; it takes effect the next time one is",
                UserWarning,
                stacklevel=3,
            )

    def frozen(self, names: Iterable[str]) -> frozenset[str]:
        """Return which of the parameters `<model>.<parameter>` are not trained; see the class."""
        every = list(names)
        for pattern in (*self.freeze_patterns, *self.trainable_patterns):
            if not _matching(every, (pattern,)):
                raise HookError(
                    f"TrainableParameterHook: pattern {pattern!r} matches no parameter{nearest(pattern, every)}"
                )
        allowed = _matching(every, self.trainable_patterns)
        frozen = _matching(every, self.freeze_patterns) if self.freeze_patterns else set(every)
        if not set(every) - (frozen - allowed):
            raise HookError("TrainableParameterHook leaves no parameter to train; free some with trainable_patterns")
        return frozenset(frozen - allowed)


def left_out(hooks: Iterable[Any], names: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the parameters that hooks leave out: those without gradients, and those with gradients but no updates.

    Args:
        hooks: any; the TrainableParameterHooks among them are asked.
        names: `<model>.<parameter>` of every parameter there is.
    """
    every, frozen, still = list(names), set[str](), set[str]()
    for hook in hooks:
        if isinstance(hook, TrainableParameterHook):
            (frozen if hook.freeze_mode == "requires_grad" else still).update(hook.frozen(every))
    if (frozen or still) and not set(every) - frozen - still:
        raise HookError("the TrainableParameterHooks together leave no parameter to train")
    return frozenset(frozen), frozenset(still - frozen)


def _matching(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    return {name for name in names for pattern in patterns if fnmatch.fnmatchcase(name, pattern)}


def is_module(value: Any) -> bool:
    """Whether a value is a module of a framework that is here."""
    from flax import nnx

    return isinstance(value, nnx.Module) or _of_torch(value)


def _of_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _weights(module: Any) -> dict[str, Any]:
    import numpy as np
    from flax import nnx

    if _of_torch(module):
        return {name: value.detach().cpu().float().numpy() for name, value in module.state_dict().items()}
    flat = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.RngState)))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def _locate(models: Mapping[str, Any], target: str) -> tuple[Any, str | int]:
    """Return the module (or list of modules) that holds the last part of a target, and that part."""
    key, *path = target.split(".")
    if key not in models:
        raise KeyError(f"ModulePatchHook: patch {target!r} names no model{nearest(key, models)}")
    parent, trail = models[key], key
    for part in path[:-1]:
        found = _child(parent, part)
        if found is None:
            raise AttributeError(f"ModulePatchHook: patch {target!r}: {trail} has no {part!r}")
        parent, trail = found, f"{trail}.{part}"
    if not (is_module(parent) or _is_list(parent)):
        raise HookTypeError(f"patch {target!r}: {trail} is a {type(parent).__name__}, which holds no modules")
    last = path[-1]
    if _is_list(parent):
        if not last.isdigit() or int(last) >= len(parent):
            raise AttributeError(f"ModulePatchHook: patch {target!r}: {trail} has {len(parent)} modules, no {last!r}")
        return parent, int(last)
    old = _child(parent, last)
    if old is not None and not (is_module(old) or _is_list(old)):
        raise HookTypeError(f"patch {target!r} would replace a {type(old).__name__}; only modules are replaced")
    return parent, last


def _child(parent: Any, part: str) -> Any:
    if _is_list(parent):
        return parent[int(part)] if part.isdigit() and int(part) < len(parent) else None
    return getattr(parent, part, None)


def _is_list(value: Any) -> bool:
    return isinstance(value, MutableSequence)
