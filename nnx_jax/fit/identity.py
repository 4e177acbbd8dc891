"""Name and digest of what is given from Python: another text or setting is another function, so another run."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax.core.hashing import content_hash, hash_array, hash_arrays
from nnx_jax.core.spec import Spec
from nnx_jax.fit.call import TrainCall
from nnx_jax.loop.components import StatefulComponent

_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "numpy", "torch", "nnx_jax", *sys.stdlib_module_names} - {"__main__"}
"""Their functions are known by name: an update of a library does not make another run."""

_FUNCTIONS = ("objective", "step", "validation")
GIVEN = (*_FUNCTIONS, "optimizer", "schedule", "start")
"""Under these names an identity knows what a call was given in place of built-in parts."""

_SAME = "told already"
"""Stands for a function or class that was met before in the same description."""

_MODES = ("deterministic", "use_running_average")
"""Attributes of modules that say what they are used for just now."""


def describe_call(call: TrainCall) -> dict[str, Any]:
    """What the run id knows of a call's functions, by the names of `GIVEN`; nothing where none is given."""
    given = dict(zip(_FUNCTIONS, (call.objective, call.train_step_fn, call.eval_step_fn), strict=True))
    known: dict[str, Any] = {name: describe_function(each) for name, each in given.items() if each is not None}
    if call.optimizer is not None:
        known["optimizer"] = describe_function(call.optimizer)
    if call.schedule is not None:
        known["schedule"] = call.schedule.state()
    if call.start is not None:
        known["start"] = call.start.manifest_sha256
    return known


def describe_function(function: Any) -> str:
    """Name and digest of a function or callable object: its text, and the values it was made with.

    These are defaults, what it closes over, and attributes: numbers, text, arrays, weights of modules, functions, and
    tuples, lists, sets, mappings and dataclasses of them; and what an object's `identity()` returns. Attributes that
    begin with `_`, and those of an object with `component_state`, are its state. Of what a function looks up by name
    when it is called, the user's own functions and classes, and plain numbers and text, are known.
    """
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{name}:{content_hash(_told(function, _Trail()))[:16]}"


def describe_module(module: nnx.Module) -> str:
    """Name and digest of a network of the user's own: the text of its classes, and the settings its layers hold."""
    return named_digest(module, _layers(module, new_trail()))


def named_digest(value: Any, told: Any) -> str:
    """The name of a value's class and the digest of what is told of it."""
    return f"{type(value).__qualname__}:{content_hash(told)[:16]}"


def new_trail() -> Any:
    """Where a description begins; what `describe_layer` and the functions of `register_kind` are handed."""
    return _Trail()


_KINDS: list[tuple[type, Callable[[Any, Any], Any]]] = []


def register_kind(kind: type, tell: Callable[[Any, Any], Any]) -> None:
    """Let values of another framework be described.

    Args:
        tell: (value, trail of the description) -> a JSON value that says what is known of it.
    """
    _KINDS.append((kind, tell))


class _Trail:
    """Where a description is: within which objects, and which functions and classes it told already."""

    def __init__(self, above: tuple[int, ...] = (), met: set[int] | None = None) -> None:
        self.above, self.met = above, set() if met is None else met

    def into(self, value: Any) -> _Trail:
        """The trail within a value."""
        return _Trail((*self.above, id(value)), self.met)


def _told(value: Any, trail: _Trail) -> Any:
    """A JSON value that says what is known of a value."""
    if isinstance(value, enum.Enum):
        return [_name(type(value)), value.name]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | complex):
        return repr(value)
    if id(value) in trail.above:
        return "itself"
    inside = trail.into(value)
    if isinstance(value, Mapping):
        return {str(name): _told(item, inside) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_told(item, inside) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array(value)
    if isinstance(value, nnx.Module):
        return [_layers(value, inside), hash_arrays(_weights(value))]
    if (tell := next((tell for kind, tell in _KINDS if isinstance(value, kind)), None)) is not None:
        return tell(value, inside)
    if isinstance(value, Spec):
        return [_name(type(value)), value.state()]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), list(value.co_names), _told(value.co_consts, inside)]
    if isinstance(value, type):
        return _name(value) if _is_library(value) else content_hash(_classes(value, inside))
    if not callable(value):
        return _plain(value, inside)
    return content_hash(_callable(value, inside)) if trail.above else _callable(value, inside)


def _plain(value: Any, inside: _Trail) -> Any:
    """What holds settings without being callable: by its content where that has an order, else by its class."""
    if isinstance(value, set | frozenset):
        return sorted(content_hash(_told(item, inside)) for item in value)
    if isinstance(value, bytes | range | os.PathLike | np.dtype):
        return [_name(type(value)), repr(value)]
    if isinstance(value, SimpleNamespace) or (dataclasses.is_dataclass(value) and not _is_library(type(value))):
        return [_name(type(value)), _told(_held(value), inside)]
    net = getattr(value, "net", None)  # a model
    is_net = isinstance(net, (nnx.Module, *(kind for kind, _ in _KINDS)))
    return _told(net, inside) if is_net else _name(type(value))


def _callable(value: Any, inside: _Trail) -> Any:
    if isinstance(value, functools.partial):
        return ["partial", _told(value.func, inside), _told(value.args, inside), _told(value.keywords, inside)]
    if inspect.ismethod(value):
        return [_told(value.__func__, inside), _told(value.__self__, inside)]
    code = getattr(value, "__code__", None)
    if code is None and hasattr(value, "__wrapped__"):  # as `jax.jit` leaves it
        return _callable(value.__wrapped__, inside)
    if code is None:
        return [_classes(type(value), inside), _attributes(value, inside)]
    made = [value.__defaults__, value.__kwdefaults__, [_content(cell) for cell in value.__closure__ or ()]]
    looked_up = {} if _is_library(value) else _looked_up([value], inside)
    return [_text(value, code), _told(made, inside), *([looked_up] if looked_up else [])]


def _is_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def _text(value: Any, code: CodeType) -> Any:
    """The source of a function; its code where there is no file, and its name where it is a library's."""
    if _is_library(value):
        return _name(value)
    try:
        text = inspect.getsource(value)
    except (OSError, TypeError):
        return [_name(value), _told(code, _Trail())]
    if code.co_name == "<lambda>" and text.count("lambda") > 1:  # which of them the line does not tell
        return [text, _told(code, _Trail())]
    return text


def _classes(kind: type, inside: _Trail) -> Any:
    """The text of a class and of those of the user's that it is made of; a library's by its name."""
    return [_name(each) if _is_library(each) else _class_text(each, inside) for each in kind.__mro__[:-1]]


def _class_text(kind: type, inside: _Trail) -> Any:
    """The source of a class and what its functions look up; its functions one by one where there is no file."""
    functions = [part for item in vars(kind).values() for part in _functions(item)]
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        settings = {name: item for name, item in vars(kind).items() if _is_setting(name, item)}
        return [_name(kind), _told(settings, inside), _told(functions, inside)]
    around = {
        name: _content(cell)
        for each in functions
        for name, cell in zip(each.__code__.co_freevars, each.__closure__ or (), strict=True)
        if name != "__class__"
    }
    found = [_told(around, inside)] if around else []
    looked_up = _looked_up(functions, inside)
    return [text, *found, *([looked_up] if looked_up else [])]


def _functions(item: Any) -> Iterator[FunctionType]:
    """The functions behind an entry of a class."""
    parts = (item.fget, item.fset) if isinstance(item, property) else (getattr(item, "__func__", item),)
    yield from (part for part in parts if isinstance(part, FunctionType))


def _is_setting(name: str, item: Any) -> bool:
    return not name.startswith("_") and isinstance(item, bool | int | float | str | tuple | list | dict)


def _looked_up(functions: Iterable[FunctionType], inside: _Trail) -> dict[str, Any]:
    """What functions find by name outside of themselves: code of the user's, plain numbers and text."""
    found = {}
    for function in functions:
        if "site-packages" in function.__code__.co_filename:
            continue
        for name in _global_names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, bool | int | float | str) or (_is_code(value) and id(value) not in inside.above):
                found[name] = value
    told = {}
    for name in sorted(found):
        known, value = id(found[name]) in inside.met, found[name]
        if _is_code(value):
            inside.met.add(id(value))
        told[name] = _SAME if known else _told(value, inside)
    return told


def _is_code(value: Any) -> bool:
    """A function or class of the user's own, also one that `jax.jit` or `partial` wraps."""
    if isinstance(value, functools.partial):
        return _is_code(value.func)
    wrapped = callable(value) and hasattr(value, "__wrapped__")
    return (isinstance(value, FunctionType | type) or wrapped) and not _is_library(value)


def _global_names(code: CodeType) -> set[str]:
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*(_global_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _attributes(value: Any, inside: _Trail) -> Any:
    identity = getattr(value, "identity", None)
    said = None if identity is None else _told(identity(), inside)
    return [said] if isinstance(value, StatefulComponent) else [said, _told(_held(value), inside)]


def _held(value: Any) -> dict[str, Any]:
    """Attributes of an object, wherever it keeps them, without those that begin with `_`."""
    slots = [name for kind in type(value).__mro__ for name in _listed(getattr(kind, "__slots__", ()))]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    return {name: item for name, item in held.items() if not name.startswith("_")}


def _listed(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _layers(module: nnx.Module, trail: _Trail) -> Any:
    """Classes and settings of a module and of all within it; of a library's layers, plain settings alone."""
    inside, found = trail.into(module), []
    for path, layer in nnx.iter_modules(module):
        held = {name: item for name, item in _held(layer).items() if name not in _MODES and not _is_part(item)}
        found.append([".".join(map(str, path)), *describe_layer(layer, held, inside)])
    return sorted(found, key=lambda each: each[0])


def describe_layer(layer: Any, held: Mapping[str, Any], inside: Any) -> list[Any]:
    """The classes of one layer and the settings it holds, of a library's layer the plain ones alone."""
    if _is_library(type(layer)):
        held = {name: item for name, item in held.items() if _is_number_or_text(item)}
    settings = {name: _told(item, inside) for name, item in sorted(held.items())}
    return [_classes(type(layer), inside), settings]


def _is_part(item: Any) -> bool:
    """Weights and layers, which are known by themselves."""
    return isinstance(item, nnx.Variable | nnx.Pytree | jax.Array) or (
        isinstance(item, list | tuple) and any(_is_part(each) for each in item)
    )


def _is_number_or_text(item: Any) -> bool:
    if isinstance(item, tuple | list):
        return all(_is_number_or_text(each) for each in item)
    return isinstance(item, int | float | str) and not isinstance(item, bool)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _array(value: Any) -> Any:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    found = np.asarray(value)
    return "objects" if found.dtype.hasobject or found.dtype.names else hash_array(found)


def _weights(module: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(module, nnx.filterlib.Not(nnx.RngState)))
    return {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in state}


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
