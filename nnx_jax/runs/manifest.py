"""What a generation consists of: the size and SHA-256 of every one of its files, checked before anything is read."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nnx_jax.core import codec, fsio
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import NnxError, ResumePointError
from nnx_jax.runs.pointers import check_format

FORMAT = "nnx_jax.manifest/1"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = codec.Limits(64 * 1024**2, 4 * fsio.MAX_FILES)  # a file takes 3 values


@dataclass(frozen=True)
class Manifest:
    """The parsed manifest of one generation; `files` maps a relative path to (SHA-256, size in bytes)."""

    run_id: str
    generation: int
    epoch: int
    step: int
    batch: int
    files: dict[str, tuple[str, int]]

    def to_bytes(self) -> bytes:
        fields = {name: getattr(self, name) for name in ("run_id", "generation", "epoch", "step", "batch")}
        files = {path: {"sha256": digest, "size": size} for path, (digest, size) in self.files.items()}
        obj = {"format": FORMAT, **fields, "files": files}
        return durable_json(obj, source=f"manifest of generation {self.generation}", limits=_LIMITS)


def read_manifest(path: Path, *, sha256: str | None = None) -> Manifest:
    """Return the manifest at `path`; with `sha256` (from a pointer) the file must have that digest.

    Raises:
        ResumePointError: it is missing, damaged, or not the one the pointer names.
    """
    try:
        data = fsio.read_bytes(path, _LIMITS.bytes)
    except FileNotFoundError as error:
        raise ResumePointError(f"{path}: the manifest is missing; the checkpoint is torn") from error
    except (OSError, NnxError) as error:
        raise ResumePointError(f"{path}: the manifest cannot be read: {error}") from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise ResumePointError(f"{path}: is not the manifest its pointer names (mixed or damaged files)")
    return _parse(data, path)


@lru_cache(maxsize=16)  # a commit reads those of the newest generations, as the one before it did
def _parse(data: bytes, path: Path) -> Manifest:
    try:
        obj = codec.parse_json(data, source=str(path), limits=_LIMITS)
        check_format(obj, FORMAT, path)
        return _decode(obj)
    except ResumePointError:
        raise
    except (NnxError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResumePointError(f"{path}: the manifest is damaged ({error})") from error


def verify_files(directory: Path, manifest: Manifest) -> list[str]:
    """Return every way in which `directory` differs from `manifest`: links, extra or missing files, sizes, digests.

    Names and sizes are compared first, so that a bomb is refused before its bytes are read. Empty when all is well.
    """
    try:
        sizes = fsio.list_tree(directory, max_files=len(manifest.files) + 1000)
    except FileNotFoundError:
        return [f"{directory}: the checkpoint directory is missing"]
    except (OSError, NnxError) as error:
        return [f"{directory}: {error}"]
    faults = [f"{directory / name}: is missing" for name in sorted(manifest.files.keys() - sizes.keys())]
    faults += [f"{directory / name}: is not in the manifest" for name in sorted(sizes.keys() - manifest.files.keys())]
    faults += [
        f"{directory / name}: has {sizes[name]} bytes, the manifest says {size}"
        for name, (_, size) in sorted(manifest.files.items())
        if name in sizes and sizes[name] != size
    ]
    if faults:
        return faults
    for name, expected in sorted(manifest.files.items()):
        try:
            found = fsio.digest_file(directory / name)
        except (OSError, NnxError) as error:
            faults.append(f"{directory / name}: {error}")
            continue
        if found != expected:
            faults.append(f"{directory / name}: its bytes are not what was committed (SHA-256 differs)")
    return faults


def _decode(obj: Any) -> Manifest:
    if obj["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT!r}")
    files = {str(path): (entry["sha256"], entry["size"]) for path, entry in obj["files"].items()}
    for path, (digest, size) in files.items():
        parts = path.split("/")
        if not _DIGEST.fullmatch(digest) or type(size) is not int or size < 0 or {"", ".", ".."} & set(parts):
            raise ValueError(f"entry {path!r}")
    numbers = [obj[name] for name in ("generation", "epoch", "step", "batch")]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a counter is not a whole number >= 0")
    generation, epoch, step, batch = numbers
    return Manifest(str(obj["run_id"]), generation, epoch, step, batch, files)
