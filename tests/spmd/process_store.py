"""What processes of a group do with a run directory; called by `tests.processes` in each of them.

Every array is a function of the epoch, so a stored state is known by its numbers.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.core import fsio
from nnx_jax.runs.commit import CommitPoint
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.store import RunStore

RUN_ID = "00112233445566ff"
COLUMNS = ("epoch", "loss")
STEPS = 4


def numbers(epoch: int) -> dict[str, np.ndarray]:
    """Every array of an epoch, as one process would have it."""
    rng = np.random.default_rng(epoch)
    return {
        "params/whole": rng.standard_normal((3, 5)).astype(np.float32),
        "params/rows": rng.standard_normal((8, 6)).astype(np.float32),
        "params/both": rng.standard_normal((4, 4)).astype(np.float64).astype(np.float32),
        "params/processes": rng.integers(0, 9, (4, 2), np.int32),
        "params/inside": rng.standard_normal((8,)).astype(np.float32),
        "params/empty": np.zeros((0, 3), np.float32),
        "host/count": np.asarray(2**40 + epoch, np.int64),
        "host/rate": np.asarray([0.1 * epoch, 1 / 3], np.float64),
    }


def places() -> dict[str, Any]:
    """Where each array lies on two processes with any number of devices; none for a host array."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    mesh = Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    specs = {
        "params/whole": (),
        "params/rows": (("data", "fsdp"),),
        "params/both": ("fsdp", "data"),
        "params/processes": ("data",),
        "params/inside": ("fsdp",),
        "params/empty": (),
    }
    return {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}


def placed(epoch: int) -> dict[str, Any]:
    """The arrays of an epoch where they lie; what is on the host differs, and counts, on the writer alone."""
    import jax

    shardings, found = places(), {}
    for name, array in numbers(epoch).items():
        if name in shardings:
            found[name] = jax.make_array_from_callback(array.shape, shardings[name], lambda index, a=array: a[index])
        else:
            found[name] = array
    return found


def wanted(shardings: dict[str, Any]) -> dict[str, Any]:
    """Descriptions for a restore: those with a place come back there."""
    import jax

    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=shardings[name])
        if name in shardings
        else (array.shape, str(array.dtype))
        for name, array in numbers(0).items()
    }


def differences(arrays: dict[str, Any], epoch: int) -> list[str]:
    """Names of the arrays that are not those of an epoch, as far as this process holds them."""
    bad = []
    for name, right in numbers(epoch).items():
        array = arrays[name]
        shards = [(s.index, np.asarray(s.data)) for s in getattr(array, "addressable_shards", ())] or [((), array)]
        if any(data.dtype != right.dtype or data.tobytes() != right[index].tobytes() for index, data in shards):
            bad.append(name)
    return bad


def point(epoch: int, arrays: dict[str, Any], **more: Any) -> CommitPoint:
    """The commit of an epoch."""
    steps = STEPS * (epoch + 1)
    host = {"position": {"epoch": epoch + 1, "batch": 0}}
    fields = {"epoch": epoch, "step": steps, "batch": steps, "arrays": arrays, "host": host, "best": True}
    return CommitPoint(**{**fields, "score": 1.0 / steps, **more})


def row(epoch: int) -> dict[str, Any]:
    """The history's row of an epoch."""
    return {"epoch": epoch, "loss": 1.0 / (epoch + 1)}


def open_store(root: str | Path, run_id: str = RUN_ID, **more: Any) -> RunStore:
    """Open the scenario's run."""
    return RunStore.open(root, run_id, {"train": {"n_epochs": 9}}, COLUMNS, **more)


def commit(store: RunStore, epoch: int, *, given: bool = False) -> None:
    """Write the row of an epoch and commit it; the arrays are donated as soon as the commit gives them back.

    Args:
        given: the row was written before, with a commit that failed.
    """
    import jax

    if not given:
        store.history.append([row(epoch)])
    arrays = placed(epoch)
    store.committer.commit(point(epoch, arrays))
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 + 7, tree), donate_argnums=0)
    jax.block_until_ready(overwrite({name: arrays[name] for name in places()}))
    store.committer.drain()


def attempted(work: Any) -> dict[str, Any]:
    """What came of a call: the classes and text of its error, and where another process failed."""
    try:
        work()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        stage, rank = getattr(error, "stage", None), getattr(error, "rank", None)
        return {"kinds": kinds, "text": str(error), "stage": stage, "rank": rank}
    return {"kinds": []}


def last(store: RunStore) -> list[int] | None:
    """Generation and epoch of LAST as this process knows it."""
    pointer = store.committer.last
    return None if pointer is None else [pointer.generation, pointer.epoch]


@contextlib.contextmanager
def hashed_files() -> Iterator[list[str]]:
    """The files whose digest is computed meanwhile."""
    real, seen = fsio.digest_file, []

    def digest_file(path: Any, **options: Any) -> Any:
        seen.append(str(path))
        return real(path, **options)

    fsio.digest_file = digest_file
    try:
        yield seen
    finally:
        fsio.digest_file = real


# Called in the processes ----------------------------------------------------------------------------------------------


def write_and_read(root: str) -> dict[str, Any]:
    """Two commits by either writer, each continued by both, and every array back where it was, and elsewhere."""
    import jax

    from nnx_jax import distributed

    told: dict[str, Any] = {}
    for writer in (0, 1):
        runs = Path(root) / f"writer{writer}"
        world = distributed.current_world(writer)
        with open_store(runs, world=world) as store:
            commit(store, 0)
            commit(store, 1)
            told[f"last {writer}"] = last(store)
        with hashed_files() as hashed, open_store(runs, world=distributed.current_world(writer)) as store:
            told[f"status {writer}"], told[f"hashed {writer}"] = store.status, len(hashed)
            assert store.point is not None
            told[f"back {writer}"] = differences(store.point.load(wanted(places())), 1)
            told[f"host {writer}"] = differences(store.point.load_all(), 1)
            commit(store, 2)
            final = store.finish({"format": "none"}).final
            told[f"end {writer}"] = [*(last(store) or ()), final, NNRun.load(RUN_ID, runs).artifact]
            told[f"preemption {writer}"] = bool(jax.config.jax_enable_preemption_service)  # type: ignore[attr-defined]
    return told


def read(roots: list[str]) -> list[list[str]]:
    """Arrays that are not as they were written, in runs of other geometries, placed on these devices."""
    found = []
    for root in roots:
        stored = read_point(RunPaths(root, RUN_ID))
        found.append(differences(stored.load(wanted(places())), stored.epoch))
    return found


def fail(root: str, faults: list[dict[str, Any]]) -> list[Any]:
    """One commit for each fault, tried again once the fault is over.

    Args:
        faults: `rank` whose file operations fail, and the fault.
    """
    from nnx_jax import distributed
    from tools.fault.ops import Fault, Shim

    shim = Shim(os.environ["LD_PRELOAD"])
    told = []
    world = distributed.current_world()
    with open_store(root, world=world) as store:
        commit(store, 0)
        for epoch, each in enumerate(faults, 1):
            before = last(store)
            if world.rank == each["rank"]:
                shim.arm(Path(root), Fault(**{**each["fault"], "ops": tuple(each["fault"]["ops"])}), Path(os.devnull))
            came = attempted(lambda e=epoch: commit(store, e))
            shim.disarm()
            stands = last(store) == before
            again = attempted(lambda e=epoch: commit(store, e, given=True))
            told.append({**came, "stands": stands, "again": again, "last": last(store)})
    return told


def be_killed(root: str, rank: int, fault: dict[str, Any], epochs: int = 3) -> None:
    """Commit until the fault kills the process of a rank inside a commit; the others must end by themselves."""
    from nnx_jax import distributed
    from tools.fault.ops import Fault, Shim

    shim = Shim(os.environ["LD_PRELOAD"])
    world = distributed.current_world()
    with open_store(root, world=world) as store:
        commit(store, 0)
        if world.rank == rank:
            shim.arm(Path(root), Fault(**{**fault, "ops": tuple(fault["ops"])}), Path(os.devnull))
        for epoch in range(1, epochs):
            commit(store, epoch)


def be_stopped(root: str, rank: int) -> None:
    """Commit twice; a process stops for good at the begin of the second commit, and says so before."""
    from nnx_jax import distributed

    world = distributed.current_world()
    with open_store(root, world=world) as store:
        commit(store, 0)
        if world.rank == rank:
            Path(root, "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        commit(store, 1)
