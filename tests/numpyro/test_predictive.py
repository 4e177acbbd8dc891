"""Posteriors as operators: mean, draws and quantiles of a site, and weights without pickle."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from safetensors.numpy import load

from nnx_jax.core.errors import ModelError
from nnx_jax.engines.bayes import NumpyroTask
from nnx_jax.engines.numpyro_svi import Variational
from nnx_jax.engines.predictive import NumpyroPredictiveOp, SiteError
from tests.numpyro.posteriors import X, Y, known_line, line

COUNT = 500


@pytest.fixture(scope="module")
def op() -> NumpyroPredictiveOp:
    """A posterior of draws that were made up: w = 2 +- .1, b = 1."""
    w = 2.0 + 0.1 * np.random.default_rng(0).normal(size=COUNT)
    made = NumpyroPredictiveOp(NumpyroTask(known_line))
    return made.with_samples({"w": w.astype(np.float32), "b": np.ones(COUNT, np.float32)})


@pytest.fixture(scope="module")
def of_guide() -> NumpyroPredictiveOp:
    return Variational(NumpyroTask(line, predictive_samples=50), (X, Y)).operator()


def test_mean_of_the_site(op: NumpyroPredictiveOp) -> None:
    """The mean over draws of w x + b, to 4 standard errors; for any number of rows (pipekit:K7) (pipekit:D13.5)."""
    at = np.linspace(-1.0, 1.0, 100, dtype=np.float32)  # more rows than the model's plate was made for
    sd = np.sqrt((0.1 * at) ** 2 + 0.05**2)
    assert (np.abs(np.asarray(op(at)) - (2.0 * at + 1.0)) < 4.5 * sd / np.sqrt(COUNT)).all()
    assert op(at[:1]).shape == (1,)


def test_equal_seeds_equal_answers(op: NumpyroPredictiveOp) -> None:
    """The seed decides the draws (pipekit:K7)."""
    np.testing.assert_array_equal(op(X, seed=3), op(X, seed=3))
    assert not np.array_equal(op(X, seed=3), op(X, seed=4))
    np.testing.assert_array_equal(op(X), op(X, seed=0))
    other = NumpyroPredictiveOp(op.module, seed=3).with_arrays(op.arrays())
    np.testing.assert_array_equal(other(X), op(X, seed=3))


def test_draws_and_quantiles(op: NumpyroPredictiveOp) -> None:
    """Every draw, and quantiles of them (pipekit:K7)."""
    drawn = op(X, return_samples=True)
    assert drawn.shape == (COUNT, len(X))
    np.testing.assert_allclose(op(X), np.mean(drawn, axis=0), rtol=1e-5, atol=1e-6)
    found = op.quantiles(X, (0.25, 0.5))
    np.testing.assert_allclose(found, np.quantile(np.asarray(drawn), (0.25, 0.5), axis=0), rtol=1e-5, atol=1e-6)
    assert op(X, quantiles=0.5).shape == X.shape
    with pytest.raises(ModelError, match="from 0 to 1"):
        op(X, quantiles=1.5)
    with pytest.raises(ModelError, match="return_samples or for quantiles"):
        op(X, quantiles=0.5, return_samples=True)


def test_one_sample_where_its_shape_is_known(op: NumpyroPredictiveOp) -> None:
    one = NumpyroPredictiveOp(op.module, input_shape=()).with_arrays(op.arrays())
    assert one(np.float32(0.5)).shape == ()
    assert one(np.float32(0.5)) == one(np.array([0.5], np.float32))[0]


def test_an_unknown_site_lists_the_sites() -> None:
    """A KeyError that can be read (pipekit:K7)."""
    made = NumpyroPredictiveOp(NumpyroTask(known_line, predictive_site="height"))
    with pytest.raises(KeyError, match=r"no site 'height' to predict; its sites are: b, obs, w"):
        made.with_samples({"w": np.ones(3), "b": np.ones(3)})(X)
    assert issubclass(SiteError, ValueError)


def test_blob_is_safetensors_and_comes_back(op: NumpyroPredictiveOp, of_guide: NumpyroPredictiveOp) -> None:
    """No pickle: any reader of safetensors opens the draws, or the guide's parameters (pipekit:I8) (pipekit:D13.5)."""
    assert set(load(op.serialize_weights())) == {"samples/w", "samples/b"}
    assert set(load(of_guide.serialize_weights())) == {f"params/{name}" for name in of_guide.guide_arrays()}
    again = NumpyroPredictiveOp(NumpyroTask(known_line)).with_weights(op.serialize_weights())
    assert again == op
    np.testing.assert_array_equal(again(X), op(X))
    moved = of_guide.with_weights(of_guide.serialize_weights())
    np.testing.assert_array_equal(moved(X), of_guide(X))


def test_wrong_blobs_are_refused(op: NumpyroPredictiveOp, of_guide: NumpyroPredictiveOp) -> None:
    with pytest.raises(ModelError, match="a safetensors file"):
        op.with_weights(b"cnumpy\nnothing")
    with pytest.raises(TypeError, match="bytes"):
        op.with_weights("weights")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="do not fit"):
        op.with_weights(of_guide.serialize_weights())
    alone = NumpyroPredictiveOp(NumpyroTask(line)).with_weights(of_guide.serialize_weights())
    with pytest.raises(ModelError, match="only the operator of that training has it"):
        alone(X)


def test_hash_follows_the_posterior_and_the_site(op: NumpyroPredictiveOp) -> None:
    other = op.with_samples({**op.posterior, "b": np.zeros(COUNT, np.float32)})
    assert op.content_hash() == op.with_samples(op.posterior).content_hash()
    assert op.content_hash() != other.content_hash()
    site = NumpyroPredictiveOp(NumpyroTask(known_line, predictive_site="w")).with_arrays(op.arrays())
    assert site.content_hash() != op.content_hash()
    np.testing.assert_array_equal(site.samples(X), op.posterior["w"])


def test_without_a_posterior_or_a_model(op: NumpyroPredictiveOp) -> None:
    with pytest.raises(ModelError, match="the posterior of this operator is not here"):
        NumpyroPredictiveOp(NumpyroTask(known_line))(X)
    from_file = NumpyroPredictiveOp.from_state(op.state())
    with pytest.raises(ModelError, match=f"of digest {op.weights[:12]}"):
        from_file(X)
    with pytest.raises(ModelError, match="known_line cannot be rebuilt from a file"):
        from_file.with_weights(op.serialize_weights())(X)
    with pytest.raises(TypeError, match="takes a NumpyroTask"):
        NumpyroPredictiveOp(known_line)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("samples", [{}, {"w": np.ones(3), "b": np.ones(4)}, {"w": np.float32(1)}, {"w": np.ones(0)}])
def test_draws_of_unequal_numbers_are_refused(samples: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="as many for every site"):
        NumpyroPredictiveOp(NumpyroTask(known_line)).with_samples(samples)


def test_a_target_without_a_default_is_none() -> None:
    def model(x: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("obs", dist.Normal(w * x, 1e-6), obs=y)

    made = NumpyroPredictiveOp(NumpyroTask(model)).with_samples({"w": np.full(4, 2.0, np.float32)})
    np.testing.assert_allclose(made(X), 2.0 * X, atol=1e-5)


def test_it_is_traced_with_the_rest(op: NumpyroPredictiveOp) -> None:
    np.testing.assert_allclose(jax.jit(lambda x: op(x) + 1.0)(X), op(X) + 1.0, rtol=1e-5, atol=1e-6)


def test_without_numpyro_the_extra_is_named() -> None:
    """Everything can be imported; the first use names the extra (pipekit:K20) (pipekit:D14.1)."""
    code = """
import sys
sys.modules["numpyro"] = None
import numpy as np
from nnx_jax.backends import load_backend
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.engines.bayes import ModelBridge, NumpyroTask
from nnx_jax.training_loop import TrainingLoop
task, x = NumpyroTask(lambda x, y=None: None), np.zeros(4, np.float32)
uses = [lambda: ModelBridge(task, (x, x))]
for backend in ("numpyro-svi", "numpyro-mcmc"):
    loop = TrainingLoop(dataset=ArrayDataset(x, x), task=task, backend=backend, max_steps=1)
    uses.append(lambda loop=loop: load_backend(loop.backend).run(loop, None))
for use in uses:
    try:
        use()
    except ImportError as error:
        print(error)
print("blackjax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    told = "NumPyro is not installed; pip install 'nnx_jax[numpyro]'"
    assert done.stdout.splitlines() == [told] * 3 + ["False"], done.stderr
