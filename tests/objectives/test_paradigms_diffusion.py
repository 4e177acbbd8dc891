"""Diffusion: the schedules, the noise that is predicted, and samples of a distribution whose best model is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.model import NNModel
from nnx_jax.objectives import ddpm_objective, ddpm_sample, noise_schedule
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
)

DRAW = np.random.default_rng(7)
X = DRAW.normal(size=(5, 2)).astype(np.float32)


class Net(nnx.Module):
    """Noise from the row and its time, with dropout where asked."""

    def __init__(self, dropout: float = 0.0) -> None:
        rngs = nnx.Rngs(0)
        self.layer, self.dropout = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        return self.dropout(self.layer(jnp.concatenate([x, t[:, None].astype(x.dtype) / 10], axis=1)))


def asked(rows: np.ndarray, n_steps: int, seed: int = 0, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """(x_t, t) that the model is called with."""
    seen: list[Any] = []
    model = lambda x, t: seen.append((np.asarray(x, np.float64), np.asarray(t))) or x  # noqa: E731
    ddpm_objective(n_steps, **more)(context(model, {"x": rows}, seed=seed))
    return seen[0]


def tables(n_steps: int, schedule: str = "linear") -> tuple[np.ndarray, np.ndarray]:
    """sqrt(a_t), sqrt(1 - a_t)."""
    kept = np.cumprod(1.0 - noise_schedule(n_steps, schedule))
    return np.sqrt(kept), np.sqrt(1.0 - kept)


# -- schedules --------------------------------------------------------------------------------------------------


def test_the_linear_schedule_is_the_papers_for_a_thousand_steps() -> None:
    betas = noise_schedule(1000)
    assert (betas[0], betas[-1]) == pytest.approx((1e-4, 0.02))
    np.testing.assert_allclose(np.diff(betas), (0.02 - 1e-4) / 999, rtol=1e-9)
    assert np.prod(1 - betas) == pytest.approx(4.0358e-5, rel=1e-4)


@pytest.mark.parametrize("n_steps", [50, 200, 4000])
def test_other_numbers_of_steps_leave_as_little_of_the_rows(n_steps: int) -> None:
    assert 1e-6 < np.prod(1 - noise_schedule(n_steps)) < 1e-4


def test_the_cosine_schedule_is_a_squared_cosine() -> None:
    kept = np.cumprod(1 - noise_schedule(100, "cosine"))
    curve = np.cos((np.arange(101) / 100 + 0.008) / 1.008 * np.pi / 2) ** 2
    np.testing.assert_allclose(kept[:-1], curve[1:-1] / curve[0], rtol=1e-9)
    assert noise_schedule(100, "cosine").max() == 0.999


@pytest.mark.parametrize("n_steps", [1, 2, 5])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_few_steps_have_variances_below_one(n_steps: int, schedule: str) -> None:
    betas = noise_schedule(n_steps, schedule)
    assert betas.shape == (n_steps,)
    assert (betas > 0).all()
    assert (betas <= 0.999).all()


@pytest.mark.parametrize("n_steps", [0, -1, 2.0, True])
def test_no_number_of_steps_is_refused(n_steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"n_steps is .*; give a whole number of 1 or more"):
        ddpm_objective(n_steps)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no schedule 'cosin'; did you mean 'cosine'"):
        ddpm_objective(10, "cosin")


# -- the objective ----------------------------------------------------------------------------------------------


def test_times_and_noise_are_drawn_for_every_row() -> None:
    """Times are uniform from 0 to T - 1, noise is standard normal and does not depend on the time."""
    rows = np.full((4000, 2), 0.5, np.float32)
    noisy, t = asked(rows, 8)
    signal, spread = tables(8)
    noise = (noisy - signal[t, None] * rows) / spread[t, None]
    counts = np.bincount(t, minlength=8)
    assert len(counts) == 8
    assert counts.min() > 420
    assert counts.max() < 580
    assert noise.mean(axis=0) == pytest.approx([0, 0], abs=0.06)
    np.testing.assert_allclose(np.cov(noise.T), np.eye(2), atol=0.08)
    assert abs(np.corrcoef(t, noise[:, 0])[0, 1]) < 0.06
    assert len(np.unique(noise[:, 0])) == 4000


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_loss_and_its_gradient_are_of_the_noise(schedule: str) -> None:
    """Noise and times are found from what the model is given; then the loss is written down again."""
    objective, model = ddpm_objective(20, schedule), Net()
    noisy, t = asked(X, 20, seed=4, schedule=schedule)
    signal, spread = tables(20, schedule)
    noise = (noisy - signal[t, None] * X) / spread[t, None]
    inputs = np.concatenate([noisy, t[:, None] / 10], axis=1)
    kernel, bias = (np.asarray(part[...], np.float64) for part in (model.layer.kernel, model.layer.bias))
    by_hand = lambda k: float(np.mean((noise - inputs @ k - bias) ** 2))  # noqa: E731
    value, grads = value_and_grads(objective, model, {"x": X}, seed=4)
    assert value == pytest.approx(by_hand(kernel), rel=1e-4)
    np.testing.assert_allclose(grads["layer.kernel"], numeric(by_hand, kernel), atol=1e-4)


def test_a_model_that_knows_the_noise_has_no_loss() -> None:
    signal, spread = (jnp.asarray(part, jnp.float32) for part in tables(50))
    images = DRAW.normal(size=(3, 4, 4, 1)).astype(np.float32)

    def knows(x: jax.Array, t: jax.Array) -> jax.Array:
        shape = (-1, 1, 1, 1)
        return (x - signal[t].reshape(shape) * images) / spread[t].reshape(shape)

    assert loss_of(ddpm_objective(50), knows, {"x": images}) == pytest.approx(0.0, abs=1e-8)
    assert loss_of(ddpm_objective(50), lambda x, t: 0 * x, {"x": images}) > 0.5


def test_a_padded_batch_counts_like_the_batch() -> None:
    objective = ddpm_objective(20)
    plain, full = value_and_grads(objective, Net(), {"x": X}), value_and_grads(objective, Net(), padded({"x": X}))
    assert plain[0] == pytest.approx(full[0], rel=1e-6)
    assert_close(plain[1], full[1])


def test_rows_count_with_their_weight() -> None:
    weighted = {"x": X, "weight": np.array([1, 0, 0, 3, 0], np.float32)}
    (term,) = terms_of(ddpm_objective(20)(context(Net(), weighted)))
    first, fourth = (
        terms_of(ddpm_objective(20)(context(Net(), {"x": X, "mask": np.eye(5, dtype=np.float32)[row]})))[0].numerator
        for row in (0, 3)
    )
    assert float(term.numerator) == pytest.approx(float(first + 3 * fourth), rel=1e-5)
    assert float(term.denominator) == 4.0


def test_one_row_and_no_row() -> None:
    assert loss_of(ddpm_objective(20), Net(), {"x": X[:1]}) > 0
    (term,) = terms_of(ddpm_objective(20)(context(Net(), masked({"x": X}))))
    assert (float(term.numerator), float(term.denominator)) == (0.0, 0.0)


def test_ids_and_outputs_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match="column 'x' is int32; scale it to floats first"):
        ddpm_objective(5)(context(Net(), {"x": np.ones((3, 2), np.int32)}))
    with pytest.raises(ModelError, match=r"returned shape \[5\] for x_t \[5, 2\]"):
        ddpm_objective(5)(context(lambda x, t: x[:, 0], {"x": X}))
    with pytest.raises(ModelError, match=r"returned shape \[1, 2\] for x_t \[3, 2\]"):
        ddpm_sample(lambda x, t: x[:1], (3, 2), 0, n_steps=4)


def test_a_run_scores_its_validation_with_the_same_noise_every_time(tmp_path: Path) -> None:
    """Windows of two, a padded last batch, and a rate of 0: training draws anew, validation does not."""
    run = fit(
        tmp_path, NNModel(module=Net()), ddpm_objective(20), {"x": X}, batch=2, window=2, rate=0.0, val=True, n_epochs=2
    )
    first, second = run.epochs
    assert first["val_loss"] == second["val_loss"] > 0
    assert first["train_loss"] != second["train_loss"]


# -- samples ----------------------------------------------------------------------------------------------------


MEAN, STD = np.array([1.5, -0.5]), np.array([0.3, 1.2])


def best(n_steps: int, schedule: str) -> Any:
    """E[noise | x_t] for rows of N(MEAN, STD^2)."""
    signal, spread = (jnp.asarray(part, jnp.float32) for part in tables(n_steps, schedule))

    def model(x: jax.Array, t: jax.Array) -> jax.Array:
        s, n = signal[t][:, None], spread[t][:, None]
        return n * (x - s * MEAN) / (s**2 * STD**2 + n**2)

    return model


def moments(n_steps: int, schedule: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the samples of `best`, by algorithm 2: every step is linear in x_t."""
    betas = noise_schedule(n_steps, schedule)
    kept = np.cumprod(1 - betas)
    mean, variance = np.zeros(2), np.ones(2)
    for t in reversed(range(n_steps)):
        slope = np.sqrt(1 - kept[t]) / (kept[t] * STD**2 + 1 - kept[t])
        factor = betas[t] / np.sqrt(1 - kept[t])
        scale = (1 - factor * slope) / np.sqrt(1 - betas[t])
        mean = scale * mean + factor * slope * np.sqrt(kept[t]) * MEAN / np.sqrt(1 - betas[t])
        drawn = (1 - kept[t - 1]) / (1 - kept[t]) * betas[t] if t else 0.0
        variance = scale**2 * variance + drawn
    return mean, np.sqrt(variance)


@pytest.mark.parametrize("n_steps, schedule", [(200, "linear"), (50, "cosine"), (1, "linear")])
def test_samples_of_the_best_model_have_the_moments_of_the_algorithm(n_steps: int, schedule: str) -> None:
    found = np.asarray(ddpm_sample(best(n_steps, schedule), (8000, 2), 3, n_steps=n_steps, schedule=schedule))
    mean, std = moments(n_steps, schedule)
    np.testing.assert_allclose(found.mean(axis=0), mean, atol=0.05)
    np.testing.assert_allclose(found.std(axis=0), std, rtol=0.04, atol=1e-3)


def test_with_many_steps_they_are_the_rows_distribution() -> None:
    mean, std = moments(1000, "linear")
    np.testing.assert_allclose(mean, MEAN, atol=0.02)
    np.testing.assert_allclose(std, STD, rtol=0.02)


def test_samples_stay_within_the_clip() -> None:
    found = np.asarray(ddpm_sample(best(20, "linear"), (100, 2), 0, n_steps=20, clip=1.0))
    assert np.abs(found).max() <= 1.0
    for clip in (0.0, -1.0):
        with pytest.raises(ConfigError, match="ddpm_sample: clip is"):
            ddpm_sample(best(20, "linear"), (1, 2), 0, n_steps=20, clip=clip)


def test_a_model_is_sampled_in_evaluation_mode_by_its_key() -> None:
    """Dropout is off; a whole number is the seed of a key; NNModel, module and function are one."""
    module = Net(dropout=0.5)
    first = ddpm_sample(NNModel(module=module), (4, 2), 0, n_steps=5)
    np.testing.assert_array_equal(first, ddpm_sample(module, (4, 2), jax.random.key(0), n_steps=5))
    quiet = nnx.view(module, deterministic=True)
    np.testing.assert_allclose(first, ddpm_sample(lambda x, t: quiet(x, t), (4, 2), 0, n_steps=5), rtol=1e-6)
    assert not np.allclose(first, ddpm_sample(module, (4, 2), 1, n_steps=5))
    module.layer.bias.set_value(module.layer.bias[...] + 1.0)  # the compiled program takes the weights of now
    assert not np.allclose(first, ddpm_sample(module, (4, 2), 0, n_steps=5))
