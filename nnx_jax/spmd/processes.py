"""The group of processes as JAX runs it: joining, the key-value store they share, and leaving within a bound.

The one file that knows `jax.distributed` and its coordination service. What JAX does when a process is lost is to end
the others by SIGABRT, without a name; so who is there when the group begins (`rendezvous`), who is lost (`watch`,
`aborts`) and who is still there when it ends (`meet_to_leave`) is found out here.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

from nnx_jax.core.errors import ProcessGroupError
from nnx_jax.spmd.aborts import AbortGuard
from nnx_jax.spmd.coordination import CoordinationChannel
from nnx_jax.spmd.launched import Launched, is_silent, launched, split_address
from nnx_jax.spmd.rendezvous import is_loopback, meet
from nnx_jax.spmd.watch import Watch
from nnx_jax.spmd.world import Channel

_FLAG = "--xla_cpu_collective_timeout_seconds"
_SILENCE_SECONDS = (5, 100)
"""A process that is silent for longer is taken for lost; the longer one is JAX's own number."""
_JAX_LATER_SECONDS = 60
"""JAX's service takes a process for lost so much later: this process has ended by itself then."""
_UNAWARE_SECONDS = (3.0, 20.0)
"""How long a process may sit in a computation that one of its processes has left."""
_SHUTDOWN_SECONDS = 30
"""Of JAX's barrier at the end, to which all come at once, since they have met before."""
_LEAVE_SECONDS = 5.0
_NAME_SECONDS = 0.25
"""How long the news of who is gone is waited for, at an end for which nobody is named yet."""
_PLACE = "nnx_jax/group/"


@dataclass
class _Guarded:
    """What watches over the group of this process, while there is one."""

    watch: Watch
    aborts: AbortGuard


_guarded: _Guarded | None = None


def find_place(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Launched:
    """Return which process this is, with the coordinator's address; see `launched` for what is asked in which order.

    Raises:
        ProcessGroupError: it cannot be known; the error names what is not set.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    nothing_said = all(value is None for value in given.values()) and is_silent(os.environ)
    found = (_detected() if nothing_said else None) or launched(os.environ, **given)
    if found.coordinator is None and found.size != 1:
        found = Launched(found.source, _address(found.cluster or ""), found.size, found.rank, found.local_rank)
    return found


def _address(cluster: str) -> str:
    """The coordinator's address as JAX works it out for a scheduler."""
    from jax._src.clusters import ClusterEnv

    kind = next(each for each in ClusterEnv._cluster_types if each.name == cluster)
    return kind.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT"))


def _detected() -> Launched | None:
    """What JAX itself detects where no variable says anything, as on a TPU pod."""
    from jax._src.clusters import ClusterEnv

    for kind in ClusterEnv._cluster_types:
        if kind.name not in ("ompi", "slurm") and not kind.opt_in_only_method and kind.is_env_present():
            address = kind.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT"))
            numbers = (kind.get_process_count(), kind.get_process_id())
            return Launched(kind.name or kind.__name__, address, *numbers, kind.get_local_process_id())
    return None


def join(place: Launched, timeout_seconds: float) -> None:
    """Join the group; nothing to do for a group of one.

    Args:
        place: with an address, unless there is one process.
        timeout_seconds: bound of the wait for the others, and later of every collective operation on CPUs.

    Raises:
        ProcessGroupError: JAX has started its devices already, or another process did not come.
    """
    if place.size == 1:
        return
    import jax
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise ProcessGroupError(
            "JAX has started its devices in this process already; join the group before anything else uses JAX: "
            "init_process_group() is the first call of a script, --distributed an option of the command"
        )
    assert place.coordinator is not None
    assert place.size is not None
    assert place.rank is not None
    connections = meet(place.coordinator, place.size, place.rank, timeout_seconds)
    seconds = max(1, math.ceil(timeout_seconds))
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:  # nothing else ends a collective operation that one process does not come to
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={seconds}".strip()
    # JAX's own service takes SIGTERM for itself, and a process would then not hear it; the loop agrees on signals.
    jax.config.update("jax_enable_preemption_service", False)
    host, port = split_address(place.coordinator)
    silence = min(max(seconds, _SILENCE_SECONDS[0]), _SILENCE_SECONDS[1])
    _watch_over(place.rank, place.size, connections, silence, timeout_seconds)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.size,
            place.rank,
            local_device_ids=_local_devices(place),
            cluster_detection_method="deactivate",
            initialization_timeout=max(seconds, 10),
            heartbeat_timeout_seconds=silence + _JAX_LATER_SECONDS,
            shutdown_timeout_seconds=min(max(seconds, 10), _SHUTDOWN_SECONDS),
            # A group on one machine is nobody else's business.
            coordinator_bind_address=f"{'[::1]' if host == '::1' else host}:{port}" if is_loopback(host) else None,
        )
    except BaseException:
        _watch_no_longer()
        raise


def _watch_over(
    rank: int, size: int, connections: dict[int, socket.socket], silence_seconds: float, timeout_seconds: float
) -> None:
    global _guarded
    shortest, longest = _UNAWARE_SECONDS
    watch = Watch(
        rank,
        size,
        connections,
        silence_seconds=silence_seconds,
        end_seconds=min(max(timeout_seconds, shortest), longest),
        last_seconds=max(timeout_seconds, longest),
    )
    _guarded = _Guarded(watch, AbortGuard(watch.has_closed))


def _watch_no_longer() -> None:
    global _guarded
    if _guarded is not None:
        _guarded.watch.close()
        _guarded.aborts.remove()
        _guarded = None


def _local_devices(place: Launched) -> list[int] | None:
    """One accelerator for each process that a scheduler numbered on its machine, as JAX has it; None: all there are."""
    if place.local_rank is None or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    return [place.local_rank]


def joined(timeout_seconds: float) -> CoordinationChannel | None:
    """The store of the group that this process is in; None without one. Imports nothing where JAX was not imported."""
    distributed = sys.modules.get("jax._src.distributed")
    state = None if distributed is None else distributed.global_state
    if state is None or state.client is None:
        return None
    watch = None if _guarded is None else _guarded.watch
    return CoordinationChannel(state.client, state.process_id, state.num_processes, timeout_seconds, watch)


def meet_to_leave(channel: Channel, timeout_seconds: float) -> dict[int, str]:
    """Wait until every process wants to leave; return the ranks that do not, and what became of them ("" if nothing).

    It may be called again.
    """
    channel.put(f"{_PLACE}done/{channel.rank}", "")
    end = time.monotonic() + timeout_seconds
    missing: dict[int, str] = {}
    for rank in range(channel.size):
        if channel.get(f"{_PLACE}done/{rank}", max(end - time.monotonic(), 0.01)) is None:
            lost = channel.gone()
            missing[rank] = lost[1] if lost is not None and lost[0] == rank else ""
    return missing


def say_done(how: str) -> None:
    """Tell the others that this process comes to nothing any more; who waits for it learns of it at once."""
    if _guarded is not None:
        _guarded.watch.say_done(how)


def disconnect() -> None:
    """Leave the group; every process has to be about to, or JAX ends this one after a while."""
    import jax

    jax.distributed.shutdown()
    _watch_no_longer()


def leave(code: int, seconds: float = _LEAVE_SECONDS, channel: Channel | None = None) -> NoReturn:
    """End this process with an exit code, whatever the others do; process 0 is the last to go, within a bound.

    For a command whose group is broken: the interpreter's own end would wait for the others, and JAX would then end the
    process by SIGABRT in place of its exit code. Process 0 runs the coordination service; were it to go first, JAX
    would end the others before they have said what happened to them.
    """
    alarm = threading.Timer(seconds + 1.0, os._exit, [code])  # where the service itself does not answer
    alarm.daemon = True
    alarm.start()
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGINT, signal.SIGTERM):  # the end has begun, and has a bound
            signal.signal(number, signal.SIG_IGN)
    if code and _guarded is not None:
        _guarded.watch.name_the_lost(_NAME_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        if (channel := channel or joined(seconds)) is not None:
            _last_word(channel, code, seconds)
    with contextlib.suppress(Exception):
        for child in sys.modules["multiprocessing"].active_children() if "multiprocessing" in sys.modules else ():
            child.terminate()
    os._exit(code)


def _last_word(channel: Channel, code: int, seconds: float) -> None:
    """Say that this process ends, and how; process 0 then waits for the same word of the others."""
    watch = _guarded.watch if _guarded is not None and isinstance(channel, CoordinationChannel) else None
    how = f"it has ended with exit code {code}"
    if watch is not None:
        (watch.say_gone if channel.rank else watch.say_done)(how)  # process 0 is still here for their last words
    with contextlib.suppress(ProcessGroupError):
        channel.put(f"{_PLACE}gone/{channel.rank}", str(code))
    if channel.rank == 0:
        end = time.monotonic() + seconds
        for rank in range(1, channel.size):
            place, lost = f"{_PLACE}gone/{rank}", watch is not None and watch.has_closed(rank)
            while not lost and time.monotonic() < end and channel.get(place, 0.1) is None:
                lost = watch is not None and watch.has_closed(rank)
        time.sleep(0.1)  # the others are between that word and their end
        if watch is not None:
            watch.say_gone(how)
