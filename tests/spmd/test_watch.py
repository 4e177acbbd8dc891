"""Who of a group is gone: what each process learns from the connections, and what becomes of JAX's own abort."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nnx_jax.spmd.watch import Watch, lost_text

SIZE = 3
LONG = 600.0
SECONDS = 10.0


class Star:
    """Process 0's connections to the others, each end a socket of this process."""

    def __init__(self) -> None:
        pairs = {rank: socket.socketpair() for rank in range(1, SIZE)}
        self.hub = {rank: pair[0] for rank, pair in pairs.items()}
        self.others = {rank: pair[1] for rank, pair in pairs.items()}
        self.watches: dict[int, Watch] = {}

    def watch(self, rank: int, silence_seconds: float = LONG) -> Watch:
        connections = self.hub if rank == 0 else {0: self.others[rank]}
        bounds = {"silence_seconds": silence_seconds, "end_seconds": LONG, "last_seconds": LONG}
        self.watches[rank] = Watch(rank, SIZE, connections, **bounds)
        return self.watches[rank]

    def close(self) -> None:
        for watch in self.watches.values():
            watch.close()
        for each in (*self.hub.values(), *self.others.values()):
            each.close()


@pytest.fixture
def star() -> Iterator[Star]:
    made = Star()
    yield made
    made.close()


def test_one_that_dies_is_named_everywhere(star: Star) -> None:
    """Its connection closes; process 0 sees that, and the other one is told."""
    first, second = star.watch(0), star.watch(1)
    assert first.gone() is None
    star.others[2].close()
    for watch in (first, second):
        found = watch.wait(SECONDS)
        assert found is not None
        assert lost_text(*found, SIZE) == (
            "process 2 of 3 is gone: it was killed, or its machine or the network to it is gone"
        )
        assert watch.what_became_of(2) == found[1]
        assert watch.what_became_of(1 - watch.rank) is None
    assert second.service_ended() is None


def test_process_0_dies(star: Star) -> None:
    """Everyone sees that alone, and that JAX's service ended with it."""
    others = [star.watch(rank) for rank in (1, 2)]
    for connection in star.hub.values():
        connection.close()
    for watch in others:
        found = watch.wait(SECONDS)
        assert found is not None
        assert found[0] == 0
        assert watch.service_ended() == found[1]


def test_last_words(star: Star) -> None:
    """One that fails is gone, with its own words; one whose script ends is not there for those who wait for it."""
    watches = [star.watch(rank) for rank in range(SIZE)]
    watches[2].say_done("its script has come to an end")
    until(lambda: watches[0].what_became_of(2) is not None and watches[1].what_became_of(2) is not None)
    star.others[2].close()
    until(lambda: watches[0].has_closed(2))
    assert watches[0].gone() is None
    watches[1].say_gone("it has ended with exit code 3")
    assert watches[0].wait(SECONDS) == (1, "it has ended with exit code 3")


def test_leaving_is_no_loss(star: Star) -> None:
    """All have left: their connections close, and nobody is gone."""
    watches = [star.watch(rank) for rank in range(SIZE)]
    for watch in watches[1:]:
        watch.close()
    until(lambda: watches[0].has_closed(1) and watches[0].has_closed(2))
    assert watches[0].gone() is None
    assert watches[0].what_became_of(1) is None


def test_silence(star: Star) -> None:
    """A process that is stopped keeps its connection; it is gone once it was silent for too long, and is told so."""
    first, second = star.watch(0, silence_seconds=2.0), star.watch(1, silence_seconds=2.0)
    begun = time.monotonic()
    found = first.wait(SECONDS)
    assert found == (2, "it has said nothing for 2 s: stopped, or cut off")
    assert time.monotonic() - begun > 1.5
    assert second.wait(SECONDS) == found
    assert b"gone 2 it has said nothing for 2 s" in star.others[2].recv(4096)


ABORTS = """
import ctypes, os, sys, threading, time
from nnx_jax.spmd.aborts import AbortGuard
guard = AbortGuard(lambda: sys.argv[1] == "lost")
if sys.argv[2] == "removed":
    guard.remove()
abort = ctypes.CDLL(None).abort
if sys.argv[2] == "main":
    abort()
threading.Thread(target=abort, daemon=True).start()
time.sleep(1.0)
sys.stdout.write("goes on"), sys.stdout.flush()
time.sleep(0.0 if sys.argv[1] == "lost" else 30.0)
os._exit(3)
"""


@pytest.mark.parametrize("known, where, code, said", [
    ("lost", "thread", 3, "goes on"), ("nothing", "thread", -signal.SIGABRT, "goes on"),
    ("lost", "main", -signal.SIGABRT, ""), ("lost", "removed", -signal.SIGABRT, ""),
])  # fmt: skip
def test_an_abort_is_held_back_only_where_a_process_is_lost(known: str, where: str, code: int, said: str) -> None:
    """A thread that aborts for the loss of another process stays where it is; any other abort is one, as ever."""
    command = [sys.executable, "-c", ABORTS, known, where]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=60, check=False, capture_output=True)
    assert (done.returncode, done.stdout.decode()) == (code, said), done.stderr.decode()


def until(true: Callable[[], bool]) -> None:
    """Wait for what has to come true."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
