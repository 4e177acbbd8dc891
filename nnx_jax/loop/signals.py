"""Ctrl-C and SIGTERM: the first asks for a commit at the next update boundary, the second aborts at once."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGINT, signal.SIGTERM)
_ECHO_SECONDS = 1.0
"""A SIGTERM that comes again so soon is the first one: a scheduler sent it to all, and a launcher passed it on."""


class Interrupted(KeyboardInterrupt):
    """A signal ended training; `exit_code` is 128 + the signal.

    Args:
        number: the signal.
        committed: whether the last finished update was committed, or training was left where it stood.
    """

    def __init__(self, number: int, *, committed: bool = True) -> None:
        self.signal = signal.Signals(number)
        self.exit_code = 128 + number
        self.committed = committed
        stands = "the last finished update is committed" if committed else "what was committed before stands"
        super().__init__(f"stopped by {self.signal.name}; {stands}; the same command continues")


class StopRequest:
    """Context that turns the first SIGINT or SIGTERM into a flag.

    Handlers are installed in the main thread only and put back on exit. A second signal raises Interrupted (a
    KeyboardInterrupt) where the program stands: LAST is then the commit before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in CAUGHT}
        return self

    def __exit__(self, *_: object) -> None:
        _put_back(self._before)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._since = number, time.monotonic()
        elif not self.number == number == signal.SIGTERM or time.monotonic() > self._since + _ECHO_SECONDS:
            raise Interrupted(number, committed=False)

    @property
    def signal(self) -> int | None:
        """The signal, None without one."""
        return self.number

    def poll(self) -> bool:
        """A call of the step has ended; whether to stop after it."""
        return bool(self)

    def settle(self) -> bool:
        """The run is at its end; whether it was asked to stop."""
        return bool(self)

    def __bool__(self) -> bool:
        return self.number is not None


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Raise Interrupted on SIGINT and SIGTERM: outside training too, a command cleans up and exits 130 or 143."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number, committed=False)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, on_signal) for number in CAUGHT}
    try:
        yield
    finally:
        _put_back(before)


def _put_back(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
