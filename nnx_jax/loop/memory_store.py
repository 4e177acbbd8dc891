"""A run store that keeps nothing: what the loop writes to when a strategy trains without checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nnx_jax.runs.commit import CommitPoint


@dataclass(frozen=True)
class _Paths:
    run_id: str
    root: None = None


class _History:
    """Takes rows and lets go of them."""

    rows = 0
    columns: tuple[str, ...] = ()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of one kind."""

    def append_table(self, table: Mapping[str, Any], n_rows: int) -> None:
        """Rows by column."""

    def discard(self) -> None:
        """Nothing is held."""


class _Committer:
    """Takes moments and lets go of them; nothing can fail."""

    last = None

    def commit(self, point: CommitPoint) -> None:
        """A moment of the run; its arrays are not copied, and not kept."""

    def drain(self) -> None:
        """Nothing is in flight."""

    def prepare(self) -> None:
        """Nothing is to be loaded."""


class MemoryStore:
    """The part of `RunStore` that a session uses, without a disk.

    Attributes:
        status: always "fresh".
        point: nothing to continue from.
    """

    status = "fresh"
    point = None
    ignored: tuple[str, ...] = ()

    def __init__(self, run_id: str = "memory") -> None:
        self.paths = _Paths(run_id)
        self.history = _History()
        self.committer = _Committer()

    def close(self) -> None:
        """Nothing to close."""

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
