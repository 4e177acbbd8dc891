"""The commit: history, arrays, sync, manifest, lease, LAST, and only then everything that may follow.

The order never changes, and the replacement of LAST is the only moment at which anything becomes true:

1. arrays copied; training goes on, and all that follows happens in a waiter thread of our own;
2. history rows appended and synced, then the arrays written through Orbax;
3. the new directory synced bottom-up (Orbax does not), its files digested, renamed into place, its manifest synced;
4. the lease and its fencing number checked again, then LAST replaced and synced;
5. phase pointers and BEST; 6. deferred tags, then retired ones; 7. retention.

A failure before LAST moved cuts the history back to what the standing LAST covers. A failure after it keeps the pair.

In a group of processes this is the writer's half, and `replica` the others': all agree after 1, after 2 and after 4, so
that what fails on one process fails the commit on each; see `spmd.world`. Steps 3 to 7 are the writer's alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nnx_jax.core import fsio
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import CheckpointError, CommitError, DistributedFailure, NnxError
from nnx_jax.runs import best, pointers, retain
from nnx_jax.runs.arrays import ArrayWriter, SaveHandle
from nnx_jax.runs.history import HistoryWriter
from nnx_jax.runs.layout import BEST, HOST, HOST_LIMITS, LAST, PARTIAL, RESERVED, RunPaths, check_tag
from nnx_jax.runs.lease import Lease
from nnx_jax.runs.leaves import describe
from nnx_jax.runs.manifest import Manifest
from nnx_jax.runs.pointers import Pointer
from nnx_jax.runs.tensors import TensorHandle, TensorWriter
from nnx_jax.spmd.world import ALONE, World

Handle = SaveHandle | TensorHandle
MakeWriter = Callable[[int, World], ArrayWriter | TensorWriter]
"""(seconds of one background save, the processes that commit together) -> what stores arrays."""

_SPARE_BYTES = 1024**2


@dataclass(frozen=True, kw_only=True)
class CommitPoint:
    """One moment of a run, ready to be stored.

    Attributes:
        epoch, step, batch: 0-based epoch, committed updates so far, microbatches so far.
        arrays: name -> array (jax, numpy); copied before `Committer.commit` returns, so they may be donated after.
        host: plain JSON values (positions, clocks, monitors, component state, descriptions); finite numbers only.
        names: phase pointers this moment earns (see `pointers.phase_names`).
        best: this moment is a strict improvement, so BEST moves here.
        score: rank of BEST among the runs of the directory, lower is better; None takes no part in `runs/best`.
        deferred: tags of callback checkpoints, written last.
        retired: tags that give up their checkpoint once those of this moment are written.
    """

    epoch: int
    step: int
    batch: int
    arrays: Mapping[str, Any]
    host: Mapping[str, Any]
    names: tuple[str, ...] = ()
    best: bool = False
    score: float | None = None
    deferred: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()


def beginning(point: CommitPoint) -> str:
    """Return what processes call the begin of a commit, before it has a number."""
    return f"commit of epoch {point.epoch}, step {point.step}"


def stage(point: CommitPoint, generation: int) -> str:
    """Return what processes call a commit."""
    return f"commit of generation {generation} (epoch {point.epoch})"


@dataclass(frozen=True)
class _Begun:
    point: CommitPoint
    generation: int
    partial: Path
    rows: int
    host: bytes

    @property
    def stage(self) -> str:
        return stage(self.point, self.generation)

    def told(self) -> dict[str, Any]:
        """What the other processes have to know for their part."""
        return {"generation": self.generation, "partial": self.partial.name}


@dataclass(frozen=True)
class _Pending(_Begun):
    handle: Handle


class InFlight:
    """At most one commit in the background, and what went wrong in it."""

    _thread: threading.Thread | None = None
    _failure: NnxError | None = None

    def drain(self) -> None:
        """Wait for the commit in flight, and raise what went wrong in the background since the last call."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class Committer(InFlight):
    """Commits the moments of one run, one at a time, in the background.

    Args:
        paths, lease, history: of the run; the lease is held and the history open.
        last: the standing LAST, None before the first commit.
        keep: how many of the newest generations stay besides the named ones (>= 1), None for all.
        on_committed: called in the waiter thread with the pointer once LAST is durable; nothing earlier is a success.
        timeout_seconds: bound of one background save.
        world: the processes that commit together, in a conversation of this committer's own; this one is the writer.
        make_writer: how arrays are stored.
    """

    def __init__(
        self,
        paths: RunPaths,
        lease: Lease,
        history: HistoryWriter,
        *,
        last: Pointer | None = None,
        keep: int | None = 1,
        on_committed: Callable[[Pointer], None] | None = None,
        timeout_seconds: int = 600,
        world: World = ALONE,
        make_writer: MakeWriter = ArrayWriter,
    ) -> None:
        self._paths, self._lease, self._history, self._world = paths, lease, history, world
        self._keep, self._on_committed = retain.check_keep(keep), on_committed
        self._last = last
        self._next = max(retain.take_census(paths).highest, last.generation if last else 0) + 1
        self._writer = make_writer(timeout_seconds, world)
        self._thread: threading.Thread | None = None
        self._loading: threading.Thread | None = None
        self._failure: NnxError | None = None
        self._identity = _identity(paths.run)

    @property
    def last(self) -> Pointer | None:
        """The LAST that stands on disk; its `history.rows` is where records in memory are cut after a failure."""
        return self._last

    def prepare(self) -> None:
        """Load in the background what the first commit needs, so that it holds the training no longer than later ones.

        A failure here is met again, and raised, by that commit.
        """
        self._loading = threading.Thread(target=_quietly, args=(self._writer.prepare,), name="commit-prepare")
        self._loading.start()

    def commit(self, point: CommitPoint) -> None:
        """Start the commit of `point`; returns once its arrays are copied. Waits for the commit before it first.

        Raises:
            CommitError: (an OSError) this or the previous commit failed before LAST moved; the standing LAST and its
                history are intact, and the rows cut off wait in the history's buffer for the next commit.
            LeaseLostError: another process took the run over.
            CheckpointError: the previous commit is safe, but a pointer or the retention after it failed.
            ConfigError: `point.host` is not plain, or larger than what is read back; nothing was written.
            DistributedFailure: another process of the group could not do its part; nothing was committed.
        """
        self.drain()
        begun: list[_Begun] = []
        try:
            self._world.agree_telling(
                beginning(point), lambda: begun.append(self._begin(point)), lambda: begun[0].told()
            )
            handle = self._world.agree(begun[0].stage, lambda: self._writer.save(begun[0].partial, point.arrays))
        except BaseException as error:
            if not begun:
                raise
            self._give_up(error, begun[0].partial, begun[0].generation)
        self._follow(_Pending(**vars(begun[0]), handle=handle))

    def _begin(self, point: CommitPoint) -> _Begun:
        """Check everything and make the directory; after an error nothing is left of it."""
        if self._last is not None and self._last.final:
            raise CheckpointError(f"run {self._paths.run_id!r} is finished; start a new run from it, or overwrite it")
        for name in (*point.names, *point.deferred, *point.retired):
            check_tag(name)
        if reserved := [name for name in (*point.deferred, *point.retired) if name in RESERVED]:
            raise CheckpointError(f"checkpoint tag {reserved[0]!r} is written by the store itself; choose another name")
        host = durable_json(dict(point.host), source=HOST, limits=HOST_LIMITS)
        needed = sum(leaf.nbytes for leaf in describe(point.arrays).values()) + len(host)
        generation, self._next = self._next, self._next + 1
        partial = self._paths.generations / f"{PARTIAL}{generation}-{self._lease.fencing}"
        try:
            self._check_ownership()
            self._check_space(needed)
            rows = self._history.mark()
            os.mkdir(partial, fsio.DIR_MODE)
        except BaseException as error:
            self._give_up(error, partial, generation)
        return _Begun(point, generation, partial, rows, host)

    def _give_up(self, error: BaseException, partial: Path, generation: int) -> NoReturn:
        """Undo what was begun and raise the error, explained."""
        with contextlib.suppress(Exception):
            self._writer.close()  # a save that was started must not fail the next one
        self._undo(partial, error)
        if not isinstance(error, Exception):
            raise error  # Ctrl-C stays Ctrl-C
        raise self._explain(error, generation) from error

    def _follow(self, pending: _Pending) -> None:
        self._thread = threading.Thread(target=self._finish, args=(pending,), name=f"commit-{pending.generation}")
        self._thread.start()

    def drain(self) -> None:
        """Wait for the commit in flight, and raise what went wrong in the background since the last call."""
        if self._loading is not None:
            self._loading.join()
            self._loading = None
        super().drain()

    def finish(self, artifact: Mapping[str, Any]) -> Pointer:
        """Mark the run finished: write `artifact.json`, then LAST once more with `final` set. Needs a commit."""
        self.drain()
        return self._world.agree_telling("the run's end", lambda: self._mark_finished(artifact), self._tell_last)[0]

    def _mark_finished(self, artifact: Mapping[str, Any]) -> Pointer:
        if self._last is None:
            raise CheckpointError(f"{self._paths.run}: nothing was committed, so the run cannot be marked finished")
        data = durable_json(dict(artifact), source=str(self._paths.artifact), people=True)
        try:
            self._check_ownership()
            fsio.atomic_write(self._paths.artifact, data)
            pointer = self._last.finished(hashlib.sha256(data).hexdigest())
            self._check_ownership()
            self._replace_last(pointer)
        except OSError as error:
            raise CommitError(f"{self._paths.pointer(LAST)}: the run cannot be marked finished: {error}") from error
        return pointer

    def close(self) -> None:
        """Wait for the commit in flight and free the writer's threads; raises like `drain`."""
        try:
            self.drain()
        finally:
            self._writer.close()

    def _finish(self, pending: _Pending) -> None:
        """Steps 2 to 7, in the waiter thread."""
        number = pending.generation
        try:
            self._publish(pending)
        except BaseException as error:
            self._failure = self._explain(error, number)
            if isinstance(error, DistributedFailure) and self._committed(number):
                # Another process is lost after LAST moved; what this one does by itself can still be done.
                _quietly(lambda: self._follow_up(pending.point))
                self._failure.add_note(f"generation {number} is committed: LAST names it")
            else:
                self._undo(pending.partial, error)
            return
        try:
            self._world.agree(f"{pending.stage}: what follows it", lambda: self._follow_up(pending.point))
        except DistributedFailure as error:
            self._failure = error
        except BaseException as error:
            self._failure = CheckpointError(
                f"generation {number} of run {self._paths.run_id!r} is committed (LAST names it), but what "
                f"follows failed: {type(error).__name__}: {error}"
            )
            self._failure.__cause__ = error

    def _publish(self, pending: _Pending) -> None:
        """Steps 2 to 4: write the history and the generation, make them durable, then LAST; agreed by all."""
        agree = self._world.agree_telling
        _, digests = agree(pending.stage, lambda: self._write(pending), pending.handle.digests)
        agree(pending.stage, lambda: self._complete(pending, digests), self._tell_last)

    def _write(self, pending: _Pending) -> None:
        """Step 2, as far as it is this process's."""
        self._extent = self._history.flush(pending.rows)
        pending.handle.wait()

    def _complete(self, pending: _Pending, digests: list[dict[str, Any]]) -> None:
        """Steps 3 and 4, once every process has written its files and told their digests."""
        point, number = pending.point, pending.generation
        pending.handle.merge()
        fsio.create_file(pending.partial / HOST, pending.host)
        fsio.sync_tree(pending.partial)
        files = _all_digests(pending.partial, digests)
        manifest = Manifest(self._paths.run_id, number, point.epoch, point.step, point.batch, files).to_bytes()
        self._check_ownership()
        fsio.replace_dir(pending.partial, self._paths.generation(number))
        fsio.atomic_write(self._paths.manifest(number), manifest)
        pointer = Pointer(
            run_id=self._paths.run_id,
            generation=number,
            epoch=point.epoch,
            step=point.step,
            batch=point.batch,
            fencing=self._lease.fencing,
            history=self._extent,
            manifest=hashlib.sha256(manifest).hexdigest(),
            score=point.score,
        )
        self._check_ownership()
        self._replace_last(pointer)

    def _tell_last(self) -> str | None:
        return self._last.to_bytes().decode() if self._last is not None else None

    def _replace_last(self, pointer: Pointer) -> None:
        """Write LAST; from the moment it names the new commit, the history it covers stands with it."""
        try:
            pointers.write_pointer(self._paths, LAST, pointer)
        except fsio.NotDurableError:  # replaced, only not synced
            self._accept(pointer)
            raise
        self._accept(pointer)

    def _accept(self, pointer: Pointer) -> None:
        self._last = pointer
        self._history.settle()

    def _committed(self, generation: int) -> bool:
        return self._last is not None and self._last.generation == generation

    def _follow_up(self, point: CommitPoint) -> None:
        """Tell the caller, then steps 5 to 7; each is tried, the first failure is raised with the others as notes."""
        pointer = self._last
        assert pointer is not None
        steps: list[Callable[[], object]] = []
        if self._on_committed is not None:
            report = self._on_committed
            steps.append(lambda: report(pointer))
        for name in point.names:
            steps.append(lambda name=name: pointers.write_pointer(self._paths, name, pointer))
        if point.best:
            steps.append(lambda: pointers.write_pointer(self._paths, BEST, pointer))
            steps.append(lambda: best.propose(self._paths))
        for name in point.deferred:
            steps.append(lambda name=name: pointers.write_pointer(self._paths, name, pointer))
        for name in point.retired:
            if name not in point.deferred:
                steps.append(lambda name=name: pointers.remove_pointer(self._paths, name))
        steps.append(lambda: retain.prune(self._paths, self._keep))
        first: BaseException | None = None
        for step in steps:
            try:
                step()
            except BaseException as error:
                if first is None:
                    first = error
                else:
                    first.add_note(f"then also: {error}")
        if first is not None:
            raise first

    def _check_ownership(self) -> None:
        """Raise unless the lease is held and the run's directory is still the one that was opened."""
        self._lease.check()
        try:
            found = _identity(self._paths.run)
        except OSError as error:
            raise CommitError(f"{self._paths.run}: the run's directory is gone: {error}") from error
        if found != self._identity:
            raise CommitError(f"{self._paths.run}: the run's directory was replaced by another one; nothing is written")

    def _check_space(self, needed: int) -> None:
        free = fsio.disk_free(self._paths.generations)
        if free < needed + _SPARE_BYTES:
            raise CommitError(
                f"{self._paths.generations}: no space left for a checkpoint of {needed} bytes, {free} bytes are free; "
                "free some space or lower checkpoint.keep"
            )

    def _undo(self, partial: Path, error: BaseException) -> None:
        """Put history and directory back to the standing LAST; trouble here is noted on the first error.

        A writer that lost its lease touches no file any more: they are its successor's. The emptied partial directory
        stays until the next successful commit, so that its number is not used again.
        """
        self._writer.settle()
        try:
            self._check_ownership()
        except (OSError, NnxError):
            self._history.rollback(on_disk=False)
            return
        try:
            self._history.rollback()
        except (OSError, NnxError) as trouble:
            error.add_note(f"history not cut back ({trouble}); readers still stop at LAST")
        with contextlib.suppress(OSError, NnxError):
            if fsio.remove_tree(partial):
                os.mkdir(partial, fsio.DIR_MODE)

    def _explain(self, error: BaseException, generation: int) -> NnxError:
        if isinstance(error, NnxError):
            failure = error
        else:
            stands = f"LAST stays at generation {self._last.generation}" if self._last else "there is no LAST yet"
            failure = CommitError(
                f"commit {generation} of run {self._paths.run_id!r} failed, {stands}: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
        return failure


def _all_digests(directory: Path, told: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Return (SHA-256, size) of every file; what a process told of its own files is not read again.

    Raises:
        CommitError: a file is not here as the process that wrote it has seen it.
    """
    theirs = {name: (digest, size) for each in told for name, (digest, size) in each.items()}
    if not theirs:
        return fsio.digest_tree(directory)
    sizes = fsio.list_tree(directory)
    for name, (_, size) in theirs.items():
        if sizes.get(name) != size:
            raise CommitError(
                f"{directory / name}: the process that wrote it has {size} bytes, the writer sees "
                f"{sizes.get(name, 'no file')}; every process must see one and the same runs_dir"
            )
    return {name: theirs.get(name) or fsio.digest_file(directory / name) for name in sizes}


def _quietly(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        work()


def _identity(directory: Path) -> tuple[int, int]:
    info = os.stat(directory, follow_symlinks=False)
    return info.st_dev, info.st_ino
