"""DistributedManager: which process this is, of how many, and what it computes on."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from nnx_jax.core.errors import ProcessGroupError


class DistributedManager:
    """What a workflow asks about its processes; the same numbers in every part of a run.

    Call `DistributedManager.initialize()` once in every process, before the first use of a model. With one process it
    changes nothing. Several processes must have been joined before, by `init_process_group()` or JAX's own start-up
    (`jax.distributed`), and the numbers then come from there.

    Args:
        find_unused_parameters, broadcast_buffers: kept for DDPHook, which compares them; a compiled step needs neither.

    Raises:
        ProcessGroupError: (a RuntimeError) `initialize` was not called.
    """

    _ready: ClassVar[bool] = False

    def __init__(self, *, find_unused_parameters: bool = False, broadcast_buffers: bool = False) -> None:
        if not self._ready:
            raise ProcessGroupError("the processes are not initialised; call DistributedManager.initialize() first")
        self.find_unused_parameters, self.broadcast_buffers = find_unused_parameters, broadcast_buffers

    @staticmethod
    def initialize() -> None:
        """Note that the processes may be asked about; calling it again changes nothing.

        Raises:
            ProcessGroupError: the launcher started several processes, but JAX knows of one only.
        """
        launched, joined = os.environ.get("WORLD_SIZE", "1"), _jax().process_count()
        if launched.isdigit() and int(launched) > joined:
            raise ProcessGroupError(
                f"the launcher started {launched} processes (WORLD_SIZE), but JAX knows of {joined}; join them with "
                "nnx_jax.distributed.init_process_group(), in every process, before anything else uses JAX"
            )
        DistributedManager._ready = True

    @staticmethod
    def is_initialized() -> bool:
        """Whether `initialize` was called."""
        return DistributedManager._ready

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return int(_jax().process_index())

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine: the launcher's, 0 without one."""
        found = os.environ.get("LOCAL_RANK", "0")
        return int(found) if found.isdigit() else 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return int(_jax().process_count())

    @property
    def distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world_size > 1

    @property
    def devices(self) -> list[Any]:
        """All devices of this process."""
        return list(_jax().local_devices())

    @property
    def device(self) -> Any:
        """The first device of this process."""
        return _jax().local_devices()[0]


def _jax() -> Any:
    import jax

    return jax
