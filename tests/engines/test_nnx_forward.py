"""A Flax NNX module as a pure function: same numbers, own randomness per call, masked rows left out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ModelError
from nnx_jax.engines.nnx_forward import PureModule, copy_leaves


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def run(pure: PureModule, x: np.ndarray, key: int = 1, mask: list[float] | None = None, train: bool = True):
    batch = {"x": jnp.asarray(x)} | ({"mask": jnp.asarray(mask)} if mask else {})
    return pure.forward({**pure.params, **pure.frozen}, pure.model_state, batch, jax.random.key(key), train)


def test_names_are_module_paths() -> None:
    pure = PureModule(Net(nnx.Rngs(0)))
    assert list(pure.params) == [
        "first.bias", "first.kernel", "last.bias", "last.kernel", "norm.bias", "norm.scale",
    ]  # fmt: skip
    assert list(pure.model_state) == ["norm.mean", "norm.var"]


def test_randomness_is_the_key_and_nothing_else() -> None:
    pure = PureModule(Net(nnx.Rngs(0)))
    first, again, other = run(pure, X)[0], run(pure, X)[0], run(pure, X, key=2)[0]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_evaluation_equals_the_module_in_eval_mode_and_changes_no_state() -> None:
    module = Net(nnx.Rngs(0))
    pure = PureModule(module)
    outputs, state = run(pure, X, train=False)
    module.eval()
    np.testing.assert_allclose(outputs, module(jnp.asarray(X)), rtol=1e-6)
    for name, value in pure.model_state.items():
        np.testing.assert_array_equal(state[name], value)


def test_mode_of_the_module_does_not_leak_into_training() -> None:
    """case:E08"""
    module = Net(nnx.Rngs(0))
    module.eval()
    outputs, _ = run(PureModule(module), X)
    expected, _ = run(PureModule(Net(nnx.Rngs(0))), X)
    np.testing.assert_array_equal(outputs, expected)


def test_padded_rows_are_left_out_of_batch_statistics() -> None:
    """case:E03 real rows 7 and 5, two zero rows of padding, momentum 0.9: running mean 0.6, variance 1.0."""

    class Norm(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(x)

    pure = PureModule(Norm(), mask_rows=True)
    rows = np.array([[7.0], [5.0], [0.0], [0.0]], np.float32)
    _, state = run(pure, rows, mask=[1.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(state["norm.mean"], [0.6], rtol=1e-6)
    np.testing.assert_allclose(state["norm.var"], [1.0], rtol=1e-6)


def test_a_batch_axis_that_moved_cannot_be_masked() -> None:
    class Folded(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(x.reshape(-1, 1))

    with pytest.raises(ModelError, match="BatchNorm sees 12 leading rows but the batch has 4"):
        run(PureModule(Folded(), mask_rows=True), X, mask=[1.0, 1.0, 1.0, 0.0])


def test_frozen_parameters_are_set_apart_and_patterns_must_match() -> None:
    pure = PureModule(Net(nnx.Rngs(0)), freeze=["first", "norm.*"])
    assert sorted(pure.frozen) == ["first.bias", "first.kernel", "norm.bias", "norm.scale"]
    with pytest.raises(ModelError, match="'frist' matches no parameter; legal names: first.bias"):
        PureModule(Net(nnx.Rngs(0)), freeze=["frist"])
    with pytest.raises(ModelError, match="no parameter is left to train"):
        PureModule(Net(nnx.Rngs(0)), freeze=["*"])


def test_bfloat16_computes_low_and_keeps_norms_and_outputs_float32() -> None:
    pure = PureModule(Net(nnx.Rngs(0)), compute_dtype=jnp.bfloat16)
    outputs, state = run(pure, X, train=False)
    assert outputs.dtype == jnp.float32
    assert state["norm.mean"].dtype == jnp.float32
    exact = run(PureModule(Net(nnx.Rngs(0))), X, train=False)[0]
    assert 0 < np.max(np.abs(outputs - exact)) < 2**-8 * 8  # bfloat16 keeps 8 bits; three layers


def test_tied_weights_are_one_leaf() -> None:
    """case:I20 (one leaf, still shared after writing back)"""

    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
            self.again = self.embed

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.again.attend(self.embed(x))

    module = Tied()
    pure = PureModule(module)
    assert len(pure.params) == 1
    pure.write(module, {name: value + 1 for name, value in pure.params.items()}, {})
    assert module.again.embedding is module.embed.embedding


def test_written_and_copied_leaves_share_no_buffer() -> None:
    module = Net(nnx.Rngs(0))
    pure = PureModule(module)
    copies = copy_leaves(pure.params)
    before = np.asarray(module.first.kernel[...])
    jax.jit(lambda leaves: leaves, donate_argnums=0)(copies)
    np.testing.assert_array_equal(module.first.kernel[...], before)


def test_a_batch_without_a_real_row_leaves_the_statistics() -> None:
    pure = PureModule(Net(nnx.Rngs(0)), mask_rows=True)
    _, state = run(pure, X, mask=[0.0, 0.0, 0.0, 0.0])
    for name, value in pure.model_state.items():
        np.testing.assert_array_equal(state[name], value)


def test_a_module_that_takes_the_mask_gets_it() -> None:
    class Masked(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
            return self.layer(x) * (1.0 if mask is None else mask[:, None])

    outputs, _ = run(PureModule(Masked()), X, mask=[1.0, 0.0, 1.0, 1.0])
    assert outputs[1, 0] == 0.0
    assert np.all(outputs[[0, 2, 3], 0] != 0.0)
