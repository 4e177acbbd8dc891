"""EquinoxModelOp: a module as an operator, its weights as bytes."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.engines.equinox import EquinoxModelOp
from tests.equinox.nets import mlp, normed, rows

X = rows(6).arrays()["x"]


def test_it_gives_what_the_module_gives() -> None:
    """One sample, and a batch row by row; anything else than a module is refused. (pipekit:I14)"""
    module = mlp()
    op = EquinoxModelOp(module)
    assert op.input_shape == (4,)
    np.testing.assert_allclose(op(X[0]), module(X[0]), rtol=1e-6)
    np.testing.assert_allclose(op(X), jax.vmap(module)(X), rtol=1e-6)
    assert op(X[0]).shape == (2,)
    assert op.get_config() == {"module_class": "MLP"}
    assert op.module is module
    for wrong in ("x", lambda x: x):
        with pytest.raises(TypeError, match=r"eqx\.Module"):
            EquinoxModelOp(wrong)
    with pytest.raises(ConfigError, match=r"give an eqx\.Module"):
        EquinoxModelOp()


def test_a_batch_of_as_many_rows_as_columns_is_a_batch() -> None:
    """A square x cannot be told from its values; it has one axis more than a sample, so it is rows."""
    module = mlp()
    np.testing.assert_allclose(EquinoxModelOp(module)(X[:4]), jax.vmap(module)(X[:4]), rtol=1e-6)


def test_scalars_are_samples_of_a_module_that_takes_them() -> None:
    module = eqx.nn.MLP("scalar", "scalar", 3, 1, key=jax.random.key(0))
    op = EquinoxModelOp(module)
    assert op.input_shape == ()
    np.testing.assert_allclose(op(np.float32(0.5)), module(jnp.float32(0.5)), rtol=1e-6)
    np.testing.assert_allclose(op(X[:, 0]), jax.vmap(module)(X[:, 0]), rtol=1e-6)


def test_it_is_in_evaluation_mode_and_holds_its_state() -> None:
    module, state = normed()
    op = EquinoxModelOp((module, state), input_shape=(4,))
    calm = eqx.nn.inference_mode(module)
    np.testing.assert_allclose(op(X[0]), calm(X[0], state, key=None)[0], rtol=1e-6)
    assert op.content_hash() == EquinoxModelOp(module, state, input_shape=(4,)).content_hash()


def test_it_is_traced_with_what_is_around_it() -> None:
    op = EquinoxModelOp(mlp())
    jitted = jax.jit(lambda x: op(x).sum())
    np.testing.assert_allclose(jitted(X), op(X).sum(), rtol=1e-5)
    assert jax.grad(jitted)(jnp.asarray(X)).shape == X.shape


@pytest.mark.parametrize("make", [mlp, normed])
def test_weights_go_through_bytes(make: Any) -> None:
    """A blob without pickle, into an operator with other weights: equal outputs; neither is changed. (pipekit:M5)

    A stored state, integers and random keys are part of it. (pipekit:I6)
    """
    op, other = EquinoxModelOp(make(0), input_shape=(4,)), EquinoxModelOp(make(1), input_shape=(4,))
    before, blob = other(X), op.serialize_weights()
    assert isinstance(blob, bytes)
    loaded = other.with_weights(blob)
    assert loaded is not other
    np.testing.assert_array_equal(loaded(X), op(X))
    np.testing.assert_array_equal(other(X), before)
    assert loaded.serialize_weights() == blob
    assert loaded.content_hash() == op.content_hash() != other.content_hash()
    with pytest.raises(TypeError, match="bytes"):
        other.with_weights("x")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"depth": 0}, r"it has no layers\.1\.(weight|bias)"),
        ({"depth": 2}, r"layers\.2\.(weight|bias) is missing"),
        ({"width_size": 9}, r"layers\.0\.(weight|bias) is float32\[8.*float32\[9"),
        ({"dtype": jnp.float16}, r"layers\.0\.weight is float32.*float16"),
        ({"use_final_bias": False}, r"it has no layers\.1\.bias"),
    ],
    ids=["fewer", "more", "wider", "another dtype", "one leaf less"],
)
def test_other_leaves_are_refused_by_name(size: Any, message: str) -> None:
    """A skeleton with fewer leaves does not take the first few of a blob. (pipekit:I7)"""
    blob = EquinoxModelOp(mlp()).serialize_weights()
    sizes = {"in_size": 4, "out_size": 2, "width_size": 8, "depth": 1, "key": jax.random.key(0), **size}
    with pytest.raises(ModelError, match=message):
        EquinoxModelOp(eqx.nn.MLP(**sizes)).with_weights(blob)


def test_the_hash_knows_weights_class_and_precision() -> None:
    class Other(eqx.nn.MLP):
        pass

    base = EquinoxModelOp(mlp())
    sizes: Any = {"in_size": 4, "out_size": 2, "width_size": 8, "depth": 1, "key": jax.random.key(0)}
    different = [EquinoxModelOp(mlp(1)), EquinoxModelOp(Other(**sizes)), EquinoxModelOp(mlp(), precision="bfloat16")]
    assert base.content_hash() == EquinoxModelOp(mlp()).content_hash()
    assert len({op.content_hash() for op in (base, *different)}) == 4


def test_only_its_description_comes_from_a_file() -> None:
    """A module of the user's own is no configuration: what a file holds names class and weights, and says so."""
    op = EquinoxModelOp(mlp())
    again = EquinoxModelOp.from_state(op.state())
    assert again.content_hash() == op.content_hash()
    with pytest.raises(ModelError, match="MLP cannot be rebuilt from a file; make it, and bring its weights"):
        again(X)
