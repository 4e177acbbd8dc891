"""The group that this process is in: joined once, asked for a World by each training, left together."""

from __future__ import annotations

from dataclasses import dataclass

from nnx_jax.core.errors import ConfigError
from nnx_jax.distributed.ending import leave_together
from nnx_jax.distributed.joined import JoinedGroup, Membership, checked_seconds, launched_timeout, meet_to_leave
from nnx_jax.distributed.manager import DistributedManager
from nnx_jax.spmd import processes
from nnx_jax.spmd.launched import split_address
from nnx_jax.spmd.world import World


@dataclass(frozen=True)
class DDP:
    """Data parallel: every process has the model, and its own rows. `model.train(..., distributed=DDP())`.

    Args:
        writer_rank: the process that writes the run; all others hold the same records in memory.
        find_unused_parameters: known from torch; a compiled step needs no such search, so it changes nothing.

    Raises:
        ConfigError: (a ValueError) a negative rank.
        TypeError: a value of another type.
    """

    writer_rank: int = 0
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.writer_rank, bool) or not isinstance(self.writer_rank, int):
            raise TypeError(f"DDP.writer_rank must be a whole number, got {self.writer_rank!r}")
        if self.writer_rank < 0:
            raise ConfigError(f"got {self.writer_rank}; ranks are 0 or more", path="DDP.writer_rank")
        if not isinstance(self.find_unused_parameters, bool):
            raise TypeError(f"DDP.find_unused_parameters must be True or False, got {self.find_unused_parameters!r}")


def _adopted(timeout_seconds: float) -> JoinedGroup | None:
    """The group that was joined without us."""
    if (channel := processes.joined(timeout_seconds)) is None:
        return None
    return JoinedGroup(channel.rank, channel.size, timeout_seconds, channel if channel.size > 1 else None)


_member = Membership(
    _adopted,
    "start them with `python -m nnx_jax.launch --processes 2 -- --config cfg.yaml`, or in a script of your own call "
    "nnx_jax.distributed.init_process_group() before anything else uses JAX",
)


def init_process_group(
    *,
    timeout_seconds: float | None = None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> tuple[int, int]:
    """Join the group of processes; the first thing a process does with JAX. Return (rank, world).

    A second call changes nothing and returns the same. A group that was joined by `jax.distributed.initialize()` is
    taken as it is. From now on an error or `sys.exit(n)` that ends the script ends this process at once, and the others
    are told of it; a process that is lost in any other way is named to them.

    Args:
        timeout_seconds: bound of every wait for another process: for its start here, in every agreement, and in a
            collective operation on CPUs. No process may be busy on its own for longer. None: what the launcher was
            told (NNX_JAX_TIMEOUT_SECONDS), else 120.
        coordinator: "host:port" of process 0; None: from the environment.
        num_processes: how many there are; None: from the environment.
        process_id: which one this is, from 0; None: from the environment.
            `nnx_jax.launch`, JAX's own variables, Open MPI, SLURM and Kubernetes are understood, in this order.

    Raises:
        ProcessGroupError: (a RuntimeError) the environment does not say it (the message names what is not set), JAX
            has started its devices already, or a process did not come in time (the message names it).
        ConfigError: (a ValueError) a timeout that is not a positive number of seconds.
    """
    seconds = launched_timeout() if timeout_seconds is None else checked_seconds(timeout_seconds)
    if coordinator is not None:
        split_address(coordinator)
    if (found := _member.current(seconds)) is None:
        place = processes.find_place(coordinator, num_processes, process_id)
        processes.join(place, seconds)
        found = _member.join(JoinedGroup(place.rank or 0, place.size or 1, seconds, processes.joined(seconds)))
        if found.channel is not None:
            _member.end_with_the_script(leave_together)
    DistributedManager._ready = True
    return found.rank, found.size


def shutdown(timeout_seconds: float = 60.0) -> None:
    """Leave the group, once every process wants to: no process closes a connection that another one still uses.

    Without a group, and after it was left, nothing happens.

    Args:
        timeout_seconds: how long to wait for the others.

    Raises:
        ProcessGroupError: (a RuntimeError) not every process came; the message names those. The group stays as it is,
            and the call may be repeated. The end of this process may still wait for them.
        ConfigError: (a ValueError) a timeout that is not a positive number of seconds.
    """
    seconds = checked_seconds(timeout_seconds)
    if (found := _member.current()) is None:
        return
    if found.channel is not None:
        meet_to_leave(found, seconds)
        processes.disconnect()
    _member.forget()


def current_world(writer_rank: int = 0) -> World:
    """Return the processes of the group for one conversation, such as a training.

    Each call begins a new conversation, which knows nothing of failures in older ones; so every process makes as many
    calls, in the same order.

    Args:
        writer_rank: the process that writes.

    Raises:
        ProcessGroupError: (a RuntimeError) this process is in no group.
        ConfigError: (a ValueError) a rank that the group does not have.
    """
    return _member.current_world(writer_rank)


def tell_failure(stage: str, error: BaseException) -> None:
    """Tell the others of an error in the conversation at hand, or before the first one began.

    They stop at their next wait for this process.
    """
    _member.tell_failure(stage, error)


def group_place() -> tuple[int, int]:
    """Return (rank, world).

    Raises:
        ProcessGroupError: (a RuntimeError) this process is in no group.
    """
    found = _member.needed()
    return found.rank, found.size
