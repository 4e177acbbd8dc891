"""One open run: takes the lease, makes or re-opens the directory, and hands out history and committer.

In a group of processes one writes the run; the others hold a `ReplicaStore`, which has the same calls and touches no
file but its shards of shared arrays.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from nnx_jax.core import fsio
from nnx_jax.core.durable import durable_yaml
from nnx_jax.core.errors import CheckpointError, LeaseHeldError, NnxError, ResumePointError
from nnx_jax.params.history import HistoryJournal
from nnx_jax.runs import best, lease, pointers, provenance, retain
from nnx_jax.runs.arrays import ArrayWriter
from nnx_jax.runs.commit import Committer, MakeWriter
from nnx_jax.runs.history import Extent, History
from nnx_jax.runs.journal import JournalWriter
from nnx_jax.runs.journal_format import JournalExtent
from nnx_jax.runs.layout import LAST, TRASH, RunPaths
from nnx_jax.runs.pointers import Pointer
from nnx_jax.runs.provenance import ResumeStatus
from nnx_jax.runs.replica import ReplicaCommitter, UnwrittenHistory, UnwrittenJournal
from nnx_jax.runs.resume import ResumePoint, read_point, trusted
from nnx_jax.runs.together import alike, check_same_files
from nnx_jax.spmd.world import ALONE, World


class RunStore:
    """A run open for writing; use `RunStore.open`, and close it (or use it as a context manager).

    Attributes:
        status: "fresh" (nothing committed), "interrupted" (continue from `point`) or "finished".
        point: the verified LAST, None when fresh.
        history: where rows go; what LAST does not cover is cut off already.
        committer: makes the commits.
        ignored: names in `generations/` that no commit stands behind, for a message to the user.
        world: the processes that have the run open together.
        writes: this process is the one that writes the run.
    """

    writes = True

    def __init__(
        self,
        paths: RunPaths,
        held: lease.Lease,
        history: History | JournalWriter,
        committer: Committer,
        point: ResumePoint | None,
        ignored: tuple[str, ...],
        world: World = ALONE,
    ) -> None:
        self.paths, self.lease, self.history, self.committer = paths, held, history, committer
        self.point, self.ignored, self.world = point, ignored, world
        self._made = False
        self.status = status_of(point.pointer if point else None)

    @classmethod
    def open(
        cls,
        root: str | Path,
        run_id: str,
        spec_state: Mapping[str, Any],
        columns: Sequence[str],
        *,
        overwrite: bool = False,
        keep: int | None = 1,
        journal: HistoryJournal | None = None,
        resume: ResumeStatus | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait_seconds: float = 0.0,
        on_committed: Callable[[Pointer], None] | None = None,
        timeout_seconds: int = 600,
        world: World = ALONE,
        make_writer: MakeWriter = ArrayWriter,
    ) -> RunStore:
        """Open run `run_id` below `root` for writing.

        In a group every process calls this with the same arguments, but for `root`, which is where it sees the one
        directory that all share. Only the writer takes the lease, verifies and writes.

        Args:
            spec_state: the configuration, written to `run.yaml` when the run is new.
            columns: names of the history's columns, fixed from the first start on.
            overwrite: replace the run when it is finished, or when its LAST, or what LAST names, is damaged or gone
                (once its lease is held and `runs/best` has moved on). An interrupted run is continued all the same.
            keep: newest generations kept besides the named ones (>= 1); None keeps all.
            journal: keep the history as a journal; a run that has one already keeps it with None, too.
            resume: what a new run starts from, for `metadata.yaml`.
            metadata: more environment facts for `metadata.yaml`; never environment variables.
            wait_seconds: how long to wait for another writer of this run.
            on_committed: see `Committer`.
            timeout_seconds: bound of one background save; waits for other processes have the group's own.
            world: the processes that open the run together.
            make_writer: how arrays are stored: by Orbax, or as `tensors.TensorWriter` does.

        Raises:
            LeaseHeldError: another process writes this run.
            ResumePointError: LAST or what it names is damaged; nothing was changed.
            HistoryCorruptionError: the committed history is damaged; nothing was changed.
            CheckpointError: `columns` differ from the first start's, or the run has no journal and one is asked for.
            ConfigError: `spec_state` or the metadata is larger than what is read back; nothing was changed.
            ProcessGroupError: not every process of the group sees the same `root`.
            DistributedFailure: the writer could not open the run, for a reason it raises itself. That stored files are
                damaged, all raise in the same words.
        """
        retain.check_keep(keep)
        paths = RunPaths(root, run_id)
        options: dict[str, Any] = {
            "on_committed": on_committed, "timeout_seconds": timeout_seconds, "world": world, "make_writer": make_writer
        }  # fmt: skip

        def write(wait_seconds: float) -> RunStore:
            return _open_for_writing(
                paths, spec_state, columns, overwrite=overwrite, keep=keep, journal=journal, resume=resume,
                metadata=metadata, wait_seconds=wait_seconds, **options,
            )  # fmt: skip

        if world.alone:
            return write(wait_seconds)
        return _open_together(paths, write, columns, wait_seconds=wait_seconds, **options)

    def finish(self, artifact: Mapping[str, Any]) -> Pointer:
        """Wait for the last commit, then mark the run finished; `artifact` (plain values) becomes `artifact.json`."""
        pointer = self.committer.finish(artifact)
        self.status = "finished"
        return pointer

    def abandon(self) -> None:
        """Remove a run that has committed nothing; files of others that were in its directory before it stay.

        A process that does not write the run leaves it to the writer.
        """
        if self._made:
            remove(self.paths)
            return
        for path in (self.paths.config, self.paths.metadata, self.paths.history):
            path.unlink(missing_ok=True)
        for directory in (self.paths.journal, self.paths.checkpoints):
            fsio.remove_tree(directory)
        with contextlib.suppress(OSError):
            self.paths.run.rmdir()  # if nothing else is in it

    def close(self) -> None:
        """Wait for the commit in flight, then give the lease back; raises a failure no earlier call has raised."""
        try:
            self.committer.close()
        finally:
            self.lease.release()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except NnxError as trouble:
            if error is None:
                raise
            error.add_note(f"closing the run failed too: {trouble}")  # never hide the first error


class ReplicaStore(RunStore):
    """A run that another process of the group writes: the same calls, and no file but shards of shared arrays."""

    writes = False

    def __init__(
        self,
        paths: RunPaths,
        history: UnwrittenHistory,
        committer: ReplicaCommitter,
        point: ResumePoint | None,
        ignored: tuple[str, ...],
        world: World,
    ) -> None:
        self.paths, self.point, self.ignored, self.world = paths, point, ignored, world
        self.history, self.committer = cast(Any, history), cast(Any, committer)
        self.status = status_of(point.pointer if point else None)

    def abandon(self) -> None:
        """The writer's work."""

    def close(self) -> None:
        """Wait for the commit in flight; raises a failure no earlier call has raised."""
        self.committer.close()


def _open_for_writing(
    paths: RunPaths,
    spec_state: Mapping[str, Any],
    columns: Sequence[str],
    *,
    overwrite: bool,
    keep: int | None,
    journal: HistoryJournal | None,
    resume: ResumeStatus | None,
    metadata: Mapping[str, Any] | None,
    wait_seconds: float,
    on_committed: Callable[[Pointer], None] | None,
    timeout_seconds: int,
    world: World,
    make_writer: MakeWriter,
) -> RunStore:
    """Take the lease and open everything; see `RunStore.open`."""
    fsio.make_dir(paths.root)
    held = lease.acquire(paths, wait_seconds=wait_seconds, floor=_last_fencing(paths))
    try:
        point, replaced = _starting_point(paths, overwrite)
        made = replaced or not paths.run.exists()
        if point is None:
            files = _config_files(paths, spec_state, provenance.collect(resume, metadata))
            if replaced:
                remove(paths)
            _create(paths, files)
        last = point.pointer if point else None
        history = _open_history(paths, columns, journal, last, held)
        _sweep(paths)
        census = retain.take_census(paths)
        committer = Committer(
            paths, held, history, last=last, keep=keep, on_committed=on_committed, timeout_seconds=timeout_seconds,
            world=_for_commits(world, paths, held.fencing), make_writer=make_writer,
        )  # fmt: skip
        store = RunStore(paths, held, history, committer, point, _uncommitted(census, last), world)
        store._made = made
        return store
    except BaseException:
        held.release()
        raise


def _for_commits(world: World, paths: RunPaths, fencing: int) -> World:
    """The conversation of the committers, which talk in threads of their own."""
    return world if world.alone else world.sub(f"commit-{paths.run_id}-{fencing}")


def _open_together(
    paths: RunPaths,
    write: Callable[[float], RunStore],
    columns: Sequence[str],
    *,
    wait_seconds: float,
    on_committed: Callable[[Pointer], None] | None,
    timeout_seconds: int,
    world: World,
    make_writer: MakeWriter,
) -> RunStore:
    """Let the writer open the run, and every other process take from it what it needs to know."""
    check_same_files(world, paths)
    own: list[RunStore] = []
    end, once = time.monotonic() + wait_seconds, world.timeout_seconds / 3

    def opened() -> dict[str, Any] | None:
        left = end - time.monotonic()
        try:
            own.append(write(max(0.0, min(left, once))))
        except LeaseHeldError:
            if left > once:
                return None  # the others hear that this one still waits, before they take it for lost
            raise
        return _told(own[0])

    def replica() -> RunStore:
        point = None if told["point"] is None else trusted(paths.root, told["point"])
        history = _unwritten_history(paths, columns, point, told["journal"])
        last = point.pointer if point else None
        commits = _for_commits(world, paths, told["fencing"])
        committer = ReplicaCommitter(
            paths, commits, history, last=last, on_committed=on_committed, timeout_seconds=timeout_seconds,
            make_writer=make_writer,
        )  # fmt: skip
        return ReplicaStore(paths, history, committer, point, tuple(told["ignored"]), world)

    try:
        while (told := alike(world, "opening the run", opened)) is None:
            pass
        return world.agree("opening the run", lambda: own[0] if world.writes else replica())
    except BaseException:
        for store in own:
            if store.status == "fresh":
                store.abandon()
            store.close()
        raise


def _told(store: RunStore) -> dict[str, Any]:
    """What the other processes need to know of a run that the writer has opened."""
    history = store.history
    return {
        "point": store.point.told() if store.point else None,
        "journal": history.spec.state() if isinstance(history, JournalWriter) else None,
        "fencing": store.lease.fencing,
        "ignored": list(store.ignored),
    }


def _unwritten_history(
    paths: RunPaths, columns: Sequence[str], point: ResumePoint | None, journal: Mapping[str, Any] | None
) -> UnwrittenHistory:
    if journal is None:
        return UnwrittenHistory(columns)
    extent = point.pointer.history if point and point.pointer else None
    covered = extent if isinstance(extent, JournalExtent) else None
    return UnwrittenJournal(paths.journal, columns, HistoryJournal.from_state(journal), covered)


def _open_history(
    paths: RunPaths, columns: Sequence[str], journal: HistoryJournal | None, last: Pointer | None, held: lease.Lease
) -> History | JournalWriter:
    """Open the history in the form the run has; a new run has the form that is asked for, and never both."""
    extent = last.history if last else None
    if journal is not None and isinstance(extent, Extent):
        raise CheckpointError(
            f"run {paths.run_id!r} keeps its history in {paths.history.name}; leave the journal out, or move the run "
            f"to one first: migrate_history({paths.run_id!r}, spec=HistoryJournal(...))"
        )
    if journal is not None or isinstance(extent, JournalExtent):
        covered = extent if isinstance(extent, JournalExtent) else None
        writer = JournalWriter(paths.journal, columns, journal, extent=covered, check=held.check)
        paths.history.unlink(missing_ok=True)
        return writer
    history = History(paths.history, columns, extent=extent)
    if paths.journal.is_dir():
        fsio.remove_tree(paths.journal)  # of a start that left nothing committed, or a move that was cut short
    return history


def status_of(last: Pointer | None) -> str:
    """Return fresh | interrupted | finished for what LAST says."""
    if last is None:
        return "fresh"
    return "finished" if last.final else "interrupted"


def remove(paths: RunPaths) -> bool:
    """Remove a run whose lease the caller holds; `runs/best` moves to the best survivor first. False when absent."""
    if not paths.run.is_dir():
        return False
    if best.read_best(paths.root) == paths.run_id:
        best.elect(paths.root, without=paths.run_id)
    return fsio.remove_tree(paths.run)


def _starting_point(paths: RunPaths, overwrite: bool) -> tuple[ResumePoint | None, bool]:
    """Return (verified LAST or None for a new start, whether the old run makes way for it); changes nothing."""
    try:
        last = pointers.read_pointer(paths, LAST)
        if overwrite and last is not None and last.final:
            return None, True
        return _read_last(paths, last), False
    except ResumePointError:
        if not overwrite:
            raise
        return None, True


def _read_last(paths: RunPaths, last: Pointer | None) -> ResumePoint | None:
    if last is not None:
        return read_point(paths, LAST)
    if names := list(pointers.list_pointers(paths)):
        raise ResumePointError(
            f"{paths.pointer(LAST)}: is gone, though {', '.join(names)} name checkpoints; starting over would lose "
            "them. Put LAST back, start a new run from one of them, or overwrite the run explicitly"
        )
    return None


def _config_files(paths: RunPaths, spec_state: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[Path, bytes]:
    """Return the bytes of `run.yaml` and `metadata.yaml`, before anything is changed for them."""
    contents = {paths.config: spec_state, paths.metadata: metadata}
    return {path: durable_yaml(dict(content), source=str(path)) for path, content in contents.items()}


def _create(paths: RunPaths, files: Mapping[Path, bytes]) -> None:
    """Make the directory of a run without commits; every part left by an earlier, failed start is written anew."""
    for directory in (paths.run, paths.checkpoints, paths.generations, paths.manifests):
        fsio.make_dir(directory)
    for path, data in files.items():
        fsio.atomic_write(path, data)


def _sweep(paths: RunPaths) -> None:
    """Remove temporaries that a kill stranded; only the writer of the run gets here."""
    for directory in (paths.run, paths.checkpoints, paths.manifests):
        for entry in directory.iterdir():
            if fsio.is_temporary(entry) and entry.is_file() and not entry.is_symlink():
                entry.unlink()
    for entry in (*paths.root.glob(f"{TRASH}{paths.run_id}-*"), *paths.run.glob(f"{TRASH}{paths.journal.name}-*")):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)


def _uncommitted(census: retain.Census, last: Pointer | None) -> tuple[str, ...]:
    newest = last.generation if last else 0
    later = [str(number) for number in sorted(census.complete) if number > newest]
    return tuple(sorted({*census.leftovers, *census.junk, *later}))


def _last_fencing(paths: RunPaths) -> int:
    """Return the fencing number LAST carries; a damaged LAST is reported later, under the lease."""
    with contextlib.suppress(CheckpointError):
        if last := pointers.read_pointer(paths, LAST):
            return last.fencing
    return 0
