"""Sampling under a TrainingLoop: commits, resume bit for bit, early stops, and broken chains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.backends.base import Trained
from nnx_jax.backends.blackjax import run
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.core.errors import ConfigError, NonFiniteError
from nnx_jax.engines.blackjax_task import BlackjaxTask
from nnx_jax.engines.chains import BlackjaxPredictiveOp
from nnx_jax.training_loop import TrainingLoop
from tests.blackjax.toy import dataset, draw, engine_of, gaussian, normal_mean, positions, wide

HMC = {"sampler": "hmc", "num_warmup": 60, "num_chains": 2, "num_integration_steps": 3}


def loop(task: Any, count: int, **settings: Any) -> TrainingLoop:
    return TrainingLoop(dataset=dataset(), task=task, backend="blackjax", max_steps=count, quiet=True, **settings)


def draws(trained: Trained) -> np.ndarray:
    """[chains * draws, ...], a chain after the other."""
    return next(iter(trained.operator.arrays().values()))


@pytest.fixture(scope="module")
def whole() -> np.ndarray:
    """Draws [2, 30, 2] of the chains that every test here cuts somewhere."""
    engine = engine_of(gaussian(**HMC))
    return positions(engine, draw(engine, 30))


class StepWatch:
    """A callback that keeps what it is told, and does something at one draw."""

    def __init__(self, at: int | None = None, act: Any = None) -> None:
        self.at, self.act, self.seen = at, act, []

    def on_step_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.seen.append((state.step, metrics))
        if state.step == self.at:
            self.act(state)


def fail(state: Any) -> None:
    raise OSError("pulled the plug")


def test_the_loop_draws_what_the_engine_draws(whole: np.ndarray) -> None:
    """A callback of every draw changes none of them, and sees each one's diagnostics. (pipekit:K17)"""
    watch = StepWatch()
    trained = run(loop(gaussian(**HMC), 30, callbacks=(watch,)), None)
    np.testing.assert_array_equal(draws(trained).reshape(whole.shape), whole)
    assert [step for step, _ in watch.seen] == list(range(1, 31))
    for _, metrics in watch.seen:
        assert set(metrics) == {"loss", "acceptance_rate", "is_divergent"}
        assert 0 <= metrics["acceptance_rate"] <= 1
    info = trained.info
    assert (info["final_step"], info["num_draws"], info["num_chains"], info["sampler"]) == (30, 30, 2, "hmc")
    assert set(info["sites"]["m"]) == {"mean", "sd", "r_hat", "ess", "mcse"}
    assert (info["r_hat"]["m"], info["ess"]["m"]) == (info["sites"]["m"]["r_hat"], info["sites"]["m"]["ess"])
    assert trained.state.step == 30


def test_an_early_stop_keeps_the_draws_so_far(whole: np.ndarray) -> None:
    """A callback that asks to stop at draw 12 leaves 12 draws, the first 12 of the chain. (pipekit:K17)"""
    watch = StepWatch(12, lambda state: state.request_stop("enough"))
    trained = run(loop(gaussian(**HMC), 30, callbacks=(watch,)), None)
    np.testing.assert_array_equal(draws(trained).reshape(2, 12, 2), whole[:, :12])
    assert (trained.info["num_draws"], trained.info["stop_reason"]) == (12, "enough")


def test_continues_from_its_directory(whole: np.ndarray, tmp_path: Path) -> None:
    """Twelve draws are committed; the same loop with a longer plan draws the other 18, bit for bit. (pipekit:K10)"""
    where = {"checkpoint_dir": tmp_path / "runs"}
    first = run(loop(gaussian(**HMC), 12, **where), None)
    np.testing.assert_array_equal(draws(first).reshape(2, 12, 2), whole[:, :12])
    watch = StepWatch()
    second = run(loop(gaussian(**HMC), 30, callbacks=(watch,), **where), None)
    np.testing.assert_array_equal(draws(second).reshape(whole.shape), whole)
    assert [step for step, _ in watch.seen] == list(range(13, 31))
    nothing_left = run(loop(gaussian(**HMC), 30, **where), None)
    np.testing.assert_array_equal(draws(nothing_left).reshape(whole.shape), whole)


def test_continues_after_a_crash(whole: np.ndarray, tmp_path: Path) -> None:
    """A run that dies at draw 17 with a commit every 10 goes on from draw 10, bit for bit. (pipekit:K10)"""
    where = {"checkpoint_dir": tmp_path / "runs", "checkpoint_every_n_steps": 10}
    with pytest.raises(OSError, match="pulled the plug"):
        run(loop(gaussian(**HMC), 30, callbacks=(StepWatch(17, fail),), **where), None)
    watch = StepWatch()
    again = run(loop(gaussian(**HMC), 30, callbacks=(watch,), **where), None)
    assert watch.seen[0][0] == 11
    np.testing.assert_array_equal(draws(again).reshape(whole.shape), whole)


def test_continues_from_a_state(whole: np.ndarray) -> None:
    """A state in memory, through its JSON form, is gone on from like a stored one. (pipekit:K10)"""
    task = gaussian(**HMC)
    first = run(loop(task, 12), None)
    state = TrainerCarryState.from_dict(first.state.to_dict(), model=first.operator)
    second = run(loop(task, 30), state)
    np.testing.assert_array_equal(draws(second).reshape(whole.shape), whole)


@pytest.mark.slow
def test_minibatches_go_on_where_they_stood(tmp_path: Path) -> None:
    """Draw 23 of SGLD sees the batch it would have seen, in the middle of a pass over the rows. (pipekit:K10)"""
    task = normal_mean(sampler="sgld", num_warmup=5, step_size=1e-3)
    unbroken = run(loop(task, 40, batch_size=24), None)
    where = {"checkpoint_dir": tmp_path / "runs", "batch_size": 24}
    run(loop(task, 23, **where), None)
    resumed = run(loop(task, 40, **where), None)
    np.testing.assert_array_equal(draws(resumed), draws(unbroken))


def test_refuses_the_chains_of_another_target(tmp_path: Path) -> None:
    """Another density, start or setting of the sampler is another task, also where no draw is left to make."""
    where = {"checkpoint_dir": tmp_path / "runs"}
    first = run(loop(gaussian(**HMC), 3, **where), None)
    narrow = BlackjaxTask(lambda position: 2 * wide(position), {"m": jnp.zeros(2)}, **HMC)
    for task, count in ((gaussian(**{**HMC, "target_acceptance_rate": 0.7}), 6), (narrow, 3)):
        with pytest.raises(ConfigError, match=r"another loop: task.*another checkpoint_dir"):
            run(loop(task, count, **where), None)
    again = run(loop(gaussian(**HMC), 3, **where), None)
    assert np.array_equal(draws(again), draws(first))
    assert again.info["final_metrics"] == first.info["final_metrics"]
    assert set(again.info["final_metrics"]) >= {"acceptance_rate"}


def test_a_broken_chain_is_an_error_or_an_end() -> None:
    """`on_nonfinite="raise"` raises; "stop" keeps the draws before it."""
    task = normal_mean(sampler="sgld", num_warmup=0, step_size=10.0)
    with pytest.raises(NonFiniteError, match="of sgld is not finite"):
        run(loop(task, 100), None)
    stopped = run(loop(task, 100, on_nonfinite="stop"), None)
    assert stopped.info["stop_reason"] == "nonfinite"
    assert np.isfinite(draws(stopped)).all()
    assert 0 < stopped.info["num_draws"] == len(draws(stopped)) < 100


def test_a_model_is_taken_and_ignored(whole: np.ndarray) -> None:
    """A placeholder operator changes no draw; every other test here leaves it out. (pipekit:K2)"""
    placeholder = BlackjaxPredictiveOp(None, {"w": np.zeros(1)})
    trained = run(loop(gaussian(**HMC), 2, model_op=placeholder), None)
    np.testing.assert_array_equal(draws(trained).reshape(2, 2, 2), whole[:, :2])


def test_warns_of_settings_that_say_nothing_to_a_sampler() -> None:
    told = "'hmc' does not use optimizer_config, batch_size"
    with pytest.warns(UserWarning, match=told):
        run(loop(gaussian(**HMC), 2, optimizer_config={"name": "adam", "lr": 0.1}, batch_size=8), None)


@pytest.mark.slow
def test_an_unfinished_temperature_is_told() -> None:
    import jax

    task = normal_mean(sampler="tempered_smc", num_particles=8, init_fn=lambda key: 10 * jax.random.normal(key))
    with pytest.warns(UserWarning, match="temperature.*raise max_steps"):
        trained = run(loop(task, 1), None)
    assert 0 < trained.info["tempering_param"] < 1
    assert draws(trained).shape == (8,)
