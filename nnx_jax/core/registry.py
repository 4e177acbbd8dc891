"""A registry of classes by family and kind: `kind: digits` picks the class registered as ("dataset", "digits").

Kinds are added by the `@register` decorator when their module is imported, so what a configuration can name is exactly
what has been imported: the built-in modules, and those its `imports:` list allows. Nothing here imports by itself.

A kind may be written in full, with its family: `loss.mse`. It must be where operators of any family may stand.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from nnx_jax.core.errors import ConfigError, UnregisteredError, nearest

T = TypeVar("T", bound=type)

_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_CLASSES: dict[tuple[str, str], type] = {}
_IMPORTED: set[str] = set()
_DESCRIBED: ContextVar[frozenset[str]] = ContextVar("families whose JSON Schema is being made", default=frozenset())

ANY_FAMILY = "operator"
"""The family of operators that belong to no narrower one; through it a full kind reaches every family."""


def register(kind: str, *, replace: bool = False) -> Callable[[T], T]:
    """Return a class decorator that enters the class under its family and `kind`, and sets `cls.kind`.

    Running the same definition again (a notebook cell) replaces the old class; another class of the same name is
    refused unless `replace=True`.

    Raises:
        ConfigError: for a class without a family, a kind that is no lower-case name, or one that is taken.
    """

    def enter(cls: T) -> T:
        family = getattr(cls, "family", "")
        if not family:
            raise ConfigError(f"{cls.__name__} has no family; derive it from a family class such as NNParams")
        if not isinstance(kind, str) or not _KIND.match(kind):
            raise ConfigError(f"kind {kind!r} of {cls.__name__}; expected lower-case letters, digits and _ ('my_net')")
        old = _CLASSES.get((family, kind))
        same = old is not None and (old.__module__, old.__qualname__) == (cls.__module__, cls.__qualname__)
        if old is not None and not (replace or same):
            raise ConfigError(
                f"{family} kind '{kind}' is taken by {old.__module__}.{old.__qualname__}; "
                f"choose another name for {cls.__qualname__}, or register it with replace=True"
            )
        cls.kind = kind  # type: ignore[attr-defined]
        _CLASSES[family, kind] = cls
        return cls

    return enter


def unregister(cls: type) -> None:
    """Take a class out again, so that no configuration can name it; objects of it stay as they are.

    Raises:
        ConfigError: for a class that is not registered.
    """
    key = (getattr(cls, "family", ""), cls.__dict__.get("kind", ""))
    if _CLASSES.get(key) is not cls:
        raise ConfigError(f"{cls.__name__} is not registered")
    del _CLASSES[key]
    del cls.kind  # type: ignore[attr-defined]


def is_family(cls: type) -> bool:
    """Return whether a class only stands for its registered members: it names a family and is no kind of it."""
    return bool(cls.__dict__.get("family")) and not cls.__dict__.get("kind")


def kinds(family: str) -> list[str]:
    """Return the registered kinds of a family, sorted."""
    return sorted(kind for known, kind in _CLASSES if known == family)


def full_kind(cls: type) -> str:
    """Return the name that tells a class from every other: `loss.mse`, `scale` for an operator of no narrower family,
    and `module:Class` for one that is not registered, which a configuration can therefore not name."""
    kind, family = cls.__dict__.get("kind"), getattr(cls, "family", "")
    if not isinstance(kind, str):
        return f"{cls.__module__}:{cls.__qualname__}"
    return kind if family == ANY_FAMILY else f"{family}.{kind}"


def _find(family: str, kind: object) -> type | None:
    if not isinstance(kind, str):
        return None
    of, _, name = kind.rpartition(".")
    return _CLASSES.get((of or family, name)) if of in ("", family) or family == ANY_FAMILY else None


def _near(family: str, kind: object) -> str:
    elsewhere = [key for key in _CLASSES if key[0] != family] if family == ANY_FAMILY and isinstance(kind, str) else []
    if same := sorted(f"{of}.{name}" for of, name in elsewhere if name == kind):
        return f"; write it in full, with its family: {' or '.join(same)}"
    return nearest(kind, [*kinds(family), *(f"{of}.{name}" for of, name in elsewhere if "." in str(kind))])


def lookup(family: str, kind: object) -> type:
    """Return the class registered for (family, kind); a full kind is found from its own family and from ANY_FAMILY.

    Raises:
        UnregisteredError: (a ConfigError and a PermissionError) naming the nearest registered kind, and how to bring in
            a class of your own.
    """
    found = _find(family, kind)
    if found is None:
        raise UnregisteredError(
            f"there is no {family} kind {kind!r}{_near(family, kind)} "
            f"({family} classes of your own: register them and list their module under `imports:`)"
        )
    return found


def allow_imports(modules: Iterable[str]) -> None:
    """Import the modules a configuration lists under `imports:`, in order, so that their classes are registered.

    The only way a configuration file makes code run; callers decide whether a file may.

    Raises:
        ConfigError: for something that is no module name, or a module that cannot be imported (its error is the cause).
    """
    for index, name in enumerate(modules):
        path = f"imports.{index}"
        if not isinstance(name, str) or not _MODULE.match(name):
            raise ConfigError(f"got {name!r}; expected a module name such as 'my_project.nets'", path=path)
        try:
            importlib.import_module(name)
            _IMPORTED.add(name)
        except ImportError as error:
            raise ConfigError(
                f"the module '{name}' cannot be imported ({error}); install it, or start from the folder that holds it",
                path=path,
            ) from error


def allowed_function(name: str) -> Callable[..., Any] | None:
    """Return the function `module.function` when it is defined in a module that `allow_imports` was given, else None.

    What such a module itself imports (`from os import system`) is not reached.
    """
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None) if module in _IMPORTED else None
    own = callable(found) and not isinstance(found, type) and getattr(found, "__module__", None) == module
    return found if own else None


class OneOf:
    """Annotation of a field that takes any member of a family: `Annotated[Any, OneOf("dataset")]`.

    The field accepts an instance whose `family` is the named one, a mapping `{kind: ..., ...}`, or a bare kind. It is
    for families whose base class lives on a higher floor; a field of a known base class needs only that class.
    """

    def __init__(self, family: str) -> None:
        self.family = family

    def target(self, value: object) -> type | None:
        """Return the class a mapping or bare kind would become, or None when it cannot be told."""
        return _find(self.family, value.get("kind") if isinstance(value, Mapping) else value)

    def admit(self, value: Any) -> Any:
        """Return the member of the family that `value` stands for.

        Raises:
            ValueError: (pydantic turns it into a located problem) for anything else.
        """
        if getattr(value, "family", None) == self.family:
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, Mapping):
            raise ValueError(f"expected a {self.family}: one you built, or a mapping with a `kind`")
        if "kind" not in value:
            raise ValueError(f"a {self.family} needs a `kind`{nearest('', kinds(self.family))}")
        validator: Any = lookup(self.family, value["kind"])
        return validator.__pydantic_validator__.validate_python(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Give pydantic the one validator."""
        return core_schema.no_info_plain_validator_function(self.admit)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe every registered kind (as registered at the time of the call)."""
        return family_json_schema(self.family, handler)


def family_json_schema(family: str, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
    """Return a JSON Schema that offers every registered kind of a family, told apart by `kind`.

    A member inside a member of the same family is described by its kind alone: there is no end to them.
    """
    names = kinds(family)
    if not names:
        return {"type": "object"}
    if family in _DESCRIBED.get():  # inside a member that holds members: their kind is described, no more
        kind = {"enum": names}
        return {"anyOf": [kind, {"type": "object", "properties": {"kind": kind}, "required": ["kind"]}]}
    members: list[Any] = [lookup(family, kind) for kind in names]
    outer = _DESCRIBED.set(_DESCRIBED.get() | {family})
    try:
        # A union, for pydantic to ask each member for its own description; `kind` makes exactly one of them fit.
        union = handler(core_schema.union_schema([member.__pydantic_core_schema__ for member in members]))
    finally:
        _DESCRIBED.reset(outer)
    return {"anyOf": [{"enum": names}, {"oneOf": union.get("anyOf", [union])}]}
