"""A NumPyro model as a log density over unconstrained values, and the rows it counts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.engines.bayes import ModelBridge, NumpyroTask, check_scales, model_args, predictive_args
from tests.numpyro.posteriors import ROWS, X, Y, exact_line, known_line, line, unscaled


@pytest.fixture(scope="module")
def bridge() -> ModelBridge:
    return ModelBridge(NumpyroTask(line), (X, Y))


def normal(value: Any, mean: Any, sd: float) -> np.ndarray:
    return -0.5 * ((np.asarray(value, np.float64) - mean) / sd) ** 2 - np.log(sd * np.sqrt(2 * np.pi))


def by_hand(w: float, b: float, log_sigma: float, x: np.ndarray, y: np.ndarray, scale: float) -> float:
    """Priors, likelihood, and log |d sigma / d log sigma| = log sigma, written out in float64."""
    sigma = np.exp(log_sigma)
    half_normal = normal(sigma, 0.0, 1.0) + np.log(2.0)
    rows = normal(y, w * x.astype(np.float64) + b, sigma).sum()
    return float(normal(w, 0.0, 10.0) + normal(b, 0.0, 10.0) + half_normal + log_sigma + scale * rows)


def test_density_is_the_joint_density_with_the_jacobian(bridge: ModelBridge) -> None:
    """The NumPyro model's log density by hand, over unconstrained values (pipekit:D14.4)."""
    position = {"w": 0.5, "b": -0.25, "sigma": -1.5}
    got = float(bridge.logdensity({name: jnp.float32(value) for name, value in position.items()}))
    assert got == pytest.approx(by_hand(0.5, -0.25, -1.5, X, Y, 1.0), rel=1e-5)


def test_a_batch_is_scaled_to_all_rows(bridge: ModelBridge) -> None:
    """A batch of 16 counts four times; the mean over all such batches is the density of all rows (pipekit:K8)."""
    position = {"w": jnp.float32(0.5), "b": jnp.float32(-0.25), "sigma": jnp.float32(-1.5)}
    parts = [(jnp.asarray(X[i : i + 16]), jnp.asarray(Y[i : i + 16])) for i in range(0, ROWS, 16)]
    bridge.check_batches(16)
    found = [float(bridge.logdensity(position, part)) for part in parts]
    assert found[1] == pytest.approx(by_hand(0.5, -0.25, -1.5, X[16:32], Y[16:32], 4.0), rel=1e-5)
    assert np.mean(found) == pytest.approx(float(bridge.logdensity(position)), rel=1e-5)


def test_rows_of_a_subsampled_plate_are_those_of_the_batch() -> None:
    """A model that indexes its rows with the plate's own index gets the batch's rows, not drawn ones."""

    def indexed(x: Any, y: Any = None) -> None:
        w = numpyro.sample("w", dist.Normal(0.0, 10.0))
        with numpyro.plate("rows", ROWS, subsample_size=x.shape[0]) as places:
            numpyro.sample("obs", dist.Normal(w * x[places], 1.0), obs=None if y is None else y[places])

    made, batch = ModelBridge(NumpyroTask(indexed), (X, Y)), (jnp.asarray(X[32:48]), jnp.asarray(Y[32:48]))
    wanted = normal(0.5, 0.0, 10.0) + 4.0 * normal(Y[32:48], 0.5 * X[32:48].astype(np.float64), 1.0).sum()
    assert float(made.logdensity({"w": jnp.float32(0.5)}, batch)) == pytest.approx(float(wanted), rel=1e-5)


def test_constrain_and_unconstrain_are_inverse(bridge: ModelBridge) -> None:
    """Unconstrained draws are mapped back: every sigma is above 0 (pipekit:K14)."""
    draws = jax.random.normal(jax.random.key(0), (2, 50)) * 3.0
    values = bridge.constrain({"w": draws, "b": draws, "sigma": draws}, batch_ndims=2)
    assert values["sigma"].shape == (2, 50)
    assert (np.asarray(values["sigma"]) > 0).all()
    np.testing.assert_allclose(values["sigma"], np.exp(draws), rtol=1e-6)
    one = {"w": jnp.float32(2.0), "b": jnp.float32(1.0), "sigma": jnp.float32(0.05)}
    back = bridge.constrain(bridge.unconstrain(one))
    for name, value in one.items():
        assert float(back[name]) == pytest.approx(float(value), rel=1e-6)


def test_starting_points_are_finite_and_one_for_each_chain(bridge: ModelBridge) -> None:
    assert set(bridge.initial(jax.random.key(1))) == {"w", "b", "sigma"} == set(bridge.names)
    made = ModelBridge(NumpyroTask(lambda: numpyro.sample("a", dist.HalfNormal(1.0))))
    many = made.initial(jax.random.key(1), 3)
    assert many["a"].shape == (3,)
    assert len(set(np.asarray(many["a"]).tolist())) == 3
    assert np.isfinite(jax.vmap(made.logdensity)(many)).all()


def test_gradient_is_zero_at_the_exact_mode() -> None:
    """The mode of a normal posterior is its mean, in closed form."""
    made, exact = ModelBridge(NumpyroTask(known_line), (X, Y)), exact_line(X, Y)
    place = {"w": jnp.float32(exact.mean[0]), "b": jnp.float32(exact.mean[1])}
    slope = jax.jit(jax.grad(made.logdensity))(place)
    curve = jax.jit(jax.hessian(made.logdensity))(place)
    for index, name in enumerate(("w", "b")):
        assert abs(float(slope[name])) * exact.sd[index] < 1e-3
        precision = np.linalg.inv(exact.cov)[index, index]
        assert float(-curve[name][name]) == pytest.approx(precision, rel=1e-4)


def test_a_model_without_rows() -> None:
    made = ModelBridge(NumpyroTask(lambda: numpyro.sample("a", dist.Normal(3.0, 1.0))))
    assert float(made.logdensity({"a": jnp.float32(3.0)})) == pytest.approx(-0.5 * np.log(2 * np.pi), rel=1e-6)


def test_batches_without_a_subsampled_plate_are_refused() -> None:
    """The error says what to write (pipekit:K8)."""
    made = ModelBridge(NumpyroTask(unscaled), (X, Y))
    with pytest.raises(DataError, match=r'numpyro\.plate\("rows", 64, subsample_size=x\.shape\[0\]\)'):
        made.check_batches(16)
    with pytest.raises(DataError, match="cannot be cut"):
        made.check_batches(65)


def test_a_plate_of_another_size_is_refused() -> None:
    """A plate that says 64 rows, with a dataset of 16: each would count four times."""
    with pytest.raises(DataError, match="counts each of them 4 times"):
        ModelBridge(NumpyroTask(line), (X[:16], Y[:16]))


def test_a_factor_over_rows_is_found() -> None:
    """A log density that is added by hand depends on the rows as well, and is seen."""

    def factored(x: Any, y: Any = None) -> None:
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.factor("rows", -0.5 * jnp.sum((y - w * x) ** 2))

    check_scales(factored, (X, Y), ROWS)
    with pytest.raises(DataError, match="site 'rows' is scaled by 1"):
        check_scales(factored, (X[:16], Y[:16]), ROWS)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError, match="no latent site"):
        ModelBridge(NumpyroTask(lambda: numpyro.sample("a", dist.Normal(), obs=1.0)))
    with pytest.raises(ModelError, match="no position of finite density"):
        ModelBridge(NumpyroTask(lambda: numpyro.factor("never", numpyro.sample("a", dist.Normal()) * -jnp.inf)))


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"model": None}, TypeError),
        ({"guide": 3}, TypeError),
        ({"loss": "elbo"}, TypeError),
        ({"predictive_samples": 0}, ConfigError),
        ({"num_samples": 0}, ConfigError),
        ({"num_chains": True}, ConfigError),
        ({"num_warmup": -1}, ConfigError),
        ({"kernel": "gibbs"}, ConfigError),
    ],
)
def test_wrong_fields_of_a_task(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(fields))):
        NumpyroTask(**{"model": line, **fields})


def test_state_of_a_task_is_plain_and_without_defaults() -> None:
    task = NumpyroTask(line, num_chains=2, kernel_options={"target_accept_prob": 0.9})
    assert task.state() == {"model": "line", "num_chains": 2, "kernel_options": {"target_accept_prob": 0.9}}


def test_what_a_model_is_called_with() -> None:
    x, y = np.zeros((3, 2)), np.zeros(3)
    assert len(model_args({"y": y, "x": x, "mask": y})) == 2
    assert model_args({"x": x})[0] is x
    with pytest.raises(DataError, match="weight"):
        model_args({"x": x, "y": y, "weight": y})
    with pytest.raises(DataError, match="called with x"):
        model_args({"y": y})
    assert predictive_args(line, x) == (x,)
    assert predictive_args(lambda x, y: None, x) == (x, None)
