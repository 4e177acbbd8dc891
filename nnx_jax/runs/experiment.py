"""What an experiment is said to be, which attempt made a run of it, and how two experiments differ."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import NnxError, ResumePointError, nearest
from nnx_jax.core.hashing import content_hash
from nnx_jax.core.spec import Spec
from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.layout import RunPaths

FORMAT = "nnx_jax.provenance/1"
STATUSES = ("running", "completed", "failed", "cancelled")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class IdentityRef(Spec):
    """How data or a split is known: `declared` by a name, by a `digest` of its content, or `unknown`."""

    kind: Literal["declared", "digest", "unknown"]  # type: ignore[assignment]  # a field here: no kinds of its own
    value: str | None = None
    """The name, or `sha256:` and 64 hex digits."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """A name or digest is there exactly when it is said to be."""
        yield from super().problems()
        if self.kind == "unknown" and self.value is not None:
            yield "value", f"got {self.value!r}, but what is unknown has no value"
        elif self.kind == "declared" and not (self.value or "").strip():
            yield "value", "a declared identity needs a name"
        elif self.kind == "digest" and not _DIGEST.fullmatch(self.value or ""):
            yield "value", f"got {self.value!r}; a digest comes from hash_file, hash_bytes or a dataset"

    @classmethod
    def declared(cls, value: str) -> IdentityRef:
        """Return an identity that somebody vouches for by a name."""
        return cls(kind="declared", value=value)

    @classmethod
    def unknown(cls) -> IdentityRef:
        """Return an identity of which nothing is known."""
        return cls(kind="unknown")

    @property
    def verified(self) -> bool:
        """Whether it was computed from the content, so that equal means equal."""
        return self.kind == "digest"


def hash_bytes(data: bytes | bytearray | memoryview) -> IdentityRef:
    """Return the identity of some bytes: their SHA-256.

    Raises:
        TypeError: text, or anything else that is no bytes.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"hash_bytes takes bytes, got {type(data).__name__}; encode text first")
    return _digest(hashlib.sha256(data).hexdigest())


def hash_file(path: str | Path) -> IdentityRef:
    """Return the identity of a file: the SHA-256 of its bytes. A link is followed.

    Raises:
        OSError: it cannot be read.
        UnsafePathError: (a ValueError) it is a directory or a device.
    """
    return _digest(fsio.digest_file(path, follow=True)[0])


def _digest(digits: str) -> IdentityRef:
    return IdentityRef(kind="digest", value=f"sha256:{digits}")


def _refs(values: Any) -> Any:
    """Datasets by the digest of their rows, text as a declared name, None as unknown."""
    return {name: _ref(value) for name, value in values.items()} if isinstance(values, Mapping) else values


def _ref(value: Any) -> Any:
    if isinstance(value, TrainingDataset):
        return _digest(value.content_hash())
    if isinstance(value, str):
        return IdentityRef.declared(value)
    return IdentityRef.unknown() if value is None else value


def _said(value: Any) -> Any:
    """Specifications as their state, and the values of other libraries' containers and numbers as plain ones.

    Raises:
        ValueError: anything that no file can hold.
    """
    if isinstance(value, Spec):
        return value.state()
    if isinstance(value, Mapping):
        return {name: _said(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_said(item) for item in value)
    if isinstance(value, np.generic):
        value = value.item()
    codec.canonical_json(value)
    return value


def _plain(value: Any) -> Any:
    plain = _said(value)
    codec.canonical_json(plain)  # keys that are no text, and depth
    return plain


Said = Annotated[Mapping[str, Any], BeforeValidator(_plain)]
Refs = Annotated[Mapping[str, IdentityRef], BeforeValidator(_refs)]


class ExperimentManifest(Spec):
    """What an experiment is said to be, in values that a file can hold. Never part of a run's identity.

    Two attempts at one experiment have one fingerprint, whatever their code, machine or run id.
    """

    task: Said | None = None
    """What is asked of the model, as in {"kind": "multiclass"}."""
    labels: tuple[str, ...] | None = None
    """Names of the outputs, in their order."""
    model: Said | None = None
    """What is trained; a specification stands for its state."""
    data: Refs = {}
    """Identities by name: an IdentityRef, a dataset (by the digest of its rows), a name that is declared, or none."""
    splits: Refs = {}
    """Identities of the splits, likewise."""
    objective: Said | None = None
    """What is optimized, as in {"id": "kd", "version": 1}."""
    config: Said = {}
    """Anything else."""

    def document(self) -> dict[str, Any]:
        """Return what is hashed: the form and what the manifest says."""
        return {"format": FORMAT, "manifest": self.state()}

    def fingerprint(self) -> str:
        """Return 64 hex digits: the SHA-256 of the canonical JSON of `document()`."""
        return content_hash(self.document())


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One call of `train` for a run, as `attempt.json` has it.

    Attributes:
        attempt_id: 32 hex digits, new for every call.
        fingerprint: of the manifest.
        run_id: of the run.
        status: running | completed | failed | cancelled. A process that was killed leaves "running".
        started_at, finished_at: UTC, ISO 8601; finished_at is None while it runs.
        parent: the commit it continued (run_id, attempt_id, tag, epoch, step, generation); None for a fresh start. Its
            attempt_id is None where that run has no provenance.
        last_committed: the last commit there was when it ended (tag, epoch, step, generation); None before the first.
        error: type and message of what ended it; None otherwise.
    """

    attempt_id: str
    fingerprint: str
    run_id: str
    status: str
    started_at: str
    finished_at: str | None = None
    parent: Mapping[str, Any] | None = None
    last_committed: Mapping[str, Any] | None = None
    error: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status is {self.status!r}; legal: {', '.join(STATUSES)}")

    def state(self) -> dict[str, Any]:
        """Return it as JSON values, with the form of the file."""
        return {"format": FORMAT, **asdict(self)}


@dataclass(frozen=True)
class ProvenanceRecord:
    """Where a run comes from: what it is said to be, the fingerprint of that, and the newest attempt at it."""

    manifest: ExperimentManifest
    fingerprint: str
    attempt: Attempt | None = None


def load_provenance(run_id: str, root: str | Path = "runs") -> ProvenanceRecord | None:
    """Return the provenance of a run, None when it has none; only its two files are read.

    Raises:
        ResumePointError: (a ValueError) there is no such run, or a file is not what was written.
    """
    paths = RunPaths(root, run_id)
    if not paths.run.is_dir():
        raise ResumePointError(f"there is no run {run_id!r} in {paths.root}{nearest(run_id, run_ids(paths.root))}")
    return read_provenance(paths)


def read_provenance(paths: RunPaths) -> ProvenanceRecord | None:
    """Return what the two files say; see `load_provenance`."""
    manifest = _read_manifest(paths.provenance)
    if manifest is None:
        if paths.attempt.exists():
            raise ResumePointError(f"{paths.attempt}: is there without {paths.provenance.name}; put that back")
        return None
    fingerprint = manifest.fingerprint()
    attempt = _read_attempt(paths.attempt)
    if attempt is not None and (attempt.run_id, attempt.fingerprint) != (paths.run_id, fingerprint):
        raise ResumePointError(f"{paths.attempt}: is of another run or experiment than {paths.provenance}")
    return ProvenanceRecord(manifest, fingerprint, attempt)


def _read_manifest(path: Path) -> ExperimentManifest | None:
    stored = _load(path, {"manifest", "fingerprint"})
    if stored is None:
        return None
    try:
        manifest = ExperimentManifest.from_state(stored["manifest"])
    except NnxError as error:
        raise ResumePointError(f"{path}: cannot be read: {error}") from error
    if manifest.fingerprint() != stored["fingerprint"]:
        raise ResumePointError(f"{path}: its fingerprint is not that of its manifest; it was edited or damaged")
    return manifest


def _read_attempt(path: Path) -> Attempt | None:
    stored = _load(path, set(Attempt.__dataclass_fields__))
    if stored is None:
        return None
    try:
        return Attempt(**stored)
    except ValueError as error:
        raise ResumePointError(f"{path}: {error}") from error


def _load(path: Path, keys: set[str]) -> dict[str, Any] | None:
    try:
        stored = codec.load_json(path)
    except FileNotFoundError:
        return None
    except (OSError, NnxError) as error:
        raise ResumePointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(stored, dict) or stored.pop("format", None) != FORMAT or set(stored) != keys:
        raise ResumePointError(f"{path}: is not of the form {FORMAT}")
    return stored


# Comparison ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldComparison:
    """One field of two manifests.

    Attributes:
        path: such as "labels[2]" or "data.train"; "" for a whole manifest.
        status: equal | verified (equal digests) | declared (equal names, which nobody checked) | unknown (one identity
            is) | different | missing (one side has it) | absent (one side has no provenance).
        left, right: the values; None where there is none.
    """

    path: str
    status: str
    left: Any = None
    right: Any = None

    def __str__(self) -> str:
        return f"{self.path or 'provenance'}: {self.status}: {self.left!r} and {self.right!r}"


@dataclass(frozen=True)
class ProvenanceComparison:
    """Two manifests, field by field."""

    fields: tuple[FieldComparison, ...]

    @property
    def differences(self) -> tuple[FieldComparison, ...]:
        """Every field that is not known to be equal."""
        return tuple(each for each in self.fields if each.status not in ("equal", "verified"))

    @property
    def verified_equal(self) -> bool:
        """Whether every field is equal, by digests and not by names; manifests that say nothing are not."""
        return bool(self.fields) and not self.differences

    def by_path(self) -> dict[str, FieldComparison]:
        """Return the fields by their paths."""
        return {each.path: each for each in self.fields}


def compare(left: Any, right: Any, *, root: str | Path = "runs") -> ProvenanceComparison:
    """Compare what two experiments are said to be; no model is built and no data read.

    Args:
        left, right: manifests, ProvenanceRecords, runs or run ids; None for no provenance.
        root: where the runs of run ids live.

    Raises:
        ResumePointError: (a ValueError) there is no such run, or its provenance is damaged.
        TypeError: anything else.
    """
    one, two = _manifest_of(left, root), _manifest_of(right, root)
    if one is None or two is None:
        return ProvenanceComparison((FieldComparison("", "absent", one, two),))
    old, new = _fields(one), _fields(two)
    found = [_compare(path, old.get(path), new.get(path)) for path in sorted({*old, *new})]
    return ProvenanceComparison(tuple(found))


def _manifest_of(given: Any, root: str | Path) -> ExperimentManifest | None:
    if isinstance(given, str):
        given = load_provenance(given, root)
    given = getattr(given, "provenance", given)  # of an NNRun
    if isinstance(given, ProvenanceRecord):
        return given.manifest
    if given is None or isinstance(given, ExperimentManifest):
        return given
    raise TypeError(f"compare takes manifests, provenance records, runs or run ids, got {type(given).__name__}")


def _fields(manifest: ExperimentManifest) -> dict[str, Any]:
    """Every value by its path; identities stay whole."""
    refs = {f"{part}.{name}": ref for part in ("data", "splits") for name, ref in getattr(manifest, part).items()}
    plain = {name: value for name, value in manifest.state().items() if name not in ("data", "splits")}
    return {**dict(_leaves(plain, "")), **refs}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, (value,)  # apart from a path that one side does not have


def _compare(path: str, left: Any, right: Any) -> FieldComparison:
    if isinstance(left, IdentityRef) and isinstance(right, IdentityRef):
        if "unknown" in (left.kind, right.kind):
            status = "unknown"
        else:
            status = "different" if left != right else "verified" if left.verified else "declared"
        return FieldComparison(path, status, left.value, right.value)
    one, two = (side.value if isinstance(side, IdentityRef) else side and side[0] for side in (left, right))
    if left is None or right is None:
        return FieldComparison(path, "missing", one, two)
    same = codec.canonical_json(one) == codec.canonical_json(two)  # 1 is not 1.0, as in the fingerprint
    return FieldComparison(path, "equal" if same else "different", one, two)
