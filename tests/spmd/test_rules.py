"""Rules of sharding: which comes first, what lies like a parameter, and what is refused with its arithmetic."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from nnx_jax.core.errors import ConfigError
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.nets import build_net
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import FeedForwardParams, NNParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import NNTrainParams
from nnx_jax.spmd.mesh import ShardingSpec, make_sharding
from nnx_jax.spmd.rules import shardings_for

WIDTHS: dict[str, tuple[int, ...]] = {"up.kernel": (6, 16), "up.bias": (16,), "down.kernel": (16, 6), "scale": ()}


def split(sizes: dict[str, int], shapes: Any = WIDTHS, *, net: Any = (), **rules: Any) -> dict[str, Any]:
    """The split of every parameter on a mesh; rules by pattern, with `_` for a dot."""
    spec = make_sharding(sizes, rules={name.replace("_", "."): entries for name, entries in rules.items()})
    assert spec is not None
    return {path: place.spec for path, place in dataclasses.replace(spec, net_rules=net).params(shapes).items()}


def test_a_mesh_for_data_splits_no_parameter() -> None:
    assert set(split({"data": 4}).values()) == {P()}


def test_fsdp_splits_the_largest_dimension_that_divides() -> None:
    """pipekit:J14 by hand: 16 over 4; of equal ones the first; where none divides, or there is none, it is whole."""
    assert split({"fsdp": 4}) == {
        "up.kernel": P(None, "fsdp"), "up.bias": P("fsdp"), "down.kernel": P("fsdp"), "scale": P(),
    }  # fmt: skip
    shapes = {"square": (8, 8), "odd": (6, 9), "smaller": (10, 8), "long": (3, 4, 12, 5), "none": (0, 4)}
    assert split({"fsdp": 4}, shapes) == {
        "square": P("fsdp"), "odd": P(), "smaller": P(None, "fsdp"), "long": P(None, None, "fsdp"),
        "none": P(None, "fsdp"),
    }  # fmt: skip


def test_what_comes_first() -> None:
    """The user's first rule that matches; the net's for `tensor`, with fsdp on what that leaves; fsdp."""
    shapes = {"up.kernel": (6, 16), "up.bias": (16,), "down.kernel": (16, 6)}
    net = {"up.kernel": (None, "tensor"), "*.kernel": ("tensor", None)}
    assert split({"fsdp": 2, "tensor": 2}, shapes, net=net) == {
        "up.kernel": P("fsdp", "tensor"), "up.bias": P("fsdp"), "down.kernel": P("tensor", "fsdp"),
    }  # fmt: skip
    own = {"up_*": [None, "fsdp"], "up_kernel": ["tensor"]}
    assert split({"fsdp": 2, "tensor": 2}, {"up.kernel": (6, 16), "down.kernel": (16, 6)}, net=net, **own) == {
        "up.kernel": P(None, "fsdp"), "down.kernel": P("tensor", "fsdp"),
    }  # fmt: skip


def test_an_axis_of_one_device_splits_nothing() -> None:
    """A configuration that names `tensor` in its rules runs on a mesh without it; so does an axis of one's own."""
    assert split({"data": 4}, up_kernel=[None, "tensor"])["up.kernel"] == P()
    assert split({"data": 4, "expert": 1}, up_kernel=["expert"])["up.kernel"] == P()
    assert split({"data": 2, "expert": 2}, up_kernel=["expert"])["up.kernel"] == P("expert")


def test_several_axes_on_one_dimension() -> None:
    assert split({"data": 2, "fsdp": 2}, down_kernel=[["data", "fsdp"]])["down.kernel"] == P(("data", "fsdp"))


# What is refused ------------------------------------------------------------------------------------------------------


def test_an_axis_that_does_not_divide() -> None:
    """pipekit:J14: leaf, shape, size and the arithmetic."""
    told = r"sharding: the rule 'up.\*' splits dimension 0 of 'up.kernel', shape \[10, 16\], over 'tensor', and 4 does "
    with pytest.raises(ConfigError, match=told + r"not divide 10 \(10 = 4 x 2 \+ 2\); .* write null there"):
        split({"tensor": 4}, {"up.kernel": (10, 16)}, **{"up_*": ["tensor"]})
    with pytest.raises(ConfigError, match=r"over 'data' and 'fsdp', and 4 does not divide 6 \(6 = 4 x 1 \+ 2\)"):
        split({"data": 2, "fsdp": 2}, {"a": (6,)}, a=[["data", "fsdp"]])


def test_a_nets_rule_that_does_not_divide() -> None:
    """What to change: the net's size, or a rule that keeps the parameter whole, which the message writes out."""
    with pytest.raises(ConfigError, match=r"65 = 2 x 32 \+ 1\).*sharding: \{\"embed.embedding\": \[\]\}"):
        split({"tensor": 2}, {"embed.embedding": (65, 8)}, net={"embed.embedding": ("tensor", None)})
    shapes = {"embed.embedding": (65, 8), "up": (8, 8)}
    net = {"embed.embedding": ("tensor", None), "up": (None, "tensor")}
    assert split({"tensor": 2}, shapes, net=net, embed_embedding=[])["embed.embedding"] == P()


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"up.kernel": [None, "tensr"]}, r"names the axis 'tensr'; .*did you mean 'tensor'"),
        ({"up.kernel": ["data", "data"]}, r"names the axis 'data' 2 times"),
        ({"up.kernle": ["data"]}, r"'up.kernle' matches no parameter; did you mean 'up.kernel'"),
        ({"up.bias": [None, "data"]}, r"has 2 entries, but 'up.bias' has shape \[16\]; write 1 or fewer"),
    ],
)
def test_rules_that_fit_nothing(rules: dict[str, Any], told: str) -> None:
    """pipekit:J14: each with the nearest name, or the numbers."""
    with pytest.raises(ConfigError, match=told):
        split({"data": 4}, **{name.replace(".", "_"): entries for name, entries in rules.items()})


def test_a_configuration_says_it_before_there_is_a_net() -> None:
    """With the place in the file; the rules are no part of the run's id."""
    plain = RunSpec(model=NNModelParams(net=FeedForwardParams()), train=NNTrainParams(n_epochs=1))
    ruled = plain.replace(mesh={"tensor": 2}, sharding={"head.kernel": [None, "tensor"], "*.bias": [["data", "fsdp"]]})
    assert ruled.sharding == {"head.kernel": (None, "tensor"), "*.bias": (("data", "fsdp"),)}
    assert ruled.run_id() == plain.run_id()
    with pytest.raises(ConfigError, match=r"sharding.head.kernel: names the axis 'tensr'; .*did you mean 'tensor'"):
        plain.replace(sharding={"head.kernel": [None, "tensr"]})
    with pytest.raises(ConfigError, match="mesh: only one axis can be -1"):
        plain.replace(mesh={"data": -1, "fsdp": -1})


def test_tensor_without_a_rule() -> None:
    """Half of the devices would do what the others do; the message writes a rule for this very net."""
    with pytest.raises(ConfigError, match=r"mesh: tensor: 2 splits nothing.*\{\"up.kernel\": \[null, tensor\]\}"):
        split({"tensor": 2})


# The built-in nets ----------------------------------------------------------------------------------------------------

NETS = {
    "feed_forward": (
        {"hidden_dims": (8, 8, 8), "norm": "layer"},
        {"input_dim": 3, "output_dim": 5},
        ["layers.1.bias", "norms.1.*", "head.bias"],
    ),
    "conv": (
        {"channels": (4, 4), "hidden_dims": (8,), "norm": "batch"},
        {"input_shape": (4, 4, 1), "n_classes": 5},
        ["convs.1.bias", "norms.1.*", "head.head.bias"],
    ),
    "transformer_lm": (
        {"d_model": 8, "n_heads": 2, "tie_embeddings": False},
        {"vocab_size": 6, "context_length": 4},
        ["positions", "norm.*", "blocks.*.norm_*", "blocks.*.out.bias", "blocks.*.down.bias"],
    ),
}


@pytest.mark.parametrize("kind", NETS)
def test_built_in_nets_split_their_layers(kind: str) -> None:
    """What stays whole is named here: it belongs to outputs that are added up over devices. No rule is for nothing."""
    settings, info, whole = NETS[kind]
    params = NNParams.from_state({"kind": kind, **settings})
    net: Any = build_net(params, rngs=nnx.Rngs(0), info=info)
    shapes = {name: tuple(value.shape) for name, value in PureModule(net).params.items()}
    found = split({"tensor": 2}, shapes, net=net.sharding_rules())
    named = {path for path in shapes if any(fnmatchcase(path, pattern) for pattern in whole)}
    assert {path for path, entries in found.items() if entries == P()} == named
    for pattern in net.sharding_rules():
        assert any(fnmatchcase(path, pattern) for path in shapes), pattern


# Trees ----------------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """A layer as Equinox would write it."""

    weight: Any
    bias: Any


def tree() -> Any:
    """A model of dataclasses in a list, and a scalar."""
    layers = [Linear(jnp.zeros((4, 8)), jnp.zeros(8)), Linear(jnp.zeros((8, 4)), jnp.zeros(4))]
    return {"layers": layers, "scale": jnp.float32(1)}


def test_a_tree_of_dataclasses_and_its_optimizer() -> None:
    """pipekit:J14: moments lie like their parameters, counts and scalars are whole; `device_put` takes it."""
    spec = make_sharding({"fsdp": 2, "tensor": 2}, rules={"layers.*.weight": [None, "tensor"]})
    assert spec is not None
    model = tree()
    found = shardings_for(model, spec)
    assert [layer.weight.spec for layer in found["layers"]] == [P(None, "tensor")] * 2
    assert [layer.bias.spec for layer in found["layers"]] == [P("fsdp")] * 2
    assert found["scale"].spec == P()
    state = optax.adam(1e-2).init(model)
    placed = jax.device_put(state, shardings_for(state, spec, params=model))
    assert placed[0].mu["layers"][0].weight.sharding.spec == P(None, "tensor")
    assert placed[0].nu["layers"][1].bias.sharding.spec == P("fsdp")
    assert placed[0].count.sharding.is_fully_replicated


def test_arrays_of_another_shape_are_whole() -> None:
    """The path alone is not enough, nor the shape: a factored moment, a table that happens to have a weight's shape."""
    spec = make_sharding({"fsdp": 4})
    params = {"w": jnp.zeros((4, 8))}
    state = {"row": {"w": jnp.zeros(4)}, "other": jnp.zeros((4, 8)), "mu": {"w": jnp.zeros((4, 8))}, "note": "text"}
    found = shardings_for(state, spec, params=params)
    assert (found["row"]["w"].spec, found["other"].spec, found["mu"]["w"].spec) == (P(), P(), P(None, "fsdp"))
    assert found["note"] is None


# ShardingSpec from Python ---------------------------------------------------------------------------------------------


def test_one_split_for_the_whole_model() -> None:
    """pipekit:J2: P("data") on a 4 x 4 layer and Adam's moments; what has fewer dimensions than the split is whole."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    model = {"weight": jnp.zeros((4, 4)), "bias": jnp.zeros(4)}
    state = optax.adam(1e-2).init(model)
    found = shardings_for(state, ShardingSpec(mesh, P("data"), P("data")), params=model)
    assert (found[0].mu["weight"].spec, found[0].mu["bias"].spec, found[0].count.spec) == (P("data"), P("data"), P())
    wide = ShardingSpec(mesh, P(None, "data"), P("data")).params({"weight": (4, 4), "bias": (4,)})
    assert (wide["weight"].spec, wide["bias"].spec) == (P(None, "data"), P())
    full = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    mixed = ShardingSpec(full, P(None, "fsdp"), P("fsdp")).params({"weight": (4, 4), "bias": (4,)})
    assert (mixed["weight"].spec, mixed["bias"].spec) == (P(None, "fsdp"), P("fsdp"))
    with pytest.raises(ConfigError, match=r"model_pspec splits dimension 0 of 'weight'.* \(3 = 2 x 1 \+ 1\)"):
        ShardingSpec(mesh, P("data")).params({"weight": (3, 4)})


def test_a_replicated_model() -> None:
    """pipekit:J1: with nothing to split by, every parameter, moment and count is whole."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    model = tree()
    found = shardings_for((model, optax.adam(1e-2).init(model)), ShardingSpec(mesh, P(), P("data")), params=model)
    assert {place.spec for place in jax.tree.leaves(found)} == {P()}


def test_explicit_axes_become_automatic() -> None:
    """pipekit:J13: `jax.make_mesh` makes explicit axes by default, for which XLA inserts no collectives."""
    explicit = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    auto = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    assert ShardingSpec(explicit).mesh.axis_types == (AxisType.Auto,)
    assert ShardingSpec(explicit) == ShardingSpec(auto) == ShardingSpec(Mesh(np.array(jax.devices()[:2]), ("data",)))


def test_rules_may_be_a_mapping_and_the_spec_is_frozen() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spec = ShardingSpec(mesh, rules={"w": [None, "tensor"]})  # type: ignore[arg-type]
    assert spec.rules == (("w", P(None, "tensor")),)
    assert spec == ShardingSpec(mesh, rules=(("w", P(None, "tensor")),))
    assert hash(spec) == hash(ShardingSpec(mesh, rules=(("w", P(None, "tensor")),)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.mesh = mesh  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"data_pspec: .*names the axis 'rows'"):
        ShardingSpec(mesh, data_pspec=P("rows"))
