"""How a process of a group ends with its script: the others learn of it at once, and nobody waits without a bound.

JAX's own end of a process waits for all others, whatever happened, and ends them by SIGABRT if they do not come.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from nnx_jax.core.errors import ProcessGroupError
from nnx_jax.spmd import processes
from nnx_jax.spmd.watch import EXIT_LOST, lost_text
from nnx_jax.spmd.world import Channel


class ScriptEnd:
    """Hooks of the interpreter that see how the script ends, from the joining of a group on.

    Args:
        channel: returns how the processes talk; None once the group was left.
        tell: tells the others of an error: `tell(stage, error)`.
        finish: called at an end that is no failure, before the interpreter lets go of anything.
    """

    def __init__(
        self,
        channel: Callable[[], Channel | None],
        tell: Callable[[str, BaseException], None],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._channel, self._tell, self._finish = channel, tell, finish
        self._pid = os.getpid()
        self._asked: tuple[int, FrameType, int] | None = None
        self._excepthook = sys.excepthook
        sys.excepthook, sys.exit = self._failed, self._exits
        atexit.register(self._ends)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error that nobody caught."""
        self._excepthook(kind, error, trace)
        if self._there():
            interrupted = 130 if isinstance(error, KeyboardInterrupt) else 1
            self._fail(error, getattr(error, "exit_code", interrupted))

    def _exits(self, code: Any = None) -> NoReturn:
        """`sys.exit`; the interpreter tells nobody afterwards with which code it is ending."""
        if threading.current_thread() is threading.main_thread():
            number = 0 if code is None else code if isinstance(code, int) else 1
            outermost = sys._getframe()
            while outermost.f_back is not None:
                outermost = outermost.f_back
            self._asked = (number & 0xFF, outermost, outermost.f_lasti)
        raise SystemExit(code)

    def _ends(self) -> None:
        """The interpreter is about to end, all of the script's own threads have."""
        if not self._there():
            return
        if code := self._exit_code():
            self._fail(SystemExit(code), code)
        if self._finish is not None:
            self._finish()

    def _exit_code(self) -> int:
        """Of the `sys.exit` that ends the script; 0 where it ends otherwise, or went on after that call."""
        if self._asked is None:
            return 0
        number, outermost, instruction = self._asked
        return number if outermost.f_lasti == instruction else 0

    def _fail(self, error: BaseException, code: int) -> NoReturn:
        with contextlib.suppress(Exception):
            self._tell("the script", error)
        processes.leave(code, channel=self._channel())

    def _there(self) -> bool:
        return os.getpid() == self._pid and self._channel() is not None


def leave_together(channel: Channel) -> None:
    """Leave JAX's group at the end of a script that did not call `shutdown`, once the others are there too.

    A process that has lost another one by then ends here, with an exit code that is not 0: JAX would end it by SIGABRT.
    """
    with contextlib.suppress(ProcessGroupError):
        processes.say_done("its script has come to an end")
        if not processes.meet_to_leave(channel, channel.timeout_seconds):
            processes.disconnect()
            return
    if (lost := channel.gone()) is not None:
        print(f"process group: {lost_text(*lost, channel.size)}; this one came to its end", file=sys.stderr)
        processes.leave(EXIT_LOST, channel=channel)
