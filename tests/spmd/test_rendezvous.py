"""The processes meet before JAX starts: whoever does not come has a name, and a stranger disturbs nobody."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nnx_jax.core.errors import ProcessGroupError
from nnx_jax.spmd.rendezvous import meet
from tests.processes import free_port

SECONDS = 30.0


class Guests:
    """Calls in threads; what each returned or raised."""

    def __init__(self) -> None:
        self.threads: dict[str, threading.Thread] = {}
        self.outcomes: dict[str, BaseException | None] = {}
        self.returned: dict[str, Any] = {}

    def start(self, name: str, work: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                self.returned[name] = work()
                self.outcomes[name] = None
            except BaseException as error:
                self.outcomes[name] = error

        self.threads[name] = threading.Thread(target=run)
        self.threads[name].start()

    def wait(self) -> dict[str, BaseException | None]:
        for thread in self.threads.values():
            thread.join(60)
        assert set(self.outcomes) == set(self.threads)
        return self.outcomes

    def close(self) -> None:
        for connections in self.returned.values():
            for connection in (connections or {}).values():
                connection.close()


@pytest.fixture
def guests() -> Iterator[Guests]:
    found = Guests()
    yield found
    found.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_all_come_in_any_order(host: str, guests: Guests) -> None:
    """Process 0 may be the last to come; it is connected to all, and the port is free for JAX's service."""
    port = free_port()
    for rank in (3, 1, 2, 0):
        guests.start(str(rank), lambda rank=rank: meet(f"{host}:{port}", 4, rank, SECONDS))
        time.sleep(0.05)
    assert set(guests.wait().values()) == {None}
    socket.create_server(("127.0.0.1", port)).close()
    connected = guests.returned["0"]
    assert sorted(connected) == [1, 2, 3]
    for rank, connection in connected.items():
        connection.sendall(f"for {rank}".encode())
        assert guests.returned[str(rank)][0].recv(100) == f"for {rank}".encode()


def test_whoever_does_not_come_is_named_everywhere(guests: Guests) -> None:
    """Process 2 of 4 is not started: all others say so, process 0 and those that wait with it."""
    address, begun = f"127.0.0.1:{free_port()}", time.monotonic()
    for rank in (0, 1, 3):
        guests.start(str(rank), lambda rank=rank: meet(address, 4, rank, 1.0))
    for error in guests.wait().values():
        assert isinstance(error, RuntimeError)
        assert "process 2 of 4 did not come within 1 s; was it started?" in str(error)
    assert time.monotonic() - begun < 10


def test_several_missing_ones_and_a_missing_process_0() -> None:
    """Every one of them is named; and process 0 with the address at which it was looked for."""
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ProcessGroupError, match="processes 1, 2, 3 of 4 did not come within 0.2 s; were they"):
        meet(address, 4, 0, 0.2)
    with pytest.raises(ProcessGroupError, match=rf"process 0 of 4 could not be reached at {address} within 0.3 s"):
        meet(address, 4, 1, 0.3)


def test_two_with_one_number(guests: Guests) -> None:
    """Both are refused, and all others, each with the reason."""
    address = f"127.0.0.1:{free_port()}"
    for name, rank in (("0", 0), ("1", 1), ("1 again", 1)):
        guests.start(name, lambda rank=rank: meet(address, 3, rank, SECONDS))
    for error in guests.wait().values():
        assert isinstance(error, ProcessGroupError)
        assert "two processes say that they are number 1 of 3" in str(error)


def test_two_sizes(guests: Guests) -> None:
    """One was told of 2 processes, one of 3."""
    address = f"127.0.0.1:{free_port()}"
    guests.start("0", lambda: meet(address, 3, 0, SECONDS))
    guests.start("1", lambda: meet(address, 2, 1, SECONDS))
    for error in guests.wait().values():
        assert "process 1 was told of 2 processes, process 0 of 3" in str(error)


def test_a_second_process_0() -> None:
    """The port is taken, on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProcessGroupError, match=rf"process 0 cannot listen at 127.0.0.1:{port} .*taken"):
            meet(f"127.0.0.1:{port}", 2, 0, SECONDS)


def test_strangers_and_the_dead_are_let_go(guests: Guests) -> None:
    """Garbage, endless lines and silence disturb nobody; one that dies waiting may be started again."""
    port = free_port()
    guests.start("0", lambda: meet(f"127.0.0.1:{port}", 2, 0, SECONDS))
    with contextlib.ExitStack() as strangers:
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 100_000, b"", b"nnx_jax-rendezvous-2 two one\n", b"\xff\n"):
            with contextlib.suppress(OSError):
                strangers.enter_context(_reached(port)).sendall(text)
        died = _reached(port)
        died.sendall(b"nnx_jax-rendezvous-2 3 1\n"[:10])
        died.close()
        time.sleep(0.2)
        guests.returned["1"] = meet(f"127.0.0.1:{port}", 2, 1, SECONDS)
    assert guests.wait() == {"0": None}


def test_one_that_died_while_it_waited_is_replaced(guests: Guests) -> None:
    """A pod that is started again takes its own place."""
    port = free_port()
    guests.start("0", lambda: meet(f"127.0.0.1:{port}", 3, 0, SECONDS))
    died = _reached(port)
    died.sendall(b"nnx_jax-rendezvous-2 3 1\n")
    time.sleep(0.2)
    died.close()
    time.sleep(0.2)
    for rank in (1, 2):
        guests.start(str(rank), lambda rank=rank: meet(f"127.0.0.1:{port}", 3, rank, SECONDS))
    assert set(guests.wait().values()) == {None}


def test_something_else_at_the_address() -> None:
    """A service that answers otherwise is said to be one."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with other.accept()[0] as guest:
                        guest.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ProcessGroupError, match="something else answers there"):
            meet(address, 2, 1, 0.5)


def _reached(port: int) -> socket.socket:
    """A connection to process 0, once it listens."""
    end = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        assert time.monotonic() < end
        time.sleep(0.02)
