"""Tensors as named host arrays and back: exact, for every number format a checkpoint may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

from nnx_jax.core.errors import ModelError, ResumePointError

_BY_BITS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
"""Formats that numpy has no type of its own for: the integers of as many bits, and the type that stands for them."""
_NAMES = {torch.bool: "bool", **{dtype: np.dtype(kind).name for dtype, (_, kind) in _BY_BITS.items()}}


def host(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor as a host array of the same format, bit for bit."""
    flat = tensor.detach().to("cpu", copy=True).contiguous()
    if flat.dtype in _BY_BITS:
        bits, kind = _BY_BITS[flat.dtype]
        return flat.view(bits).numpy().view(kind)
    return flat.resolve_conj().numpy()


def tensor_of(array: Any) -> torch.Tensor:
    """Return a host array (a copy) as a CPU tensor of the same format, bit for bit."""
    found = np.array(array, order="C", copy=True)
    for dtype, (bits, kind) in _BY_BITS.items():
        if found.dtype == kind:
            plain = found.view(np.int16 if bits == torch.int16 else np.uint8)
            return torch.from_numpy(plain).view(dtype)
    return torch.from_numpy(found)


def form(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """Shape and numpy's name of the format."""
    return tuple(tensor.shape), dtype_name(tensor.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """numpy's name of a format.

    Raises:
        ModelError: a quantized format, which no checkpoint holds.
    """
    name = _NAMES.get(dtype, str(dtype).removeprefix("torch."))
    if name.startswith(("q", "bits")):
        raise ModelError(f"a tensor is {dtype}, which checkpoints cannot hold; keep quantized layers out of training")
    return name


def check_forms(found: Mapping[str, Any], wanted: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Check that arrays have exactly these names, shapes and formats.

    Raises:
        ResumePointError: (a ValueError) the first that differs, what was expected and what was found.
    """
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            raise _unfit(f"it has no {name!r} ({dtype}{list(shape)}), which this run needs")
        value = found[name]
        if tuple(value.shape) != tuple(shape) or np.dtype(value.dtype).name != dtype:
            have = f"{np.dtype(value.dtype).name}{list(value.shape)}"
            raise _unfit(f"{name!r}: expected {dtype}{list(shape)}, found {have}")
    for name in sorted(set(found) - set(wanted)):
        value = found[name]
        raise _unfit(f"it has {name!r} ({np.dtype(value.dtype).name}{list(value.shape)}), which this run lacks")


def _unfit(told: str) -> ResumePointError:
    return ResumePointError(f"the checkpoint does not fit this run: {told}")
