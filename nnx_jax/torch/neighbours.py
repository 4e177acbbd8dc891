"""Sums over the processes of one machine, through sockets of their own.

A step of gloo is made by threads of its own, and a thread that is woken may wait for its turn for some milliseconds
where the processors are busy. Here whoever waits for the bytes reads them: process 0 adds up what comes, in the order
of the ranks, and sends the sum back, so that all have the same bits.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from nnx_jax.spmd.world import World

_RANK_BYTES = 4
_AWAKE_SECONDS = 0.0003
"""So long a process asks again and again before it sleeps: to wake up takes longer than most of these waits."""


class Neighbours:
    """The processes of a group that share a machine.

    Args:
        sockets: by rank, of process 0 one to every other; of the others the one to process 0. They are closed with
            this object.
        timeout_seconds: bound of every wait for another process.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], timeout_seconds: float) -> None:
        self._sockets, self._timeout_seconds = dict(sorted(sockets.items())), timeout_seconds
        self._received: torch.Tensor | None = None
        microseconds = max(int(1e6 * timeout_seconds), 1)  # 0 would be no bound at all
        bound = struct.pack("ll", *divmod(microseconds, 10**6))
        for each in self._sockets.values():
            each.setblocking(True)  # with a timeout of Python's, every call would be two of the system
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                each.setsockopt(socket.SOL_SOCKET, option, bound)
        weakref.finalize(self, _close, list(self._sockets.values()))

    def add_up(self, vector: torch.Tensor) -> None:
        """Put the sum over all processes into a vector, which is contiguous, on the CPU, and as long everywhere.

        Raises:
            torch.distributed.DistNetworkError: (a RuntimeError) a process is gone, or did not come in time; all others
                learn of it, since the connections end here.
        """
        try:
            self._add_up(vector)
        except BaseException:
            _close(list(self._sockets.values()))
            raise

    def _add_up(self, vector: torch.Tensor) -> None:
        if 0 in self._sockets:
            self._send(0, vector)
            self._receive(0, vector)
            return
        if self._received is None or self._received.shape != vector.shape or self._received.dtype != vector.dtype:
            self._received = torch.empty_like(vector)
        for rank in self._sockets:
            self._receive(rank, self._received)
            vector.add_(self._received)
        for rank in self._sockets:
            self._send(rank, vector)

    def _send(self, rank: int, vector: torch.Tensor) -> None:
        try:
            self._sockets[rank].sendall(_bytes_of(vector))
        except OSError as error:
            raise self._lost(rank, error) from error

    def _receive(self, rank: int, vector: torch.Tensor) -> None:
        left, until, flags = _bytes_of(vector), time.monotonic() + _AWAKE_SECONDS, socket.MSG_DONTWAIT
        while left:
            try:
                count = self._sockets[rank].recv_into(left, 0, flags)
            except OSError as error:
                if not isinstance(error, BlockingIOError) or not flags:
                    raise self._lost(rank, error) from error
                flags = socket.MSG_DONTWAIT if time.monotonic() < until else 0
                continue
            if not count:
                raise dist.DistNetworkError(f"process {rank} has closed its connection; is it gone?")
            left = left[count:]

    def _lost(self, rank: int, error: OSError) -> dist.DistNetworkError:
        if isinstance(error, BlockingIOError):
            return dist.DistNetworkError(f"process {rank} did not come within {self._timeout_seconds:g} s")
        return dist.DistNetworkError(f"the connection to process {rank} broke off: {error}")


def connect(world: World) -> Neighbours | None:
    """Connect the processes of a group; None on all of them where they do not share a machine. All call this at once.

    The socket is in a folder that only this user may enter, and its name is gone when all have come.

    Raises:
        DistributedFailure: a process of the group failed, or did not come in time.
    """
    with contextlib.ExitStack() as left:
        door = _open_door(left) if world.rank == 0 else None
        name = world.gather("where the processes meet", None if door is None else door.getsockname())[0]
        mine = None if world.rank == 0 or name is None else _reach(name, world)
        if mine is not None:
            left.callback(mine.close)
        here = name is not None if world.rank == 0 else mine is not None
        if not all(world.gather("whether they share a machine", here)):
            return None
        if mine is not None:
            left.pop_all()  # it stays open
            return Neighbours({0: mine}, world.timeout_seconds)
        assert door is not None
        return Neighbours(_let_in(door, world), world.timeout_seconds)


def _open_door(left: contextlib.ExitStack) -> socket.socket | None:
    """What the others connect to; None where there is no such thing, or its name would be too long."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    try:
        folder = left.enter_context(tempfile.TemporaryDirectory(prefix="nnx_jax-"))
        door = left.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        door.bind(str(Path(folder, "door")))
        door.listen(socket.SOMAXCONN)
    except OSError:
        return None
    return door


def _reach(name: str, world: World) -> socket.socket | None:
    """A connection to process 0, which knows this process by its first bytes; None where it cannot be reached."""
    with contextlib.ExitStack() as left:
        try:
            mine = left.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            mine.settimeout(world.timeout_seconds)
            mine.connect(name)
            mine.sendall(world.rank.to_bytes(_RANK_BYTES, "little"))
        except OSError:
            return None
        left.pop_all()
        return mine


def _let_in(door: socket.socket, world: World) -> dict[int, socket.socket]:
    """The connections of all others, who have said that they are there."""
    found: dict[int, socket.socket] = {}
    door.settimeout(world.timeout_seconds)
    try:
        while len(found) < world.size - 1:
            guest, _ = door.accept()
            guest.settimeout(world.timeout_seconds)
            said = guest.recv(_RANK_BYTES, socket.MSG_WAITALL)
            if len(said) < _RANK_BYTES:
                guest.close()
                raise ConnectionError("it has closed its connection")
            found[int.from_bytes(said, "little")] = guest
    except OSError as error:
        _close(list(found.values()))
        raise dist.DistNetworkError(f"a process that had come is gone: {error}") from error
    return found


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _bytes_of(vector: torch.Tensor) -> memoryview:
    """The memory of a vector."""
    return vector.numpy().data.cast("B")
