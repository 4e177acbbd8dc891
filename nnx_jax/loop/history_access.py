"""Which records callbacks see in a run with a journal: the live window, or all of them, read back once per dispatch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from nnx_jax.core.errors import ConfigError, NnxError, nearest
from nnx_jax.runs.journal import JournalWriter, Window

ACCESS = ("window", "full")
ReadBack = Callable[[], Sequence[Mapping[str, Any]]]


class JournalRecords:
    """The records of a session whose history keeps them itself: nothing is kept a second time."""

    def __init__(self, journal: JournalWriter) -> None:
        self._journal = journal

    @property
    def view(self) -> Window:
        """What callbacks see."""
        return self._journal.window

    @property
    def retention(self) -> int | None:
        """How many records callbacks see."""
        return self._journal.spec.retention

    def since(self, epoch: int) -> Sequence[Mapping[str, Any]]:
        """The records from some place at or before the beginning of an epoch on, which may be more than the window."""
        return self._journal.read_back(epoch)

    @property
    def first_epoch(self) -> int | None:
        """Epoch of the run's first record, None before there is one."""
        return self._journal.first_epoch

    def append(self, row: Mapping[str, Any]) -> None:
        """The journal has the row already."""

    def cut(self, n_rows: int) -> None:
        """The journal has given the rows up already."""

    def append_table(self, table: Mapping[str, Any], n_rows: int) -> None:
        """The journal has the rows already."""


class _Context(Protocol):
    records: Sequence[Mapping[str, Any]]


class Sight:
    """One dispatch over all callbacks; as a context manager it leaves `ctx.records` as it found them.

    Args:
        read_back: returns every record of the run; None where `ctx.records` are all of them.
        ending: the run is over, so a read-back that fails is a warning and the window is shown instead.
    """

    def __init__(self, ctx: _Context, read_back: ReadBack | None, *, ending: bool = False) -> None:
        self._ctx, self._read_back, self._ending = ctx, read_back, ending
        self._window = ctx.records
        self._all: Sequence[Mapping[str, Any]] | None = None

    def show(self, callback: Any) -> None:
        """Set `ctx.records` for this callback.

        Raises:
            HistoryCorruptionError: (a ValueError) it wants everything, and what is stored is not what was written.
        """
        wants_all = getattr(callback, "history_access", "window") == "full"
        self._ctx.records = self._everything() if wants_all and self._read_back is not None else self._window

    def _everything(self) -> Sequence[Mapping[str, Any]]:
        if self._all is None:
            assert self._read_back is not None
            try:
                self._all = self._read_back()
            except (OSError, NnxError) as error:
                if not self._ending:
                    raise
                self._all = self._window
                message = f"the whole history cannot be read back, so its newest records are shown: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=4)
        return self._all

    def __enter__(self) -> Sight:
        return self

    def __exit__(self, *error: object) -> None:
        self._ctx.records = self._window


def check_access(callbacks: Iterable[Any], functions: type) -> None:
    """Check that every callback says which records it wants, for a run with a journal.

    Args:
        functions: the class that wraps plain functions, which are called with all rows and cannot say.

    Raises:
        ConfigError: (a ValueError) a plain function, or an access there is not.
    """
    for callback in callbacks:
        if isinstance(callback, functions):
            raise ConfigError(
                "a plain function as a callback is called with all rows of the run, which a journal does not keep in "
                'memory; make it a Callback, with history_access = "full" if it needs them all'
            )
        access = getattr(callback, "history_access", "window")
        if access not in ACCESS:
            name = type(callback).__name__
            raise ConfigError(f"{name}.history_access is {access!r}{nearest(access, ACCESS)}")
