"""A run saved on two processes of two devices, taken on by other numbers of them (E1 of the fault plan)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import processes
from tests.e2e.group_runs import error, train
from tests.spmd import process_geometry

SCENES = "tests.spmd.process_geometry"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The runs directory, and what either process says of its run there."""
    root = tmp_path_factory.mktemp("geometry")
    one, other = processes.results(f"{SCENES}:save", 2, devices=2, args={"folder": str(root)})
    assert one == other
    return root, one


def test_what_last_says_of_its_processes(saved: tuple[Path, dict[str, Any]]) -> None:
    """nnx:B223 nnx:S70: names are those of one process, how many processes and devices there were is said, and what was
    split between them was written by both; the random state is one for all of them, drawn for the whole batch."""
    told = saved[1]
    assert told["geometry"]["processes"] == 2
    assert told["geometry"]["mesh"] == process_geometry.SAVED
    assert any(name.startswith("params/") for name in told["shards"])
    assert any(name.startswith("opt") for name in told["shards"])
    assert [name for name in told["names"] if name.startswith("rng")] == ["rng"]


def check(told: dict[str, Any], here: str) -> None:
    assert "ResumePointError" in told["kinds"], told
    assert "ValueError" in told["kinds"]
    assert "2 processes, mesh {fsdp: 4}" in told["text"]
    assert f"this run is on {here}. Nothing was restored" in told["text"]
    assert told["untouched"]
    assert told["status"] == "finished"
    assert set(told["exact"].values()) == {True}


@pytest.mark.parametrize("devices", [1, 4])
def test_one_process_takes_it_on(saved: tuple[Path, dict[str, Any]], devices: int) -> None:
    """nnx:S72 pipekit:H20: 1 x 1 and 1 x 4: the whole state is refused with both geometries before a run is made; the
    weights alone come bit for bit."""
    root, told = saved
    sizes = {"data": devices}
    here = "1 process, mesh {}" if devices == 1 else "1 process, mesh {data: 4}"
    check(process_geometry.take_on(str(root), told["id"], sizes), here)


def test_two_processes_of_other_devices_take_it_on(saved: tuple[Path, dict[str, Any]]) -> None:
    """nnx:S71: 2 x 1: the same on both processes, whose weights alone come bit for bit, too."""
    root, told = saved
    args = {"folder": str(root), "source": told["id"], "mesh": {"fsdp": 2}}
    for each in processes.results(f"{SCENES}:take_on", 2, args=args):
        check(each, "2 processes, mesh {fsdp: 2}")


def test_other_rules_on_the_same_mesh(tmp_path: Path) -> None:
    """The same devices, split otherwise: refused before anything is restored, with both rules; weights come exactly."""
    mesh = {"data": 2, "tensor": 2}
    rules = {"layers.0.kernel": (None, "tensor"), "*": ()}  # the first match counts, so their order is kept
    first = {"mesh": mesh, "sharding": rules}
    other = {"mesh": mesh, "sharding": {"layers.0.kernel": ("tensor",)}}
    _, run = train(tmp_path, epochs=1, call=dict(first))
    before = sorted(path.name for path in tmp_path.iterdir())
    told = error(lambda: train(tmp_path, epochs=2, resume_from_run_id=run.id, call=dict(other)))
    assert "ResumePointError" in told["kinds"], told
    made = "mesh {data: 2, tensor: 2}, sharding {'layers.0.kernel': [null, tensor], '*': []}; this run is on"
    assert made in told["text"]
    assert "tensor: 2}, sharding {'layers.0.kernel': [tensor]}. Nothing was restored" in told["text"]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    begins = process_geometry.Begins()
    more: dict[str, Any] = {"resume_from_run_id": run.id, "resume_mode": "weights_only", "salt": "w"}
    train(tmp_path, begins, epochs=1, call=dict(other), **more)
    stored = run.checkpoint().load_all()
    assert all(np.array_equal(stored[f"params/{name}"], value) for name, value in begins.weights.items())
    _, on = train(tmp_path, epochs=2, resume_from_run_id=run.id, call=dict(first))
    assert on.status == "finished"
