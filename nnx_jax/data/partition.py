"""Which row goes where: pure functions from (seed, epoch, world) to row numbers.

One epoch's order is a permutation that is a function of `seed + epoch` and of nothing else: no generator is advanced,
so no resume, evaluation or restart can move it. The draws are the raw output of Philox4x64 keyed by `seed + epoch`, and
the permutation is their stable argsort. numpy promises the raw stream of a bit generator for all versions (NEP 19),
which it does not promise for `Generator.permutation`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_jax.core.errors import DataError

GENERATOR = "philox4x64-argsort"
POLICIES = ("pad", "drop")


def epoch_order(rows: int, seed: int, epoch: int, *, shuffle: bool = True) -> np.ndarray:
    """Return the row numbers [rows] int64 of one epoch: a permutation of `seed + epoch`, or 0..rows-1 unshuffled."""
    if epoch < 0 or seed < 0:
        raise DataError(f"seed and epoch start at 0, found seed {seed}, epoch {epoch}")
    if not shuffle:
        return np.arange(rows)
    return np.argsort(np.random.Philox(key=seed + epoch).random_raw(rows), kind="stable")


def batch_table(order: np.ndarray, batch_size: int, tail: str) -> np.ndarray:
    """Cut `order` into an int32 table [n_batches, batch_size]; -1 fills the last row of `pad` and `keep`."""
    full, rest = divmod(len(order), batch_size)
    if tail == "drop" or rest == 0:
        return order[: full * batch_size].reshape(full, batch_size).astype(np.int32)
    table = np.full((full + 1, batch_size), -1, np.int32)
    table.reshape(-1)[: len(order)] = order
    return table


def deal(order: np.ndarray, rank: int, world: int, policy: str) -> np.ndarray:
    """Return the training rows of one of `world` processes: `order[rank::world]` after the tail was made even.

    `pad` first repeats leading rows of `order`, `drop` first drops the last ones, so that every process has the same
    number. With fewer rows than processes, `pad` repeats as often as needed and `drop` leaves none.
    """
    if policy not in POLICIES:
        raise DataError(f"policy must be one of {', '.join(POLICIES)}, found {policy!r}")
    _check_rank(rank, world)
    missing = -len(order) % world
    if policy == "drop":
        order = order[: len(order) - len(order) % world]
    elif missing and len(order):
        order = np.concatenate([order, np.resize(order, missing)])
    return order[rank::world]


def validation_rows(rows: int, rank: int, world: int) -> np.ndarray:
    """Return rows `rank::world`, unpadded: each row is scored by exactly one process, and a process may have none."""
    _check_rank(rank, world)
    return np.arange(rank, rows, world)


@dataclass(frozen=True)
class Share:
    """The rows of every batch that one process holds: some of the equal parts that a batch is cut into.

    Attributes:
        parts: how many a batch is cut into.
        mine: numbers of those this process holds, ascending; another process may hold some of them, too.
        pads: a batch that cannot be cut is filled up; else every process holds all of it.
    """

    parts: int
    mine: tuple[int, ...]
    pads: bool = True

    def full(self, rows: int) -> int | None:
        """Rows of a batch of `rows` once it is filled up; None for one that stays whole."""
        full = -(-rows // self.parts) * self.parts
        return full if full == rows or self.pads else None

    def places(self, rows: int) -> np.ndarray:
        """Places of this process's rows in a batch of `rows`, int64 [m] in the order of its parts; -1 fills up."""
        full, places = self.full(rows), np.arange(rows)
        if full is None:
            return places
        filled = np.concatenate([places, np.full(full - rows, -1)])
        return filled.reshape(self.parts, -1)[list(self.mine)].reshape(-1)


def _check_rank(rank: int, world: int) -> None:
    if world < 1 or not 0 <= rank < world:
        raise DataError(f"rank must be in 0..world-1, found rank {rank} of world {world}")
