"""Updates that are not finite: dropped without a trace, and not for ever."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import VetoError
from nnx_jax.core.hooks import TracedHook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks import GradientAccumulationHook, MixedPrecisionHook, SkipNonFinite
from tests.hooks.toy import Toy

NAN = float("nan")


def test_without_a_hook_nothing_is_protected() -> None:
    """nvalchemi:90 (the step itself told to ignore it)"""
    toy = Toy()
    toy.trace([1.0, NAN])
    assert np.isnan(toy.w)
    assert toy.counters()["step"] == 2


def test_a_bad_microbatch_drops_its_window_only() -> None:
    """case:C01"""
    toy = Toy(GradientAccumulationHook(2), SkipNonFinite(), w=0.0, slope=True)
    np.testing.assert_allclose(toy.trace([-1, NAN, -1, -1, -1, -1])[1::2], [0, 0.1, 0.2], rtol=1e-6)
    counters = toy.counters()
    assert (counters["skipped"], counters["step"]) == (1, 2)
    assert toy.slot(toy.plan.update[1]) == {"row": 0, "skips": 1}


def test_moments_do_not_see_what_is_dropped() -> None:
    """case:C02 nvalchemi:89 (Adam at 1, NaN, 1: m = 0.19, v = 0.001999, count 2)"""
    toy = Toy(SkipNonFinite(), optimizer="adam", w=0.0, slope=True)
    np.testing.assert_allclose(toy.trace([1, NAN, 1]), [-0.1, -0.1, -0.2], rtol=1e-4)
    named = {name: np.asarray(leaf) for name, leaf in toy.programs.named(toy.carry).items()}
    assert next(leaf for name, leaf in named.items() if "/mu/" in name) == pytest.approx(0.19)
    assert next(leaf for name, leaf in named.items() if "/nu/" in name) == pytest.approx(0.001999)
    assert named["opt_state/count"] == toy.counters()["step"] == 2
    assert toy.counters()["batch"] == 3


def test_after_the_limit_the_run_stops_and_nothing_is_applied() -> None:
    """case:C03 pipekit:N7 (limit 2: the third in a row stops it; what comes after is not applied)"""
    toy = Toy(SkipNonFinite(2), w=0.0, slope=True)
    toy.trace([-1, NAN, NAN, NAN, NAN, NAN, -1])
    with pytest.raises(VetoError, match="SkipNonFinite rejected update 2 .microbatch 3., too many in a row"):
        toy.programs.read_records(toy.carry)
    assert toy.w == pytest.approx(0.1)
    assert issubclass(VetoError, RuntimeError)


def test_a_good_update_begins_the_count_again() -> None:
    """case:C03"""
    toy = Toy(SkipNonFinite(2), w=0.0, slope=True)
    toy.trace([NAN, NAN, -1, NAN, NAN, -1])
    assert len(toy.programs.read_records(toy.carry)) == 6
    assert toy.w == pytest.approx(0.2)


def test_without_a_limit_it_goes_on() -> None:
    toy = Toy(SkipNonFinite(None), w=0.0, slope=True)
    toy.trace([NAN] * 20 + [-1])
    toy.programs.read_records(toy.carry)
    assert toy.w == pytest.approx(0.1)


def test_the_schedule_waits() -> None:
    """case:C04 (rate 0.1 (n + 1), the second update dropped)"""
    toy = Toy(SkipNonFinite(), w=0.0, rate=lambda n: 0.1 * (n + 1), slope=True)
    np.testing.assert_allclose(toy.trace([-1, NAN, -1]), [0.1, 0.1, 0.3], rtol=1e-6)


def test_the_record_says_who_rejected_it() -> None:
    toy = Toy(GradientAccumulationHook(1), SkipNonFinite(), w=0.0, slope=True)
    toy.trace([-1, NAN])
    assert toy.programs.read_records(toy.carry).ints["veto"].tolist() == [-1, 1]


# -- microbatch by microbatch -----------------------------------------------------------------------------------------


def test_microbatches_left_out_are_counted() -> None:
    """(windows of 3; 1, NaN, 3 | NaN, NaN, 1: three left out, none in a row at the end)"""
    skip = SkipNonFinite(drop="microbatch")
    toy = Toy(GradientAccumulationHook(3), skip, w=0.0, rate=1.0, slope=True)
    rows = []
    for x in (1, NAN, 3, NAN, NAN, 1):
        toy.step(x)
        rows.append(int(toy.slot(skip)["row"]))
    assert rows == [0, 1, 0, 1, 2, 0]
    assert toy.slot(skip)["skips"] == 3
    assert toy.w == -3.0


@pytest.mark.parametrize("executor", ["compiled", "eager"])
def test_too_many_microbatches_in_a_row_stop_the_run(executor) -> None:
    """case:C03 (limit 2, windows of 4: the third in a row, in an open window, stops it; nothing after is applied)"""
    skip = SkipNonFinite(2, "microbatch")
    toy = Toy(GradientAccumulationHook(4), skip, w=0.0, rate=1.0, slope=True, executor=executor)
    toy.trace([-1] * 4 + [NAN] * 3 + [-1] * 5)
    with pytest.raises(VetoError, match="SkipNonFinite rejected update 2 .microbatch 6., too many in a row"):
        toy.programs.read_records(toy.carry)
    assert toy.w == 1.0
    assert toy.slot(skip)["row"] == 3


def test_microbatches_of_windows_of_one_stop_the_run() -> None:
    toy = Toy(SkipNonFinite(2, "microbatch"), w=0.0, slope=True)
    toy.trace([-1, NAN, NAN, -1, NAN, NAN, NAN, -1])
    with pytest.raises(VetoError, match="SkipNonFinite rejected update 3 .microbatch 6."):
        toy.programs.read_records(toy.carry)
    assert toy.w == pytest.approx(0.2)


def test_without_a_limit_microbatches_are_only_counted() -> None:
    skip = SkipNonFinite(None, "microbatch")
    toy = Toy(GradientAccumulationHook(2), skip, w=0.0, rate=1.0, slope=True)
    toy.trace([NAN] * 20 + [-1, NAN])
    toy.programs.read_records(toy.carry)
    assert toy.w == 1.0
    assert toy.slot(skip) == {"row": 1, "skips": 21, "windows": 0}


class Breaks(TracedHook):
    """Makes the gradient of a window infinite, whatever its microbatches are."""

    stage = TrainingStage.BEFORE_OPTIMIZER_STEP

    def __call__(self, ctx, stage):
        ctx.grads = ctx.tree_map(lambda g: g / 0.0, ctx.grads)


def test_windows_of_good_microbatches_stop_the_run_too() -> None:
    """(limit 1: the second update in a row whose gradient is not finite although every microbatch's was)"""
    toy = Toy(GradientAccumulationHook(2), SkipNonFinite(1, "microbatch"), traced=[Breaks()], w=0.0, slope=True)
    toy.trace([1.0] * 6)
    with pytest.raises(VetoError, match="SkipNonFinite rejected update 1 .microbatch 3."):
        toy.programs.read_records(toy.carry)
    assert toy.w == 0.0


@pytest.mark.parametrize("k, falls", [(1, 2), (2, 3)])
def test_an_overflow_of_the_loss_scale_reaches_the_scale(k, falls) -> None:
    """(gradient 4, added up k times: infinite from 2^128 on, so a scale of 2^127 falls twice, or three times)"""
    mixed, skip = MixedPrecisionHook("fp16", init_scale=2.0**127), SkipNonFinite(1, "microbatch")
    toy = Toy(GradientAccumulationHook(k), mixed, skip, w=0.0, rate=1.0, slope=True)
    toy.trace([4.0] * (falls + 1) * k)
    toy.programs.read_records(toy.carry)
    assert toy.slot(mixed)["scale"] == 2.0 ** (127 - falls)
    assert toy.slot(skip) == {"row": 0, "skips": 0, "windows": 0}
    assert toy.counters()["step"] == 1
    assert toy.w == -4.0


def test_a_bad_loss_is_left_out_under_a_scale() -> None:
    """(2, NaN: the scale rests, and the window updates with the 2)"""
    mixed, skip = MixedPrecisionHook("fp16", init_scale=8.0), SkipNonFinite(drop="microbatch")
    toy = Toy(GradientAccumulationHook(2), mixed, skip, w=0.0, rate=1.0, slope=True)
    assert toy.trace([2.0, NAN])[-1] == -2.0
    assert toy.slot(mixed)["scale"] == 8.0
    assert toy.slot(skip)["skips"] == 1


class LeavesOut(TrainingUpdateHook):
    """Leaves microbatches of the given numbers out of their windows."""

    screens = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, *batches: int) -> None:
        self.batches = batches

    def keeps_microbatch(self, ctx):
        return ~jnp.isin(ctx.batch_count, jnp.array(self.batches))


def test_the_loss_of_a_microbatch_left_out_is_none_of_the_windows() -> None:
    """(2, NaN left out by another hook: the window updates with the 2)"""
    skip = SkipNonFinite()
    toy = Toy(GradientAccumulationHook(2), LeavesOut(1), skip, w=0.0, rate=1.0, slope=True)
    assert toy.trace([2.0, NAN])[-1] == -2.0
    assert toy.slot(skip)["skips"] == 0
