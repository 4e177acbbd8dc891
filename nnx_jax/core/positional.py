"""Operators that are built like a function is called: `MSE("sum")` is `MSE(reduction="sum")`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from nnx_jax.core.operator import Operator


class PositionalOperator(Operator):
    """An Operator whose fields may also be given without their names, in the order they are declared.

    Raises:
        TypeError: more values than fields, or a field given twice.
    """

    def __new__(cls, /, *args: Any, **data: Any) -> Self:
        return super().__new__(cls, **_named(cls, args, data))

    def __init__(self, /, *args: Any, **data: Any) -> None:
        super().__init__(**_named(type(self), args, data))

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested errors keep their path


def _named(cls: type[Operator], args: tuple[Any, ...], data: Mapping[str, Any]) -> dict[str, Any]:
    """All values by field.

    Raises:
        TypeError: more values than fields, or a field given twice.
    """
    fields = list(cls.model_fields)
    if len(args) > len(fields):
        raise TypeError(f"{cls.__name__} takes {', '.join(fields) or 'nothing'}; got {len(args)} values")
    named = dict(zip(fields, args, strict=False))
    if twice := sorted(named.keys() & data):
        raise TypeError(f"{cls.__name__} got {twice[0]} twice: by its place and by its name")
    return {**named, **data}
