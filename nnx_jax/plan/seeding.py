"""Python's and NumPy's global random streams, seeded for the length of one block and then put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed `random` and `numpy.random` from `seed`; after the block, also after a failed one, both are as before."""
    before, legacy = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
    finally:
        random.setstate(before)
        np.random.set_state(legacy)
