"""Schedules as runs: the rate in the history is the rate that moved the weights, through stops and resumes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.core.errors import CheckpointError, ConfigError
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.runs.run import NNRun
from tests.e2e.toys import (
    SAME,
    KillAt,
    Killed,
    Slope,
    Target,
    column,
    fit,
    half,
    only_run,
    slope,
    steps,
    targets,
    weight,
)

UPDATES = "optimizer_update"
COSINE = NNSchedulerParams(kind="cosine", clock=UPDATES)


def rising(total: int) -> NNSchedulerParams:
    """With max_lr 0.1 `total` the rate of update n (from 0) is 0.1 (n + 1)."""
    return NNSchedulerParams(kind="linear_warmup_decay", clock=UPDATES, warmup_steps=total, total_steps=total)


def t0(runs: Path, count: int, scheduler: NNSchedulerParams, max_lr: float = 1.0, **more: Any) -> NNRun:
    """T0: `count` microbatches of gradient -1 an epoch; the weight is the sum of the rates that were applied."""
    return fit(runs, Slope(), slope, steps(count), scheduler=scheduler, optim={"max_lr": max_lr}, **more)


def rates(run: NNRun) -> list[float]:
    return column(run, "update", "lr")


def test_the_schedule_ticks_once_an_update(tmp_path: Path) -> None:
    """case:B01 (once a microbatch would give w = 2.0)"""
    run = t0(tmp_path, 8, rising(10), accumulate=2)
    assert rates(run) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert weight(run) == pytest.approx([1.0])


def test_the_epoch_clock_keeps_its_place_through_a_resume(tmp_path: Path) -> None:
    """case:B03 nnx:B044 (2 updates an epoch, whatever their number; late by one, epoch 4 would still be at 100)"""
    cut = NNSchedulerParams(kind="step", step_size=4, factor=0.1)
    with pytest.raises(Killed):
        t0(tmp_path, 2, cut, 100.0, n_epochs=6, callbacks=[KillAt("on_epoch_begin", 4)])
    stopped = only_run(tmp_path)
    assert stopped.last is not None
    assert stopped.last.epoch == 2
    run = t0(tmp_path, 2, cut, 100.0, n_epochs=6)
    assert run.id == stopped.id
    assert rates(run) == pytest.approx([100.0] * 8 + [10.0] * 4)
    assert column(run, "epoch", "lr") == pytest.approx([100, 100, 100, 100, 10, 10])
    assert weight(run) == [840.0]


def test_the_update_clock_keeps_its_place_through_a_resume(tmp_path: Path) -> None:
    """case:B04 nnx:B060 (0.1 starts again, 0.2 counts epochs, 0.7 ticks once too often, 1.1 counts twice)"""
    with pytest.raises(Killed):
        t0(tmp_path, 5, rising(10), max_steps=6, callbacks=[KillAt("on_epoch_begin", 2)])
    stopped = only_run(tmp_path)
    assert stopped.last is not None
    assert stopped.last.step == 5
    run = t0(tmp_path, 5, rising(10), max_steps=6)
    assert run.id == stopped.id
    assert rates(run) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert weight(run) == pytest.approx([2.1])


def test_the_horizon_counts_the_shorter_windows(tmp_path: Path) -> None:
    """case:B05 nnx:B046 (3 batches in windows of 2 make 2 updates, 5 make 3; floor division plans less)"""
    run = t0(tmp_path, 10, COSINE, accumulate=2, n_epochs=3, data={"batch_size": 4})
    assert rates(run) == pytest.approx([1, 0.933013, 0.75, 0.5, 0.25, 0.066987], abs=1e-6)
    assert column(run, "update", "step") == [1, 2, 3, 4, 5, 6]
    run = t0(tmp_path, 10, rising(10), accumulate=2, n_epochs=2, data={"batch_size": 2})
    assert rates(run) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_the_horizon_never_changes_in_silence(tmp_path: Path) -> None:
    """case:B06 nnx:B060 ((b) rescaled to 20 updates the next rate would be 0.853553)"""
    with pytest.raises(Killed):
        t0(tmp_path, 5, COSINE, max_steps=10, callbacks=[KillAt("on_epoch_begin", 2)])
    stopped = only_run(tmp_path)
    warned = pytest.warns(UserWarning, match="cosine")
    with warned, pytest.raises(CheckpointError, match=r"schedule.*period.*10.*15"):
        t0(tmp_path, 5, COSINE, max_steps=15, resume_from_run_id=stopped.id)
    with pytest.raises(ValueError, match=r"planned|schedule"):
        t0(tmp_path, 5, COSINE, max_steps=20, resume_from_run_id=stopped.id, resume_epochs="planned")
    assert NNRun.all(tmp_path) == [stopped]
    run = t0(tmp_path, 5, COSINE, max_steps=10)
    assert rates(run)[5:8] == pytest.approx([0.5, 0.345492, 0.206107], abs=1e-6)


def test_another_split_of_the_same_batch_makes_as_many_updates(tmp_path: Path) -> None:
    """case:B07 (8, never 32; and a resume that mixes the two is refused)"""
    data = targets(*range(32))
    with pytest.raises(Killed):
        fit(
            tmp_path, Target(), half, data, accumulate=4, checkpoint={"every_n_steps": 4}, eval_every_n_steps=5,
            callbacks=[KillAt("on_validation", 1)],
        )  # fmt: skip
    stopped = only_run(tmp_path)
    with pytest.raises(CheckpointError, match="accumulate"):
        fit(tmp_path, Target(), half, data, data={"batch_size": 4}, resume_from_run_id=stopped.id)
    small = fit(tmp_path, Target(), half, data, accumulate=4, checkpoint={"every_n_steps": 4}, eval_every_n_steps=5)
    large = fit(tmp_path, Target(), half, data, data={"batch_size": 4})
    assert small.id == stopped.id
    assert small.last is not None
    assert large.last is not None
    assert (small.last.step, large.last.step) == (8, 8)
    assert weight(small) == pytest.approx(weight(large), rel=1e-6)


def test_the_first_rate_of_a_warm_up_is_not_zero_and_is_the_one_that_was_used(tmp_path: Path) -> None:
    """case:B08 (a log of 0.025 while w is still 0)"""
    warm = NNSchedulerParams(kind="linear_warmup_decay", clock=UPDATES, warmup_steps=4, total_steps=100)
    run = t0(tmp_path, 1, warm, 0.1)
    assert rates(run) == pytest.approx([0.025])
    assert weight(run) == pytest.approx([0.025])


def test_a_schedule_on_the_update_clock_is_planned_in_updates(tmp_path: Path) -> None:
    """case:B09 (planned in epochs the rate would be 0 at update 4 and 1 again at 8)"""
    run = t0(tmp_path, 25, COSINE, n_epochs=4)
    found = rates(run)
    assert found[50] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert 0 < found[99] < 0.001


def test_warm_up_and_decay_by_the_numbers(tmp_path: Path) -> None:
    """nnx:B045"""
    plan = NNSchedulerParams(kind="linear_warmup_decay", clock=UPDATES, warmup_steps=3)
    run = t0(tmp_path, 4, plan, 0.12, n_epochs=2)
    assert rates(run) == pytest.approx([0.04, 0.08, 0.12, 0.12, 0.096, 0.072, 0.048, 0.024])
    assert weight(run) == pytest.approx([0.6])


def test_a_total_below_the_plan_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    """nnx:B053"""
    short = NNSchedulerParams(kind="one_cycle", clock=UPDATES, total_steps=3)
    with pytest.raises(ConfigError, match=r"total_steps.*3.*8 updates"):
        t0(tmp_path / "runs", 4, short, n_epochs=2)
    assert not (tmp_path / "runs").exists()


def test_a_cosine_past_its_default_period_says_so_once(tmp_path: Path) -> None:
    """nnx:B062 (a run continued for another epoch; a period that was chosen comes round again, as the user asked)"""
    cosine = NNSchedulerParams(kind="cosine")
    first = t0(tmp_path, 2, cosine, n_epochs=2)
    with pytest.warns(UserWarning, match="cosine") as seen:
        more = t0(tmp_path, 2, cosine, n_epochs=2, resume_from_run_id=first.id)
    assert len([w for w in seen if "cosine" in str(w.message)]) == 1
    assert column(more, "epoch", "lr") == [0.0, 0.0]
    chosen = NNSchedulerParams(kind="cosine", T_max=2)
    first = t0(tmp_path, 2, chosen, n_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = t0(tmp_path, 2, chosen, n_epochs=2, resume_from_run_id=first.id)
    assert column(more, "epoch", "lr") == pytest.approx([0.0, 0.5], abs=1e-7)


def test_the_update_clock_past_its_plan_says_so_too(tmp_path: Path) -> None:
    """nnx:B062 nnx:B054 (two more epochs of a cosine and of a one-cycle that were planned for two)"""
    first = t0(tmp_path, 2, COSINE, n_epochs=2)
    with pytest.warns(UserWarning, match="cosine"):
        more = t0(tmp_path, 2, COSINE, n_epochs=2, resume_from_run_id=first.id)
    assert rates(more) == [0.0] * 4
    cycle = NNSchedulerParams(kind="one_cycle", clock=UPDATES)
    first = t0(tmp_path, 2, cycle, n_epochs=2)
    before = {run.id for run in NNRun.all(tmp_path)}
    with pytest.raises(ValueError, match="one_cycle ends after 4 updates.*update 5"):
        t0(tmp_path, 2, cycle, n_epochs=2, resume_from_run_id=first.id)
    assert {run.id for run in NNRun.all(tmp_path)} == before


def test_a_constant_rate_stays(tmp_path: Path) -> None:
    run = t0(tmp_path, 3, SAME, 0.25)
    assert weight(run) == [0.75]
