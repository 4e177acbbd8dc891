"""Skipping spikes: what counts as one, and that a rejected batch might as well never have come."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import VetoError
from nnx_jax.core.hooks import TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks import (
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    HookSpec,
    MixedPrecisionHook,
    SkipNonFinite,
    SpikeSkipHook,
)
from nnx_jax.objectives.terms import LossTerm
from tests.hooks.toy import Toy

NAN = float("nan")


def test_the_running_mean_by_hand() -> None:
    """nvalchemi:97 (norms 1, 2, 100, 3; factor 5, decay 0.9: means 1, 1.1, rejected, 1.29)"""
    spike = SpikeSkipHook(5.0, 0.9, 1)
    toy = Toy(spike, w=0.0, slope=True)
    means = []
    for x in (1.0, -2.0, 100.0, 3.0):
        toy.step(x)
        means.append(float(toy.slot(spike)["mean"]))
    np.testing.assert_allclose(means, [1, 1.1, 1.1, 1.29], rtol=1e-6)
    slot = toy.slot(spike)
    assert (slot["n"], slot["skips"], slot["row"]) == (3, 1, 0)
    assert toy.w == pytest.approx(-0.1 * (1 - 2 + 3), rel=1e-6)


def test_nothing_finite_is_rejected_before_the_warmup_is_over() -> None:
    spike = SpikeSkipHook(warmup=2)
    toy = Toy(spike, w=0.0, slope=True)
    toy.trace([1.0, 100.0, 1e4])
    assert toy.slot(spike)["skips"] == 1
    assert toy.slot(spike)["n"] == 2
    bad = Toy(SpikeSkipHook(warmup=100))
    assert bad.trace([float("nan"), 1.0]) == [1.0, pytest.approx(0.8)]


def test_the_loss_of_the_window_as_metric() -> None:
    """(windows of two, losses 1, 3 | 1, 1 | 1, 29: means 2, 1, 15; the last is over 5 times the running mean)"""
    spike = SpikeSkipHook(5.0, 0.5, 1, "loss")
    toy = Toy(GradientAccumulationHook(2), spike, w=1.0, rate=1e-9)
    means = []
    for x in np.sqrt([1, 3, 1, 1, 1, 29]):
        toy.step(x)
        means.append(float(toy.slot(spike)["mean"]))
    np.testing.assert_allclose(means, [0, 2, 2, 1.5, 1.5, 1.5], rtol=1e-5)
    assert toy.counters()["step"] == 2


def test_a_loss_that_is_not_a_number() -> None:
    """nvalchemi:89 (parameters finite, one update less, every batch counted, Adam's count is the updates')"""
    toy = Toy(SpikeSkipHook(metric="loss"), optimizer="adam")
    toy.trace([1.0, float("nan"), 1.0, 1.0])
    assert np.isfinite(toy.w)
    counters = toy.counters()
    assert (counters["batch"], counters["step"]) == (4, 3)
    assert toy.programs.named(toy.carry)["opt_state/count"] == 3


def test_the_norm_before_clipping_counts() -> None:
    spike = SpikeSkipHook(5.0, 0.9, 1)
    toy = Toy(GradientClipHook(1.0), spike, w=0.0, slope=True)
    toy.trace([2.0, 100.0])
    assert toy.slot(spike)["mean"] == 2.0
    assert toy.slot(spike)["skips"] == 1


def test_too_many_in_a_row_stop_the_run() -> None:
    toy = Toy(SpikeSkipHook(5.0, 0.9, 1, max_consecutive=2), w=0.0, slope=True)
    toy.trace([-1.0, 100.0, 100.0, 100.0, -1.0])
    with pytest.raises(VetoError, match="SpikeSkipHook rejected update 2 .microbatch 3."):
        toy.programs.read_records(toy.carry)
    assert toy.w == pytest.approx(0.1)


def test_counts_outlive_a_resume() -> None:
    """nvalchemi:96"""
    xs = [1.0, 50.0, 1.0, 60.0, 1.0]
    whole, first, second = (Toy(SpikeSkipHook(warmup=1), w=0.0, slope=True) for _ in range(3))
    whole.trace(xs)
    first.trace(xs[:3])
    second.carry = second.programs.load_named(dict(first.programs.named(first.carry)))
    second.trace(xs[3:])
    assert second.leaves() == whole.leaves()
    assert second.slot(second.plan.update[0])["skips"] == 2


def test_devices_decide_alike() -> None:
    """nvalchemi:95 (one of four shards spikes: the batch is rejected on all, as on one device)"""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    whole, rows = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in ((), ("data",)))
    spike = SpikeSkipHook(5.0, 0.9, 1)
    one, four = Toy(spike, rows=4, optimizer="adam"), Toy(spike, rows=4, optimizer="adam")
    four.carry.leaves = jax.device_put(four.carry.leaves, whole)
    for x in ([1.0, 1, 1, 1], [1.0, 1, 500, 1], [1.0, 2, 1, 1]):
        one.step(x)
        four.programs.step(four.carry, {n: jax.device_put(v, rows) for n, v in four.batch(x).items()})
    assert four.slot(spike)["skips"] == one.slot(spike)["skips"] == 1
    assert four.counters() == one.counters()
    assert four.w == pytest.approx(one.w, rel=1e-6)


# -- what it learns from ----------------------------------------------------------------------------------------------


class Late(TrainingUpdateHook):
    """Vetoes the microbatches of the given numbers after everybody else."""

    priority = 60

    def __init__(self, *batches: int) -> None:
        self.batches = batches

    def __call__(self, ctx, stage, will_skip):
        if stage is TrainingStage.DO_OPTIMIZER_STEP:
            return ~jnp.isin(ctx.batch_count, jnp.array(self.batches, jnp.int32)), ctx.loss
        return True, ctx.loss


@pytest.mark.parametrize(
    "metric, executor", [("grad_norm", "compiled"), ("loss", "compiled"), ("grad_norm", "eager"), ("loss", "staged")]
)
def test_a_later_veto_teaches_nothing(metric, executor) -> None:
    """(1, 3, 1 with the 3 vetoed late: as 1, 1)"""
    options = {"w": 0.0 if metric == "grad_norm" else 1.0, "rate": 1e-9, "slope": True, "executor": executor}
    spike, other = (SpikeSkipHook(5.0, 0.9, 1, metric=metric) for _ in range(2))
    toy, without = Toy(spike, Late(1), **options), Toy(other, Late(), **options)
    toy.trace([1, 3, 1])
    without.trace([1, 1])
    slot = toy.slot(spike)
    assert (slot["mean"], slot["n"], slot["skips"], slot["row"]) == (1.0, 2, 0, 0)
    assert {name: leaf.tobytes() for name, leaf in slot.items()} == {
        name: leaf.tobytes() for name, leaf in without.slot(other).items()
    }


@pytest.mark.parametrize("metric", ["grad_norm", "loss"])
def test_a_batch_without_rows_teaches_nothing(metric) -> None:
    """(first a batch without rows, whose norm and loss are 0: no mean that makes everything after it a spike)"""
    spike = SpikeSkipHook(5.0, 0.9, 1, metric=metric)
    toy = Toy(spike, w=1.0, rate=1e-9, slope=True)
    toy.step([])
    assert {name: float(leaf) for name, leaf in toy.slot(spike).items()} == dict.fromkeys(toy.slot(spike), 0.0)
    toy.trace([1, 2])
    slot = toy.slot(spike)
    assert (slot["n"], slot["skips"]) == (2, 0)
    assert slot["mean"] == pytest.approx(1.1)
    toy.step([])
    assert toy.slot(spike)["n"] == 2


def test_an_update_that_the_step_drops_teaches_nothing() -> None:
    """(1, 3, 1, where the loss of the 3 is infinite and its gradient is 3: fine to this hook, and not to the step)"""

    def terms(outputs, batch):
        extra = jnp.where(batch["x"].max() == 3, jnp.inf, 0.0)
        return (LossTerm("slope", jnp.sum(outputs * batch["mask"]) + extra, jnp.sum(batch["mask"])),)

    spike = SpikeSkipHook(5.0, 0.9, 1)
    toy = Toy(spike, w=0.0, terms=terms, nonfinite="skip")
    toy.trace([1, 3, 1])
    slot = toy.slot(spike)
    assert (slot["mean"], slot["n"], slot["skips"]) == (1.0, 2, 0)
    assert toy.counters()["step"] == 2


def test_only_an_applied_update_ends_a_row() -> None:
    """(1, then spikes with a late veto of a good one between: two rejections in a row, then an applied one)"""
    spike = SpikeSkipHook(5.0, 0.9, 1)
    toy = Toy(spike, Late(2), w=0.0, slope=True)
    rows = []
    for x in (1, 100, 1, 100, 1):
        toy.step(x)
        rows.append(int(toy.slot(spike)["row"]))
    assert rows == [0, 1, 1, 2, 0]
    assert toy.slot(spike)["skips"] == 2


def test_the_loss_of_a_microbatch_left_out_does_not_count() -> None:
    """(1, NaN, 3 with the NaN left out: the update is the 2 of the others, and so is the window's loss at w = 1)"""
    hooks = GradientAccumulationHook(3), SkipNonFinite(drop="microbatch"), SpikeSkipHook(metric="loss")
    assert Toy(*hooks, w=0.0, rate=1.0, slope=True).trace([1, NAN, 3])[-1] == -2.0
    toy = Toy(*hooks, w=1.0, rate=1.0, slope=True)
    toy.trace([1, NAN, 3])
    assert toy.slot(hooks[2])["mean"] == 2.0


def test_the_loss_of_a_microbatch_without_rows_does_not_count() -> None:
    """(losses 2, none, 4: the window's is 3, and the open window's sum and number are there meanwhile)"""
    spike = SpikeSkipHook(metric="loss")
    toy = Toy(GradientAccumulationHook(3), spike, w=1.0, rate=1e-9, slope=True)
    toy.trace([2, []])
    assert (toy.slot(spike)["sum"], toy.slot(spike)["count"]) == (2.0, 1)
    toy.step(4)
    slot = toy.slot(spike)
    assert (slot["mean"], slot["sum"], slot["count"]) == (3.0, 0.0, 0)


class Own(TrainingUpdateHook):
    """Windows of its own: starts from zero at even batches, and updates at odd ones."""

    def __call__(self, ctx, stage, will_skip):
        if stage is TrainingStage.BEFORE_BATCH:
            return ctx.batch_count % 2 == 0, ctx.loss
        if stage is TrainingStage.DO_OPTIMIZER_STEP:
            return ctx.batch_count % 2 == 1, ctx.loss
        return True, ctx.loss


@pytest.mark.parametrize("executor", ["compiled", "staged", "eager"])
def test_windows_of_another_hook(executor: str) -> None:
    """(losses 1, 3 | 5, 7: means 2 and 6, of which the running mean with decay 0.5 is 4)"""
    spike = SpikeSkipHook(5.0, 0.5, 2, "loss")
    toy = Toy(Own(), spike, w=1.0, rate=1e-9, slope=True, executor=executor)
    means = []
    for x in (1, 3, 5, 7):
        toy.step(x)
        means.append(float(toy.slot(spike)["mean"]))
    np.testing.assert_allclose(means, [0, 2, 2, 4], rtol=1e-6)


# -- the law ----------------------------------------------------------------------------------------------------------

_TOYS: dict[tuple[str, int, str], Toy] = {}


def whole_stack(precision: str, k: int, metric: Any = "grad_norm") -> Toy:
    """Everything at once, on a model that keeps a running mean of its input as BatchNorm does."""

    def forward(params, model_state, batch, key, train):
        mean = 0.9 * model_state["mean"] + 0.1 * jnp.abs(batch["x"]).mean()
        return params["w"] * jnp.abs(batch["x"]), {"mean": mean}

    if (precision, k, metric) not in _TOYS:
        hooks = (
            GradientAccumulationHook(k),
            MixedPrecisionHook(precision, growth_interval=2),
            GradientClipHook(1.0),
            SpikeSkipHook(5.0, 0.9, 3, metric=metric),
            EMAHook("main", 0.9, update_every=2),
            LateForNegatives(),
        )
        _TOYS[precision, k, metric] = Toy(
            *hooks, rows=2, optimizer="adam", rate=lambda n: 0.01 / (n + 1), forward=forward,
            model_state={"mean": jnp.float32(0)},
        )  # fmt: skip
    return _TOYS[precision, k, metric].fresh()


class LateForNegatives(TrainingUpdateHook):
    """Vetoes, after everybody else, an update whose last batch is negative."""

    priority = 60

    def __call__(self, ctx, stage, will_skip):
        if stage is TrainingStage.DO_OPTIMIZER_STEP:
            return ctx.batch["x"].max() >= 0, ctx.loss
        return True, ctx.loss


def kept(toy: Toy) -> dict[str, bytes]:
    """All that is stored, less what counts batches and rejections."""
    return {name: leaf for name, leaf in toy.leaves().items() if not name.endswith(("counters", "/skips", "/row"))}


@settings(max_examples=20, deadline=None)
@given(
    what=st.lists(st.sampled_from(["fine", "spike", "late"]), min_size=1, max_size=9),
    k=st.sampled_from([1, 3]),
    precision=st.sampled_from(["float32", "float16"]),
    metric=st.sampled_from(["grad_norm", "loss"]),
    seed=st.integers(0, 99),
)
@pytest.mark.slow
def test_a_rejected_batch_was_never_there(what, k, precision, metric, seed) -> None:
    """nvalchemi:88 (bit for bit: weights, moments, the schedule's count, averages, statistics, scale, running mean)"""
    rng = np.random.default_rng(seed)
    what = ["fine"] * 3 + what  # the warm-up
    factors = {"fine": 1.0, "spike": 1000.0, "late": -1.0}
    windows = [rng.uniform(0.5, 1.0, size=(k, 2)) for _ in what]
    toy = whole_stack(precision, k, metric)
    for window, kind in zip(windows, what, strict=True):
        for x in window * factors[kind]:
            toy.step(x)
    spike_hook = next(hook for hook in toy.plan.update if isinstance(hook, SpikeSkipHook))
    assert toy.slot(spike_hook)["skips"] == what.count("spike")
    assert toy.counters()["step"] == what.count("fine")
    seen = kept(toy)
    toy.fresh()
    for window, kind in zip(windows, what, strict=True):
        if kind == "fine":
            for x in window:
                toy.step(x)
    assert kept(toy) == seen


def test_batches_4_and_7() -> None:
    """nvalchemi:88 (the example of the ledger)"""
    xs = np.random.default_rng(0).uniform(0.5, 1.0, size=10)
    toy = whole_stack("float32", 1)
    for index, x in enumerate(xs):
        toy.step([x * (1000 if index in (4, 7) else 1)] * 2)
    seen = kept(toy)
    toy.fresh()
    for index, x in enumerate(xs):
        if index not in (4, 7):
            toy.step([x] * 2)
    assert kept(toy) == seen


@pytest.mark.parametrize("options", [{"factor": 0}, {"decay": 1.0}, {"warmup": -1}, {"metric": "accuracy"}, {"k": 1}])
def test_options_are_checked(options) -> None:
    with pytest.raises(ValueError, match="SpikeSkipHook"):
        SpikeSkipHook(**options)


def test_it_is_a_configuration() -> None:
    hook = HookSpec.from_yaml("{kind: spike_skip, factor: 4.0, metric: loss, max_consecutive: null}")
    assert hook == SpikeSkipHook(4.0, metric="loss", max_consecutive=None)
