"""Sums over the processes of one machine through sockets: bits, order, faults, and where there is no such way."""

from __future__ import annotations

import ast
import contextlib
import functools
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import results, run

torch = pytest.importorskip("torch")

from nnx_jax.torch.neighbours import Neighbours, _open_door  # noqa: E402
from nnx_jax.torch.process_group import broke_off  # noqa: E402
from tests.torch.neighbour_scenes import digest, vector_of  # noqa: E402

SCENES = "tests.torch.neighbour_scenes"


def in_order(size: int, world: int) -> np.ndarray:
    """The sum by numpy, rank after rank."""
    return functools.reduce(np.add, [vector_of(rank, size) for rank in range(world)])


def group(world: int, timeout_seconds: float = 20.0) -> list[Neighbours]:
    """Processes played by threads: their sockets are real."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(1, world)]
    first = Neighbours({rank: pair[0] for rank, pair in enumerate(pairs, 1)}, timeout_seconds)
    return [first, *(Neighbours({0: pair[1]}, timeout_seconds) for pair in pairs)]


def added(members: list[Neighbours], vectors: list[Any]) -> None:
    """All add up at the same time."""
    threads = [
        threading.Thread(target=one.add_up, args=(vector,)) for one, vector in zip(members, vectors, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_the_sum_is_that_of_the_ranks_in_order(world: int, size: int) -> None:
    """Every process has the same bits, those of numpy adding rank after rank; empty and long vectors too."""
    vectors = [torch.from_numpy(vector_of(rank, size).copy()) for rank in range(world)]
    added(group(world), vectors)
    wanted = in_order(size, world)
    assert all(vector.numpy().tobytes() == wanted.tobytes() for vector in vectors)
    if size > 1 and world > 2:
        backwards = functools.reduce(np.add, [vector_of(rank, size) for rank in reversed(range(world))])
        assert backwards.tobytes() != wanted.tobytes()  # so the order does show


def test_vectors_of_another_length_follow() -> None:
    """A window of two microbatches measures more than one of one."""
    members = group(2)
    for size in (3, 7, 3):
        vectors = [torch.full((size,), float(rank + 1), dtype=torch.float64) for rank in range(2)]
        added(members, vectors)
        assert [vector.tolist() for vector in vectors] == [[3.0] * size] * 2


def test_one_that_closed_its_end_is_named() -> None:
    """The error is one of a computation that broke off, so that the loop asks who is gone."""
    first, second = group(2)
    del second
    with pytest.raises(torch.distributed.DistNetworkError, match=r"process 1 (has closed|.*broke off)") as caught:
        first.add_up(torch.ones(2, dtype=torch.float64))
    assert broke_off(caught.value)


def test_all_learn_that_one_is_gone() -> None:
    """Of three, one is gone: the others are told at once, and not by their own timeouts."""
    first, second, third = group(3, 30)
    del third
    told: list[Exception] = []

    def wait() -> None:
        try:
            second.add_up(torch.ones(2, dtype=torch.float64))
        except RuntimeError as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(torch.distributed.DistNetworkError, match="process 2"):
        first.add_up(torch.ones(2, dtype=torch.float64))
    thread.join(5)
    assert not thread.is_alive()
    assert len(told) == 1


def test_without_a_place_to_meet_there_is_no_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder that cannot be written leaves the processes to gloo."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with contextlib.ExitStack() as left:
        assert _open_door(left) is None


def test_one_that_does_not_come_is_named_in_time() -> None:
    """The wait ends by the group's timeout."""
    first, second = group(2, 0.3)
    with pytest.raises(torch.distributed.DistNetworkError, match=r"process 1 did not come within 0.3 s"):
        first.add_up(torch.ones(2, dtype=torch.float64))
    first, second = group(2, 0.3)
    with pytest.raises(torch.distributed.DistNetworkError, match=r"process 0 did not come within 0.3 s"):
        second.add_up(torch.ones(2, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_real_processes(world: int, tmp_path: Path) -> None:
    """The bits are those of numpy on every process, and nothing is left in the temporary folder."""
    found = results(f"{SCENES}:sums", world, framework="torch", env={"TMPDIR": str(tmp_path)})
    wanted = [digest(in_order(size, world)) for size in (5000, 200_000)]
    assert [each[0] for each in found] == [wanted] * world
    assert all(each[1] == [] for each in found)


@pytest.mark.slow
def test_where_there_is_no_way(tmp_path: Path) -> None:
    """All of them find that process 0 cannot be reached, and gloo is what is left."""
    found = results(f"{SCENES}:apart", 2, framework="torch", env={"TMPDIR": str(tmp_path)})
    assert found == [[True, digest(in_order(5000, 2))]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("fault, seconds, least, most", [("killed", 30, 0, 5), ("hangs", 5, 5, 8)])
def test_a_process_is_lost(fault: str, seconds: float, least: float, most: float) -> None:
    """nnx:S77: killed, the others know at once; hanging, by the group's timeout."""
    args = {"fault": fault, "seconds": seconds}
    first, _ = run(f"{SCENES}:lost", 2, framework="torch", timeout_seconds=seconds, args=args)
    name, text, after = ast.literal_eval(first.out.partition("told ")[2].splitlines()[0])
    assert name == "DistNetworkError"
    assert text.startswith("process 1 ")
    assert least <= after < most
