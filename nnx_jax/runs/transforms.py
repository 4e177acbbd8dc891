"""NNCheckpointTransform: one recorded change of a network's topology, by name, as a generation keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nnx_jax.core.codec import canonical_json, parse_json
from nnx_jax.core.errors import ConfigError, ResumePointError
from nnx_jax.runs.resume import ResumePoint

FINAL = "final/"
"""Prefix of the weights of a network whose topology was changed after training, beside those that training goes on
from."""


@dataclass(frozen=True)
class NNCheckpointTransform:
    """A change of topology that whoever rebuilds the model repeats before weights are loaded.

    Attributes:
        name: under which it is registered; see `register_transform`.
        version: of its meaning, 1 or more.
        options: what it is called with: numbers, text, and lists and dicts of them.

    Raises:
        ConfigError: a name, version or options that are none.
    """

    name: str
    version: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigError(f"NNCheckpointTransform.name must be text, got {self.name!r}")
        if isinstance(self.version, bool) or not isinstance(self.version, int) or self.version < 1:
            raise ConfigError(f"NNCheckpointTransform.version must be a whole number >= 1, got {self.version!r}")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"NNCheckpointTransform.options must be a mapping, got {type(self.options).__name__}")
        # As a file gives them back, and refusing what no file can hold.
        object.__setattr__(self, "options", parse_json(canonical_json(dict(self.options)), source=self.name))

    def state(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"name": self.name, "version": self.version, "options": dict(self.options)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> NNCheckpointTransform:
        """Return what `state()` was made from."""
        return cls(state["name"], state.get("version", 1), state.get("options", {}))


def recorded(point: ResumePoint) -> tuple[NNCheckpointTransform, ...]:
    """Return the transforms of a checkpoint, in the order they are repeated.

    Raises:
        ResumePointError: what is recorded is no transform.
    """
    try:
        return tuple(NNCheckpointTransform.from_state(state) for state in point.host.get("transforms", ()))
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise ResumePointError(f"{point.directory}: its transforms cannot be read: {error}") from error


def training_arrays(point: ResumePoint, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that training goes on from, `wanted` as in `ResumePoint.load`, without those of a transformed
    network."""
    final = {name: (leaf.shape, leaf.dtype) for name, leaf in point.leaves.items() if name.startswith(FINAL)}
    return {name: array for name, array in point.load({**wanted, **final}).items() if name in wanted}


def model_arrays(point: ResumePoint) -> dict[str, Any]:
    """Return the arrays of the model itself by name, `params/...` and the like: of the transformed network if any."""
    stored = point.load_all()
    final = {name.removeprefix(FINAL): array for name, array in stored.items() if name.startswith(FINAL)}
    return final or stored
