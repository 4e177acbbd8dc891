"""What a process that does not write a run has in place of history and committer; its shards are its only files.

Of a commit a replica does its part (see `commit`): it copies and writes its shards of shared arrays, and learns whether
LAST moved. A failure anywhere fails the commit here, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnx_jax.core import codec
from nnx_jax.core.errors import CheckpointError, CommitError, NnxError
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs.arrays import ArrayWriter
from nnx_jax.runs.commit import CommitPoint, Handle, InFlight, MakeWriter, beginning, stage
from nnx_jax.runs.history import check_table, plain_value, refuse_unknown
from nnx_jax.runs.journal import Window
from nnx_jax.runs.journal_format import JournalExtent, RowCodec, is_summary
from nnx_jax.runs.journal_read import JournalReader, read_chunk
from nnx_jax.runs.layout import LAST, RunPaths
from nnx_jax.runs.pointers import Pointer, parse_pointer
from nnx_jax.spmd.world import World


class UnwrittenHistory:
    """Takes rows and lets go of them.

    Args:
        columns: names of the columns; a row with another one is refused, as where rows are written.
    """

    def __init__(self, columns: Sequence[str] = ()) -> None:
        self.columns = tuple(columns)
        self._known = frozenset(columns)
        self.rows = 0

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of one kind."""
        for row in rows:
            refuse_unknown(self._known, row)
            self.rows += 1

    def append_table(self, table: Mapping[str, Any], n_rows: int) -> None:
        """Rows by column."""
        check_table(self._known, table, n_rows)
        self.rows += n_rows

    def mark(self) -> int:
        """Return the number of rows so far."""
        return self.rows

    def settle(self, rows: int, pointer: Pointer) -> None:
        """LAST covers the rows up to a mark."""

    def discard(self) -> None:
        """Nothing is held."""


class UnwrittenJournal(UnwrittenHistory):
    """The live window of a journal that another process writes; records that LAST covers are read back from its files.

    Args:
        directory: of the journal, as this process sees it.
        spec: the settings.
        extent: what LAST covers; None when the journal is new.

    Attributes:
        window: the newest `retention` records.
        first_epoch: epoch of the run's first record, None before there is one.
    """

    def __init__(
        self, directory: Path, columns: Sequence[str], spec: HistoryJournal, extent: JournalExtent | None
    ) -> None:
        super().__init__(columns)
        self._directory, self.spec, self._extent = directory, spec, extent
        self._codec = RowCodec(columns)
        self._mutex = threading.Lock()
        self._waiting: deque[tuple[int, str]] = deque()
        self._window: deque[Mapping[str, Any]] = deque(maxlen=spec.retention)
        self.window = Window(self._window)
        self.first_epoch: int | None = None
        self.discard()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of one kind."""
        for row in rows:
            super().append([row])
            if not is_summary(row):
                self._keep(row)

    def append_table(self, table: Mapping[str, Any], n_rows: int) -> None:
        """Rows by column."""
        check_table(self._known, table, n_rows)
        for place in range(n_rows):
            row = {name: values[place] if isinstance(values, list) else values for name, values in table.items()}
            self.append([row])

    def _keep(self, row: Mapping[str, Any]) -> None:
        if self.first_epoch is None and type(epoch := plain_value(row.get("epoch"))) is int:
            self.first_epoch = epoch
        with self._mutex:
            self._waiting.append((self.rows, self._codec.object(row)))
        self._window.append({name: row.get(name) for name in self.columns})

    def settle(self, rows: int, pointer: Pointer) -> None:
        """LAST covers the rows up to a mark, which are in its files now."""
        assert isinstance(pointer.history, JournalExtent)
        with self._mutex:
            self._extent = pointer.history
            while self._waiting and self._waiting[0][0] <= rows:
                self._waiting.popleft()

    def discard(self) -> None:
        """Forget the records that LAST does not cover."""
        self._waiting.clear()
        self._window.clear()
        self.first_epoch = None
        self.rows = 0 if self._extent is None else self._extent.rows
        if self._extent is not None:
            reader = JournalReader(self._directory, self._extent)
            self._window.extend(reader.tail(self.spec.retention))
            self.first_epoch = reader.chunks[0].first_epoch if reader.chunks else None

    def read_back(self, epoch: int | None = None) -> tuple[dict[str, Any], ...]:
        """Return every record of the run so far, committed or not; see `JournalWriter.read_back`."""
        with self._mutex:
            extent, waiting = self._extent, [text for _, text in self._waiting]
        found: list[dict[str, Any]] = []
        if extent is not None:
            for chunk in JournalReader(self._directory, extent).chunks:
                if epoch is None or chunk.last_epoch is None or chunk.last_epoch >= epoch:
                    found += read_chunk(self._directory, chunk, self._codec)
        lines = "".join(f"{text}\n" for text in waiting).encode()
        return (*found, *map(self._codec.row, codec.parse_json_lines(lines, source="records that wait")))


class ReplicaCommitter(InFlight):
    """Takes part in the commits of a run that another process writes; see `Committer`, whose calls it has.

    Args:
        paths: of the run, as this process sees them.
        world: the processes that commit together, in a conversation of the committers' own.
        last: the standing LAST, None before the first commit.
        on_committed: as for the writer, called in the waiter thread.
        timeout_seconds: bound of one background save.
        make_writer: how arrays are stored, as on the writer.
    """

    def __init__(
        self,
        paths: RunPaths,
        world: World,
        history: UnwrittenHistory,
        *,
        last: Pointer | None = None,
        on_committed: Callable[[Pointer], None] | None = None,
        timeout_seconds: int = 600,
        make_writer: MakeWriter = ArrayWriter,
    ) -> None:
        self._paths, self._world, self._history = paths, world, history
        self._last, self._on_committed = last, on_committed
        self._writer = make_writer(timeout_seconds, world)
        self._thread: threading.Thread | None = None
        self._failure: NnxError | None = None

    @property
    def last(self) -> Pointer | None:
        """The LAST that stands on disk, as the writer told of it."""
        return self._last

    def prepare(self) -> None:
        """Nothing is loaded before there is something to write."""

    def commit(self, point: CommitPoint) -> None:
        """Do this process's part of a commit; returns once its arrays are copied. Waits for the one before first.

        Raises:
            CommitError: (an OSError) this process could not do its part of this commit or the one before.
            DistributedFailure: another process could not.
        """
        self.drain()
        rows = self._history.mark()
        _, told = self._world.agree_telling(beginning(point), lambda: None)
        begun = told[self._world.writer_rank]
        name = stage(point, begun["generation"])
        partial = self._paths.generations / begun["partial"]
        try:
            handle = self._world.agree(name, lambda: self._writer.save(partial, point.arrays))
        except Exception as error:
            self._writer.settle()
            raise self._explain(error, name) from error
        self._thread = threading.Thread(target=self._finish, args=(name, handle, rows), name=f"part of {name}")
        self._thread.start()

    def finish(self, artifact: Mapping[str, Any]) -> Pointer:
        """Learn that the writer has marked the run finished; `artifact` is the writer's."""
        self.drain()
        _, told = self._world.agree_telling("the run's end", lambda: None)
        self._last = self._parse(told)
        return self._last

    def close(self) -> None:
        """Wait for the commit in flight; raises like `drain`."""
        try:
            self.drain()
        finally:
            self._writer.close()

    def _finish(self, name: str, handle: Handle, rows: int) -> None:
        agree = self._world.agree_telling
        try:
            agree(name, handle.wait, handle.digests)
            self._last = last = self._parse(agree(name, lambda: None)[1])
            self._history.settle(rows, last)
            agree(f"{name}: what follows it", lambda: self._report(last))
        except BaseException as error:
            self._writer.settle()
            self._failure = self._explain(error, name)

    def _report(self, last: Pointer) -> None:
        if self._on_committed is not None:
            self._on_committed(last)

    def _parse(self, told: Sequence[Any]) -> Pointer:
        text = told[self._world.writer_rank]
        if text is None:
            raise CheckpointError(f"{self._paths.run}: nothing was committed")
        return parse_pointer(text.encode(), self._paths.pointer(LAST), self._paths.run_id)

    def _explain(self, error: BaseException, name: str) -> NnxError:
        if isinstance(error, NnxError):
            return error
        failure = CommitError(f"{name} of run {self._paths.run_id!r} failed here: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
