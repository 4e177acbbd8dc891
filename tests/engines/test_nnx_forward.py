"""A Flax NNX module as a pure function: same numbers, own randomness per call, masked rows left out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ModelError
from nnx_jax.core.precision import full_precision, in_full_precision
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


# -- 16-bit types ---------------------------------------------------------------------------------------------------


def products(pure: PureModule, x: np.ndarray) -> list[tuple[str, ...]]:
    """The types of the operands of every matrix product, in order, as traced."""

    def outputs(params: dict[str, jax.Array]) -> jax.Array:
        return pure.forward(params, pure.model_state, {"x": jnp.asarray(x)}, jax.random.key(0), True)[0]

    found = []
    for equation in jax.make_jaxpr(outputs)({**pure.params, **pure.frozen}).eqns:
        if equation.primitive.name == "dot_general":
            found.append(tuple(str(value.aval.dtype) for value in equation.invars))  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("norm", [nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm])
def test_a_norm_does_not_turn_what_follows_to_float32(norm: type, dtype: str) -> None:
    """nvalchemi:74 (matrix products in the compute dtype; Flax's own rule gives float32 after a norm)"""

    class Normed(nnx.Module):
        def __init__(self) -> None:
            self.first, self.last = (nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(2))
            self.norm = norm(3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            h = self.norm(self.first(x))
            seen.append(str(h.dtype))
            return self.last(nnx.relu(h))

    seen: list[str] = []
    pure = PureModule(Normed(), compute_dtype=jnp.dtype(dtype))
    assert products(pure, X) == [(dtype, dtype)] * 2
    assert seen == ["float32"]
    assert all(value.dtype == jnp.float32 for value in pure.params.values())


def test_a_norm_without_parameters_computes_in_float32() -> None:
    class Bare(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            self.norm = nnx.LayerNorm(3, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            h = self.norm(self.first(x))
            assert h.dtype == jnp.float32
            return h

    run(PureModule(Bare(), compute_dtype=jnp.bfloat16), X)


class Raw(nnx.Module):
    """Uses its parameter itself, no layer in between."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.full((3, 2), 1 / 3, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w


def test_a_parameter_used_without_a_layer_is_cast() -> None:
    assert products(PureModule(Raw(), compute_dtype=jnp.bfloat16), X) == [("bfloat16", "bfloat16")]
    assert products(PureModule(Raw()), X) == [("float32", "float32")]


def test_a_kept_parameter_stays_float32_and_takes_its_layer_along() -> None:
    net = Net(nnx.Rngs(0))
    kept = PureModule(net, compute_dtype=jnp.bfloat16, keep_float32=["last"])
    assert products(kept, X) == [("bfloat16", "bfloat16"), ("float32", "float32")]
    with pytest.raises(ModelError, match="pattern 'lst' matches no parameter"):
        PureModule(net, compute_dtype=jnp.bfloat16, keep_float32=["lst"])


def test_a_layer_with_a_dtype_of_its_own_keeps_it() -> None:
    class Chosen(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            self.last = nnx.Linear(3, 2, dtype=jnp.float32, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(self.first(x))

    pure = PureModule(Chosen(), compute_dtype=jnp.bfloat16)
    assert products(pure, X) == [("bfloat16", "bfloat16"), ("float32", "float32")]


def test_embeddings_and_their_transpose_compute_low() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(5, 3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.embed.attend(self.embed(x))

    pure = PureModule(Tied(), compute_dtype=jnp.bfloat16)
    assert products(pure, np.array([1, 2])) == [("bfloat16", "bfloat16")]


def test_attention_over_normed_queries_computes_low() -> None:
    class Attends(nnx.Module):
        def __init__(self) -> None:
            self.mix = nnx.MultiHeadAttention(2, 4, 4, normalize_qk=True, decode=False, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.mix(x)

    pure = PureModule(Attends(), compute_dtype=jnp.bfloat16)
    assert products(pure, np.ones((2, 3, 4), np.float32)) == [("bfloat16", "bfloat16")] * 6


def test_full_precision_is_a_region_of_the_model() -> None:
    """nvalchemi:86 (layers, and parameters used without one)"""
    seen: list[str] = []

    class Region(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b, self.c = (nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(3))
            self.w = nnx.Param(jnp.full((3, 3), 1 / 3, jnp.float32))

        def __call__(self, x: jax.Array) -> jax.Array:
            h = self.a(x)
            with full_precision():
                h = self.b(h) @ self.w
            seen.append(str(h.dtype))
            return self.c(h)

    pure = PureModule(Region(), compute_dtype=jnp.bfloat16)
    low, full = ("bfloat16", "bfloat16"), ("float32", "float32")
    assert products(pure, X) == [low, full, full, low]
    assert seen == ["float32"]
    assert not in_full_precision()
    assert products(PureModule(Region()), X) == [full] * 4


def test_lowering_touches_the_copy_in_the_trace_only() -> None:
    net = Net(nnx.Rngs(0))
    before = net.first.promote_dtype, type(net.first.kernel)
    run(PureModule(net, compute_dtype=jnp.bfloat16), X)
    assert (net.first.promote_dtype, type(net.first.kernel)) == before
    assert net.first.kernel[...].dtype == jnp.float32


def test_gradients_of_a_16_bit_pass_are_float32() -> None:
    """nvalchemi:74 (master parameters and gradients stay float32)"""
    pure = PureModule(Net(nnx.Rngs(0)), compute_dtype=jnp.bfloat16)
    grads = jax.grad(lambda params: run_with(pure, params).sum())(pure.params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(grads)} == {"float32"}


def run_with(pure: PureModule, params: dict[str, jax.Array]) -> jax.Array:
    return pure.forward(params, pure.model_state, {"x": jnp.asarray(X)}, jax.random.key(0), True)[0]


@pytest.mark.parametrize("cell", [nnx.LSTMCell, nnx.GRUCell, nnx.SimpleCell, nnx.OptimizedLSTMCell])
def test_recurrent_cells_train_in_16_bits(cell: type) -> None:
    class Recurrent(nnx.Module):
        def __init__(self) -> None:
            self.over = nnx.RNN(cell(3, 4, rngs=nnx.Rngs(0)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.asarray(self.over(x))[:, -1]

    pure = PureModule(Recurrent(), compute_dtype=jnp.bfloat16)
    x = {"x": jnp.ones((2, 5, 3))}
    grads = jax.grad(lambda p: pure.forward(p, pure.model_state, x, jax.random.key(0), True)[0].sum())(pure.params)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(grads))
