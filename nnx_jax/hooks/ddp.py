"""DDPHook: the short name for data-parallel training, asked for before the optimizer is built."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PrivateAttr

from nnx_jax.core.errors import ConfigError, ProcessGroupError, nearest
from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import HookSpec, engine_of
from nnx_jax.params.fields import Name


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


@register("ddp")
class DDPHook(HookSpec):
    """Replicate the model, split the data, average the gradients: at SETUP, before the optimizer is built.

    Every device of this process gets an equal part of each batch's rows; the numbers are those of one device, and the
    models and the loader stay the objects they are. With one device it changes nothing. It takes part in no update, so
    it may stand before or after the other hooks. The settings of torch's wrapper are taken and compared; a compiled
    step has no use for them.

    With the engine torch it belongs to the processes of a group, one device each: a DataLoader gets a distributed
    sampler where it has none, `set_epoch` is called before every epoch, and the wrapper gets `find_unused_parameters`.
    Buffers are equal on all processes in any case; `init_process_group` makes the group.

    Raises (when training starts):
        KeyError: a key in `model_keys` that names no model.
        ConfigError: (a ValueError) more devices than there are.
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

    devices: Annotated[int, Field(ge=1)] | None = None
    """How many devices of this process; none: all of them, or one under a manager that tells of no `devices`."""

    _split_over: tuple[Any, ...] = PrivateAttr(default=())

    @property
    def split_over(self) -> tuple[Any, ...]:
        """The devices that rows are split over, after SETUP; empty for one."""
        return self._split_over

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """At SETUP: split the data, if there is more than one device or process."""
        owner, models = ctx.workflow, ctx.models or {}
        manager = getattr(owner, "distributed_manager", None)
        self._split_over = ()
        if engine_of(owner) == "torch":
            self._under_torch(models)
            return
        world, found = _world_size(manager), self.devices_for(owner)
        if world == 1 and len(found) == 1:
            return
        self._check_keys(models)
        if world > 1:
            self._share(owner, manager, world)
        elif len(found) > 1:
            self._split_over = found

    def _under_torch(self, models: Mapping[str, Any]) -> None:
        """A torch process has one device; among several, the run wraps the network with this hook's settings."""
        if self.devices not in (None, 1):
            raise ConfigError(
                f"got {self.devices}, but a process of the engine 'torch' has one device; start one process a device "
                "(torchrun) and train with distributed=DDP()",
                path="DDPHook.devices",
            )
        torch: Any = sys.modules["torch"]
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        launched = os.environ.get("WORLD_SIZE", "1")
        world = torch.distributed.get_world_size() if joined else int(launched) if launched.isdigit() else 1
        if world == 1:
            return
        self._check_keys(models)
        if not joined:
            raise ProcessGroupError(
                f"DDPHook found {world} processes that do not know each other yet; call "
                "nnx_jax.torch.distributed.init_process_group() in every process, and train with distributed=DDP()"
            )

    def _check_keys(self, models: Mapping[str, Any]) -> None:
        for key in self.model_keys or ():
            if key not in models:
                raise KeyError(f"DDPHook.model_keys names '{key}', which is no model{nearest(key, models)}")

    def devices_for(self, owner: Any) -> tuple[Any, ...]:
        """The devices that a trainer's data is split over: its own `devices`, those of its manager, or all there are.

        Raises:
            ConfigError: fewer than `devices`.
        """
        jax, manager = sys.modules.get("jax"), getattr(owner, "distributed_manager", None)
        there = [None] if jax is None else jax.local_devices()
        if len(getattr(owner, "devices", None) or ()) > 1:
            found = list(owner.devices)
        elif manager is not None and not hasattr(manager, "devices") and self.devices is None:
            found = there[:1]
        else:
            found = list(there if manager is None else _value(manager, "devices") or there)
        if self.devices is not None and self.devices > len(found):
            raise ConfigError(
                f"got {self.devices}, but there {'is 1 device' if len(found) == 1 else f'are {len(found)} devices'}; "
                "lower it, or leave it out for all (on a CPU, JAX_NUM_CPU_DEVICES in the environment makes more)",
                path="DDPHook.devices",
            )
        return tuple(found[: self.devices])

    def _share(self, owner: Any, manager: Any, world: int) -> None:
        """Ask the trainer to split its data among processes."""
        if not _initialized(manager):
            raise ProcessGroupError(
                f"DDPHook found {world} processes that do not know each other yet; call "
                "DistributedManager.initialize() (or nnx_jax.distributed.init_process_group()) before the first use of "
                "a model, in every process"
            )
        share = getattr(owner, "share_data_parallel", None)
        if not callable(share):
            raise ProcessGroupError(
                f"DDPHook was given {world} processes, but splits the data of a {type(owner).__name__} over the "
                "devices of one; leave it out: NNModel.train(distributed=DDP()) trains in several processes, and "
                "everything else is started with one"
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
