"""Optimizer configurations: what is refused at once, schedules that follow updates, and the acts of a step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.hooks import GradientAccumulationHook, TrainingUpdateHook
from nnx_jax.training import (
    OptimizerConfig,
    ValidationConfig,
    setup_optimizers,
    step_lr_schedulers,
    step_optimizers,
    zero_gradients,
)
from tests.training.toys import S, Toy, batches, strategy, w


@pytest.mark.parametrize(
    "given, says",
    [
        ((optax.sgd, {"learning_rate": 0.1, "momentom": 0.9}), "momentom"),
        ((optax.sgd, {}), "needs a learning_rate"),
        (("adamw", {"lr": 0.1, "momentum": 0.9}), "momentum"),
        (("adamv", {"lr": 0.1}), "adamv"),
        (("adam", {"lr": 0.1, "learning_rate": 0.2}), "twice"),
        (("adam", {"lr": 0.1, "grad_clip_norm": 1.0}), "GradientClipHook"),
        ((optax.sgd, {"learning_rate": 0.1}, None, {"step_size": 1}), "without a schedule"),
        ((optax.sgd, {"learning_rate": 0.1}, None, {}, "total_loss"), "without a schedule"),
        ((optax.sgd, {"learning_rate": 0.1}, "step", {"stepsize": 1}), "stepsize"),
        ((optax.sgd, {"learning_rate": 0.1}, "step", {"step_size": 1}, "total_loss"), "reduce_on_plateau"),
        ((optax.sgd, {"learning_rate": 0.1}, optax.exponential_decay, {"decay_rate": 0.5}), "transition_steps"),
        ((lambda: 3, {}), "GradientTransformation"),
    ],
)
def test_wrong_settings_are_refused_at_construction(given, says) -> None:
    """An OptimizerConfig that could not be built is a ValueError before any training."""
    with pytest.raises(ValueError, match=says):
        OptimizerConfig(*given)


def rates_by_batch(config: OptimizerConfig, *hooks) -> list[float]:
    made = strategy(config, hooks=list(hooks), num_steps=3)
    found = []
    for batch in batches(*[1.0] * 6):
        made.train_batch(batch)
        found.append(round(made.learning_rates["main"], 6))
    return found


def test_schedules_advance_with_updates_only() -> None:
    """nvalchemi:61: StepLR(1, 0.5), rate 0.1, K=2: 0.1, 0.05, 0.05, 0.025, 0.025, 0.0125 after the batches."""
    named = OptimizerConfig(optax.sgd, {"learning_rate": 0.1}, "step", {"step_size": 1, "factor": 0.5})
    decay = {"transition_steps": 1, "decay_rate": 0.5, "staircase": True}
    optaxs = OptimizerConfig(optax.sgd, {"learning_rate": 0.1}, optax.exponential_decay, decay)
    expected = [0.1, 0.05, 0.05, 0.025, 0.025, 0.0125]
    assert rates_by_batch(named, GradientAccumulationHook(2)) == expected
    assert rates_by_batch(optaxs, GradientAccumulationHook(2)) == expected


class VetoFirst(TrainingUpdateHook):
    """No to the first microbatch."""

    priority = 20

    def __init__(self) -> None:
        self.seen: list = []

    def __call__(self, ctx, stage, will_skip):
        return (ctx.batch_count > 0 if stage is S.DO_OPTIMIZER_STEP else True), ctx.loss


def test_a_veto_freezes_weights_and_schedule() -> None:
    """nvalchemi:42: a vetoed batch moves neither the weight nor the rate; the next begins where it stood."""
    config = OptimizerConfig(optax.sgd, {"learning_rate": 0.1}, "step", {"step_size": 1, "factor": 0.5})
    made = strategy(config, hooks=[VetoFirst()])
    made.train_batch(batches(1)[0])
    assert (w(made), made.learning_rates, made.step_count, made.batch_count) == (
        1.0,
        {"main": pytest.approx(0.1)},
        0,
        1,
    )
    made.train_batch(batches(1)[0])
    assert w(made) == pytest.approx(0.8)
    assert made.learning_rates["main"] == pytest.approx(0.05)


def constant(predictions, batch):
    return jnp.sum(predictions) * 0 + 1.0


def test_a_plateau_moves_at_validations_only() -> None:
    """nvalchemi:138: constant metric, patience 1, factor 0.5: the rate halves at the third validation, not between."""
    settings = {"patience": 1, "factor": 0.5, "cooldown": 0}
    config = OptimizerConfig(optax.sgd, {"learning_rate": 0.1}, "reduce_on_plateau", settings)
    made = strategy(config, validation_config=ValidationConfig(batches(1), loss_fn=constant))
    found = []
    for _ in range(3):
        made.train_batch(batches(0)[0])
        before = made.learning_rates["main"]
        summary = made.validate()
        found.append((round(before, 6), round(made.learning_rates["main"], 6)))
        assert summary["total_loss"] == 1.0
        assert made.last_validation is None
    assert found == [(0.1, 0.1), (0.1, 0.1), (0.1, 0.05)]
    plain = strategy(validation_config=ValidationConfig(batches(1), loss_fn=constant))
    plain.train_batch(batches(0)[0])
    assert plain.validate() is plain.last_validation


def test_a_plateau_follows_another_value() -> None:
    """A key or a function of the summary; a key that is not there is a KeyError naming it."""
    base = (optax.sgd, {"learning_rate": 0.1}, "reduce_on_plateau", {"patience": 1})
    assert OptimizerConfig(*base, "num_samples").metric({"num_samples": 3}) == 3.0
    assert OptimizerConfig(*base, lambda s: s["a"] + 1).metric({"a": 2}) == 3.0
    with pytest.raises(KeyError, match="total_los"):
        OptimizerConfig(*base, "total_los").metric({"total_loss": 1.0})


def test_a_name_means_what_it_means_elsewhere() -> None:
    """ "sgd" is NNOptimParams' sgd, with its momentum of 0.9; optax.sgd is optax's, without.

    Gradient 2 w at each step: 1 -> 0.8; with momentum 0.9 then 0.8 - 0.1 * (1.6 + 0.9 * 2) = 0.46, without 0.64.
    """
    for config, expected in (
        (OptimizerConfig("sgd", {"lr": 0.1}), 0.46),
        (OptimizerConfig(optax.sgd, {"lr": 0.1}), 0.64),
    ):
        made = strategy(config, num_steps=2)
        made.run(batches(1, 1))
        assert w(made) == pytest.approx(expected, abs=1e-6)


def test_the_acts_of_a_step_by_themselves() -> None:
    """nvalchemi:159: setup, zero, step and scheduler helpers are functions that give what the strategy gives."""
    plateau = {"patience": 1, "factor": 0.5, "cooldown": 0, "threshold": 0.0}
    config = OptimizerConfig(optax.sgd, {"learning_rate": 0.1}, "reduce_on_plateau", plateau)
    params = {"main.w": jnp.float32(1.0)}
    optimizer, plateaus = setup_optimizers({"main": config}, params)
    state = optimizer.init(params)
    grads = {"main.w": jnp.float32(2.0)}
    moved, state = step_optimizers(optimizer, grads, state, params)
    assert float(moved["main.w"]) == pytest.approx(0.8)
    assert int(state.inner["main"].count) == 1
    assert float(zero_gradients(grads)["main.w"]) == 0.0
    for _ in range(3):
        state = step_lr_schedulers({"main": config}, plateaus, {"total_loss": 1.0}, state)
    assert float(state.inner["main"].rate) == pytest.approx(0.05)
    with pytest.raises(ConfigError, match="no parameter to train"):
        setup_optimizers({"other": config}, params)


def test_each_model_has_its_own_optimizer() -> None:
    """Two models, two rates; one without a config stays as it is.

    Loss mean((a x + b x + c x)^2) at 1, 1, 1 with x = 1: every gradient is 6: a = 1 - 0.6, b = 1 - 0.06, c = 1.
    """
    models = {"a": Toy(), "b": Toy(), "c": Toy()}
    configs = {
        "a": OptimizerConfig(optax.sgd, {"learning_rate": 0.1}),
        "b": OptimizerConfig(optax.sgd, {"learning_rate": 0.01}),
    }
    total = lambda m, batch: m["a"](batch["x"]) + m["b"](batch["x"]) + m["c"](batch["x"])  # noqa: E731
    made = strategy(configs, models=models, training_fn=total, num_steps=1)
    made.run(batches(1))
    assert np.allclose([w(made, name) for name in "abc"], [0.4, 0.94, 1.0])
    with pytest.raises(ConfigError, match="which is no model"):
        strategy({"d": configs["a"]}, models=models, training_fn=total)
