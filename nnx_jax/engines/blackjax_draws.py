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
class Pending:
    """A block on its way from the device: its first draw, how many were asked for, and how many there are."""

    first: int
    count: int
    done: Any
    moves: Any


@dataclass
class Ahead:
    """A block that was handed over before it was asked for: its first draw, its draws, and what the call gives."""

    first: int
    count: int
    result: Any


@dataclass
class ChainState:
    """Where the chains stand, and every draw so far.

    Attributes:
        kernel: the sampler's state, device arrays; None before the warmup.
        params: what the warmup found.
        drawn: draws handed to the device so far.
        blocks: draws on the host, oldest first.
        read: draws of them that were read as records.
        pending: the last block handed to the device.
        alive: device bool, every draw so far was finite.
        failure: of a draw that was not, until it is read.
        ahead: the block that is asked for next, where it is known; nothing else here knows of it yet.
        stride: draws of the last span's first call.
        until: draws that are asked for in all; 0 where that is not known.
        since: when the last span began, seconds.
    """

    kernel: Any = None
    params: Any = None
    drawn: int = 0
    blocks: list[Drawn] = field(default_factory=list)
    read: int = 0
    pending: Pending | None = None
    alive: Any = True
    failure: Exception | None = None
    ahead: Ahead | None = None
    stride: int = 0
    until: int | None = None
    since: float = 0.0


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
