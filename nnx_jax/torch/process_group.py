"""The group of processes as torch.distributed runs it: what torchrun says, joining within a bound, and letting go.

The store is opened here and handed to torch, since a store that torch opens by itself waits without saying for whom.
"""

from __future__ import annotations

import itertools
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nnx_jax.core.errors import NnxError, ProcessGroupError
from nnx_jax.distributed.joined import JoinedGroup
from nnx_jax.spmd.rendezvous import meet
from nnx_jax.spmd.watch import Watch
from nnx_jax.torch.channel import StoreChannel

_c10d: Any = dist  # whose stores are no part of its exported names
_PLACE = "nnx_jax/torch/"
_LEAVE_SECONDS = 5.0
"""How long the process that keeps the store waits for the others' last word, once all want to leave."""
_kept: dict[tuple[str, int], Any] = {}
"""Stores that this process keeps, by address, until its end: another process may join again before this one does."""
_DOOR = "watch/port"
_SILENCE_SECONDS = (5.0, 100.0)
"""A process that is silent for the group's timeout is taken for lost, within these."""
_joins = itertools.count()
"""A store that torchrun keeps outlives a group; every group of this process has keys of its own in it."""


@dataclass(frozen=True)
class Launched:
    """What torchrun says to a process.

    Attributes:
        rank, size: which process this is, of how many.
        local_rank, local_size: the same on this machine.
        host, port: where the store is.
        keeps_store: this process keeps it; else torchrun or process 0 does.
        attempt: how often torchrun started the processes anew.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    keeps_store: bool
    attempt: int


def launched(environ: Mapping[str, str]) -> Launched:
    """Return what the environment says.

    Raises:
        ProcessGroupError: (a RuntimeError) a variable is missing or not the number it must be; it is named.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not environ.get(name)]:
        raise ProcessGroupError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so this process does not know its "
            "group; start the processes with `torchrun --standalone --nproc_per_node=2 train.py`, which sets "
            "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    size = _number(environ, "WORLD_SIZE", 1, None)
    rank = _number(environ, "RANK", 0, size)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, None, size)
    local_rank = _number(environ, "LOCAL_RANK", 0, None, rank)
    kept = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port, attempt = (
        _number(environ, "MASTER_PORT", 0, 65536),
        _number(environ, "TORCHELASTIC_RESTART_COUNT", 0, None, 0),
    )
    return Launched(rank, size, local_rank, local_size, environ["MASTER_ADDR"], port, not kept and rank == 0, attempt)


def _number(environ: Mapping[str, str], name: str, least: int, below: int | None, default: int = 0) -> int:
    text = environ.get(name)
    if not text:
        return default
    if not text.isdecimal() or int(text) < least or (below is not None and int(text) >= below):
        limit = f"from {least}" if below is None else f"from {least} to {below - 1}"
        raise ProcessGroupError(f"{name} is {text!r}; it must be a whole number {limit}")
    return int(text)


def join(place: Launched, timeout_seconds: float) -> JoinedGroup:
    """Join the group and start torch.distributed in it: gloo, and nccl where each process has a GPU of its own.

    Raises:
        ProcessGroupError: a process did not come in time, or torch could not connect them.
    """
    begun = time.monotonic()
    bound = timedelta(seconds=timeout_seconds)
    prefix = f"{_PLACE}{place.attempt}.{next(_joins)}"
    store = _c10d.PrefixStore(prefix, _open(place, timeout_seconds, place.keeps_store))
    channel = None
    if place.size > 1:
        # A client of its own: torch's is locked while torch waits for a key.
        mine = _c10d.PrefixStore(f"{prefix}/channel", _open(place, timeout_seconds, keeps=False))
        channel = StoreChannel(mine, place.rank, place.size, timeout_seconds)
        _meet(channel, timeout_seconds - (time.monotonic() - begun))
        channel.watch = _watch_over(channel, place.host)
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= place.local_size
    if cuda:
        torch.cuda.set_device(place.local_rank)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=bound)
    except NnxError:
        raise
    except Exception as error:
        raise ProcessGroupError(
            f"torch could not connect the {place.size} processes by {backend}: {plain(error)}"
        ) from error
    return JoinedGroup(place.rank, place.size, timeout_seconds, channel)


def _open(place: Launched, timeout_seconds: float, keeps: bool) -> Any:
    if keeps and (place.host, place.port) in _kept:
        return _kept[place.host, place.port]
    bound = timedelta(seconds=timeout_seconds)
    try:
        store = _c10d.TCPStore(place.host, place.port, None, keeps, bound, wait_for_workers=False, multi_tenant=True)
    except Exception as error:
        at = f"{place.host}:{place.port}"
        if keeps:
            raise ProcessGroupError(
                f"process 0 cannot keep the store of the group at {at} (MASTER_ADDR, MASTER_PORT): {plain(error)}"
            ) from error
        raise ProcessGroupError(
            f"process 0 of {place.size} could not be reached at {at} (MASTER_ADDR, MASTER_PORT) within "
            f"{timeout_seconds:g} s: {plain(error)}"
        ) from error
    if keeps:
        _kept[place.host, place.port] = store
    return store


def _meet(channel: StoreChannel, seconds: float) -> None:
    """Wait until every process is here."""
    channel.put(f"here/{channel.rank}", "")
    end = time.monotonic() + seconds
    found = [channel.get(f"here/{rank}", max(end - time.monotonic(), 0.01)) for rank in range(channel.size)]
    if missing := [str(rank) for rank, word in enumerate(found) if word is None]:
        who = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing)}"
        raise ProcessGroupError(
            f"{who} of {channel.size} did not come within {channel.timeout_seconds:g} s; was it started, and does it "
            "call init_process_group()?"
        )


def _watch_over(channel: StoreChannel, host: str) -> Watch:
    """Every process keeps a connection to process 0, which tells all of one that is gone; see `watch`.

    torch's own operations end by themselves, so the watch ends no process.
    """
    if channel.rank == 0:
        with socket.create_server(("", 0)) as probe:
            channel.put(_DOOR, str(probe.getsockname()[1]))
    port = channel.get(_DOOR, channel.timeout_seconds)
    connections = meet(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}", channel.size, channel.rank, channel.timeout_seconds
    )
    shortest, longest = _SILENCE_SECONDS
    silence = min(max(channel.timeout_seconds, shortest), longest)
    never = math.inf
    return Watch(
        channel.rank, channel.size, connections, silence_seconds=silence, end_seconds=never, last_seconds=never
    )


def adopted(timeout_seconds: float) -> JoinedGroup | None:
    """The group that the script joined by torch's own `init_process_group`; None without one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return JoinedGroup(rank, size, timeout_seconds, None)
    store: Any = _c10d.distributed_c10d._get_default_store()
    store = store.clone() if hasattr(store, "clone") else store
    prefix = f"{_PLACE}adopted.{next(_joins)}"
    return JoinedGroup(
        rank, size, timeout_seconds, StoreChannel(_c10d.PrefixStore(prefix, store), rank, size, timeout_seconds)
    )


def let_go(group: JoinedGroup) -> None:
    """Leave the group; every process has to be about to. Process 0, which may keep the store, is the last to go."""
    channel = group.channel
    if channel is not None:
        try:
            channel.put(f"left/{channel.rank}", "")
            if channel.rank == 0:
                end = time.monotonic() + _LEAVE_SECONDS
                for rank in range(1, channel.size):
                    channel.get(f"left/{rank}", max(end - time.monotonic(), 0.01))
        except ProcessGroupError:
            if channel.rank == 0:
                raise  # the others may well find the store closed: they were told that all are here
    dist.destroy_process_group()
    if isinstance(channel, StoreChannel):
        channel.close()


def plain(error: BaseException) -> str:
    """An error of torch without the frames of its C++ stack."""
    return str(error).partition("\nException raised from")[0].strip()


def broke_off(error: BaseException) -> bool:
    """Whether a collective operation failed, so that a process of the group is gone or elsewhere."""
    if isinstance(error, NnxError) or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection closed by peer", "connection reset by peer"))
