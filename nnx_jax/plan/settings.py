"""Settings: what a plan was told so far, frozen and unchecked; merging is the only thing done here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from nnx_jax.core.spec import FrozenDict, Spec

LENGTHS = ("n_epochs", "max_steps")
"""Two ways to say one thing: whoever says one takes the other back."""
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Settings:
    """The parts of an experiment, each as it was given.

    `model`, `train` and `data` are whole parameter objects; `model_changes`, `train_changes` and `data_changes` are
    fields said one by one, and they win over the object. What is None was not said.
    """

    model: Any = None
    model_changes: Mapping[str, Any] = FrozenDict()
    module: Any = None
    loss: Any = None
    train: Any = None
    train_changes: Mapping[str, Any] = FrozenDict()
    data: Any = None
    data_changes: Mapping[str, Any] = FrozenDict()
    checkpoint: Any = None
    mesh: Any = None
    sharding: Any = None
    elastic: bool = False
    callbacks: tuple[Any, ...] = ()
    callback_factories: tuple[Any, ...] = ()
    hooks: tuple[Any, ...] = ()
    train_step_fn: Callable[..., Any] | None = None
    eval_step_fn: Callable[..., Any] | None = None
    objective: Any = None
    components: tuple[Any, ...] = ()
    provenance: Any = None
    history: Any = None

    def changed(self, **changes: Any) -> Self:
        """Return a copy; lists and mappings in it are copies too, so that later edits of theirs reach no plan."""
        return dataclasses.replace(self, **{name: held(value) for name, value in changes.items()})

    def whole(self, part: str, given: Any) -> Self:
        """Return a copy with a new parameter object; earlier single fields stay, save those the object speaks of."""
        said = set(given.changed()) if isinstance(given, Spec) else set()
        if said & set(LENGTHS):
            said |= set(LENGTHS)
        kept = {name: value for name, value in getattr(self, f"{part}_changes").items() if name not in said}
        return dataclasses.replace(self, **{part: given, f"{part}_changes": FrozenDict(kept)})

    def field(self, part: str, **fields: Any) -> Self:
        """Return a copy with single fields of a part."""
        before = {n: v for n, v in getattr(self, f"{part}_changes").items() if n not in LENGTHS or not _length(fields)}
        return self.changed(**{f"{part}_changes": {**before, **fields}})

    def state_of(self, part: str) -> dict[str, Any]:
        """Return the fields of a part that differ from their defaults, single fields over the object's."""
        base, changes = getattr(self, part), getattr(self, f"{part}_changes")
        fields = base.changed() if isinstance(base, Spec) else {}
        if _length(changes):
            fields = {name: value for name, value in fields.items() if name not in LENGTHS}
        return {**fields, **changes}

    def said(self, part: str) -> bool:
        """Whether anything was said of a part."""
        return getattr(self, part) is not None or bool(getattr(self, f"{part}_changes"))


def held(value: Any) -> Any:
    """Return lists as tuples and plain mappings as frozen ones, all the way down; everything else as it is."""
    if type(value) in (list, tuple):
        return tuple(held(item) for item in value)
    if type(value) in (dict, FrozenDict):
        return FrozenDict({name: held(item) for name, item in value.items()})
    return value


def _length(fields: Mapping[str, Any]) -> bool:
    return any(name in fields for name in LENGTHS)
