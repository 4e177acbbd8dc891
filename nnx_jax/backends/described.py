"""A TrainingLoop's values as JSON: for people to read, and for telling loops apart that train differently."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.operator import Operator
from nnx_jax.core.spec import Spec


def described(value: Any) -> Any:
    """A value as JSON: specs by their state, operators by class and hash, anything else by its class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Operator):
        found = {"class": type(value).__qualname__}
        with contextlib.suppress(ConfigError):  # it holds something that only Python has
            found["hash"] = value.content_hash()
        return found
    if isinstance(value, Spec):
        with contextlib.suppress(ConfigError):
            return value.state()
    if isinstance(value, Mapping):
        return {str(name): described(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return [described(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def identified(value: Any) -> Any:
    """A value as JSON that differs where it would train differently: of a function its text and what it closes over."""
    from nnx_jax.fit.identity import describe_function

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Spec):
        with contextlib.suppress(ConfigError):
            return value.content_hash()
        return _fields(value, value.changed())  # it holds something that only Python has
    if isinstance(value, Mapping):
        return {str(name): identified(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return [identified(item) for item in value]
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("nnx_jax."):  # the task of a posterior
        return _fields(value, {each.name: getattr(value, each.name) for each in dataclasses.fields(value)})
    return describe_function(value)


def _fields(value: Any, held: Mapping[str, Any]) -> dict[str, Any]:
    """The class of a value and what it holds by name; what is None is left out."""
    told = {name: identified(item) for name, item in held.items() if item is not None}
    return {"class": type(value).__qualname__, **told}
