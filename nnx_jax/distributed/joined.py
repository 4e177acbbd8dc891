"""The group that a process has joined, whichever framework runs it: one World for each training, one end for all."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nnx_jax.core.errors import ConfigError, ProcessGroupError
from nnx_jax.distributed.ending import ScriptEnd
from nnx_jax.spmd import processes
from nnx_jax.spmd.world import Channel, World

TIMEOUT_SECONDS = 120.0
"""Default bound of every wait for another process."""


@dataclass
class JoinedGroup:
    """What is kept of a group.

    Attributes:
        rank, size: which process this is, of how many.
        timeout_seconds: bound of every wait for another process.
        channel: how its processes talk; None for a group of one.
        conversations: how many Worlds were asked for.
    """

    rank: int
    size: int
    timeout_seconds: float
    channel: Channel | None
    conversations: int = field(default=0)

    def world(self, number: int, writer_rank: int = 0) -> World:
        """Return the World of one conversation."""
        return World(self.channel, writer_rank=writer_rank, name=f"run{number}")


_memberships: list[Membership] = []
"""Those of every framework that was imported."""


class Membership:
    """The one group that this process is in, for one framework; functions of the framework's module ask it.

    Args:
        adopt: returns the group that was joined without us, given a timeout in seconds; None without one.
        how: what to do where there is no group, for the error.
    """

    def __init__(self, adopt: Callable[[float], JoinedGroup | None], how: str) -> None:
        self._adopt, self._how = adopt, how
        self._group: JoinedGroup | None = None
        _memberships.append(self)

    def current(self, timeout_seconds: float = TIMEOUT_SECONDS) -> JoinedGroup | None:
        """Return the group of this process, also one that was joined without us; None without one."""
        if self._group is None:
            self._group = self._adopt(timeout_seconds)
        return self._group

    def needed(self) -> JoinedGroup:
        """Return the group.

        Raises:
            ProcessGroupError: (a RuntimeError) this process is in none.
        """
        if (found := self.current()) is None:
            raise ProcessGroupError(f"there is no group of processes; {self._how}")
        return found

    def join(self, group: JoinedGroup) -> JoinedGroup:
        """Note the group that was joined."""
        self._group = group
        return group

    def forget(self) -> None:
        """Note that the group was left."""
        self._group = None

    def current_world(self, writer_rank: int = 0) -> World:
        """Return the processes of the group for one new conversation.

        Raises:
            ProcessGroupError: (a RuntimeError) this process is in no group.
            ConfigError: (a ValueError) a rank that the group does not have.
        """
        found = self.needed()
        if writer_rank >= found.size:
            raise ConfigError(
                f"got {writer_rank}, but the ranks of this group are 0 to {found.size - 1}", path="DDP.writer_rank"
            )
        found.conversations += 1
        return found.world(found.conversations, writer_rank)

    def tell_failure(self, stage: str, error: BaseException) -> None:
        """Tell the others of an error in the conversation at hand, or before the first one began."""
        if (found := self.current()) is not None:
            found.world(max(found.conversations, 1)).fail(stage, error)

    def end_with_the_script(self, finish: Callable[[Channel], None] | None = None) -> None:
        """See to it that the others learn at once of an error or `sys.exit(n)` that ends the script, which ends there.

        Args:
            finish: leaves the group at any other end of a script that has not left it.
        """

        def channel() -> Channel | None:
            return None if self._group is None else self._group.channel

        def last() -> None:
            if finish is not None and (found := channel()) is not None:
                finish(found)

        ScriptEnd(channel, self.tell_failure, last)


def group_size() -> int:
    """Return how many processes the group has that this process is in, whichever framework runs it; 1 without one."""
    found = (each.current() for each in _memberships)
    return max((group.size for group in found if group is not None), default=1)


def meet_to_leave(group: JoinedGroup, timeout_seconds: float) -> None:
    """Wait until every process of a group wants to leave it.

    Raises:
        ProcessGroupError: (a RuntimeError) not every one came; the message names those.
    """
    if group.channel is None:
        return
    if missing := processes.meet_to_leave(group.channel, timeout_seconds):
        lost = "".join(f"; rank {rank}: {why}" for rank, why in missing.items() if why)
        raise ProcessGroupError(
            f"{_names(sorted(missing))} of {group.size} did not come to leave the group within {timeout_seconds:g} s"
            f"{lost}; the group stays as it is, and the end of this process may wait for the missing ones"
        )


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def launched_timeout() -> float:
    """Return the bound that the launcher was told, else the default one.

    Raises:
        ConfigError: (a ValueError) the variable is not a finite number above 0.
    """
    text = os.environ.get("NNX_JAX_TIMEOUT_SECONDS")
    try:
        return TIMEOUT_SECONDS if not text else checked_seconds(float(text))
    except ValueError as error:
        raise ConfigError(
            f"got {text!r}; it must be a finite number of seconds above 0", path="NNX_JAX_TIMEOUT_SECONDS"
        ) from error


def checked_seconds(value: Any) -> float:
    """Return a timeout.

    Raises:
        ConfigError: (a ValueError) it is not a finite number above 0.
    """
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if not right:
        raise ConfigError(f"got {value!r}; it must be a finite number of seconds above 0", path="timeout_seconds")
    return float(value)
