"""A moment in memory, with what the loop asks of a stored one when it continues from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.core.errors import ResumePointError
from nnx_jax.core.hashing import content_hash, hash_arrays
from nnx_jax.runs.leaves import Leaf

WEIGHT_NAMES = "weights"
"""Under this name the host values of a state know the names its operator's weights had in the generation."""


@dataclass(frozen=True)
class CarriedPoint:
    """What a `TrainerCarryState` holds, as a point to continue from; see `runs.resume.ResumePoint`."""

    host: dict[str, Any]
    arrays: Mapping[str, np.ndarray]
    manifest_sha256: str
    step: int
    epoch: int
    name: str = "the state it was given"
    run_id: str = "0" * 16
    generation: int = 0

    @classmethod
    def of(cls, state: TrainerCarryState, weights: Mapping[str, np.ndarray]) -> CarriedPoint:
        """Return the point of a state.

        Args:
            weights: of the operator, by their bare names.

        Raises:
            ResumePointError: (a ValueError) the state is of another structure than the operator.
        """
        host: dict[str, Any] = {name: value for name, value in (state.host or {}).items() if name != WEIGHT_NAMES}
        names = (state.host or {}).get(WEIGHT_NAMES, [])
        bare = {name.partition("/")[2]: name for name in names}
        if set(bare) != set(weights):
            odd = sorted(set(bare) ^ set(weights))
            raise ResumePointError(f"the state is of another model than the operator: they differ in {odd[0]}")
        arrays = {**(state.opt_state or {}), **{bare[name]: array for name, array in weights.items()}}
        digest = content_hash({"host": host, "arrays": hash_arrays(arrays)})
        return cls(host, arrays, digest, host["step"], host["position"]["epoch"])

    @property
    def leaves(self) -> dict[str, Leaf]:
        """Name -> shape and dtype of every array."""
        return {name: Leaf(tuple(array.shape), array.dtype.name) for name, array in self.arrays.items()}

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the wanted arrays, where the wanted have a place there.

        Raises:
            ResumePointError: (a ValueError) a name, shape or dtype is not what is wanted.
        """
        found = {}
        for name, like in wanted.items():
            shape, dtype = (like.shape, like.dtype) if hasattr(like, "shape") else like
            array = self.arrays.get(name)
            if array is None or array.shape != tuple(shape) or array.dtype != np.dtype(dtype):
                have = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
                told = f"{name}: the state has {have}, this loop needs {np.dtype(dtype)}{list(shape)}"
                raise ResumePointError(f"{told}; give resume='weights_only' to take the model alone")
            place = getattr(like, "sharding", None)
            found[name] = array if place is None else jax.device_put(array, place)
        return found

    def load_all(self) -> dict[str, Any]:
        """Return every array."""
        return dict(self.arrays)
