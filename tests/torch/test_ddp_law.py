"""The law of torch's updates: by two or three gloo processes they are those of one process on the union of the batches.

Where every number is a small whole one over a power of two, bit for bit; else to the rounding of sums in another order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import ROOT, SCRUBBED, Ended, Group, results, wait_for_all, wait_until_said
from tests.torch import ddp_law

pytestmark = pytest.mark.slow

LAW = "tests.torch.ddp_law"
TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
"""Of float32 sums of up to 30 numbers of the order of 1 in another order: 30 * 2**-24 of their sum is 2e-6 of it, and
the rate takes 2**-6 of that."""
WORLDS = (2, 3)
CASES = [
    *(f"{kind} {window} {policy}" for kind in ("exact", "ignored") for window, policy in ddp_law.PAIRS),
    "additive", "two means", "fewer rows than a batch", "unused", "a shard ignored", "a window ignored", "hooks",
]  # fmt: skip


@pytest.fixture(scope="module", params=WORLDS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Any, Any]:
    """(processes, what each of them made, what one process made of the union)."""
    world, folder = request.param, tmp_path_factory.mktemp("law")
    given = {"folder": str(folder / "group"), "world": world}
    found = results(f"{LAW}:laws", world, args=given, timeout=200, framework="torch")
    return world, found, ddp_law.laws(str(folder / "one"), world)


@pytest.mark.parametrize("case", CASES)
def test_one_process_on_the_union(seen: Any, case: str) -> None:
    """nnx:B201, nnx:B202, nnx:B204, nnx:B205, nnx:B206, nnx:S50, nnx:S53, nnx:S55, nnx:S56, nnx:S58, nnx:S61

    Windows of one and two microbatches, padded and dropped rows, ignored labels, a clip, an additive loss, terms of
    different denominators, a rank without a row or a label that counts, a whole window without one, a parameter that
    some microbatches do not use, and update hooks.
    """
    world, found, one = seen
    wanted = one[case]
    for each in found:
        made = each[case]
        assert made["id"] == wanted["id"]
        assert made["skipped"] == wanted["skipped"]
        assert made["records"] == found[0][case]["records"]
        assert made["weights"] == found[0][case]["weights"]
        for name, value in wanted["weights"].items():
            if case.startswith("exact") and world == 2:
                assert made["weights"][name] == value
            np.testing.assert_allclose(made["weights"][name], value, err_msg=name, **TOLERANCE)
        for row, want in zip(made["records"], wanted["records"], strict=True):
            for name, value in want.items():
                if isinstance(value, float):
                    np.testing.assert_allclose(row[name], value, err_msg=name, **TOLERANCE)
                else:
                    assert row[name] == value, name


def test_gradients_follow_the_end_of_the_window(seen: Any) -> None:
    """case:A10: windows of two and of one microbatch; ranks with factors 1, 3, 7 and 2, 5, 11 move by 11 and by 18."""
    world, found, _ = seen
    if world == 2:
        assert [each["A10"]["weights"] for each in found] == [{"a": -29.0, "b": 0.0}] * 2
        norms = [row["grad_norm"] for row in found[0]["A10"]["records"] if row["kind"] == "update"]
        assert norms == [11.0, 18.0]


def test_a_parameter_that_one_microbatch_uses(seen: Any) -> None:
    """case:A11: one that only the first of a window uses, or only the last, or none of a whole window."""
    world, found, _ = seen
    if world == 2:
        assert [each["A11"]["weights"] for each in found] == [{"a": -3.0 - 20.0, "b": -8.0}] * 2


def test_a_window_without_a_label_is_no_update(seen: Any) -> None:
    """nnx:B205, nnx:S55: skipped on every rank; a mean of the loss's own, 0/0, is a FloatingPointError on all."""
    _, found, one = seen
    assert one["a window ignored"]["skipped"] == [1, 0]
    for each in found:
        assert "FloatingPointError" in each["0/0"]["kinds"], each["0/0"]
        assert each["0/0"]["seconds"] < 30


def test_noise_is_each_process_s_own(seen: Any) -> None:
    """nnx:B211, nnx:S86: dropout runs, and every rank drops other units."""
    _, found, _ = seen
    drawn = [each["dropout"]["kept"] for each in found]
    assert all(each["dropout"]["status"] == "finished" for each in found)
    assert all(one != other for place, one in enumerate(drawn) for other in drawn[:place])


def test_gradients_are_exchanged_once_an_update(seen: Any) -> None:
    """nnx:B212, nnx:S53: one reduction for each of two windows of two microbatches, by either way, to equal weights."""
    for each in seen[1]:
        assert each["reductions"]["updates"] == [2, 2]
        assert each["reductions"]["sockets"] == [2, 0]
        assert each["reductions"]["all_reduce"] == 2, each["reductions"]["names"]
        assert each["reductions"]["equal"]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Ended]]]:
    """How each process of several trainings ended."""
    folder = tmp_path_factory.mktemp("faults")
    with contextlib.ExitStack() as stack:

        def start(function: str, seconds: float, name: str, **args: Any) -> Group:
            given = {"folder": str(folder / name), **args}
            group = Group(f"{LAW}:{function}", 2, framework="torch", timeout_seconds=seconds, args=given)
            stack.enter_context(group)
            return group

        groups = {
            "torn": start("broken_by_a_dataset", 20, "torn", failing=1),
            "killed": start("trains_for_long", 60, "killed"),
            "stopped": start("trains_for_long", 8, "stopped"),
            "asked": start("trains_for_long", 60, "asked"),
            "last": start("last_cannot_be_written", 60, "last"),
        }
        for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP), ("asked", signal.SIGTERM)):
            wait_until_said(groups[name], b"going")
            groups[name].send(1, number)
            groups[name].begun = time.monotonic()
        yield wait_for_all(groups, 120, hanging={"stopped": 1})


def test_a_dataset_that_fails_on_one_process(faults: Any) -> None:
    """nnx:B232, nnx:S77: that process raises its error, the other ends by its name within the group's timeout."""
    first, second = faults["torn"]
    assert (first.code, second.code) == (1, 1), first.err + second.err
    assert "OSError: disk of row 17" in second.err
    assert "DistributedFailure" in first.err
    assert "disk of row 17" in first.err


@pytest.mark.parametrize("name, most", [("killed", 30), ("stopped", 40)])
def test_a_process_that_is_gone(name: str, most: float, faults: Any) -> None:
    """nnx:S77: killed, or stopped for longer than the timeout of 8 s: the other ends by an error of Python, in time."""
    first = faults[name][0]
    assert first.code == 1, first.err
    assert "ProcessGroupError" in first.err or "DistributedFailure" in first.err
    assert first.seconds < most


def test_a_signal_to_one_process_stops_all(faults: Any) -> None:
    """SIGTERM to rank 1: both end after the same update, with the exit code of an interrupted run."""
    first, second = faults["asked"]
    assert first.code == second.code != 0, first.err + second.err
    assert "Interrupted" in first.err
    assert "Interrupted" in second.err
    assert max(first.seconds, second.seconds) < 30


def test_a_commit_that_fails_on_the_writer(faults: Any) -> None:
    """nnx:B216, nnx:S67: its OSError there, a DistributedFailure that says which commit elsewhere, in time."""
    first, second = (each.result for each in faults["last"])
    assert "OSError" in first["kinds"], first
    assert "no space left for LAST" in first["text"]
    assert second["type"] == "DistributedFailure", second
    assert "rank 0" in second["text"]
    assert "epoch 0" in second["text"]
    assert max(first["seconds"], second["seconds"]) < 30


def test_the_recipe_under_torchrun(tmp_path: Path) -> None:
    """nnx:S41, nnx:S42, nnx:S43, nnx:B203: torchrun starts two processes, or one; both train the same model."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "from tests.torch.ddp_law import dyadic, update\n"
        "from nnx_jax.torch import distributed\n"
        "from pathlib import Path\n"
        "rank, world = distributed.init_process_group(timeout_seconds=60)\n"
        "found = update(Path(sys.argv[1]), 'run', dyadic(16), 8 // world, world)\n"
        "print(f\"rank {rank} of {world}: {found['id']} {found['weights']['weight']}\", flush=True)\n"
        "distributed.shutdown()\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said: dict[int, set[str]] = {}
    for world in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        done = subprocess.run(
            [*command, str(script), str(tmp_path / f"of {world}")],
            env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
        assert len(lines) == world
        said[world] = {line.partition(": ")[2] for line in lines}
    assert len(said[1]) == 1
    assert said[1] == said[2] == {next(iter(said[1]))}
