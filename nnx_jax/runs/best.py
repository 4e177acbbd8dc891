"""`runs/best`: a link to the run whose committed BEST has the lowest score."""

from __future__ import annotations

import os
from pathlib import Path

from nnx_jax.core import fsio
from nnx_jax.core.errors import NnxError
from nnx_jax.runs.layout import BEST, RunPaths
from nnx_jax.runs.lease import guard
from nnx_jax.runs.pointers import read_pointer

_LINK = "best"


def read_best(root: Path) -> str | None:
    """Return the run id `runs/best` names, or None; a link that leads anywhere else counts as none."""
    link = root / _LINK
    try:
        name = os.readlink(link) if link.is_symlink() else fsio.read_bytes(link, 1024).decode().strip()
        return RunPaths(root, name).run_id
    except (OSError, ValueError, NnxError):
        return None


def propose(paths: RunPaths) -> str | None:
    """Let one run, whose BEST was just committed, challenge the present holder; returns the holder afterwards.

    The holder keeps `runs/best` on a tie. Costs two small reads however many runs there are.
    """
    score = _score(paths.root, paths.run_id)
    with guard(_lock_file(paths.root)):
        holder = read_best(paths.root)
        held = None if holder is None else _score(paths.root, holder)
        if score is None or holder == paths.run_id or (held is not None and held <= score):
            return holder
        if held is None:  # no holder, or it lost its BEST: everybody is asked
            return _elect(paths.root, None)
        _point(paths.root, paths.run_id)
        return paths.run_id


def elect(root: Path, *, without: str | None = None) -> str | None:
    """Point `runs/best` at the run with the lowest BEST score and return its id; None (and no link) without one.

    Only committed BEST pointers with a score count; a tie keeps the present holder, then takes the smallest id.

    Args:
        without: a run about to be removed; it does not take part.
    """
    with guard(_lock_file(root)):
        return _elect(root, without)


def _elect(root: Path, without: str | None) -> str | None:
    holder = read_best(root)
    found = {run_id: _score(root, run_id) for run_id in run_ids(root) if run_id != without}
    scores = {run_id: score for run_id, score in found.items() if score is not None}
    if not scores:
        _remove(root)
        return None
    winner = min(scores, key=lambda run_id: (scores[run_id], run_id != holder, run_id))
    if winner != holder:
        _point(root, winner)
    return winner


def _lock_file(root: Path) -> Path:
    return fsio.make_dir(root / ".leases") / ".best.lock"


def run_ids(root: Path) -> list[str]:
    """Return the ids of all run directories below `root` in name order; links and foreign names are left out."""
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    return [name for name in names if _is_run_id(root, name)]


def _is_run_id(root: Path, name: str) -> bool:
    try:
        return RunPaths(root, name).run_id == name
    except NnxError:
        return False


def _score(root: Path, run_id: str) -> float | None:
    try:
        pointer = read_pointer(RunPaths(root, run_id), BEST)
    except NnxError:
        return None
    return pointer.score if pointer else None


def _point(root: Path, run_id: str) -> None:
    """Set the link; where the file system has no links, a small text file takes its place.

    The guard is held. A reader (or a kill) in between finds no link, never a wrong one; the next election sets it.
    """
    _remove(root)
    try:
        os.symlink(run_id, root / _LINK, target_is_directory=True)
        fsio.sync_dir(root)
    except (PermissionError, NotImplementedError):
        fsio.atomic_write(root / _LINK, run_id.encode() + b"\n")


def _remove(root: Path) -> None:
    link = root / _LINK
    if link.is_symlink() or link.is_file():
        link.unlink()
        fsio.sync_dir(root)
