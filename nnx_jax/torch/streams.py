"""Random streams: torch's noise of microbatch k depends on run seed, k and rank alone; the global streams are kept."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from nnx_jax.torch.arrays import host, tensor_of

DROPOUT, EVALUATION, OBJECTIVE, BUILDING = 2, 3, 5, 7
"""What a stream is for: noise of the forward pass, of an evaluation, of an objective or step of the user's own, and of
the look at what a model makes of a batch."""

_MASK32 = 0xFFFFFFFF


def stream_seed(seed: int, purpose: int, rank: int = 0, count: int = 0) -> int:
    """Seed of one stream, 64 bits.

    torch's CPU generator looks at the lower 32 bits alone, so these are a permutation of `count`: no two microbatches
    of a run (up to 2**32) share one.

    Args:
        seed: of the run, any integer.
        count: microbatches before this one.
    """
    key = _stream_key(seed, purpose, rank)
    low = _mix((key + count) & _MASK32)
    return (_mix(low ^ key ^ 0x85EBCA6B) << 32) | low


@lru_cache(maxsize=256)
def _stream_key(seed: int, purpose: int, rank: int) -> int:
    key = 0
    for part in (seed & _MASK32, (seed >> 32) & _MASK32, purpose, rank):
        key = _mix(key ^ _mix(part + 0x9E3779B9))
    return key


def _mix(value: int) -> int:
    """A permutation of 32-bit numbers that spreads every bit (the last step of MurmurHash3)."""
    value &= _MASK32
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & _MASK32
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & _MASK32
    return value ^ (value >> 16)


class Streams:
    """Torch's generators of one device, lent to a forward pass and given back as they were.

    Args:
        device: where the model computes.
        seed: of the run.
        rank: of this process.
    """

    def __init__(self, device: torch.device, seed: int, rank: int = 0) -> None:
        self.device, self.seed, self.rank = device, seed, rank
        self._lent = False
        self._generators = [torch.default_generator, *_of(device)]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While it is open, torch's generators may be seeded; afterwards they go on as if nothing had happened.

        Inside of another one it does nothing.
        """
        if self._lent:
            yield
            return
        self._lent = True
        before = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            self._lent = False
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)

    def begin(self, purpose: int, count: int = 0) -> None:
        """Seed torch's generators for one microbatch; only while they are lent."""
        seed = stream_seed(self.seed, purpose, self.rank, count)
        for generator in self._generators:
            generator.manual_seed(seed)

    def generator(self, purpose: int, count: int) -> torch.Generator:
        """A generator of its own for one microbatch, on the device."""
        made = torch.Generator(device=self.device)
        made.manual_seed(stream_seed(self.seed, purpose, self.rank, count))
        return made


def _of(device: torch.device) -> list[torch.Generator]:
    """The generators of a device besides the CPU's."""
    if device.type == "cuda":
        torch.cuda.init()
        return [torch.cuda.default_generators[device.index or 0]]
    if device.type == "mps":
        return [torch.mps._get_default_mps_generator()]
    return []


def capture(device: torch.device, loader: torch.Generator | None = None) -> dict[str, np.ndarray]:
    """The states of every global stream, by name: python's, numpy's, torch's, and a loader's own generator."""
    version, keys, gauss = random.getstate()
    kind, words, place, has_gauss, cached = np.random.get_state()
    assert (version, kind) == (3, "MT19937")  # what Python and numpy have had for decades
    found = {
        "python/words": np.array(keys, np.uint32),
        "python/gauss": np.array([gauss is not None, gauss or 0.0], np.float64),
        "numpy/words": np.array(words, np.uint32),
        "numpy/rest": np.array([place, has_gauss, cached], np.float64),
        "torch": host(torch.default_generator.get_state()),
    }
    for generator in _of(device):
        found[device.type] = host(generator.get_state())
    if loader is not None:
        found["loader"] = host(loader.get_state())
    return found


def put(states: Mapping[str, Any], device: torch.device, loader: torch.Generator | None = None) -> None:
    """Set the global streams to what `capture` found; what is not named stays as it is."""
    if "python/words" in states:
        has, gauss = np.asarray(states["python/gauss"]).tolist()
        random.setstate((3, tuple(np.asarray(states["python/words"]).tolist()), gauss if has else None))
    if "numpy/words" in states:
        place, has, cached = np.asarray(states["numpy/rest"]).tolist()
        np.random.set_state(("MT19937", np.asarray(states["numpy/words"]), int(place), int(has), cached))
    if "torch" in states:
        torch.default_generator.set_state(tensor_of(states["torch"]))
    for generator in _of(device):
        if device.type in states:
            generator.set_state(tensor_of(states[device.type]))
    if loader is not None and "loader" in states:
        loader.set_state(tensor_of(states["loader"]))
