"""Components: objects with state that generations hold and a resume restores, all of them or none."""

from __future__ import annotations

import base64
import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from nnx_jax.core.errors import ComponentRestoreError, ConfigError, NnxError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_MARKS = ({"float"}, {"array", "dtype", "shape"}, {"mapping"})
"""Keys by which a stored state says what JSON has no word for; a dict that has just these is wrapped."""


@dataclass(frozen=True)
class ComponentSpec:
    """What a component is called in a generation.

    Attributes:
        name: letters, digits and `. _ : -`; one of a kind within a run.
        version: schema of the state, 1 or more; a generation with a newer one is refused.
        required: a resume without this state (on either side) is refused, instead of starting it fresh.
        numbered: the name is a default: the second one of it is stored as ".2", and so on.

    Raises:
        ConfigError: a name or version that is none.
    """

    name: str
    version: int = 1
    required: bool = True
    numbered: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(f"ComponentSpec.name takes letters, digits and '. _ : -', got {self.name!r}")
        if isinstance(self.version, bool) or not isinstance(self.version, int) or self.version < 1:
            raise ConfigError(f"ComponentSpec.version must be a whole number >= 1, got {self.version!r}")
        for field in ("required", "numbered"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"ComponentSpec.{field} must be True or False, got {getattr(self, field)!r}")


@runtime_checkable
class StatefulComponent(Protocol):
    """An object of yours that continues after a resume.

    It may also have `check_component_state(state, *, version)`, which returns problems, or raises ValueError, without
    changing anything.
    """

    def component_spec(self) -> ComponentSpec | None:
        """Its name; None while it has no state."""
        ...

    def component_state(self) -> dict[str, Any]:
        """Numbers, text, arrays, and lists and dicts of them."""
        ...

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        """Continue from a state stored as `version`."""
        ...


class Components:
    """The components of one run by name, in the order they are restored.

    Args:
        found: objects that may be components; any other is left out.
        explicit: objects that must be.

    Raises:
        TypeError: an explicit one is none.
        ConfigError: a name is taken.
    """

    def __init__(self, found: Iterable[Any] = (), explicit: Iterable[Any] = ()) -> None:
        self.named: dict[str, tuple[ComponentSpec, StatefulComponent]] = {}
        for component in found:
            if isinstance(component, StatefulComponent) and not isinstance(component, type):
                self._add(component)
        for component in explicit:
            if not isinstance(component, StatefulComponent) or isinstance(component, type):
                raise TypeError(
                    f"components takes objects with component_spec, component_state and load_component_state, "
                    f"got {_called(component)}"
                )
            self._add(component)

    def __iter__(self) -> Any:
        return iter(self.named)

    def _add(self, component: StatefulComponent) -> None:
        spec = component.component_spec()
        if spec is None or any(held is component for _, held in self.named.values()):
            return
        if not isinstance(spec, ComponentSpec):
            told = f"{type(component).__name__}.component_spec() returned {type(spec).__name__}"
            raise TypeError(f"{told}; return a ComponentSpec")
        name, count = spec.name, 2
        while name in self.named:
            if not spec.numbered:
                raise ConfigError(f"two components are named {name!r}; give each a name of its own")
            name, count = f"{spec.name}.{count}", count + 1
        self.named[name] = spec, component

    def state(self) -> dict[str, Any]:
        """Every component's state, version and whether a resume needs it, by name, as JSON values."""
        return {
            name: {
                "version": spec.version,
                "required": spec.required,
                "state": plain(component.component_state(), f"component {name}"),
            }
            for name, (spec, component) in self.named.items()
        }

    def load(self, stored: Mapping[str, Any], *, then: Callable[[], None] = lambda: None) -> None:
        """Restore components, all or none; one that the stored point does not know starts fresh.

        Args:
            then: restores what belongs together with them; a ComponentRestoreError of it counts as theirs.

        Raises:
            ComponentRestoreError: listing every problem: a required state missing on either side, a newer version, a
                state that does not fit. Every component is then as before.
        """
        problems = [
            f"component {name}: the checkpoint needs it and this run has no such component"
            for name, entry in stored.items()
            if entry["required"] and name not in self.named
        ]
        fitting = {}
        for name, (spec, component) in self.named.items():
            wrong = _unfit(spec, component, stored.get(name))
            problems += [f"component {name}: {problem}" for problem in wrong]
            if name in stored and not wrong:
                fitting[name] = stored[name]
        before = {name: copy.deepcopy(self.named[name][1].component_state()) for name in fitting}
        for name, entry in fitting.items():
            try:
                _load(self.named[name][1], revived(entry["state"]), entry["version"])
            except Exception as problem:  # whatever it is, the others are put back
                problems.append(f"component {name}: {_said(problem)}")
        if not problems:
            try:
                then()
            except ComponentRestoreError as refused:
                problems += refused.problems
        if problems:
            raise ComponentRestoreError([*problems, *self._put_back(before)])

    def _put_back(self, before: Mapping[str, Any]) -> list[str]:
        """Undo loads, every one of them; return what went wrong."""
        problems = []
        for name, state in before.items():
            spec, component = self.named[name]
            try:
                _load(component, state, spec.version)
            except Exception as problem:  # the others are put back all the same
                problems.append(f"component {name}: it could not be put back: {_said(problem)}")
        return problems


def _unfit(spec: ComponentSpec, component: Any, entry: Mapping[str, Any] | None) -> list[str]:
    """What is known to be wrong before anything is changed."""
    if entry is None:
        return ["the checkpoint has no state for it"] if spec.required else []
    if entry["version"] > spec.version:
        return [f"stored as version {entry['version']}, known is {spec.version}"]
    check = getattr(component, "check_component_state", None)
    if check is None:
        return []
    try:
        return [str(problem) for problem in check(revived(entry["state"]), version=entry["version"]) or ()]
    except (ValueError, KeyError, TypeError) as problem:
        return [_said(problem)]


def _load(component: Any, state: Any, version: int) -> None:
    """Load a state; a component that does not ask for the version is not told."""
    load = component.load_component_state
    names = inspect.signature(load).parameters
    told = "version" in names or any(known.kind is known.VAR_KEYWORD for known in names.values())
    load(state, **({"version": version} if told else {}))


def _said(problem: Exception) -> str:
    plain_words = isinstance(problem, (ValueError, NnxError))
    return str(problem) if plain_words else f"{type(problem).__name__}: {problem}"


def _called(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__


def plain(value: Any, owner: str) -> Any:
    """JSON values of a state; arrays and non-finite floats with a mark.

    Raises:
        TypeError: something else, bytes and arrays of text among it.
    """
    if isinstance(value, Mapping):
        found = {str(name): plain(item, owner) for name, item in value.items()}
        return {"mapping": found} if set(found) in _MARKS else found
    if isinstance(value, list | tuple):
        return [plain(item, owner) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value)
    array = np.asarray(value)
    if array.dtype.kind in "OSUMm" or array.dtype.names:
        held = f" of {array.dtype}" if isinstance(value, np.ndarray) else ""
        raise TypeError(
            f"{owner}: a state holds numbers, text, arrays of numbers, and lists and dicts of them; found "
            f"{type(value).__name__}{held}"
        )
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"array": data, "dtype": array.dtype.name, "shape": list(array.shape)}


def revived(value: Any) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, Mapping):
        if set(value) == {"float"} and isinstance(value["float"], str):
            return float(value["float"])
        if set(value) == {"mapping"} and isinstance(value["mapping"], Mapping):
            return {name: revived(item) for name, item in value["mapping"].items()}
        if set(value) == {"array", "dtype", "shape"}:
            raw = np.frombuffer(base64.b64decode(value["array"]), _dtype(value["dtype"]))
            return raw.reshape(value["shape"]).copy()
        return {name: revived(item) for name, item in value.items()}
    return [revived(item) for item in value] if isinstance(value, list) else value


def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:  # a 16-bit type that numpy alone does not know
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
