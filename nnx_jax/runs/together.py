"""What the processes of a group find in a runs directory: one of them looks and checks, all go on with its answer."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nnx_jax.core import fsio
from nnx_jax.core.errors import (
    HistoryCorruptionError,
    MissingCheckpointError,
    NnxError,
    ProcessGroupError,
    ResumePointError,
    UnsafePathError,
)
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import ResumePoint, trusted
from nnx_jax.spmd.world import World

T = TypeVar("T")

_ALIKE = {
    kind.__name__: kind for kind in (MissingCheckpointError, ResumePointError, HistoryCorruptionError, UnsafePathError)
}
"""What is wrong with stored files is wrong for every process."""
_LOOK_SECONDS = 10.0
"""How long a new file may take to be seen over a network file system, which caches that there was none."""


def alike(world: World, stage: str, work: Callable[[], Any]) -> Any:
    """Do `work` on the writer and return its JSON value everywhere; a refusal of stored files is raised by all alike.

    Raises:
        ResumePointError, HistoryCorruptionError, UnsafePathError: the same, in the same words, on every process.
        DistributedFailure: the writer failed otherwise; it raises its own error.
    """
    if world.alone:
        return work()
    refused: list[NnxError] = []

    def attempt() -> dict[str, Any]:
        try:
            return {"value": work()}
        except tuple(_ALIKE.values()) as error:
            refused.append(error)
            return {"refused": type(error).__name__, "message": error.args[0]}

    told = world.on_writer(stage, attempt)
    if "refused" in told:
        raise refused[0] if refused else _ALIKE[told["refused"]](told["message"])
    return told["value"]


def share_point(world: World, root: str | Path, find: Callable[[], ResumePoint | None]) -> ResumePoint | None:
    """Return the moment that `find` gives on the writer, which alone verifies it; the others hash nothing.

    Args:
        root: the runs directory it is in.
        find: such as `lambda: find_point(root, "RUN@BEST")`.

    Raises:
        ResumePointError, UnsafePathError: (ValueErrors) as `find` raises them, the same on every process.
    """
    found: list[ResumePoint | None] = []
    told = alike(world, "the checkpoint to start from", lambda: _told(found, find()))
    if found:
        return found[0]
    return None if told is None else trusted(root, told)


def check_same_files(world: World, paths: RunPaths) -> None:
    """Check that every process sees the runs directory the writer sees; a file is written there, and removed.

    Raises:
        ProcessGroupError: this process does not see it; the others raise DistributedFailure with the same words.
    """
    if world.alone:
        return
    written: list[Path] = []
    try:
        told = world.on_writer("runs_dir", lambda: _write_token(written, paths))
        world.agree("runs_dir", lambda: _look(world, paths, told))
    finally:
        for path in written:
            path.unlink(missing_ok=True)


def _told(found: list[ResumePoint | None], point: ResumePoint | None) -> dict[str, Any] | None:
    found.append(point)
    return None if point is None else point.told()


def _write_token(written: list[Path], paths: RunPaths) -> dict[str, str]:
    token = secrets.token_hex(16)
    path = fsio.make_dir(paths.leases) / f"{paths.run_id}.{token[:12]}.seen"
    written.append(path)
    fsio.create_file(path, token.encode())
    return {"name": path.name, "token": token, "host": socket.gethostname(), "root": str(paths.root)}


def _look(world: World, paths: RunPaths, told: dict[str, str]) -> None:
    path = paths.leases / told["name"]
    end = time.monotonic() + min(_LOOK_SECONDS, world.timeout_seconds / 3)
    while not _holds(path, told["token"]):
        if time.monotonic() > end:
            raise ProcessGroupError(
                f"rank {world.rank} on host {socket.gethostname()!r} does not see in {paths.root} what rank "
                f"{world.writer_rank} on host {told['host']!r} wrote in {told['root']}; runs_dir must be one directory "
                "that all processes share, on a network file system if they run on several machines"
            )
        time.sleep(0.05)


def _holds(path: Path, token: str) -> bool:
    try:
        return fsio.read_bytes(path, 64).decode() == token
    except (OSError, NnxError, UnicodeDecodeError):
        return False
