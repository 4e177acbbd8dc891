"""Equinox modules on several devices: where leaves lie, and the same numbers as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from nnx_jax.backends.equinox import EquinoxModel
from nnx_jax.engines.equinox import EquinoxEngine
from nnx_jax.fit import prepare
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.run import NNRun
from tests.e2e.helpers import stored
from tests.equinox.nets import close, data, fit, model, normed, settings, weights


def engine(of: EquinoxModel, mesh: dict[str, int], **changes: Any) -> EquinoxEngine:
    spec = RunSpec(
        backend="equinox", model=of.params, data=data(), train=settings(**changes), mesh=mesh,
        sharding=changes.pop("sharding", {}),
    )  # fmt: skip
    return prepare(of, spec).engine


def leaves(of: EquinoxEngine) -> dict[str, Any]:
    return dict(of.programs.named(of.start()))


def test_data_parallel_replicates_every_leaf() -> None:
    """Model, optimizer and counters are whole on both devices. (pipekit:J1)"""
    held = leaves(engine(model(normed()), {"data": 2}))
    assert any(name.startswith("opt_state/") for name in held)
    for name, leaf in held.items():
        assert leaf.sharding.is_fully_replicated, name
        assert len(leaf.sharding.device_set) == 2, name


def test_a_split_model_splits_its_optimizer_but_no_scalar() -> None:
    """fsdp over 4 devices: weights and Adam's moments are cut the same way, counts are whole. (pipekit:J2)"""
    held = leaves(engine(model(), {"fsdp": 4}))
    cut = {name for name, leaf in held.items() if not leaf.sharding.is_fully_replicated}
    assert {name for name in cut if name.startswith("params/")}
    assert {name for name in cut if name.startswith("opt_state/")}
    assert all(held[name].ndim > 0 for name in cut)
    assert any(leaf.ndim == 0 for name, leaf in held.items() if name.startswith("opt_state/"))


def test_rows_of_a_batch_are_split_over_the_devices() -> None:
    """8 rows on 2 devices: one global array, 4 rows each. (pipekit:J3)"""
    of = engine(model(), {"data": 2})
    batch = of.place.batch(next(iter(of.feed.batches(0))))
    assert batch["x"].shape == (8, 4)
    assert batch["x"].sharding.spec[0] == "data" or batch["x"].sharding.spec == PartitionSpec(("data",))
    assert [shard.data.shape for shard in batch["x"].addressable_shards] == [(4, 4), (4, 4)]


def steady() -> EquinoxModel:
    """Without the bias that BatchNorm takes out: its gradient is rounding alone, which Adam makes steps of."""
    return model(normed(), freeze=("first.bias",))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[EquinoxModel, NNRun]:
    of = steady()
    return of, fit(tmp_path_factory.mktemp("alone"), of, count=22, n_epochs=2)


@pytest.mark.parametrize("mesh", [{"data": 2}, pytest.param({"data": 4}, marks=pytest.mark.slow)])
def test_devices_change_no_number(mesh: Any, alone: Any, tmp_path: Path) -> None:
    """Dropout and BatchNorm, a padded tail: weights, statistics and losses of 2 or 4 devices are those of one.

    BatchNorm's statistics are of the global batch; every row's noise follows its place in it. Float32 sums are
    added in another order. (pipekit:J7) (pipekit:N14)
    """
    of = steady()
    run = fit(tmp_path, of, count=22, n_epochs=2, more={"mesh": mesh})
    close(of, alone[0], rtol=1e-5, atol=2e-6)
    assert run.artifact["train"]["loss"] == pytest.approx(alone[1].artifact["train"]["loss"], rel=1e-6)
    assert int(weights(of)["norm.batch_counter"]) == 6


@pytest.mark.slow
def test_without_a_mesh_nothing_is_placed(alone: Any, tmp_path: Path) -> None:
    """No sharding is the plain path: one device, and the bits of a run that names a mesh of one. (pipekit:J4)"""
    of = steady()
    assert {len(leaf.sharding.device_set) for leaf in leaves(engine(model(), {})).values()} == {1}
    fit(tmp_path, of, count=22, n_epochs=2, more={"mesh": {"data": 1}})
    for name, value in weights(of).items():
        np.testing.assert_array_equal(value, weights(alone[0])[name], err_msg=name)


def test_a_checkpoint_comes_back_where_its_leaves_were(tmp_path: Path) -> None:
    """Every leaf has its sharding and its bits after save and restore. (pipekit:J5)"""
    run = fit(tmp_path, model(), n_epochs=1, more={"mesh": {"fsdp": 2}})
    of = engine(model(), {"fsdp": 2})
    fresh = of.start()
    before = {name: leaf.sharding for name, leaf in of.programs.named(fresh).items()}
    restored = of.programs.named(of.restore(fresh, stored(run)))
    assert {name: leaf.sharding for name, leaf in restored.items()} == before
    for name, value in stored(run).items():
        np.testing.assert_array_equal(np.asarray(restored[name]), value, err_msg=name)


@pytest.mark.slow
def test_three_hundred_updates_learn_on_two_devices(tmp_path: Path) -> None:
    """Adam with 1e-2, batch 8: the error falls below half; the trained leaves are whole everywhere. (pipekit:J6)"""
    of = model()
    before = of.evaluate(data().train)["loss"]
    fit(tmp_path, of, max_steps=300, more={"mesh": {"data": 2}})
    assert of.evaluate(data().train)["loss"] < 0.5 * before
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(of.net.arrays()))


@pytest.mark.slow
def test_a_canonical_reduction_has_the_bits_of_one_device(tmp_path: Path) -> None:
    """Noise of rows is cut with the rows: the shards of 1 and 2 devices draw what the whole batch draws."""
    from tests.equinox.nets import Scaled

    found = []
    for number, mesh in enumerate(({}, {"data": 2})):
        of = EquinoxModel(Scaled(), loss=lambda outputs, targets: (outputs.sum(-1) - targets.sum(-1)) ** 2)
        fit(tmp_path / str(number), of, reduction="canonical", reduction_shards=4, more={"mesh": mesh})
        found.append(weights(of)["w"].tobytes())
    assert found[0] == found[1]
