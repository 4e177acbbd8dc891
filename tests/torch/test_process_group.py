"""Torch processes: joining a group, what a group offers, and how it ends: together, late, or with one that is gone."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nnx_jax.core.errors import ConfigError, ProcessGroupError
from nnx_jax.torch.distributed import (
    DDP,
    current_world,
    init_process_group,
    open_world,
    shutdown,
    train_loader,
    validation_loader,
)
from nnx_jax.torch.process_group import launched
from tests.processes import Ended, Group, free_port, results, wait_for_all, wait_until_said

SCENES = "tests.torch.group_scenes"
BAD_SECONDS = [0, -1, 0.0, float("inf"), float("nan"), True, "5", None]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
PATIENCE = 120.0


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """What both processes of a group saw of its whole life."""
    return results(f"{SCENES}:everything", 2, timeout_seconds=30, framework="torch")


def test_a_group_is_joined_once(seen: list[dict[str, Any]]) -> None:
    """nnx:B194 nnx:S41 nnx:S42: a second call returns the same (rank, world), whatever it is given; gloo on CPUs."""
    assert [each["again"] for each in seen] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert all("gloo" in each["backend"] for each in seen)
    assert [each["sum"] for each in seen] == [3.0, 3.0]


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
    """nnx:B191 nnx:S49 nnx:S52: rank and world are the group's; validation rows 0, 2, 4 and 1, 3."""
    assert [each["train"] for each in seen] == [[2, rank, 2, 3] for rank in range(2)]
    assert [each["validation"] for each in seen] == [[0, 2, 4], [1, 3]]


def test_a_callback_of_the_writer_is_made_once_and_there(seen: list[dict[str, Any]]) -> None:
    """nnx:B221 nnx:S82: the factory runs once, on the writer, whichever that is."""
    assert [each["made first"] for each in seen] == [[[0], "writer"], [[], "writer"]]
    assert [each["made second"] for each in seen] == [[[], "writer"], [[1], "writer"]]


def test_the_end_of_a_group(seen: list[dict[str, Any]]) -> None:
    """nnx:S43 nnx:S44 nnx:S48 nnx:B197: all meet and leave; a second call does nothing; a new group may be joined."""
    for rank, each in enumerate(seen):
        assert each["left"] == [None, None, None]
        assert each["seconds"] < 10
        assert each["initialised"] is False
        assert each["after"][:2] == ["ProcessGroupError", ["RuntimeError"]]
        assert each["joined again"] == [rank, 2, 3.0]
        assert each["talks again"] == [0, 1]


@pytest.mark.slow
def test_a_group_of_torch_s_own_is_taken_as_it_is() -> None:
    """The script called torch.distributed.init_process_group itself."""
    found = results(f"{SCENES}:adopts", 2, framework="torch", env={"TESTS_OTHER_PORT": str(free_port())})
    assert found == [[rank, 2, [0, 1], 20.0] for rank in range(2)]


@pytest.mark.slow
def test_a_group_of_one() -> None:
    """nnx:B203: the launcher may start one process; it has nobody to wait for."""
    assert results(f"{SCENES}:hello", 1, framework="torch") == [[0, 1, 0, 1, 1.0]]


@pytest.fixture(scope="module")
def faults() -> Iterator[dict[str, list[Ended]]]:
    """How each process of several groups ended; they meet their faults at the same time, since that is waiting."""
    with contextlib.ExitStack() as stack:

        def start(function: str, timeout_seconds: float, ranks: tuple[int, ...] = (0, 1), **args: Any) -> Group:
            given: dict[str, Any] = {"timeout_seconds": timeout_seconds, "ranks": ranks, "args": args}
            group = Group(f"{SCENES}:{function}", 2, framework="torch", **given)
            stack.enter_context(group)
            if len(ranks) == 2:
                wait_until_said(group, b"going")
                group.begun = time.monotonic()
            return group

        groups = {
            "1 is missing": start("everything", 8, ranks=(0,)),
            "0 is missing": start("everything", 8, ranks=(1,)),
            "stopped": start("wait_for_the_lost", 10, rounds=10_000),
            "0 stopped": start("wait_for_the_lost", 10, rounds=10_000),
            "killed": start("wait_for_the_lost", 60, rounds=10_000),
            "0 killed": start("wait_for_the_lost", 60, rounds=10_000),
            "late": start("late", 60, seconds=6, timeout=3),
            "raises on 1": start("fail_and_end", 60, failing=1),
            "raises on 0": start("fail_and_end", 60, failing=0),
            "hangs": start("hang", 10, rank=1),
        }
        for name, rank, number in (
            ("killed", 1, signal.SIGKILL), ("0 killed", 0, signal.SIGKILL),
            ("stopped", 1, signal.SIGSTOP), ("0 stopped", 0, signal.SIGSTOP),
        ):  # fmt: skip
            groups[name].send(rank, number)
            groups[name].begun = time.monotonic()
        yield wait_for_all(groups, PATIENCE, hanging={"stopped": 1, "0 stopped": 0, "hangs": 1})


@pytest.mark.slow
def test_one_that_comes_late_to_the_end(faults: dict[str, list[Ended]]) -> None:
    """nnx:B198 nnx:S45 nnx:S46 nnx:S47: the other gives up in time, by name, its group stays; both end with 0."""
    first, second = faults["late"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "rank 1 of 2 did not come to leave the group within 3 s" in first.out
    assert "'group': (0, 2)" in first.out
    seconds = float(first.out.partition("'seconds': ")[2].partition(",")[0])
    assert 3 <= seconds < 6
    assert second.result["outcome"] is None


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_outside_an_agreement(failing: int, faults: dict[str, list[Ended]]) -> None:
    """nnx:S77: the failing process says what happened, the other learns of it, soon."""
    ended = faults[f"raises on {failing}"]
    assert [each.code for each in ended] == [1, 1], "\n".join(each.err for each in ended)
    assert ended[failing].err.splitlines()[-1].endswith("ConfigError: config: wrong here")
    told = f"DistributedFailure: process group: rank {failing} failed at 'the script': ConfigError: config: wrong here"
    assert ended[1 - failing].err.splitlines()[-1].endswith(told)
    assert max(each.seconds for each in ended) < 30


@pytest.mark.slow
@pytest.mark.parametrize("name, text", [
    ("1 is missing", "process 1 of 2 did not come within 8 s"),
    ("0 is missing", "process 0 of 2 could not be reached at 127.0.0.1:"),
])  # fmt: skip
def test_one_that_is_not_started(name: str, text: str, faults: dict[str, list[Ended]]) -> None:
    """Reliability P1: the others end in time with an error that says which process is missing; nobody is aborted."""
    [alone] = faults[name]
    assert alone.code == 1
    assert "ProcessGroupError: process group: " + text in alone.err


@pytest.mark.slow
@pytest.mark.parametrize("name, least, most", [
    ("killed", 0, 15), ("0 killed", 0, 15), ("stopped", 5, 40), ("0 stopped", 5, 40), ("hangs", 5, 40),
])  # fmt: skip
def test_one_that_is_gone_in_the_middle(name: str, least: float, most: float, faults: dict[str, list[Ended]]) -> None:
    """nnx:S77 nnx:B232: killed, stopped or hanging, the other one ends by an error of Python within the timeout."""
    gone = 0 if name.startswith("0") else 1
    other = faults[name][1 - gone]
    assert other.code == 1, other.err
    assert "unknown" not in other.out
    assert least <= other.seconds < most, other.out


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_what_torchrun_does_not_say(name: str) -> None:
    """nnx:B194: the error names the variable that is missing."""
    environ = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ProcessGroupError, match=rf"^process group: {name} is not set.*torchrun --standalone"):
        launched(environ)


def test_a_process_that_nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B194 nnx:B195: all missing variables are named; DDP without a group points to the launcher."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"):
        init_process_group()
    for work in (lambda: open_world(DDP()), current_world, lambda: train_loader([1], 1)):
        with pytest.raises(RuntimeError, match=r"there is no group of processes.*torchrun"):
            work()
    with pytest.raises(RuntimeError, match="there is no group"):
        validation_loader([1], 1)
    assert open_world(None).alone


@pytest.mark.parametrize("name, value, told", [
    ("RANK", "2", "RANK is '2'; it must be a whole number from 0 to 1"),
    ("RANK", "-1", "RANK is '-1'"),
    ("WORLD_SIZE", "0", "WORLD_SIZE is '0'; it must be a whole number from 1"),
    ("MASTER_PORT", "x", "MASTER_PORT is 'x'; it must be a whole number from 0 to 65535"),
])  # fmt: skip
def test_what_torchrun_says_is_checked(name: str, value: str, told: str) -> None:
    with pytest.raises(ProcessGroupError, match=told):
        launched({**TORCHRUN, name: value})


def test_who_keeps_the_store() -> None:
    """Process 0, or torchrun where it says so."""
    first = {**TORCHRUN, "RANK": "0"}
    assert launched(first).keeps_store
    assert not launched(TORCHRUN).keeps_store
    assert not launched({**first, "TORCHELASTIC_USE_AGENT_STORE": "True"}).keeps_store
    assert launched({**first, "TORCHELASTIC_RESTART_COUNT": "3"}).attempt == 3
    place = launched(TORCHRUN)
    assert (place.rank, place.size, place.local_rank, place.host, place.port) == (1, 2, 1, "127.0.0.1", 29500)


@pytest.mark.parametrize("value", BAD_SECONDS)
def test_timeouts_are_checked(value: Any) -> None:
    """nnx:B197: 0, negative, not finite, True or a text is a ValueError; without a group nothing else happens."""
    with pytest.raises(ConfigError, match="finite number of seconds above 0"):
        shutdown(timeout_seconds=value)
    if value is not None:
        with pytest.raises(ConfigError, match="finite number of seconds above 0"):
            init_process_group(timeout_seconds=value)
    assert shutdown() is None
    assert shutdown() is None
