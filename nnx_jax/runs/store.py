"""One open run: takes the lease, makes or re-opens the directory, and hands out history and committer."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnx_jax.core import fsio
from nnx_jax.core.durable import durable_yaml
from nnx_jax.core.errors import CheckpointError, NnxError, ResumePointError
from nnx_jax.runs import best, lease, pointers, provenance, retain
from nnx_jax.runs.commit import Committer
from nnx_jax.runs.history import History
from nnx_jax.runs.layout import LAST, TRASH, RunPaths
from nnx_jax.runs.pointers import Pointer
from nnx_jax.runs.provenance import ResumeStatus
from nnx_jax.runs.resume import ResumePoint, read_point

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}")


class RunStore:
    """A run open for writing; use `RunStore.open`, and close it (or use it as a context manager).

    Attributes:
        status: "fresh" (nothing committed), "interrupted" (continue from `point`) or "finished".
        point: the verified LAST, None when fresh.
        history: where rows go; its file is already cut to what LAST covers.
        committer: makes the commits.
        ignored: names in `generations/` that no commit stands behind, for a message to the user.
    """

    def __init__(
        self,
        paths: RunPaths,
        held: lease.Lease,
        history: History,
        committer: Committer,
        point: ResumePoint | None,
        ignored: tuple[str, ...],
    ) -> None:
        self.paths, self.lease, self.history, self.committer = paths, held, history, committer
        self.point, self.ignored = point, ignored
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
        resume: ResumeStatus | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait_seconds: float = 0.0,
        on_committed: Callable[[Pointer], None] | None = None,
        timeout_seconds: int = 600,
    ) -> RunStore:
        """Open run `run_id` below `root` for writing.

        Args:
            spec_state: the configuration, written to `run.yaml` when the run is new.
            columns: names of the history's columns, fixed from the first start on.
            overwrite: replace the run when it is finished, or when its LAST, or what LAST names, is damaged or gone
                (once its lease is held and `runs/best` has moved on). An interrupted run is continued all the same.
            keep: newest generations kept besides the named ones (>= 1); None keeps all.
            resume: what a new run starts from, for `metadata.yaml`.
            metadata: more environment facts for `metadata.yaml`; never environment variables.
            wait_seconds: how long to wait for another writer of this run.
            on_committed: see `Committer`.

        Raises:
            LeaseHeldError: another process writes this run.
            ResumePointError: LAST or what it names is damaged; nothing was changed.
            HistoryCorruptionError: the committed history is damaged; nothing was changed.
            CheckpointError: `columns` differ from the first start's.
            ConfigError: `spec_state` or the metadata is larger than what is read back; nothing was changed.
        """
        retain.check_keep(keep)
        paths = RunPaths(root, run_id)
        fsio.make_dir(paths.root)
        held = lease.acquire(paths, wait_seconds=wait_seconds, floor=_last_fencing(paths))
        try:
            point, replaced = _starting_point(paths, overwrite)
            if point is None:
                files = _config_files(paths, spec_state, provenance.collect(resume, metadata))
                if replaced:
                    remove(paths)
                _create(paths, files)
            last = point.pointer if point else None
            history = History(paths.history, columns, extent=last.history if last else None)
            _sweep(paths)
            census = retain.take_census(paths)
            committer = Committer(
                paths, held, history, last=last, keep=keep, on_committed=on_committed, timeout_seconds=timeout_seconds
            )
            return cls(paths, held, history, committer, point, _uncommitted(census, last))
        except BaseException:
            held.release()
            raise

    def finish(self, artifact: Mapping[str, Any]) -> Pointer:
        """Wait for the last commit, then mark the run finished; `artifact` (plain values) becomes `artifact.json`."""
        pointer = self.committer.finish(artifact)
        self.status = "finished"
        return pointer

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
            if _TEMPORARY.fullmatch(entry.name) and entry.is_file() and not entry.is_symlink():
                entry.unlink()
    for entry in paths.root.glob(f"{TRASH}{paths.run_id}-*"):
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
