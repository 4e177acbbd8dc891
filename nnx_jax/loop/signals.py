"""Ctrl-C and SIGTERM: the first asks for a commit at the next update boundary, the second aborts at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Training stopped on a signal after its last update was committed; `exit_code` is 128 + the signal."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        self.exit_code = 128 + number
        super().__init__(f"stopped by {self.signal.name}; the last finished update is committed")


class StopRequest:
    """Context that turns the first SIGINT or SIGTERM into a flag.

    Handlers are installed in the main thread only and put back on exit. A second signal restores Python's own
    handling and raises KeyboardInterrupt where the program stands: LAST is then the commit before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in CAUGHT}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise Interrupted(number)
        self.number = number

    def __bool__(self) -> bool:
        return self.number is not None
