"""What a BlackJAX task may say, what it refuses, and the operator that its posterior becomes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.backends.blackjax import _check_settings, run
from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.engines.bayes import NumpyroTask
from nnx_jax.engines.blackjax_task import SAMPLERS, BlackjaxTask, as_blackjax_task, named_leaves
from nnx_jax.engines.chains import BlackjaxPredictiveOp, diagnose
from nnx_jax.training_loop import TrainingLoop
from tests.blackjax.toy import dataset, gaussian, logprior, normal_mean, wide


def model(x: Any, y: Any = None) -> None:
    """Never called here."""


def loop(task: Any, **settings: Any) -> TrainingLoop:
    return TrainingLoop(dataset=dataset(), task=task, backend="blackjax", max_steps=4, quiet=True, **settings)


def test_a_task_is_required() -> None:
    """A loss alone, no task, and a task of another kind are told what is needed. (pipekit:K1)"""
    with pytest.raises(ValueError, match="task-first"):
        run(loop(None, loss="mse"), None)
    with pytest.raises(ValueError, match="task-first.*says nothing of priors"):
        as_blackjax_task(None, loss="mse")
    with pytest.raises(TypeError, match="BlackjaxTask"):
        run(loop(object()), None)


@pytest.mark.parametrize(
    "given, told",
    [
        ({}, "needs a source"),
        ({"logdensity_fn": wide, "init_position": 0.0, "numpyro_task": NumpyroTask(model)}, "over-specified"),
        ({"predict_fn": wide, "numpyro_task": NumpyroTask(model)}, "over-specified"),
        ({"logdensity_fn": wide}, "init_position and init_fn: neither"),
        ({"init_position": 0.0}, "needs logdensity_fn or logprior_fn; none is given"),
        ({"logprior_fn": logprior, "init_position": 0.0}, "loglikelihood_fn is missing"),
        ({"loglikelihood_fn": logprior, "init_position": 0.0}, "logprior_fn is missing"),
        ({"logdensity_fn": wide, "init_position": 0.0, "init_fn": wide}, "both are given"),
        ({"logdensity_fn": wide, "grad_estimator": wide, "init_position": 0.0}, "over-specified"),
        ({"logdensity_fn": wide, "init_position": 0.0, "sampler": "sgld"}, "'sgld' needs logprior_fn or grad_est"),
        ({"logdensity_fn": wide, "init_position": 0.0, "sampler": "tempered_smc"}, "'tempered_smc' needs logprior_fn"),
        ({"logprior_fn": wide, "loglikelihood_fn": wide, "init_position": 0.0, "sampler": "tempered_smc"}, "init_fn"),
        ({"logdensity_fn": wide, "init_position": 0.0, "num_chains": 0}, "task.num_chains"),
        ({"logdensity_fn": wide, "init_position": 0.0, "num_warmup": True}, "task.num_warmup"),
        ({"logdensity_fn": wide, "init_position": 0.0, "step_size": 0.0}, "task.step_size"),
        ({"logdensity_fn": wide, "init_position": 0.0, "target_acceptance_rate": 1.0}, "task.target_acceptance_rate"),
    ],
)
def test_refuses_a_source_that_is_none_two_or_half(given: dict[str, Any], told: str) -> None:
    """Exactly one whole source, and one that the sampler can use. (pipekit:K13)"""
    with pytest.raises(ConfigError, match=told):
        BlackjaxTask(**given)


def test_refuses_what_is_no_function_and_no_task() -> None:
    with pytest.raises(TypeError, match="logdensity_fn must be a function, got float"):
        BlackjaxTask(1.0, 0.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="numpyro_task must be a NumpyroTask"):
        BlackjaxTask(numpyro_task=wide)  # type: ignore[arg-type]


def test_an_unknown_sampler_is_told_all_there_are() -> None:
    with pytest.raises(ConfigError, match="no sampler 'nutz'.*did you mean 'nuts'.*sghmc.*tempered_smc"):
        gaussian(sampler="nutz")


def test_a_bare_numpyro_task_is_a_task() -> None:
    """It brings its kernel, warmup, chains and site with it. (pipekit:K21)"""
    bare = NumpyroTask(model, num_warmup=7, num_chains=3, predictive_site="y")
    task = as_blackjax_task(bare)
    assert task == as_blackjax_task(BlackjaxTask(numpyro_task=bare))
    assert (task.sampler, task.num_warmup, task.num_chains, task.predictive_site) == ("nuts", 7, 3, "y")
    own = as_blackjax_task(BlackjaxTask(numpyro_task=bare, num_chains=2, sampler="sgld"))
    assert (own.num_warmup, own.num_chains, own.step_size) == (7, 2, 1e-3)
    assert as_blackjax_task(NumpyroTask(model, kernel="hmc")).sampler == "hmc"


def test_settings_of_a_numpyro_task_without_effect_are_told() -> None:
    """NumPyro's own options, and a number of draws that is not the loop's; a default asks for nothing."""

    def told(**settings: Any) -> list[str]:
        task = as_blackjax_task(NumpyroTask(model, **settings))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            _check_settings(loop(task), task)
        return [str(each.message) for each in seen]

    assert told() == told(num_samples=4) == told(num_samples=1000) == []
    (found,) = told(num_samples=7)
    assert "num_samples, 7; max_steps=4 are the draws" in found
    (found,) = told(kernel_options={"target_accept_prob": 0.9})
    assert "does not use NumpyroTask.kernel_options; give BlackjaxTask(" in found


def test_defaults_depend_on_the_sampler() -> None:
    assert as_blackjax_task(gaussian()).num_warmup == 1000
    assert as_blackjax_task(gaussian(sampler="svgd")).step_size == 0.1
    assert {name for name in SAMPLERS if as_blackjax_task(_any(name)).minibatches} == {"sgld", "sghmc"}


def _any(name: str) -> BlackjaxTask:
    return normal_mean(sampler=name, init_fn=lambda key: jnp.zeros(()))


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"accumulate": 2}, "TrainingLoop.accumulate"),
        ({"sharding": {"data": 2}}, "TrainingLoop.sharding"),
        ({"precision": "bfloat16"}, "TrainingLoop.precision"),
        ({"on_nonfinite": "skip"}, "another chain"),
        ({"resume": "weights_only"}, "chains have no weights"),
    ],
)
def test_refuses_settings_that_no_sampler_follows(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run(loop(gaussian(), **settings), None)


def test_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without BlackJAX the run names the extra. (pipekit:K20)"""
    monkeypatch.setitem(sys.modules, "blackjax", None)
    with pytest.raises(ImportError, match=r"nnx_jax\[blackjax\]"):
        run(loop(gaussian()), None)


@pytest.mark.slow
def test_importing_the_backend_imports_neither_library() -> None:
    """Neither extra pulls the other, and both are looked for at a run alone. (pipekit:K20)"""
    code = "import sys, nnx_jax.backends.blackjax; print([n for n in ('blackjax', 'numpyro') if n in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert told.stdout.strip() == "[]"


# -- the operator --------------------------------------------------------------------------------------------------


DRAWS = {"w": np.arange(5, dtype=np.float32), "b": np.full(5, 10.0, np.float32)}


def line(position: Any, x: Any) -> Any:
    return position["w"] * x + position["b"]


def test_predicts_the_mean_the_draws_and_their_quantiles() -> None:
    op = BlackjaxPredictiveOp(line, DRAWS, "y")
    x = np.array([0.0, 1.0, 2.0], np.float32)
    np.testing.assert_allclose(op(x), [10.0, 12.0, 14.0])  # the mean of w = 0..4 is 2
    assert op.samples(x).shape == (5, 3)
    np.testing.assert_allclose(op.samples(x)[:, 1], [10, 11, 12, 13, 14])
    np.testing.assert_allclose(op.quantiles(x, (0.25, 1.0)), [[10, 11, 12], [10, 14, 18]])


def test_a_posterior_without_a_prediction_says_so() -> None:
    """An operator without predict_fn raises RuntimeError when it is called. (pipekit:K18)"""
    op = BlackjaxPredictiveOp(None, DRAWS)
    with pytest.raises(RuntimeError, match="predict_fn"):
        op(np.zeros(2, np.float32))
    np.testing.assert_array_equal(op.posterior["w"], DRAWS["w"])


def test_draws_are_weights_without_pickle() -> None:
    op = BlackjaxPredictiveOp(line, DRAWS)
    moved = BlackjaxPredictiveOp(line, {**DRAWS, "b": DRAWS["b"] + 1})
    assert op.content_hash() != moved.content_hash()
    back = op.with_weights(moved.serialize_weights())
    assert back.content_hash() == moved.content_hash()
    np.testing.assert_array_equal(back(np.zeros(2, np.float32)), [11.0, 11.0])
    np.testing.assert_array_equal(op(np.zeros(2, np.float32)), [10.0, 10.0])
    with pytest.raises(ModelError):
        op.with_weights(b"no weights at all")


def test_refuses_draws_of_unequal_numbers() -> None:
    for posterior in ({"w": np.zeros(3), "b": np.zeros(4)}, {"w": np.float32(1.0)}, {"w": np.zeros((0, 2))}):
        with pytest.raises(ConfigError, match="share a leading axis"):
            BlackjaxPredictiveOp(line, posterior)
    with pytest.raises(ConfigError, match="give a posterior"):
        BlackjaxPredictiveOp(line)


def test_names_of_arrays() -> None:
    assert named_leaves(1.0) == {"position": 1.0}
    assert named_leaves({"a": {"b": 1, "c": 2}, "d": [3, 4]}) == {"a.b": 1, "a.c": 2, "d.0": 3, "d.1": 4}


def test_diagnostics_see_chains_that_disagree() -> None:
    """Split R-hat of independent draws is near 1, of chains around 0 and 5 far from it. (pipekit:K16)"""
    noise = np.random.default_rng(0).normal(size=(2, 200)).astype(np.float32)
    found = diagnose({"same": noise, "apart": noise + np.array([[0.0], [5.0]], np.float32)})
    assert found["same"]["r_hat"] < 1.02 < 1.5 < found["apart"]["r_hat"]
    assert found["apart"]["ess"] < 10 < 200 < found["same"]["ess"]
    assert found["same"]["mcse"] == pytest.approx(noise.std() / 400**0.5, rel=0.3)
    assert "r_hat" not in diagnose({"few": noise[:, :3]})["few"]
