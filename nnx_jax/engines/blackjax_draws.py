"""Where chains stand and the draws they made: blocks on their way from the device, and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclass
class Drawn:
    """Draws on the host: positions by name [n, chains, ...] and what was measured of each, [n, chains]."""

    positions: dict[str, np.ndarray]
    stats: dict[str, np.ndarray]
    grad_norm: np.ndarray


@dataclass
class ChainState:
    """Where the chains stand, and every draw so far.

    Attributes:
        kernel: the sampler's state, device arrays; None before the warmup.
        params: what the warmup found.
        drawn: draws handed to the device so far.
        blocks: draws on the host, oldest first.
        read: draws of them that were read as records.
        failure: of a draw that was not, until it is read.
        pace: seconds that a draw of the last call took; None before the first.
    """

    kernel: Any = None
    params: Any = None
    drawn: int = 0
    blocks: list[Drawn] = field(default_factory=list)
    read: int = 0
    failure: Exception | None = None
    pace: float | None = None


def length(blocks: Sequence[Drawn]) -> int:
    """How many draws these are."""
    return sum(len(block.grad_norm) for block in blocks)


def joined(blocks: Sequence[Drawn]) -> Drawn:
    """One block of all of them; there is at least one."""
    if len(blocks) == 1:
        return blocks[0]
    positions = {n: np.concatenate([b.positions[n] for b in blocks]) for n in blocks[0].positions}
    stats = {n: np.concatenate([b.stats[n] for b in blocks]) for n in blocks[0].stats}
    return Drawn(positions, stats, np.concatenate([b.grad_norm for b in blocks]))


def cut_from(block: Drawn, first: int) -> Drawn:
    """The draws from number `first` on."""
    return jax.tree.map(lambda array: array[first:], block)
