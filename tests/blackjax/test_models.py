"""A NumPyro model under BlackJAX: the same task as under NumPyro's own engines, and the same posterior."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from nnx_jax.backends.blackjax import run
from nnx_jax.core.errors import DataError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.engines.bayes import NumpyroTask
from nnx_jax.engines.blackjax_task import BlackjaxTask
from nnx_jax.engines.predictive import NumpyroPredictiveOp
from nnx_jax.training_loop import TrainingLoop
from tests.blackjax.toy import MEAN, PRIOR, ROWS, SD, draw, engine_of, rows

N = 64


def line(x: Any, y: Any = None) -> None:
    """Straight line with unknown slope, intercept and noise."""
    w, b = numpyro.sample("w", dist.Normal(0.0, 5.0)), numpyro.sample("b", dist.Normal(0.0, 5.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("rows", N, subsample_size=len(x)):
        numpyro.sample("obs", dist.Normal(w * x + b, sigma), obs=y)


def line_data() -> ArrayDataset:
    generator = np.random.default_rng(0)
    x = generator.normal(size=N).astype(np.float32)
    return ArrayDataset(x=x, y=(2 * x + 1 + 0.05 * generator.normal(size=N)).astype(np.float32))


def mean_of(x: Any, scaled: bool = True) -> None:
    """The conjugate normal mean of the toy, with a second latent that the rows say nothing of."""
    mean = numpyro.sample("mean", dist.Normal(0.0, PRIOR))
    numpyro.sample("free", dist.HalfNormal(1.0))
    with numpyro.plate("rows", ROWS if scaled else len(x), subsample_size=len(x) if scaled else None):
        numpyro.sample("obs", dist.Normal(mean, 1.0), obs=x[:, 0])


def loop(task: Any, count: int, data: ArrayDataset, **settings: Any) -> TrainingLoop:
    return TrainingLoop(dataset=data, task=task, backend="blackjax", max_steps=count, quiet=True, **settings)


def test_draws_are_mapped_back_to_each_support() -> None:
    """A half-normal site is sampled over all real numbers and handed out above 0. (pipekit:K14)"""
    task = NumpyroTask(mean_of)
    engine = engine_of(BlackjaxTask(numpyro_task=task, sampler="hmc", num_warmup=50), ArrayDataset(x=rows()))
    posterior = engine.trained(draw(engine, 100))
    assert set(posterior.values) == {"mean", "free"}
    assert (posterior.positions["free"] < 0).any()
    assert (posterior.values["free"] > 0).all()
    np.testing.assert_allclose(posterior.values["free"], np.exp(posterior.positions["free"]), rtol=1e-5)


def test_a_model_splits_into_prior_and_likelihood() -> None:
    """Their sum is the density that NumPyro gives, the likelihood is that of the rows, and starts of tempered SMC are
    of the prior."""
    task = BlackjaxTask(numpyro_task=NumpyroTask(mean_of), sampler="tempered_smc", num_particles=400)
    target = engine_of(task, ArrayDataset(x=rows())).target
    position = {"mean": np.float32(2.0), "free": np.float32(0.3)}
    whole, part = (float(f(position, target.data)) for f in (target.logdensity, target.loglikelihood))
    by_hand = -0.5 * np.square(rows() - 2.0).sum() - ROWS * 0.5 * np.log(2 * np.pi)
    assert part == pytest.approx(by_hand, rel=1e-5)
    assert float(target.logprior(position, target.data)) == pytest.approx(whole - by_hand, abs=1e-3)
    start = target.initial(jax.random.key(0), 400)
    assert start["mean"].shape == (400,)
    assert np.std(start["mean"]) == pytest.approx(PRIOR, rel=0.15)
    assert np.mean(np.exp(start["free"])) == pytest.approx((2 / np.pi) ** 0.5, rel=0.15)


def test_minibatches_of_a_model_are_scaled_to_all_rows() -> None:
    """SGLD on batches of 16 meets the exact posterior; a model without a subsampled plate is refused. (pipekit:K15)"""
    task = BlackjaxTask(numpyro_task=NumpyroTask(mean_of), sampler="sgld", num_warmup=500, step_size=5e-4, num_chains=2)
    engine = engine_of(task, ArrayDataset(x=rows()))
    found = engine.trained(draw(engine, 4000)).values["mean"]
    assert found.mean() == pytest.approx(MEAN, abs=0.5 * SD)
    assert found.std() == pytest.approx(SD, rel=0.3)
    unscaled = BlackjaxTask(numpyro_task=NumpyroTask(partial(mean_of, scaled=False)), sampler="sgld")
    with pytest.raises(DataError, match="plate"):
        engine_of(unscaled, ArrayDataset(x=rows()))


def test_refuses_a_site_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="no site 'nothing'"):
        run(loop(NumpyroTask(line, predictive_site="nothing"), 2, line_data()), None)


@pytest.mark.slow
def test_a_numpyro_task_needs_another_backend_string_alone() -> None:
    """NUTS on the bridged model: predictive error below 0.2, slope and intercept as measured, sigma above 0, and the
    mean of the slope within 0.005 of NumPyro's own NUTS. (pipekit:K11) (pipekit:K14) (pipekit:K16) (pipekit:K21)"""
    data = line_data()
    trained = run(loop(NumpyroTask(line, num_warmup=400, num_chains=2), 500, data), None)
    assert isinstance(trained.operator, NumpyroPredictiveOp)
    x, y = (data.arrays() or {})["x"], (data.arrays() or {})["y"]
    assert np.mean(np.square(np.asarray(trained.operator(x)) - (2 * x + 1))) < 0.2
    found = trained.operator.posterior
    assert (found["sigma"] > 0).all()
    assert found["w"].shape == (1000,)
    ours = trained.info["sites"]
    assert all(told["r_hat"] < 1.05 and told["ess"] > 100 for told in ours.values())
    assert trained.info["num_divergences"] == 0
    for name, true in {"w": 2.0, "b": 1.0, "sigma": 0.05}.items():
        assert abs(ours[name]["mean"] - true) < 4 * ours[name]["sd"]
    mcmc = numpyro.infer.MCMC(numpyro.infer.NUTS(line), num_warmup=400, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(1), x, y)
    theirs = mcmc.get_samples()
    assert abs(ours["w"]["mean"] - float(theirs["w"].mean())) < 0.005
    assert ours["w"]["sd"] == pytest.approx(float(theirs["w"].std()), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, count",
    [({"sampler": "tempered_smc", "num_particles": 400}, 30), ({"sampler": "pathfinder"}, 500)],
)
def test_other_samplers_on_the_same_model(settings: dict[str, Any], count: int) -> None:
    """Slope, intercept and noise within four posterior standard deviations of what made the data, one of each other."""
    trained = run(loop(BlackjaxTask(numpyro_task=NumpyroTask(line), **settings), count, line_data()), None)
    told = trained.info["sites"]
    for name, true in {"w": 2.0, "b": 1.0, "sigma": 0.05}.items():
        assert abs(told[name]["mean"] - true) < 4 * told[name]["sd"]
    assert told["w"]["sd"] == pytest.approx(0.0065, rel=0.2)
