"""What torch processes do in the tests of sums without gloo; `test_neighbours.py` starts them."""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nnx_jax.torch.distributed import current_world, init_process_group, shutdown
from nnx_jax.torch.neighbours import connect


def vector_of(rank: int, size: int = 5000) -> np.ndarray:
    """Float64 numbers of so many magnitudes that the order of a sum shows."""
    draw = np.random.default_rng(rank)
    return draw.normal(size=size) * 10.0 ** draw.integers(-12, 12, size)


def digest(numbers: np.ndarray) -> str:
    """Of the bits."""
    return hashlib.sha256(numbers.tobytes()).hexdigest()


def sums() -> list[Any]:
    """Two sums in a row, as bytes; and what is left of the place where they met."""
    rank, _ = init_process_group()
    neighbours = connect(current_world())
    assert neighbours is not None
    found = []
    for size in (5000, 200_000):  # the second is longer than what a socket takes at once
        vector = torch.from_numpy(vector_of(rank, size))
        neighbours.add_up(vector)
        found.append(digest(vector.numpy()))
    left = [path.name for path in Path(tempfile.gettempdir()).glob("nnx_jax-*")]
    shutdown(timeout_seconds=20)
    return [found, left]


def apart() -> list[Any]:
    """The name of the socket of process 0 is too long, so nobody reaches it; gloo still adds up."""
    rank, _ = init_process_group()
    if rank == 0:
        tempfile.tempdir = tempfile.mkdtemp(prefix="x" * 100)
    neighbours = connect(current_world())
    vector = torch.from_numpy(vector_of(rank))
    dist.all_reduce(vector)
    shutdown(timeout_seconds=20)
    return [neighbours is None, digest(vector.numpy())]


def lost(fault: str, seconds: float) -> list[Any]:
    """Process 1 does not come to a sum; what process 0 says, and after how long."""
    rank, _ = init_process_group()
    neighbours = connect(current_world())
    assert neighbours is not None
    vector = torch.ones(3, dtype=torch.float64)
    neighbours.add_up(vector)
    if rank == 1:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4 * seconds)
        os._exit(0)
    began = time.monotonic()
    try:
        neighbours.add_up(vector)
    except RuntimeError as error:
        print("told", [type(error).__name__, str(error), time.monotonic() - began], flush=True)
    os._exit(0)  # a group without process 1 is not left in order
