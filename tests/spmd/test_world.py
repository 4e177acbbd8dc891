"""The laws of World, as three real processes see them; and one process alone, which agrees with itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from nnx_jax.core.errors import DistributedFailure, ProcessGroupError
from nnx_jax.spmd.world import ALONE, World
from tests.processes import results
from tests.runs.threads import together
from tests.spmd.world_scenes import ROUNDS, SHORT, SIZE, VALUES, outcome, raising

TIMEOUT = 20.0


@pytest.fixture(scope="module", params=["jax", pytest.param("torch", marks=pytest.mark.slow)])
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every rank saw of every scene, over the store of JAX's coordination service and over torch's."""
    if request.param == "torch":
        pytest.importorskip("torch")
    return results("tests.spmd.world_scenes:scenes", SIZE, timeout_seconds=TIMEOUT, framework=request.param)


@pytest.mark.parametrize("size", [2, 9])
def test_an_agreement_costs_as_many_requests_as_there_are_processes(size: int) -> None:
    """Process 0 reads all verdicts and tells them together: three requests of every other process, at any size."""
    turns, counts = 20, [0] * size

    class Counting:
        def __init__(self, channel: Any) -> None:
            self._channel = channel

        def __getattr__(self, name: str) -> Any:
            if name in ("put", "get", "find", "drop"):
                counts[self._channel.rank] += 1
            return getattr(self._channel, name)

    def agree(world: World) -> Any:
        counted = World(Counting(world._channel), name="counted")  # type: ignore[arg-type]
        return [counted.gather(f"turn {turn}", [turn, counted.rank]) for turn in range(turns)]

    *found, _ = together(agree, size)
    assert found == [[[[turn, rank] for rank in range(size)] for turn in range(turns)]] * size
    assert counts[1:] == [3 * turns] * (size - 1)
    assert counts[0] <= (2 * size + 2) * turns


@pytest.fixture
def saw(seen: list[dict[str, Any]]) -> Callable[[str], list[Any]]:
    """One scene by rank: the value, ["failed", rank, stage, kind, message] or ["raised", text]."""

    def of(name: str) -> list[Any]:
        found = []
        for each in seen:
            scene = each[name]
            if "value" in scene:
                found.append(scene["value"])
            else:
                found.append(["failed", *scene["failed"]] if "failed" in scene else ["raised", scene["raised"]])
        return found

    return of


def test_each_knows_its_place(seen: list[dict[str, Any]]) -> None:
    """Rank, size, and who writes."""
    assert [each["place"] for each in seen] == [[rank, SIZE, False, rank == 0, TIMEOUT] for rank in range(SIZE)]


def test_work_that_all_can_do(saw: Callable[[str], list[Any]]) -> None:
    """Every process gets the value of its own work."""
    assert saw("fine") == [0, 10, 20]


def test_the_failing_rank_raises_its_own_error(saw: Callable[[str], list[Any]]) -> None:
    """Rank 1 raises what happened there, the others a DistributedFailure that names it."""
    elsewhere = ["failed", 1, "one fails", "ValueError", "mine"]
    assert saw("one fails") == [elsewhere, ["raised", "ValueError: mine"], elsewhere]


def test_each_failing_rank_raises_its_own_error(saw: Callable[[str], list[Any]]) -> None:
    """Two at once: both keep their own; whoever did not fail learns of the lowest."""
    elsewhere = ["failed", 1, "two fail", "ValueError", "mine"]
    assert saw("two fail") == [elsewhere, ["raised", "ValueError: mine"], ["raised", "KeyError: 'too'"]]


def test_an_interrupt_is_told_like_an_error(saw: Callable[[str], list[Any]]) -> None:
    """Ctrl-C in the work of one process ends the agreement of all."""
    elsewhere = ["failed", 2, "interrupt", "KeyboardInterrupt", "stop"]
    assert saw("interrupt") == [elsewhere, elsewhere, ["raised", "KeyboardInterrupt: stop"]]


def test_whoever_halted_for_another_names_that_one(saw: Callable[[str], list[Any]]) -> None:
    """A process that only halted is not the one that failed."""
    elsewhere = ["failed", 0, "halted", "OSError", "disk"]
    assert saw("halted") == [["raised", "OSError: disk"], elsewhere, elsewhere]


def test_whatever_an_error_says_arrives(saw: Callable[[str], list[Any]], seen: list[dict[str, Any]]) -> None:
    """A file name that is no text, a long message, a value that cannot be told: the first error is not lost in them."""
    said = saw("odd text")
    assert said[0] == said[2] == ["failed", 1, "odd", "OSError", "caf\\udce9" * 5000]
    assert said[1] == ["raised", "OSError: " + "caf\udce9" * 9000]
    untold = saw("no JSON")
    assert untold[0] == untold[2]
    assert untold[0][:4] == ["failed", 1, "no JSON", "ConfigError"]
    assert "must be finite" in untold[1][1]
    assert all(each[name]["seconds"] < TIMEOUT / 3 for each in seen for name in ("odd text", "no JSON"))


def test_processes_at_different_places(saw: Callable[[str], list[Any]]) -> None:
    """A stage that is another one elsewhere is a failure that says both; and the conversation goes on after it."""
    found = saw("another place")
    assert found[0] == ["failed", 2, "epoch 1", "ProcessGroupError", "it is at 'epoch 2' while rank 0 is at 'epoch 1'"]
    assert found[1][:2] == ["failed", 2]
    assert found[2] == ["failed", 0, "epoch 2", "ProcessGroupError", "it is at 'epoch 1' while rank 2 is at 'epoch 2'"]
    assert saw("after all that") == ["together"] * SIZE


def test_what_is_told_with_an_agreement(saw: Callable[[str], list[Any]]) -> None:
    """Every process gets its own result and what each told; an error while telling is one of the work."""
    assert saw("telling") == [[rank, [0, -1, -2]] for rank in range(SIZE)]
    elsewhere = ["failed", 1, "telling", "ValueError", "tell"]
    assert saw("telling fails") == [elsewhere, ["raised", "ValueError: tell"], elsewhere]


def test_what_cannot_be_told(saw: Callable[[str], list[Any]]) -> None:
    """A value that is no JSON, or not finite, is an error of the rank that has it; a very long message is cut."""
    first, second, third = saw("not to be told")
    assert second[0] == "raised"
    assert "only plain values can be written" in second[1]
    assert first == third == ["failed", 1, "values", "ConfigError", second[1].removeprefix("ConfigError: ")]
    first, second, third = saw("not finite")
    assert first[:4] == ["failed", 1, "values", "ConfigError"]
    assert second == third == ["raised", "ConfigError: config: value: is nan; numbers must be finite"]
    first, second, third = saw("long error")
    assert first == third
    assert first[:4] == ["failed", 1, "long", "ValueError"]
    assert 10_000 < len(first[4]) < 50_000 < len(second[1])


def test_values_by_rank(saw: Callable[[str], list[Any]]) -> None:
    """JSON values arrive exactly, in the order of the ranks, however long."""
    assert saw("gathered") == [VALUES] * SIZE


def test_any(saw: Callable[[str], list[Any]]) -> None:
    """What is so on one process is known to all."""
    assert saw("any") == [True] * SIZE
    assert saw("none") == [False] * SIZE


def test_work_of_the_writer(saw: Callable[[str], list[Any]], seen: list[dict[str, Any]]) -> None:
    """It runs once, on the writer; all get its value, or learn why there is none."""
    assert saw("on writer") == ["written"] * SIZE
    assert [each["ran"] for each in seen] == [[], [1], []]
    elsewhere = ["failed", 1, "write", "OSError", "full"]
    assert saw("writer fails") == [elsewhere, ["raised", "OSError: full"], elsewhere]
    assert [text for _, text in saw("bad rank")] == [
        "ProcessGroupError: process group: writer_rank is 3; the ranks of this group are 0 to 2"
    ] * SIZE


def test_a_board(saw: Callable[[str], list[Any]]) -> None:
    """Keys of all processes; one that nobody set is None after the wait."""
    assert saw("board") == [["0", "1", "2"]] * SIZE
    assert saw("empty board") == [None] * SIZE


def test_a_failure_outside_an_agreement_is_noticed_soon(
    saw: Callable[[str], list[Any]], seen: list[dict[str, Any]]
) -> None:
    """It is told, and whoever waits learns of it within about two seconds, long before the timeout."""
    elsewhere = ["failed", 0, "reading rows", "ValueError", "row 7"]
    assert saw("told") == ["told", elsewhere, elsewhere]
    assert all(each["told"]["seconds"] < 0.5 + TIMEOUT / 3 for each in seen[1:])
    assert saw("after it was told") == ["fine"] * SIZE
    assert saw("told again") == [None] * SIZE


def test_conversations_of_threads(seen: list[dict[str, Any]]) -> None:
    """Threads agree at their own pace beside the main one; a wait holds up no other thread."""
    for each in seen:
        for name in ("a", "b"):
            assert each["threads"][name] == [[[name, n, rank] for rank in range(SIZE)] for n in range(ROUNDS)]
        assert each["main"] == [[number] * SIZE for number in range(ROUNDS)]
        assert each["counted"] > 20


def test_one_that_does_not_come(saw: Callable[[str], list[Any]], seen: list[dict[str, Any]]) -> None:
    """Every wait is bounded, and says whom it was for."""
    late = ["it did not come within 2 s; is it still alive, or doing something else?"]
    assert "late" not in seen[2]
    for each in seen[:2]:
        assert each["late"]["failed"] == [2, "meeting", "TimeoutError", *late]
        assert SHORT <= each["late"]["seconds"] < 4 * SHORT


def test_keys_are_dropped(seen: list[dict[str, Any]]) -> None:
    """A long run leaves the keys of its last turns only."""
    assert all(each["kept"] <= 4 * (SIZE + 1) for each in seen), [each["kept"] for each in seen]


def test_one_process_alone() -> None:
    """It agrees with itself at no cost: its work, its errors, its values."""
    assert (ALONE.rank, ALONE.size, ALONE.alone, ALONE.writes, ALONE.timeout_seconds) == (0, 1, True, True, 0.0)
    assert ALONE.agree("x", lambda: 3) == 3
    assert ALONE.agree_telling("x", lambda: 3, lambda: 4) == (3, [4])
    assert ALONE.gather("x", object) == [object]
    assert ALONE.any("x", True) is True
    assert ALONE.on_writer("x", lambda: object) is object
    with pytest.raises(ZeroDivisionError):
        ALONE.agree("x", lambda: 1 // 0)
    assert ALONE.fail("x", ValueError()) is None
    assert ALONE.failure() is None
    assert ALONE.sub("a").alone
    with pytest.raises(ProcessGroupError, match="a process alone shares nothing"):
        ALONE.board("x")
    with pytest.raises(ProcessGroupError, match="writer_rank is 1; the ranks of this group are 0 to 0"):
        World(writer_rank=1)


def test_a_failure_elsewhere_reads_as_a_sentence() -> None:
    """Rank, stage, type and text."""
    error = DistributedFailure(1, "epoch 3, callbacks", "OSError", "disk full")
    assert str(error) == "process group: rank 1 failed at 'epoch 3, callbacks': OSError: disk full"
    assert isinstance(error, RuntimeError)


def test_whoever_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A computation of all broke off: its error is raised soon, and a thread that waits for the same process ends."""
    monkeypatch.setattr("nnx_jax.spmd.world._GONE_SECONDS", 0.5)
    seen: dict[str, Any] = {}

    def work(world: World) -> None:
        if world.rank:
            return  # it is gone
        world.broke_off = lambda error: "broke off" in str(error)
        waiting = world.sub("commit")
        seen["mine alone"] = outcome(lambda: world.agree("records", raising(ValueError("mine alone"))))
        thread = threading.Thread(target=lambda: seen.update(commit=outcome(lambda: waiting.agree("commit", int))))
        thread.start()
        seen["it broke off"] = outcome(lambda: world.agree("records", raising(ValueError("it broke off"))))
        thread.join()

    found = together(work, timeout_seconds=4)
    assert found[:2] == [None, None]
    assert seen["mine alone"]["raised"] == "ValueError: mine alone"
    assert seen["mine alone"]["seconds"] > 3  # the others may come yet
    assert seen["it broke off"]["raised"] == "ValueError: it broke off"
    assert seen["it broke off"]["seconds"] < 2
    assert seen["commit"]["failed"][0] == 1
    assert seen["commit"]["seconds"] < 2


def test_an_agreement_inside_another_one_fails() -> None:
    """Rank 0 is told of it there, at once; rank 2, which was not inside, learns of it from either."""

    def work(world: World) -> dict[str, Any]:
        inner = lambda: world.agree("inner", raising(None))  # noqa: E731
        act = {0: inner, 1: raising(OSError("disk")), 2: raising(None)}[world.rank]
        return outcome(lambda: world.agree("outer", act))

    one, own, other, seconds = together(work, size=3)
    assert one["failed"] == other["failed"] == [1, "outer", "OSError", "disk"]
    assert own["raised"] == "OSError: disk"
    assert seconds < 5


def test_a_process_that_only_heard_of_a_failure() -> None:
    """Its failure is theirs, too, where nobody else says more."""
    failure = DistributedFailure(7, "somewhere", "OSError", "disk")
    act = lambda world: outcome(lambda: world.agree("work", raising(None if world.rank else failure)))  # noqa: E731
    one, other, _ = together(act)
    assert one["failed"] == [7, "somewhere", "OSError", "disk"]
    assert other["failed"][:3] == [0, "work", "DistributedFailure"]
    assert "rank 7 failed at 'somewhere': OSError: disk" in other["failed"][3]
