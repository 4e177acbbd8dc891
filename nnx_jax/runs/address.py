"""From a path that a user gives to a run and one of its checkpoints: `<run>`, `<run>/<name>`, or a pointer file."""

from __future__ import annotations

from pathlib import Path

from nnx_jax.core.errors import MissingCheckpointError, nearest
from nnx_jax.runs import pointers
from nnx_jax.runs.layout import LAST, RunPaths, absolute_root
from nnx_jax.runs.resume import ResumePoint, read_point

_INSIDE = "checkpoints"


def read_address(address: str | Path) -> tuple[RunPaths, str]:
    """Return the run and the name of the checkpoint that a path means.

    `runs/my-run` is its LAST; `runs/my-run/step_500` is the tag (or step, in digits) of this name, although no such
    file lies there; `runs/my-run/checkpoints/step_500` is the pointer's own file. Reads names only.

    Raises:
        MissingCheckpointError: (a FileNotFoundError and a ValueError) no run lies there, or it has no such checkpoint.
        UnsafePathError: (a ValueError) a part of the path cannot be a run id or a tag.
    """
    path = absolute_root(address)
    if _is_run(path):
        return RunPaths(path.parent, path.name), LAST
    inside = path.parent.name == _INSIDE and not _is_run(path.parent)  # a run may itself be called "checkpoints"
    run = path.parent.parent if inside else path.parent
    if not _is_run(run):
        raise MissingCheckpointError(
            f"{path}: there is no run here and none in {path.parent}; give a run's directory, or that and the name "
            "of one of its checkpoints (runs/my-run/step_500)"
        )
    paths = RunPaths(run.parent, run.name)
    if not path.name.isdigit() and not paths.pointer(path.name).exists():
        known = nearest(path.name, pointers.pointer_names(paths))
        raise MissingCheckpointError(f"{path}: run {run.name!r} in {run.parent} has no checkpoint {path.name!r}{known}")
    return paths, path.name


def _is_run(path: Path) -> bool:
    """Whether a directory is a run's own."""
    return (path / _INSIDE).is_dir() and (path / "run.yaml").exists()


def load_address(address: str | Path) -> ResumePoint:
    """Return the verified moment that a path means; raises like `read_address` and `read_point`."""
    return read_point(*read_address(address))
