"""A builder collects a variant and modifiers step by step and gives a frozen specification at the end."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, Self, TypeVar

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.spec import Spec

P = TypeVar("P", bound=Spec)


class Builder(Generic[P]):
    """Base of the builders: `Params.builder().variant(...).modifier(...).build()`.

    A variant chooses the kind and its own settings; choosing another replaces it. A modifier sets what every kind has
    and survives a change of variant. A class of one kind has modifiers only. Built specifications never change
    afterwards.
    """

    target: ClassVar[type[Spec]]
    variants: ClassVar[tuple[str, ...]] = ()
    modifiers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._variant: dict[str, Any] | None = None
        self._modifiers: dict[str, Any] = {}

    @classmethod
    def from_params(cls, params: P) -> Self:
        """Return a builder whose `build()` equals `params`.

        Raises:
            TypeError: for anything but the builder's own kind of specification.
        """
        if not isinstance(params, cls.target):
            raise TypeError(f"{cls.__name__} builds {cls.target.__name__}, got a {type(params).__name__}")
        given = params.changed()
        builder = cls()
        builder._modifiers = {name: given.pop(name) for name in cls.modifiers if name in given}
        builder._variant = {"kind": params.kind, **given} if cls.variants else None
        return builder

    def copy(self) -> Self:
        """Return an independent builder in the same state."""
        twin = type(self)()
        twin._variant = None if self._variant is None else dict(self._variant)
        twin._modifiers = dict(self._modifiers)
        return twin

    def build(self) -> P:
        """Return the validated specification.

        Raises:
            ConfigError: before a variant is chosen, or when the values are wrong.
        """
        if self._variant is None and self.variants:
            choices = ", ".join(f".{name}()" for name in self.variants)
            raise ConfigError(f"a {self.target.__name__} builder has no variant yet; call one of {choices} first")
        return self.target(**{**(self._variant or {}), **self._modifiers})  # type: ignore[return-value]

    def _choose(self, kind: str, **given: Any) -> Self:
        """Choose a variant; settings that are None keep the kind's default."""
        self._variant = {"kind": kind, **{name: value for name, value in given.items() if value is not None}}
        return self

    def _modify(self, **given: Any) -> Self:
        self._modifiers.update(given)
        return self
