"""Distillation: the softened divergence, and a teacher that is asked and never taught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError, RunExistsError
from nnx_jax.model import NNModel
from nnx_jax.objectives import kd_objective, supervised_objective
from nnx_jax.objectives.frozen import Frozen
from tests.objectives.paradigm_toys import (
    assert_close,
    context,
    fit,
    loss_of,
    masked,
    numeric,
    padded,
    terms_of,
    value_and_grads,
    weights,
)

DRAW = np.random.default_rng(9)
X, Y = DRAW.normal(size=(6, 3)).astype(np.float32), np.array([0, 1, 2, 1, 0, 2], np.int32)
BATCH = {"x": X, "y": Y}


def net(seed: int) -> nnx.Linear:
    return nnx.Linear(3, 3, rngs=nnx.Rngs(seed))


def arrays(layer: nnx.Linear) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(layer.kernel[...], np.float64), np.asarray(layer.bias[...], np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def by_hand(kernel: np.ndarray, bias: np.ndarray, teacher: nnx.Linear, alpha: float, temperature: float) -> float:
    """(1 - alpha) cross entropy + alpha T^2 KL(teacher || student), as Hinton et al. have it."""
    k, b = arrays(teacher)
    student, target = X @ kernel + bias, log_softmax((X @ k + b) / temperature)
    hard = -log_softmax(student)[np.arange(6), Y].mean()
    apart = (np.exp(target) * (target - log_softmax(student / temperature))).sum(-1).mean()
    return float((1 - alpha) * hard + alpha * temperature**2 * apart)


def test_a_divergence_by_hand() -> None:
    """KL of (3/4, 1/4) from (1/2, 1/2) is 0.130812, its gradient by the student's logits (-1/4, 1/4)."""
    objective = kd_objective(lambda x: jnp.log(jnp.array([[0.75, 0.25]])), alpha=1.0, temperature=1.0)
    batch = {"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, np.int32)}
    student = nnx.Linear(2, 2, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    value, grads = value_and_grads(objective, student, batch)
    assert value == pytest.approx(0.130812, abs=1e-6)
    assert grads["bias"] == pytest.approx([-0.25, 0.25])


@pytest.mark.parametrize("alpha, temperature", [(0.5, 4.0), (0.3, 1.0), (1.0, 2.0), (0.0, 4.0)])
def test_the_loss_and_its_gradient_are_the_papers(alpha: float, temperature: float) -> None:
    teacher, student = net(1), net(2)
    kernel, bias = arrays(student)
    value, grads = value_and_grads(kd_objective(teacher, alpha, temperature), student, BATCH)
    assert value == pytest.approx(by_hand(kernel, bias, teacher, alpha, temperature), rel=1e-5)
    expected = numeric(lambda k: by_hand(k, bias, teacher, alpha, temperature), kernel)
    np.testing.assert_allclose(grads["kernel"], expected, atol=2e-5)


def test_a_student_like_its_teacher_has_no_divergence() -> None:
    value, grads = value_and_grads(kd_objective(net(1), alpha=1.0), net(1), BATCH)
    assert value == pytest.approx(0.0, abs=1e-6)
    assert np.abs(grads["kernel"]).max() < 1e-6


def test_a_padded_batch_counts_like_the_batch() -> None:
    objective, batch = kd_objective(net(1)), padded(BATCH)
    plain, full = value_and_grads(objective, net(2), BATCH), value_and_grads(objective, net(2), batch)
    assert plain[0] == pytest.approx(full[0], rel=1e-6)
    assert_close(plain[1], full[1])


def test_rows_count_with_their_weight_in_both_parts() -> None:
    objective, some = kd_objective(net(1)), {name: part[:2] for name, part in BATCH.items()}
    weighted = {**BATCH, "weight": np.array([1, 1, 0, 0, 0, 0], np.float32)}
    assert loss_of(objective, net(2), weighted) == pytest.approx(loss_of(objective, net(2), some), rel=1e-6)


def test_rows_without_a_label_learn_from_the_teacher() -> None:
    unlabelled = {"x": X, "y": np.full(6, -100, np.int32)}
    hard, soft = terms_of(kd_objective(net(1))(context(net(2), unlabelled)))
    assert (float(hard.numerator), float(hard.denominator)) == (0.0, 0.0)
    assert float(soft.denominator) == 6.0


def test_one_row_and_no_row() -> None:
    one = {name: part[:1] for name, part in BATCH.items()}
    assert np.isfinite(loss_of(kd_objective(net(1)), net(2), one))
    terms = terms_of(kd_objective(net(1))(context(net(2), masked(BATCH))))
    assert [(float(term.numerator), float(term.denominator)) for term in terms] == [(0.0, 0.0), (0.0, 0.0)]


class Noisy(nnx.Module):
    """What differs between training and evaluation; its attribute `net` is a part, not the whole."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(3)
        self.net = nnx.Linear(3, 3, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2.0 * self.dropout(self.norm(self.net(x)))


def test_a_teacher_is_asked_in_evaluation_mode_with_its_weights_of_then() -> None:
    teacher = Noisy()
    expected = np.asarray(2.0 * teacher.net(jnp.asarray(X)) / np.sqrt(1 + 1e-5))
    asked = [Frozen(given, "it") for given in (teacher, NNModel(module=teacher))]
    teacher.net.bias.set_value(jnp.full(3, 9.0))
    for frozen in asked:
        np.testing.assert_allclose(frozen(jnp.asarray(X)), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(jax.jit(frozen)(jnp.asarray(X)), jax.jit(frozen)(jnp.asarray(X)))
    assert not teacher.dropout.deterministic
    np.testing.assert_array_equal(teacher.norm.mean[...], 0.0)


def test_no_gradient_goes_through_a_teacher() -> None:
    assert float(jax.grad(lambda x: Frozen(lambda x: x**2, "it")(x))(3.0)) == 0.0
    assert Frozen(lambda x: x.astype(jnp.bfloat16), "it")(jnp.ones(2)).dtype == jnp.float32


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match="kd_objective: alpha is .*; it is a share, from 0 to 1"):
        kd_objective(net(1), alpha)


@pytest.mark.parametrize("temperature", [0.0, -2.0, float("nan"), float("inf")])
def test_a_temperature_out_of_range_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="kd_objective: temperature is .*; give a number above 0"):
        kd_objective(net(1), 0.5, temperature)


def test_what_is_no_teacher_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match="the teacher of kd_objective is called with arrays: give an NNModel"):
        kd_objective(nothing)
    with pytest.raises(ModelError, match=r"teacher and student have shapes \[6, 1\] and \[6, 3\]; they must be equal"):
        kd_objective(lambda x: x[:, :1])(context(net(2), BATCH))


@pytest.mark.slow
def test_runs_in_windows_of_two_are_runs_of_twice_the_rows(tmp_path: Path) -> None:
    """Also: alpha 0 is the loss alone, validation scores the loss alone, and the teacher is as before."""
    teacher = NNModel(module=net(1))
    before = weights(teacher)
    models = [NNModel(module=net(2)) for _ in range(4)]
    run = fit(tmp_path, models[0], kd_objective(teacher), BATCH, batch=6, val=True, n_epochs=2)
    fit(tmp_path, models[1], kd_objective(teacher), BATCH, batch=4, window=2, n_epochs=2)
    fit(tmp_path, models[2], kd_objective(teacher, alpha=0.0), BATCH, batch=6, n_epochs=2)
    fit(tmp_path, models[3], supervised_objective(), BATCH, batch=6, n_epochs=2)
    assert_close(weights(models[0]), weights(models[1]))
    assert_close(weights(models[2]), weights(models[3]))
    kernel, bias = arrays(models[0].net)  # type: ignore[arg-type]
    assert run.epochs[-1]["val_loss"] == pytest.approx(by_hand(kernel, bias, net(1), 0.0, 1.0), rel=1e-5)
    assert_close(before, weights(teacher), 0.0)


def test_another_teacher_is_another_run(tmp_path: Path) -> None:
    ids = [fit(tmp_path, NNModel(module=net(2)), kd_objective(net(seed)), BATCH, batch=6).id for seed in (1, 4)]
    assert ids[0] != ids[1]
    with pytest.raises(RunExistsError):
        fit(tmp_path, NNModel(module=net(2)), kd_objective(net(1)), BATCH, batch=6)
