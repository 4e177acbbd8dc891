"""One canonical SHA-256 for configurations and for arrays: equal content, equal hash, on every machine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx_jax.core.codec import KeyPath, canonical_json, dotted
from nnx_jax.core.errors import ConfigError, DataError

_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-fA-F]+>")


def content_hash(obj: Any) -> str:
    """Return 64 hex digits: SHA-256 of the canonical JSON of a plain value (see `codec.canonical_json`).

    Raises:
        ConfigError: (a ValueError) with its path, for what JSON cannot hold, and for the text of an object with its
            memory address (`<Net object at 0x7f...>`): it differs in every process.
    """
    text = canonical_json(obj)
    if b" at 0x" in text:
        _refuse_addresses(obj, ())
    return hashlib.sha256(text).hexdigest()


def _refuse_addresses(obj: Any, path: KeyPath) -> None:
    if isinstance(obj, str) and (found := _ADDRESS.search(obj)):
        message = f"holds {found[0]:.80}, a memory address; write what tells the object from others, its fields"
        raise ConfigError(message, path=dotted(path))
    if isinstance(obj, Mapping):
        for key, value in obj.items():
            _refuse_addresses(key, (*path, key))
            _refuse_addresses(value, (*path, key))
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            _refuse_addresses(value, (*path, index))


def hash_config(*parts: Any) -> str:
    """Return 64 hex digits over several plain values, each ended by a NUL byte, so that where one ends counts.

    The order of keys does not count. This is the framing that `pipekit_train.dataset.hash_config` used: identities
    recorded with it can be compared. Errors as of `content_hash`.
    """
    digest = hashlib.sha256()
    for part in parts:
        canonical_json(part)  # refuses what is not plain
        _refuse_addresses(part, ())
        digest.update(json.dumps(part, sort_keys=True, default=dict).encode("ascii") + b"\0")
    return digest.hexdigest()


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
