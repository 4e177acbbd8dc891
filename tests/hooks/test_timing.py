"""StageTimingHook: which intervals it measures, what it tells, what it writes."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nnx_jax.core.hooks import Hook, owns
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.hooks import StageTimingHook
from nnx_jax.hooks import timing as module


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time the hook sees: the first element, which tests move."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def play(hook: Any, clock: list[float], batches: int = 1, **values: Any) -> None:
    """Call the hook at its stages, each lasting as many seconds as its value."""
    for number in range(batches):
        for stage in Stage:
            if hook._runs_on_stage(stage):
                step = number + (stage is Stage.AFTER_BATCH)
                hook(SimpleNamespace(**{"global_rank": 0, "step_count": step, "loss": None, **values}), stage)
            clock[0] += stage.value


def test_a_batch_as_a_whole(clock: list[float], tmp_path: Path) -> None:
    """nvalchemi:144; and a process that is not the first has a file of its own."""
    path = tmp_path / "logs" / "times.rank_2.csv"
    hook = StageTimingHook({Stage.AFTER_BATCH, Stage.BEFORE_BATCH}, log_path=tmp_path / "logs" / "times.csv")
    play(hook, clock, batches=3, global_rank=2)
    told = hook.summary()
    assert list(told) == ["BEFORE_BATCH->AFTER_BATCH"]
    each = float(sum(range(4, 15)))
    assert told["BEFORE_BATCH->AFTER_BATCH"] == {
        "mean_s": each, "std_s": 0.0, "min_s": each, "max_s": each, "total_s": 3 * each, "n_samples": 3,
    }  # fmt: skip
    rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["rank", "step", "stage", "t_since_init_s", "delta_s"]
    assert [row[:3] for row in rows[1:]] == [["2", str(step), "BEFORE_BATCH->AFTER_BATCH"] for step in (1, 2, 3)]
    assert [float(row[4]) for row in rows[1:]] == [each] * 3
    assert float(rows[1][3]) < float(rows[2][3])


def test_detailed_intervals_follow_each_other(clock: list[float]) -> None:
    hook = StageTimingHook("detailed")
    play(hook, clock, batches=2)
    told = hook.summary()
    stages = [stage for stage in Stage if stage.of_batch and "DO_" not in stage.name]
    assert list(told) == [f"{a.name}->{b.name}" for a, b in zip(stages, stages[1:], strict=False)]
    assert told["BEFORE_FORWARD->AFTER_FORWARD"]["mean_s"] == Stage.BEFORE_FORWARD.value
    assert {seconds["n_samples"] for seconds in told.values()} == {2}
    assert hook.timings[Stage.AFTER_FORWARD] == [float(Stage.BEFORE_FORWARD.value)] * 2


@pytest.mark.parametrize("stages", ["all", [stage.name for stage in Stage if stage.of_batch]])
def test_it_watches_every_stage_of_a_batch_and_owns_none(stages: Any) -> None:
    """nvalchemi:33 for the hook alone."""
    hook = StageTimingHook(stages)
    assert isinstance(hook, Hook)
    for stage in Stage:
        assert hook._runs_on_stage(stage) == stage.of_batch
        assert not owns(hook, stage)


@pytest.mark.parametrize(
    "stages, words",
    [
        ([Stage.AFTER_BATCH], "at least two stages"),
        ([], "at least two stages"),
        ([Stage.AFTER_BATCH, "AFTER_BATCH"], "at least two stages"),
        ({Stage.SETUP, Stage.AFTER_BATCH}, "'SETUP' has no batch to time"),
        (["BEFORE_LUNCH", "AFTER_BATCH"], "'BEFORE_LUNCH' is no stage"),
        ("everything", "profiled_stages"),
    ],
)
def test_stages_that_cannot_be_timed(stages: Any, words: str) -> None:
    """nvalchemi:145"""
    with pytest.raises(ValueError, match=words):
        StageTimingHook(stages)


def test_a_batch_that_broke_off_leaves_no_interval(clock: list[float]) -> None:
    hook = StageTimingHook("step")
    hook(SimpleNamespace(global_rank=0, step_count=0, loss=None), Stage.BEFORE_BATCH)
    clock[0] += 1000
    play(hook, clock)
    assert hook.summary()["BEFORE_BATCH->AFTER_BATCH"]["n_samples"] == 1
    assert hook.summary()["BEFORE_BATCH->AFTER_BATCH"]["max_s"] < 1000


def test_reset_and_close(clock: list[float]) -> None:
    hook = StageTimingHook("step")
    with hook:
        play(hook, clock)
    hook.reset()
    assert hook.summary() == {}
    hook.close()


def test_waiting_for_the_device(clock: list[float]) -> None:
    """With `device`, reading the loss takes as long as the device still works, and that is measured."""

    class Pending:
        def __float__(self) -> float:
            clock[0] += 50
            return 1.0

    plain, device = StageTimingHook("step"), StageTimingHook("step", timer_backend="device")
    for hook, expected in ((plain, 0), (device, 50)):
        hook(SimpleNamespace(global_rank=0, step_count=0, loss=None), Stage.BEFORE_BATCH)
        hook(SimpleNamespace(global_rank=0, step_count=1, loss=Pending()), Stage.AFTER_BATCH)
        assert hook.summary()["BEFORE_BATCH->AFTER_BATCH"]["max_s"] == expected


def test_lines_for_a_person(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    play(StageTimingHook("step", show_console=True, console_frequency=2), clock, batches=5)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["rank 0 step 2", "rank 0 step 4"]
    assert "BEFORE_BATCH->AFTER_BATCH 99000.000 ms" in lines[0]


def test_a_second_hook_does_not_append_to_an_old_file(clock: list[float], tmp_path: Path) -> None:
    for _ in range(2):
        play(StageTimingHook("step", log_path=tmp_path / "t.csv"), clock)
    assert len((tmp_path / "t.csv").read_text(encoding="utf-8").splitlines()) == 2


def test_it_is_written_as_configuration() -> None:
    hook = StageTimingHook([Stage.AFTER_BATCH, Stage.BEFORE_BATCH], log_path="t.csv")
    state = {"kind": "stage_timing", "profiled_stages": ["BEFORE_BATCH", "AFTER_BATCH"], "log_path": "t.csv"}
    assert hook.state() == state
    assert StageTimingHook.from_state(state) == hook
