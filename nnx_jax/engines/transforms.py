"""Changes of a network's topology by name, so that whoever rebuilds a model from a checkpoint can repeat them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError, nearest
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.context import TrainContext
from nnx_jax.nets.lora import add_lora, all_but_lora, merge_lora
from nnx_jax.runs.transforms import NNCheckpointTransform

Apply = Callable[..., nnx.Module]


@dataclass(frozen=True)
class _Registered:
    apply: Apply
    frozen: Callable[..., Sequence[str]] | None


_TRANSFORMS: dict[tuple[str, int], _Registered] = {}


def register_transform(
    name: str,
    version: int = 1,
    apply: Apply | None = None,
    *,
    frozen: Callable[..., Sequence[str]] | None = None,
    replace: bool = False,
) -> Any:
    """Register a change of topology for this process; without `apply`, return a decorator.

    Args:
        apply: `(module, **options)`, which changes the module in place or makes a new one, and returns it. It must give
            the same names and shapes for the same options; weights are loaded afterwards.
        frozen: `(module, **options)` of the module as it is now, to the names of parameters that are not trained.
        replace: whether another transform of this name and version makes way.

    Raises:
        ConfigError: the name and version are taken.
    """
    if apply is None:
        return lambda function: register_transform(name, version, function, frozen=frozen, replace=replace)
    NNCheckpointTransform(name, version)  # refuses what is no name or version
    old = _TRANSFORMS.get((name, version))
    same = old is not None and _origin(old.apply) == _origin(apply)
    if old is not None and not (replace or same):
        taken = f"transform '{name}' version {version} is {'.'.join(_origin(old.apply))} already"
        raise ConfigError(f"{taken}; register another version, or with replace=True")
    _TRANSFORMS[name, version] = _Registered(apply, frozen)
    return apply


def apply_transforms(module: Any, transforms: Sequence[NNCheckpointTransform], *, kind: type = nnx.Module) -> Any:
    """Repeat transforms in order; every one is looked up before the first is applied.

    Args:
        kind: the class that networks are of.

    Raises:
        ModelError: (a ValueError) one that is not registered, or does not fit the module; names index, name, version.
    """
    found = check_transforms(transforms)
    for index, (transform, known) in enumerate(zip(transforms, found, strict=True)):
        where = f"transform {index} ('{transform.name}' version {transform.version})"
        try:
            inspect.signature(known.apply).bind(module, **transform.options)
            changed = known.apply(module, **transform.options)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{where}: {error}") from error
        if not isinstance(changed, kind):
            raise ModelError(f"{where} returned a {type(changed).__name__}; it returns the changed module")
        module = changed
    return module


def check_transforms(transforms: Sequence[NNCheckpointTransform]) -> list[_Registered]:
    """Look every transform up.

    Raises:
        ModelError: (a ValueError) the first that is not registered, with its index, name and version.
    """
    return [_find(index, transform) for index, transform in enumerate(transforms)]


def frozen_by(module: nnx.Module, transforms: Sequence[NNCheckpointTransform]) -> tuple[str, ...]:
    """Return the parameters that transforms leave out of training, as they are now."""
    found: dict[str, None] = {}
    for transform, known in zip(transforms, check_transforms(transforms), strict=True):
        if known.frozen is not None:
            found.update(dict.fromkeys(known.frozen(module, **transform.options)))
    return tuple(found)


def _find(index: int, transform: NNCheckpointTransform) -> _Registered:
    known = _TRANSFORMS.get((transform.name, transform.version))
    if known is None:
        versions = sorted(version for name, version in _TRANSFORMS if name == transform.name)
        other = (
            f"; known versions: {', '.join(map(str, versions))}"
            if versions
            else nearest(transform.name, {name for name, _ in _TRANSFORMS})
        )
        raise ModelError(
            f"transform {index} is '{transform.name}' version {transform.version}, which is not registered{other}. "
            "Import the module that registers it (register_transform); no weights were loaded"
        )
    return known


def _origin(function: Any) -> tuple[str, str]:
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)


class TransformAtEnd(Callback):
    """Change the trained network once training is done; LAST holds the changed one, and what a resume goes on from.

    Args:
        name, version, options: a registered transform, such as "lora_merge".

    Raises:
        ModelError: (a ValueError) no such transform, at construction.
    """

    distributed = "all"

    def __init__(self, name: str, version: int = 1, **options: Any) -> None:
        self.transform = NNCheckpointTransform(name, version, options)
        _find(0, self.transform)

    def on_train_end(self, ctx: TrainContext) -> None:
        if ctx.error is None:
            ctx.model.adopt(ctx.model.framework.transform(ctx.model.net, [self.transform]))

    def checkpoint_transforms(self) -> Sequence[NNCheckpointTransform]:
        return [self.transform]


register_transform("lora", 1, add_lora, frozen=all_but_lora)
register_transform("lora_merge", 1, merge_lora)
