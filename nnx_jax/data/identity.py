"""What a dataset computes with, as a hash: the values that an operator or a plain Python object holds.

Two objects of one class with other parameters are two things. A dataset that a forward model makes, or a cache of one,
must therefore know the parameters, wherever the object keeps them.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.core.hashing import content_hash, hash_array
from nnx_jax.core.registry import OneOf
from nnx_jax.core.spec import Spec, named

_DEPTH = 32  # objects inside objects; more is a circle
_GIVEN_IN_PYTHON = {"python", "digest"}


def object_hash(value: Any) -> str:
    """Return 64 hex digits of `identity_of(value)`."""
    return content_hash(identity_of(value))


def identity_of(value: Any, _where: str = "", _depth: int = 0) -> Any:
    """Return plain JSON values that differ when `value` would compute something else.

    * An object with a method `content_hash()` answers for itself, under its class.
    * Arrays count by dtype, shape and bytes; numbers, text, lists and mappings by their values.
    * Any other object counts by its class and all its attributes (dataclass fields, slots, `__dict__`), however deep.
    * Functions and classes count by the full name that finds them (a compiled function as the one that was compiled):
      what is written in them is not looked at.

    Raises:
        DataError: a value that cannot be told apart from another one (a lambda, a local or wrapped function, a
            generator); it names the place, and what to do.
    """
    where = _where or type(value).__name__
    if _depth > _DEPTH:
        raise DataError(f"{where} holds itself, or objects {_DEPTH} deep; give its class a method content_hash()")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else {"float": repr(value)}
    if isinstance(value, bytes | complex):
        return {type(value).__name__: repr(value)}
    if isinstance(value, type):
        return {"class": full_name(value)}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if isinstance(value, slice):
        return {"slice": [identity_of(part, where, _depth + 1) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    if isinstance(value, np.generic) or (hasattr(value, "dtype") and hasattr(value, "shape")):
        return _array(value, where)
    if isinstance(value, PurePath):
        return str(value)
    if callable(getattr(value, "content_hash", None)):
        return {"class": full_name(type(value)), "hash": str(value.content_hash())}
    if isinstance(value, functools.partial):
        return {"partial": [identity_of(part, where, _depth + 1) for part in (value.func, value.args, value.keywords)]}
    if isinstance(value, Mapping):
        pairs = [
            [identity_of(key, where, _depth + 1), identity_of(each, f"{where}[{key!r}]", _depth + 1)]
            for key, each in value.items()
        ]
        return {"mapping": sorted(pairs, key=repr)}
    if isinstance(value, Sequence):
        return [identity_of(item, f"{where}[{index}]", _depth + 1) for index, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return {"set": sorted((identity_of(item, where, _depth + 1) for item in value), key=repr)}
    if hasattr(value, "__qualname__") or isinstance(value, np.ufunc):
        return _function(value, where, _depth)
    return _object(value, where, _depth)


def _array(value: Any, where: str) -> Any:
    try:
        return {"array": hash_array(np.asarray(value))}
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} cannot be hashed ({error}); give the object that holds it content_hash()") from error


def _function(value: Any, where: str, depth: int) -> Any:
    owner = getattr(value, "__self__", None)
    bound = owner is not None and not isinstance(owner, types.ModuleType)
    function = _plain_function(getattr(value, "__func__", value))
    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', function.__name__)}"
    if not (bound and function is value) and _named(function) is not function:
        raise DataError(
            f"{where}: {name} is no name that finds this very function; write it as an operator, or as a function at "
            "the top of a module"
        )
    return {"function": name} | ({"of": identity_of(owner, where, depth + 1)} if bound else {})


def _plain_function(value: Any) -> Any:
    """The function that was compiled: it computes the same."""
    while type(value).__name__ == "PjitFunction":
        value = value.__wrapped__
    return value


def _named(function: Any) -> Any:
    """What the full name of a function finds: another one, or nothing, for lambdas, local and wrapped functions."""
    found: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    for part in getattr(function, "__qualname__", function.__name__).split("."):
        found = getattr(found, part, None)
    return _plain_function(found)


def _object(value: Any, where: str, depth: int) -> Any:
    if not hasattr(value, "__dict__") and not _written_in_python(type(value)):
        raise DataError(
            f"{where} is a {full_name(type(value))}, which does not show what it holds; give the object that holds "
            "it a method content_hash()"
        )
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    held = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
    fields = {name: identity_of(each, f"{where}.{name}", depth + 1) for name, each in sorted(held.items())}
    return {"class": full_name(type(value)), "fields": fields}


def _slots(cls: type) -> tuple[str, ...]:
    found = cls.__dict__.get("__slots__", ())
    return tuple(n for n in ((found,) if isinstance(found, str) else found) if n not in ("__dict__", "__weakref__"))


def _written_in_python(cls: type) -> bool:
    return all("__slots__" in each.__dict__ or each is object for each in cls.__mro__)


def full_name(cls: Any) -> str:
    """Return `module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _given(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == _GIVEN_IN_PYTHON:
        raise ValueError(f"{value['python']} was given in Python and is not stored; give it in Python again")
    return value


def _admit(value: Any) -> Any:
    return OneOf("operator").admit(_given(value)) if isinstance(value, Mapping | str) else value


Given = Annotated[Any, BeforeValidator(_given)]
"""A field for an object given in Python."""

Part = Annotated[Any, BeforeValidator(_admit)]
"""A field for an operator or any Python object; in a file, a registered operator by its `kind`."""


def part_state(value: Any) -> Any:
    """Return what `state()` says of such a field: plain values and registered operators as they are written in a file,
    any other object as its class and the hash of what it holds."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Spec):
        try:
            return named(value, value.state())
        except ConfigError:  # it holds something a file cannot
            pass
    return {"python": full_name(type(value)), "digest": object_hash(value)}
