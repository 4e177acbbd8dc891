"""Schedules: golden rates, horizons, ends, and the epoch clock."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import ComponentRestoreError, ConfigError
from nnx_jax.optim import (
    PlateauSchedule,
    Schedule,
    ScheduleError,
    build_epoch_schedule,
    build_schedule,
    make_schedule,
    planned_updates,
)
from nnx_jax.params.scheduler import NNSchedulerParams


def rates(schedule: Schedule, n: int) -> list[float]:
    """The traced rates, checked against the host's."""
    traced = np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(n, dtype=jnp.int32)))
    assert traced.dtype == np.float32
    host = [schedule.at(k) for k in range(n)]
    np.testing.assert_allclose(traced, host, rtol=2e-6, atol=1e-8)
    return host


def test_warmup_then_decay() -> None:
    """nnx:B045 - base 0.12, three warm-up steps, total 8."""
    params = NNSchedulerParams(kind="linear_warmup_decay", clock="optimizer_update", total_steps=8, warmup_steps=3)
    wanted = [0.04, 0.08, 0.12, 0.12, 0.096, 0.072, 0.048, 0.024]
    assert rates(build_schedule(params, 0.12, 8), 8) == pytest.approx(wanted, abs=1e-12)


def test_the_first_rate_of_a_warmup_is_not_zero() -> None:
    """case:B08 - peak 0.1, warm-up 4: the first update already uses 0.025, and the rate shown is the rate applied."""
    for kind in ("linear_warmup_decay", "warmup_cosine"):
        schedule = make_schedule(kind, 0.1, 100, warmup_steps=4)
        assert rates(schedule, 5) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1], abs=1e-12)


def test_the_horizon_rounds_windows_up() -> None:
    """case:B05 - 10 samples, batch 4, window 2, 3 epochs: 6 updates, and cosine uses all of them."""
    n_batches = -(-10 // 4)
    assert planned_updates(3, n_batches, 2) == 6
    wanted = [1, 0.933013, 0.75, 0.5, 0.25, 0.066987]
    assert rates(make_schedule("cosine", 1.0, planned_updates(3, n_batches, 2)), 6) == pytest.approx(wanted, abs=1e-6)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 12))
def test_planned_updates_is_what_a_loop_would_commit(n_epochs: int, n_batches: int, accumulate: int) -> None:
    committed = sum(
        (batch + 1) % accumulate == 0 or batch == n_batches - 1 for _ in range(n_epochs) for batch in range(n_batches)
    )
    assert planned_updates(n_epochs, n_batches, accumulate) == committed


def test_the_split_of_the_batch_does_not_change_the_plan() -> None:
    """32 rows as batch 1 x window 4 or as batch 4 x window 1: 8 updates."""
    assert planned_updates(1, 32, 4) == planned_updates(1, 8, 1) == 8
    with pytest.raises(ConfigError, match="n_batches must be 1 or more, got 0"):
        planned_updates(1, 0)


def test_a_per_update_cosine_counts_updates() -> None:
    """case:B09 - 4 epochs of 25 updates: 0.5 at update 50, the minimum only at 100."""
    schedule = make_schedule("cosine", 1.0, planned_updates(4, 25))
    host = rates(schedule, 101)
    assert host[50] == pytest.approx(0.5)
    assert np.argmin(host) == 100
    assert np.all(np.diff(host) < 0)


def test_total_below_the_plan_is_refused() -> None:
    """nnx:B053 - total_steps 3 and 8 planned updates: ValueError when built."""
    for kind in ("one_cycle", "linear_warmup_decay", "warmup_cosine"):
        with pytest.raises(ConfigError, match="total_steps is 3 and 8 updates are planned; write 8 or more") as caught:
            build_schedule(NNSchedulerParams(kind=kind, total_steps=3), 0.1, 8)
        assert isinstance(caught.value, ValueError)


def test_more_updates_than_the_total_are_refused() -> None:
    """nnx:B054 - total_steps 4: the fifth update is a ValueError that names it (the schedule's part)."""
    for kind in ("one_cycle", "linear_warmup_decay", "warmup_cosine"):
        schedule = make_schedule(kind, 0.1, None, total_steps=4)
        schedule.check(4)
        with pytest.raises(ScheduleError, match="ends after 4 updates and cannot give a rate for update 5") as caught:
            schedule.check(5)
        assert isinstance(caught.value, ValueError)


def test_an_endless_run_needs_a_length() -> None:
    for kind, name in [("one_cycle", "total_steps"), ("cosine", "T_max"), ("step", "step_size")]:
        with pytest.raises(ConfigError, match=f"not known beforehand; give {name} for '{kind}'"):
            make_schedule(kind, 0.1, None)
    assert make_schedule("constant", 0.1, None).at(10**6) == 0.1


def test_cosine_past_its_period() -> None:
    """nnx:B062 - past the default period one warning and the lowest rate; a chosen T_max comes round again."""
    schedule = make_schedule("cosine", 1.0, 4, min_lr=0.1)
    schedule.check(4)
    with pytest.warns(UserWarning, match="planned 4 positions and is at 5") as caught:
        schedule.check(5)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.check(6)
    assert rates(schedule, 8)[4:] == pytest.approx([0.1] * 4)
    chosen = make_schedule("cosine", 1.0, 4, T_max=4, min_lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen.check(9)
    assert chosen.at(8) == pytest.approx(1.0)


def test_defaults_follow_the_horizon() -> None:
    """Step size a third (at least 1), cosine period and totals all, warm-up a tenth (at least 1)."""
    assert make_schedule("step", 1.0, 10).period == 3
    assert make_schedule("step", 1.0, 2).period == 1
    assert make_schedule("cosine", 1.0, 10).period == 10
    assert make_schedule("one_cycle", 1.0, 10).period == 10
    warmups = [make_schedule("linear_warmup_decay", 1.0, n).warmup for n in (5, 10, 39)]
    assert warmups == [1, 1, 3]
    assert rates(make_schedule("step", 1.0, 6, factor=0.5), 6) == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert rates(make_schedule("step", 1.0, 6, factor=0.1, min_lr=0.05), 6)[4:] == [0.05, 0.05]


def test_one_cycle_has_torchs_numbers() -> None:
    """OneCycleLR(max_lr=1, total_steps=10): from 1/25 to the top at 0.3 * 10 - 1, then to 1/25/10000."""
    host = rates(make_schedule("one_cycle", 1.0, 10), 10)
    assert host[:3] == pytest.approx([0.04, 0.52, 1.0])
    assert host[9] == pytest.approx(4e-6)
    low = 4e-6
    fall = [low + (1 - low) * (1 + np.cos(np.pi * (k - 2) / 7)) / 2 for k in range(3, 10)]
    assert host[3:] == pytest.approx(fall)
    for total in range(1, 6):
        assert np.isfinite(rates(make_schedule("one_cycle", 1.0, total), total)).all()


def test_warmup_cosine_falls_to_its_floor() -> None:
    schedule = make_schedule("warmup_cosine", 1.0, 10, warmup_steps=2, min_lr=0.2)
    host = rates(schedule, 11)
    assert host[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert host[6] == pytest.approx(0.6)
    assert host[10] == pytest.approx(0.2)
    assert make_schedule("warmup_cosine", 1.0, 10, warmup_steps=0).at(0) == 1.0
    assert make_schedule("linear_warmup_decay", 1.0, 4, warmup_steps=4).at(3) == 1.0
    with pytest.raises(ConfigError, match="warmup_steps is 11 and the schedule has 10"):
        make_schedule("warmup_cosine", 1.0, 10, warmup_steps=11)


def test_unknown_and_misplaced_kinds() -> None:
    """A plateau on the update clock is refused where schedules are built as well."""
    with pytest.raises(ConfigError, match="no schedule 'cosin'; did you mean 'cosine'"):
        make_schedule("cosin", 1.0, 3)
    with pytest.raises(ConfigError, match="reduce_on_plateau follows a validation value; write clock: epoch"):
        make_schedule("reduce_on_plateau", 1.0, 3)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10), st.sampled_from(["step", "cosine", "one_cycle", "linear_warmup_decay", "warmup_cosine"]))
def test_an_epoch_schedule_continues_where_it_stopped(stop: int, kind: str) -> None:
    """The rates after a restore are those of the uninterrupted run."""
    params = NNSchedulerParams(kind=kind)
    straight, first = build_epoch_schedule(params, 0.1, 10), build_epoch_schedule(params, 0.1, 10)
    wanted = [straight.rate] + [straight.step() for _ in range(10)]
    got = [first.rate] + [first.step() for _ in range(stop)]
    second = build_epoch_schedule(params, 0.1, 10)
    second.restore(first.state())
    assert second.rate == got[-1]
    got += [second.step() for _ in range(10 - stop)]
    assert got == wanted


def test_another_horizon_is_not_restored() -> None:
    """case:B06 - a stored cosine of 10 epochs is not silently stretched to 20; the message names both."""
    schedule = build_epoch_schedule(NNSchedulerParams(kind="cosine"), 1.0, 10)
    after = [schedule.step() for _ in range(7)]
    assert after[4:] == pytest.approx([0.5, 0.345492, 0.206107], abs=1e-6)
    longer = build_epoch_schedule(NNSchedulerParams(kind="cosine"), 1.0, 20)
    with pytest.raises(ComponentRestoreError, match="schedule period: stored 10, configured 20"):
        longer.restore(schedule.state())
    assert longer.rate == 1.0
    plateau = PlateauSchedule(1.0)
    with pytest.raises(ComponentRestoreError, match="schedule kind: stored 'cosine', configured 'reduce_on_plateau'"):
        plateau.restore(schedule.state())


def test_plateau_counts_like_torch() -> None:
    """patience 1, cooldown 1, factor 0.5: bad epochs 2 and 3 lower the rate; the epoch after is not counted."""
    plateau = PlateauSchedule(1.0, factor=0.5, patience=1, cooldown=1, threshold=0.0, min_lr=0.2)
    seen = [plateau.step(v) for v in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)]
    assert seen == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2, 0.2]


def test_plateau_with_a_monitors_min_delta() -> None:
    """NLL 0.8, 0.7, 0.695, 0.71 with min_delta 0.01 of the monitor, which is absolute: two bad epochs."""
    params = NNSchedulerParams(kind="reduce_on_plateau", patience=5)
    plateau = build_epoch_schedule(params, 0.1, 10, monitor_mode="min", min_delta=0.01)
    for value in (0.8, 0.7, 0.695, 0.71):
        plateau.step(value)
    assert plateau.state()["bad_epochs"] == 2
    assert plateau.state()["best"] == 0.7


def test_plateau_missing_and_non_finite_values() -> None:
    plateau = PlateauSchedule(1.0, patience=0, factor=0.5, cooldown=0)
    assert plateau.step(None) == 1.0
    assert plateau.step(0.5) == 1.0
    assert plateau.step(float("nan")) == 0.5
    assert plateau.step(float("-inf")) == 0.25
    assert plateau.best == 0.5
    upward = PlateauSchedule(1.0, mode="max", patience=0, factor=0.5, cooldown=0, threshold=0.1)
    assert [upward.step(v) for v in (1.0, 1.05, 1.2)] == [1.0, 0.5, 0.5]


def test_plateau_continues_where_it_stopped() -> None:
    values = [1.0, 1.1, 1.2, 0.9, 1.0, 1.1, 1.2]
    straight = PlateauSchedule(1.0, patience=1, factor=0.5)
    wanted = [straight.step(v) for v in values]
    first = PlateauSchedule(1.0, patience=1, factor=0.5)
    got = [first.step(v) for v in values[:3]]
    second = PlateauSchedule(1.0, patience=1, factor=0.5)
    second.restore(first.state())
    assert got + [second.step(v) for v in values[3:]] == wanted
    assert second.state() == straight.state()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"factor": 1.0}, "factor must be above 0 and below 1"),
        ({"mode": "MAX"}, "mode is 'MAX'; write 'min' or 'max'"),
        ({"threshold_mode": "x"}, "threshold_mode is 'x'"),
    ],
)
def test_wrong_plateau_settings(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlateauSchedule(1.0, **settings)


def test_fields_of_a_spec_reach_the_schedule() -> None:
    params = SimpleNamespace(
        kind="step", min_lr=0.01, factor=0.5, step_size=2, T_max=None, total_steps=None, warmup_steps=None
    )
    schedule = build_schedule(params, 1.0, 9)  # type: ignore[arg-type]
    assert (schedule.period, schedule.factor, schedule.min_lr) == (2, 0.5, 0.01)
