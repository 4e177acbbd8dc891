"""Skipping spikes: what counts as one, and that a rejected batch might as well never have come."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import VetoError
from nnx_jax.hooks import (
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    HookSpec,
    MixedPrecisionHook,
    SpikeSkipHook,
)
from tests.hooks.toy import Toy


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


# -- the law ----------------------------------------------------------------------------------------------------------

_TOYS: dict[tuple[str, int], Toy] = {}


def whole_stack(precision: str, k: int) -> Toy:
    """Everything at once, on a model that keeps a running mean of its input as BatchNorm does."""

    def forward(params, model_state, batch, key, train):
        return params["w"] * batch["x"], {"mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean()}

    if (precision, k) not in _TOYS:
        hooks = (
            GradientAccumulationHook(k),
            MixedPrecisionHook(precision, growth_interval=2),
            GradientClipHook(1.0),
            SpikeSkipHook(5.0, 0.9, 3),
            EMAHook("main", 0.9, update_every=2),
        )
        _TOYS[precision, k] = Toy(
            *hooks, rows=2, optimizer="adam", rate=lambda n: 0.01 / (n + 1), forward=forward,
            model_state={"mean": jnp.float32(0)},
        )  # fmt: skip
    return _TOYS[precision, k].fresh()


def kept(toy: Toy) -> dict[str, bytes]:
    """All that is stored, less what counts batches and rejections."""
    return {name: leaf for name, leaf in toy.leaves().items() if not name.endswith(("counters", "/skips", "/row"))}


@settings(max_examples=20, deadline=None)
@given(
    spikes=st.lists(st.booleans(), min_size=1, max_size=9),
    k=st.sampled_from([1, 3]),
    precision=st.sampled_from(["float32", "float16"]),
    seed=st.integers(0, 99),
)
def test_a_rejected_batch_was_never_there(spikes, k, precision, seed) -> None:
    """nvalchemi:88 (bit for bit: weights, moments, the schedule's count, averages, statistics, scale, running mean)"""
    rng = np.random.default_rng(seed)
    spikes = [False] * 3 + spikes  # the warm-up
    windows = [rng.uniform(0.5, 1.0, size=(k, 2)) for _ in spikes]
    toy = whole_stack(precision, k)
    for window, spike in zip(windows, spikes, strict=True):
        for x in window * (1000.0 if spike else 1.0):
            toy.step(x)
    spike_hook = next(hook for hook in toy.plan.update if isinstance(hook, SpikeSkipHook))
    assert toy.slot(spike_hook)["skips"] == sum(spikes)
    assert toy.counters()["step"] == len(spikes) - sum(spikes)
    seen = kept(toy)
    toy.fresh()
    for window, spike in zip(windows, spikes, strict=True):
        if not spike:
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
