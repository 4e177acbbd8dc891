"""Single arrays between numpy, JAX and torch, sharing memory (DLPack) where the platform and the layout allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nnx_jax.core.errors import ModelError

if TYPE_CHECKING:
    import jax


def to_torch(array: Any, *, copy: bool | None = None) -> torch.Tensor:
    """Return a JAX or numpy array as a tensor of the same dtype, on the same device.

    Args:
        copy: None: share the memory where that is possible, of a JAX array and of a numpy array that may be written
            to; True: never; False: raise where it is not.

    A tensor that shares memory is for reading: JAX takes its arrays to be unchanging, so write to a copy.

    Raises:
        ModelError: `copy=False` and the memory cannot be shared; or values that torch has no dtype for.
    """
    if isinstance(array, torch.Tensor):
        return array.clone() if copy else array
    try:
        tensor = _shared(array)
        tensor = tensor.clone() if copy else tensor
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        tensor = _copied(array, copy, error)
    return tensor.view(torch.bfloat16) if str(array.dtype) == "bfloat16" else tensor


def to_jax(tensor: torch.Tensor, *, copy: bool | None = None) -> jax.Array:
    """Return a tensor as a JAX array, on the same device where JAX has it.

    The memory is shared where JAX can use it as it is: row-major, begun at a multiple of 64 bytes, and a dtype that JAX
    keeps (without `jax_enable_x64`, 64-bit values become 32-bit ones, as everywhere in JAX). Do not write to the tensor
    while the array is in use.

    Args:
        copy: None: share where that is possible; True: never; False: raise where it is not.

    Raises:
        ModelError: `copy=False` and the memory cannot be shared.
    """
    import jax.numpy as jnp

    tensor = tensor.detach()
    try:
        array = jnp.from_dlpack(tensor.contiguous())
        shared = not tensor.numel() or array.unsafe_buffer_pointer() == tensor.data_ptr()
    except (BufferError, RuntimeError, TypeError, ValueError):
        array, shared = jnp.asarray(to_numpy(tensor)), False
    if copy is False and not shared:
        raise ModelError(
            f"a {tensor.dtype} tensor on {tensor.device} of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
            "cannot be shared with JAX; leave copy out to copy it"
        )
    return jnp.array(array, copy=True) if copy and shared else array


def to_numpy(value: Any) -> np.ndarray:
    """Return a tensor, a JAX array or a number as a numpy array of the same dtype, sharing memory on the CPU."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    host = value.detach().cpu()
    if host.dtype != torch.bfloat16:
        return host.numpy()
    import ml_dtypes

    return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _shared(array: Any) -> torch.Tensor:
    """A tensor over the array's own memory. DLPack is for JAX: numpy's negative strides would end the process there."""
    if not isinstance(array, np.ndarray | np.generic):
        return torch.from_dlpack(array)
    if not array.flags.writeable:
        raise ValueError("it is read-only")
    return torch.from_numpy(_plain(array))


def _plain(array: Any) -> Any:
    """What torch takes from numpy, which has no bfloat16 of its own: such an array is handed over as integers."""
    if isinstance(array, np.ndarray) and str(array.dtype) == "bfloat16":
        return array.view(np.int16)
    return array


def _copied(array: Any, copy: bool | None, error: Exception) -> torch.Tensor:
    if copy is False:
        what = f"a {array.dtype} array of shape {array.shape}"
        raise ModelError(f"{what} cannot be shared with torch: {error}") from error
    try:
        return torch.from_numpy(np.array(_plain(np.asarray(array)), order="C"))
    except TypeError as unknown:
        raise ModelError(f"torch has no dtype for {array.dtype}: {unknown}") from unknown
