"""LoRA: the same outputs until it is trained, the paper's formula after, plain layers again once merged."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ModelError
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.nets.lora import add_lora, all_but_lora, is_adapted, merge_lora


class Own(nnx.Linear):
    """A linear layer of the user's."""


class Doubled(nnx.Linear):
    """One that computes something else."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        return 2.0 * super().__call__(inputs)


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs), Own(4, 4, rngs=rngs)])
        self.again = self.rest[0]
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for layer in self.rest:
            x = layer(jnp.tanh(x))
        return self.norm(self.again(x))


X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def names(module: nnx.Module) -> set[str]:
    return set(PureModule(module).params)


def trained(module: Any) -> Any:
    """The net with additions that are not 0."""
    for layer in (module.first, *module.rest):
        if is_adapted(layer):
            layer.lora_b.set_value(jnp.asarray(np.random.default_rng(1).normal(size=layer.lora_b.shape), jnp.float32))
    return module


def test_outputs_stay_until_the_addition_is_trained() -> None:
    plain, net = Net(), add_lora(Net(), rank=2)
    assert jnp.array_equal(plain(X), net(X))  # pyright: ignore[reportCallIssue]
    assert names(net) - names(plain) == {
        f"{layer}.{part}" for layer in ("first", "again", "rest.1") for part in ("lora_a", "lora_b")
    }


def test_the_addition_is_scaled_by_alpha_over_rank() -> None:
    net: Any = trained(add_lora(Net(), rank=2, alpha=3.0, patterns=["first"]))
    layer = net.first
    weight = np.asarray(layer.kernel[...]) + 1.5 * np.asarray(layer.lora_a[...]) @ np.asarray(layer.lora_b[...])
    np.testing.assert_allclose(layer(X), np.asarray(X) @ weight + np.asarray(layer.bias[...]), rtol=1e-5, atol=1e-5)


def test_a_merged_network_is_plain_and_computes_the_same() -> None:
    net: Any = trained(add_lora(Net(), rank=2))
    outputs = net(X)
    merged: Any = merge_lora(net)
    np.testing.assert_allclose(merged(X), outputs, rtol=1e-4, atol=1e-4)
    assert (type(merged.first), type(merged.rest[1]), merged.again is merged.rest[0]) == (nnx.Linear, Own, True)
    assert names(merged) == names(Net())
    with pytest.raises(ModelError, match="no low-rank addition"):
        merge_lora(merged)


def test_a_layer_used_twice_gets_one_addition() -> None:
    net: Any = add_lora(Net(), rank=1)
    assert net.again is net.rest[0]
    assert net.again.lora_a is net.rest[0].lora_a


def test_the_network_is_a_pure_function_as_before() -> None:
    """The same numbers in float32 through the step's own forward pass; in bfloat16 about the same."""
    net: Any = trained(add_lora(Net(), rank=2))
    key = jax.random.key(0)
    for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 0.1)):
        pure = PureModule(net, compute_dtype=dtype)
        outputs, _ = jax.jit(lambda p, s, pure=pure: pure.forward(p, s, {"x": X}, key, True))(
            pure.params, pure.model_state
        )
        np.testing.assert_allclose(outputs, net(X), rtol=tolerance, atol=tolerance)


def test_all_but_the_additions_are_left_alone() -> None:
    net = add_lora(Net(), rank=2, patterns=["rest.*", "again"])
    assert set(all_but_lora(net)) == names(Net())
    assert set(all_but_lora(net, train=["norm.*", "*.bias"])) == {"first.kernel", "again.kernel", "rest.1.kernel"}
    assert all_but_lora(Net()) == ()
    with pytest.raises(ModelError, match="pattern 'norms.\\*' matches no parameter; did you mean 'norm"):
        all_but_lora(net, train=["norms.*"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rank": 0}, "rank of 1 or more, got 0"),
        ({"rank": 2.0}, "rank of 1 or more, got 2.0"),
        ({"alpha": 0.0}, "alpha above 0, got 0.0"),
        ({"patterns": ["fist"]}, "pattern 'fist' matches no linear layer; did you mean 'first'"),
        ({"patterns": ["norm"]}, "matches no linear layer"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        add_lora(Net(), **options)


def test_a_layer_that_computes_something_else_is_no_linear_layer() -> None:
    """An addition to its output could not be merged into its weights."""
    net: Any = Net()
    net.first = Doubled(3, 4, rngs=nnx.Rngs(0))
    assert not is_adapted(add_lora(net).first)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ModelError, match="pattern 'first' matches no linear layer"):
        add_lora(net, patterns="first")


def test_a_second_addition_is_refused() -> None:
    with pytest.raises(ModelError, match="layer 'first' has a low-rank addition already"):
        add_lora(add_lora(Net(), patterns="first"), patterns="first")


def test_a_refused_addition_changes_nothing() -> None:
    """One layer has an addition already, and the layers before it get none."""
    net = add_lora(Net(), rank=2, patterns=["rest.1"])
    before = names(net)
    with pytest.raises(ModelError, match="has a low-rank addition already"):
        add_lora(net, rank=2)
    assert names(net) == before
