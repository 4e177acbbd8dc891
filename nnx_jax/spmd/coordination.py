"""What the processes of a group tell each other: a key-value store, kept by JAX's coordination service on process 0.

Once that service is gone, a call of JAX's client may never return: the client holds a lock while it ends the process,
which `aborts` holds back. So every call is made by a thread that is left behind where that happens.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

from nnx_jax.core.errors import ProcessGroupError
from nnx_jax.spmd.watch import Watch, lost_text

T = TypeVar("T")

_LOOK_SECONDS = 0.25
"""How often a wait looks whether it is in vain."""
_BRIEF_SECONDS = 0.02
"""A bound that is as short as a request takes: one look, however long it takes, in place of a wait."""


class CoordinationChannel:
    """What the processes tell each other, kept by JAX's coordination service; a `world.Channel`.

    Args:
        client: of the coordination service.
        timeout_seconds: bound of every wait for another process.
        watch: who is gone; None in a group that was joined without `join`.

    Raises:
        ProcessGroupError: from every method: process 0, which runs the service, is gone, or it does not answer.
    """

    def __init__(self, client: Any, rank: int, size: int, timeout_seconds: float, watch: Watch | None = None) -> None:
        self._client, self._rank, self._size, self._timeout_seconds = client, rank, size, timeout_seconds
        self._watch = watch
        self._own = threading.local()

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

    def gone(self, rank: int | None = None, seconds: float = 0.0) -> tuple[int, str] | None:
        """A process that will not come any more, and what became of it: any that is lost, or this one that has ended.

        Args:
            rank: who is waited for; None: nobody in particular.
            seconds: how long to wait for such news; the others may know of it before this process does.
        """
        if (watch := self._watch) is None:
            return None
        found = watch.wait(seconds) if seconds else watch.gone()
        if found is None and rank is not None and (why := watch.what_became_of(rank)) is not None:
            found = (rank, why)
        if found is not None:
            watch.notice()
        return found

    def put(self, key: str, text: str) -> None:
        """Set a key, whether or not it was set before."""
        with self._service():
            self._call(lambda: self._client.key_value_set(key, text, allow_overwrite=True))

    def get(self, key: str, seconds: float) -> str | None:
        """The value of a key once it is set; None when it is not after so many seconds, or somebody is gone."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > _BRIEF_SECONDS and (self._watch is None or not self._watch.gone()):
            with self._service("DEADLINE_EXCEEDED"):
                wait = math.ceil(1000 * min(left, _LOOK_SECONDS))
                return self._call(lambda wait=wait: self._client.blocking_key_value_get(key, wait))
        with self._service("NOT_FOUND"):
            return self._call(lambda: self._client.key_value_try_get(key))
        return None

    def find(self, prefix: str) -> dict[str, str]:
        """What is set now below `prefix`, which ends with a slash, by the rest of the key."""
        with self._service():
            found = self._call(lambda: self._client.key_value_dir_get(prefix))
            return {key.removeprefix(prefix): text for key, text in found}

    def drop(self, key: str) -> None:
        """Forget a key; one that is not set is no error."""
        with self._service():
            self._call(lambda: self._client.key_value_delete(key))

    @contextlib.contextmanager
    def _service(self, expected: str | None = None) -> Iterator[None]:
        """Around a request; an answer that begins with the word expected, as JAX's errors do, ends it quietly."""
        self._check_service()
        try:
            yield
        except ProcessGroupError:
            raise
        except Exception as error:  # its class depends on the version of jaxlib
            if expected is not None and expected in str(error):
                return
            if self._watch is not None:
                self._watch.wait(_LOOK_SECONDS)
                self._check_service()
            raise ProcessGroupError(
                f"the coordination service, which process 0 runs, does not answer; is that process gone? ({error})"
            ) from error

    def _check_service(self) -> None:
        if self._watch is not None and (why := self._watch.service_ended()) is not None:
            self._watch.notice()
            raise ProcessGroupError(lost_text(0, why, self._size))

    def _call(self, request: Callable[[], T]) -> T:
        """What the client returns or raises.

        Raises:
            ProcessGroupError: the service is gone, whether or not the client ever returns.
        """
        if self._watch is None or self._rank == 0:
            return request()
        if (caller := getattr(self._own, "caller", None)) is None:
            caller = self._own.caller = _Caller()
        answer = caller.ask(request)
        while not answer.done.wait(_LOOK_SECONDS):
            if self._watch.service_ended() is not None and not answer.done.wait(_BRIEF_SECONDS):
                self._own.caller = None
                self._check_service()
        if answer.error is not None:
            raise answer.error
        return answer.value


class _Answer:
    """Of one request."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None


class _Caller:
    """A thread that makes the requests of another one, which can give it up; it ends with this object."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = SimpleQueue()
        threading.Thread(target=_make_requests, args=(self._asked,), name="coordination", daemon=True).start()

    def __del__(self) -> None:
        self._asked.put(None)

    def ask(self, request: Callable[[], Any]) -> _Answer:
        answer = _Answer()
        self._asked.put((request, answer))
        return answer


def _make_requests(asked: SimpleQueue[tuple[Callable[[], Any], _Answer] | None]) -> None:
    while (question := asked.get()) is not None:
        request, answer = question
        try:
            answer.value = request()
        except BaseException as error:
            answer.error = error
        answer.done.set()
        del question, request, answer
