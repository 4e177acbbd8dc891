"""Checks a stored run from end to end and says every fault in one line each; reads only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import NnxError, ResumePointError, nearest
from nnx_jax.runs import pointers, retain
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.experiment import read_provenance
from nnx_jax.runs.history import Extent, read_history
from nnx_jax.runs.journal_format import JournalExtent
from nnx_jax.runs.journal_read import JournalReader
from nnx_jax.runs.layout import LAST, RunPaths
from nnx_jax.runs.resume import read_generation, read_point


def verify(root: str | Path, run_id: str) -> list[str]:
    """Return every fault of a run, each naming its file; an empty list means all of it is as committed.

    Checked: configuration, metadata and provenance parse; every pointer parses and leads to a generation whose manifest
    and files have their digests; unnamed generations too; the history matches LAST; a finished run's artifact matches.
    Leavings of a killed commit are no fault: no reader takes them for anything.

    Raises:
        ResumePointError: there is no such run.
    """
    paths = RunPaths(root, run_id)
    if not paths.run.is_dir():
        raise ResumePointError(f"there is no run {run_id!r} in {paths.root}{nearest(run_id, run_ids(paths.root))}")
    faults: list[str] = []

    def attempt(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (OSError, NnxError) as error:
            text = str(error)
            if text not in faults:
                faults.append(text)
            return None

    for path in (paths.config, paths.metadata):
        attempt(lambda path=path: codec.parse_yaml(fsio.read_bytes(path), source=str(path)))
    attempt(lambda: read_provenance(paths))
    names = attempt(lambda: pointers.pointer_names(paths)) or []
    found = {name: attempt(lambda name=name: pointers.read_pointer(paths, name)) for name in names}
    last = found.get(LAST)
    if last is None and LAST not in names and found:
        faults.append(f"{paths.pointer(LAST)}: is gone, though {', '.join(found)} name checkpoints")
    checked: set[int] = set()
    for name, pointer in found.items():
        if pointer is not None and pointer.generation not in checked:
            checked.add(pointer.generation)
            attempt(lambda name=name: read_point(paths, name))
    if last is None:
        return faults
    for number in sorted(retain.take_census(paths).complete - checked):
        if number <= last.generation:
            attempt(lambda number=number: read_generation(paths, number))
    attempt(lambda: _check_history(paths, last.history))
    if last.final:
        attempt(lambda: _check_artifact(paths, last.artifact))
    return faults


def _check_history(paths: RunPaths, extent: Extent | JournalExtent) -> None:
    if isinstance(extent, JournalExtent):
        JournalReader(paths.journal, extent).check()
    else:
        read_history(paths.history, extent)


def _check_artifact(paths: RunPaths, expected: str) -> None:
    digest = hashlib.sha256(fsio.read_bytes(paths.artifact)).hexdigest()
    if digest != expected:
        raise ResumePointError(f"{paths.artifact}: is not the file the finished run wrote (SHA-256 differs)")
