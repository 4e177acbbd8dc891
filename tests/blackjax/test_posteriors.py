"""Posteriors that are known in closed form, met to Monte Carlo error.

A mean is compared within 5 of its standard errors, sd / sqrt(ess). For a standard deviation, whose error is about
sd / sqrt(2 ess), the tolerance is written out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.backends.blackjax import run
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.engines.blackjax_task import BlackjaxTask
from nnx_jax.engines.chains import Posterior
from nnx_jax.training_loop import TrainingLoop
from tests.blackjax.toy import MEAN, PRECISION, PRIOR, ROWS, SD, dataset, draw, engine_of, normal_mean, rows


def sample(task: BlackjaxTask, data: Any, count: int, batch: int = 16) -> Posterior:
    engine = engine_of(task, data, batch=batch)
    return engine.trained(draw(engine, count))


def check_mean(posterior: Posterior, name: str, mean: float) -> dict[str, float]:
    told = posterior.diagnostics()[name]
    assert told["r_hat"] < 1.05
    assert abs(told["mean"] - mean) < 5 * told["mcse"]
    return told


# -- a normal mean with known variance -----------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["hmc", pytest.param("nuts", marks=pytest.mark.slow)])
def test_a_conjugate_normal_mean(sampler: str) -> None:
    """Exact mean and sd, from four chains that agree. (pipekit:K16)"""
    found = sample(normal_mean(sampler=sampler, num_warmup=200, num_chains=4), dataset(), 400)
    assert found.values["position"].shape == (4, 400)
    told = check_mean(found, "position", MEAN)
    assert told["ess"] > 300
    assert told["sd"] == pytest.approx(SD, rel=0.12)
    assert found.stats["is_divergent"].sum() == 0


@pytest.mark.slow
def test_chains_may_start_anywhere() -> None:
    """Chains that start up to 30 apart end in one place. (pipekit:K16)"""
    spread = normal_mean(sampler="hmc", num_warmup=150, num_chains=4, init_fn=lambda key: 30 * jax.random.normal(key))
    told = check_mean(sample(spread, dataset(), 300), "position", MEAN)
    assert told["sd"] == pytest.approx(SD, rel=0.12)


def test_sgld_has_the_spread_that_its_step_gives() -> None:
    """With all rows a batch, SGLD is the linear chain x' = x - e a (x - m) + sqrt(2 e) n, whose variance at rest is
    1 / (a (1 - e a / 2)), a the posterior's precision. (pipekit:K15)"""
    step = 0.01
    chain = normal_mean(sampler="sgld", num_warmup=200, num_chains=4, step_size=step)
    told = check_mean(sample(chain, dataset(), 2000, batch=ROWS), "position", MEAN)
    at_rest = (1 / (PRECISION * (1 - step * PRECISION / 2))) ** 0.5
    assert at_rest > 1.2 * SD  # so that the exact posterior would not pass for it
    assert told["sd"] == pytest.approx(at_rest, rel=0.06)


@pytest.mark.slow
def test_sgld_on_minibatches_meets_the_posterior() -> None:
    """Batches of 16 of 64 rows, a small step: mean and sd of the exact posterior, not of four times the data's
    variance. (pipekit:K15)"""
    chain = normal_mean(sampler="sgld", num_warmup=500, num_chains=4, step_size=5e-4)
    told = check_mean(sample(chain, dataset(), 4000), "position", MEAN)
    assert told["sd"] == pytest.approx(SD, rel=0.2)


@pytest.mark.slow
def test_sghmc_has_the_spread_that_its_integrator_gives() -> None:
    """With all rows a batch, SGHMC is linear too: the variance at rest of its Euler steps, worked out in numpy."""
    step, inner, friction = 0.02, 10, 0.01
    turn = np.array([[1.0, step], [-step * PRECISION, 1 - friction * step]])
    kick = np.diag([0.0, 2 * friction * step])
    variance = 1.0
    for _ in range(2000):
        covariance = np.diag([variance, 1.0])  # the momentum is drawn anew for every draw
        for _ in range(inner):
            covariance = turn @ covariance @ turn.T + kick
        variance = covariance[0, 0]
    chain = normal_mean(sampler="sghmc", num_warmup=100, num_chains=4, step_size=step, num_integration_steps=inner)
    told = check_mean(sample(chain, dataset(), 1500, batch=ROWS), "position", MEAN)
    assert variance**0.5 > 1.05 * SD
    assert told["sd"] == pytest.approx(variance**0.5, rel=0.05)


@pytest.mark.slow
def test_pathfinder_is_exact_for_a_normal_posterior() -> None:
    """The posterior is normal, and so is what pathfinder fits."""
    told = check_mean(sample(normal_mean(sampler="pathfinder", num_chains=2), dataset(), 1000), "position", MEAN)
    assert told["sd"] == pytest.approx(SD, rel=0.08)


def test_svgd_particles_settle_on_the_posterior() -> None:
    """One hundred particles, whose spread at rest is a little less than the posterior's."""
    found = sample(normal_mean(sampler="svgd", step_size=0.05), dataset(), 600).values["position"]
    assert found.shape == (1, 100)
    assert found.mean() == pytest.approx(MEAN, abs=0.1 * SD)
    assert found.std() == pytest.approx(SD, rel=0.1)


@pytest.mark.slow
def test_tempered_smc_reaches_the_posterior_from_the_prior() -> None:
    """The temperature rises to 1; 400 particles then have the exact mean and sd to 4 standard errors."""
    start = lambda key: PRIOR * jax.random.normal(key)  # noqa: E731
    found = sample(normal_mean(sampler="tempered_smc", num_particles=400, init_fn=start), dataset(), 12)
    assert found.facts["tempering_param"] == 1.0
    temperatures = found.stats["tempering_param"][:, 0]
    assert (np.diff(temperatures) >= 0).all()
    assert 0 < temperatures[0] < 1
    particles = found.values["position"]
    assert particles.mean() == pytest.approx(MEAN, abs=4 * SD / 400**0.5)
    assert particles.std() == pytest.approx(SD, rel=4 / 800**0.5)


# -- linear regression with known noise ----------------------------------------------------------------------------

NOISE = 0.05


def line_data() -> tuple[np.ndarray, np.ndarray]:
    """64 rows of y = 2 x + 1 with noise of sd 0.05."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=64).astype(np.float32)
    return x, (2 * x + 1 + NOISE * generator.normal(size=64)).astype(np.float32)


def line_posterior() -> tuple[np.ndarray, np.ndarray]:
    """Mean [w, b] and covariance in closed form: priors N(0, PRIOR^2), precision X'X / s^2 + I / PRIOR^2."""
    x, y = (column.astype(np.float64) for column in line_data())
    design = np.stack([x, np.ones_like(x)], axis=1)
    covariance = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(2) / PRIOR**2)
    return covariance @ design.T @ y / NOISE**2, covariance


def line_task(**settings: Any) -> BlackjaxTask:
    def prior(p: Any) -> Any:
        return -0.5 * (p["w"] ** 2 + p["b"] ** 2) / PRIOR**2

    def likelihood(p: Any, row: Any) -> Any:
        x, y = row
        return -0.5 * jnp.square((y - p["w"] * x - p["b"]) / NOISE)

    start = {} if "init_fn" in settings else {"init_position": {"b": 0.0, "w": 0.0}}
    return BlackjaxTask(
        logprior_fn=prior, loglikelihood_fn=likelihood, predict_fn=lambda p, x: p["w"] * x + p["b"], **start, **settings
    )


def line_dataset() -> ArrayDataset:
    x, y = line_data()
    return ArrayDataset(x=x, y=y)


@pytest.mark.parametrize(
    "sampler, count",
    [
        pytest.param("nuts", 500, marks=pytest.mark.slow),
        pytest.param("hmc", 500, marks=pytest.mark.slow),
        pytest.param("mclmc", 4000, marks=pytest.mark.slow),
        pytest.param("pathfinder", 1000, marks=pytest.mark.slow),
    ],
)
def test_linear_regression_with_known_noise(sampler: str, count: int) -> None:
    """Exact mean and covariance of slope and intercept."""
    found = sample(line_task(sampler=sampler, num_warmup=500, num_chains=4), line_dataset(), count)
    mean, covariance = line_posterior()
    for place, name in enumerate("wb"):
        told = check_mean(found, name, mean[place])
        assert told["sd"] == pytest.approx(covariance[place, place] ** 0.5, rel=0.12)
    drawn = np.stack([found.values[name].ravel() for name in "wb"])
    correlation = covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
    assert np.corrcoef(drawn)[0, 1] == pytest.approx(correlation, abs=0.1)


def test_sgld_recovers_slope_and_intercept() -> None:
    """Batches of 16, 6000 steps of 1e-5 with known noise, as measured by the ledger: both within 0.02 of the exact
    mean, sd between the exact one and three times it, which the noise of the gradient adds. (pipekit:K15)"""
    found = sample(line_task(sampler="sgld", num_warmup=500, step_size=1e-5), line_dataset(), 6000)
    mean, covariance = line_posterior()
    for place, name in enumerate("wb"):
        draws = found.values[name]
        assert draws.mean() == pytest.approx(mean[place], abs=0.005)
        assert draws.mean() == pytest.approx((2.0, 1.0)[place], abs=0.02)
        assert 0.9 < draws.std() / covariance[place, place] ** 0.5 < 3


@pytest.mark.parametrize("sampler", ["hmc", pytest.param("nuts", marks=pytest.mark.slow)])
def test_a_raw_log_density_under_a_loop(sampler: str) -> None:
    """Target N(3, 1), 200 warmup steps and 300 draws: the predictive mean is 3 within 0.5, and an empty dataset is not
    touched. (pipekit:K12)"""
    task = BlackjaxTask(
        lambda p: -0.5 * jnp.sum((p - 3.0) ** 2),
        np.zeros(1),
        lambda p, x: 0 * x[:, 0] + p[0],
        num_warmup=200,
        sampler=sampler,
    )
    empty = ArrayDataset(x=np.zeros((0, 1), np.float32))
    trained = run(TrainingLoop(dataset=empty, task=task, backend="blackjax", max_steps=300, quiet=True), None)
    assert trained.operator(np.zeros((2, 1), np.float32)) == pytest.approx(np.full(2, 3.0), abs=0.5)
    info = trained.info
    assert info["final_step"] == info["num_draws"] == 300
    assert info["sites"]["position"]["r_hat"] < 1.05
    assert info["sites"]["position"]["ess"] > 50
    assert isinstance(info["num_divergences"], int)
    assert 0 <= info["final_metrics"]["acceptance_rate"] <= 1


def test_rows_are_those_of_the_loop() -> None:
    """The gradient at the exact mean is 0 only where every row was counted once."""
    engine = engine_of(normal_mean(), dataset())
    assert jax.grad(engine.target.logdensity)(jnp.asarray(MEAN), engine.target.data) == pytest.approx(0, abs=1e-3)
    assert engine.target.data[0].shape == rows().shape
