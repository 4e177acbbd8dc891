"""Named host arrays to and from one safetensors file: generations of a framework whose arrays are not JAX's.

A generation directory gets `arrays.json`, as with `arrays`, and `state.safetensors`, whose tensors have the arrays' own
names, so that any reader of that format opens it. Only the writer of a run writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.core import fsio
from nnx_jax.core.errors import ResumePointError
from nnx_jax.runs.leaves import INDEX, TENSORS, Leaf, check_leaves, describe, dtype_of, index_bytes
from nnx_jax.spmd.world import ALONE, World

FILE = "state.safetensors"
_BITS = {"bfloat16": "uint16"}
"""Dtypes that numpy does not have are in the file as their bits; the index says what they are."""


class TensorHandle:
    """A save under way; the calls are those of `arrays.SaveHandle`."""

    def __init__(self, directory: Path, copies: Mapping[str, np.ndarray], index: bytes | None) -> None:
        self._directory, self._copies, self._index = directory, copies, index

    def wait(self) -> None:
        """Write the file and its index, on the writer."""
        if self._index is None:
            return
        from safetensors.numpy import save

        fsio.create_file(self._directory / FILE, save(dict(self._copies)))
        self._copies = {}
        fsio.create_file(self._directory / INDEX, self._index)

    def digests(self) -> dict[str, tuple[str, int]]:
        """Nothing: the writer holds all arrays."""
        return {}

    def merge(self) -> None:
        """There is nothing to put together."""


class TensorWriter:
    """Saves mappings of host arrays; the calls are those of `arrays.ArrayWriter`.

    Args:
        world: the processes that commit together; one that is not the writer writes nothing.
    """

    def __init__(self, timeout_seconds: int = 600, world: World = ALONE) -> None:
        self._world = world

    def save(self, directory: Path, arrays: Mapping[str, Any]) -> TensorHandle:
        """Copy the arrays; the thread that waits on the handle writes them.

        Raises:
            CheckpointError: a value is no plain array.
        """
        leaves = describe(arrays)
        if not self._world.writes:
            return TensorHandle(directory, {}, None)
        copies = {name: _bits(np.array(value, order="C")) for name, value in arrays.items()}
        return TensorHandle(directory, copies, index_bytes(leaves, TENSORS))

    def settle(self) -> None:
        """Nothing is written outside the waiting thread."""

    def prepare(self) -> None:
        """Import what the first save needs."""
        import safetensors.numpy  # noqa: F401

    def close(self) -> None:
        """There are no threads to free."""


def restore(directory: Path, leaves: Mapping[str, Leaf]) -> dict[str, np.ndarray]:
    """Return all arrays of a generation as numpy arrays, exactly as stored.

    Args:
        leaves: what its index says.

    Raises:
        ResumePointError: the file cannot be read, or holds other names, shapes or dtypes.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = directory / FILE
    try:
        found = load(path.read_bytes())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ResumePointError(f"{path}: the arrays cannot be read: {type(error).__name__}: {error}") from error
    stored = {name: Leaf(leaf.shape, _BITS.get(leaf.dtype, leaf.dtype)) for name, leaf in leaves.items()}
    check_leaves(describe(found), stored, str(path))
    return {name: found[name].view(dtype_of(leaf.dtype)) for name, leaf in leaves.items()}


def _bits(array: np.ndarray) -> np.ndarray:
    kind = _BITS.get(str(array.dtype))
    return array if kind is None else array.view(kind)
