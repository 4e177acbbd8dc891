"""Built-in torch networks against the Flax ones: outputs, gradients, statistics, first weights, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nnx_jax import nets as flax_nets
from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.core.registry import register
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.params.net import ConvParams, FeedForwardParams, NNParams, TransformerLMParams
from nnx_jax.torch.convert import torch_to_flax
from nnx_jax.torch.layers import ACTIVATIONS, BatchNorm, LayerNorm, Maker, same_pad
from nnx_jax.torch.nets import build_net

EPS = float(np.finfo(np.float32).eps)
ROWS = 5


def batch_for(params: Any, seed: int) -> np.ndarray:
    """Inputs that such a net takes."""
    rng = np.random.default_rng(seed)
    if params.kind == "transformer_lm":
        return rng.integers(0, params.vocab_size, (ROWS, params.context_length)).astype(np.int32)
    shape = params.input_shape if params.kind == "conv" else (params.input_dim,)
    return rng.normal(size=(ROWS, *shape)).astype(np.float32)


def step_by_step(norm: Any, moved: Any, x: torch.Tensor) -> torch.Tensor:
    """A norm with Flax's arithmetic (the variance as mean of squares less squared mean), every result `moved`."""
    rows = isinstance(norm, BatchNorm)
    axis = 0 if rows else -1
    if rows and not norm.training:
        mean, var = norm.running_mean, norm.running_var
    else:
        mean = moved(x.mean(axis, keepdim=True))
        var = moved(moved(x * x).mean(axis, keepdim=True)) - moved(mean * mean)
    if rows and norm.training:
        for running, new in ((norm.running_mean, mean), (norm.running_var, var)):
            running.mul_(0.9).add_(new.detach()[0], alpha=0.1)
    return moved(moved(x - mean) * moved(moved(torch.rsqrt(var + norm.eps)) * norm.weight)) + norm.bias


class Both:
    """One net in both frameworks with equal weights, which are not the first ones: biases and statistics differ too."""

    def __init__(self, params: Any, seed: int = 0) -> None:
        self.params = params
        self.module = build_net(params, seed)
        rng = np.random.default_rng(seed)
        with torch.no_grad():
            for name, value in self.module.state_dict().items():
                more = 0.3 * rng.normal(size=value.shape).astype(np.float32)
                if value.is_floating_point():
                    value += torch.from_numpy(np.abs(more) if name.endswith("var") else more)
        self.weights = torch_to_flax(params, self.module.state_dict())
        self.pure = PureModule(nnx.eval_shape(lambda: flax_nets.build_net(params, rngs=nnx.Rngs(0))))

    def flax(self, x: np.ndarray, train: bool, seen_from: np.ndarray) -> dict[str, Any]:
        """Outputs, statistics afterwards and gradients of sum(outputs * seen_from), all by name."""
        given_ = {name: jnp.asarray(self.weights[name]) for name in self.pure.params}
        state = {name: jnp.asarray(self.weights[name]) for name in self.pure.model_state}
        integers = x.dtype != np.float32

        def loss(weights: Any, inputs: Any) -> Any:
            batch = {"x": jnp.asarray(x) if integers else inputs}
            outputs, new = self.pure.forward(weights, state, batch, jax.random.key(0), train)
            return jnp.sum(outputs * seen_from), (outputs, new)

        floats = jnp.zeros(()) if integers else jnp.asarray(x)
        (dw, dx), (outputs, new) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(given_, floats)
        found = {"outputs": outputs, **new, **{f"d {name}": value for name, value in dw.items()}}
        return {k: np.asarray(v) for k, v in (found if integers else {**found, "d input": dx}).items()}

    def torch(self, x: np.ndarray, train: bool, seen_from: np.ndarray, dtype: Any, nudge: int = 0) -> dict[str, Any]:
        """The same of the torch net, computed in `dtype`; in float64 with the norms written out.

        `nudge` seeds relative changes of float32's rounding unit to inputs, weights and what each layer puts out (and
        so to the gradient that comes back through it).
        """
        module = build_net(self.params, 0).to(dtype).train(train)
        generator = torch.Generator().manual_seed(nudge)

        def moved(value: torch.Tensor) -> torch.Tensor:
            signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
            return value * (1 + EPS * signs) if nudge and value.is_floating_point() else value

        held = {name: moved(value.to(dtype)) for name, value in self.module.state_dict().items()}
        module.load_state_dict(held)
        for part in module.modules():
            part.register_forward_hook(lambda _, __, output: moved(output))
            if dtype == torch.float64 and isinstance(part, BatchNorm | LayerNorm):
                part.forward = partial(step_by_step, part, moved)
        inputs = torch.from_numpy(x)
        if inputs.is_floating_point():
            inputs = moved(inputs.to(dtype)).requires_grad_()
        outputs = module(inputs)
        (outputs * torch.from_numpy(seen_from).to(dtype)).sum().backward()
        grads = {name: value.grad for name, value in module.named_parameters()}
        counters = {name: value for name, value in module.state_dict().items() if name not in grads}
        dw = torch_to_flax(self.params, {**grads, **counters})
        new = torch_to_flax(self.params, module.state_dict())
        found = {"outputs": outputs.detach().numpy(), **{name: new[name] for name in self.pure.model_state}}
        found |= {f"d {name}": dw[name] for name in self.pure.params}
        return found if inputs.grad is None else {**found, "d input": inputs.grad.numpy()}


def fan_in(params: Any) -> int:
    """Terms of the longest sum anywhere in the net, over inputs forward and over rows, places or outputs backward."""
    if params.kind == "transformer_lm":
        sizes = (params.mlp_ratio * params.d_model, params.vocab_size, ROWS * params.context_length)
    elif params.kind == "conv":
        height, width, depth = params.input_shape
        most = max(depth, *params.channels)
        sizes = (params.kernel_size**2 * most, ROWS * height * width, height * width * most, *params.hidden_dims)
    else:
        sizes = (params.input_dim, ROWS, *params.hidden_dims, params.output_dim)
    return max(sizes)


def check_equal(params: Any, *, train: bool, seed: int = 0) -> None:
    """Both float32 results are within rounding of the float64 one.

    The tolerance: a float32 sum of n products is the exact sum of factors that are changed by at most n rounding units
    each (Higham, Accuracy and Stability, section 3.1); a softmax or activation adds about ten roundings. So changes
    of one unit, of either sign, in every factor and in every step of a norm show how far one unit reaches through this
    net in float64, and n + 10 times that is what rounding may do.
    """
    both, x = Both(params, seed), batch_for(params, seed)
    exact_outputs = build_net(params, 0)(torch.from_numpy(x))
    seen_from = np.random.default_rng(seed + 1).normal(size=tuple(exact_outputs.shape)).astype(np.float32)
    exact = both.torch(x, train, seen_from, torch.float64)
    nudged = [both.torch(x, train, seen_from, torch.float64, nudge) for nudge in (1, 2, 3)]
    results = {"flax": both.flax(x, train, seen_from), "torch": both.torch(x, train, seen_from, torch.float32)}
    assert results["flax"].keys() == exact.keys()
    for name, wanted in exact.items():
        unit = max(float(np.abs(other[name] - wanted).max(initial=0)) for other in nudged)
        scale = float(np.abs(wanted).max(initial=0))
        for framework, found in results.items():
            assert found[name].shape == wanted.shape
            assert found[name].dtype == np.float32
            apart = float(np.abs(found[name] - wanted).max(initial=0))
            assert apart <= (fan_in(params) + 10) * unit + EPS * scale, (framework, name, apart, unit, scale)


ACTIVATION = st.sampled_from(sorted(ACTIVATIONS))
NORM = st.sampled_from([None, "batch", "layer"])
SIZE = st.integers(1, 6)
DENSE = st.builds(
    FeedForwardParams,
    input_dim=SIZE,
    output_dim=SIZE,
    hidden_dims=st.lists(st.integers(2, 6), max_size=2).map(tuple),
    activation=ACTIVATION,
    norm=NORM,
)
IMAGES = st.builds(
    ConvParams,
    input_shape=st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3)),
    output_dim=SIZE,
    channels=st.lists(st.integers(2, 4), min_size=1, max_size=2).map(tuple),
    kernel_size=st.integers(1, 4),
    hidden_dims=st.lists(SIZE, max_size=1).map(tuple),
    activation=ACTIVATION,
    norm=NORM,
)
TEXT = st.builds(
    TransformerLMParams,
    vocab_size=st.integers(2, 9),
    context_length=st.integers(1, 6),
    d_model=st.sampled_from([4, 8]),
    n_layers=st.integers(1, 2),
    n_heads=st.sampled_from([1, 2, 4]),
    mlp_ratio=st.integers(1, 3),
    tie_embeddings=st.booleans(),
)
FIXED = [
    FeedForwardParams(input_dim=3, output_dim=2, hidden_dims=(4, 5), activation="gelu", norm="batch"),
    ConvParams(
        input_shape=(5, 4, 2),
        output_dim=3,
        channels=(3, 4),
        kernel_size=2,
        hidden_dims=(),
        activation="elu",
        norm="batch",
    ),
    TransformerLMParams(vocab_size=7, context_length=5, d_model=8, n_layers=1, n_heads=2, tie_embeddings=False),
]


@pytest.mark.parametrize("params", FIXED, ids=lambda params: params.kind)
def test_equal_weights_give_equal_outputs_gradients_and_statistics(params: NNParams) -> None:
    """In training mode: BatchNorm's statistics after one pass too, biased as Flax's are."""
    check_equal(params, train=True)


@pytest.mark.slow
@settings(max_examples=40, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # an example takes a second
@given(params=st.one_of(DENSE, IMAGES, TEXT), train=st.booleans(), seed=st.integers(0, 2**20))
def test_equal_weights_give_equal_numbers_at_any_size(params: NNParams, train: bool, seed: int) -> None:
    check_equal(params, train=train, seed=seed)


# -- first weights -----------------------------------------------------------------------------------------------------


def test_first_weights_come_from_the_seed_alone() -> None:
    params = ConvParams(input_shape=(4, 4, 1), output_dim=2, channels=(3,), norm="batch")
    before = torch.random.get_rng_state()
    one, same, other = (build_net(params, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["convs.0.weight"], other["convs.0.weight"])


BIG = [
    FeedForwardParams(input_dim=50, output_dim=3, hidden_dims=(400,), norm="batch"),
    ConvParams(input_shape=(2, 2, 20), output_dim=3, channels=(60,), hidden_dims=(), norm="layer"),
    TransformerLMParams(vocab_size=300, context_length=40, d_model=64, n_layers=1, tie_embeddings=False),
]


@pytest.mark.parametrize(
    "params", [BIG[0], *(pytest.param(net, marks=pytest.mark.slow) for net in BIG[1:])], ids=lambda params: params.kind
)
def test_first_weights_have_the_distributions_of_flax(params: NNParams) -> None:
    """Two samples of one distribution: their largest distance between shares below a value is within the bound of
    Dvoretzky, Kiefer, Wolfowitz and Massart at 1e-6; what is not random is equal."""
    pure = PureModule(flax_nets.build_net(params, rngs=nnx.Rngs(3)))
    theirs = {name: np.asarray(value) for name, value in {**pure.params, **pure.model_state}.items()}
    ours = torch_to_flax(params, build_net(params, 3).state_dict())
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}
    random = 0
    for name, value in theirs.items():
        if len(np.unique(value)) == 1:
            np.testing.assert_array_equal(ours[name], value, err_msg=name)
            continue
        random += 1
        a, b = np.sort(value.ravel()), np.sort(ours[name].ravel())
        every = np.concatenate([a, b])
        apart = np.abs(np.searchsorted(a, every, "right") - np.searchsorted(b, every, "right")).max() / a.size
        assert apart <= 2 * np.sqrt(np.log(2 / 1e-6) / (2 * a.size)), name
        assert np.abs(b).max() <= 1.5 * np.abs(a).max(), name  # cut where Flax cuts
    assert random >= 2


def test_without_a_seed_a_net_has_names_and_no_memory() -> None:
    for params in BIG:
        shapes = {n: (v.shape, v.dtype) for n, v in build_net(params, 0).state_dict().items()}
        outline = build_net(params, None).state_dict()
        assert {n: (v.shape, v.dtype) for n, v in outline.items()} == shapes
        assert all(value.is_meta for value in outline.values())


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_bytes_become_floats_and_nothing_wraps() -> None:
    """case:L09 - uint8 250 and 250 reach the model as 250/255 each, their sum is 500/255 and not 244."""
    net: Any = build_net(FeedForwardParams(input_dim=2, output_dim=1, hidden_dims=()), 0)
    torch.nn.init.ones_(net.head.weight)
    assert float(net(torch.tensor([[250, 250]], dtype=torch.uint8)).detach()) == pytest.approx(500 / 255)
    assert float(net(torch.tensor([[250, 250]], dtype=torch.int32)).detach()) == 500.0
    assert float(net(torch.tensor([[True, True]])).detach()) == 2.0


def test_images_of_any_layout_are_the_same() -> None:
    net = build_net(ConvParams(input_shape=(4, 4, 1), output_dim=3, channels=(2, 3), hidden_dims=()), 0)
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 4, 4, 1)).astype(np.uint8))
    wanted, *others = (net(x.reshape(shape)) for shape in ((2, 4, 4, 1), (2, 4, 4), (2, 16)))
    assert wanted.shape == (2, 3)
    assert all(torch.equal(other, wanted) for other in others)


def test_any_integer_type_is_an_id() -> None:
    net = build_net(TransformerLMParams(vocab_size=11, context_length=6, d_model=8, n_heads=2, n_layers=1), 0)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 11, (2, 6)))
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(net(ids.to(dtype)), net(ids))


TEXT_6 = TransformerLMParams(vocab_size=9, context_length=6, d_model=4)


@pytest.mark.parametrize(
    "params, x, message",
    [
        (FeedForwardParams(input_dim=4, output_dim=2), torch.ones(3, 5), "built for 4 inputs a row, the batch has 5"),
        (
            ConvParams(input_shape=(4, 4, 1), output_dim=2),
            torch.ones(3, 4, 5),
            r"rows of \(4, 4, 1\), the batch has \(4, 5\)",
        ),
        (
            TransformerLMParams(vocab_size=9, context_length=6),
            torch.zeros(1, 7, dtype=torch.int64),
            "batch has 7 tokens",
        ),
        (TransformerLMParams(vocab_size=9, context_length=6), torch.zeros(1, 3), "needs integer ids"),
        (TransformerLMParams(vocab_size=9, context_length=6), torch.zeros(1, 3) > 0, "needs integer ids"),
    ],
)
def test_batches_of_another_size_are_refused(params: NNParams, x: torch.Tensor, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_net(params, 0)(x)


# -- where torch's own layers differ -----------------------------------------------------------------------------------


def test_padding_is_left_out_by_leaving_rows_out() -> None:
    """case:E03 - real rows 7 and 5 after the padding is dropped: running mean 0.6, variance 1.0 (torch's own: 1.1)."""
    norm = BatchNorm(1)
    norm(torch.tensor([[7.0], [5.0]]))
    assert (float(norm.running_mean), float(norm.running_var)) == (pytest.approx(0.6), pytest.approx(1.0))


def test_one_row_has_no_variance_and_no_row_moves_nothing() -> None:
    """case:E02 - the answer on a batch of one is Flax's: output 0, running mean 0.7, variance 0.9."""
    norm = BatchNorm(1)
    y = norm(torch.tensor([[7.0]]))
    assert (float(y.detach()), float(norm.running_mean), float(norm.running_var)) == pytest.approx((0, 0.7, 0.9))
    y = norm(torch.zeros(0, 1))
    y.sum().backward()
    assert (float(norm.running_mean), float(norm.running_var)) == pytest.approx((0.7, 0.9))
    assert norm.weight.grad is not None


def test_norms_compute_in_float32() -> None:
    """A mean of 514 is not a bfloat16 number."""
    norm = BatchNorm(1)
    y = norm(torch.tensor([[512.0], [516.0]], dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert y.float().flatten().tolist() == pytest.approx([-1, 1], abs=1e-2)
    assert float(norm.running_mean) == pytest.approx(51.4, rel=1e-6)


def test_sixteen_bit_weights_give_nearly_the_same() -> None:
    for params in FIXED:
        x, net = torch.from_numpy(batch_for(params, 0)), build_net(params, 0).eval()
        wanted, low = net(x), net.to(torch.bfloat16)(x)
        assert low.dtype == torch.bfloat16
        torch.testing.assert_close(low.float(), wanted, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_have_the_slopes_of_jax_at_zero_too(name: str) -> None:
    """Zero is where one-sided slopes differ, and where values often are: empty pixels and a bias that starts at 0."""
    x = np.array([-3.0, -1.0, 0.0, 1.0, 3.0, 30.0], np.float32)
    theirs = jax.grad(lambda v: flax_nets.activation(name)(v).sum())(jnp.asarray(x))
    tensor = torch.from_numpy(x).requires_grad_()
    ours = ACTIVATIONS[name](tensor)
    ours.sum().backward()
    np.testing.assert_allclose(ours.detach(), flax_nets.activation(name)(jnp.asarray(x)), rtol=4e-6, atol=1e-6)
    assert tensor.grad is not None
    np.testing.assert_allclose(tensor.grad, theirs, rtol=4e-6, atol=1e-6)


def test_the_first_of_equal_pixels_gets_the_gradient() -> None:
    """As in JAX: every pixel of an even image is the largest of its window."""
    params = ConvParams(input_shape=(4, 6, 1), output_dim=2, channels=(3,), kernel_size=1, hidden_dims=())
    both = Both(params)
    x, seen_from = np.ones((ROWS, 4, 6, 1), np.float32), np.ones((ROWS, 2), np.float32)
    ours, theirs = both.torch(x, True, seen_from, torch.float32), both.flax(x, True, seen_from)
    assert np.count_nonzero(theirs["d input"][0]) == 6
    np.testing.assert_allclose(ours["d input"], theirs["d input"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", [1, 2, 3, 4, 5])
def test_padding_keeps_the_size(side: int) -> None:
    layer = Maker(0).conv(2, 3, side)
    assert layer(same_pad(torch.ones(1, 2, 4, 5), side)).shape == (1, 3, 4, 5)


def test_dropout_only_while_training_and_where_flax_has_it() -> None:
    """A share of 0.5 of ones becomes zeros and twos before the head, which adds them up."""
    net: Any = build_net(FeedForwardParams(input_dim=1, output_dim=1, hidden_dims=(2000,), dropout_prob=0.5), 0)
    for value in net.parameters():
        torch.nn.init.ones_(value)
    torch.nn.init.zeros_(net.layers[0].bias)
    torch.nn.init.zeros_(net.head.bias)
    torch.manual_seed(0)
    kept = float(net(torch.ones(1, 1)).detach()) / 2
    assert kept == int(kept)
    assert abs(kept - 1000) < 6 * np.sqrt(2000) / 2
    assert float(net.eval()(torch.ones(1, 1)).detach()) == 2000
    text = TransformerLMParams(vocab_size=5, context_length=4, d_model=4, n_heads=1, n_layers=2, dropout_prob=0.3)
    theirs = nnx.eval_shape(lambda: flax_nets.build_net(text, rngs=nnx.Rngs(0)))
    places = {".".join(map(str, path)) for path, part in nnx.iter_modules(theirs) if isinstance(part, nnx.Dropout)}
    ours = {name for name, part in build_net(text, 0).named_modules() if isinstance(part, torch.nn.Dropout)}
    assert ours == places
    assert len(ours) == 3
    plain = build_net(FeedForwardParams(input_dim=1, output_dim=1), 0)
    assert not any(isinstance(part, torch.nn.Dropout) for part in plain.modules())


# -- building ----------------------------------------------------------------------------------------------------------


def test_open_sizes_are_refused() -> None:
    with pytest.raises(ModelError, match="feed_forward has no input_dim and no output_dim"):
        build_net(FeedForwardParams(), 0)


def test_a_net_of_the_users() -> None:
    @register("test_torch_linear")
    class LinearParams(NNParams):
        wrong: bool = False

        def build_torch(self, *, seed: int, info: Any) -> Any:
            return object() if self.wrong else torch.nn.Linear(info["input_dim"], seed)

    net = build_net(LinearParams(), 2, info={"input_dim": 3})
    assert isinstance(net, torch.nn.Linear)
    assert net.weight.shape == (2, 3)
    with pytest.raises(ModelError, match="'test_torch_linear' built a object"):
        build_net(LinearParams(wrong=True), 0)

    @register("test_torch_nothing")
    class NothingParams(NNParams):
        pass

    with pytest.raises(ConfigError, match="there is no torch net 'test_torch_nothing'"):
        build_net(NothingParams(), 0)
