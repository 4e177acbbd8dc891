"""A Spec is a frozen, validated, hashable piece of configuration: equal state, equal hash.

Built on pydantic with everything set to strict. What this file adds: numpy scalars and lists are taken in and stored
as plain immutable values, defaults are left out of `state()` (so a new field never moves an existing hash), `kind`
picks a registered class, and every problem of an object is told at once, in the words of `core/explain.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticUndefined

from nnx_jax.core import codec
from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.core.explain import explain
from nnx_jax.core.hashing import content_hash
from nnx_jax.core.registry import ANY_FAMILY, family_json_schema, full_kind, is_family, kinds, lookup


class _Environment:
    """Marks a field that says how to run, not what: kept in files, never part of `state()`, equality or a hash."""

    def __repr__(self) -> str:
        return "ENVIRONMENT"


ENVIRONMENT = _Environment()


class Keywords(dict[str, Any]):
    """What a Python call gave a constructor, told by its type from a mapping that may come from a file."""


class FrozenDict(dict[Any, Any]):
    """A mapping that refuses to change; what a Spec stores for a mapping field."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("this mapping belongs to a frozen specification; build a changed one with .replace(...)")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Spec(BaseModel):
    """Base of all configuration. Keyword-only, frozen, strict; raises ConfigError (a ValueError) listing every problem.

    A class with `family = "..."` of its own is a family: calling it with `kind=` builds the registered member, and a
    field of its type takes an instance, a mapping with a `kind`, or a bare kind. Subclasses add rules that look at more
    than one field by extending `problems()`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    family: ClassVar[str] = ""
    also_called: ClassVar[Mapping[str, str]] = {}
    """Names that other trainers give to fields of this class, for the hint at an unknown key."""
    if TYPE_CHECKING:
        kind: ClassVar[str]  # set by @register; no value here, so that a class may have a field of this name

    def __new__(cls, /, *args: Any, **data: Any) -> Self:
        """Choose the registered class when a family is called with `kind=`."""
        if args:
            raise TypeError(f"{cls.__name__} takes keyword arguments only: {cls.__name__}(name=value, ...)")
        return super().__new__(cls._member(data) if cls._is_family() else cls)

    def __init__(self, /, **data: Any) -> None:
        """Validate `data`; see the class.

        Raises:
            ConfigError: one error that lists every wrong field.
        """
        try:
            self.__pydantic_validator__.validate_python(Keywords(data), self_instance=self)
        except ValidationError as error:
            raise explain(type(self), data, error) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested errors keep their path

    # -- validation ---------------------------------------------------------------------------------------------------

    @classmethod
    def _is_family(cls) -> bool:
        """Return whether the class only stands for its registered members."""
        return is_family(cls)

    @classmethod
    def _own_kind(cls) -> str:
        """Return the kind this very class is registered as, or ''."""
        return "" if "kind" in cls.model_fields else cls.__dict__.get("kind", "")

    @classmethod
    def _member(cls, data: Mapping[str, Any]) -> type[Self]:
        if "kind" not in data:
            raise ConfigError(
                f"{cls.__name__} is a family; give a kind: {cls.__name__}(kind=...){nearest('', kinds(cls.family))}"
            )
        return lookup(cls.family, data["kind"])

    @model_validator(mode="wrap")
    @classmethod
    def _admit(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Normalise, dispatch on kind, validate, freeze, then check the rules that span fields."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and cls.family:
            value = {"kind": value}
        if not isinstance(value, Mapping):
            raise cls._stranger(value)
        if cls._is_family():
            return cls._member(value).__pydantic_validator__.validate_python(value)  # type: ignore[return-value]
        spec = handler(cls._normalised(value))
        for name in cls.model_fields:
            if isinstance(getattr(spec, name), (dict, tuple)):
                spec._set(name, _frozen(getattr(spec, name)))
        spec._complete()
        problems = list(spec.problems())
        if problems:
            raise PydanticCustomError("problems", "the values do not fit together", {"problems": problems})
        return spec

    @classmethod
    def _stranger(cls, value: Any) -> Exception:
        """Return what to raise for a value that is neither an object of the class nor a mapping."""
        return PydanticCustomError("spec_type", "expected a mapping or a {name}", {"name": cls.__name__})

    @classmethod
    def _normalised(cls, value: Mapping[Any, Any]) -> dict[Any, Any]:
        data = dict(value)
        own = cls._own_kind()
        if own and "kind" in data and data.pop("kind") not in (own, f"{cls.family}.{own}"):
            raise PydanticCustomError("kind", "{name} is of kind '{own}'", {"name": cls.__name__, "own": own})
        fields = cls.model_fields
        return {k: v if k in fields and fields[k].exclude else _plain(v) for k, v in data.items()}

    def _set(self, name: str, value: Any) -> None:
        """Set a field; for use while the object is being built only."""
        object.__setattr__(self, name, value)

    def _complete(self) -> None:
        """Fill in defaults that depend on other fields, with `_set`; called once, before `problems`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field path, message) for every rule about several fields that is broken."""
        yield from ()

    # -- state --------------------------------------------------------------------------------------------------------

    def default_of(self, name: str) -> Any:
        """Return the default of a field, PydanticUndefined when it must be given; it may depend on other fields."""
        return type(self).model_fields[name].get_default(call_default_factory=True)

    @classmethod
    @cache
    def _open_fields(cls) -> frozenset[str]:
        """Return the fields that take operators of any family, whose kinds are therefore written in full there."""
        return frozenset(name for name, field in cls.model_fields.items() if _is_open(field.annotation))

    def _written(self, name: str, value: Any, write: Callable[[Spec], Any]) -> Any:
        """Return a field's value as JSON values, each specification in it as `write` gives it.

        Raises:
            ConfigError: naming the field, for what JSON cannot hold.
        """
        within = (lambda spec: named(spec, write(spec))) if name in self._open_fields() else write
        try:
            return _jsonable(value, within)
        except TypeError as error:
            place = f"{type(self).__name__}.{name}"
            raise ConfigError(f"{error}; it can be used from Python only", path=place) from None

    def _is_default(self, name: str, field: FieldInfo) -> bool:
        value, default = getattr(self, name), self.default_of(name)
        if default is PydanticUndefined:
            return False
        if value is default or field.exclude:
            return value is default or (isinstance(value, (tuple, dict)) and not value and not default)
        try:
            left, right = (self._written(name, side, lambda spec: spec.state()) for side in (value, default))
        except ConfigError:
            return False
        return type(left) is type(right) and left == right

    def changed(self) -> dict[str, Any]:
        """Return the fields that are not at their default, in the order of declaration."""
        return {n: getattr(self, n) for n, field in type(self).model_fields.items() if not self._is_default(n, field)}

    def state(self, *, environment: bool = False) -> dict[str, Any]:
        """Return the plain JSON values that tell this object from its default, `kind` first.

        Args:
            environment: also give the fields that say how to run rather than what (they are never hashed).

        Raises:
            ConfigError: when a field holds something a file cannot (an array, a function).
        """
        own = self._own_kind()
        state: dict[str, Any] = {"kind": own} if own else {}
        fields = type(self).model_fields
        for name, value in self.changed().items():
            if fields[name].exclude or (ENVIRONMENT in fields[name].metadata and not environment):
                continue
            state[name] = self._written(name, value, lambda spec: spec.state(environment=environment))
        return state

    def get_config(self) -> dict[str, Any]:
        """Return every field by name as plain JSON values, defaults and environment included, `kind` left out.

        A specification inside is its own `get_config()` with its `kind`. For people and logs; `state()` is what is
        stored and hashed.

        Raises:
            ConfigError: when a field holds something a file cannot (an array, a function).
        """
        fields = type(self).model_fields
        within = lambda spec: named(spec, spec.get_config())  # noqa: E731
        return {n: self._written(n, getattr(self, n), within) for n, field in fields.items() if not field.exclude}

    @classmethod
    def from_state(
        cls,
        state: Any,
        *,
        source: str | None = None,
        lines: Mapping[tuple[Any, ...], int] | None = None,
        given: Mapping[tuple[Any, ...], str] | None = None,
    ) -> Self:
        """Return the object a `state()` describes; on a family, `kind` picks the class.

        Args:
            state: a mapping of plain values.
            source: file to name in errors.
            lines: line of each path in that file (`codec.parse_yaml_with_lines`).
            given: paths whose values came from elsewhere, with where (`--set train.seed=1`).

        Raises:
            ConfigError: listing every problem with its file, line and path.
        """
        try:
            return cls.__pydantic_validator__.validate_python(state)  # type: ignore[return-value]
        except ValidationError as error:
            raise explain(cls, state, error, file=source, lines=lines, given=given) from None

    def to_yaml(self) -> str:
        """Return `state()` and the environment fields as YAML; `from_yaml` gives an equal object."""
        return codec.dump_yaml(self.state(environment=True))

    @classmethod
    def from_yaml(cls, text: str | bytes, *, source: str = "<text>") -> Self:
        """Return the object written in `text`; errors carry `source`, line and path.

        Raises:
            ConfigError: for text that is not strict YAML, or values that are not valid.
        """
        state, lines = codec.parse_yaml_with_lines(text, source=source)
        return cls.from_state({} if state is None else state, source=source, lines=lines)

    def content_hash(self) -> str:
        """Return the SHA-256 (64 hex digits) of the canonical JSON of `state()`."""
        return content_hash(self.state())

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed; fields at their default follow the new values' defaults."""
        return type(self)(**{**self.changed(), **changes})

    def __eq__(self, other: object) -> bool:
        """Equal class and equal state."""
        if not isinstance(other, Spec):
            return NotImplemented
        return self is other or (type(self) is type(other) and self.state() == other.state())

    def __hash__(self) -> int:
        """Hash of class and state."""
        return hash((type(self), self.content_hash()))

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse, except for private attributes (caches)."""
        if name not in self.__private_attributes__:
            raise dataclasses.FrozenInstanceError(
                f"cannot assign to field '{name}' of {type(self).__name__}; use .replace({name}=...)"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse."""
        raise dataclasses.FrozenInstanceError(f"cannot delete field '{name}' of {type(self).__name__}")

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe a family by its members, and a member with its `kind`; fields for Python only are left out."""
        if cls._is_family():
            return family_json_schema(cls.family, handler)
        described = handler(schema)
        inner = handler.resolve_ref_schema(described)
        properties: dict[str, Any] = inner.setdefault("properties", {})
        for name, field in cls.model_fields.items():
            if field.exclude:
                properties.pop(name, None)
        if own := cls._own_kind():
            inner["properties"] = {"kind": {"const": own}, **properties}
            inner["required"] = ["kind", *(name for name in inner.get("required", []) if name != "kind")]
        return described


def _plain(value: Any) -> Any:
    """Return numpy scalars as Python's, lists as tuples, -0.0 as 0.0, mappings as dicts; leave the rest alone."""
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        value = value.item()
    if isinstance(value, float):
        return value + 0.0
    if type(value) in (list, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _frozen(value: Any) -> Any:
    if type(value) is tuple:  # a named tuple (an optax transformation) stays what it is
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return FrozenDict({key: _frozen(item) for key, item in value.items()})
    return value


def _is_open(annotation: Any) -> bool:
    """Return whether an annotation mentions a class that stands for operators of any family."""
    if isinstance(annotation, type) and annotation.__dict__.get("family") == ANY_FAMILY:
        return is_family(annotation)
    return any(_is_open(part) for part in typing.get_args(annotation))


def named(spec: Spec, written: Any) -> Any:
    """Return what was `written` of a specification with its full kind (see `registry.full_kind`) in front."""
    if not isinstance(written, dict) or "kind" in type(spec).model_fields:
        return written
    return {"kind": full_kind(type(spec)), **{key: value for key, value in written.items() if key != "kind"}}


def _jsonable(value: Any, write: Callable[[Spec], Any]) -> Any:
    """Return `value` as JSON values, each specification in it as `write` gives it.

    Raises:
        TypeError: for what JSON cannot hold.
    """
    if isinstance(value, Spec):
        return write(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item, write) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_jsonable(item, write) for item in value]
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if callable(getattr(value, "state", None)):
        return _jsonable(value.state(), write)
    raise TypeError(f"a {type(value).__name__} cannot be written in a configuration")
