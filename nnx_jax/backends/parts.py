"""The parts of a TrainingLoop that are objects: as they are, or made of a document that names their class."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.registry import ANY_FAMILY, OneOf, lookup
from nnx_jax.core.spec import Spec
from nnx_jax.loop import callbacks as own
from nnx_jax.params.callbacks import CallbackParams

_BUILT_IN = (
    "nnx_jax.data", "nnx_jax.engines.operators", "nnx_jax.loop.step_builtin", "nnx_jax.loop.writers",
    "nnx_jax.objectives.operators",
)  # fmt: skip
_PLAIN = (bool, int, float, str, PurePath, np.generic)


def import_built_in() -> None:
    """Import the modules whose classes a document may name without an `imports:` of its own."""
    from nnx_jax.hooks import register_builtin

    for module in _BUILT_IN:
        importlib.import_module(module)
    register_builtin()


class Part(OneOf):
    """Annotation of a field for an object of any class: `Annotated[Operator | Any, Part("loss")]`.

    An object is taken as it is. Text or a mapping stands for a registered class: a kind of the first of these families
    that has it, or a full kind (`loss.mse`). `Operator` in the annotation is what makes `state()` write full kinds.
    """

    def __init__(self, *families: str) -> None:
        super().__init__(families[0])
        self.families = (*families, ANY_FAMILY)

    def target(self, value: object) -> type | None:
        """The class that a document would become, or None when it cannot be told."""
        return next((found for each in self.families if (found := OneOf(each).target(value)) is not None), None)

    def admit(self, value: Any) -> Any:
        """The object that a document stands for; anything else as it is.

        Raises:
            ValueError: (pydantic turns it into a located problem) a document without a kind.
            UnregisteredError: (a ConfigError and a PermissionError) of an unknown kind.
        """
        if isinstance(value, str | Mapping):
            import_built_in()
            found = self.target(value)
            return OneOf(getattr(found, "family", self.family)).admit(value)
        return value

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Anything: which kinds there are depends on what is imported."""
        return {}


def split_callbacks(callbacks: Iterable[Any]) -> tuple[list[own.Callback], list[Any]]:
    """(callbacks of the loop's own form, those of the (loop, state, metrics) form), each in their order.

    Configurations such as EarlyStoppingParams become the callbacks they describe.
    """
    from nnx_jax.loop.builtin import build_callback

    built = [build_callback(each) if isinstance(each, CallbackParams) else each for each in callbacks]
    mine = [each for each in built if isinstance(each, own.Callback)]
    return mine, [each for each in built if not isinstance(each, own.Callback)]


def noted(check: Callable[[], Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, message) of the ConfigError that a check raises, for `Spec.problems`."""
    try:
        check()
    except ConfigError as error:
        yield error.path, str(error.args[0]).removeprefix(f"{error.path}: ")


def check_writable(owner: str, name: str, value: Any) -> None:
    """Check that a file can hold a part, so that it is made again from what it says.

    Args:
        owner, name: of the field.

    Raises:
        ConfigError: naming the place: a function, an array, an object of a class that is not registered.
    """
    place = f"{owner}.{name}"
    if isinstance(value, Spec):
        _check_named(place, type(value))
        for field in type(value).model_fields:
            check_writable(place, field, getattr(value, field))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_writable(owner, f"{name}.{key}", item)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            check_writable(owner, f"{name}[{index}]", item)
    elif not (value is None or isinstance(value, _PLAIN)):
        what = getattr(value, "__qualname__", type(value).__name__)
        raise ConfigError(f"a file cannot hold {what}; it can be used from Python only", path=place)


def _check_named(place: str, cls: type[Spec]) -> None:
    """Check that a class of a family is what its kind stands for."""
    if not cls.family or "kind" in cls.model_fields:
        return
    kind = cls.__dict__.get("kind")
    if not isinstance(kind, str) or lookup(cls.family, kind) is not cls:
        told = f"{cls.__name__} is not registered, so a file cannot name it; register it with @register"
        raise ConfigError(told, path=place)
