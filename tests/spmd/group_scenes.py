"""What processes do in the tests of joining, failing and leaving; `test_process_group.py` starts them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

import numpy as np

from nnx_jax import distributed
from nnx_jax.core.errors import ConfigError, NnxError
from nnx_jax.distributed import DDP, DistributedManager, current_world, init_process_group, shutdown, writer_only
from nnx_jax.fit.group import open_world
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.writer_only import made_where_written
from nnx_jax.spmd.processes import leave


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


def everything() -> dict[str, Any]:
    """A group of two that does all there is to do without training, and leaves."""
    import jax

    rank, world = init_process_group(timeout_seconds=1.0, coordinator="nowhere:1", num_processes=9, process_id=8)
    seen: dict[str, Any] = {"again": [rank, world, *init_process_group()]}
    seen["jax"] = [jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count()]
    seen["flags"] = os.environ["XLA_FLAGS"]
    seen["manager"] = [DistributedManager().rank, DistributedManager().world_size, DistributedManager().distributed]
    seen["sum"] = _sum_over_all(rank)
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
    seen["after"] = said(lambda: current_world())
    seen["joined again"] = said(lambda: init_process_group())
    return seen


def _sum_over_all(rank: int) -> float:
    """A collective operation: every process gives its rank + 1 on each of its devices."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = np.full((jax.local_device_count(), 1), rank + 1, np.float32)
    shape = (jax.device_count(), 1)
    given = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), rows, shape)
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(given)
    return float(total)


def late(seconds: float, timeout: float) -> Any:
    """nnx:B198: rank 1 comes to the end so much later; rank 0 gives up, and ends like any program."""
    rank, _ = init_process_group()
    print("going", flush=True)
    if rank == 1:
        time.sleep(seconds)
    begun = time.monotonic()
    outcome = said(lambda: shutdown(timeout_seconds=timeout))
    seconds = time.monotonic() - begun
    return {"outcome": outcome, "seconds": seconds, "group": init_process_group() if rank == 0 else None}


def fail_and_leave(failing: int, code: int) -> None:
    """One raises outside an agreement and leaves with its code; the others, who wait for it, leave with 2."""
    world = current_world()
    print("going", flush=True)
    try:
        if world.rank == failing:
            time.sleep(0.3)
            raise ConfigError("wrong here")
        world.gather("together", None)
    except NnxError as error:
        distributed.tell_failure("work", error)
        print(f"{type(error).__name__}: {error}", flush=True)
        leave(code if world.rank == failing else 2)


def wait_for_the_lost(where: str, seconds: float = 600.0) -> None:
    """All work together until a fault comes from outside. Whoever notices says so and leaves; nobody looks for it.

    Args:
        where: what they are in: "sums" over all devices, "agreements", "both", or "own work" that waits for nobody.
    """
    world = current_world()
    _sum_over_all(world.rank)
    print("going", flush=True)
    end, number = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < end:
            number += 1
            if where in ("sums", "both"):
                _sum_over_all(world.rank)
            if where in ("agreements", "both"):
                world.gather(f"round {number}", None)
            if where == "own work":
                time.sleep(0.05)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        leave(1)


def hang(rank: int) -> None:
    """One never comes to a collective operation that the others are in."""
    world = current_world()
    _sum_over_all(world.rank)
    print("going", flush=True)
    begun = time.monotonic()
    try:
        if world.rank == rank:
            time.sleep(600)
        _sum_over_all(world.rank)
    except Exception as error:
        print(f"after {time.monotonic() - begun:.1f} s {type(error).__name__}: {error}", flush=True)
        leave(1)


def end_the_script(rank: int, code: int, where: str) -> None:
    """One ends its script, after a `sys.exit` that came to nothing; the others are in a sum, or an agreement."""
    world = current_world()
    _sum_over_all(world.rank)
    print("going", flush=True)
    if world.rank == rank:
        with contextlib.suppress(SystemExit):
            sys.exit(7)
        sys.exit(code)
    begun = time.monotonic()
    try:
        _sum_over_all(world.rank) if where == "sums" else world.gather("together", None)
    except Exception as error:
        print(f"after {time.monotonic() - begun:.1f} s {type(error).__name__}: {error}", flush=True)
        leave(1)


def exit_in_vain(code: int) -> None:
    """A `sys.exit` that somebody caught says nothing about the end of the script, which leaves the group at its end."""
    with contextlib.suppress(SystemExit):
        sys.exit(code)
    current_world().gather("together", None)


def hello() -> list[Any]:
    """Where this process is, as the group has it."""
    import jax

    rank, world = init_process_group()
    return [rank, world, jax.process_index(), jax.local_device_count(), _sum_over_all(rank)]
