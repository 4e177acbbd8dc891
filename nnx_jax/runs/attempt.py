"""Writes down one attempt at a run: running when it begins, and how it ended; no record hides the error of training."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from nnx_jax.core import fsio
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import ConfigError, NnxError, ResumePointError
from nnx_jax.runs.experiment import (
    Attempt,
    ExperimentManifest,
    ProvenanceRecord,
    compare,
    load_provenance,
    read_provenance,
)
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import ResumePoint
from nnx_jax.runs.store import RunStore

_MESSAGE = 2000
"""Characters of an error's message that are kept."""
_CALLER = 10
"""Calls between a warning at the begin of an attempt and the call of `train` that it is about."""


@contextlib.contextmanager
def recorded(store: RunStore, manifest: ExperimentManifest | None, source: ResumePoint | None) -> Iterator[None]:
    """Record what happens inside as one attempt at the run of `store`.

    A run that has a manifest keeps it, so a later start needs none; without any nothing is written. When an error ends
    the attempt, the commit in flight is waited for first, and trouble with the record is a warning.

    In a group the writer alone keeps the record; where this ends without an error, every process may read it.

    Args:
        manifest: what the run is said to come from.
        source: the checkpoint of another run that this one starts from.

    Raises:
        ConfigError: (a ValueError) an interrupted run is continued with another manifest; nothing is written.
        OSError: the beginning cannot be written.
        DistributedFailure: either, on the processes of a group that do not write the run.
    """
    attempt: Attempt | None = None

    def begin() -> None:
        nonlocal attempt
        attempt = _begun(store, manifest, source)

    store.world.on_writer("the attempt's begin", begin)
    try:
        yield
    except BaseException as error:
        if attempt is None:
            raise
        with contextlib.suppress(NnxError):
            store.committer.drain()
        status = "cancelled" if isinstance(error, KeyboardInterrupt) else "failed"
        _end(store, replace(attempt, status=status, error=_told(error)))
        raise
    if attempt is not None:
        _end(store, replace(attempt, status="completed"))
    store.world.agree("the attempt's end", lambda: None)


def _begun(store: RunStore, manifest: ExperimentManifest | None, source: ResumePoint | None) -> Attempt | None:
    """Write down that the attempt begins; None when there is nothing to keep a record of."""
    manifest, kept = _settled(store, manifest)
    if manifest is None:
        return None
    attempt = Attempt(
        attempt_id=secrets.token_hex(16),
        fingerprint=manifest.fingerprint(),
        run_id=store.paths.run_id,
        status="running",
        started_at=_now(),
        parent=_parent(store.point or source, own=store.paths),
        last_committed=_committed(store),
    )
    if not kept:
        _write_manifest(store.paths, manifest)
    _write(store.paths, attempt)
    return attempt


def _settled(store: RunStore, manifest: ExperimentManifest | None) -> tuple[ExperimentManifest | None, bool]:
    """Return (the manifest of the run, whether its file has it already): never two for one run."""
    paths = store.paths
    if store.point is None:
        for path in (paths.attempt, paths.provenance):  # of a start that left no commit
            path.unlink(missing_ok=True)
        return manifest, False
    try:
        kept = read_provenance(paths)
    except ResumePointError as error:
        then = "this attempt is not recorded" if manifest is None else "both files are written anew"
        warnings.warn(f"{error}; {then}", RuntimeWarning, stacklevel=_CALLER)
        return manifest, False
    if kept is None:
        return manifest, False
    if manifest is None or manifest == kept.manifest:
        return kept.manifest, True
    changes = "; ".join(map(str, compare(kept, manifest).differences[:5]))
    raise ConfigError(
        f"run {paths.run_id!r} was begun as experiment {kept.fingerprint[:16]}, not {manifest.fingerprint()[:16]} "
        f"({changes}); leave provenance out to keep what it has, or give a salt for a run of its own",
        path="provenance",
    )


def _write_manifest(paths: RunPaths, manifest: ExperimentManifest) -> None:
    state = {**manifest.document(), "fingerprint": manifest.fingerprint()}
    data = durable_json(state, source=paths.provenance.name, people=True)
    paths.attempt.unlink(missing_ok=True)  # of a manifest that is gone
    fsio.atomic_write(paths.provenance, data)


def _write(paths: RunPaths, attempt: Attempt) -> None:
    fsio.atomic_write(paths.attempt, durable_json(attempt.state(), source=paths.attempt.name, people=True))


def _end(store: RunStore, attempt: Attempt) -> None:
    """Write how the attempt ended, unless another process has taken the run over."""
    try:
        store.lease.check()
        _write(store.paths, replace(attempt, finished_at=_now(), last_committed=_committed(store)))
    except Exception as error:  # the run, or the error that ends it, counts for more
        warnings.warn(
            f"run {store.paths.run_id}: this attempt is {attempt.status}, but {store.paths.attempt.name} cannot say so "
            f"({type(error).__name__}: {error})",
            RuntimeWarning,
            stacklevel=4,
        )


def _committed(store: RunStore) -> dict[str, Any] | None:
    last = store.committer.last
    return None if last is None else _place("LAST", last)


def _place(tag: str, at: Any) -> dict[str, Any]:
    return {"tag": tag, "epoch": at.epoch, "step": at.step, "generation": at.generation}


def _parent(point: ResumePoint | None, *, own: RunPaths) -> Mapping[str, Any] | None:
    """Say which commit is continued, and by which attempt it was made where that is known."""
    if point is None:
        return None
    try:
        known: ProvenanceRecord | None = load_provenance(point.run_id, own.root)
    except ResumePointError as error:
        if point.run_id != own.run_id:  # of its own trouble the user has heard
            warnings.warn(f"{error}; the attempt before this one is not known", RuntimeWarning, stacklevel=_CALLER)
        known = None
    attempt = known.attempt if known else None
    return {"run_id": point.run_id, "attempt_id": attempt.attempt_id if attempt else None, **_place(point.name, point)}


def _told(error: BaseException) -> dict[str, str]:
    text = str(error)[:_MESSAGE].encode(errors="backslashreplace").decode()
    return {"type": type(error).__name__, "message": text}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
