"""Variational inference under the one loop: the numbers are NumPyro's, the step is compiled, minibatches count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.numpyro_svi import SVIFramework, batch_rows, recipe_of
from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.engines.bayes import NumpyroTask
from nnx_jax.engines.numpyro_svi import SVIEngine, Variational, VariationalPure, elbo_loss
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.engines.predictive import NumpyroPredictiveOp, SiteError
from nnx_jax.hooks import EMAHook
from nnx_jax.step import rng
from nnx_jax.training_loop import TrainerConfig, TrainingLoop
from tests.numpyro.posteriors import DATA, ROWS, TRUE, X, Y, exact_line, fit, known_line, line, loop_of, unscaled


class Seen:
    """Everything a loop tells its callbacks."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.steps: list[dict[str, float]] = []
        self.epochs: list[int] = []
        self.evals: list[dict[str, float]] = []

    def on_train_begin(self, loop: Any, state: Any) -> None:
        self.begun.append(state.step)

    def on_step_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def on_epoch_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.epochs.append(state.epoch)

    def on_eval_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.evals.append(metrics)


def params_of(operator: Any) -> dict[str, float]:
    """Values of the guide's parameters, positive ones as they are used."""
    found = {name: float(value) for name, value in operator.guide_arrays().items()}
    return {name: float(np.log1p(np.exp(v))) if name.endswith("scale") else v for name, v in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"batch_size": 16}], ids=["all rows", "batches of 16"])
def test_regression_is_recovered(fields: dict[str, Any]) -> None:
    """3000 Adam steps of 1e-2: the mean predicts the line, as measured: 2e-4 (pipekit:K4) (pipekit:K8)."""
    trained = fit(loop_of(NumpyroTask(line), max_steps=3000, **fields))
    assert float(np.mean((np.asarray(trained.operator(X)) - TRUE) ** 2)) < 1e-3
    assert trained.info["final_step"] == trained.state.step == 3000
    assert set(trained.info["sites"]) == {"w", "b", "sigma"}
    found = params_of(trained.operator)
    assert found["w_auto_loc"] == pytest.approx(2.009, abs=0.03)
    assert found["b_auto_loc"] == pytest.approx(1.003, abs=0.02)
    assert np.exp(found["sigma_auto_loc"]) == pytest.approx(0.05, abs=0.01)
    assert found["w_auto_scale"] == pytest.approx(exact_line(X, Y).sd[0], rel=0.3)


def test_minibatches_are_as_wide_as_all_rows() -> None:
    """Scales from batches of 16 of 64 like the exact posterior's; unscaled they would be twice that (pipekit:K8)."""
    rate = {"name": "cosine", "init_value": 5e-2, "decay_steps": 1500}
    plan = {"name": "adam", "lr": rate, "b2": 0.95}
    task = NumpyroTask(known_line, loss=Trace_ELBO(num_particles=4))
    trained = fit(loop_of(task, max_steps=1500, batch_size=16, optimizer_config=plan))
    found, exact = params_of(trained.operator), exact_line(X, Y)
    for index, name in enumerate(("w", "b")):
        assert found[f"{name}_auto_loc"] == pytest.approx(exact.mean[index], abs=0.5 * exact.sd[index])
        assert found[f"{name}_auto_scale"] == pytest.approx(exact.sd[index], rel=0.2)


def test_rows_of_a_batch_are_what_the_loop_says() -> None:
    """All rows by default; a number stays that number in a copy, in a file and in a TrainerConfig, also 32."""
    task = NumpyroTask(known_line)
    for plain in (loop_of(task), loop_of(task).replace(seed=1)):
        assert (plain.batch_size, batch_rows(plain)) == (None, ROWS)
    some = loop_of(task, batch_size=32)
    assert batch_rows(some) == batch_rows(some.replace(seed=1)) == some.state()["batch_size"] == 32
    assert some.identity() != loop_of(task).identity()
    fields: dict[str, Any] = {"dataset": DATA, "task": task, "backend": "numpyro-svi"}
    assert batch_rows(TrainingLoop(config=TrainerConfig(max_steps=3), **fields)) == ROWS
    assert batch_rows(TrainingLoop(config=TrainerConfig(max_steps=3, batch_size=32).replace(seed=1), **fields)) == 32
    assert batch_rows(loop_of(task, batch_size=1000)) == ROWS


def test_the_default_optimizer_is_adam_without_decay() -> None:
    """Decay would be a prior on the guide's parameters: three updates from the same start, bit for bit."""
    task = NumpyroTask(known_line)
    plain = fit(loop_of(task, max_steps=3, optimizer_config=None)).operator
    adam = fit(loop_of(task, max_steps=3, optimizer_config={"name": "adam", "lr": 3e-4})).operator
    for name, value in plain.guide_arrays().items():
        np.testing.assert_array_equal(value, adam.guide_arrays()[name])


def test_one_compile_for_100_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program, compiled once; Python runs the model for a handful of traces and no step (pipekit:K9)."""
    made: list[SVIEngine] = []
    calls = [0, 0]

    class Kept(SVIEngine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)
            calls[1] = calls[0]

    def model(x: Any, y: Any = None) -> None:
        calls[0] += 1
        known_line(x, y)

    monkeypatch.setattr(SVIFramework, "engine_class", Kept)
    fit(loop_of(NumpyroTask(model), max_steps=100))
    assert list(made[0].programs.watch.compiles.values()) == [1]
    assert 1 <= calls[0] - calls[1] < 10


def test_loss_is_numpyros_own_at_the_same_key() -> None:
    """One evaluation of `Trace_ELBO.loss` and of the engine's forward, bit for bit."""
    module = Variational(NumpyroTask(line), (X, Y), seed=3)
    guide = AutoNormal(line)
    svi = SVI(line, guide, numpyro.optim.SGD(0.0), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(3), X, Y))
    wanted = jax.jit(lambda key: Trace_ELBO().loss(key, params, line, guide, X, Y))(jax.random.key(7))
    pure = VariationalPure(module)
    batch = {"x": jnp.asarray(X), "y": jnp.asarray(Y), "mask": jnp.ones(ROWS)}
    got = jax.jit(lambda key: pure.forward(pure.params, {}, batch, key, True)[0])(jax.random.key(7))
    assert float(got) == float(wanted)


def test_training_is_the_loop_one_would_write() -> None:
    """20 Adam steps by optax on NumPyro's loss, at the keys of the run: `stream_key(run_key(seed), DROPOUT, step)`."""
    task, seed, steps = NumpyroTask(line), 5, 20
    guide = AutoNormal(line)
    svi = SVI(line, guide, numpyro.optim.SGD(0.0), Trace_ELBO())
    params = svi.optim.get_params(svi.init(jax.random.key(seed), X, Y).optim_state)
    adam = optax.adam(1e-2)
    state = adam.init(params)

    @jax.jit
    def step(params: Any, state: Any, index: Any) -> Any:
        key = rng.stream_key(jnp.asarray(rng.run_key(seed)), rng.DROPOUT, index)
        loss = lambda p: Trace_ELBO().loss(key, svi.constrain_fn(p), line, guide, X, Y)  # noqa: E731
        updates, new = adam.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), new

    for index in range(steps):
        params, state = step(params, state, jnp.int32(index))
    got = fit(loop_of(task, max_steps=steps, seed=seed)).operator.guide_arrays()
    assert set(got) == set(params)
    for name, value in params.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-6, atol=1e-7)


def test_records_and_events() -> None:
    """3 steps and 3 epochs, each with elbo = -loss; validation has val_elbo (pipekit:K3) (pipekit:D13.2)."""
    seen = Seen()
    fit(loop_of(NumpyroTask(line), max_steps=3, steps_per_epoch=1, val_dataset=DATA, callbacks=[seen]))
    assert (seen.begun, len(seen.steps), seen.epochs) == ([0], 3, [1, 2, 3])
    for metrics in seen.steps:
        assert metrics["elbo"] == -metrics["loss"]
    assert seen.evals
    assert seen.evals[-1]["val_elbo"] == -seen.evals[-1]["val_loss"]


def test_an_update_counts_every_microbatch_once() -> None:
    """loss = -elbo, with the denominator 1: a window divides its sum by its microbatches."""
    (term,) = elbo_loss()(jnp.float32(-3.0), {})
    assert (term.name, float(term.numerator), float(term.denominator), term.weight) == ("elbo", 3.0, 1.0, -1.0)


@pytest.mark.slow
def test_windows_average_unbiased_estimates() -> None:
    """Two microbatches of an update count as the mean of their losses, not as their sum."""
    one, two = Seen(), Seen()
    task = NumpyroTask(known_line)
    fit(loop_of(task, max_steps=2, batch_size=16, optimizer_config={"name": "sgd", "lr": 1e-12}, callbacks=[one]))
    plan = {"name": "sgd", "lr": 1e-12}
    fit(loop_of(task, max_steps=1, batch_size=16, accumulate=2, optimizer_config=plan, callbacks=[two]))
    assert two.steps[0]["loss"] == pytest.approx(np.mean([each["loss"] for each in one.steps]), rel=1e-5)


def test_minibatches_without_a_subsampled_plate_are_refused() -> None:
    """Before anything is trained, with the line to write (pipekit:K8)."""
    with pytest.raises(DataError, match=r"subsample_size=x\.shape\[0\].*or give batch_size=64"):
        fit(loop_of(NumpyroTask(unscaled), batch_size=16))
    assert batch_rows(loop_of(NumpyroTask(unscaled))) == ROWS  # all rows are one batch where nothing is said
    Variational(NumpyroTask(unscaled), (X, Y))


def test_values_of_single_rows_need_an_amortised_guide() -> None:
    """Which of all rows a batch holds, a guide with a parameter for each row cannot know."""

    def local(x: Any, y: Any = None) -> None:
        with numpyro.plate("rows", ROWS, subsample_size=x.shape[0]):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("obs", dist.Normal(z, 1.0), obs=y)

    with pytest.raises(ModelError, match="amortised guide"):
        Variational(NumpyroTask(local), (X[:16], Y[:16]), rows=ROWS)
    with pytest.raises(ModelError, match="amortised guide"):
        Variational(NumpyroTask(local, guide=AutoMultivariateNormal), (X[:16], Y[:16]), rows=ROWS)
    assert Variational(NumpyroTask(local), (X, Y)).params["z_auto_loc"].shape == (ROWS,)

    def amortised(x: Any, y: Any = None) -> None:
        slope = numpyro.param("slope", 1.0)
        with numpyro.plate("rows", ROWS, subsample_size=x.shape[0]):
            numpyro.sample("z", dist.Normal(slope * x, 1.0))

    made = Variational(NumpyroTask(local, guide=amortised), (X[:16], Y[:16]), rows=ROWS)
    assert made.operator()(X[:5]).shape == (5,)


def test_resume_continues_bit_for_bit(tmp_path: Path) -> None:
    """From a directory, as without a break (pipekit:K10)."""
    whole = fit(loop_of(NumpyroTask(line), max_steps=9, batch_size=16))
    for steps in (4, 9):
        again = fit(loop_of(NumpyroTask(line), max_steps=steps, batch_size=16, checkpoint_dir=str(tmp_path)))
    assert again.state.step == 9
    for name, value in whole.operator.guide_arrays().items():
        np.testing.assert_array_equal(again.operator.guide_arrays()[name], value)


@pytest.mark.slow
def test_a_state_continues_bit_for_bit() -> None:
    """A state in memory that went through JSON, as without a break (pipekit:K10)."""
    make = lambda steps: loop_of(NumpyroTask(line), max_steps=steps, batch_size=16)  # noqa: E731
    whole, half = fit(make(9)), fit(make(4))
    state = TrainerCarryState.from_dict(half.state.to_dict(), model=NumpyroPredictiveOp(NumpyroTask(line)))
    carried = fit(make(9), state)
    assert carried.state.step == 9
    for name, value in whole.operator.guide_arrays().items():
        np.testing.assert_array_equal(carried.operator.guide_arrays()[name], value)


def test_an_operator_to_begin_with_is_not_needed() -> None:
    """It may be left out; a placeholder changes nothing; a guide fitted before is gone on from (pipekit:K2)."""
    task = NumpyroTask(known_line)
    take = recipe_of(loop_of(task), task).take
    fresh, beside = take(None, {}), take(NNXModelOp(nnx.Linear(1, 1, rngs=nnx.Rngs(0))), {})
    assert all(np.array_equal(beside.params[name], value) for name, value in fresh.params.items())
    fitted = {name: value + 1.0 for name, value in fresh.params.items()}
    fresh.put(fitted)
    again = take(fresh.operator(), {})
    assert all(np.array_equal(again.params[name], value) for name, value in fitted.items())


@pytest.mark.slow
def test_devices_hooks_and_single_operations_change_no_number() -> None:
    """Rows over two devices, a hook that averages, and operations one by one: the update of the plain run."""
    make = lambda **fields: fit(loop_of(NumpyroTask(line), max_steps=5, batch_size=16, **fields)).operator  # noqa: E731
    plain = make().guide_arrays()
    for fields in ({"sharding": {"data": 2}}, {"hooks": (EMAHook(decay=0.9),)}, {"debug": True}):
        for name, value in make(**fields).guide_arrays().items():
            np.testing.assert_allclose(value, plain[name], rtol=1e-5, err_msg=f"{name} with {fields}")


@pytest.mark.slow
def test_float64() -> None:
    """Parameters, draws and predictions of both backends, in a process of its own."""
    code = """
import numpy as np
from nnx_jax.training_loop import TrainerConfig, TrainingLoop
from tests.numpyro.posteriors import *
from nnx_jax.engines.bayes import NumpyroTask
task = NumpyroTask(line, num_warmup=20, num_samples=20)
data = ArrayDataset(X.astype(np.float64), Y.astype(np.float64))
for backend, steps in (("numpyro-svi", 5), ("numpyro-mcmc", 20)):
    op = fit(loop_of(task, backend, steps, precision="float64", dataset=data)).operator
    print(*sorted({str(value.dtype) for value in op.arrays().values()}), op(X.astype(np.float64)).dtype)
"""
    wide = {**os.environ, "JAX_ENABLE_X64": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=wide)
    assert done.stdout.splitlines() == ["float64 float64"] * 2, done.stderr


def test_a_task_is_needed() -> None:
    """Task first, and of the one class (pipekit:K1) (pipekit:D13.4)."""
    for backend in ("numpyro-svi", "numpyro-mcmc"):
        with pytest.raises(ValueError, match="task-first"):
            fit(loop_of(None, backend, loss="mse"))
        with pytest.raises(TypeError, match="NumpyroTask"):
            fit(loop_of(object(), backend))


def test_what_does_not_apply_is_refused() -> None:
    with pytest.raises(ConfigError, match="the objective is the task's"):
        fit(loop_of(NumpyroTask(line), loss="mse"))
    with pytest.raises(ConfigError, match="needs float32 or float64"):
        fit(loop_of(NumpyroTask(line), precision="bfloat16"))
    with pytest.raises(SiteError, match="its sites are: b, obs, sigma, w"):
        fit(loop_of(NumpyroTask(line, predictive_site="height")))


def test_two_loops_with_one_guide_share_nothing() -> None:
    """An AutoGuide of the task is set up anew for every loop, and stays as the caller made it."""
    guide = AutoNormal(line)
    task = NumpyroTask(line, guide=guide)
    first, second = (Variational(task, (X, Y)).params for _ in range(2))
    assert guide.prototype_trace is None
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_parameters_of_trees_and_mutable_values() -> None:
    """Leaves of a `numpyro.param` that is a tree have names of their own; mutable sites are carried on."""

    def model(x: Any, y: Any = None) -> None:
        net = numpyro.param("net", {"kernel": jnp.ones(()), "bias": jnp.zeros(())})
        count = numpyro.primitives.mutable("count", {"rows": jnp.float32(0.0)})
        count["rows"] = count["rows"] + x.shape[0]
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("obs", dist.Normal(net["kernel"] * x + net["bias"] + b, 0.5), obs=y)

    trained = fit(loop_of(NumpyroTask(model), max_steps=3))
    found = trained.operator.guide_arrays()
    assert {"net.kernel", "net.bias", "b_auto_loc", "b_auto_scale", "count.rows"} == set(found)
    assert found["net.kernel"] != 1.0
    assert trained.operator(X).shape == (ROWS,)


@pytest.mark.slow
@pytest.mark.parametrize("shift, guide", [(0.0, None), (1.0, AutoMultivariateNormal)], ids=["mean-field", "full"])
def test_exact_posterior(shift: float, guide: Any) -> None:
    """The normal posterior of a line with known noise: means to a tenth of their sd, sds to 10 percent.

    Around x = 0 its two sites are independent, so a mean-field guide holds it; elsewhere they are not, and a full one
    does.
    """
    x = X + np.float32(shift)
    exact = exact_line(x, Y)
    rate = {"name": "cosine", "init_value": 1e-2, "decay_steps": 6000}
    loss = Trace_ELBO(num_particles=8)
    task = NumpyroTask(known_line, guide=guide, loss=loss, predictive_samples=4000)
    plan = {"name": "adam", "lr": rate, "b2": 0.99}  # which forgets how steep it was far from the posterior
    trained = fit(loop_of(task, max_steps=6000, dataset=ArrayDataset(x, Y), optimizer_config=plan))
    at = np.array([0.0, 1.0], np.float32)
    design = np.stack([at, np.ones_like(at)], axis=1).astype(np.float64)
    mean = design @ exact.mean
    spread = np.sqrt(np.einsum("ij,jk,ik->i", design, exact.cov, design) + 0.05**2)
    drawn = np.asarray(trained.operator.samples(at))
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=0.1 * spread.max())
    np.testing.assert_allclose(drawn.std(axis=0), spread, rtol=0.1)
    if guide is None:
        found = params_of(trained.operator)
        for index, name in enumerate(("w", "b")):
            assert found[f"{name}_auto_loc"] == pytest.approx(exact.mean[index], abs=0.1 * exact.sd[index])
            assert found[f"{name}_auto_scale"] == pytest.approx(exact.sd[index], rel=0.1)
