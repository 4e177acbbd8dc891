"""Small strict files that name a generation: LAST (the commit marker), BEST, the phases, and tags."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from nnx_jax.core import codec, fsio
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import NnxError, ResumePointError, UnsafePathError
from nnx_jax.runs.history import Extent
from nnx_jax.runs.journal_format import JournalExtent, check_extent
from nnx_jax.runs.layout import LAST, RESERVED, RunPaths, check_tag

FORMAT = "nnx_jax.pointer/1"
_VERSIONED = re.compile(r"(.*/)([1-9][0-9]{0,8})")
_LIMITS = codec.Limits(64 * 1024, 100)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """What one pointer file says.

    Attributes:
        generation: number of the checkpoint directory it names; grows with every commit and is never used twice.
        epoch, step, batch: the counters of that moment (0-based epoch, committed updates, microbatches).
        fencing: number of the lease the commit was made under.
        history: how much of `idps.csv`, or of the journal, belongs to the commit.
        manifest: SHA-256 of the generation's manifest file.
        final: the run is finished; only LAST carries it.
        score: what ranks the run in `runs/best`, lower is better; None when it takes no part.
        artifact: SHA-256 of `artifact.json` once the run is finished, else "".
    """

    run_id: str
    generation: int
    epoch: int
    step: int
    batch: int
    fencing: int
    history: Extent | JournalExtent
    manifest: str
    final: bool = False
    score: float | None = None
    artifact: str = ""

    def to_bytes(self) -> bytes:
        return durable_json({"format": FORMAT, **asdict(self)}, source="pointer", limits=_LIMITS)

    def finished(self, artifact: str) -> Pointer:
        """Return the pointer of the same commit that marks the run finished."""
        return replace(self, final=True, artifact=artifact)


def read_pointer(paths: RunPaths, name: str = LAST) -> Pointer | None:
    """Return pointer `name` of a run, or None when there is no such file.

    Raises:
        ResumePointError: the file is there but empty, torn, a link, or of another run; it is never read as "nothing".
    """
    return _read(paths.pointer(name), paths.run_id)


def _read(path: Path, run_id: str) -> Pointer | None:
    try:
        data = fsio.read_bytes(path, _LIMITS.bytes)
    except FileNotFoundError:
        return None
    except (OSError, NnxError) as error:
        raise ResumePointError(f"{path}: cannot be read as a pointer: {error}") from error
    return parse_pointer(data, path, run_id)


@lru_cache(maxsize=64)  # a commit reads every pointer, of which few have changed since the last one
def parse_pointer(data: bytes, path: Path, run_id: str) -> Pointer:
    """Return the pointer in `data`; every deviation from the exact form is a ResumePointError naming `path`."""
    advice = "; restore the file from a copy, or start over with overwrite_existing"
    if not data.strip():
        raise ResumePointError(f"{path}: is empty, so what was committed is unknown{advice}")
    try:
        obj = codec.parse_json(data, source=str(path), limits=_LIMITS)
        check_format(obj, FORMAT, path)
        pointer = _decode(obj)
    except ResumePointError:
        raise
    except (NnxError, ValueError, TypeError, KeyError) as error:
        raise ResumePointError(f"{path}: is damaged ({error}){advice}") from error
    if pointer.to_bytes() != data:
        raise ResumePointError(f"{path}: is damaged (not byte for byte what the store writes){advice}")
    if pointer.run_id != run_id:
        raise ResumePointError(f"{path}: belongs to run {pointer.run_id!r}, not to {run_id!r}; it is a foreign file")
    return pointer


def write_pointer(paths: RunPaths, name: str, pointer: Pointer) -> None:
    """Replace pointer `name` atomically and sync it. For LAST this is the commit."""
    fsio.atomic_write(paths.pointer(name), pointer.to_bytes())


def remove_pointer(paths: RunPaths, name: str) -> None:
    """Remove tag `name`, which may be gone already; the names the store writes itself stay."""
    if name in RESERVED:
        raise UnsafePathError(f"checkpoint tag {name!r} is written by the store itself; only your own tags are removed")
    paths.pointer(name).unlink(missing_ok=True)
    fsio.sync_dir(paths.checkpoints)


def check_format(obj: Any, known: str, path: Path) -> None:
    """Raise when a parsed file says that it is of a later version of the format `known`.

    Raises:
        ResumePointError: naming both versions; such a file is whole, only not for this version of nnx_jax.
    """
    found = _VERSIONED.fullmatch(str(obj.get("format"))) if isinstance(obj, dict) else None
    ours = _VERSIONED.fullmatch(known)
    if found and ours and found[1] == ours[1] and int(found[2]) > int(ours[2]):
        raise ResumePointError(
            f"{path}: is of schema {found[0]!r}, newer than {known!r}, the newest this nnx_jax reads; upgrade nnx_jax"
        )


def list_pointers(paths: RunPaths) -> dict[str, Pointer]:
    """Return every pointer of the run by name, LAST first; raises ResumePointError for a damaged one."""
    directory = paths.checkpoints
    found = {name: _read(directory / check_tag(name), paths.run_id) for name in _names_in(directory)}
    return {name: pointer for name, pointer in found.items() if pointer is not None}


def pointer_names(paths: RunPaths) -> list[str]:
    """Return the names of the pointer files, LAST first; links are listed too, and refused when they are read."""
    return _names_in(paths.checkpoints)


def _names_in(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_symlink() or not entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted((name for name in names if not name.startswith(".")), key=lambda name: (name != LAST, name))


def phase_names(epoch: int, n_epochs: int) -> tuple[str, ...]:
    """Return the phase pointer that epoch `epoch` (0-based) of `n_epochs` earns: at most one name.

    FIRST is epoch 0; Q1, Q2, Q3 end the first, second and third quarter: floor(k * n / 4) - 1. The first name wins
    when a short run makes them collide (NNx rule, reference/nnx.md 4.7).
    """
    ends = {"FIRST": 0, "Q1": n_epochs // 4 - 1, "Q2": n_epochs // 2 - 1, "Q3": 3 * n_epochs // 4 - 1}
    return next(((name,) for name, end in ends.items() if epoch == end and end >= 0), ())


def _decode(obj: Any) -> Pointer:
    if not isinstance(obj, dict) or obj.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT!r}")
    fields = {key: value for key, value in obj.items() if key != "format"}
    fields["history"] = _decode_extent(fields["history"])
    pointer = Pointer(**fields)
    numbers = (pointer.generation, pointer.epoch, pointer.step, pointer.batch, pointer.fencing)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a counter is not a whole number >= 0")
    if not all(isinstance(text, str) for text in (pointer.run_id, pointer.manifest)):
        raise ValueError("a name is not text")
    if not _DIGEST.fullmatch(pointer.manifest):
        raise ValueError("a digest is not 64 hex digits")
    if type(pointer.final) is not bool or not isinstance(pointer.artifact, str):
        raise ValueError("the end mark is damaged")
    if pointer.score is not None and type(pointer.score) not in (int, float):
        raise ValueError("the score is not a number")
    return pointer


def _decode_extent(obj: dict[str, Any]) -> Extent | JournalExtent:
    if "chunks" in obj:
        journal = JournalExtent(**obj)
        check_extent(journal)
        return journal
    extent = Extent(**obj)
    if any(type(number) is not int or number < 0 for number in (extent.bytes, extent.rows)):
        raise ValueError("a counter is not a whole number >= 0")
    if not isinstance(extent.sha256, str) or not _DIGEST.fullmatch(extent.sha256):
        raise ValueError("a digest is not 64 hex digits")
    return extent
