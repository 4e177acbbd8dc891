"""pydantic's list of problems, said in our words: where, the value given, what was expected, the nearest legal name."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from nnx_jax.core.codec import dotted
from nnx_jax.core.errors import ConfigError, NnxError, nearest
from nnx_jax.core.registry import OneOf, is_family, lookup

Path = tuple[Any, ...]

_EXPECTED = {
    "missing": "is required",
    "int_type": "expected an integer",
    "int_parsing": "expected an integer",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "mapping_type": "expected a mapping",
    "none_required": "expected none",
    "callable_type": "expected a function",
}


def explain(
    cls: type[BaseModel],
    data: Any,
    error: ValidationError,
    *,
    file: str | None = None,
    lines: Mapping[Path, int] | None = None,
    given: Mapping[Path, str] | None = None,
) -> ConfigError:
    """Return one ConfigError for all problems of `error`, each with its place.

    Args:
        cls: the class that was being built.
        data: what it was built from.
        error: pydantic's finding.
        file: the file `data` was read from; without one, places are written `Class.field`.
        lines: line number of each path in that file.
        given: paths that came from elsewhere, with where (`--set train.seed=x`).
    """
    found = find_problems(cls, data, error)
    owner = spec_class(cls, (), data) or cls
    located = [_locate(owner, path, message, file, lines or {}, given or {}) for path, message in found]
    listed = "".join(f"\n  - {problem.args[0]}" for problem in located)
    kind = _error_class(error)
    summary = kind(located[0].args[0] if len(located) == 1 else f"{len(located)} problems:{listed}")
    summary.path, summary.file, summary.line = located[0].path, located[0].file, located[0].line
    return summary


def _error_class(error: ValidationError) -> type[ConfigError]:
    """Return the class of the first cause that is more than a ConfigError (a refusal to load, say), or ConfigError."""
    causes = (item.get("ctx", {}).get("error") for item in error.errors(include_url=False))
    return next(
        (type(cause) for cause in causes if isinstance(cause, ConfigError) and type(cause) is not ConfigError),
        ConfigError,
    )


def find_problems(cls: type[BaseModel], data: Any, error: ValidationError) -> list[tuple[Path, str]]:
    """Return (path, message) of every problem that pydantic found in `data` for `cls`, each once."""
    found: list[tuple[Path, str]] = []
    for item in error.errors(include_url=False):
        found += [problem for problem in _problems(cls, data, item) if problem not in found]
    return found


def _locate(
    owner: type[BaseModel],
    path: Path,
    message: str,
    file: str | None,
    lines: Mapping[Path, int],
    given: Mapping[Path, str],
) -> ConfigError:
    """Return one problem with the place its value (or the nearest thing around it) came from."""
    around = [path[:end] for end in range(len(path), -1, -1)]
    origin = next((given[part] for part in around if part in given), None)
    if origin is not None:
        return ConfigError(message, path=dotted(path), file=origin)
    if file is None:
        return ConfigError(message, path=dotted((owner.__name__, *path)))
    line = next((lines[part] for part in around if part in lines), None)
    return ConfigError(message, path=dotted(path), file=file, line=line)


def _problems(cls: type[BaseModel], data: Any, item: Any) -> Iterator[tuple[Path, str]]:
    """Yield the places and messages of one pydantic error."""
    path, kind, context = tuple(item["loc"]), item["type"], item.get("ctx", {})
    value = item["input"]
    if kind == "problems":
        for field, message in context["problems"]:
            yield (*path, *split_path(field)), message
    elif kind == "missing":
        yield path, "is required"
    elif kind == "extra_forbidden":
        yield path, f"unknown key '{path[-1]}'{suggest(cls, data, path)}"
    elif kind == "value_error":
        cause = context.get("error")
        message = cause.args[0] if isinstance(cause, NnxError) and cause.args else str(cause)
        told = message.startswith("got ")  # a check that is also called by itself names the value
        yield path, f"got {_shown(value)}; {message}" if _is_scalar(value) and not told else message
    else:
        yield path, f"got {_shown(value)}; {_expectation(kind, context, value, item['msg'])}"


def _expectation(kind: str, context: Mapping[str, Any], value: Any, message: str) -> str:
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        sign = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}[kind]
        return f"expected a value {sign} {next(iter(context.values()))}"
    if kind == "literal_error":
        legal = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        hint = nearest(value, legal) if isinstance(value, str) else ""
        return f"expected one of {context['expected']}{hint if 'did you mean' in hint else ''}"
    if kind in ("too_short", "too_long"):
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"expected {bound} items"
    expected = _EXPECTED.get(kind, message.replace("Input should", "it should"))
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        none = value.lower() == "none"
        expected += " (none is written null)" if none else " (numbers, true and false are written without quotes)"
    return expected


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _shown(value: Any) -> str:
    """Return the value and its type, cut to one short line."""
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return text if value is None or isinstance(value, str) else f"{text} ({type(value).__name__})"


# -- which class stands at a path -------------------------------------------------------------------------------------


def field_names(cls: type[BaseModel]) -> list[str]:
    """Return the keys a mapping for `cls` may have (fields for Python only are left out)."""
    own = "kind" not in cls.model_fields and bool(getattr(cls, "kind", ""))
    names = [name for name, field in cls.model_fields.items() if not field.exclude]
    return ["kind", *names] if own else names


def spec_class(annotation: Any, metadata: Sequence[Any], value: Any) -> type[BaseModel] | None:
    """Return the Spec class that `value` would be read as under an annotation, or None."""
    for mark in metadata:
        if isinstance(mark, OneOf):
            return mark.target(value)
    if typing.get_origin(annotation) is typing.Annotated:
        base, *marks = typing.get_args(annotation)
        return spec_class(base, marks, value)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = (spec_class(part, (), value) for part in typing.get_args(annotation))
        return next((cls for cls in found if cls is not None), None)
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return None
    if isinstance(value, BaseModel):
        return type(value)
    if is_family(annotation):
        kind = value.get("kind") if isinstance(value, Mapping) else value
        try:
            return lookup(annotation.__dict__["family"], kind)
        except ConfigError:
            return annotation
    return annotation


def _known_paths(cls: type[BaseModel], data: Any, around: Path = ()) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Yield the path and class of every specification below (and with) `cls`, outermost first."""
    yield around, cls
    for name, field in cls.model_fields.items():
        value = data.get(name) if isinstance(data, Mapping) else getattr(data, name, None)
        below = spec_class(field.annotation, field.metadata, value)
        if below is not None and not field.exclude and len(around) < 8:
            yield from _known_paths(below, value, (*around, name))


def suggest(cls: type[BaseModel], data: Any, path: Path) -> str:
    """Return what to write instead of an unknown key: a near name, a name it has elsewhere, or the legal ones."""
    key = str(path[-1]).replace("-", "_")
    owner = class_at(cls, data, path[:-1])
    names = field_names(owner) if owner else []
    here = getattr(owner, "also_called", {}).get(key)
    if here or key in names or difflib.get_close_matches(key, names, n=1, cutoff=0.6):
        return f"; did you mean '{here}'?" if here else nearest(key, names)
    root = spec_class(cls, (), data) or cls
    for place, other in _known_paths(root, data):
        name = getattr(other, "also_called", {}).get(key, key)
        if name in field_names(other):
            return f"; did you mean '{dotted((*place, name))}'?"
    return nearest(key, names)


def split_path(text: str) -> Path:
    """Return the steps of a dotted path: `a.b[0].c` and `a.b.0.c` are ("a", "b", 0, "c")."""
    steps = text.replace("[", ".").replace("]", "").split(".") if text else []
    return tuple(int(step) if step.isdecimal() else step for step in steps)


def element_type(annotation: Any, step: Any = 0) -> tuple[Any, tuple[Any, ...]] | None:
    """Return (annotation, metadata) of the item at a step: a number into a tuple, a name into a mapping; else None."""
    if typing.get_origin(annotation) is typing.Annotated:
        return element_type(typing.get_args(annotation)[0], step)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = (element_type(part, step) for part in typing.get_args(annotation))
        return next((item for item in found if item is not None), None)
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is tuple and arguments and isinstance(step, int):
        return arguments[0], ()
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2 and isinstance(step, str):
        return arguments[1], ()
    return None


def annotation_at(cls: type[BaseModel], data: Any, path: Path) -> tuple[Any, tuple[Any, ...], Any] | None:
    """Return (annotation, metadata, value) at a path below `cls`, following the kinds that `data` names.

    None when the path leads nowhere; `value` is None where `data` has nothing there.
    """
    place: tuple[Any, tuple[Any, ...], Any] = (cls, (), data)
    for step in path:
        annotation, metadata, value = place
        owner = spec_class(annotation, metadata, value)
        if owner is not None:
            if step == "kind" and "kind" not in owner.model_fields:
                place = (str, (), None)
                continue
            field = owner.model_fields.get(step) if isinstance(step, str) else None
            if field is None or field.exclude:
                return None
            below = value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
            place = (field.annotation, tuple(field.metadata), below)
            continue
        element = element_type(annotation, step)
        if element is None:
            return None
        place = (*element, _item(value, step))
    return place


def class_at(cls: type[BaseModel], data: Any, path: Path) -> type[BaseModel] | None:
    """Return the Spec class at a path below `cls`, or None."""
    place = annotation_at(cls, data, path)
    return None if place is None else spec_class(*place)


def _item(value: Any, step: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(value, Sequence) and not isinstance(value, str) and isinstance(step, int) and step < len(value):
        return value[step]
    return None
