"""Watch: every process keeps a connection to process 0, so that one that is gone has a name at once, on all of them.

The system closes the connections of a process that ends, however it ends; process 0 sees that, and tells the others. A
process that is stopped, or cut off, says nothing, and that is seen too. JAX's own service notices as much later, and
ends whoever is left by SIGABRT without a name; so this comes before it, and `aborts` holds it back.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping

from nnx_jax.core.errors import ProcessGroupError

_BEAT_SECONDS = 1.0
_STOPPED_SECONDS = 5.0
"""A round of the watch that took longer: this process itself was stopped, and heard nobody in the meantime."""
_LINE_BYTES = 4096
_FLUSH_SECONDS = 1.0
EXIT_LOST = 1
"""Exit code of a process that has lost another one and does not end by itself."""
_SILENTLY = "it was killed, or its machine or the network to it is gone"


class Watch:
    """Who of a group is gone; a thread of its own listens.

    Two things can become of another process. It is *gone*: it was lost, or ended with an error; a group cannot go on
    without it, so this process ends as well, by itself or after a bound. Or it is *done*: its script came to an end;
    only who still waits for it cannot go on.

    Args:
        connections: by rank; of process 0 to every other one, of those to process 0.
        silence_seconds: after which a process that says nothing is gone.
        end_seconds: how long this process may go on without noticing, once another is gone. It sits in a computation
            that can never end, then.
        last_seconds: how long it may take to end once it has noticed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, socket.socket],
        *,
        silence_seconds: float,
        end_seconds: float,
        last_seconds: float,
    ) -> None:
        self.rank, self.size = rank, size
        self._silence_seconds, self._bounds = silence_seconds, (end_seconds, last_seconds)
        self._connections = dict(connections)
        self._received = dict.fromkeys(connections, b"")
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._news = threading.Condition()
        self._gone: dict[int, str] = {}
        self._done: dict[int, str] = {}
        self._left: set[int] = set()
        self._closed: set[int] = set()
        self._lost_at: float | None = None
        self._noticed_at: float | None = None
        self._over = threading.Event()
        self._sending = threading.Lock()
        self._owner = (os.getpid(), threading.get_ident())
        self._selector = selectors.DefaultSelector()
        for other, connection in self._connections.items():
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, other)
        os.register_at_fork(after_in_child=self._let_go)
        threading.Thread(target=self._run, name="group-watch", daemon=True).start()

    def gone(self) -> tuple[int, str] | None:
        """The process that was the first to be gone, and what became of it; None while all are there."""
        with self._news:
            return next(iter(self._gone.items()), None)

    def what_became_of(self, rank: int) -> str | None:
        """Why nobody needs to wait for a process any more; None while it is there."""
        with self._news:
            return self._gone.get(rank) or self._done.get(rank)

    def has_closed(self, rank: int | None = None) -> bool:
        """Whether a process has ended, in whatever way; None: any, of which JAX's service is then about to hear."""
        with self._news:
            found = self._closed | set(self._gone)
            return bool(found) if rank is None else rank in found

    def service_ended(self) -> str | None:
        """What became of process 0, which runs JAX's coordination service, once it has ended; None before."""
        with self._news:
            if self.rank == 0 or not (0 in self._gone or 0 in self._closed):
                return None
            return self._gone.get(0) or self._done.get(0) or "it has left the group"

    def wait(self, seconds: float) -> tuple[int, str] | None:
        """Wait for so long for a process to be gone; see `gone`."""
        with self._news:
            self._news.wait_for(lambda: self._gone, seconds)
            return next(iter(self._gone.items()), None)

    def notice(self) -> None:
        """The thread that joined the group is told that another process is gone, and ends by itself from here on."""
        if threading.get_ident() == self._owner[1] and self._lost_at is not None:
            self._noticed_at = self._noticed_at or time.monotonic()

    def say_done(self, how: str) -> None:
        """Tell the others that this process comes to nothing any more, but is not about to fail."""
        self._say_all(f"done {self.rank} {how}")

    def say_gone(self, how: str) -> None:
        """Tell the others that this process ends here, and they have to as well."""
        self._say_all(f"gone {self.rank} {how}")

    def close(self) -> None:
        """Leave; the others know that all is well."""
        self._say_all(f"left {self.rank}")
        self._over.set()
        with self._sending:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)  # what was said still arrives

    def _let_go(self) -> None:
        """In a forked child: it is not the process that the others watch."""
        if os.getpid() != self._owner[0]:
            for connection in self._connections.values():
                connection.close()

    def _run(self) -> None:
        last = beaten = time.monotonic()
        while not self._over.is_set():
            ready = self._selector.select(_BEAT_SECONDS / 2)
            now = time.monotonic()
            if now - last > _STOPPED_SECONDS:
                self._heard = dict.fromkeys(self._heard, now)
            last = now
            for key, _ in ready:
                self._read(key.data, now)
            if now - beaten >= _BEAT_SECONDS:
                beaten = now
                self._say_all(f"beat {self.rank}")
            for rank, heard in list(self._heard.items()):
                if now - heard > self._silence_seconds:
                    self._lose(rank, f"it has said nothing for {self._silence_seconds:g} s: stopped, or cut off")
            self._end_in_time(now)
        for connection in self._connections.values():
            connection.close()

    def _read(self, rank: int, now: float) -> None:
        try:
            found = self._connections[rank].recv(_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        self._heard[rank] = now
        *lines, self._received[rank] = (self._received[rank] + found).split(b"\n")
        for line in lines:
            word, _, rest = line.decode("utf-8", "replace").partition(" ")
            about, _, how = rest.partition(" ")
            if about.isdigit():
                self._hear(rank if self.rank == 0 else int(about), word, how)
        if not found:
            self._end_of(rank)

    def _hear(self, rank: int, word: str, how: str) -> None:
        if word == "gone":
            self._lose(rank, how)
        elif word in ("done", "left"):
            with self._news:
                self._left.add(rank)
                if word == "done":
                    self._done[rank] = how
            if self.rank == 0 and word == "done":
                self._say_all(f"done {rank} {how}", but=rank)

    def _end_of(self, rank: int) -> None:
        """Its connection has ended."""
        with self._news:
            self._closed.add(rank)
            expected = rank in self._left
        if expected:
            self._forget(rank)
        else:
            self._lose(rank, _SILENTLY)

    def _lose(self, rank: int, why: str) -> None:
        with self._news:
            new = rank not in self._gone
            if new:
                self._gone[rank] = why
                self._lost_at = self._lost_at or time.monotonic()
        if new and self.rank == 0:
            self._say_all(f"gone {rank} {why}")
        self._forget(rank)
        with self._news:
            self._news.notify_all()

    def _forget(self, rank: int) -> None:
        if self._heard.pop(rank, None) is not None:
            self._selector.unregister(self._connections[rank])
            with self._sending:
                self._connections.pop(rank).close()

    def _say_all(self, text: str, but: int | None = None) -> None:
        line = f"{' '.join(text.split())[: _LINE_BYTES // 4]}\n".encode()
        with self._sending:
            for rank, connection in self._connections.items():
                if rank != but:
                    with contextlib.suppress(OSError):  # whoever is gone is seen where it is read
                        connection.send(line)

    def _end_in_time(self, now: float) -> None:
        """End this process where it does not end by itself; nobody else can, and JAX would by SIGABRT."""
        if self._lost_at is None:
            return
        unaware, aware = self._bounds
        if self._noticed_at is None and now - self._lost_at > unaware:
            how = f"this one has waited for it for {unaware:g} s, and ends"
        elif self._noticed_at is not None and now - self._noticed_at > aware:
            how = f"this one has not ended by itself within {aware:g} s, and ends now"
        else:
            return
        found = self.gone()
        assert found is not None
        self.end(f"{lost_text(*found, self.size)}; {how}. The same command continues from the last commit")

    def name_the_lost(self, seconds: float) -> None:
        """Print who is gone, unless this process was told; such news is waited for so long.

        A computation that breaks off does not say whose end that was.
        """
        if (found := self.wait(seconds)) is not None and self._noticed_at is None:
            _print(lost_text(*found, self.size))

    def end(self, text: str) -> None:
        """End this process here and now, with what there is to say about it."""
        _print(text)
        flushing = threading.Thread(target=_flush, daemon=True)  # the main thread may hold a stream for ever
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
        os._exit(EXIT_LOST)


def lost_text(rank: int, why: str, size: int) -> str:
    """Who is gone, for a person."""
    return f"process {rank} of {size} is gone: {why}"


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{ProcessGroupError.layer}: {text}\n".encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
