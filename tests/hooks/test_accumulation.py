"""Gradient accumulation: what a window's gradient is, what counts as a step, and what is compiled."""

from __future__ import annotations

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, HookError
from nnx_jax.core.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator
from nnx_jax.core.stages import TrainingStage as S
from nnx_jax.hooks import GradientAccumulationHook, HookSpec, MixedPrecisionHook, TracedHook
from tests.hooks.toy import Toy


class Every(TrainingUpdateHook):
    """The accumulation hook as a user writes it."""

    priority = 10

    def __init__(self, k: int) -> None:
        self.every = k

    def __call__(self, ctx, stage, will_skip):
        if stage is S.BEFORE_BATCH:
            return ctx.batch_count % self.every == 0, ctx.loss
        if stage is S.DO_OPTIMIZER_STEP:
            return (ctx.batch_count + 1) % self.every == 0, ctx.loss
        return True, ctx.loss


@pytest.mark.parametrize("make", [lambda: (GradientAccumulationHook(4),), lambda: (Every(4),)], ids=["shipped", "own"])
def test_four_microbatches_make_one_update(make) -> None:
    """nvalchemi:59 (gradients 2x^2: 2, 8, 2, 18; their mean 7.5 times 0.1)"""
    np.testing.assert_allclose(Toy(*make()).trace([1, 2, 1, 3]), [1, 1, 1, 0.25], rtol=1e-6)


def test_two_windows_count_microbatches_and_updates_apart() -> None:
    """nvalchemi:61 (K=2, three updates: six microbatches; the rate falls with updates)"""
    toy = Toy(GradientAccumulationHook(2), rate=lambda n: 0.1 * 0.5**n)
    np.testing.assert_allclose(toy.trace([1] * 6), [1, 0.8, 0.8, 0.72, 0.72, 0.684], rtol=1e-6)
    counters = toy.counters()
    assert (counters["batch"], counters["step"]) == (6, 3)
    rates = toy.programs.read_records(toy.carry)
    assert rates.ints["step"].tolist() == [0, 1, 1, 2, 2, 3]


def test_unequal_counts_equal_one_large_batch() -> None:
    """nvalchemi:60 case:A01 pipekit:N2 ([1], [2, 3, 4] at w=0: one large batch moves by -5 / rate, means by -4)"""
    parts: list[tuple[list[float], list[float]]] = [([1.0], [1.0]), ([1.0] * 3, [2.0, 3.0, 4.0])]

    def moved(hook: GradientAccumulationHook) -> float:
        toy = Toy(hook, rows=4, w=0.0, rate=1.0)
        for x, t in parts:
            toy.programs.step(toy.carry, toy.batch(x, t))
        return toy.w

    large = Toy(rows=4, w=0.0, rate=1.0)
    large.programs.step(large.carry, large.batch([1.0] * 4, [1.0, 2.0, 3.0, 4.0]))
    assert large.w == pytest.approx(5.0, rel=1e-6)
    assert moved(GradientAccumulationHook(2)) == pytest.approx(large.w, rel=1e-6)
    assert moved(GradientAccumulationHook(2, "mean")) == pytest.approx((2 + 6) / 2, rel=1e-6)
    assert moved(GradientAccumulationHook(2, "sum")) == pytest.approx(2 + 6, rel=1e-6)


@pytest.mark.parametrize("normalize", ["weight", "mean", "sum"])
def test_random_windows_against_numpy(normalize) -> None:
    """nvalchemi:60 (three windows of random sizes; the gradient of a row is 2 x (w x - t))"""
    rng = np.random.default_rng(0)
    toy, w = Toy(GradientAccumulationHook(3, normalize=normalize), rows=5), 1.0
    for _ in range(3):
        rows = [(rng.normal(size=n), rng.normal(size=n)) for n in rng.integers(1, 6, size=3)]
        grads = [2 * x * (w * x - t) for x, t in rows]
        means = [grad.mean() for grad in grads]
        w -= 0.1 * {"weight": np.concatenate(grads).mean(), "mean": np.mean(means), "sum": np.sum(means)}[normalize]
        for x, t in rows:
            toy.programs.step(toy.carry, toy.batch(x, t))
        assert toy.w == pytest.approx(w, rel=1e-5)


def test_a_window_cut_short_divides_by_what_it_has() -> None:
    """nvalchemi:63 case:A04 (six microbatches, K=4: the second update is of two, by their own number)"""
    xs = [1.0, 2.0, 1.0, 3.0, 1.0, 2.0]
    for normalize in ("weight", "mean"):
        toy = Toy(GradientAccumulationHook(4, normalize=normalize))
        toy.trace(xs[:5])
        toy.programs.step(toy.carry, toy.batch(xs[5]), closes=True)
        assert toy.w == pytest.approx(0.25 * (1 - 0.1 * (2 + 8) / 2), rel=1e-6)
        assert toy.counters()["step"] == 2


def test_a_microbatch_without_rows_adds_nothing() -> None:
    """case:A03"""
    toy = Toy(GradientAccumulationHook(2), rows=2)
    toy.programs.step(toy.carry, toy.batch(np.zeros(0)))
    toy.step([1.0, 1.0])
    assert toy.w == pytest.approx(0.8, rel=1e-6)


def test_a_window_of_one_is_no_accumulation_bit_for_bit() -> None:
    """nvalchemi:64"""
    xs = np.random.default_rng(1).normal(size=8)
    plain, adam = (
        Toy(optimizer="adam"),
        [Toy(GradientAccumulationHook(1, n), optimizer="adam") for n in ("weight", "mean")],
    )
    plain.trace(xs)
    for toy in adam:
        toy.trace(xs)
        assert toy.leaves() == plain.leaves()


@pytest.mark.parametrize("k", [0, -1, 1.5, "4", True])
def test_a_window_has_at_least_one_microbatch(k) -> None:
    """nvalchemi:66"""
    with pytest.raises(ValueError, match="GradientAccumulationHook.k"):
        GradientAccumulationHook(k)


def test_saved_and_resumed_inside_a_window() -> None:
    """nvalchemi:67 (after two of four microbatches; a resume that lost the sums would give 0.5)"""
    first = Toy(GradientAccumulationHook(4))
    first.trace([1, 2])
    second = Toy(GradientAccumulationHook(4))
    second.carry = second.programs.load_named(dict(first.programs.named(first.carry)))
    assert second.trace([1, 3])[-1] == first.trace([1, 3])[-1] == pytest.approx(0.25)
    assert second.leaves() == first.leaves()


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_hundred_microbatches_compile_two_programs(precision) -> None:
    """nvalchemi:70"""
    toy = Toy(GradientAccumulationHook(4), MixedPrecisionHook(precision))
    for _ in range(100):
        toy.programs.step(toy.carry, toy.batch(0.5))
    assert toy.counters()["step"] == 25
    assert toy.programs.watch.compiles == {"micro": 1, "apply": 1}


def test_the_program_of_an_open_window_holds_no_optimizer() -> None:
    """case:A09 (Adam's square root is in the closing program only)"""
    toy = Toy(GradientAccumulationHook(4), optimizer="adam", nonfinite="ignore")
    text = {name: toy.programs.lower(name, toy.batch(1.0)).compile().as_text() for name in ("micro", "apply")}
    assert "sqrt" in text["apply"]
    assert "sqrt" not in text["micro"]


def test_moments_see_the_window_once() -> None:
    """case:A09 case:A12 (Adam at gradients 2, 4 of one window: m = 0.1 * 3, v = 0.001 * 9, count 1)"""
    toy = Toy(GradientAccumulationHook(2), optimizer="adam", rate=1e-3)
    toy.programs.step(toy.carry, toy.batch(1.0))
    toy.programs.step(toy.carry, toy.batch(np.sqrt(2.0)))
    named = {name: np.asarray(leaf) for name, leaf in toy.programs.named(toy.carry).items() if "opt_state" in name}
    mean = next(leaf for name, leaf in named.items() if "mu" in name)
    square = next(leaf for name, leaf in named.items() if "nu" in name)
    assert mean == pytest.approx(0.3, rel=1e-5)
    assert square == pytest.approx(0.009, rel=1e-5)
    assert named["opt_state/count"] == 1


def test_n1_three_gradients_and_one_over() -> None:
    """N1 (loss g w, rate 1, window of three, gradients 1, 2, 6: w 0, 0, -3, and the fourth leaves it)"""
    toy = Toy(GradientAccumulationHook(3), w=0.0, rate=1.0, slope=True)
    np.testing.assert_allclose(toy.trace([1, 2, 6, 1]), [0, 0, -3, -3], rtol=1e-6)
    assert toy.counters()["step"] == 1


def test_observers_see_the_gradient_so_far() -> None:
    """nvalchemi:59 (after 2 and 8: the mean of the targets seen, 2 then 5; with "sum" 2 then 10)"""

    class Look(TracedHook):
        stage = S.AFTER_BACKWARD

        def init_state(self, params):
            return np.float32(0)

        def __call__(self, ctx, stage):
            ctx.state = ctx.grads["w"]

    for normalize, wanted in (("weight", [2, 5]), ("sum", [2, 10])):
        look = Look()
        toy = Toy(GradientAccumulationHook(3, normalize=normalize), traced=[look])
        found = []
        for x in (1, 2):
            toy.step(x)
            found.append(float(toy.slot(look)))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_one_accumulation_hook_at_most() -> None:
    with pytest.raises(HookError, match="at most one GradientAccumulationHook"):
        TrainingUpdateOrchestrator(GradientAccumulationHook(2), GradientAccumulationHook(3))


def test_it_is_a_configuration() -> None:
    hook = HookSpec.from_yaml("{kind: accumulation, k: 4, normalize: mean, on_partial: carry}")
    assert hook == GradientAccumulationHook(4, "mean", "carry")
    assert hook.state() == {"kind": "accumulation", "k": 4, "normalize": "mean", "on_partial": "carry"}
    with pytest.raises(ConfigError, match="normalize"):
        GradientAccumulationHook(4, normalize="average")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes 4 arguments"):
        GradientAccumulationHook(4, "mean", None, False, 1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="'k' twice"):
        GradientAccumulationHook(4, k=4)  # type: ignore[misc]
