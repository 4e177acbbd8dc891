"""Run directories of several real processes: who writes what, what comes back where, what a failure or a kill leaves.

A start of processes takes seconds, so each shows many things; the same agreements over threads are in
`tests/runs/test_replica.py`.
"""

from __future__ import annotations

import errno
import random
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from nnx_jax.runs.audit import verify
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun
from tests import processes
from tests.spmd.process_store import (
    RUN_ID,
    differences,
    numbers,
    open_store,
    point,
    row,
    wanted,
)
from tools.fault.build import build, compiler
from tools.fault.ops import Fault

SCENES = "tests.spmd.process_store"
WRITERS = pytest.mark.parametrize("writer", [0, 1])
needs_compiler = pytest.mark.skipif(compiler() is None, reason="the preload shim needs a C compiler")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def told(root: Path) -> list[dict[str, Any]]:
    """What two processes of two devices say of the runs they wrote, by rank; JAX's service for preemptions is off."""
    env = {"JAX_ENABLE_PREEMPTION_SERVICE": "0"}
    return processes.results(f"{SCENES}:write_and_read", 2, devices=2, args={"root": str(root)}, env=env)


# Written by two processes of two devices ------------------------------------------------------------------------------


@WRITERS
def test_either_process_may_write(told: list[dict[str, Any]], root: Path, writer: int) -> None:
    """nnx:B214 pipekit:J15: with writer_rank=1 rank 1 writes; both see the same LAST after every commit, after a
    restart and at the end, and the same artifact. The run is whole: every file has its digest, the history its rows.
    The other process hashed none."""
    ends = [3, 2, True, {"format": "none"}]
    for name, right in (("last", [2, 1]), ("status", "interrupted"), ("end", ends), ("preemption", False)):
        assert [each[f"{name} {writer}"] for each in told] == [right, right]
    hashed = [each[f"hashed {writer}"] for each in told]
    assert hashed[writer] > 10
    assert hashed[1 - writer] == 0
    runs = root / f"writer{writer}"
    assert verify(runs, RUN_ID) == []
    assert NNRun.load(RUN_ID, runs).records == [row(epoch) for epoch in range(3)]
    assert sorted(path.name for path in runs.iterdir()) == [".leases", RUN_ID, "best"]
    assert [path for path in (runs / ".leases").iterdir() if path.suffix == ".seen"] == []


@WRITERS
def test_arrays_come_back_where_they_were(told: list[dict[str, Any]], writer: int) -> None:
    """Replicated, split over all devices, over processes, over both axes and inside each process, empty, and on the
    host (int64, float64): bit for bit in place and as numpy, although they were donated right after each commit.

    case:I19: saving and restoring ask for no service of JAX's that may be switched off.
    """
    assert [each[f"back {writer}"] for each in told] == [[], []]
    assert [each[f"host {writer}"] for each in told] == [[], []]


@WRITERS
def test_who_wrote_what(told: list[dict[str, Any]], root: Path, writer: int) -> None:
    """nnx:S68: whole arrays are the writer's alone; of the others each process wrote its part. Names are the model's
    own, and nothing tells one process's from another's."""
    generation = read_point(RunPaths(root / f"writer{writer}", RUN_ID)).directory
    parts = {path.relative_to(generation).as_posix() for path in generation.rglob("ocdbt.process_*")}
    assert parts == {f"state/ocdbt.process_{writer}", "shards/ocdbt.process_0", "shards/ocdbt.process_1"}
    leaves = read_point(RunPaths(root / f"writer{writer}", RUN_ID)).leaves
    assert sorted(leaves) == sorted(numbers(0))
    assert {name for name, leaf in leaves.items() if leaf.shards} == {
        "params/rows",
        "params/both",
        "params/processes",
    }
    assert {path.stat().st_mode & 0o077 for path in generation.rglob("*")} == {0}


def mesh(count: int) -> dict[str, Any]:
    """Places on so many devices of this one process."""
    devices = Mesh(np.array(jax.devices()[:count]), ("fsdp",), axis_types=(AxisType.Auto,))
    split = ("params/rows", "params/both", "params/inside")
    return {name: NamedSharding(devices, PartitionSpec("fsdp")) for name in split}


@WRITERS
@pytest.mark.parametrize("devices", [0, 1, 4])
def test_one_process_reads_what_two_wrote(told: list[dict[str, Any]], root: Path, writer: int, devices: int) -> None:
    """2 x 2 devices to 1 x 4, to one device, and to the host: nothing but the places changes."""
    stored = read_point(RunPaths(root / f"writer{writer}", RUN_ID))
    shardings: dict[str, Any] = mesh(4) if devices == 4 else {}
    if devices == 1:
        shardings = dict.fromkeys(("params/rows", "params/whole"), SingleDeviceSharding(jax.devices()[0]))
    loaded = stored.load(wanted(shardings))
    assert differences(loaded, 2) == []
    assert all(loaded[name].sharding == place for name, place in shardings.items())


def test_a_run_goes_on_in_one_process(told: list[dict[str, Any]], tmp_path: Path) -> None:
    """The store itself does not mind who went before; a commit of one process has no shards any more."""
    assert told
    with open_store(tmp_path) as store:
        commit_here(store, 0)
    assert not (read_point(RunPaths(tmp_path, RUN_ID)).directory / "shards").exists()


def commit_here(store: Any, epoch: int) -> None:
    store.history.append([row(epoch)])
    store.committer.commit(point(epoch, dict(numbers(epoch))))
    store.committer.drain()


# Failures -------------------------------------------------------------------------------------------------------------

NO_SPACE = {"error": errno.ENOSPC}
FAULTS = [
    (0, Fault("fail once", 1, ops=("rename",), pattern="*/LAST", **NO_SPACE)),
    (1, Fault("fail always", 1, ops=("write",), pattern="*/ocdbt.process_1/*", **NO_SPACE)),
    (1, Fault("fail once", 1, ops=("mkdir",), pattern="*/ocdbt.process_1*", **NO_SPACE)),
    (1, Fault("fail once", 1, ops=("fsync",), pattern="*/ocdbt.process_1", **NO_SPACE)),
    (0, Fault("fail always", 1, ops=("write",), pattern="*/ocdbt.process_0/*", **NO_SPACE)),
    (0, Fault("fail once", 1, ops=("rename",), pattern="*/manifests/*", **NO_SPACE)),
]


@pytest.fixture(scope="module")
def failed(told: list[dict[str, Any]], root: Path) -> list[list[dict[str, Any]]]:
    """What two processes of one device each say of commits that fail, by rank."""
    assert told  # one start at a time
    faults = [{"rank": rank, "fault": fault.to_json()} for rank, fault in FAULTS]
    return processes.results(
        f"{SCENES}:fail",
        2,
        args={"root": str(root / "faults"), "faults": faults},
        env={"LD_PRELOAD": str(build())},
    )


@needs_compiler
@pytest.mark.parametrize("case", range(len(FAULTS)))
def test_a_disk_that_fails_under_one_process(failed: list[list[dict[str, Any]]], case: int) -> None:
    """nnx:B216: whichever process the disk fails, it raises its own OSError and the other one DistributedFailure that
    names it and the epoch; LAST stands for both, and the same commit works once there is space again."""
    rank = FAULTS[case][0]
    own, other = failed[rank][case], failed[1 - rank][case]
    assert "OSError" in own["kinds"], own
    assert other["kinds"][0] == "DistributedFailure", other
    assert other["rank"] == rank
    assert f"(epoch {case + 1})" in other["stage"]
    for each in (own, other):
        assert each["stands"]
        assert each["again"] == {"kinds": []}
    assert own["last"] == other["last"]
    assert own["last"][1] == case + 1


@needs_compiler
def test_nothing_is_left_of_failed_commits(failed: list[list[dict[str, Any]]], root: Path) -> None:
    """The run verifies, its history has every row once, and no partial directory outlives the next commit."""
    assert failed
    paths = RunPaths(root / "faults", RUN_ID)
    assert verify(paths.root, RUN_ID) == []
    assert NNRun.load(RUN_ID, paths.root).records == [row(epoch) for epoch in range(len(FAULTS) + 1)]
    assert all(path.name.isdigit() for path in paths.generations.iterdir())


@needs_compiler
def test_two_processes_read_what_others_wrote(failed: list[list[dict[str, Any]]], root: Path) -> None:
    """2 x 2 devices to 2 x 1, by either writer, and 2 x 1 to 2 x 1."""
    assert failed
    roots = [str(root / name) for name in ("writer0", "writer1", "faults")]
    assert processes.results(f"{SCENES}:read", 2, args={"roots": roots}) == [[[], [], []]] * 2


# Kills ----------------------------------------------------------------------------------------------------------------

KILLED = {
    0: [("rename", "*/LAST"), ("write", "*/shards/*"), ("rename", "*/generations/*"), ("write", "*/idps.csv")],
    1: [("write", "*/ocdbt.process_1/*"), ("fsync", "*/ocdbt.process_1*"), ("mkdir", "*/shards*")],
}


def kill(root: Path, rank: int, fault: Fault) -> list[processes.Ended]:
    """Two processes, one of which is killed inside its second or third commit; how they ended."""
    args = {"root": str(root), "rank": rank, "fault": fault.to_json()}
    env = {"LD_PRELOAD": str(build())}
    return processes.run(f"{SCENES}:be_killed", 2, args=args, env=env, timeout=60, timeout_seconds=10)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_hangs_in_a_commit(tmp_path: Path, rank: int) -> None:
    """A process that is stopped and not gone: the other one ends within 30 s all the same and not well, LAST is whole,
    and once the stopped one is killed the run goes on."""
    args = {"root": str(tmp_path), "rank": rank}
    with processes.Group(f"{SCENES}:be_stopped", 2, args=args, timeout_seconds=10) as group:
        deadline = time.monotonic() + 60
        while not (tmp_path / "stopped").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (tmp_path / "stopped").exists()
        assert group.processes[1 - rank].wait(30) != 0
        ended = group.wait(0)
    check_whole(tmp_path)
    assert ended[rank].code == -9  # by the harness


def check_survived(root: Path, ended: list[processes.Ended], rank: int) -> None:
    """The killed one was killed, the other one ended in time and not well, the run is whole, and goes on."""
    assert ended[rank].code == -9, ended[rank].err
    assert ended[1 - rank].code not in (0, None), ended[1 - rank].err
    assert ended[1 - rank].seconds - ended[rank].seconds < 30
    check_whole(root)


def check_whole(root: Path) -> None:
    """LAST and everything it covers is there, and the next start goes on from it."""
    assert verify(root, RUN_ID) == []
    stored = read_point(RunPaths(root, RUN_ID))
    assert differences(stored.load_all(), stored.epoch) == []
    assert NNRun.load(RUN_ID, root).records == [row(epoch) for epoch in range(stored.epoch + 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # taking over the lease of a dead process
        with open_store(root) as store:
            commit_here(store, stored.epoch + 1)
    assert verify(root, RUN_ID) == []


@needs_compiler
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_is_killed_in_a_commit(tmp_path: Path, rank: int) -> None:
    """The writer as it replaces LAST, the other one as it writes its part: the survivor ends within 30 s and not well,
    LAST is whole, and the next start of the run goes on from it."""
    op, pattern = KILLED[rank][0]
    ended = kill(tmp_path, rank, Fault("kill before", 1, ops=(op,), pattern=pattern))
    check_survived(tmp_path, ended, rank)


@needs_compiler
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", range(23))
def test_one_of_two_is_killed_anywhere_in_a_commit(tmp_path: Path, seed: int) -> None:
    """A random file operation of either process, in one of two commits."""
    rng = random.Random(seed)
    rank = rng.randrange(2)
    mode = rng.choice(["kill before", "kill after"])
    if rng.random() < 0.5:
        op, pattern = rng.choice(KILLED[rank])
        fault = Fault(mode, 1, ops=(op,), pattern=pattern)
    else:
        fault = Fault(mode, rng.randint(1, 25 if rank == 0 else 6), pattern=f"{RUN_ID}/*")
    check_survived(tmp_path, kill(tmp_path, rank, fault), rank)
