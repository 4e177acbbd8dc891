"""DDPHook: the short name for data-parallel training, asked for before the optimizer is built."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PrivateAttr

from nnx_jax.core.errors import ProcessGroupError, nearest
from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import HookSpec
from nnx_jax.params.fields import Name


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


@register("ddp")
class DDPHook(HookSpec):
    """Replicate the model, split the data, average the gradients: at SETUP, before the optimizer is built.

    With one process it changes nothing. It takes part in no update, so it may stand before or after the other hooks.
    The settings of torch's wrapper are taken and compared; a compiled step has no use for them.

    Raises (when training starts):
        KeyError: a key in `model_keys` that names no model.
        ProcessGroupError: (a RuntimeError) several processes, but they do not know each other, or the trainer at hand
            cannot split its data among them.
    """

    observes: ClassVar[bool] = True
    frequency: ClassVar[int] = 1
    stage: ClassVar[TrainingStage] = TrainingStage.SETUP

    model_keys: Annotated[tuple[Name, ...] | None, BeforeValidator(_listed)] = None
    """Which models; none: every one that has an optimizer."""
    find_unused_parameters: bool | None = None
    """Of torch's wrapper; none: what the distributed manager says."""
    broadcast_buffers: bool | None = None
    """Of torch's wrapper; none: what the distributed manager says."""
    static_graph: bool = False
    """Of torch's wrapper."""
    process_group: Any = Field(default=None, exclude=True)
    """Python only: the group of processes; none: all of them."""
    backend: Name | None = None
    """How processes speak; none: what the devices have."""
    auto_init: bool = True
    """Whether a missing group of processes is made."""
    sampler_cls: Any = Field(default=None, exclude=True)
    """Python only: class of the sampler given to loaders that have none; none: rows dealt in turn."""
    sampler_kwargs: Mapping[Name, bool | int | float | str] = {}
    """Settings of that sampler."""

    _world: int = PrivateAttr(default=1)

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """At SETUP: split the data among the processes, if there are several."""
        owner, models = ctx.workflow, ctx.models or {}
        manager = getattr(owner, "distributed_manager", None)
        self._world = _world_size(manager)
        if self._world == 1:
            return
        for key in self.model_keys or ():
            if key not in models:
                raise KeyError(f"DDPHook.model_keys names '{key}', which is no model{nearest(key, models)}")
        if not _initialized(manager):
            raise ProcessGroupError(
                f"DDPHook found {self._world} processes that do not know each other yet; call "
                "DistributedManager.initialize() (or nnx_jax.distributed.init_process_group()) before the first use of "
                "a model, in every process"
            )
        share = getattr(owner, "share_data_parallel", None)
        if not callable(share):
            raise ProcessGroupError(
                f"DDPHook was given {self._world} processes, but {type(owner).__name__} trains in one; start it with "
                "one process, or leave DDPHook out to train the whole data in each"
            )
        share(self)


def _value(manager: Any, name: str) -> Any:
    """An attribute, or what a method without arguments returns."""
    found = getattr(manager, name, None)
    return found() if callable(found) else found


def _world_size(manager: Any) -> int:
    """Number of processes: the manager's, else the framework's or the launcher's, whichever knows of more."""
    if manager is not None:
        return int(_value(manager, "world_size") or 1)
    jax = sys.modules.get("jax")
    launched = os.environ.get("WORLD_SIZE", "1")
    return max(1 if jax is None else jax.process_count(), int(launched) if launched.isdigit() else 1)


def _initialized(manager: Any) -> bool:
    if manager is not None and hasattr(manager, "is_initialized"):
        return bool(_value(manager, "is_initialized"))
    jax = sys.modules.get("jax")
    return jax is not None and jax.process_count() > 1
