"""Joining a group, what a group offers, and how it ends: together, late, or with a process that is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.core.errors import ConfigError, ProcessGroupError
from nnx_jax.distributed import (
    DDP,
    current_world,
    init_process_group,
    shutdown,
    train_loader,
    validation_loader,
    writer_only,
)
from nnx_jax.fit.group import open_world
from nnx_jax.loop.callbacks import Callback, overrides
from nnx_jax.loop.writer_only import made_where_written
from tests.processes import Ended, Group, results, run, wait_for_all, wait_until_said

SCENES = "tests.spmd.group_scenes"
BAD_SECONDS = [0, -1, 0.0, float("inf"), float("nan"), True, "5", None]
PATIENCE = 120.0


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """What both processes of a group saw of its whole life."""
    return results(f"{SCENES}:everything", 2, devices=2, timeout_seconds=30)


def test_a_group_is_joined_once(seen: list[dict[str, Any]]) -> None:
    """nnx:B194 nnx:S41: a second call returns the same (rank, world), whatever it is given; JAX has one program."""
    assert [each["again"] for each in seen] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert [each["jax"] for each in seen] == [[0, 2, 2, 4], [1, 2, 2, 4]]
    assert [each["manager"] for each in seen] == [[0, 2, True], [1, 2, True]]
    assert [each["sum"] for each in seen] == [6.0, 6.0]
    assert all("--xla_cpu_collective_timeout_seconds=30" in each["flags"] for each in seen)


def test_ranks_of_a_group_are_checked(seen: list[dict[str, Any]]) -> None:
    """nnx:B196: writer_rank 2 in a world of 2 is a ValueError on every rank."""
    for each in seen:
        kind, bases, text = each["writer 2"]
        assert (kind, bases) == ("ConfigError", ["ValueError"])
        assert "DDP.writer_rank: got 2, but the ranks of this group are 0 to 1" in text


def test_training_in_a_group_is_asked_for(seen: list[dict[str, Any]]) -> None:
    """nnx:B195: without DDP it is refused, naming the world's size; a word is no DDP; the writer is the one chosen."""
    for rank, each in enumerate(seen):
        assert each["without DDP"][:2] == ["ProcessGroupError", ["RuntimeError"]]
        assert "would train 2 models here" in each["without DDP"][2]
        assert each["with a word"][:2] == ["TypeError", ["TypeError"]]
        assert each["with DDP"] == [rank == 1, rank == 0]


def test_loaders_know_the_group(seen: list[dict[str, Any]]) -> None:
    """nnx:B191: rank and world are the group's; validation rows 0, 2, 4 and 1, 3."""
    assert [each["train"] for each in seen] == [[2, rank, 2, 3] for rank in range(2)]
    assert [each["validation"] for each in seen] == [[0, 2, 4], [1, 3]]


def test_a_callback_of_the_writer_is_made_once_and_there(seen: list[dict[str, Any]]) -> None:
    """nnx:B221 nnx:S82: the factory runs once, on the writer, whichever that is."""
    assert [each["made first"] for each in seen] == [[[0], "writer"], [[], "writer"]]
    assert [each["made second"] for each in seen] == [[[], "writer"], [[1], "writer"]]


def test_the_end_of_a_group(seen: list[dict[str, Any]]) -> None:
    """nnx:S43 nnx:S44 nnx:S48 nnx:B197: all meet and leave; a second call does nothing, and then there is no group."""
    for each in seen:
        assert each["left"] == [None, None, None]
        assert each["seconds"] < 20
        assert each["after"][:2] == ["ProcessGroupError", ["RuntimeError"]]
        assert "JAX has started its devices in this process already" in each["joined again"][2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SLURM", "Open MPI", "Kubernetes"])
def test_a_scheduler_s_environment(name: str) -> None:
    """Two real processes with what a scheduler says to each, on this machine: they meet where JAX says and are one."""
    port = next(port for port in range(61440, 65536) if _is_free(port))
    environments = {
        "SLURM": {
            "SLURM_JOB_ID": str(port - 61440), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
            "SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}",
        },
        "Open MPI": {
            "OMPI_MCA_orte_hnp_uri": f"{(port - 61440) * 4096}.0;tcp://127.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        },
        "Kubernetes": {
            "JOB_COMPLETION_INDEX": "{rank}", "JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2",
        },
    }  # fmt: skip
    silent = {"NNX_JAX_COORDINATOR": "", "NNX_JAX_PROCESSES": "", "NNX_JAX_PROCESS": ""}
    found = results(f"{SCENES}:hello", 2, devices=2, env={**silent, **environments[name]})
    assert found == [[rank, 2, rank, 2, 6.0] for rank in range(2)]


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


@pytest.fixture(scope="module")
def faults() -> Iterator[dict[str, list[Ended]]]:
    """How each process of several groups ended.

    The groups start one after the other, since a start is work, and meet their faults at the same time, since that is
    waiting.
    """
    with contextlib.ExitStack() as stack:

        def start(function: str, timeout_seconds: float, ranks: tuple[int, ...] = (0, 1), **args: Any) -> Group:
            group = Group(f"{SCENES}:{function}", 2, timeout_seconds=timeout_seconds, ranks=ranks, args=args)
            stack.enter_context(group)
            if len(ranks) == 2:
                wait_until_said(group, b"going")
                group.begun = time.monotonic()
            return group

        groups = {
            "1 is missing": start("everything", 6, ranks=(0,)),
            "0 is missing": start("everything", 6, ranks=(1,)),
            "hangs": start("hang", 10, rank=1),
            "stopped": start("wait_for_the_lost", 10, where="both"),
            "killed": start("wait_for_the_lost", 60, where="both"),
            "late": start("late", 60, seconds=6, timeout=3),
            "raises on 1": start("fail_and_leave", 60, failing=1, code=3),
            "raises on 0": start("fail_and_leave", 60, failing=0, code=3),
        }
        for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            groups[name].send(1, number)
            groups[name].begun = time.monotonic()
        yield wait_for_all(groups, PATIENCE, hanging={"stopped": 1, "hangs": 1})


def test_one_that_comes_late_to_the_end(faults: dict[str, list[Ended]]) -> None:
    """nnx:B198 nnx:S45 nnx:S46 nnx:S47: the other gives up in time, by name, its group stays; both end with 0."""
    first, second = faults["late"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    kind, bases, text = first.result["outcome"]
    assert (kind, bases) == ("ProcessGroupError", ["RuntimeError"])
    assert "rank 1 of 2 did not come to leave the group within 3 s" in text
    assert 3 <= first.result["seconds"] < 6
    assert first.result["group"] == [0, 2]
    assert second.result["outcome"] is None
    assert "this process was started by" not in second.err


@pytest.mark.parametrize("name, codes", [("raises on 1", [2, 3]), ("raises on 0", [3, 2])])
def test_a_failure_outside_an_agreement(name: str, codes: list[int], faults: dict[str, list[Ended]]) -> None:
    """nnx:S77: the failing process says what happened, the other learns of it, and each ends with its own code."""
    failing = codes.index(3)
    assert [each.code for each in faults[name]] == codes, "\n".join(each.err for each in faults[name])
    assert faults[name][failing].out.splitlines()[-1] == "ConfigError: config: wrong here"
    told = f"DistributedFailure: process group: rank {failing} failed at 'work': ConfigError: config: wrong here"
    assert faults[name][1 - failing].out.splitlines()[-1] == told


@pytest.mark.parametrize("name, text", [
    ("1 is missing", "process 1 of 2 did not come within 6 s"),
    ("0 is missing", "process 0 of 2 could not be reached at 127.0.0.1:"),
])  # fmt: skip
def test_one_that_is_not_started(name: str, text: str, faults: dict[str, list[Ended]]) -> None:
    """Reliability P1: the others end in time with an error that says which process is missing; nobody is aborted."""
    [alone] = faults[name]
    assert alone.code == 1
    assert alone.err.splitlines()[-1].startswith("nnx_jax.core.errors.ProcessGroupError: process group: " + text)


def test_one_that_is_killed(faults: dict[str, list[Ended]]) -> None:
    """case:L17: the survivor ends by itself, at once, with 1, and says who is gone."""
    survivor, killed = faults["killed"]
    assert killed.code == -signal.SIGKILL
    assert survivor.code == 1, survivor.err
    assert names_the_lost(1, survivor), survivor.out + survivor.err
    assert survivor.seconds < 15


def test_one_that_is_stopped(faults: dict[str, list[Ended]]) -> None:
    """Reliability P2: it goes silent, and the other does not wait for longer than it takes to be sure of that."""
    survivor, stopped = faults["stopped"]
    assert survivor.code == 1, survivor.err
    assert names_the_lost(1, survivor), survivor.out + survivor.err
    assert survivor.seconds < 30
    assert stopped.code == -signal.SIGKILL  # a stopped process has to be killed by whoever started it


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("where", ["sums", "agreements", "own work"])
@pytest.mark.parametrize("victim", [0, 1])
def test_any_one_of_three_is_killed(where: str, victim: int) -> None:
    """case:L17: wherever the others are, and whoever it is, also process 0, which runs JAX's service.

    Who waits for it ends at once; whoever is busy with work of its own, after 10 s, which is the group's timeout here.
    """
    function, rest = f"{SCENES}:wait_for_the_lost", {0, 1, 2} - {victim}
    with Group(function, 3, timeout_seconds=10, args={"where": where}) as group:
        wait_until_said(group, b"going")
        group.begun = time.monotonic()
        group.send(victim, signal.SIGKILL)
        ended = group.wait(60)
    for each in (ended[rank] for rank in rest):
        assert each.code == 1, each.err
        assert names_the_lost(victim, each), each.out + each.err
        assert each.seconds < (30 if where == "own work" else 8), each.err
    assert ended[victim].code == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("where", ["sums", "agreements"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_that_ends_early_with_an_error(rank: int, where: str) -> None:
    """nnx:S77: `sys.exit(3)` on one process is heard of by the others at once, wherever they are; its code is 3."""
    arguments = {"rank": rank, "code": 3, "where": where}
    with Group(f"{SCENES}:end_the_script", 2, timeout_seconds=60, args=arguments) as group:
        wait_until_said(group, b"going")
        group.begun = time.monotonic()
        ended = group.wait(60)
    assert [each.code for each in ended] == ([3, 1] if rank == 0 else [1, 3]), ended[0].err + ended[1].err
    assert ended[1 - rank].seconds < 10
    said = ended[1 - rank].out + ended[1 - rank].err
    assert f"rank {rank} failed at 'the script': SystemExit: 3" in said or f"process {rank} of 2 is gone" in said


@pytest.mark.slow
def test_a_script_that_ends_before_the_others() -> None:
    """It ends without an error, and without `shutdown`; who waits for it learns of that at once."""
    arguments = {"rank": 1, "code": 0, "where": "agreements"}
    with Group(f"{SCENES}:end_the_script", 2, timeout_seconds=60, args=arguments) as group:
        wait_until_said(group, b"going")
        group.begun = time.monotonic()
        waited, _ = group.wait(60)
    assert waited.code == 1
    assert "rank 1 failed at 'together': ProcessLost: its script has come to an end" in waited.out
    assert waited.seconds < 15


@pytest.mark.slow
def test_scripts_that_do_not_leave_the_group() -> None:
    """Without `shutdown` they end together, with 0; a `sys.exit(5)` that somebody caught long before is forgotten."""
    ended = run(f"{SCENES}:exit_in_vain", 2, timeout_seconds=60, args={"code": 5}, env={"TESTS_STAY": "1"})
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    assert max(each.seconds for each in ended) < 40


def names_the_lost(rank: int, survivor: Ended) -> bool:
    """Its error does, or the line that it ends with."""
    failed = f"DistributedFailure: process group: rank {rank} failed at 'round "
    return failed in survivor.out or f"process group: process {rank} of " in survivor.err


def test_one_that_hangs(faults: dict[str, list[Ended]]) -> None:
    """Reliability P2: a collective operation that one never comes to ends for the others at the group's timeout."""
    waited, _ = faults["hangs"]
    assert waited.code == 1, waited.err
    said = waited.out.splitlines()[-1]
    assert said.startswith("after ")
    assert 5 <= float(said.split()[1]) < 30


def test_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B194: a RuntimeError naming the variables, in this process as in any."""
    for name in ("NNX_JAX_COORDINATOR", "SLURM_NTASKS", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="NNX_JAX_COORDINATOR, NNX_JAX_PROCESSES, NNX_JAX_PROCESS are not set"):
        init_process_group()


def test_no_group() -> None:
    """nnx:B195 nnx:B197: DDP without a group points to the launcher, loaders do; to leave it is to do nothing."""
    with pytest.raises(RuntimeError, match="nnx_jax.launch --processes 2"):
        open_world(DDP())
    with pytest.raises(TypeError, match="distributed must be a DDP, got 'ddp'"):
        open_world("ddp")
    for make in (lambda: train_loader([1, 2], 1), lambda: validation_loader([1, 2], 1), current_world):
        with pytest.raises(ProcessGroupError, match="there is no group of processes"):
            make()
    assert open_world(None).alone
    shutdown()
    shutdown(timeout_seconds=1)


@pytest.mark.parametrize("seconds", BAD_SECONDS[:-1], ids=repr)
def test_timeouts_are_checked(seconds: Any) -> None:
    """nnx:B197: 0, negative, inf, nan, True and "5" are ValueErrors, with or without a group."""
    for call in (shutdown, init_process_group):
        with pytest.raises(ValueError, match="timeout_seconds: got .*; it must be a finite number of seconds above 0"):
            call(timeout_seconds=seconds)


def test_the_launcher_s_timeout_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NNX_JAX_TIMEOUT_SECONDS says is checked like an argument."""
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("NNX_JAX_TIMEOUT_SECONDS", text)
        with pytest.raises(ConfigError, match=f"NNX_JAX_TIMEOUT_SECONDS: got '{text}'"):
            init_process_group()


def test_ddp_is_a_checked_value() -> None:
    """nnx:B196: a negative rank is a ValueError, a value of another type a TypeError; it never changes."""
    with pytest.raises(ValueError, match="DDP.writer_rank: got -1"):
        DDP(writer_rank=-1)
    for wrong in (True, 1.0, "0", None):
        with pytest.raises(TypeError, match="DDP.writer_rank must be a whole number"):
            DDP(writer_rank=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="find_unused_parameters must be True or False, got 1"):
        DDP(find_unused_parameters=1)  # type: ignore[arg-type]
    assert DDP(writer_rank=1, find_unused_parameters=True) == DDP(1, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        DDP().writer_rank = 1  # type: ignore[misc]


def test_jax_must_not_have_started() -> None:
    """Joining comes first: with devices that are in use already it is refused before anything is waited for."""
    import jax

    jax.devices()
    with pytest.raises(ProcessGroupError, match="JAX has started its devices in this process already"):
        init_process_group(coordinator="127.0.0.1:1", num_processes=2, process_id=0)


def test_a_group_of_one() -> None:
    """Under a launcher of one process there is a group of one, in a process that is otherwise as ever."""
    code = (
        "from nnx_jax.distributed import *; import os, sys\n"
        "assert init_process_group(num_processes=1, process_id=0) == (0, 1) == init_process_group()\n"
        "assert 'XLA_FLAGS' not in os.environ\n"
        "world = current_world(); assert world.alone and world.writes\n"
        "assert len(train_loader({'x': [[1.0], [2.0]]}, 1)) == 2\n"
        "import jax; assert jax.process_count() == 1\n"
        "shutdown(); shutdown()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60, check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_writer_only_alone() -> None:
    """nnx:B221: without a group the callback is made in its place in the list, once; a non-callable is a TypeError."""
    made: list[str] = []

    class Watching(Callback):
        component_name = "watch"

        def __init__(self) -> None:
            made.append("made")

        def on_epoch_end(self, ctx: Any) -> None:
            made.append("epoch")

        def component_state(self) -> dict[str, Any]:
            return {"n": 1}

    callback = writer_only(Watching)
    assert made == []
    assert callback.component_spec() is None
    other = Callback()
    assert made_where_written([other, callback], True) == [other, callback]
    made_where_written([callback], True)
    callback.on_epoch_end(None)  # type: ignore[arg-type]
    callback.on_train_begin(None)  # type: ignore[arg-type]
    assert made == ["made", "epoch"]
    spec = callback.component_spec()
    assert spec is not None
    assert (spec.name, callback.component_state(), callback.distributed) == ("watch", {"n": 1}, "writer")
    assert [overrides(callback, name) for name in ("on_epoch_end", "on_updates")] == [True, False]
    for wrong in (None, "callback", Callback()):
        with pytest.raises(TypeError, match="writer_only takes a function"):
            writer_only(wrong)  # type: ignore[arg-type]
    for product in (3, print, Callback):
        with pytest.raises(ConfigError, match="must return a Callback, got"):
            made_where_written([writer_only(lambda product=product: product)], True)
