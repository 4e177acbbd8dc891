"""Command-line overrides: `train.optim.max_lr=1e-3` on top of a file, read the way the field's type asks for.

Values are YAML 1.2 (`1e-3`, `0x10`, `[1, 2]`, `{a: 1}`, quotes for text), with four allowances that a file does not
have, because a shell word carries no type: `none`, `None`, `null` and `~` are none wherever none is legal; a true/false
field also takes yes/no, on/off and 1/0; a list field takes `1,2,3`; a text field takes the word as it stands, so a text
`no` or `123` stays text.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from nnx_jax.core.codec import dotted, parse_yaml
from nnx_jax.core.errors import ConfigError
from nnx_jax.core.explain import Path, annotation_at, element_type, spec_class, split_path, suggest

_TRUE = frozenset(("true", "yes", "on", "1"))
_FALSE = frozenset(("false", "no", "off", "0"))
_NONE = frozenset(("none", "null", "~"))


def split_overrides(overrides: Sequence[str]) -> dict[Path, str]:
    """Return {path: text of the value}, those that choose a `kind` first (the other paths depend on it).

    Raises:
        ConfigError: for a word without `=`, an empty value, or a path that is given twice or inside another.
    """
    found: dict[Path, str] = {}
    for word in overrides:
        name, equals, text = word.partition("=")
        path = split_path(name.strip())
        if not equals or not path or "" in path:
            raise ConfigError(f"got {word!r}; expected path=value, as in train.optim.max_lr=1e-3", file="--set")
        if not text.strip():
            raise ConfigError("has no value; write none for none, or '\"\"' for empty text", path=name, file="--set")
        for other in found:
            shared = min(len(path), len(other))
            if path[:shared] == other[:shared]:
                how = "is given twice" if path == other else f"overlaps with {dotted(other)}"
                raise ConfigError(f"{how}; give each value once", path=dotted(path), file="--set")
        found[path] = text.strip()
    return dict(sorted(found.items(), key=lambda item: item[0][-1] != "kind"))


def apply_overrides(
    cls: type[BaseModel], data: dict[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[Path, str]]:
    """Return a changed copy of the plain mapping `data`, and {path: where it came from} for error messages.

    Nothing is validated but the paths and the form of the values; the specification does the rest.

    Raises:
        ConfigError: as `split_overrides`, and for a path that the specification does not have (with near matches).
    """
    changed = deepcopy(data)
    origins: dict[Path, str] = {}
    for path, text in split_overrides(overrides).items():
        place = _checked(cls, changed, path)
        value = _value(place[0], text, path)
        _store(cls, changed, path, value)
        origins[path] = f"--set {dotted(path)}={text}"
    return changed, origins


def _checked(cls: type[BaseModel], data: Any, path: Path) -> tuple[Any, tuple[Any, ...], Any]:
    """Return the annotation at a path, or say which step leads nowhere."""
    for end in range(1, len(path) + 1):
        if annotation_at(cls, data, path[:end]) is None:
            message = f"there is no '{path[end - 1]}' here{suggest(cls, data, path[:end])}"
            raise ConfigError(message, path=dotted(path), file="--set")
    place = annotation_at(cls, data, path)
    assert place is not None
    return place


def _members(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, without the wrapping of Annotated."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in _members(part)]
    return [annotation]


def _is_text(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Literal:
        return all(isinstance(value, str) for value in typing.get_args(annotation))
    return annotation is str


def _value(annotation: Any, text: str, path: Path) -> Any:
    """Return the value of `text` for a field of this annotation; what does not fit is left for validation to refuse."""
    members = _members(annotation)
    concrete = [member for member in members if member is not type(None)]
    nullable = type(None) in members or Any in members
    if text.lower() in _NONE and (nullable or not any(_is_text(member) for member in concrete)):
        return None
    if concrete == [bool]:
        word = text.lower()
        return True if word in _TRUE else False if word in _FALSE else text
    source = f"--set {dotted(path)}={text}"
    if any(_is_text(member) for member in concrete) and not text.startswith(("[", "{", '"', "'")):
        return text
    element = element_type(annotation)
    if element is not None and any(typing.get_origin(member) is tuple for member in concrete):
        if text.startswith("["):
            return parse_yaml(text, source=source)
        if any(_is_text(member) for member in _members(element[0])):
            return [part.strip() for part in text.split(",")]
        return parse_yaml(f"[{text}]", source=source)
    return parse_yaml(text, source=source)


def _store(cls: type[BaseModel], data: dict[str, Any], path: Path, value: Any) -> None:
    """Put a value at a path, building what is missing on the way and writing out a bare kind as a mapping."""
    at: Any = data
    for end, step in enumerate(path):
        if isinstance(at, list) and not (isinstance(step, int) and step < len(at)):
            message = f"the list {dotted(path[:end])} has {len(at)} items; set it as a whole"
            raise ConfigError(message, path=dotted(path), file="--set")
        if not isinstance(at, (dict, list)):
            message = f"{dotted(path[:end])} is {at!r}, which has no '{step}'"
            raise ConfigError(message, path=dotted(path), file="--set")
        if end == len(path) - 1:
            at[step] = value
            return
        below = at[step] if isinstance(at, list) else at.get(step)
        if isinstance(below, str) and _is_kind(cls, data, path[: end + 1]):
            below = {"kind": below}
        at[step] = at = {} if below is None else below


def _is_kind(cls: type[BaseModel], data: Any, path: Path) -> bool:
    place = annotation_at(cls, data, path)
    return place is not None and spec_class(*place) is not None
