"""Windows as runs: what a user reads in the history and in the checkpoints is the update of the union of the data."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, NonFiniteError
from nnx_jax.loop.builtin import EarlyStopping
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import MonitorSpec
from tests.e2e.toys import (
    Scripted,
    Slope,
    Target,
    arrays,
    column,
    fit,
    gradients,
    half,
    only_run,
    rows,
    slope,
    steps,
    targets,
    weight,
)

RISING = NNSchedulerParams(kind="linear_warmup_decay", clock="optimizer_update", warmup_steps=10, total_steps=10)
"""With max_lr 1 the rate of update n (from 0) is 0.1 (n + 1)."""


def test_unequal_valid_counts_in_a_window(tmp_path: Path) -> None:
    """case:A01 (the mean of the two means would give w = 0.4 and loss 16)"""
    data = targets(8, 0, 0, 0, 0, 0, 0, 0, weight=[1, 0, 0, 0, 1, 1, 1, 0])
    run = fit(tmp_path, Target(), half, data, accumulate=2, data={"batch_size": 4})
    assert weight(run) == pytest.approx(0.2, abs=1e-7)
    assert column(run, "update", "train_loss") == [8.0]
    assert column(run, "epoch", "train_loss") == [8.0]


def test_a_masked_microbatch_counts_nothing_and_a_masked_window_is_no_update(tmp_path: Path) -> None:
    """case:A03 nnx:B047 (window 1 is half masked, window 2 whole: momentum would move w on by 0.18, a tick take 0.2)"""
    data = targets(4, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, weight=[1, 1, *[0] * 6, *[1] * 4])
    optim = {"momentum": 0.9, "max_lr": 1.0}
    checkpoint = {"every_n_steps": 1, "keep": 9}
    run = fit(
        tmp_path, Target(), half, data, accumulate=2, data={"batch_size": 2}, scheduler=RISING, optim=optim,
        checkpoint=checkpoint, record_every="update",
    )  # fmt: skip
    assert weight(run, "1") == pytest.approx(0.2, abs=1e-7)
    updates = rows(run, "update")
    assert [row["step"] for row in updates] == [1, 1, 2]
    assert [row["skipped"] for row in updates] == [0, 1, 0]
    assert updates[2]["lr"] == pytest.approx(0.2)
    # the trace is 0.9 * -2 + (0.2 - 1), its rate 0.2
    assert weight(run) == pytest.approx(0.2 + 0.2 * (0.9 * 2 + 0.8), abs=1e-6)
    assert all(math.isfinite(row["train_loss"]) for row in run.records if row["train_loss"] is not None)
    assert updates[1]["train_loss"] is None  # not 0 / 0
    assert arrays(run)["opt_state/count"] == 2


def test_the_last_window_is_divided_by_its_own_count(tmp_path: Path) -> None:
    """case:A04 case:A06 (0.71075 is divided by 2, 0.485 is dropped; the loss of update 1 is not 0.625 or 2)"""
    run = fit(
        tmp_path, Target(), half, targets(1, 2, 3, 4, 5), accumulate=2, checkpoint={"every_n_steps": 1, "keep": 9}
    )
    assert [float(weight(run, str(n))) for n in (1, 2, 3)] == pytest.approx([0.15, 0.485, 0.9365], abs=1e-6)
    losses = column(run, "update", "train_loss")
    assert losses[0] == 1.25
    assert losses[1:] == pytest.approx([5.73625, 10.1926125], rel=1e-6)
    assert column(run, "update", "batch") == [1, 3, 4]


def test_a_window_longer_than_the_epoch_is_closed_at_its_end(tmp_path: Path) -> None:
    """case:A05 (never 0 updates, nor 6, nor a division by 8: 0.14719)"""
    with pytest.warns(UserWarning, match="accumulate_grad_batches.*8.*3"):
        run = fit(
            tmp_path, Target(), half, targets(1, 2, 3), accumulate=8, n_epochs=2,
            checkpoint={"every_n_steps": 1, "keep": 9},
        )  # fmt: skip
    assert [float(weight(run, name)) for name in ("1", "2")] == pytest.approx([0.2, 0.38], abs=1e-6)
    assert column(run, "update", "step") == [1, 2]


@pytest.mark.parametrize("number", [0, -1])
def test_a_window_has_one_microbatch_or_more(number: int) -> None:
    """case:A05"""
    with pytest.raises(ConfigError, match=rf"accumulate_grad_batches.*{number}"):
        NNOptimParams(accumulate_grad_batches=number)


def test_gradients_are_added_in_float32(tmp_path: Path) -> None:
    """case:A07 (a sum of ones in bfloat16 stops at 256 and gives -0.5)"""
    run = fit(
        tmp_path, Slope(), slope, gradients(*[1.0] * 512), accumulate=512, optim={"max_lr": 1.0}, precision="bfloat16"
    )
    assert weight(run) == [-1.0]


def test_the_window_is_clipped_not_its_microbatches(tmp_path: Path) -> None:
    """case:A08 (clipped one by one: 0.5, 0.5)"""
    data = gradients((3, 0), (0, 4))
    optim = {"max_lr": 1.0, "grad_clip_norm": 1.0}
    run = fit(tmp_path, Slope(0.0, 0.0), slope, data, accumulate=2, optim=optim)
    assert weight(run) == pytest.approx([-0.6, -0.8], abs=1e-6)
    assert column(run, "update", "grad_norm") == [2.5]


def test_decay_acts_once_a_window(tmp_path: Path) -> None:
    """case:A09 (four decays: 0.96059601)"""
    optim = {"kind": "adamw", "momentum": None, "weight_decay": 0.1, "decay_mask": "all"}
    run = fit(tmp_path, Slope(1.0), slope, gradients(0, 0, 0, 0), accumulate=4, optim=optim)
    assert weight(run) == pytest.approx([0.99], abs=1e-7)
    assert arrays(run)["opt_state/count"] == 1


def test_a_nan_microbatch_costs_its_window_and_nothing_else(tmp_path: Path) -> None:
    """case:C01 (NaN counted as 0 gives 0.05, 0.15, 0.25; a shifted window updates after microbatches 3 and 5)"""
    data = steps(6, bad=[1])
    keep = {"every_n_steps": 1, "keep": 9}
    run = fit(tmp_path, Slope(), slope, data, accumulate=2, nonfinite="skip", checkpoint=keep)
    assert [weight(run, name).item() for name in ("1", "2")] == pytest.approx([0.1, 0.2], abs=1e-7)
    assert column(run, "update", "skipped") == [1, 0, 0]
    assert column(run, "update", "batch") == [1, 3, 5]
    assert column(run, "update", "step") == [0, 1, 2]
    assert math.isfinite(column(run, "epoch", "train_loss")[0])


def test_a_skipped_update_leaves_the_moments_alone(tmp_path: Path) -> None:
    """case:C02 (a zeroed gradient would give -0.1670, -0.2488 and count 3)"""
    optim = {"kind": "adam", "momentum": None}
    run = fit(tmp_path, Slope(), slope, gradients(1, 1, 1, bad=[1]), nonfinite="skip", optim=optim)
    kept = arrays(run)
    assert kept["params/w"] == pytest.approx([-0.2], abs=1e-5)
    assert kept["opt_state/count"] == 2
    assert kept["opt_state/inner/mu/w"] == pytest.approx([0.19])
    assert kept["opt_state/inner/nu/w"] == pytest.approx([0.001999])


def test_after_the_allowed_skips_the_run_ends_on_its_last_finite_weights(tmp_path: Path) -> None:
    """case:C03 (two in a row are allowed, twice, as a good update starts the count again; the third in a row is not)"""
    bad = [1, 2, 4, 5, 6, 7, 8]
    with pytest.raises(NonFiniteError, match="update 3, microbatch 6.*3 bad windows in a row"):
        fit(tmp_path, Slope(), slope, steps(10, bad=bad), nonfinite="skip", max_consecutive_skips=2)
    run = only_run(tmp_path)
    assert run.status == "interrupted"
    assert weight(run) == pytest.approx([0.2], abs=1e-7)
    assert column(run, "update", "skipped") == [0, 1, 1, 0, 1, 1]


def test_the_schedule_waits_for_a_skipped_update(tmp_path: Path) -> None:
    """case:C04 (0.4: the skipped update took the rate 0.2)"""
    data = steps(3, bad=[1])
    run = fit(tmp_path, Slope(), slope, data, nonfinite="skip", scheduler=RISING, optim={"max_lr": 1.0})
    assert weight(run) == pytest.approx([0.3], abs=1e-7)
    assert column(run, "update", "lr") == pytest.approx([0.1, None, 0.2])


def test_an_infinite_norm_is_never_clipped_into_an_update(tmp_path: Path) -> None:
    """case:C07 (the clip of (inf, 1) gives (NaN, 0))"""
    data = gradients((1, 1))
    data = type(data)(x=np.ones((2, 2), np.float32), y=np.array([[0, 1], [1, 1]], np.float32))
    optim = {"max_lr": 1.0, "grad_clip_norm": 1.0}
    run = fit(tmp_path, Slope(5.0, 5.0), slope, data, nonfinite="skip", optim=optim)
    assert column(run, "update", "skipped") == [1, 0]
    assert not math.isfinite(column(run, "update", "grad_norm")[0])
    assert weight(run) == pytest.approx([5 - 0.5**0.5] * 2, rel=1e-6)
    assert arrays(run)["opt_state/count"] == 1


def test_the_nan_detector_of_jax_finds_the_update_not_a_donated_array(tmp_path: Path) -> None:
    """case:C12 (run again on donated inputs it would say "Array has been deleted")"""
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="update 3, microbatch 2.*not finite"):
        fit(tmp_path, Slope(), slope, steps(4, bad=[2]), checkpoint={"every_n_steps": 1}, dispatch="step")
    run = only_run(tmp_path)
    assert run.last is not None
    assert run.last.step == 2
    assert weight(run) == pytest.approx([0.2])


def test_a_nan_validation_is_no_best_and_costs_patience(tmp_path: Path) -> None:
    """case:C11 (BEST stays on epoch 1, the run stops after epoch 3)"""
    nan = math.nan
    script = Scripted(0.5, 0.4, nan, nan, nan)
    with pytest.warns(RuntimeWarning, match="val_loss is nonfinite"):
        run = script.fit(tmp_path, callbacks=[EarlyStopping(patience=2)], monitor=MonitorSpec())
    assert run.last is not None
    assert run.best is not None
    assert (run.best.epoch, run.last.epoch) == (1, 3)
    assert np.isfinite(weight(run, "BEST")).all()


def test_training_that_turns_nan_leaves_last_and_best_finite(tmp_path: Path) -> None:
    """case:C11 (the update that would write NaN weights is never made, so no checkpoint can hold them)"""
    with pytest.raises(NonFiniteError, match="update 3, microbatch 2"):
        Scripted(0.5, 0.4, 0.3, broken_from=2).fit(tmp_path, monitor=MonitorSpec())
    run = only_run(tmp_path)
    assert run.last is not None
    assert run.best is not None
    assert (run.best.epoch, run.last.epoch, run.last.step) == (1, 1, 2)
    assert weight(run) == weight(run, "BEST") == [2.0]
