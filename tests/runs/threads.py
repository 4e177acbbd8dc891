"""Processes of a group as threads of one process: the same agreements over a store in memory, and no start to wait for.

What a process holds for itself (leases by process number, devices) is shared here, so one thread alone may write a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from nnx_jax.spmd.world import World


class Memory:
    """One key-value store for several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._keys: dict[str, str] = {}

    def channel(self, rank: int, size: int, timeout_seconds: float) -> MemoryChannel:
        return MemoryChannel(self, rank, size, timeout_seconds)


class MemoryChannel:
    """See `spmd.world.Channel`."""

    def __init__(self, memory: Memory, rank: int, size: int, timeout_seconds: float) -> None:
        self._memory, self.rank, self.size, self.timeout_seconds = memory, rank, size, timeout_seconds

    def put(self, key: str, text: str) -> None:
        with self._memory._changed:
            self._memory._keys[key] = text
            self._memory._changed.notify_all()

    def get(self, key: str, seconds: float) -> str | None:
        keys = self._memory._keys
        with self._memory._changed:
            self._memory._changed.wait_for(lambda: key in keys, seconds)
            return keys.get(key)

    def find(self, prefix: str) -> dict[str, str]:
        with self._memory._changed:
            found = self._memory._keys.items()
            return {key.removeprefix(prefix): text for key, text in found if key.startswith(prefix)}

    def drop(self, key: str) -> None:
        with self._memory._changed:
            self._memory._keys.pop(key, None)

    def gone(self, rank: int | None = None, seconds: float = 0.0) -> tuple[int, str] | None:
        return None


def together(
    work: Callable[[World], Any], size: int = 2, *, writer_rank: int = 0, timeout_seconds: float = 20
) -> list[Any]:
    """Call `work(world)` in `size` threads; what each returned or raised, by rank, with the seconds of the slowest."""
    memory, found = Memory(), [None] * size

    def run(rank: int) -> None:
        channel = memory.channel(rank, size, timeout_seconds)
        try:
            found[rank] = work(World(channel, writer_rank=writer_rank))
        except BaseException as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*found, time.monotonic() - begun]
