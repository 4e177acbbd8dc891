"""World: the processes of a run as they agree with each other: every wait is bounded, every failure has a name.

Agreement goes over a key-value store beside the devices, never through a device collective: it costs about a
millisecond, works while the devices are busy, and a wait for a process that is gone ends.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from nnx_jax.core import codec
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import DistributedFailure, HaltedElsewhere, ProcessGroupError

T = TypeVar("T")

_LOOK_SECONDS = 1.0
"""How often a waiting process looks whether another one has failed elsewhere."""
_GONE_SECONDS = 5.0
"""How long the others are still waited for once a computation of all of them broke off: one of them is gone."""
_ALL = "all"
"""Key beside those of the ranks, under which process 0 puts what it read there."""
_EACH_BY_ITSELF = ""
"""What it puts there when it could not read them all: every process finds out by itself why."""
_BETWEEN = "\x1e"
"""Between verdicts that are put together; JSON holds no such character."""
_MOST = 1_000_000
"""Characters of verdicts that are put together; more than that are read one by one."""
_LATE = "TimeoutError"
_MESSAGE = 20_000
"""Characters of an error's message that the others are told."""


class Channel(Protocol):
    """A key-value store that all processes of a group share, such as the coordination service's."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """Bound of every wait."""
        ...

    def put(self, key: str, text: str) -> None:
        """Set a key, whether or not it was set before."""
        ...

    def get(self, key: str, seconds: float) -> str | None:
        """The value of a key once it is set; None when it is not after so many seconds. Other threads go on."""
        ...

    def find(self, prefix: str) -> dict[str, str]:
        """What is set now below `prefix`, which ends with a slash, by the rest of the key."""
        ...

    def drop(self, key: str) -> None:
        """Forget a key; one that is not set is no error."""
        ...

    def gone(self, rank: int | None = None, seconds: float = 0.0) -> tuple[int, str] | None:
        """A process that will not come any more, and what became of it: any that is lost, or `rank` that has ended."""
        ...


class Board:
    """Keys of the shared store that are read and set at any time, beside the agreements.

    Args:
        channel: the store.
        place: beginning of its keys.
    """

    def __init__(self, channel: Channel, place: str) -> None:
        self._channel, self._place = channel, place

    def put(self, key: str, text: str) -> None:
        """Set a key for all processes."""
        self._channel.put(f"{self._place}{key}", text)

    def get(self, key: str, seconds: float) -> str | None:
        """Its value, waited for so long; None without one."""
        return self._channel.get(f"{self._place}{key}", seconds)


_TURNS: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
"""Turns of every conversation over a channel, so that a later World of the same name goes on where one ended."""


class World:
    """All processes of one run; every process makes the same calls in the same order.

    Args:
        channel: how they talk; None for one process alone, which agrees with itself at no cost.
        writer_rank: the process that writes the run.
        name: of this conversation; a thread that agrees by itself needs one of its own, see `sub`.
    """

    def __init__(self, channel: Channel | None = None, *, writer_rank: int = 0, name: str = "run") -> None:
        self._channel, self.writer_rank, self._name = channel, writer_rank, name
        self._turns = {} if channel is None else _TURNS.setdefault(channel, {})
        self.broke_off: Callable[[BaseException], bool] = lambda error: False
        """Whether an error is that of a computation that all processes take part in, and one of them left."""
        self._broken = threading.Event()
        if not 0 <= writer_rank < self.size:
            raise ProcessGroupError(f"writer_rank is {writer_rank}; the ranks of this group are 0 to {self.size - 1}")

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return 0 if self._channel is None else self._channel.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self._channel is None else self._channel.size

    @property
    def alone(self) -> bool:
        """There is one process."""
        return self.size == 1

    @property
    def writes(self) -> bool:
        """This process writes the run."""
        return self.rank == self.writer_rank

    @property
    def timeout_seconds(self) -> float:
        """Bound of every wait; there is none for a process alone."""
        return 0.0 if self._channel is None else self._channel.timeout_seconds

    def board(self, name: str) -> Board:
        """Keys of their own from now on; every process asks at the same point of the conversation.

        Raises:
            ProcessGroupError: a process alone has none.
        """
        if self._channel is None:
            raise ProcessGroupError("a process alone shares nothing")
        return Board(self._channel, f"nnx_jax/{self._name}/{name}@{self._turns.get(self._name, 0)}/")

    def sub(self, name: str) -> World:
        """The same processes in a conversation of its own, for another thread; equal names on every process."""
        other = World(self._channel, writer_rank=self.writer_rank, name=f"{self._name}.{name}")
        other.broke_off, other._broken = self.broke_off, self._broken
        return other

    def notice(self, error: BaseException) -> None:
        """Wait no longer for whoever is gone, in no conversation of this run, if that is what an error says."""
        if self.broke_off(error):
            self._broken.set()

    def agree(self, stage: str, work: Callable[[], T]) -> T:
        """Do `work` on every process, and go on only where all of them could.

        Args:
            stage: what is done, for the error of the others: "epoch 3, callbacks".

        Raises:
            whatever `work` raised here: its own error on the process that failed.
            DistributedFailure: another process failed, did not come in time, or is somewhere else.
        """
        return self.agree_telling(stage, work)[0]

    def agree_telling(
        self, stage: str, work: Callable[[], T], tell: Callable[[], Any] = lambda: None
    ) -> tuple[T, list]:
        """Like `agree`; and the JSON value that `tell` gave on every process after its work, by rank."""
        if self.alone:
            return work(), [tell()]
        result, error, verdict = None, None, ""
        try:
            result = work()
            verdict = _text({"stage": stage, "value": tell()})
        except BaseException as failure:
            self.notice(failure)
            error, verdict = failure, _text({"stage": stage, **told(failure)})
        if isinstance(error, DistributedFailure):  # of an agreement inside the work: the others know, or will read it
            self._say_apart(verdict)
            raise error
        found: list[dict[str, Any]] = []
        try:
            found = self._exchange(stage, verdict)
            self._check(stage, found)
        except ProcessGroupError:
            if error is None or isinstance(error, HaltedElsewhere):
                raise
        if error is not None:
            raise error
        return result, [each["value"] for each in found]  # type: ignore[return-value]

    def gather(self, stage: str, value: Any) -> list[Any]:
        """The JSON value of every process, by rank."""
        return self.agree_telling(stage, lambda: None, lambda: value)[1]

    def any(self, stage: str, flag: bool) -> bool:
        """Whether it is so on some process."""
        return any(self.gather(stage, bool(flag)))

    def on_writer(self, stage: str, work: Callable[[], Any]) -> Any:
        """Do `work` on the writer alone; every process gets its JSON value, or learns why there is none."""
        done: list[Any] = []
        act = (lambda: done.append(work())) if self.writes else (lambda: None)
        _, values = self.agree_telling(stage, act, lambda: done[0] if done else None)
        return done[0] if done else values[self.writer_rank]

    def fail(self, stage: str, error: BaseException) -> None:
        """Tell the others of an error that is raised here outside an agreement; they learn of it at their next wait."""
        if self._channel is not None and not isinstance(error, DistributedFailure):
            self._channel.put(f"{self._failures}{self.rank}", _text({"stage": stage, **told(error)}))

    def failure(self) -> DistributedFailure | None:
        """The failure that another process has told of by `fail`, the lowest rank's; None without one."""
        if self._channel is None:
            return None
        found = {int(rank): text for rank, text in self._channel.find(self._failures).items() if rank.isdigit()}
        for rank in sorted(found):
            if rank != self.rank:
                return _failure(rank, _value(found[rank]))
        return None

    @property
    def _failures(self) -> str:
        return f"nnx_jax/{self._name.partition('.')[0]}/failed/"

    def lost(self, seconds: float = 0.0) -> DistributedFailure | None:
        """The process that is gone without a word, waited for so long; None while all are there."""
        if self._channel is None or (found := self._channel.gone(seconds=seconds)) is None:
            return None
        return _lost(*found, "work of all processes")

    def _say(self, verdict: str) -> int:
        """Put one's own verdict where the others read it; return the turn."""
        assert self._channel is not None
        turn = self._turns.get(self._name, 0)
        self._turns[self._name] = turn + 1
        self._channel.put(f"{self._place(turn)}{self.rank}", verdict)
        return turn

    def _say_apart(self, verdict: str) -> None:
        """Like `_say`, of a process that reads nothing; the others then have to read everything themselves."""
        assert self._channel is not None
        turn = self._say(verdict)
        if self.rank == 0:
            self._channel.put(f"{self._place(turn)}{_ALL}", _EACH_BY_ITSELF)

    def _place(self, turn: int) -> str:
        return f"nnx_jax/{self._name}/{turn}/"

    def _exchange(self, stage: str, verdict: str) -> list[dict[str, Any]]:
        """The verdicts of all processes, by rank.

        Process 0 collects them and puts them all into one text, so that a turn is a few requests of each process.
        """
        assert self._channel is not None
        begun, turn = time.monotonic(), self._turns.get(self._name, 0)
        try:
            self._say(verdict)
            if self.rank == 0:
                found = self._collected(verdict, turn, stage, begun)
            else:
                found = self._read_all(turn, stage, begun)
            # Everyone has read the turn before the last one, since everyone has come to this one.
            self._channel.drop(f"{self._place(turn - 2)}{self.rank}")
            if self.rank == 0:
                self._channel.drop(f"{self._place(turn - 2)}{_ALL}")
        except DistributedFailure:
            raise
        except ProcessGroupError as error:
            if (gone := self._channel.gone()) is not None:
                raise _lost(*gone, stage) from error
            raise
        return found

    def _collected(self, verdict: str, turn: int, stage: str, begun: float) -> list[dict[str, Any]]:
        """On process 0: read each one, and tell all."""
        assert self._channel is not None
        place, texts = self._place(turn), {"0": verdict}
        try:
            while missing := [rank for rank in range(self.size) if str(rank) not in texts]:
                texts[str(missing[0])] = self._wait(f"{place}{missing[0]}", missing[0], stage, begun)
                if len(missing) > 1:
                    texts |= self._channel.find(place)
        except DistributedFailure:
            self._channel.put(f"{place}{_ALL}", _EACH_BY_ITSELF)
            raise
        ordered = [texts[str(rank)] for rank in range(self.size)]
        together = _BETWEEN.join(ordered)
        self._channel.put(f"{place}{_ALL}", together if len(together) < _MOST else _EACH_BY_ITSELF)
        return [_value(text) for text in ordered]

    def _read_all(self, turn: int, stage: str, begun: float) -> list[dict[str, Any]]:
        """On every other process: read what process 0 tells, or each one, where it could not."""
        place = self._place(turn)
        try:
            text = self._wait(f"{place}{_ALL}", 0, stage, begun)
        except DistributedFailure as failure:
            if failure.kind != _LATE:
                raise
            text = _EACH_BY_ITSELF  # it waits for the same one, or is that one
        if text != _EACH_BY_ITSELF:
            return [_value(each) for each in text.split(_BETWEEN)]
        return [_value(self._wait(f"{place}{rank}", rank, stage, begun)) for rank in range(self.size)]

    def _wait(self, key: str, rank: int, stage: str, begun: float) -> str:
        """What a process puts under a key.

        Raises:
            DistributedFailure: it told of a failure instead, somebody is lost, or it did not come in time.
        """
        assert self._channel is not None
        while True:
            waited = self._channel.timeout_seconds
            if self._broken.is_set():
                waited = min(waited, _GONE_SECONDS)
            left = begun + waited - time.monotonic()
            gone = self._channel.gone(rank)  # before the look at the key: it may have been its last word
            text = self._channel.get(key, 0.0 if gone else max(min(left, _LOOK_SECONDS), 0.0))
            if text is not None:
                return text
            if (failure := self.failure()) is not None:
                raise failure
            if gone is not None:
                raise _lost(*gone, stage)
            if left <= 0:
                message = f"it did not come within {waited:g} s; is it still alive, or doing something else?"
                raise _failure(rank, {"stage": stage, "type": _LATE, "message": message})

    def _check(self, stage: str, verdicts: Sequence[dict[str, Any]]) -> None:
        failed = [rank for rank, verdict in enumerate(verdicts) if "type" in verdict and rank != self.rank]
        for rank in sorted(failed, key=lambda rank: (verdicts[rank]["elsewhere"], rank)):
            raise _failure(rank, verdicts[rank])
        for rank, verdict in enumerate(verdicts):
            if verdict["stage"] != stage:
                message = f"it is at '{verdict['stage']}' while rank {self.rank} is at '{stage}'"
                raise _failure(rank, {"stage": stage, "type": "ProcessGroupError", "message": message})


def told(error: BaseException) -> dict[str, Any]:
    """An error as the others are told of it."""
    return {
        "type": type(error).__name__,
        "message": str(error)[:_MESSAGE].encode(errors="backslashreplace").decode(),
        "elsewhere": isinstance(error, HaltedElsewhere | DistributedFailure),
    }


def _failure(rank: int, verdict: dict[str, Any]) -> DistributedFailure:
    return DistributedFailure(rank, verdict["stage"], verdict["type"], verdict["message"])


def _lost(rank: int, why: str, stage: str) -> DistributedFailure:
    return _failure(rank, {"stage": stage, "type": "ProcessLost", "message": why})


def _text(value: dict[str, Any]) -> str:
    return durable_json(value, source="what a process tells the others").decode()


def _value(text: str) -> dict[str, Any]:
    return codec.parse_json(text.encode(), source="what another process told")


ALONE = World()
"""The world of a process without a group."""
