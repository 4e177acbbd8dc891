"""What torch processes do in the tests of joining, failing and leaving; `test_process_group.py` starts them."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nnx_jax.core.errors import ConfigError, NnxError
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.writer_only import made_where_written
from nnx_jax.torch import distributed
from nnx_jax.torch.distributed import DDP, current_world, init_process_group, open_world, shutdown, writer_only
from nnx_jax.torch.process_group import broke_off


class Writes(Callback):
    """A callback that notes where it is made."""

    made: list[int] = []

    def __init__(self, rank: int) -> None:
        self.made.append(rank)


def said(work: Any) -> Any:
    """What a call returned, or its error's class, base classes and text."""
    try:
        return work()
    except Exception as error:
        bases = [each.__name__ for each in (ValueError, RuntimeError, TypeError) if isinstance(error, each)]
        return [type(error).__name__, bases, str(error)]


def sum_over_all(rank: int) -> float:
    """A collective operation: every process gives its rank + 1."""
    given = torch.tensor([rank + 1.0])
    dist.all_reduce(given)
    return float(given)


def hello() -> list[Any]:
    """Where this process is, as the group has it."""
    rank, world = init_process_group()
    return [rank, world, dist.get_rank(), dist.get_world_size(), sum_over_all(rank)]


def everything() -> dict[str, Any]:
    """A group that does all there is to do without training, and leaves."""
    rank, world = init_process_group(timeout_seconds=1.0)
    seen: dict[str, Any] = {"again": [rank, world, *init_process_group()], "backend": dist.get_backend()}
    seen["sum"] = sum_over_all(rank)
    seen["writer 2"] = said(lambda: current_world(DDP(writer_rank=2).writer_rank))
    seen["without DDP"] = said(lambda: open_world(None))
    seen["with a word"] = said(lambda: open_world("ddp"))
    seen["with DDP"] = [open_world(DDP(writer_rank=1)).writes, open_world(DDP()).writes]
    rows = {"x": np.arange(5, dtype=np.float32)[:, None], "y": np.arange(5, dtype=np.int32)}
    train, held = distributed.train_loader(rows, 2, seed=3), distributed.validation_loader(rows, 2)
    seen["train"] = [len(train), train.rank, train.world, train.seed]
    seen["validation"] = [int(y) for batch in held for y, kept in zip(batch["y"], batch["mask"], strict=True) if kept]
    for name, writes in (("first", rank == 0), ("second", rank == 1)):
        Writes.made = []
        callback = writer_only(lambda: Writes(rank))
        made_where_written([callback], writes)
        made_where_written([callback], writes)
        seen[f"made {name}"] = [Writes.made, callback.distributed]
    begun = time.monotonic()
    seen["left"] = said(lambda: [shutdown(timeout_seconds=20), shutdown(), shutdown(timeout_seconds=0.1)])
    seen["seconds"] = time.monotonic() - begun
    seen["initialised"] = dist.is_initialized()
    seen["after"] = said(lambda: current_world())
    seen["joined again"] = [*init_process_group(timeout_seconds=20), sum_over_all(rank)]
    seen["talks again"] = current_world().gather("once more", rank)
    return seen


def adopts() -> list[Any]:
    """The script calls torch's own function; the group is the one it made."""
    shutdown(timeout_seconds=20)
    os.environ["MASTER_PORT"] = os.environ["TESTS_OTHER_PORT"]
    dist.init_process_group("gloo")
    rank, world = init_process_group(timeout_seconds=20)
    return [rank, world, current_world().gather("adopted", rank), current_world().timeout_seconds]


def late(seconds: float, timeout: float) -> Any:
    """nnx:B198: rank 1 comes to the end so much later; rank 0 gives up, and ends like any program."""
    rank, _ = init_process_group()
    print("going", flush=True)
    if rank == 1:
        time.sleep(seconds)
    begun = time.monotonic()
    outcome = said(lambda: shutdown(timeout_seconds=timeout))
    seconds = time.monotonic() - begun
    told = {"outcome": outcome, "seconds": seconds, "group": init_process_group() if rank == 0 else None}
    if rank == 0:  # leaves it to the end of the process
        print(told, flush=True)
        raise SystemExit(0)
    return told


def fail_and_end(failing: int) -> None:
    """One raises outside an agreement; the other one, who waits for it, learns of it. Both end by their own errors."""
    world = current_world()
    print("going", flush=True)
    if world.rank == failing:
        time.sleep(0.3)
        raise ConfigError("wrong here")
    world.gather("together", None)


def wait_for_the_lost(rounds: int, agree: bool = True) -> None:
    """All add up over and over; a fault comes from outside. Whoever notices says so and ends."""
    world = current_world()
    sum_over_all(world.rank)
    print("going", flush=True)
    begun = time.monotonic()
    for number in range(rounds):
        try:
            sum_over_all(world.rank)
            if agree:
                world.gather(f"round {number}", None)
            begun = time.monotonic()
            time.sleep(0.05)
        except Exception as error:
            kind = "broke off" if broke_off(error) else "told" if isinstance(error, NnxError) else "unknown"
            print(f"{kind} after {time.monotonic() - begun:.1f} s {type(error).__name__}: {error}", flush=True)
            raise


def hang(rank: int) -> None:
    """One never comes to a collective operation that the others are in."""
    world = current_world()
    sum_over_all(world.rank)
    print("going", flush=True)
    if world.rank == rank:
        time.sleep(600)
    begun = time.monotonic()
    try:
        sum_over_all(world.rank)
    except Exception as error:
        print(f"after {time.monotonic() - begun:.1f} s {broke_off(error)}", flush=True)
        raise
