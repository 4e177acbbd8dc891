"""JAX's last word held back: a process that has lost another one ends by itself, with an exit code and a name.

When its coordination service says that a process is lost, or does not answer, a thread of JAX calls `abort()`. The hook
that JAX has for this (`missed_heartbeat_callback`) cannot be set from Python: jaxlib 0.10 has no conversion for its
argument and ends the process too. A handler of SIGABRT can: `abort()` goes on only when the handler returns. So that
one thread is kept where it is, if another process is known to be gone; any other abort goes on as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

_KNOW_SECONDS = 3.0
"""How long an abort waits for the news that a process is gone; the service may have heard it first."""


class AbortGuard:
    """A handler of SIGABRT for as long as the group lasts.

    Args:
        is_lost: whether another process is known to be gone. Another thread finds out.
    """

    def __init__(self, is_lost: Callable[[], bool]) -> None:
        self._is_lost = is_lost
        self._main = threading.main_thread().ident
        self._before: int | None = None
        self._pid = os.getpid()
        self._libc: Any = None
        with contextlib.suppress(OSError, AttributeError):  # a system without it: JAX's own way stays
            self._libc = ctypes.CDLL(None)
            self._libc.signal.restype = ctypes.c_void_p
            self._libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
            self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._handle)
            self._before = self._libc.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))
            os.register_at_fork(after_in_child=self.remove)

    def remove(self) -> None:
        """Leave SIGABRT as it was before; a second call does nothing."""
        if self._libc is not None:
            self._libc.signal(signal.SIGABRT, self._before)
            self._libc = None

    def _handle(self, number: int) -> None:
        """Called on the thread that aborts, in C, with nothing of Python's below it."""
        end = time.monotonic() + _KNOW_SECONDS
        while threading.get_ident() != self._main and self._libc is not None:
            if self._is_lost():
                time.sleep(3600.0)
            elif time.monotonic() > end:
                break
            else:
                time.sleep(0.01)
        if (libc := self._libc) is not None:
            self.remove()
            getattr(libc, "raise")(number)  # it is pending until this handler returns
