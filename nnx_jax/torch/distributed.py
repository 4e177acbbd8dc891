"""Several torch processes that train one model, as `nnx_jax.distributed` does for JAX: the same calls.

torchrun --standalone --nproc_per_node=2 train.py

rank, world = distributed.init_process_group()
train = distributed.train_loader(dataset, batch_size=32, seed=0)
run = model.train(params.replace(train_loader=train), distributed=distributed.DDP())
distributed.shutdown()
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from nnx_jax.core.errors import DistributedFailure, ProcessGroupError
from nnx_jax.distributed import group
from nnx_jax.distributed.joined import Membership, checked_seconds, launched_timeout, meet_to_leave
from nnx_jax.loop.writer_only import writer_only
from nnx_jax.spmd import processes
from nnx_jax.spmd.watch import EXIT_LOST, lost_text
from nnx_jax.spmd.world import ALONE, Channel, World
from nnx_jax.torch import process_group
from nnx_jax.torch.allowed import DDP
from nnx_jax.torch.channel import StoreChannel

if TYPE_CHECKING:
    from nnx_jax.data.deal import DealtLoader

__all__ = [
    "DDP",
    "DistributedFailure",
    "current_world",
    "init_process_group",
    "open_world",
    "shutdown",
    "tell_failure",
    "train_loader",
    "validation_loader",
    "writer_only",
]

_member = Membership(
    process_group.adopted,
    "start the processes with `torchrun --standalone --nproc_per_node=2 train.py`, and call "
    "nnx_jax.torch.distributed.init_process_group() in each",
)


def init_process_group(timeout_seconds: float | None = None) -> tuple[int, int]:
    """Join the group of processes that torchrun started. Return (rank, world).

    gloo connects CPUs, nccl the GPUs where every process of this machine has one of its own, which becomes torch's
    current device. A second call changes nothing and returns the same; a group that was joined by torch's own
    `init_process_group` is taken as it is. From now on an error that ends the script ends this process at once, and the
    others are told of it.

    Args:
        timeout_seconds: bound of every wait for another process: here, in every agreement and in every collective
            operation. No process may be busy on its own for longer. None: NNX_JAX_TIMEOUT_SECONDS, else 120.

    Raises:
        ProcessGroupError: (a RuntimeError) the environment does not say which group this is (the message names what is
            not set), or a process did not come in time (the message names it).
        ConfigError: (a ValueError) a timeout that is not a positive number of seconds.
    """
    seconds = launched_timeout() if timeout_seconds is None else checked_seconds(timeout_seconds)
    if (found := _member.current(seconds)) is None:
        found = _member.join(process_group.join(process_group.launched(os.environ), seconds))
        if found.channel is not None:
            _member.end_with_the_script(_end_of_script)
    return found.rank, found.size


def shutdown(timeout_seconds: float = 60.0) -> None:
    """Leave the group, once every process wants to: no process closes a connection that another one still uses.

    Without a group, and after it was left, nothing happens.

    Args:
        timeout_seconds: how long to wait for the others.

    Raises:
        ProcessGroupError: (a RuntimeError) not every process came; the message names those. The group stays as it is,
            and the call may be repeated. The end of this process may still wait for them, for as long as the group's
            own timeout.
        ConfigError: (a ValueError) a timeout that is not a positive number of seconds.
    """
    seconds = checked_seconds(timeout_seconds)
    if (found := _member.current()) is None:
        return
    meet_to_leave(found, seconds)
    process_group.let_go(found)
    _member.forget()


def _end_of_script(channel: Channel) -> None:
    """At the end of a script that did not leave: wait for the others within the group's timeout, who need the store.

    A process that has lost another one by then ends with an exit code that is not 0.
    """
    found = _member.needed()
    with contextlib.suppress(ProcessGroupError):
        if isinstance(channel, StoreChannel) and channel.watch is not None:
            channel.watch.say_done("its script has come to an end")
        meet_to_leave(found, found.timeout_seconds)
        process_group.let_go(found)
        return
    if (lost := channel.gone()) is not None:
        print(f"process group: {lost_text(*lost, channel.size)}; this one came to its end", file=sys.stderr)
        leave(EXIT_LOST)


def current_world(writer_rank: int = 0) -> World:
    """Return the processes of the group for one conversation, such as a training.

    Every process makes as many calls, in the same order; see `nnx_jax.distributed.current_world`.

    Raises:
        ProcessGroupError: (a RuntimeError) this process is in no group.
        ConfigError: (a ValueError) a rank that the group does not have.
    """
    return _member.current_world(writer_rank)


def tell_failure(stage: str, error: BaseException) -> None:
    """Tell the others of an error in the conversation at hand; they stop at their next wait for this process."""
    _member.tell_failure(stage, error)


def leave(code: int) -> NoReturn:
    """End this process with an exit code, whatever the others do, once they know; see `spmd.processes.leave`."""
    found = _member.current()
    processes.leave(code, channel=None if found is None else found.channel)


def open_world(distributed: Any, what: str = "NNModel.train") -> World:
    """Return the processes that train together.

    Args:
        distributed: a DDP; None for a process alone.
        what: the call, for the error.

    Raises:
        TypeError: something else.
        ProcessGroupError: (a RuntimeError) a DDP without a group, or a group of several processes without a DDP.
        ConfigError: (a ValueError) a writer_rank that this group does not have.
    """
    if distributed is None:
        if (found := _member.current()) is not None and found.size > 1:
            raise ProcessGroupError(
                f"{what} would train {found.size} models here, one in each process of this group, all writing the same "
                "run; train one together with distributed=DDP(), or start a single process"
            )
        return ALONE
    if not isinstance(distributed, group.DDP):
        raise TypeError(f"distributed must be a DDP, got {distributed!r}; from nnx_jax.torch.distributed import DDP")
    world = current_world(distributed.writer_rank)
    world.broke_off = process_group.broke_off
    return world


def train_loader(dataset: Any, batch_size: int, *, policy: str = "pad", seed: int = 0) -> DealtLoader:
    """Return this process's training batches, as `nnx_jax.distributed.train_loader` does.

    Raises:
        ProcessGroupError: (a RuntimeError) this process is in no group.
        DataError: (a ValueError) no rows, a batch size below 1, another policy, a negative seed.
        TypeError: a dataset without a length.
    """
    from nnx_jax.data.deal import dealt_loader

    found = _member.needed()
    return dealt_loader(dataset, batch_size, policy=policy, seed=seed, rank=found.rank, world=found.size)


def validation_loader(dataset: Any, batch_size: int) -> DealtLoader:
    """Return this process's validation batches: rows `rank::world`, so that each is scored once; maybe none.

    Raises:
        ProcessGroupError, DataError, TypeError: as of `train_loader`.
    """
    from nnx_jax.data.deal import validation_shard

    found = _member.needed()
    return validation_shard(dataset, batch_size, rank=found.rank, world=found.size)
