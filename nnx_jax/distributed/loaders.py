"""Loaders of this process's rows, in the group that it is in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx_jax.distributed.group import group_place

if TYPE_CHECKING:
    from nnx_jax.data.deal import DealtLoader


def train_loader(dataset: Any, batch_size: int, *, policy: str = "pad", seed: int = 0) -> DealtLoader:
    """Return this process's training batches; one permutation an epoch is dealt to all processes.

    All processes take the same number of steps: "pad" repeats leading rows of the permutation until it can be dealt
    evenly, "drop" leaves its last rows out.

    Args:
        dataset: a dataset, arrays, or a sequence of items; the same on every process.
        batch_size: rows of a batch in this process; the update is made of all processes' batches, in rank order.
        seed: epoch `e` has the order of `seed + e`.

    Raises:
        ProcessGroupError: (a RuntimeError) this process is in no group.
        DataError: (a ValueError) no rows, a batch size below 1, another policy, a negative seed.
        TypeError: a dataset without a length.
    """
    from nnx_jax.data.deal import dealt_loader

    rank, world = group_place()
    return dealt_loader(dataset, batch_size, policy=policy, seed=seed, rank=rank, world=world)


def validation_loader(dataset: Any, batch_size: int) -> DealtLoader:
    """Return this process's validation batches: rows `rank::world`, so that each is scored once; maybe none.

    Raises:
        ProcessGroupError, DataError, TypeError: as of `train_loader`.
    """
    from nnx_jax.data.deal import validation_shard

    rank, world = group_place()
    return validation_shard(dataset, batch_size, rank=rank, world=world)
