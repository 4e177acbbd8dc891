"""Operators that keep no state themselves: they are given it, and give the next one back.

    @dataclasses.dataclass(frozen=True)
    class RunningSum(CarryState):
        total: float = 0.0

    @register("add_up")
    class AddUp(StatefulOperator):
        def initial_state(self):
            return RunningSum()

        def _apply(self, carrier, state):
            return carrier, state.replace(total=state.total + carrier)

A CarryState is a frozen dataclass and a pytree: it goes through `jax.jit`, `jax.grad` and `jax.lax.scan` as it is.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import ANY_FAMILY

_WAITING: list[type] = []  # classes that jax does not know yet


@dataclasses.dataclass(frozen=True, eq=False)
class CarryState:
    """Base of states; a subclass is a frozen dataclass (`@dataclasses.dataclass(frozen=True)`).

    Every field is part of the pytree, by its name; `dataclasses.field(metadata={"static": True})` makes one a constant
    of the compiled program (it must be hashable then). Constructors must accept whatever JAX puts into a pytree, so
    check values in a class method rather than in `__post_init__`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep this equality through the decorator, which leaves alone what the class itself has."""
        super().__init_subclass__(**kwargs)
        for name in ("__eq__", "__hash__"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(cls, name))
        _WAITING.append(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make sure that the class is complete and that jax, where it has been imported, knows it.

        Raises:
            TypeError: the class is no frozen dataclass.
        """
        if not (_is_decorated(cls) and cls.__dict__["__dataclass_params__"].frozen):
            raise TypeError(f"put @dataclasses.dataclass(frozen=True) on top of {cls.__name__}, a CarryState")
        register_pytrees()
        return super().__new__(cls)

    def to_dict(self) -> dict[str, Any]:
        """Return name -> value of every field, the values as they are."""
        return _fields(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the state that `to_dict` gave; fields with a default may be missing.

        Raises:
            ConfigError: a name that is no field, or a field without default that is missing.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                raise ConfigError(f"{cls.__name__} has no field {name!r}{nearest(name, fields)}")
        absent = (dataclasses.MISSING, dataclasses.MISSING)
        required = [n for n, field in fields.items() if (field.default, field.default_factory) == absent]
        if missing := [name for name in required if name not in values]:
            raise ConfigError(f"{cls.__name__} needs {', '.join(missing)}")
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """Return a state with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        """Same class and equal fields; arrays are equal in shape, dtype and every element (NaN equals nothing)."""
        if not isinstance(other, CarryState):
            return NotImplemented
        return self is other or (type(self) is type(other) and _equal(_fields(self), _fields(other)))

    def __hash__(self) -> int:
        """Hash of class and fields.

        Raises:
            TypeError: naming a field whose value has no hash (an array, a dict, a list).
        """
        for name, value in _fields(self).items():
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{type(self).__name__} has no hash, since its field '{name}' holds a {type(value).__name__}"
                ) from None
        return hash((type(self), tuple(_fields(self).items())))


def register_pytrees() -> None:
    """Make a pytree of every CarryState class so far, if jax is imported; it is not imported for that.

    Making a state does so too. Call this where states that were made before jax was imported are first given to it.
    """
    ready = [cls for cls in _WAITING if _is_decorated(cls)] if sys.modules.get("jax") else []
    if ready:
        from jax.tree_util import register_dataclass

        for cls in ready:
            _WAITING.remove(cls)
            register_dataclass(cls)


def _is_decorated(cls: type) -> bool:
    return "__dataclass_params__" in cls.__dict__


def _fields(state: CarryState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _equal(left: Any, right: Any) -> bool:
    """Return whether two values are equal all through, as one bool."""
    if _is_array(left) and _is_array(right):
        return left.shape == right.shape and left.dtype == right.dtype and _all(left == right)
    if _is_array(left) or _is_array(right):  # a Python number may equal an array without axes
        array, other = (left, right) if _is_array(left) else (right, left)
        return array.shape == () and isinstance(other, complex | float | int) and _all(array == other)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(_equal(*pair) for pair in zip(left, right, strict=True))
    return _all(left == right)


def _all(truth: Any) -> bool:
    return bool(np.asarray(truth).all())


_WAITING.append(CarryState)


class StatefulOperator(Operator):
    """An operator called `(carrier, state) -> (carrier, state)`: the state is an argument, never an attribute.

    In a Sequential one state goes through all of them in order, so they agree on its fields.
    """

    family: ClassVar[str] = ANY_FAMILY

    @property
    def is_stateful(self) -> bool:
        """True."""
        return True

    def initial_state(self) -> Any:
        """Return the state to begin with; None, unless a subclass says another."""
        return None

    def _apply(self, carrier: Any, state: Any) -> tuple[Any, Any]:
        """Return the next carrier and state; a subclass defines it.

        Raises:
            TypeError: when the class does not say what calling it means.
        """
        return super()._apply(carrier, state)
