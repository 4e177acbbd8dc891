"""Trials trained as one program equal the same trials trained one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
from nnx_jax.params.train import MonitorSpec, NNTrainParams
from nnx_jax.plan import ExperimentPlan, FitResult
from nnx_jax.search import (
    CategoricalParam,
    FloatParam,
    IntParam,
    RandomSampler,
    SearchSpace,
    VmappedTrial,
    vmapped_trials,
)
from tests.e2e.helpers import dataset, net_params
from tests.e2e.toys import gradients
from tests.search.toy import plan, run, value_at, with_rate

UNIT = 2.0**-24
"""Largest relative error of one float32 operation."""


def seeded(rate: float, seed: int, **train: Any) -> ExperimentPlan:
    """A net with dropout on shuffled rows, in windows of two microbatches whose last is shorter."""
    optim = NNOptimParams(kind="adamw", max_lr=rate, grad_clip_norm=1.0, accumulate_grad_batches=2)
    params = NNTrainParams(**{"n_epochs": 3, "optim": optim, "seed": seed, **train})
    return (
        ExperimentPlan()
        .with_net(net_params(norm="layer"))
        .with_metrics("accuracy")
        .with_train(params)
        .with_data(train=dataset(), val=dataset(9, seed=1), batch_size=4)
    )


def one_by_one(plans: Sequence[ExperimentPlan], runs: Path) -> list[FitResult]:
    return [each.fit(runs_dir=runs, quiet=True) for each in plans]


def assert_equal(together: VmappedTrial, alone: FitResult, tolerance: float) -> None:
    rows = alone.run.records
    losses = [row["train_loss"] for row in rows if row["kind"] == "update"]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    np.testing.assert_allclose(together.losses, losses, rtol=tolerance)
    assert len(together.measured) == len(epochs)
    for (epoch, step, value), row in zip(together.measured, epochs, strict=True):
        assert (epoch, step) == (row["epoch"], row["step"])
        assert value == pytest.approx(row["monitor"], rel=tolerance)
    for name, value in together.values.items():
        assert value == pytest.approx(epochs[-1][name], rel=tolerance), name
    assert alone.run.best is not None
    assert together.best_epoch == alone.run.best.epoch


SCHEDULES: list[Any] = [
    pytest.param({"kind": "warmup_cosine", "clock": "optimizer_update"}, 2, id="updates", marks=pytest.mark.slow),
    pytest.param({"kind": "reduce_on_plateau", "patience": 0, "cooldown": 0, "factor": 0.5}, 3, id="epochs"),
]


@pytest.mark.parametrize("scheduler, epochs", SCHEDULES)
def test_they_equal_the_same_trials_one_by_one(scheduler: dict[str, Any], epochs: int, tmp_path: Path) -> None:
    """Rates and seeds (weights, order of rows, dropout) of each its own, on both clocks; a plateau halves the rate.

    The products of all trials are made in one call and may be added in another order, so numbers agree to rounding. One
    update adds sums of at most 4 inputs, 6 hidden units, 3 classes and 8 rows, forward and backward, so its relative
    error is at most 2 * (4 + 6 + 3 + 8) units; the errors of an epoch's 3 updates, and of the epochs, add up.
    """
    monitor = MonitorSpec(min_delta=10.0)  # no epoch after the first one is an improvement
    plans = [
        seeded(rate, seed, n_epochs=epochs, scheduler=scheduler, monitor=monitor)
        for rate, seed in ((1e-2, 0), (3e-2, 4))
    ]
    for left, right in zip(vmapped_trials(plans), one_by_one(plans, tmp_path), strict=True):
        assert left.updates == len(left.losses) == 3 * epochs
        assert_equal(left, right, 3 * epochs * 2 * (4 + 6 + 3 + 8) * UNIT)
        rates = right.run.column("lr")
        assert (rates[-1] == pytest.approx(rates[0] / 2)) == (epochs == 3)


def test_a_weight_by_itself_is_equal_bit_for_bit(tmp_path: Path) -> None:
    """Where there is no product of matrices, nothing is added in another order."""
    plans = [with_rate(plan(2), {"rate": rate}) for rate in (0.1, 0.3)]
    for left, right in zip(vmapped_trials(plans), one_by_one(plans, tmp_path), strict=True):
        assert_equal(left, right, 0.0)


def test_an_epoch_longer_than_the_record_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in parts of three of its four updates: the same numbers."""
    (whole,) = vmapped_trials([plan(2)])
    monkeypatch.setattr(FlaxEngine, "most_rows", 3)
    (parts,) = vmapped_trials([plan(2)])
    np.testing.assert_array_equal(parts.losses, whole.losses)
    assert (parts.updates, parts.measured, parts.values) == (8, whole.measured, whole.values)


def test_a_cap_of_updates() -> None:
    """As for a trial alone: six updates at four an epoch, one validation."""
    (trial,) = vmapped_trials([plan(3)], updates=6)
    assert (trial.updates, len(trial.losses), trial.epochs) == (6, 6, 1)
    assert trial.best == pytest.approx(value_at(0.1, 4), rel=1e-5)
    (none,) = vmapped_trials([plan(3)], updates=3)
    assert (none.updates, none.best, none.best_epoch, none.measured) == (3, None, None, ())


def test_one_trial_that_is_not_finite_does_not_end_the_others() -> None:
    """A rate of 1e30 throws the weight away in the first update; the second one's loss is infinite."""
    good, bad = vmapped_trials([plan(2), with_rate(plan(2), {"rate": 1e30})])
    assert good.error == ""
    assert good.best == pytest.approx(value_at(0.1, 8), rel=1e-5)
    assert bad.error.startswith("NonFiniteError: step: update 2")
    assert (bad.updates, bad.epochs, bad.best) == (1, 0, None)


@pytest.mark.parametrize(
    "plans, message",
    [
        ([], "there is no plan"),
        ([plan(), plan(3)], "plan 1 differs from plan 0 in more than rate and seed: train.n_epochs was 2, is 3"),
        ([plan(), plan().with_data(batch_size=2)], "data.batch_size was 1, is 2"),
        ([plan().with_callbacks(print)], "callbacks: a callback watches one run"),
        ([plan().with_data(train=dataset)], "data.train: is a factory"),
        ([plan().with_train(NNTrainParams(max_steps=3))], "train.n_epochs: trials that train as one"),
        ([plan().resuming("abc")], "train.resume_from_run_id: "),
        (
            [plan().with_optim(NNOptimParams(param_groups=[NNParamGroupSpec(patterns="w", max_lr=0.1)]))],
            "give lr_scale",
        ),
    ],
)
def test_what_cannot_be_trained_together(plans: list[ExperimentPlan], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vmapped_trials(plans)


def test_batches_of_two_sizes_are_refused() -> None:
    data = {"train": gradients(1.0, 2.0, 3.0), "batch_size": 2, "tail": "keep"}
    with pytest.raises(DataError, match="in batches of one size"):
        vmapped_trials([plan().with_data(**data)])


def test_a_search_of_rate_and_seed_at_once(tmp_path: Path) -> None:
    """The trials of `search(vmapped=True)` are those of `search`, without runs; the study goes on either way."""
    space = SearchSpace(rate=FloatParam(low=0.1, high=0.5), seed=IntParam(low=0, high=9))

    def apply(plan: ExperimentPlan, values: Mapping[str, Any]) -> ExperimentPlan:
        return with_rate(plan, values).with_seed(values["seed"])

    where = {"apply": apply, "space": space, "sampler": RandomSampler(1)}
    alone = run(3, runs_dir=tmp_path / "runs", **where)
    together = run(2, storage=tmp_path / "studies", vmapped=True, **where)
    more = run(3, storage=tmp_path / "studies", vmapped=True, **where)
    assert more.trials[:2] == together.trials
    for left, right in zip(more.trials, alone.trials, strict=True):
        assert (left.values, left.state, left.updates, left.epochs) == (
            right.values, right.state, right.updates, right.epochs,
        )  # fmt: skip
        assert left.value == right.value
        assert left.measured == right.measured
        assert left.run_id is None
    assert more.best.values == alone.best.values


def test_what_a_search_at_once_refuses() -> None:
    wide = SearchSpace(rate=CategoricalParam(choices=(0.1, 0.2)), rows=CategoricalParam(choices=(1, 2)))
    with pytest.raises(ConfigError, match="data.batch_size was 1, is 2"):
        run(4, space=wide, vmapped=True, apply=lambda p, v: with_rate(p, v).with_data(batch_size=v["rows"]))
    with pytest.raises(ConfigError, match="budget.deadline_seconds: trials that train as one program end together"):
        run(1, vmapped=True, deadline=1.0)
