"""The processes of a group meet before JAX starts its service, so that whoever does not come has a name.

JAX ends a process by SIGABRT when another one never starts, and names nobody. So process 0 first listens at the
coordinator's address itself, for one line from every other process; it then says "go" to all, or to all who came what
is wrong, stops listening, and JAX's service starts at that port. The connections stay, for `watch`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from dataclasses import dataclass, field

from nnx_jax.core.errors import ProcessGroupError
from nnx_jax.spmd.launched import split_address

_HELLO = "nnx_jax-rendezvous-2"
_LINE_BYTES = 4096
_AGAIN_SECONDS = 0.1
"""How often a process tries to reach one that does not listen yet."""
_CLOSE_SECONDS = 1.0


def meet(address: str, size: int, rank: int, timeout_seconds: float) -> dict[int, socket.socket]:
    """Return once all processes have come, on every one of them: process 0's connection to each, or that to process 0.

    Args:
        address: "host:port" of process 0.
        timeout_seconds: bound of the wait for each other process; it begins when this one comes.

    Raises:
        ProcessGroupError: (a RuntimeError) who did not come, or what the processes do not agree on.
    """
    host, port = split_address(address)
    if rank == 0:
        return _Host(host, port, size, timeout_seconds).gather()
    return {0: _come(host, port, size, rank, timeout_seconds)}


def is_loopback(host: str) -> bool:
    """The group is on one machine, and nobody else may reach it."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


@dataclass
class _Guest:
    """One connection to process 0, and what it has sent."""

    connection: socket.socket
    received: bytes = b""
    rank: int | None = None
    stays: bool = False

    def leave(self) -> None:
        """Close it, unless it is one of the group's."""
        if not self.stays:
            self.connection.close()


@dataclass
class _Host:
    """Process 0's side.

    Attributes:
        guests: by rank, who said which process it is.
    """

    host: str
    port: int
    size: int
    timeout_seconds: float
    guests: dict[int, _Guest] = field(default_factory=dict)
    wrong: str = ""

    def gather(self) -> dict[int, socket.socket]:
        """Wait for all; tell all who came how it went."""
        with contextlib.ExitStack() as closing, self._listen() as door, selectors.DefaultSelector() as selector:
            door.setblocking(False)
            selector.register(door, selectors.EVENT_READ, None)
            end = time.monotonic() + self.timeout_seconds
            while len(self.guests) < self.size - 1 and not self.wrong and (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.data is None:
                        self._admit(door, selector, closing)
                    else:
                        self._read(key.data, selector)
            if not self.wrong and len(self.guests) < self.size - 1:
                self.wrong = self._missing()
            self._answer()
            for guest in self.guests.values():
                guest.stays = not self.wrong
        if self.wrong:
            raise ProcessGroupError(self.wrong)
        return {rank: guest.connection for rank, guest in self.guests.items()}

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            if is_loopback(self.host):
                return socket.create_server((self.host, self.port), family=family)
            both = socket.has_dualstack_ipv6()
            return socket.create_server(
                ("", self.port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
            )
        except OSError as error:
            raise ProcessGroupError(
                f"process 0 cannot listen at {self.host}:{self.port} ({error.strerror or error}); is the port taken, "
                "or is this not the machine that the coordinator's address names?"
            ) from error

    def _admit(self, door: socket.socket, selector: selectors.BaseSelector, closing: contextlib.ExitStack) -> None:
        try:
            connection, _ = door.accept()
        except OSError:
            return  # it left before it was let in
        guest = _Guest(connection)
        closing.callback(guest.leave)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, guest)

    def _read(self, guest: _Guest, selector: selectors.BaseSelector) -> None:
        """Take what came from one connection; strangers are let go."""
        try:
            found = guest.connection.recv(_LINE_BYTES)
        except OSError:
            found = b""
        guest.received += found
        line, ended, _ = guest.received.partition(b"\n")
        if found and not ended and len(line) < _LINE_BYTES:
            return
        if not found:
            if guest.rank is not None and self.guests.get(guest.rank) is guest:
                del self.guests[guest.rank]  # it died while it waited; another may be started in its place
        elif guest.rank is None and (said := _understood(line)) is not None:
            self._seat(guest, *said)
            return
        selector.unregister(guest.connection)
        guest.connection.close()

    def _seat(self, guest: _Guest, size: int, rank: int) -> None:
        if size != self.size:
            self.wrong = f"process {rank} was told of {size} processes, process 0 of {self.size}"
        elif not 0 < rank < size:
            self.wrong = f"a process says it is number {rank} of {size}, and so is another one"
        elif rank in self.guests:
            self.wrong = f"two processes say that they are number {rank} of {size}; each needs a number of its own"
        guest.rank = rank
        self.guests.setdefault(rank, guest)
        if self.wrong and self.guests[rank] is not guest:
            _send(guest.connection, f"no {self.wrong}")

    def _missing(self) -> str:
        absent = [rank for rank in range(1, self.size) if rank not in self.guests]
        return missing_text(absent, self.size, self.timeout_seconds)

    def _answer(self) -> None:
        answer = f"no {self.wrong}" if self.wrong else "go"
        for guest in self.guests.values():
            _send(guest.connection, answer)


def missing_text(absent: list[int], size: int, seconds: float) -> str:
    """Who did not come, for a person."""
    names = f"process {absent[0]}" if len(absent) == 1 else f"processes {', '.join(map(str, absent))}"
    return (
        f"{names} of {size} did not come within {seconds:g} s; {'was it' if len(absent) == 1 else 'were they'} started?"
    )


def _understood(line: bytes) -> tuple[int, int] | None:
    words = line.decode("ascii", "replace").split()
    if len(words) != 3 or words[0] != _HELLO or not (words[1].isdigit() and words[2].isdigit()):
        return None
    return int(words[1]), int(words[2])


def _come(host: str, port: int, size: int, rank: int, timeout_seconds: float) -> socket.socket:
    """Every other process's side."""
    end = time.monotonic() + timeout_seconds
    why = ""
    while (left := end - time.monotonic()) > 0:
        try:
            with contextlib.ExitStack() as closing:
                connection = closing.enter_context(socket.create_connection((host, port), timeout=min(left, 5.0)))
                connection.sendall(f"{_HELLO} {size} {rank}\n".encode())
                # Process 0 may have come later than this one, and waits as long as it was told to.
                connection.settimeout(timeout_seconds + _CLOSE_SECONDS)
                answer = _line(connection)
                if answer == "go":
                    closing.pop_all()
                    return connection
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if answer.startswith("no "):
                raise ProcessGroupError(answer.removeprefix("no "))
            why = "it closed the connection" if not answer else "something else answers there"
        time.sleep(min(_AGAIN_SECONDS, max(0.0, end - time.monotonic())))
    raise ProcessGroupError(
        f"process 0 of {size} could not be reached at {host}:{port} within {timeout_seconds:g} s ({why}); was it "
        "started, and is this its address?"
    )


def _line(connection: socket.socket) -> str:
    """One line and nothing of what follows it, which is for `watch`."""
    found = b""
    while not found.endswith(b"\n") and len(found) < _LINE_BYTES:
        more = connection.recv(1)
        if not more:
            break
        found += more
    return found.decode("utf-8", "replace").removesuffix("\n")


def _send(connection: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(_CLOSE_SECONDS)
        connection.sendall(f"{text}\n".encode())
