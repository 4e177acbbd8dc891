"""Updates that are not finite: dropped without a trace, and not for ever."""

from __future__ import annotations

import numpy as np
import pytest

from nnx_jax.core.errors import VetoError
from nnx_jax.hooks import GradientAccumulationHook, SkipNonFinite
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
