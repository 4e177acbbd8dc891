"""Canonical reduction on any mesh: the bits of one device where devices are no power of two and models are split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from nnx_jax.hooks import EMAHook, GradientClipHook
from nnx_jax.optim.build import make_optimizer
from nnx_jax.spmd.mesh import make_sharding
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.shards import _from
from nnx_jax.step.split_update import elementwise, split_update
from nnx_jax.step.state import leaf_paths
from tests.step import canonical_toy as toy

TENSOR = {"q": [None, "tensor"], "e": [None, "tensor"]}
THREE, SPLIT = ({"data": 3}, None), ({"fsdp": 2, "tensor": 2}, {"q": ["fsdp", "tensor"]})
MESHES: dict[str, Any] = {
    "fsdp 2": ({"fsdp": 2}, None),
    "fsdp 3": ({"fsdp": 3}, {"h": [None, "fsdp"]}),
    "fsdp 4": ({"fsdp": 4}, None),
    "data 2, fsdp 2": ({"data": 2, "fsdp": 2}, None),
    "tensor 2": ({"tensor": 2}, TENSOR),
}
CLIPPED = {"window": 2, "clip_norm": 0.1, "updates": 2}


def optimizer(kind: str) -> Any:
    return make_optimizer(kind, toy.weights(), rate=0.05)


@pytest.mark.parametrize("mesh", [THREE, SPLIT])
def test_any_mesh_changes_no_bit(mesh: Any) -> None:
    """In windows, and with a clip, whose norm is a sum over all parameters."""
    assert toy.digest(mesh, **CLIPPED) == toy.digest(1, **CLIPPED)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("given", [CLIPPED, {"rate": 0.2}, {**CLIPPED, "span": True}, {**CLIPPED, "whole": "asked"}])
def test_every_mesh_changes_no_bit(given: dict[str, Any]) -> None:
    """Also dropout, spans, and microbatches that are not cut."""
    plain = toy.digest(1, **given)
    for name, mesh in {**MESHES, "data 3": THREE, "both": SPLIT}.items():
        assert toy.digest(mesh, **given) == plain, name


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", ["sgd", "lion", "lamb", "lars", "adafactor"])
def test_optimizers_change_no_bit(kind: str) -> None:
    """Those that work on parts of their state, and those that need the norm of a parameter, or of its rows."""
    digests = {toy.digest(mesh, optimizer=optimizer(kind)) for mesh in (1, MESHES["fsdp 4"], MESHES["fsdp 3"], SPLIT)}
    assert len(digests) == 1


@pytest.mark.slow
def test_hooks_change_no_bit() -> None:
    """An average of parameters that are split, and a clip by a hook, where rows are not shared evenly either."""
    plan = lambda: HookPlan(update=(GradientClipHook(0.1), EMAHook(decay=0.9)))  # noqa: E731
    digests = {toy.digest(mesh, hooks=plan()) for mesh in (1, THREE, MESHES["fsdp 4"], SPLIT)}
    assert len(digests) == 1


def test_state_is_stored_in_parts() -> None:
    """A quarter on each device, between two updates."""
    step, carry = toy.train(MESHES["fsdp 4"], 8, updates=1)
    leaves = dict(zip(leaf_paths(step.state(carry)), jax.tree.leaves(step.state(carry)), strict=True))
    for name in ("params/q", "opt_state/inner/mu/q", "opt_state/inner/nu/q"):
        assert {shard.data.size for shard in leaves[name].addressable_shards} == {leaves[name].size // 4}


@pytest.mark.parametrize("kind, parts", [("sgd", True), ("adamw", True), ("lamb", False), ("adafactor", False)])
def test_optimizers_that_move_each_value_by_itself(kind: str, parts: bool) -> None:
    """They work on parts of their moments; others would take the norm of a part for that of the whole."""
    given = jax.eval_shape(lambda: (toy.weights(), {}))
    sharding = make_sharding({"fsdp": 4})
    assert (split_update(optimizer(kind), given, sharding) is not None) == parts
    assert split_update(optimizer(kind), given, toy.sharding(2)) is None


def test_elementwise() -> None:
    x = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    assert elementwise(lambda x: jnp.where(x > 0, jnp.sqrt(x) * jnp.exp(jnp.float32(2)), -x), x)
    for mixed in (lambda x: x / jnp.sum(x), lambda x: x[::-1], lambda x: x + np.arange(12.0).reshape(4, 3)):
        assert not elementwise(mixed, x)


def test_a_value_goes_around_with_its_sign() -> None:
    """-0 stays -0 and a NaN its bits: another zero would be another hash."""
    mesh = make_sharding({"data": 4}).mesh  # type: ignore[union-attr]
    values = np.array([0.0, 1.0, -0.0, np.nan], np.float32)

    def local(value: Any) -> Any:
        return _from(value, jax.lax.axis_index("data") == 2, ("data",))

    found = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    told = np.asarray(found(np.stack([values * 0 + 1, values, values, values])))
    assert all(row.tobytes() == values.tobytes() for row in told)
