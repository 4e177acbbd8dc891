"""HookSpec: a hook of a run and the frozen configuration it was built from, in one object; and whose engine runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from pydantic import Field

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hooks import StatefulUpdateHook, TrainingUpdateHook
from nnx_jax.core.spec import Spec

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(Spec)


@dataclass_transform(kw_only_default=False, field_specifiers=(Field,))
class _Positional(ModelMetaclass):
    """Tells type checkers that fields may be given by position."""


class HookSpec(Spec, metaclass=_Positional):
    """Base of hooks that a configuration can name: `{kind: gradient_clip, max_norm: 1.0}` is `GradientClipHook(1.0)`.

    The fields are the configuration; they never change. Arguments may be given by position, in the order of the fields.
    What a hook holds on to while it runs goes into private attributes (`PrivateAttr`), which are no part of its state.

    Raises:
        ConfigError: (a ValueError) listing every wrong field.
    """

    family = "hook"

    def __new__(cls, /, *args: Any, **data: Any) -> Self:
        """Choose the registered class when the family itself is called with `kind=`."""
        return super().__new__(cls, **data)

    def __init__(self, /, *args: Any, **data: Any) -> None:
        """Validate the fields; see the class."""
        super().__init__(**(_by_name(type(self), args, data) if args else data))

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested errors keep their path


class UpdateHookSpec(HookSpec, TrainingUpdateHook):
    """A HookSpec that takes part in the update and keeps no state."""

    priority: ClassVar[int] = 50  # pyright: ignore[reportIncompatibleVariableOverride]  # a constant, never a field


class StatefulHookSpec(HookSpec, StatefulUpdateHook):
    """A HookSpec that takes part in the update and keeps state in a slot."""

    priority: ClassVar[int] = 50  # pyright: ignore[reportIncompatibleVariableOverride]  # a constant, never a field


def _by_name(cls: type[Spec], args: tuple[Any, ...], data: dict[str, Any]) -> dict[str, Any]:
    """Name positional arguments after the fields, in their order."""
    names = list(cls.model_fields)
    if len(args) > len(names):
        raise ConfigError(f"{cls.__name__} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
    given = dict(zip(names, args, strict=False))
    twice = sorted(set(given) & set(data))
    if twice:
        raise ConfigError(f"{cls.__name__} got '{twice[0]}' twice, by position and by name; give it once")
    return {**given, **data}


def engine_of(owner: Any, *, unowned: str = "flax") -> str:
    """Return the engine, as `backend` names it, under which an owner of hooks is trained.

    Args:
        owner: a context's `workflow`.
        unowned: for a hook that nothing owns.
    """
    framework = getattr(owner, "framework", None)
    return unowned if owner is None else getattr(framework, "backend", "flax")
