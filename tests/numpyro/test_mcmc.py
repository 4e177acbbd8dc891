"""Markov chain Monte Carlo under the one loop: closed-form posteriors to Monte Carlo error, and the diagnostics."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.numpyro_mcmc import warn_unused
from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.engines.bayes import NumpyroTask
from nnx_jax.engines.numpyro_mcmc import Draws, sample
from nnx_jax.loop.writers import CSVWriter
from tests.numpyro.posteriors import DATA, TRUE, X, Y, exact_line, fit, known_line, line, loop_of

DRAWS, CHAINS = 250, 2
TASK = NumpyroTask(known_line, num_warmup=250, num_samples=DRAWS, num_chains=CHAINS)


class Seen:
    """Which callbacks were called, with which state."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.model: Any = None

    def on_train_begin(self, loop: Any, state: Any) -> None:
        self.calls.append(f"begin {state.step}")

    def on_step_end(self, loop: Any, state: Any, metrics: Any) -> None:
        self.calls.append("step")

    def on_epoch_end(self, loop: Any, state: Any, metrics: Any) -> None:
        self.calls.append("epoch")

    def on_eval_end(self, loop: Any, state: Any, metrics: Any) -> None:
        self.calls.append("eval")

    def on_train_end(self, loop: Any, state: Any) -> None:
        self.calls.append(f"end {state.step} {type(state.error).__name__}")
        self.model = state.model


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def trained(seen: Seen) -> Trained:
    return fit(loop_of(TASK, "numpyro-mcmc", max_steps=DRAWS, callbacks=[seen]))


@pytest.fixture(scope="module")
def draws() -> Draws:
    """Draws with numbers of their own: two chains that agree at `near`, and do not at `far`."""
    noise = np.random.default_rng(0).normal(size=(2, 400))
    far = noise + np.array([[0.0], [10.0]])
    flags = np.zeros((2, 400), bool)
    flags[1, :3] = True
    samples = {"near": noise, "far": far, "still": np.ones((2, 400))}
    return Draws(samples, flags, np.full((2, 400), 0.75), warmup=7)


def test_exact_posterior_to_monte_carlo_error(trained: Trained) -> None:
    """Mean and sd of a normal posterior in closed form, each to 4 standard errors of its effective sample size."""
    exact = exact_line(X, Y)
    for index, name in enumerate(("w", "b")):
        drawn, ess = trained.operator.posterior[name], trained.info["ess"][name]
        assert drawn.shape == (DRAWS * CHAINS,)
        assert abs(drawn.mean() - exact.mean[index]) < 4.0 * exact.sd[index] / np.sqrt(ess)
        assert abs(drawn.std(ddof=1) - exact.sd[index]) < 4.0 * exact.sd[index] / np.sqrt(2.0 * ess)


def test_info_has_the_diagnostics(trained: Trained) -> None:
    """Several chains, split R-hat, ESS and divergences; the length is the number of draws (pipekit:K5)."""
    info = trained.info
    assert info["final_step"] == trained.state.step == DRAWS * CHAINS
    assert (info["num_chains"], info["num_samples"], info["num_warmup"]) == (CHAINS, DRAWS, 250)
    assert info["num_divergences"] == 0
    assert isinstance(info["num_divergences"], int)
    assert set(info["sites"]) == {"w", "b"} == set(info["r_hat"]) == set(info["ess"])
    assert info["sites"]["w"]["r_hat"] == info["r_hat"]["w"]  # in the form that backend="blackjax" has too
    assert all(0.99 < rhat < 1.02 for rhat in info["r_hat"].values())
    assert all(100 < ess <= 3 * DRAWS * CHAINS for ess in info["ess"].values())
    assert 0.5 < info["acceptance_rate"] <= 1.0


def test_begin_and_end_are_the_only_events(trained: Trained, seen: Seen) -> None:
    """One blocking run; at its end the callbacks see the posterior (pipekit:K6) (pipekit:D13.3)."""
    assert seen.calls == ["begin 0", f"end {DRAWS * CHAINS} NoneType"]
    assert seen.model is trained.operator


def test_fields_that_do_not_apply_are_named() -> None:
    """Those that are set, and no other (pipekit:K6)."""
    fields = {"optimizer_config": {"name": "adam", "lr": 0.1}, "eval_every_n_steps": 7, "sharding": {"data": 1}}
    with pytest.warns(UserWarning, match="max_steps, optimizer_config, eval_every_n_steps, sharding do not apply"):
        warn_unused(loop_of(TASK, "numpyro-mcmc", max_steps=7, **fields), TASK)
    with pytest.warns(UserWarning, match="which loss, metric_writer do not apply"):
        warn_unused(loop_of(TASK, "numpyro-mcmc", max_steps=DRAWS, loss="mse", metric_writer=CSVWriter("x.csv")), TASK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unused(loop_of(TASK, "numpyro-mcmc", max_steps=DRAWS), TASK)
        warn_unused(loop_of(TASK, "numpyro-mcmc", max_steps=DRAWS * CHAINS), TASK)


def test_one_task_under_both_names(trained: Trained) -> None:
    """The backend's name alone chooses the engine (pipekit:K5) (pipekit:D13.1)."""
    other = fit(loop_of(TASK, "numpyro-svi", max_steps=3))
    assert (other.info["final_step"], trained.info["final_step"]) == (3, DRAWS * CHAINS)
    assert set(other.info["sites"]) == set(trained.info["sites"]) == {"w", "b"}
    assert type(other.operator) is type(trained.operator)
    assert other.operator(X[:2]).shape == trained.operator(X[:2]).shape == (2,)


def test_three_draws_have_no_two_halves() -> None:
    few = Draws({"w": np.zeros((1, 3))}, np.zeros((1, 3), bool), np.ones((1, 3)), warmup=0)
    assert (few.diagnostics()["r_hat"], few.diagnostics()["ess"]) == ({"w": None}, {"w": None})


def test_the_state_goes_through_json(trained: Trained) -> None:
    again = TrainerCarryState.from_dict(trained.state.to_dict(), model=trained.operator)
    assert again == trained.state
    np.testing.assert_array_equal(again.model(X[:3]), trained.operator(X[:3]))


def test_worst_element_of_every_site(draws: Draws) -> None:
    """R-hat as in Gelman et al., BDA3, 11.4, written out over the four half chains."""
    told = draws.diagnostics()
    halves = draws.samples["far"].reshape(4, 200)
    between, within = 200 * halves.mean(axis=1).var(ddof=1), halves.var(axis=1, ddof=1).mean()
    assert told["r_hat"]["far"] == pytest.approx(np.sqrt((199 / 200 * within + between / 200) / within), rel=1e-5)
    assert told["r_hat"]["near"] < 1.02
    assert told["ess"]["far"] < 10 < 400 < told["ess"]["near"]
    assert (told["r_hat"]["still"], told["ess"]["still"]) == (None, None)
    assert (told["num_divergences"], told["acceptance_rate"], told["num_warmup"]) == (3, 0.75, 7)
    assert draws.flat["far"].shape == (800,)
    np.testing.assert_array_equal(draws.flat["far"][400:], draws.samples["far"][1])


def test_a_failing_run_ends_its_callbacks() -> None:
    def never(x: Any, y: Any = None) -> None:
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)
        numpyro.factor("never", -np.inf * w)

    seen = Seen()
    task = NumpyroTask(never, num_warmup=2, num_samples=2)
    with pytest.raises(ModelError, match="cannot be sampled"):
        fit(loop_of(task, "numpyro-mcmc", max_steps=2, callbacks=[seen]))
    assert seen.calls == ["begin 0", "end 0 ModelError"]


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs float32 or float64"):
        fit(loop_of(TASK, "numpyro-mcmc", max_steps=DRAWS, precision="bfloat16"))
    with pytest.raises(DataError, match="counts each of them 2 times"):
        fit(loop_of(TASK, "numpyro-mcmc", max_steps=DRAWS, dataset=ArrayDataset(X[:32], Y[:32])))
    with pytest.raises(KeyError, match="its sites are: b, obs, w"):
        sample(NumpyroTask(known_line, predictive_site="height"), (X, Y))


@pytest.mark.slow
def test_deterministic_sites_are_no_part_of_the_posterior() -> None:
    """One value for every row of the training data says nothing of new rows; they can be predicted."""

    def model(x: Any, y: Any = None) -> None:
        w = numpyro.sample("w", dist.Normal(0.0, 10.0))
        mean = numpyro.deterministic("mean", w * x)
        numpyro.sample("obs", dist.Normal(mean, 1.0), obs=y)

    task = NumpyroTask(model, num_warmup=20, num_samples=20, predictive_site="mean", kernel="hmc")
    trained = fit(loop_of(task, "numpyro-mcmc", max_steps=20))
    assert trained.info["kernel"] == "hmc"
    assert list(trained.operator.posterior) == ["w"]
    at = np.array([1.0, 3.0], np.float32)
    drawn = trained.operator.samples(at)
    np.testing.assert_allclose(drawn[:, 1], 3.0 * np.asarray(drawn[:, 0]), rtol=1e-5)


@pytest.mark.slow
def test_regression_with_unknown_noise() -> None:
    """300 + 300 draws as measured with NumPyro alone: w 2.009 +- .010, b 1.003 +- .006, sigma .051 (pipekit:K4)."""
    task = NumpyroTask(line, num_warmup=300, num_samples=300)
    trained = fit(loop_of(task, "numpyro-mcmc", max_steps=300, dataset=DATA))
    found = trained.operator.posterior
    assert float(np.mean((np.asarray(trained.operator(X)) - TRUE) ** 2)) < 1e-3
    assert found["w"].mean() == pytest.approx(2.009, abs=0.01)
    assert found["w"].std() == pytest.approx(0.010, rel=0.3)
    assert found["b"].mean() == pytest.approx(1.003, abs=0.006)
    assert found["sigma"].mean() == pytest.approx(0.05, abs=0.008)
    assert trained.info["num_divergences"] == 0
