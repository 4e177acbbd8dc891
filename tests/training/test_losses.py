"""Composed losses and weight schedules: names, sums, what is refused, and windows that stay exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.hooks import GradientAccumulationHook
from nnx_jax.objectives import build_loss
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.training.losses import (
    ComposedLossFunction,
    ConstantWeight,
    CosineWeight,
    LinearWeight,
    PiecewiseWeight,
    as_loss,
)
from tests.training.toys import S, Watch, batches, squared, strategy, w

A, B = build_loss("mse"), build_loss("mae")


def test_weights_are_divided_by_their_sum() -> None:
    """nvalchemi:149: 1 A + 3 B has effective weights 0.25 and 0.75; a sum of 0 is refused."""
    composed = 1.0 * A + 3.0 * B
    assert composed.effective_weights() == {"mse": 0.25, "mae": 0.75}
    batch = {"y": jnp.zeros(2), "mask": jnp.ones(2)}
    terms = composed(jnp.array([1.0, 3.0]), batch)
    assert [(t.name, float(t.numerator), float(t.denominator), t.weight) for t in terms] == [
        ("mse", 10.0, 2.0, 0.25),
        ("mae", 4.0, 2.0, 0.75),
    ]
    with pytest.raises(ConfigError, match="add up to 0"):
        ComposedLossFunction([A, B], [1.0, -1.0])
    raw = ComposedLossFunction([A, B], [2.0, 3.0], normalize_weights=False)
    assert raw.effective_weights() == {"mse": 2.0, "mae": 3.0}


def test_losses_add_up_flat_and_numbered() -> None:
    """Sums compose flatly, and two of one name are numbered from 0."""
    assert sum([A, B, A]).names == ("mse_0", "mae", "mse_1")
    assert (2.0 * (1.0 * A + 3.0 * B)).raw_weights() == {"mse": 2.0, "mae": 6.0}
    assert ((1.0 * A + 3.0 * B) + 4.0 * B).effective_weights() == {"mse": 0.125, "mae_0": 0.375, "mae_1": 0.5}


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: True * A, TypeError, "a number or a schedule"),
        (lambda: LinearWeight(0, 1, 2) * (A + B), TypeError, "belongs to one loss"),
        (lambda: (A + B) + ComposedLossFunction([A], normalize_weights=False), ConfigError, "make both alike"),
        (lambda: ComposedLossFunction([A, B], [1.0]), ConfigError, "one weight for each"),
        (lambda: ComposedLossFunction([]), ConfigError, "at least one"),
        (lambda: ComposedLossFunction([A], [float("nan")]), ConfigError, "finite"),
        (lambda: PiecewiseWeight((2,), (1,)), ConfigError, "one value more"),
        (lambda: PiecewiseWeight((2, 2), (1, 2, 3)), ConfigError, "that grow"),
        (lambda: LinearWeight(0, 1, 0), ConfigError, "whole number from 1"),
        (lambda: LinearWeight(0, 1, 4) * A + 0.0 * B, ConfigError, "add up to 0"),
    ],
)
def test_what_is_refused(make, error, says) -> None:
    """Wrong compositions are refused with what to do."""
    with pytest.raises(error, match=says):
        made = make()
        made(jnp.zeros(1), {"y": jnp.zeros(1), "mask": jnp.ones(1)})


def test_schedules() -> None:
    """nvalchemi:150: values before, inside and after each schedule's range, on the host and in the step."""
    line = LinearWeight(0, 1, 10)
    for at in (lambda k: k, lambda k: jnp.int32(k)):
        assert [float(line(at(k), 0)) for k in (0, 5, 10, 99)] == [0.0, 0.5, 1.0, 1.0]
        assert float(CosineWeight(0, 1, 10)(at(5), 0)) == pytest.approx(0.5)
        assert [float(PiecewiseWeight((2,), (1, 5))(at(k), 0)) for k in range(3)] == [1.0, 1.0, 5.0]
        assert float(ConstantWeight(3.0)(at(7), 0)) == 3.0
    assert float(LinearWeight(0, 1, 10, per_epoch=True)(9, 5)) == 0.5
    assert line.to_spec() == {"kind": "LinearWeight", "start": 0, "end": 1, "num_steps": 10, "per_epoch": False}


@pytest.mark.parametrize("wide", [False, True])
def test_scheduled_weights_are_as_wide_as_what_they_weigh(wide: bool) -> None:
    """In float64 those of numpy on the host, in float32 rounded."""
    schedules = [LinearWeight(0.1, 0.7, 9), CosineWeight(0.2, 0.9, 7)]
    loss = ComposedLossFunction([A, B], schedules)
    batch = {"y": np.zeros(2, np.float64 if wide else np.float32), "mask": np.ones(2, np.float32)}

    def scales(step):
        return [term.scale for term in loss.at(step, jnp.int32(0))(jnp.asarray(batch["y"]) + 1, batch)]

    with jax.enable_x64(wide):
        found = [np.asarray(each) for each in jax.jit(scales)(jnp.int32(4))]
    line, half = (schedule(4, 0) for schedule in schedules)
    wanted = [line / (line + half), half / (line + half)]
    np.testing.assert_allclose(found, wanted, rtol=1e-15 if wide else 1e-6)
    assert {each.dtype.name for each in found} == {"float64" if wide else "float32"}
    assert wide or np.abs(np.subtract(found, wanted)).max() > 0


def first(predictions, batch):
    """sum(w x) over rows: its gradient is the mean of x."""
    return LossTerm("first", jnp.sum(predictions * batch["mask"]), jnp.sum(batch["mask"]))


def second(predictions, batch):
    """-1 times that, over another count."""
    return LossTerm("second", jnp.sum(predictions * batch["mask"]), 2 * jnp.sum(batch["mask"]))


def test_a_weight_schedule_follows_updates_not_batches() -> None:
    """nvalchemi:151: K=2, weight 0 then 1 at update 1: w moves by 0.1 * weight * mean(x) at each update.

    x = 1, 1 | 2, 4: the first window's weight is 0 (w stays 1), the second's is 1: w = 1 - 0.1 * (2 + 4) / 2 = 0.7. By
    batches, the second microbatch of the first window would have counted: w = 0.95 after it.
    """
    loss = ComposedLossFunction([first], [PiecewiseWeight((1,), (0, 1))], normalize_weights=False)
    made = strategy(loss_fn=loss, hooks=[GradientAccumulationHook(2)], num_steps=2)
    seen = []
    for batch in batches(1, 1, 2, 4):
        made.train_batch(batch)
        seen.append(round(w(made), 6))
    assert seen == [1.0, 1.0, 1.0, 0.7]


def test_scheduled_and_constant_weights_give_one_window() -> None:
    """Terms with denominators of their own and uneven rows: a schedule that is flat equals constants.

    Rows 1, 3 | 5: w = 1 - 0.1 * (0.25 * 9 / 3 + 0.75 * 9 / 6) = 1 - 0.1 * 1.875 = 0.8125.
    """
    flat = PiecewiseWeight((100,), (3, 9))
    for weights in ([1.0, 3.0], [1.0, flat]):
        loss = ComposedLossFunction([first, second], weights)
        made = strategy(loss_fn=loss, hooks=[GradientAccumulationHook(2)], num_steps=1)
        for batch in batches([1, 3], 5):
            made.train_batch(batch)
        assert w(made) == pytest.approx(0.8125, abs=1e-6)


def test_hooks_see_components_and_weights() -> None:
    """Ctx.losses holds components as they are, and the loss the weighted sum."""
    loss = ComposedLossFunction([squared, first], [LinearWeight(1, 0, 2), 1.0], normalize_weights=False)
    watch = Watch(S.AFTER_LOSS, look=lambda ctx: ({k: float(v) for k, v in ctx.losses.items()}, float(ctx.loss)))
    made = strategy(loss_fn=loss, hooks=[watch], num_steps=2)
    made.run(batches(1, 1))
    (one, total), (two, later) = watch.at(S.AFTER_LOSS)
    assert one == {"squared": 1.0, "first": 1.0}
    assert total == 2.0
    # w = 1 - 0.1 * (2 + 1) = 0.7; then 0.5 * 0.49 + 0.7.
    assert two == pytest.approx({"squared": 0.49, "first": 0.7}, abs=1e-6)
    assert later == pytest.approx(0.945, abs=1e-6)


def test_losses_of_one_output_each() -> None:
    """Losses by prediction and target key; a missing key is told with the ones there are."""
    loss = as_loss(A.on("energy") + B.on("force", "f"))
    outputs = {"energy": jnp.array([2.0]), "force": jnp.array([3.0])}
    batch = {"y": jnp.zeros(1), "f": jnp.ones(1), "mask": jnp.ones(1)}
    terms = loss(outputs, batch)
    assert {t.name: float(t.numerator) for t in terms} == {"energy_mse": 4.0, "force_mae": 2.0}
    with pytest.raises(KeyError, match="looks for 'energy' in the outputs"):
        loss({"enery": jnp.zeros(1)}, batch)
    with pytest.raises(TypeError, match="must be an array"):
        loss({"energy": "text", "force": jnp.zeros(1)}, batch)


def test_a_scalar_counts_as_one_microbatch() -> None:
    """nvalchemi:59: a plain scalar has weight 1: x = 1, 2, 1, 3 with K=4 gives w = 1 - 0.1 * 30 / 4 = 0.25."""
    made = strategy(hooks=[GradientAccumulationHook(4)], num_steps=1)
    made.run(batches(1, 2, 1, 3))
    assert w(made) == pytest.approx(0.25, abs=1e-6)
    with pytest.raises(TypeError, match="returned an array of shape"):
        as_loss(lambda p, b: p)(jnp.zeros(3), {"mask": jnp.ones(3)})
    assert not np.isnan(w(made))
