"""Gradient clipping: by norm and by value, of the window's true gradient, and no more than clipping."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.hooks import GradientAccumulationHook, GradientClipHook, HookSpec, SkipNonFinite
from nnx_jax.objectives.terms import LossTerm
from tests.hooks.toy import Toy


def roots(outputs, batch):
    """Loss sqrt(w x), of which the value at 0 is finite and the slope is not."""
    return (LossTerm("root", jnp.sum(jnp.sqrt(outputs)), jnp.sum(batch["mask"])),)


def moved(hook: GradientClipHook, gradient, *more) -> list[float]:
    toy = Toy(hook, *more, w=[0.0] * len(gradient), rate=1.0, slope=True)
    toy.step([gradient])
    return (-np.asarray(toy.w)).tolist()


def test_a_long_gradient_is_shortened_and_its_norm_reported() -> None:
    """nvalchemi:91"""
    toy = Toy(GradientClipHook(1.0), w=[0.0, 0.0], rate=1.0, slope=True)
    toy.step([[3.0, 4.0]])
    np.testing.assert_allclose(toy.w, [-0.6, -0.8], rtol=1e-7)
    assert toy.programs.read_records(toy.carry).grad_norm.tolist() == [5.0]


def test_a_short_gradient_is_untouched() -> None:
    """nvalchemi:91"""
    gradient = np.random.default_rng(0).normal(size=5).astype(np.float32)
    assert moved(GradientClipHook(100.0), gradient) == gradient.tolist()


def test_by_value_then_by_norm() -> None:
    assert moved(GradientClipHook(max_value=2.0), [3.0, -4.0, 1.0]) == [2.0, -2.0, 1.0]
    np.testing.assert_allclose(moved(GradientClipHook(1.0, 2.0), [3.0, -4.0, 1.0]), np.array([2, -2, 1]) / 3, rtol=1e-6)


@pytest.mark.parametrize("name", ["max_norm", "max_value"])
@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), "1"])
def test_a_limit_is_above_zero(name, value) -> None:
    """nvalchemi:92 case:C08"""
    with pytest.raises(ValueError, match=f"GradientClipHook.{name}"):
        GradientClipHook(**{name: value})


@pytest.mark.parametrize("hook", [GradientClipHook(), GradientClipHook(None), GradientClipHook(float("inf"))])
def test_no_limit_clips_nothing(hook) -> None:
    """case:C08"""
    assert moved(hook, [3e4, 4e4]) == [3e4, 4e4]
    assert moved(hook, [0.0, 0.0]) == [0.0, 0.0]


def test_zero_gradient_stays_zero() -> None:
    """case:C08 (no 0/0)"""
    assert moved(GradientClipHook(1.0, 1.0), [0.0, 0.0]) == [0.0, 0.0]


def test_the_window_is_clipped_and_not_its_microbatches() -> None:
    """nvalchemi:93 case:A08 (gradients (6, 0) and (0, 8): the window's (3, 4) becomes (0.6, 0.8), not (0.5, 0.5))"""
    toy = Toy(GradientAccumulationHook(2), GradientClipHook(1.0), w=[0.0, 0.0], rate=1.0, slope=True)
    toy.step([[6.0, 0.0]])
    assert toy.state.accum["window"].grads[0]["w"].tolist() == [6.0, 0.0]
    toy.step([[0.0, 8.0]])
    np.testing.assert_allclose(toy.w, [-0.6, -0.8], rtol=1e-6)


def test_an_infinite_gradient_needs_another_hook() -> None:
    """nvalchemi:94 case:C07 (clipped alone it becomes NaN; skipped, nothing moves and the norm shows it)"""
    inf = [float("inf"), 1.0]
    assert np.isnan(moved(GradientClipHook(1.0), inf)[0])
    toy = Toy(GradientClipHook(1.0), SkipNonFinite(), w=[0.5, 0.5], rate=1.0, slope=True)
    toy.step([inf])
    assert toy.w == [0.5, 0.5]
    counters = toy.counters()
    assert (counters["step"], counters["skipped"], counters["batch"]) == (0, 1, 1)
    assert not np.isfinite(toy.programs.read_records(toy.carry).grad_norm[0])


def test_clipping_by_value_hides_no_infinity() -> None:
    """(gradient (inf, 0.5): clipped alone (1, 0.5); what is not finite is looked for before, so nothing moves)"""
    guard, options = SkipNonFinite(), {"w": [0.0, 1.0], "rate": 1.0, "terms": roots}
    alone, both = (
        Toy(GradientClipHook(max_value=1.0), **options),
        Toy(GradientClipHook(max_value=1.0), guard, **options),
    )
    for toy in (alone, both):
        toy.step([[1.0, 1.0]])
    assert alone.w == [-1.0, 0.5]
    assert both.w == [0.0, 1.0]
    assert both.slot(guard) == {"row": 1, "skips": 1}
    assert np.isinf(both.programs.read_records(both.carry).grad_norm[0])


def test_it_is_a_configuration() -> None:
    assert HookSpec.from_yaml("{kind: gradient_clip, max_norm: 1.0}") == GradientClipHook(1.0)
