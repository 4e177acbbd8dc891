"""Named arrays as the bytes of a safetensors file and back, in every dtype that a weight may have; no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from nnx_jax.core import codec
from nnx_jax.core.errors import ModelError, NnxError

_HEAD = 8  # bytes that say how long the header is
_NAMES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
DTYPES: Mapping[str, np.dtype[Any]] = {
    **{name: np.dtype(dtype) for name, dtype in _NAMES.items()},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The format's names of dtypes."""


def write_blob(arrays: Mapping[str, Any], about: Mapping[str, str] | None = None) -> bytes:
    """Return arrays as the bytes of a safetensors file.

    Args:
        about: texts by name, kept in the file's header.

    Raises:
        ModelError: (a ValueError) a dtype that the format does not have, naming the array.
    """
    from safetensors.numpy import save

    found = {name: np.asarray(value, order="C") for name, value in arrays.items()}
    for name, value in found.items():
        if value.dtype not in DTYPES.values():
            raise ModelError(f"{name} has the dtype {value.dtype}, which a weight file (safetensors) does not have")
    return save(found, metadata=None if about is None else dict(about))


def read_blob(blob: Any, what: str = "weights") -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file.

    Args:
        what: the bytes are said to be.

    Raises:
        TypeError: something else than bytes.
        ModelError: (a ValueError) bytes that are no safetensors file.
    """
    from safetensors import SafetensorError, deserialize

    if not isinstance(blob, bytes | bytearray | memoryview):
        raise TypeError(f"expected {what} as bytes, got {type(blob).__name__}")
    try:
        stored = deserialize(bytes(blob))
    except SafetensorError as error:
        raise ModelError(f"the {len(blob)} bytes are not {what} (a safetensors file): {error}") from error
    found = {}
    for name, told in stored:
        if told["dtype"] not in DTYPES:
            raise ModelError(f"the {what} have {name} in {told['dtype']}, which is not known here")
        found[name] = np.frombuffer(bytearray(told["data"]), DTYPES[told["dtype"]]).reshape(told["shape"])
    return found


def read_about(blob: bytes) -> dict[str, str]:
    """Return the texts in the header of a safetensors file that `read_blob` has read."""
    size = int.from_bytes(blob[:_HEAD], "little")
    try:
        header = codec.parse_json(bytes(blob[_HEAD : _HEAD + size]), source="the header of a safetensors file")
    except NnxError as error:
        raise ModelError(f"the header cannot be read: {error}") from error
    return dict(header.get("__metadata__", {}))
