"""writer_only: a callback that is made on the one process that writes the run, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nnx_jax.core.errors import ConfigError
from nnx_jax.loop.callbacks import Callback, overrides
from nnx_jax.loop.components import ComponentSpec

_PASSED_ON = (
    "on_train_begin", "on_epoch_begin", "on_optimizer_update", "on_updates", "on_validation", "on_epoch_end",
    "on_train_end", "checkpoint_transforms", "component_spec", "component_state", "load_component_state",
)  # fmt: skip


class WriterOnly(Callback):
    """Stands in a list of callbacks for one that only the writer makes; does nothing until it is made.

    Args:
        factory: returns the callback.
    """

    distributed = "writer"

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self.made: Callback | None = None

    def make(self) -> None:
        """Make the callback, the first time; from then on this one is it.

        Raises:
            ConfigError: (a ValueError) the factory returned something else than a Callback.
        """
        if self.made is not None:
            return
        found = self._factory()
        if not isinstance(found, Callback):
            raise ConfigError(
                f"the factory of writer_only must return a Callback, got {found!r}; a plain function needs no "
                "writer_only, it runs on the writer alone"
            )
        self.made, self.history_access = found, found.history_access
        for name in _PASSED_ON:
            if overrides(found, name):  # only these, so that nothing is read for the sake of an empty one
                setattr(self, name, getattr(found, name))

    def component_spec(self) -> ComponentSpec | None:
        return None if self.made is None else self.made.component_spec()

    def component_state(self) -> dict[str, Any]:
        return {} if self.made is None else self.made.component_state()


def writer_only(factory: Callable[[], Any]) -> WriterOnly:
    """Return a callback to give to `train`; `factory` runs once, on the process that writes the run.

    For callbacks that write when they are made, as in `writer_only(lambda: TensorBoardCallback("logs"))`. On the other
    processes of the group nothing is made and nothing happens. A process alone is its own writer.

    Raises:
        TypeError: `factory` cannot be called.
    """
    if not callable(factory):
        raise TypeError(
            f"writer_only takes a function that makes the callback, got {type(factory).__name__}; write "
            "writer_only(lambda: ...)"
        )
    return WriterOnly(factory)


def made_where_written(callbacks: Iterable[Any], writes: bool) -> list[Any]:
    """Make what `writer_only` left to be made, on the process that writes; return all of them."""
    found = list(callbacks)
    for callback in found:
        if writes and isinstance(callback, WriterOnly):
            callback.make()
    return found
