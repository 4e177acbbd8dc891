"""What the processes of a torch group tell each other: a `world.Channel` over the key-value store of torch.distributed.

A client of torch's store is locked while it waits for a key, and a call to a store whose process is stopped never
returns. So nobody waits inside the store here: keys are asked for again and again, and every single call is made by a
thread of its own and given up after the group's timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from nnx_jax.core.errors import ProcessGroupError
from nnx_jax.spmd.watch import Watch

T = TypeVar("T")

LAST_WORDS = "nnx_jax/group/gone/"
"""Where a process that ends by an error puts its exit code, under its rank; see `processes.leave`."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.05
"""Seconds between two looks at a key that is not set yet; an eighth of the time waited so far, within these."""
_END_SECONDS = 2.0
"""How long an end waits for a store that does not answer."""


class StoreChannel:
    """A `world.Channel` whose keys are in a torch store.

    Args:
        store: a `torch.distributed.Store`; this channel alone uses this client of it.
        rank: number of this process, from 0.
        size: number of processes.
        timeout_seconds: bound of every wait for another process, and of every answer of the store.

    Attributes:
        watch: who is gone; None in a group that was joined without `process_group.join`.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_seconds: float) -> None:
        self._store, self._rank, self._size, self._timeout_seconds = store, rank, size, timeout_seconds
        self.watch: Watch | None = None
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._silent: Future[Any] | None = None
        self._thread = threading.Thread(target=_answer, args=(self._asked,), name="store-channel", daemon=True)
        self._thread.start()
        # A thread that Python's end meets inside the store takes the whole process down with it.
        atexit.register(_end, self._asked, self._thread)

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._size

    @property
    def timeout_seconds(self) -> float:
        """Bound of every wait."""
        return self._timeout_seconds

    def put(self, key: str, text: str) -> None:
        """Set a key, whether or not it was set before."""
        self._ask(lambda: self._store.set(key, text))

    def get(self, key: str, seconds: float) -> str | None:
        """The value of a key once it is set; None when it is not after so many seconds."""
        begun = time.monotonic()
        while True:
            if (found := self._ask(lambda: self._look(key))) is not None:
                return found
            waited = time.monotonic() - begun
            if waited >= seconds:
                return None
            pause = min(max(waited / 8, _FIRST_PAUSE), _LONGEST_PAUSE)
            time.sleep(min(pause, seconds - waited))

    def find(self, prefix: str) -> dict[str, str]:
        """What is set now below `prefix`, which ends with a slash, by the rest of the key.

        An older torch cannot list keys; only those that end with a rank are found there.
        """
        return self._ask(lambda: self._below(prefix))

    def drop(self, key: str) -> None:
        """Forget a key, soon; one that is not set is no error. A store that is silent is found by what follows."""
        self._asked.put((lambda: self._store.delete_key(key), Future()))

    def gone(self, rank: int | None = None, seconds: float = 0.0) -> tuple[int, str] | None:
        """A process that will not come any more, and what became of it: any that is lost, or this one that has ended.

        Without a watch, whoever is killed says nothing, and a wait for it ends by its bound.

        Args:
            rank: who is waited for; None: nobody in particular.
            seconds: how long to wait for such news.
        """
        if (watch := self.watch) is None:
            if rank is None or (code := self.get(f"{LAST_WORDS}{rank}", seconds)) is None:
                return None
            return rank, f"it has ended with exit code {code}"
        found = watch.wait(seconds) if seconds else watch.gone()
        if found is None and rank is not None and (why := watch.what_became_of(rank)) is not None:
            found = (rank, why)
        return found

    def close(self) -> None:
        """Let go of the store and of the watch, once what was asked is answered."""
        _end(self._asked, self._thread)
        if self.watch is not None:
            self.watch.close()

    def _look(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _below(self, prefix: str) -> dict[str, str]:
        keys: list[str] | None = None
        if hasattr(self._store, "list_keys"):
            with contextlib.suppress(NotImplementedError):
                keys = [key for key in self._store.list_keys() if key.startswith(prefix)]
        if keys is None:
            keys = [f"{prefix}{rank}" for rank in range(self._size)]
        found = {key.removeprefix(prefix): self._look(key) for key in keys}
        return {key: text for key, text in found.items() if text is not None}

    def _ask(self, work: Callable[[], T]) -> T:
        """What the store answers.

        Raises:
            ProcessGroupError: it does not answer.
        """
        answer: Future[T] = Future()
        try:
            if self._silent is not None and not self._silent.done():
                raise TimeoutError(f"an earlier question is still open after {self._timeout_seconds:g} s")
            self._asked.put((work, answer))
            try:
                return answer.result(self._timeout_seconds)
            except TimeoutError as error:
                if answer.done():
                    raise
                self._silent = answer
                raise TimeoutError(f"no answer within {self._timeout_seconds:g} s") from error
        except Exception as error:
            text = str(error).partition("\nException raised from")[0]
            raise ProcessGroupError(
                "the store that the processes share, which process 0 or torchrun keeps, does not answer; is that "
                f"process gone? ({text})"
            ) from error


def _end(asked: SimpleQueue[Any], thread: threading.Thread) -> None:
    """Let the thread make the calls it was asked for, and end."""
    asked.put(None)
    thread.join(_END_SECONDS)


def _answer(asked: SimpleQueue[Any]) -> None:
    """Make the calls, one after the other, until the channel is closed."""
    while (question := asked.get()) is not None:
        work, answer = question
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)
        del question, work, answer
