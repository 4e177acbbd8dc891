"""Built-in networks: shapes, sizes from the data, input types, norms under padding, causality, 16-bit weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.core.registry import register
from nnx_jax.nets import ACTIVATIONS, Conv, FeedForward, TransformerLM, activation, build_net
from nnx_jax.nets.layers import BatchNorm
from nnx_jax.nets.transformer import rotate
from nnx_jax.params.net import ConvParams, FeedForwardParams, NNParams, TransformerLMParams


def made(make: Callable[[], Any]) -> Any:
    """A module with numpy's random weights (nothing is compiled): kernels near 0, scales 1, biases 0."""
    rng = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(make))
    fill = {"scale": np.ones, "var": np.ones, "bias": np.zeros, "mean": np.zeros}

    def values(path: tuple, leaf: Any) -> Any:
        name = str(path[-2].key if hasattr(path[-2], "key") else path[-2])
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        draw = fill.get(name, lambda shape: rng.normal(size=shape) * 0.1)
        return jnp.asarray(draw(leaf.shape), leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(values, state))


def outline(params: Any, info: dict) -> dict[str, tuple[int, ...]]:
    """Paths and shapes of the weights, without computing any."""
    return paths(nnx.eval_shape(lambda: build_net(params, rngs=nnx.Rngs(0), info=info)))


FORWARD = nnx.jit(lambda module, *args: module(*args))


def paths(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): variable.shape for path, variable in flat}


def sixteen_bit(module: Any) -> Any:
    """The module with its weights (not its statistics) in bfloat16."""
    graph, weights, rest = nnx.split(module, nnx.Param, ...)
    return nnx.merge(graph, jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights), rest)


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes_come_from_the_data() -> None:
    assert outline(FeedForwardParams(hidden_dims=(7,)), {"input_dim": 12, "n_classes": 3}) == {
        "head.bias": (3,),
        "head.kernel": (7, 3),
        "layers.0.bias": (7,),
        "layers.0.kernel": (12, 7),
    }
    flat = outline(FeedForwardParams(hidden_dims=()), {"input_shape": (3, 4), "output_dim": 2})
    assert flat == {"head.bias": (2,), "head.kernel": (12, 2)}
    text = outline(TransformerLMParams(d_model=8, n_heads=2, n_layers=1), {"vocab_size": 11, "context_length": 6})
    assert (text["embed.embedding"], text["positions"]) == ((11, 8), (6, 8))
    assert not any(path.startswith("head") for path in text)  # tied
    image = outline(ConvParams(channels=(2,)), {"input_shape": (8, 8), "n_classes": 10})
    assert image["convs.0.kernel"] == (3, 3, 1, 2)


@pytest.mark.parametrize(
    "params, info, message",
    [
        (FeedForwardParams(input_dim=3), {"input_dim": 4}, "input_dim = 3, the data has 4"),
        (FeedForwardParams(input_dim=3, output_dim=2), {"n_classes": 10}, "output_dim = 2, the data has 10"),
        (
            FeedForwardParams(output_dim=2),
            {},
            "needs input_dim and the data does not say it; write model.net.input_dim",
        ),
        (ConvParams(input_shape=(8, 8, 3)), {"input_shape": (8, 8, 1)}, r"\(8, 8, 3\), the data has \(8, 8, 1\)"),
        (ConvParams(), {"input_shape": (64,), "n_classes": 2}, r"the input has shape \(64,\)"),
        (ConvParams(), {}, "conv needs input_shape"),
        (TransformerLMParams(vocab_size=100), {"vocab_size": 256}, "vocab_size = 100, the data has 256"),
        (TransformerLMParams(vocab_size=9), {}, "needs context_length"),
    ],
)
def test_disagreeing_sizes_name_both_numbers(params: Any, info: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_net(params, rngs=nnx.Rngs(0), info=info)


@pytest.mark.parametrize(
    "make, x, message",
    [
        (lambda r: FeedForward(4, 2, rngs=r), np.ones((3, 5)), "built for 4 inputs a row, the batch has 5"),
        (lambda r: Conv((4, 4, 1), 2, rngs=r), np.ones((3, 4, 5)), r"rows of \(4, 4, 1\), the batch has \(4, 5\)"),
        (lambda r: tiny_lm(r), np.zeros((1, 7), int), "context_length 6, the batch has 7 tokens"),
        (lambda r: tiny_lm(r), np.zeros((1, 3)), "needs integer ids"),
    ],
)
def test_batches_of_another_size_are_refused(make: Any, x: np.ndarray, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        nnx.eval_shape(lambda: make(nnx.Rngs(0))(x))


def tiny_lm(rngs: nnx.Rngs, **changes: Any) -> TransformerLM:
    settings: dict[str, Any] = {"d_model": 8, "n_heads": 2, "n_layers": 1, "tie_embeddings": False} | changes
    return TransformerLM(11, 6, rngs=rngs, **settings)


# -- perceptron and images ---------------------------------------------------------------------------------------------


def test_feed_forward_is_its_formula() -> None:
    net = made(lambda: FeedForward(3, 2, hidden_dims=(4,), activation_name="tanh", rngs=nnx.Rngs(1)))
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    w = {path: np.asarray(value[...]) for path, value in nnx.to_flat_state(nnx.state(net, nnx.Param))}
    hidden = np.tanh(x @ w["layers", 0, "kernel"] + w["layers", 0, "bias"])
    np.testing.assert_allclose(FORWARD(net, x), hidden @ w["head", "kernel"] + w["head", "bias"], rtol=1e-5, atol=1e-6)


def test_bytes_become_floats_and_nothing_wraps() -> None:
    """case:L09 - uint8 250 and 250 reach the model as 250/255 each, their sum is 500/255 and not 244."""
    net = made(lambda: FeedForward(2, 1, hidden_dims=(), rngs=nnx.Rngs(0)))
    net.head.kernel[...] = jnp.ones((2, 1))
    assert float(net(np.array([[250, 250]], np.uint8))[0, 0]) == pytest.approx(500 / 255)
    assert float(net(np.array([[250, 250]], np.int32))[0, 0]) == 500.0
    assert float(net(np.array([[True, True]]))[0, 0]) == 2.0


def test_images_of_any_layout_are_the_same() -> None:
    net = made(lambda: Conv((4, 4, 1), 3, channels=(2, 3), hidden_dims=(), rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 1)).astype(np.uint8)
    shapes = (2, 4, 4, 1), (2, 4, 4), (2, 16)
    wanted, *others = nnx.jit(lambda module, x: [module(x.reshape(shape)) for shape in shapes])(net, x)
    assert wanted.shape == (2, 3)
    for other in others:
        np.testing.assert_array_equal(other, wanted)


def test_a_side_of_one_pixel_is_not_pooled() -> None:
    def run() -> jax.Array:
        net = Conv((2, 2, 1), 3, channels=(2, 2, 2), hidden_dims=(), rngs=nnx.Rngs(0))
        return net(np.ones((1, 2, 2), np.uint8))

    assert nnx.eval_shape(run).shape == (1, 3)


def test_dropout_only_while_training_and_no_random_state_without_it() -> None:
    x = jnp.ones((4, 6))
    net = made(lambda: FeedForward(6, 2, hidden_dims=(32,), dropout_prob=0.5, rngs=nnx.Rngs(0)))
    assert not np.array_equal(FORWARD(net, x), FORWARD(net, x))
    net.eval()
    np.testing.assert_array_equal(FORWARD(net, x), FORWARD(net, x))
    plain = nnx.eval_shape(lambda: FeedForward(6, 2, rngs=nnx.Rngs(0)))
    assert not jax.tree.leaves(nnx.state(plain, nnx.RngState))


def test_activations_by_name() -> None:
    for name in ("relu", "leaky_relu", "gelu", "silu", "tanh", "elu", "sigmoid"):
        assert activation(name) is ACTIVATIONS[name]
    with pytest.raises(ConfigError, match="no activation 'rellu'; did you mean 'relu'"):
        activation("rellu")
    with pytest.raises(ConfigError, match="no norm 'bach'; did you mean 'batch'"):
        FeedForward(2, 2, norm="bach", rngs=nnx.Rngs(0))


# -- norms ------------------------------------------------------------------------------------------------------------


def test_padding_stays_out_of_batch_statistics() -> None:
    """case:E03 - real rows 7 and 5 beside two zero rows of padding: running mean 0.6, variance 1.0."""
    norm = BatchNorm(1, rngs=nnx.Rngs(0))
    norm(jnp.array([[7.0], [5.0], [0.0], [0.0]]), jnp.array([1.0, 1.0, 0.0, 0.0]))
    assert float(norm.mean[...][0]) == pytest.approx(0.6)
    assert float(norm.var[...][0]) == pytest.approx(1.0)


def test_a_microbatch_of_padding_alone_moves_no_statistics() -> None:
    norm = BatchNorm(1, rngs=nnx.Rngs(0))
    y = norm(jnp.array([[7.0], [5.0]]), jnp.zeros(2))
    assert (float(norm.mean[...][0]), float(norm.var[...][0])) == (0.0, 1.0)
    assert bool(jnp.all(jnp.isfinite(y)))


def test_evaluation_uses_running_statistics() -> None:
    net = made(lambda: FeedForward(3, 2, norm="batch", rngs=nnx.Rngs(0)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
    FORWARD(net, x, jnp.ones(6))
    net.eval()
    before = jax.tree.map(jnp.copy, nnx.state(net, nnx.BatchStat))
    np.testing.assert_allclose(FORWARD(net, x)[:2], FORWARD(net, x[:2], jnp.ones(2)), rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(net, nnx.BatchStat))


def test_norms_compute_in_float32() -> None:
    """A mean of 514 is not a bfloat16 number; the statistics are taken and kept in float32."""
    norm = BatchNorm(1, rngs=nnx.Rngs(0))
    x = jnp.array([[512.0], [516.0]], jnp.bfloat16)
    y = norm(x, jnp.ones(2))
    assert y.dtype == jnp.bfloat16
    assert np.asarray(y, np.float32).ravel().tolist() == pytest.approx([-1, 1], abs=1e-2)
    assert norm.mean[...].dtype == jnp.float32
    assert float(norm.mean[...][0]) == pytest.approx(51.4, rel=1e-6)


# -- transformer ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["learned", "rotary"])
def lm(request: pytest.FixtureRequest) -> TransformerLM:
    return made(lambda: tiny_lm(nnx.Rngs(3), n_layers=2, position=request.param))


def test_positions_see_the_past_only(lm: TransformerLM) -> None:
    ids = np.random.default_rng(0).integers(0, 11, (2, 6))
    changed = ids.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    one, other = np.asarray(FORWARD(lm, ids)), np.asarray(FORWARD(lm, changed))
    assert one.shape == (2, 6, 11)
    np.testing.assert_array_equal(one[:, :4], other[:, :4])
    assert np.abs(one[:, 4:] - other[:, 4:]).max(axis=(0, 2)).min() > 0


def test_shorter_inputs_are_prefixes(lm: TransformerLM) -> None:
    ids = np.random.default_rng(1).integers(0, 11, (2, 6))
    np.testing.assert_allclose(FORWARD(lm, ids[:, :3]), FORWARD(lm, ids)[:, :3], rtol=1e-4, atol=1e-6)


def test_any_integer_type_is_an_id() -> None:
    """case:L09 - ids stay integers, whatever their width."""
    lm = made(lambda: tiny_lm(nnx.Rngs(3)))
    ids = np.random.default_rng(1).integers(0, 11, (2, 6))
    wanted = np.asarray(FORWARD(lm, ids.astype(np.int32)))
    for dtype in (np.uint8, np.int16):
        np.testing.assert_array_equal(FORWARD(lm, ids.astype(dtype)), wanted)


def test_order_matters(lm: TransformerLM) -> None:
    """Without positions the last output would not change when the ids before it swap places."""
    swapped = FORWARD(lm, np.array([[1, 2, 3, 4, 5, 6], [2, 1, 3, 4, 5, 6]]))
    assert float(jnp.abs(swapped[0, -1] - swapped[1, -1]).max()) > 1e-7


def test_a_fresh_model_is_nearly_uniform() -> None:
    logits = jax.jit(lambda ids: tiny_lm(nnx.Rngs(0), tie_embeddings=True)(ids))(np.arange(6)[None])
    assert float(-jax.nn.log_softmax(logits).mean()) == pytest.approx(np.log(11), rel=0.05)


def test_attention_is_its_formula() -> None:
    """The first block against numpy: softmax(q k / sqrt(size)) v over the past, two heads."""
    block = made(lambda: TransformerLM(7, 4, d_model=4, n_heads=2, n_layers=1, rngs=nnx.Rngs(2))).blocks[0]
    h = np.random.default_rng(0).normal(size=(1, 4, 4)).astype(np.float32)
    qkv = np.asarray(block.qkv(h)).reshape(4, 3, 2, 2)  # time, which, head, size
    mixed = np.zeros((4, 2, 2))
    for head in range(2):
        q, k, v = (qkv[:, which, head].astype(np.float64) for which in range(3))
        score = np.where(np.tril(np.ones((4, 4))) > 0, q @ k.T / np.sqrt(2), -np.inf)
        p = np.exp(score - score.max(-1, keepdims=True))
        mixed[:, head] = p / p.sum(-1, keepdims=True) @ v
    wanted = block.out(jnp.asarray(mixed.reshape(1, 4, 4), jnp.float32))
    np.testing.assert_allclose(nnx.jit(lambda b, h: b._attend(h))(block, h), wanted, rtol=1e-4, atol=1e-6)


def test_rotary_keeps_lengths_and_sees_distances() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 5, 6)), jnp.float32)
    turned = rotate(x)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    same = rotate(jnp.broadcast_to(x[:, :, :1], x.shape))[0, 0]  # one vector at every position
    scores = np.asarray(same @ same.T)
    for distance in range(1, 5):
        np.testing.assert_allclose(np.diag(scores, distance), scores[0, distance], rtol=1e-4, atol=1e-5)


def test_heads_must_divide() -> None:
    with pytest.raises(ModelError, match="d_model 10 does not split into 4 heads"):
        TransformerLM(5, 4, d_model=10, n_heads=4, rngs=nnx.Rngs(0))
    with pytest.raises(ModelError, match="rotary positions need an even head size, got 6 / 2 = 3"):
        TransformerLM(5, 4, d_model=6, n_heads=2, position="rotary", rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="no position encoding 'rotari'; did you mean 'rotary'"):
        TransformerLM(5, 4, d_model=8, n_heads=2, position="rotari", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("tied", [True, False])
def test_sixteen_bit_weights_give_nearly_the_same(tied: bool) -> None:
    lm = made(lambda: tiny_lm(nnx.Rngs(3), tie_embeddings=tied))
    ids = np.random.default_rng(0).integers(0, 11, (2, 6))
    low = FORWARD(sixteen_bit(lm), ids)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(low, np.float32), FORWARD(lm, ids), atol=0.02)


def test_sixteen_bit_weights_see_sixteen_bit_inputs() -> None:
    def run(norm: str) -> jax.Array:
        net = made(lambda: FeedForward(3, 2, norm=norm, rngs=nnx.Rngs(0)))
        return FORWARD(sixteen_bit(net), np.ones((2, 3), np.float32))

    for norm in ("layer", "batch"):
        assert run(norm).dtype == jnp.bfloat16


# -- building ---------------------------------------------------------------------------------------------------------


def test_equal_seeds_build_equal_nets() -> None:
    params = FeedForwardParams(input_dim=3, output_dim=2, hidden_dims=())
    build = jax.jit(lambda key: nnx.state(build_net(params, rngs=nnx.Rngs(key)))["head"]["kernel"][...])
    weights = [np.asarray(build(jax.random.key(seed))) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


def test_a_net_of_the_users() -> None:
    @register("test_linear")
    class LinearParams(NNParams):
        wrong: bool = False

        def build(self, *, rngs: nnx.Rngs, info: Any) -> Any:
            return object() if self.wrong else nnx.Linear(info["input_dim"], 1, rngs=rngs)

    assert isinstance(build_net(LinearParams(), rngs=nnx.Rngs(0), info={"input_dim": 3}), nnx.Linear)
    with pytest.raises(ModelError, match=r"'test_linear' built a object; build\(rngs, info\) returns"):
        build_net(LinearParams(wrong=True), rngs=nnx.Rngs(0))

    @register("test_nothing")
    class NothingParams(NNParams):
        pass

    with pytest.raises(ConfigError, match="there is no net 'test_nothing'"):
        build_net(NothingParams(), rngs=nnx.Rngs(0))
