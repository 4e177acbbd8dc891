"""Artifacts: what a training, or a pipeline that serves models, leaves for the record, as one JSON file."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from nnx_jax.core import codec, fsio
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import ConfigError
from nnx_jax.runs.provenance import collect


@cache
def deps_lock() -> str:
    """Return what is installed, a sorted `name==version` a line; "" when that cannot be found out.

    Asked of the interpreter itself, so no installer is needed.
    """
    found: dict[str, str] = {}
    try:
        for distribution in importlib.metadata.distributions():
            name, version = distribution.metadata["Name"], distribution.version
            if name and version:
                found.setdefault(name.lower(), f"{name}=={version}")  # the first on the path is what is imported
    except Exception:  # the metadata of a package may be broken in any way, and a run must not end with that
        return ""
    return "".join(f"{found[name]}\n" for name in sorted(found))


def environment() -> dict[str, Any]:
    """Return versions, Python, platform, and git commit of the working directory; see `provenance.collect`."""
    return {name: value for name, value in collect().items() if name != "resume"}


class _Record:
    """What artifacts share: plain values, one JSON file with sorted keys."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, each.name, _plain(getattr(self, each.name), each.name))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the artifact of `to_dict()`.

        Raises:
            ConfigError: (a ValueError) a field that is missing or not known.
        """
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"these are not the fields of a {cls.__name__}: {error}") from None

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all; its directory is made. Numbers that are not finite are marked."""
        path = Path(path)
        fsio.make_dir(path.parent)
        fsio.atomic_write(path, durable_json(_sorted(self.to_dict()), source=str(path), people=True))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the artifact of a file.

        Raises:
            FileNotFoundError: there is none.
            ConfigError: (a ValueError) it is no JSON, or none of this kind.
        """
        found = codec.parse_json(fsio.read_bytes(path, follow=True), source=str(path))
        if not isinstance(found, Mapping):
            raise ConfigError("holds no artifact", file=str(path))
        return cls.from_dict(_revived(found))


@dataclass
class TrainingArtifact(_Record):
    """What a training leaves for the record.

    Attributes:
        training_pipeline_yaml: the loop as text.
        dataset_hash: content hash of the rows that were trained on.
        trained_model_hash: under which a registry has the model; without one the operator's content hash.
        tracker_run_id: the run at an experiment tracker; None without one.
        model_registry_uri: `registry://<hash>` where the model was stored; None without a registry.
        backend_info: what the backend tells of the run: steps, seconds, versions, final values, why it stopped.
        deps_lock: what was installed; see `deps_lock()`.
        environment: versions, platform and git commit; see `environment()`.
        metadata: anything else, the seed among it.
    """

    training_pipeline_yaml: str
    dataset_hash: str
    trained_model_hash: str | None = None
    tracker_run_id: str | None = None
    model_registry_uri: str | None = None
    backend_info: dict[str, Any] = field(default_factory=dict)
    deps_lock: str = field(default_factory=deps_lock)
    environment: dict[str, Any] = field(default_factory=environment)
    metadata: dict[str, Any] = field(default_factory=dict)

    def reload_model(self, registry: Any, *, template: Any = None) -> Any:
        """Return the trained model from the registry that has it.

        Args:
            registry: a ModelRegistry.
            template: an operator of the same structure, for a model whose class no file can rebuild.

        Raises:
            ConfigError: (a ValueError) the model was stored in no registry.
            KeyError: this registry does not have it.
        """
        if self.model_registry_uri is None or self.trained_model_hash is None:
            raise ConfigError("this run stored its model in no registry; give the loop Checkpoint(registry=...)")
        return _loaded(registry, self.trained_model_hash, template)


@dataclass
class InferenceArtifact(_Record):
    """A pipeline that serves models, with the very models it serves.

    Attributes:
        pipeline_yaml: the pipeline as text.
        pinned_model_hashes: hash of every model by its name in the pipeline.
        model_registry_uri: where the registry is, for people; None where it is known otherwise.
        deps_lock, environment, metadata: as in TrainingArtifact.
    """

    pipeline_yaml: str
    pinned_model_hashes: dict[str, str] = field(default_factory=dict)
    model_registry_uri: str | None = None
    deps_lock: str = field(default_factory=deps_lock)
    environment: dict[str, Any] = field(default_factory=environment)
    metadata: dict[str, Any] = field(default_factory=dict)

    def reload_models(self, registry: Any, *, templates: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the pinned models by name; `templates` as in `TrainingArtifact.reload_model`.

        Raises:
            KeyError: the registry does not have one of them.
        """
        given = templates or {}
        return {name: _loaded(registry, ref, given.get(name)) for name, ref in self.pinned_model_hashes.items()}


def _loaded(registry: Any, ref: str, template: Any) -> Any:
    return registry.load(ref) if template is None else registry.load(ref, template=template)


def _plain(value: Any, path: str) -> Any:
    """Values as JSON has them, and floats that are not finite.

    Raises:
        ConfigError: something else, with its place.
    """
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of an array library
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"an artifact holds plain values, got {type(value).__name__}", path=path)


def _sorted(value: Any) -> Any:
    """Keys in order, and floats that JSON has no word for as {"float": "nan"}."""
    if isinstance(value, Mapping):
        return {name: _sorted(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _revived(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {name: _revived(item) for name, item in value.items()}
    return [_revived(item) for item in value] if isinstance(value, list) else value
