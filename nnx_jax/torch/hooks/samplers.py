"""What a DDPHook does to a torch run of several processes: settings of the wrapper, and samplers for loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from nnx_jax.core.errors import ConfigError
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.hooks.ddp import DDPHook
from nnx_jax.params.run import RunSpec
from nnx_jax.spmd.world import World
from nnx_jax.torch.allowed import DDP

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers",
)  # fmt: skip
"""Settings of a DataLoader that another one of the same rows has too."""


class SampledLoader:
    """One process's part of a DataLoader: what its distributed sampler gives, in the order of the epoch.

    Args:
        loader: with such a sampler.
        sampler: tells the epoch to.

    Attributes:
        rank: this process.
        partition: how the rows are dealt.
        generator: what the loader draws from, if it has its own.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        self._loader, self._sampler = loader, sampler
        self.rank = int(sampler.rank)
        rows = len(loader.dataset)  # type: ignore[arg-type]  # a sampler has counted them
        self.partition = {"policy": type(sampler).__name__, "rows": rows, "world": int(sampler.num_replicas)}
        self.partition |= {
            name: int(v) for name in ("seed", "shuffle") if (v := getattr(sampler, name, None)) is not None
        }

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is iterated next."""
        self._sampler.set_epoch(epoch)


def hook_of(hooks: Iterable[Any]) -> DDPHook | None:
    """The first DDPHook among hooks; None without one."""
    return next((hook for hook in hooks if isinstance(hook, DDPHook)), None)


def with_settings(given: DDP, hook: DDPHook | None) -> DDP:
    """The settings of a group, with those of a DDPHook that torch's wrapper takes."""
    if hook is None or hook.find_unused_parameters is None:
        return given
    return dataclasses.replace(given, find_unused_parameters=hook.find_unused_parameters)


def with_samplers(feeds: Mapping[str, Any], spec: RunSpec, hook: DDPHook | None, world: World) -> dict[str, Any]:
    """The feeds, of which the training loader gives every process rows of its own; alone, as they are.

    A DataLoader without a distributed sampler gets one; a loader that deals rows itself, and one that is no DataLoader,
    stay what they are.

    Raises:
        ConfigError: (a ValueError) a DataLoader whose batches a sampler of the user's own makes.
    """
    loader: Any = spec.training.train_loader
    if hook is None or world.alone or not isinstance(loader, DataLoader):
        return dict(feeds)
    made = LoaderFeed(_sampled(loader, hook, world), data_id=spec.training.data_id, wide=spec.precision == "float64")
    return {**feeds, "train": made}


def _sampled(loader: DataLoader[Any], hook: DDPHook, world: World) -> Any:
    nested = getattr(loader.batch_sampler, "sampler", None)
    there = next((each for each in (loader.batch_sampler, loader.sampler, nested) if _is_distributed(each)), None)
    if there is not None:
        return SampledLoader(loader, there)
    if isinstance(loader.dataset, IterableDataset):
        return loader
    if type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"DDPHook: the batches of train_loader come from a {type(loader.batch_sampler).__name__}, which does not "
            "know of processes; give it num_replicas, rank and set_epoch, or give the loader a batch_size"
        )
    shuffle = isinstance(loader.sampler, RandomSampler)
    options = {"num_replicas": world.size, "rank": world.rank, "shuffle": shuffle, "seed": 0}
    options = {**options, "drop_last": loader.drop_last, **hook.sampler_kwargs}
    sampler = (hook.sampler_cls or DistributedSampler)(loader.dataset, **options)
    kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
    return SampledLoader(DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler, **kept), sampler)


def _is_distributed(sampler: Any) -> bool:
    return all(hasattr(sampler, name) for name in ("num_replicas", "rank", "set_epoch"))
