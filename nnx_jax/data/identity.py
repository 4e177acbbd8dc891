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
_LIBRARIES = {"nnx_jax", *sys.stdlib_module_names} - {"__main__"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_GIVEN_IN_PYTHON = {"python", "digest"}


def object_hash(value: Any) -> str:
    """Return 64 hex digits of `identity_of(value)`."""
    return content_hash(identity_of(value))


def identity_of(value: Any, _where: str = "", _depth: int = 0) -> Any:
    """Return plain JSON values that differ when `value` would compute something else.

    * An object with a method `content_hash()` answers for itself, under its class. A specification that has not
      defined its own (an operator) counts by its fields, and by the code of its class.
    * Arrays count by dtype, shape and bytes; numbers, text, lists and mappings by their values.
    * Any other object counts by its class and all its attributes (dataclass fields, slots, `__dict__`), however deep.
    * Functions count by the full name that finds them (a compiled function as the one that was compiled), classes by
      theirs.
    * What the user's own functions and the classes of objects do counts by their code (of this version of Python), with
      the functions, classes, numbers and text of the user's that they find by name. Those of libraries, and of this
      package, are known by name.

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
        written = _written(type(value)) if _is_library(type(value).content_hash) else {}
        return {"class": full_name(type(value)), "hash": str(value.content_hash())} | written
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
    of = {"of": identity_of(owner, where, depth + 1)} if bound else {}
    return {"function": name} | of | _written(function)


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
    return {"class": full_name(type(value)), "fields": fields} | _written(type(value))


def _written(value: Any) -> dict[str, str]:
    """The digest of what is written in a user's function or class; nothing for those of libraries."""
    told = _code(value, set())
    return {"code": content_hash(told)[:16]} if told else {}


def _code(value: Any, met: set[int]) -> Any:
    """What the digest is of: the code, and what it finds by name; None for what is known by name, or was told."""
    value = _plain_function(value)
    if not isinstance(value, types.FunctionType | type) or id(value) in met or _is_library(value):
        return None
    met.add(id(value))
    if isinstance(value, type):
        bases = [each for each in value.__mro__ if not _is_library(each)]
        members = [(name, part) for each in bases for name, held in vars(each).items() for part in _functions(held)]
        return [[name, told] for name, part in members if (told := _code(part, met)) is not None]
    uses = {name: value.__globals__[name] for name in sorted(_names(value.__code__)) if name in value.__globals__}
    told = {name: _constant(each) if isinstance(each, _PLAIN) else _code(each, met) for name, each in uses.items()}
    made = [_constant(value.__defaults__), _constant(sorted((value.__kwdefaults__ or {}).items()))]
    wrapped = _code(getattr(value, "__wrapped__", None), met)
    return [_constant(value.__code__), made, wrapped, {name: each for name, each in told.items() if each is not None}]


def _functions(held: Any) -> tuple[Any, ...]:
    """The functions behind an entry of a class."""
    return (held.fget, held.fset) if isinstance(held, property) else (getattr(held, "__func__", held),)


def _names(code: types.CodeType) -> set[str]:
    """Every name that code looks up, with the code within it."""
    return {*code.co_names}.union(*(_names(part) for part in code.co_consts if isinstance(part, types.CodeType)))


def _constant(value: Any) -> Any:
    """A constant of some code; what is none by its class."""
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), list(value.co_names), [_constant(each) for each in value.co_consts]]
    if isinstance(value, tuple | list):
        return [_constant(each) for each in value]
    if isinstance(value, frozenset):
        return sorted((_constant(each) for each in value), key=repr)
    return repr(value) if isinstance(value, _PLAIN) else full_name(type(value))


def _is_library(value: Any) -> bool:
    """Whether a function or class is of an installed library, the standard library, or this package."""
    name = getattr(value, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.partition(".")[0] in _LIBRARIES or "site-packages" in file


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
