"""SharedStop: a signal that any process of a run got stops all of them after the same call of the step.

A process that got one says so, and every process then says how many calls it has begun. The greatest of these numbers
is where all stop: no process has gone further, and none has to be held back inside a computation that others wait for.
Listening is a thread's work, so training pays nothing for it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from nnx_jax.core.errors import ProcessGroupError
from nnx_jax.loop.signals import StopRequest
from nnx_jax.spmd.world import World

_LISTEN_SECONDS = 0.25


class SharedStop(StopRequest):
    """A StopRequest of all processes of a group.

    Args:
        world: the processes; every one makes the same calls in the same order.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.heard: int | None = None
        self._board = world.board("stop")
        self._world = world
        self._lock = threading.Condition()
        self._calls, self._frozen = 0, False
        self._target: int | None = None
        self._reached = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="shared-stop", daemon=True)

    def __enter__(self) -> StopRequest:
        super().__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        super().__exit__(*error)

    @property
    def signal(self) -> int | None:
        """The signal of this process, else the one that another one told of."""
        return self.heard if self.number is None else self.number

    def __bool__(self) -> bool:
        return self._reached

    def poll(self) -> bool:
        """Note the end of a call; whether it is the one after which all processes stop."""
        with self._lock:
            self._calls += 1
            if self._frozen:
                if not self._wait_for_all():
                    raise ProcessGroupError(
                        "a process was asked to stop, but not every process answered within "
                        f"{self._world.timeout_seconds:g} s; is one of them gone?"
                    )
                self._reached = self._calls >= (self._target or 0)
        return self._reached

    def _wait_for_all(self) -> bool:
        """Whether the others have said where they are, within the group's timeout.

        Raises:
            DistributedFailure: one of them is lost.
        """
        end = time.monotonic() + self._world.timeout_seconds
        while (left := end - time.monotonic()) > 0:
            if self._lock.wait_for(lambda: self._target is not None, min(left, _LISTEN_SECONDS)):
                return True
            if (lost := self._world.lost()) is not None:
                raise lost
        return False

    def settle(self) -> bool:
        """At the run's end: whether any process got a signal at all."""
        found = [number for number in self._world.gather("signals", self.number) if number is not None]
        if found:
            self.heard, self._reached = found[0], True
        return self._reached

    def _listen(self) -> None:
        try:
            while not self._over.is_set():
                if self.number is not None:
                    self._board.put("asked", str(self.number))
                asked = self._board.get("asked", _LISTEN_SECONDS)
                if asked is not None:
                    self._answer(int(asked))
                    return
        except Exception:  # the store is gone, and with it the group: the next agreement says so
            return

    def _answer(self, number: int) -> None:
        with self._lock:
            self._frozen = True
            bound = self._calls + 1
        self._board.put(f"calls/{self._world.rank}", str(bound))
        counts = [self._count(rank) for rank in range(self._world.size)]
        with self._lock:
            self.heard = number
            self._target = max(counts)
            self._lock.notify_all()

    def _count(self, rank: int) -> int:
        found: Any = None
        while found is None and not self._over.is_set():
            found = self._board.get(f"calls/{rank}", _LISTEN_SECONDS)
        return int(found or 0)


def make_stop(world: World) -> StopRequest:
    """Return what stops this session: its own signals, or those of the whole group."""
    return StopRequest() if world.alone else SharedStop(world)
