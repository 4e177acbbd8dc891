"""Which arrays one process can write by itself, and how it gets hold of them; the others take all processes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np


def whole_on(value: Any, process: int) -> bool:
    """Whether a process holds every element: host arrays, arrays of its own devices, and replicated ones.

    The answer depends on how the array lies and not on who asks, so every process gives the same one.

    Args:
        value: an array as a generation holds it; one of several processes' devices is the same array on each of them.
        process: the number JAX gives it.
    """
    if getattr(value, "is_fully_addressable", True) or value.is_fully_replicated:
        return True
    return _covered(value.sharding, tuple(value.shape), process)


def host_copy(value: Any) -> np.ndarray:
    """Return a new numpy array with the elements, all of which this process holds (see `whole_on`)."""
    if getattr(value, "is_fully_addressable", True) or value.is_fully_replicated:
        return np.array(value)
    copy = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        copy[shard.index] = np.asarray(shard.data)
    return copy


def present_everywhere(value: np.ndarray) -> Any:
    """Return a jax.Array with these elements that counts as one copy on every process, though only ours exists.

    In a group of processes Orbax writes numpy arrays on process 0 alone, and no array of one process's devices.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), ("process",))
    with jax.enable_x64(True):  # an int64 stays one
        own = jax.device_put(value, first[jax.process_index()])
        place = NamedSharding(mesh, PartitionSpec())
        return jax.make_array_from_single_device_arrays(value.shape, place, [own])


@lru_cache(maxsize=4096)
def _covered(sharding: Any, shape: tuple[int, ...], process: int) -> bool:
    """Many arrays of a model lie alike, and every commit asks again."""
    places = sharding.devices_indices_map(shape)
    pieces = {_key(index) for index in places.values()}
    return {_key(index) for device, index in places.items() if device.process_index == process} == pieces


def _key(index: tuple[slice, ...]) -> tuple[tuple[Any, Any], ...]:
    return tuple((part.start, part.stop) for part in index)
