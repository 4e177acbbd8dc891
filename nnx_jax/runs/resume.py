"""Reading a stored moment back: strict pointer, manifest digest, every file verified, and only then the arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_jax.core import codec
from nnx_jax.core.errors import NnxError, ResumePointError, nearest
from nnx_jax.runs import arrays, pointers, retain
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.layout import HOST, HOST_LIMITS, LAST, RunPaths
from nnx_jax.runs.leaves import Leaf, read_index
from nnx_jax.runs.manifest import Manifest, read_manifest, verify_files
from nnx_jax.runs.pointers import Pointer

_ABSENT = object()


@dataclass(frozen=True)
class ResumePoint:
    """A verified moment of a run: every file of it was compared with its digest.

    Attributes:
        name: how it was asked for: LAST, BEST, a phase, a tag, or a step number.
        generation, epoch, step, batch: of the commit.
        manifest_sha256: identity of the checkpoint's content.
        host: the JSON values committed with it.
        leaves: name -> shape and dtype of every stored array.
        pointer: the pointer that led here; None when a bare step number did.
    """

    paths: RunPaths
    name: str
    manifest: Manifest
    manifest_sha256: str
    host: dict[str, Any]
    leaves: dict[str, Leaf]
    pointer: Pointer | None

    @property
    def run_id(self) -> str:
        return self.paths.run_id

    @property
    def generation(self) -> int:
        return self.manifest.generation

    @property
    def epoch(self) -> int:
        return self.manifest.epoch

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def batch(self) -> int:
        return self.manifest.batch

    @property
    def directory(self) -> Path:
        return self.paths.generation(self.generation)

    def told(self) -> dict[str, Any]:
        """Return what another process needs to know of this moment, as JSON values; see `trusted`."""
        pointer = None if self.pointer is None else self.pointer.to_bytes().decode()
        return {
            "run_id": self.run_id,
            "name": self.name,
            "generation": self.generation,
            "manifest": self.manifest_sha256,
            "pointer": pointer,
        }

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays; see `arrays.restore`. Shapes and dtypes are compared before anything is allocated."""
        return arrays.restore(self.directory, wanted)

    def load_all(self) -> dict[str, Any]:
        """Return every stored array as numpy, in its stored shape and dtype."""
        return self.load({name: (leaf.shape, leaf.dtype) for name, leaf in self.leaves.items()})


def probe(root: str | Path, run_id: str) -> Pointer | None:
    """Return LAST of a run, or None when nothing is committed; creates nothing."""
    return pointers.read_pointer(RunPaths(root, run_id), LAST)


def read_point(paths: RunPaths, name: str = LAST) -> ResumePoint:
    """Return the verified moment `name` of a run: a pointer name, or a step number in digits.

    Raises:
        ResumePointError: there is no such checkpoint, or any byte of it is not what was committed. Nothing is changed
            and no other checkpoint is taken in its place.
    """
    if name.isdigit():
        return _verified(paths, name, _generation_of_step(paths, int(name)), None)
    pointer = pointers.read_pointer(paths, name)
    if pointer is None:
        raise ResumePointError(f"run {paths.run_id!r} in {paths.root} has no checkpoint {name!r}{_others(paths, name)}")
    point = _verified(paths, name, pointer.generation, pointer)
    for field in ("epoch", "step", "batch"):
        if getattr(pointer, field) != getattr(point.manifest, field):
            raise ResumePointError(f"{paths.pointer(name)}: {field} differs from the manifest's; the files are mixed")
    return point


def read_generation(paths: RunPaths, number: int) -> ResumePoint:
    """Return one kept generation, verified against its own manifest alone (no pointer vouches for it)."""
    return _verified(paths, f"generation {number}", number, None)


def trusted(root: str | Path, told: Mapping[str, Any]) -> ResumePoint:
    """Return the moment that another process has verified and told of; no digest is computed again.

    Args:
        root: where this process sees the same runs directory.
        told: what `ResumePoint.told` gave there.

    Raises:
        ResumePointError: a file cannot be read here.
    """
    paths = RunPaths(root, told["run_id"])
    name, text = told["name"], told["pointer"]
    directory = paths.generation(told["generation"])
    return ResumePoint(
        paths=paths,
        name=name,
        manifest=read_manifest(paths.manifest(told["generation"])),
        manifest_sha256=told["manifest"],
        host=_read_host(directory / HOST),
        leaves=read_index(directory),
        pointer=None if text is None else pointers.parse_pointer(text.encode(), paths.pointer(name), paths.run_id),
    )


def find_point(root: str | Path, source: str) -> ResumePoint:
    """Return the verified moment that `RUN[@LAST|BEST|tag|step]` names; for starting a new run from an old one."""
    run_id, _, name = source.partition("@")
    paths = RunPaths(root, run_id)
    if not paths.run.is_dir():
        raise ResumePointError(f"there is no run {run_id!r} in {paths.root}{nearest(run_id, run_ids(paths.root))}")
    return read_point(paths, name or LAST)


def require_same(stored: Any, wanted: Any, what: str) -> None:
    """Raise ResumePointError naming the first path at which two plain descriptions differ, and both sides."""
    difference = _first_difference(stored, wanted, what)
    if difference is not None:
        path, old, new = difference
        raise ResumePointError(
            f"{path}: the checkpoint has {_show(old)}, this run has {_show(new)}; nothing was restored. Use the same "
            "configuration, or load the weights only"
        )


def _verified(paths: RunPaths, name: str, generation: int, pointer: Pointer | None) -> ResumePoint:
    path = paths.manifest(generation)
    manifest = read_manifest(path, sha256=pointer.manifest if pointer else None)
    if manifest.run_id != paths.run_id:
        raise ResumePointError(f"{path}: is the manifest of run {manifest.run_id!r}; the checkpoint is torn")
    if manifest.generation != generation:
        raise ResumePointError(f"{path}: is the manifest of generation {manifest.generation}; the files are mixed")
    directory = paths.generation(generation)
    if faults := verify_files(directory, manifest):
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ResumePointError(f"checkpoint {name} of run {paths.run_id!r}: {faults[0]}{more}{_others(paths, name)}")
    return ResumePoint(
        paths=paths,
        name=name,
        manifest=manifest,
        manifest_sha256=hashlib.sha256(manifest.to_bytes()).hexdigest(),
        host=_read_host(directory / HOST),
        leaves=read_index(directory),
        pointer=pointer,
    )


def _read_host(path: Path) -> dict[str, Any]:
    try:
        obj = codec.load_json(path, limits=HOST_LIMITS)
    except (OSError, NnxError) as error:
        raise ResumePointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(obj, dict):
        raise ResumePointError(f"{path}: holds {type(obj).__name__}, expected a mapping")
    return obj


def _generation_of_step(paths: RunPaths, step: int) -> int:
    last = pointers.read_pointer(paths, LAST)
    steps: dict[int, int] = {}
    if last is not None:
        for number in sorted(retain.take_census(paths).complete):
            if number <= last.generation:
                steps[read_manifest(paths.manifest(number)).step] = number
    if step not in steps:
        kept = ", ".join(map(str, sorted(steps))) or "none"
        raise ResumePointError(f"run {paths.run_id!r} keeps no checkpoint of step {step}; kept steps: {kept}")
    return steps[step]


def _others(paths: RunPaths, name: str) -> str:
    try:
        names = [other for other in pointers.list_pointers(paths) if other != name]
    except NnxError:
        names = []
    return f"; other checkpoints of this run: {', '.join(names)}" if names else ""


def _first_difference(stored: Any, wanted: Any, path: str) -> tuple[str, Any, Any] | None:
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        keys = dict.fromkeys([*wanted, *stored])
        pairs = [(f"{path}.{key}", stored.get(key, _ABSENT), wanted.get(key, _ABSENT)) for key in keys]
    elif isinstance(stored, list | tuple) and isinstance(wanted, list | tuple):
        longest = max(len(stored), len(wanted))
        sides = [[*side, *[_ABSENT] * (longest - len(side))] for side in (stored, wanted)]
        pairs = [(f"{path}[{i}]", old, new) for i, (old, new) in enumerate(zip(*sides, strict=True))]
    else:
        return None if type(stored) is type(wanted) and stored == wanted else (path, stored, wanted)
    return next((found for p, old, new in pairs if (found := _first_difference(old, new, p)) is not None), None)


def _show(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
