"""The processes of one call of `train`: which group they are, and that every one of them was given the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax

from nnx_jax import distributed as group
from nnx_jax.core.errors import ConfigError, DistributedFailure, NnxError, ProcessGroupError
from nnx_jax.distributed.joined import group_size
from nnx_jax.fit.job import Job
from nnx_jax.loop.callbacks import Callback, CallbackList, overrides
from nnx_jax.spmd.world import ALONE, World

_MOST_SHOWN = 8
_SOON_SECONDS, _LATER_SECONDS = 0.5, 2.0
"""How long the news that a process is gone is waited for, once a computation broke off."""


def open_world(distributed: Any, what: str = "NNModel.train") -> World:
    """Return the processes that train together.

    Args:
        distributed: a DDP; None for a process alone.

    Raises:
        TypeError: something else.
        ProcessGroupError: (a RuntimeError) a DDP without a group, or a group of several processes without a DDP.
        ConfigError: (a ValueError) a writer_rank that this group does not have.
    """
    if distributed is None:
        if (size := max(group_size(), jax.process_count())) > 1:
            raise ProcessGroupError(
                f"{what} would train {size} models here, one in each process of this group, all writing the same run; "
                "train one together with distributed=DDP(), or start a single process"
            )
        return ALONE
    if not isinstance(distributed, group.DDP):
        raise TypeError(f"distributed must be a DDP, got {distributed!r}; from nnx_jax.distributed import DDP")
    world = group.current_world(distributed.writer_rank)
    world.broke_off = _broke_off
    return world


@contextlib.contextmanager
def told_to_all(world: World) -> Iterator[None]:
    """Tell the other processes of an error, and give one that came from elsewhere its name.

    Raises:
        DistributedFailure: a computation of all processes broke off because one of them failed, or is gone.
        ProcessGroupError: it broke off, and nobody knows why.
    """
    try:
        yield
    except BaseException as error:
        if world.alone:
            raise
        if world.broke_off(error):
            raise _named(world, error) from error
        with contextlib.suppress(Exception):
            world.fail("training", error)
        raise


def _named(world: World, error: BaseException) -> ProcessGroupError:
    """Who made a computation of all processes break off."""
    lost = world.lost(_SOON_SECONDS)  # before the store is asked, which may be gone with it
    failure = None
    with contextlib.suppress(Exception):
        failure = world.failure()
    if (found := failure or lost or world.lost(_LATER_SECONDS)) is not None:
        return found
    return ProcessGroupError(
        f"a computation that all {world.size} processes take part in broke off: {error}. One of them is gone, or was "
        "busy with something else for too long; see what the others say. The same command continues from the last "
        "commit"
    )


def _broke_off(error: BaseException) -> bool:
    """A collective operation failed; which class that is depends on the number of devices."""
    if isinstance(error, NnxError) or not isinstance(error, Exception):
        return False
    text = str(error).lower()
    return isinstance(error, jax.errors.JaxRuntimeError | ValueError) and ("gloo" in text or "collective" in text)


def check_callbacks(callbacks: CallbackList) -> None:
    """Check that every callback says on which process it runs.

    Raises:
        ConfigError: (a ValueError) one that does not, one that cannot run, or one of the writer that has state or
            changes the network.
    """
    for callback in callbacks.callbacks:
        name, where = type(callback).__name__, callback.distributed
        if where == "unsupported":
            raise ConfigError(
                f"callback {name} writes where it is made, so it would write on every process; have it made on the "
                f"writer alone: nnx_jax.distributed.writer_only(lambda: {name}(...))"
            )
        if where not in ("all", "writer"):
            raise ConfigError(
                f"callback {name} does not say where it runs when several processes train one model; set "
                '`distributed = "all"` in its class (it writes nothing and decides the same everywhere) or '
                '`distributed = "writer"` (it runs on the process that writes the run, and decides nothing)'
            )
        if where == "writer" and _stateful(callback):
            raise ConfigError(
                f"callback {name} runs on the writer alone and has state that checkpoints hold; a resume would have it "
                'on one process only. Declare it distributed = "all", or give it no component_name'
            )
        if where == "writer" and overrides(callback, "checkpoint_transforms"):
            raise ConfigError(
                f"callback {name} runs on the writer alone and changes the network (checkpoint_transforms); the other "
                'processes would keep another one. Declare it distributed = "all"'
            )


def _stateful(callback: Callback) -> bool:
    return callback.component_spec() is not None


def check_same(
    world: World, job: Job, config: Mapping[str, Any], callbacks: CallbackList, around: Mapping[str, Any]
) -> None:
    """Compare what the processes are about to run, before the first of them touches the run's directory.

    Args:
        around: the framework's version and devices, see `Framework.around`.

    Raises:
        ConfigError: (a ValueError) on every process, with each difference and every rank's value.
        DistributedFailure: on every process, where their epochs have different numbers of batches.
    """
    if world.alone:
        return
    facts = {
        "run id": job.run_id,
        "nnx_jax": version("nnx_jax"),
        **around,
        "data": {split: feed.descriptor() for split, feed in job.engine.feeds.items()},
        "callbacks": [f"{type(each).__name__} on {each.distributed}" for each in callbacks.callbacks],
        "configuration": config,
        "batches of an epoch": job.engine.n_batches,
    }
    found = [dict(_flat(facts)) for facts in world.gather("what each process is given", facts)]
    lines = list(_differences(found))
    if not lines:
        return
    if all(line.startswith("batches of an epoch") for line in lines):
        counts = [each["batches of an epoch"] for each in found]
        other = next(rank for rank, count in enumerate(counts) if count != counts[world.rank])
        raise DistributedFailure(other, "what each process is given", "DataError", lines[0])
    more = f"\n  and {len(lines) - _MOST_SHOWN} more" if len(lines) > _MOST_SHOWN else ""
    told = "\n  ".join(lines[:_MOST_SHOWN])
    raise ConfigError(f"the processes were not given the same; nothing was written:\n  {told}{more}")


def _differences(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for name in dict.fromkeys(name for each in found for name in each):
        values = [each.get(name, "not given") for each in found]
        if any(value != values[0] for value in values):
            yield f"{name}: " + ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(item, f"{at}.{name}" if at else str(name))
    else:
        yield at, value
