"""What a generation says of its arrays: name, shape and dtype of each, in `arrays.json`, whoever holds their bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.core import codec
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import CheckpointError, NnxError, ResumePointError

INDEX = "arrays.json"
FORMAT, SHARDED, TENSORS = FORMS = ("nnx_jax.arrays/1", "nnx_jax.arrays/2", "nnx_jax.tensors/1")
"""How the arrays are stored: by Orbax, by Orbax with arrays that no process held whole, as one safetensors file."""
_LIMITS = codec.Limits(64 * 1024**2, 1_000_000)  # of the index: a leaf takes 3 values and one for each axis


@dataclass(frozen=True)
class Leaf:
    """Shape and dtype name of one stored array; `shards`: no process had all of it, so it is in `shards/`."""

    shape: tuple[int, ...]
    dtype: str
    shards: bool = field(default=False, compare=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def describe(arrays: Mapping[str, Any]) -> dict[str, Leaf]:
    """Return the Leaf of everything with a shape and a dtype, or given as a (shape, dtype) pair."""
    return {name: _leaf(name, value) for name, value in arrays.items()}


def read_index(directory: Path) -> dict[str, Leaf]:
    """Return what `arrays.json` of a generation says; raises ResumePointError when it is missing or damaged."""
    path = directory / INDEX
    try:
        obj = codec.load_json(path, limits=_LIMITS)
        if obj["format"] not in FORMS:
            raise ValueError(f"expected one of the formats {', '.join(FORMS)}")
        leaves = {
            name: Leaf(tuple(entry["shape"]), entry["dtype"], entry.get("shards") is True)
            for name, entry in obj["arrays"].items()
        }
        if any(type(size) is not int or size < 0 for leaf in leaves.values() for size in leaf.shape):
            raise ValueError("a size is not a whole number >= 0")
        return leaves
    except (OSError, NnxError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResumePointError(f"{path}: the array index cannot be read: {error}") from error


def check_leaves(stored: Mapping[str, Leaf], wanted: Mapping[str, Leaf], where: str) -> None:
    """Raise ResumePointError naming the first leaf (in name order) that differs, and both sides."""
    problems = [
        f"leaf {name!r}: stored {stored.get(name, 'nothing')}, this run needs {wanted.get(name, 'nothing')}"
        for name in sorted({*stored, *wanted})
        if stored.get(name) != wanted.get(name)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ResumePointError(f"{where}: {problems[0]}{more}; nothing was restored and nothing is cast")


def _leaf(name: str, value: Any) -> Leaf:
    shape, dtype = value if isinstance(value, tuple) else (getattr(value, "shape", None), getattr(value, "dtype", None))
    try:
        if shape is None or dtype is None:
            raise TypeError("it has no shape and dtype")
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError("objects are never stored")
        return Leaf(tuple(int(size) for size in shape), _name_of(kind))
    except TypeError as error:
        found = f"{type(value).__name__} of dtype {dtype}"
        raise CheckpointError(f"leaf {name!r} cannot be stored: found {found} ({error}); give a plain array") from error


@lru_cache(maxsize=64)  # numpy makes the text anew each time, which takes as long as all the rest of a leaf
def _name_of(kind: np.dtype) -> str:
    return str(kind)


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of this name, also of those that numpy itself does not have."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def index_bytes(leaves: Mapping[str, Leaf], form: str = FORMAT, spread: Collection[str] = ()) -> bytes:
    """Return the bytes of `arrays.json`; `spread`: the leaves that are in `shards/`."""
    arrays: dict[str, Any] = {
        name: {"shape": list(leaf.shape), "dtype": leaf.dtype} | ({"shards": True} if name in spread else {})
        for name, leaf in leaves.items()
    }
    return durable_json({"format": form, "arrays": arrays}, source=INDEX, limits=_LIMITS)
