"""One canonical SHA-256 for configurations and for arrays: equal content, equal hash, on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx_jax.core.codec import canonical_json
from nnx_jax.core.errors import DataError


def content_hash(obj: Any) -> str:
    """Return 64 hex digits: SHA-256 of the canonical JSON of a plain value (see `codec.canonical_json`)."""
    return hashlib.sha256(canonical_json(obj)).hexdigest()


def hash_array(array: np.ndarray) -> str:
    """Return 64 hex digits over dtype, shape and the little-endian bytes in C order.

    The memory layout and the byte order do not count; the dtype does. Object and structured arrays raise DataError.
    """
    array = np.asarray(array)
    if array.dtype.hasobject or array.dtype.names is not None:
        raise DataError(f"cannot hash an array of dtype {array.dtype}; use numbers, booleans or fixed-length text")
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    head = canonical_json([little.dtype.name, list(array.shape)])
    digest = hashlib.sha256(len(head).to_bytes(8, "little") + head)
    digest.update(little.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def hash_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """Return 64 hex digits over the names and contents of several arrays; the mapping's order does not count."""
    return content_hash({name: hash_array(array) for name, array in arrays.items()})
