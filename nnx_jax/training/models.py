"""Named models as one module that is called with the whole batch: what a strategy hands to the step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.engines.nnx_forward import PureModule

MAIN = "main"


class NamedModels(nnx.Module):
    """Models by name, called together: `forward(model, batch)` for a single one, `forward(models, batch)` for several.

    Args:
        models: by name; each becomes an attribute, so that its parameters are called `<name>.<path>`.
        forward: the strategy's `training_fn`.
        single: there is one model and `forward` gets it alone.
        resting: names of the models that are not trained; they are always called as in evaluation.
    """

    takes_batch = True

    def __init__(
        self, models: Mapping[str, nnx.Module], forward: Callable[..., Any], *, single: bool, resting: tuple[str, ...]
    ) -> None:
        for name, model in models.items():
            setattr(self, name, model)
        self._names, self._forward, self._single, self._resting = tuple(models), forward, single, resting

    def __call__(self, batch: Mapping[str, jax.Array]) -> Any:
        found = {name: getattr(self, name) for name in self._names}
        for name in self._resting:
            found[name] = at_rest(found[name])
        return self._forward(found[self._names[0]] if self._single else found, batch)


def at_rest(model: nnx.Module) -> nnx.Module:
    """The same model with dropout off and BatchNorm reading its statistics; variables are shared."""
    return nnx.view(model, raise_if_not_found=False, deterministic=True, use_running_average=True)


def as_models(given: Any) -> tuple[dict[str, nnx.Module], bool]:
    """Models by name, and whether it is a single one (then called "main").

    Raises:
        ModelError: no model, something that is no Flax NNX module, or a name that cannot be an attribute.
    """
    if isinstance(given, nnx.Module):
        return {MAIN: given}, True
    if not isinstance(given, Mapping) or not given:
        raise ModelError(f"models is {type(given).__name__}; give a Flax NNX module, or {{name: module}}")
    for name, model in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or hasattr(NamedModels, name):
            raise ModelError(f"{name!r} cannot be a model's name; use a plain word such as 'main' or 'teacher'")
        if not isinstance(model, nnx.Module):
            raise ModelError(f"model {name!r} is {type(model).__name__}; give a Flax NNX module")
    return dict(given), False


def parameter_names(models: Mapping[str, nnx.Module]) -> tuple[str, ...]:
    """Every parameter as `<model>.<path>`."""
    return tuple(
        ".".join((name, *map(str, path)))
        for name, model in models.items()
        for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))
    )


class ModelCopies:
    """Makes copies of a strategy's models that hold other weights; what an EMAHook hands out."""

    def __init__(self, models: Mapping[str, nnx.Module]) -> None:
        self.models = models

    def copy(self, key: str) -> nnx.Module:
        """A copy of the model that shares no array with it."""
        return nnx.clone(self.models[key])

    def write(self, key: str, module: nnx.Module, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        """Put copies of these arrays, named `<model>.<path>`, into a copy of that model."""
        own = {name.removeprefix(f"{key}."): value for name, value in {**params, **buffers}.items()}
        put(module, own)


def put(module: nnx.Module, named: Mapping[str, Any]) -> None:
    """Copy arrays by their path into a module; paths that are not given keep theirs."""
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        name = ".".join(map(str, path))
        if name in named:
            variable.set_value(jax.numpy.array(named[name], copy=True))


def leaves_of(key: str, module: nnx.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """(parameters, the rest) of a module, named as those of model `key` in the training state."""
    pure = PureModule(module)
    params = {f"{key}.{name}": value for name, value in {**pure.params, **pure.frozen}.items()}
    return params, {f"{key}.{name}": value for name, value in pure.model_state.items()}


# -- functions by name -----------------------------------------------------------------------------------------


def dotted(function: Any) -> str | None:
    """`module:name` of a function that can be found again by it, None for any other."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or name is None or "<" in name:
        return None
    return f"{module}:{name}" if _find(module, name) is function else None


def resolve(value: Any, what: str, *, loaded_only: bool = False) -> Any:
    """A function, or the one that `module:name` or `module.name` names.

    Args:
        loaded_only: import nothing; for names that come out of a file.

    Raises:
        ConfigError: there is none of that name.
    """
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":") if ":" in value else value.rpartition(".")
    if module and not loaded_only:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"{what} is {value!r}, and {module!r} cannot be imported: {error}") from error
    found = _find(module, name)
    if found is None:
        hint = f"; import {module} first, or give {what}= yourself" if loaded_only else ""
        raise ConfigError(f"{what} is {value!r}; there is no such function{hint}")
    return found


def _find(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
