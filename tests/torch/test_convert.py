"""Weights between Flax and torch: layer by layer, whole nets, stored runs; single arrays without a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from torch import nn

from nnx_jax import DigitsDataset, NNDataParams, NNModel, NNTrainParams
from nnx_jax.core.errors import ModelError
from nnx_jax.core.registry import register
from nnx_jax.params.net import ConvParams, FeedForwardParams, NNParams, TransformerLMParams
from nnx_jax.runs.resume import find_point
from nnx_jax.runs.transforms import model_arrays
from nnx_jax.torch.convert import (
    Layer,
    flax_to_torch,
    layers_of,
    open_arrays,
    to_jax,
    to_numpy,
    to_torch,
    torch_to_flax,
)
from nnx_jax.torch.nets import build_net


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Equal names, dtypes, shapes and bytes."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == np.asarray(array, order="C").tobytes(), name


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


# -- layer by layer: what torch computes with converted weights is what Flax computes ----------------------------------


def made(make: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A Flax module with random values everywhere (nothing is compiled for them), and its arrays by name."""
    rng = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(make))

    def value(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return jnp.asarray(0.5 + rng.random(leaf.shape), leaf.dtype)

    module = nnx.merge(graph, jax.tree.map(value, state))
    flat = nnx.to_flat_state(nnx.state(module, (nnx.Param, nnx.BatchStat)))
    return module, {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in flat}


RUN = nnx.jit(lambda module, *inputs: module(*inputs))


def loaded(module: nn.Module, arrays: dict[str, np.ndarray]) -> nn.Module:
    module.load_state_dict({name: to_torch(value) for name, value in arrays.items()}, strict=True)
    return module.eval()


def channels_last(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.moveaxis(x, -1, 1).copy())


IMAGE = numbers(2, 6, 5, 4)
ROWS = numbers(3, 4)
PAIRS: list[tuple[str, Layer, Any, Any, np.ndarray]] = [
    ("linear", Layer("linear"), lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)), lambda: nn.Linear(4, 3), ROWS),
    (
        "linear_no_bias",
        Layer("linear", bias=False),
        lambda: nnx.Linear(4, 3, use_bias=False, rngs=nnx.Rngs(0)),
        lambda: nn.Linear(4, 3, bias=False),
        ROWS,
    ),
    (
        "embedding",
        Layer("embedding"),
        lambda: nnx.Embed(5, 3, rngs=nnx.Rngs(0)),
        lambda: nn.Embedding(5, 3),
        np.arange(4),
    ),
    (
        "layer_norm",
        Layer("layer_norm"),
        lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
        lambda: nn.LayerNorm(4, eps=1e-6),
        ROWS,
    ),
    ("rms_norm", Layer("rms_norm"), lambda: nnx.RMSNorm(4, rngs=nnx.Rngs(0)), lambda: nn.RMSNorm(4, eps=1e-6), ROWS),
    (
        "group_norm",
        Layer("group_norm"),
        lambda: nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0)),
        lambda: nn.GroupNorm(2, 4, eps=1e-6),
        IMAGE,
    ),
    (
        "batch_norm",
        Layer("batch_norm"),
        lambda: nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0)),
        lambda: nn.BatchNorm2d(4),
        IMAGE,
    ),
    (
        "batch_norm_bare",
        Layer("batch_norm", bias=False, scale=False),
        lambda: nnx.BatchNorm(4, use_running_average=True, use_bias=False, use_scale=False, rngs=nnx.Rngs(0)),
        lambda: nn.BatchNorm2d(4, affine=False),
        IMAGE,
    ),
    (
        "conv_1d",
        Layer("conv"),
        lambda: nnx.Conv(4, 6, 3, padding="VALID", rngs=nnx.Rngs(0)),
        lambda: nn.Conv1d(4, 6, 3),
        IMAGE[0],
    ),
    (
        "conv_2d_groups",
        Layer("conv"),
        lambda: nnx.Conv(4, 6, (2, 3), feature_group_count=2, padding="VALID", rngs=nnx.Rngs(0)),
        lambda: nn.Conv2d(4, 6, (2, 3), groups=2),
        IMAGE,
    ),
    (
        "conv_3d",
        Layer("conv", bias=False),
        lambda: nnx.Conv(4, 3, (1, 2, 3), use_bias=False, padding="VALID", rngs=nnx.Rngs(0)),
        lambda: nn.Conv3d(4, 3, (1, 2, 3), bias=False),
        IMAGE[None],
    ),
]


@pytest.mark.parametrize("layer, flax, torch_, x", [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
def test_a_layer_computes_the_same_with_converted_weights(layer: Layer, flax: Any, torch_: Any, x: np.ndarray) -> None:
    (theirs, weights), ours = made(flax), torch_()
    converted = flax_to_torch({"": layer}, weights)
    last = isinstance(ours, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.GroupNorm | nn.BatchNorm2d)
    y = loaded(ours, converted)(channels_last(x) if last else torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(np.moveaxis(y, 1, -1) if last else y, RUN(theirs, x), rtol=2e-5, atol=2e-5)
    assert layers_of(ours) == {"": Layer(**{**layer.__dict__, "torch": ""})}
    same(torch_to_flax({"": layer}, converted), weights)
    same(torch_to_flax(ours, ours.state_dict()), weights)


@pytest.mark.parametrize("bias", [True, False])
def test_attention_computes_the_same_with_converted_weights(bias: bool) -> None:
    theirs, weights = made(lambda: nnx.MultiHeadAttention(2, 6, use_bias=bias, decode=False, rngs=nnx.Rngs(0)))
    ours = nn.MultiheadAttention(6, 2, bias=bias, batch_first=True)
    layer = Layer("attention", heads=2, bias=bias)
    x, past = numbers(3, 5, 6), numbers(3, 4, 6)
    found, _ = loaded(ours, flax_to_torch({"": layer}, weights))(*map(torch.from_numpy, (x, past, past)))
    np.testing.assert_allclose(found.detach(), RUN(theirs, x, past, past), rtol=2e-5, atol=2e-5)
    assert layers_of(ours) == {"": Layer("attention", torch="", heads=2, bias=bias)}
    same(torch_to_flax(ours, ours.state_dict()), weights)


class FlaxOwn(nnx.Module):
    """A network of the user's that flattens an image."""

    def __init__(self) -> None:
        self.stem = nnx.Conv(2, 3, (3, 3), padding="SAME", rngs=nnx.Rngs(0))
        self.out = nnx.Linear(4 * 5 * 3, 6, rngs=nnx.Rngs(0))
        self.gain = nnx.Param(jnp.ones(6))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.stem(x))
        return self.out(x.reshape(len(x), -1)) * self.gain


class TorchOwn(nn.Module):
    """The same as torch's users write it: channels first, and flattened so."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.ReLU(), nn.Flatten())
        self.out = nn.Linear(3 * 4 * 5, 6)
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.features(x)) * self.gain


def test_a_module_of_ones_own_and_the_order_after_a_convolution() -> None:
    (theirs, weights), ours = made(FlaxOwn), TorchOwn()
    layers = layers_of(ours, names={"features.0": "stem"}, flatten={"out": (3, 4, 5)})
    assert layers == {
        "stem": Layer("conv", torch="features.0"),
        "out": Layer("linear", torch="out", flatten=(3, 4, 5)),
        "gain": Layer("array", torch="gain"),
    }
    x = numbers(2, 4, 5, 2)
    found = loaded(ours, flax_to_torch(layers, weights))(channels_last(x)).detach()
    np.testing.assert_allclose(found, RUN(theirs, x), rtol=2e-5, atol=2e-4)
    same(torch_to_flax(layers, ours.state_dict()), weights)


# -- round trips -------------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 5)
DTYPES = st.sampled_from([np.float32, np.float16, np.float64, bfloat16])


@st.composite
def some_layer(draw: st.DrawFn) -> tuple[Layer, dict[str, np.ndarray]]:
    """A layer of any kind and size, and random bits for its Flax arrays."""
    a, b, heads = draw(SIZES), draw(SIZES), draw(SIZES)
    kind = draw(st.sampled_from(["linear", "flattened", "conv", "embedding", "layer_norm", "batch_norm", "attention"]))
    bias, lora = draw(st.booleans()), draw(st.booleans())
    layer = Layer(kind if kind not in ("flattened", "attention") else "linear", bias=bias)
    shapes: dict[str, tuple[int, ...]] = {}
    if kind in ("linear", "flattened"):
        places = draw(st.lists(SIZES, min_size=1, max_size=3))
        inputs = a * int(np.prod(places)) if kind == "flattened" else a
        flatten = (a, *places) if kind == "flattened" else None
        layer = Layer("linear", bias=bias, flatten=flatten, lora=lora)
        shapes = {"kernel": (inputs, b)} | ({"lora_a": (inputs, heads), "lora_b": (heads, b)} if lora else {})
        shapes |= {"bias": (b,)} if bias else {}
    elif kind == "conv":
        window = draw(st.lists(SIZES, min_size=1, max_size=3))
        shapes = {"kernel": (*window, a, b)} | ({"bias": (b,)} if bias else {})
    elif kind == "embedding":
        shapes = {"embedding": (a, b)}
    elif kind == "attention":
        layer, width = Layer("attention", bias=bias, heads=heads), heads * a
        for name in ("query", "key", "value"):
            shapes |= {f"{name}.kernel": (width, heads, a)} | ({f"{name}.bias": (heads, a)} if bias else {})
        shapes |= {"out.kernel": (heads, a, width)} | ({"out.bias": (width,)} if bias else {})
    else:
        shapes = {"scale": (a,)} | ({"bias": (a,)} if bias else {})
        shapes |= {"mean": (a,), "var": (a,)} if kind == "batch_norm" else {}
    dtype = np.dtype(draw(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arrays = {
        name: np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
        for name, shape in shapes.items()
    }
    return layer, arrays


@given(some_layer(), some_layer())
def test_round_trips_keep_every_bit(one: Any, other: Any) -> None:
    """Whatever the bits are, NaNs too, in both directions; bytes are compared."""
    layers = {"first": one[0], "blocks.1": other[0]}
    weights = {f"first.{n}": v for n, v in one[1].items()} | {f"blocks.1.{n}": v for n, v in other[1].items()}
    out = flax_to_torch(layers, weights)
    assert all(array.flags.c_contiguous for array in out.values())
    back = torch_to_flax(layers, {name: to_torch(value) for name, value in out.items()})
    same(back, weights)
    same(flax_to_torch(layers, back), out)


NETS = [
    FeedForwardParams(input_dim=3, output_dim=2, hidden_dims=(4, 5), norm="batch"),
    ConvParams(input_shape=(5, 4, 2), output_dim=3, channels=(3, 4), kernel_size=2, norm="layer"),
    TransformerLMParams(vocab_size=7, context_length=5, d_model=8, n_layers=2, n_heads=2),
    TransformerLMParams(vocab_size=7, context_length=5, d_model=8, n_layers=1, n_heads=2, tie_embeddings=False),
]


@pytest.mark.parametrize("params", NETS, ids=lambda params: params.kind)
def test_built_in_nets_go_there_and_back(params: NNParams) -> None:
    held = {name: to_numpy(value) for name, value in build_net(params, 0).state_dict().items()}
    same(flax_to_torch(params, torch_to_flax(params, held)), held)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_missing_and_unknown_names_are_told_together() -> None:
    params = NETS[0]
    weights = torch_to_flax(params, build_net(params, 0).state_dict())
    del weights["head.kernel"], weights["norms.1.var"]
    weights["haed.kernel"] = np.ones((5, 2), np.float32)
    with pytest.raises(ModelError, match=r"missing: 'head.kernel', 'norms.1.var'; not in this net: 'haed.kernel'"):
        flax_to_torch(params, weights)
    held = build_net(params, 0).state_dict()
    del held["head.bias"]
    with pytest.raises(ModelError, match="missing: 'head.bias'$"):
        torch_to_flax(params, held)


def test_a_state_dict_without_counters_is_one_too() -> None:
    params = NETS[0]
    held = build_net(params, 0).state_dict()
    plain = {name: value for name, value in held.items() if not name.endswith("num_batches_tracked")}
    assert len(held) == len(plain) + 2
    same(torch_to_flax(params, plain), torch_to_flax(params, held))


def test_weights_of_another_size_are_refused() -> None:
    params = FeedForwardParams(input_dim=3, output_dim=2, hidden_dims=())
    message = r"head.weight has \(2, 4\), this net \(2, 3\)"
    with pytest.raises(ModelError, match=message):
        flax_to_torch(params, {"head.kernel": np.ones((4, 2)), "head.bias": np.ones(2)})
    with pytest.raises(ModelError, match=message):
        torch_to_flax(params, {"head.weight": torch.ones(2, 4), "head.bias": torch.ones(2)})


@pytest.mark.parametrize(
    "layer, arrays, message",
    [
        ("linear", {"kernel": (2, 3, 4), "bias": (4,)}, r"layer 'a' of kind linear has kernel \(2, 3, 4\)"),
        ("conv", {"kernel": (2, 3), "bias": (3,)}, "a convolution has 3 dimensions or more"),
        (
            Layer("linear", bias=False, flatten=(2, 2)),
            {"kernel": (5, 3)},
            r"flatten=\(2, 2\) are 4 inputs, it has 5",
        ),
        (
            Layer("attention", bias=False, heads=2),
            {f"{name}.kernel": (3, 2, 4) for name in ("query", "key", "value", "out")},
            "torch's attention has one width",
        ),
    ],
)
def test_shapes_that_no_such_layer_has(layer: Any, arrays: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        flax_to_torch({"a": layer}, {f"a.{name}": np.ones(shape) for name, shape in arrays.items()})


def test_heads_must_divide() -> None:
    arrays = {"in_proj_weight": np.ones((12, 4)), "out_proj.weight": np.ones((4, 4))}
    with pytest.raises(ModelError, match="width 4 does not split into 3 heads"):
        torch_to_flax({"": Layer("attention", heads=3, bias=False)}, arrays)
    with pytest.raises(ModelError, match="an attention layer needs heads=N"):
        Layer("attention")
    with pytest.raises(ModelError, match="there is no layer kind 'lineal'; did you mean 'linear'"):
        flax_to_torch({"a": "lineal"}, {})


def test_layers_that_torch_has_and_no_rule_knows() -> None:
    with pytest.raises(ModelError, match="'0.weight_ih_l0' belongs to a LSTM, for which there is no rule"):
        layers_of(nn.Sequential(nn.LSTM(2, 3)))
    with pytest.raises(ModelError, match="the module has no layer 'heed'; did you mean 'head'"):
        layers_of(build_net(NETS[0], None), names={"heed": "top"})
    with pytest.raises(ModelError, match="flatten names '0', which is a ReLU and no linear layer"):
        layers_of(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), flatten={"0": (2, 1)})


# -- stored runs -------------------------------------------------------------------------------------------------------


def test_a_generation_of_one_engine_has_the_names_of_the_other() -> None:
    """Frozen stays frozen, statistics stay statistics, and what is not the model's own is left out."""
    params = FeedForwardParams(input_dim=3, output_dim=2, hidden_dims=(4,), norm="batch")
    weights = torch_to_flax(params, build_net(params, 0).state_dict())
    room = {name: "frozen" if name.startswith("layers") else "params" for name in weights}
    room |= {"norms.0.mean": "model_state", "norms.0.var": "model_state"}
    stored = {f"{room[name]}/{name}": value for name, value in weights.items()}
    opened = open_arrays({**stored, "opt_state/count": np.ones(())}, params, "flax", "torch")
    assert {name: value.shape for name, value in opened.items()} == {
        "frozen/layers.0.weight": (4, 3),
        "frozen/layers.0.bias": (4,),
        "params/norms.0.weight": (4,),
        "params/norms.0.bias": (4,),
        "model_state/norms.0.running_mean": (4,),
        "model_state/norms.0.running_var": (4,),
        "model_state/norms.0.num_batches_tracked": (),
        "params/head.weight": (2, 4),
        "params/head.bias": (2,),
    }
    same(open_arrays(opened, params, "torch", "flax"), stored)
    same(open_arrays(opened, params, "torch", "torch"), opened)


@pytest.mark.slow
def test_a_run_of_flax_opens_in_torch(tmp_path: Path) -> None:
    """The generation of a real run: the torch net predicts what the trained Flax net does; frozen stays frozen."""
    model = NNModel(net_params=FeedForwardParams(hidden_dims=(6,), norm="batch"))
    model.freeze("layers.0")
    data = NNDataParams(train=DigitsDataset(split="train"), batch_size=128)
    run = model.train(NNTrainParams(n_epochs=1), data=data, runs_dir=tmp_path, quiet=True)
    point = find_point(tmp_path, run.id)
    params = NNParams.from_state(point.host["topology"]["net"])
    stored = model_arrays(point)
    opened = open_arrays(stored, params, "flax", "torch")
    assert {name for name in opened if name.startswith("frozen/")} == {"frozen/layers.0.weight", "frozen/layers.0.bias"}
    assert "model_state/norms.0.running_var" in opened
    net = loaded(build_net(params, 0), {name.partition("/")[2]: value for name, value in opened.items()})
    x = DigitsDataset(split="test").arrays()["x"]
    wanted = model.predict_proba(x).probabilities
    found = torch.softmax(net(to_torch(x)), -1).detach()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    back = open_arrays(opened, params, "torch", "flax")
    own = {n: np.asarray(v) for n, v in stored.items() if n.startswith(("params/", "frozen/", "model_state/"))}
    same(back, own)
    assert len(own) < len(stored)
    same(open_arrays(stored, params, "flax", "flax"), own)


def test_what_cannot_be_opened() -> None:
    with pytest.raises(ModelError, match="weights of engine 'equinox' cannot be opened"):
        open_arrays({}, NETS[0], "equinox", "torch")

    @register("convert_own")
    class OwnParams(NNParams):
        pass

    with pytest.raises(ModelError, match="net 'convert_own' is not built in"):
        open_arrays({"params/w": np.ones(1)}, OwnParams(), "flax", "torch")


# -- single arrays -----------------------------------------------------------------------------------------------------


def test_memory_is_shared_where_it_can_be() -> None:
    array = jnp.arange(12, dtype=jnp.float32).reshape(3, 4) + 0
    tensor = to_torch(array, copy=False)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    weights = torch.arange(12.0).reshape(3, 4)
    back = to_jax(nn.Parameter(weights), copy=False)
    assert back.unsafe_buffer_pointer() == weights.data_ptr()
    weights[0, 0] = 7
    assert float(back[0, 0]) == 7
    plain = np.arange(3.0)
    assert to_torch(plain).data_ptr() == plain.ctypes.data
    assert to_numpy(weights).ctypes.data == weights.data_ptr()


def test_a_copy_where_it_is_asked_for_or_needed() -> None:
    array = jnp.arange(3.0) + 0
    assert to_torch(array, copy=True).data_ptr() != array.unsafe_buffer_pointer()
    weights = torch.arange(6.0).reshape(2, 3)
    assert to_jax(weights, copy=True).unsafe_buffer_pointer() != weights.data_ptr()
    for unshared in (weights.T, weights[:, 1:], weights.flatten()[1:]):
        np.testing.assert_array_equal(to_jax(unshared), unshared.numpy())
        with pytest.raises(ModelError, match="cannot be shared with JAX"):
            to_jax(unshared, copy=False)
    backwards = np.arange(3.0)[::-1]
    assert to_torch(backwards).tolist() == [2, 1, 0]
    with pytest.raises(ModelError, match="cannot be shared with torch"):
        to_torch(backwards, copy=False)


def test_dtypes_stay() -> None:
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.bool_):
        array = jnp.ones((2, 2), dtype)
        tensor = to_torch(array)
        assert str(tensor.dtype).removeprefix("torch.") == str(array.dtype)
        assert to_torch(np.asarray(array)).dtype == tensor.dtype
        assert to_torch(np.asarray(array)[::-1]).dtype == tensor.dtype
        assert to_jax(tensor).dtype == array.dtype
        assert to_numpy(tensor).dtype == array.dtype
    assert to_torch(np.float32(2.5)).shape == to_jax(torch.tensor(2.5)).shape == ()
    with pytest.raises(ModelError, match="torch has no dtype for <U1"):
        to_torch(np.array(["a"]))
