"""A loop over several devices: where its arrays lie, the same numbers as on one, and what does not split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from nnx_jax.core.errors import ConfigError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.resume import find_point
from nnx_jax.spmd.mesh import ShardingSpec
from tests.training_loop.scenes import Line, loop
from tests.training_loop.stage_scenes import own, same, ten


def spec(devices: int = 2, **changes: Any) -> ShardingSpec:
    """The rows over so many devices, unless changes say more."""
    return ShardingSpec(Mesh(np.array(jax.devices()[:devices]), ("data",)), **changes)


def square() -> NNXModelOp:
    """A layer whose kernel is 4 by 4."""
    return NNXModelOp(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


def squares() -> ArrayDataset:
    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    return ArrayDataset({"x": x, "y": -x})


class Seen:
    """What a run's state and batches look like on the devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state: dict[str, jax.Array] = {}
        self.batches: list[dict[str, jax.Array]] = []
        snapshot = FlaxEngine.snapshot

        def look(engine: FlaxEngine, state: Any, *args: Any) -> Any:
            self.state = dict(engine.programs.named(state))
            self.batches.append(engine.place.batch(next(iter(engine.feed.batches(0)))))
            return snapshot(engine, state, *args)

        monkeypatch.setattr(FlaxEngine, "snapshot", look)


@pytest.fixture(scope="module")
def one() -> Any:
    """Fifty updates on one device."""
    return loop(max_steps=50, batch_size=8)._train(None)


@pytest.fixture(scope="module")
def two() -> Any:
    """The same on two."""
    return loop(max_steps=50, batch_size=8, sharding=spec())._train(None)


# -- the numbers -------------------------------------------------------------------------------------------------


def test_two_devices_give_the_numbers_of_one(one: Any, two: Any) -> None:
    """After 50 updates losses and weights differ by less than 1e-6 (pipekit:J7)."""
    assert abs(one.info["final_metrics"]["loss"] - two.info["final_metrics"]["loss"]) < 1e-6
    for name, array in one.operator.arrays().items():
        np.testing.assert_allclose(two.operator.arrays()[name], array, atol=1e-6)


def test_without_sharding_there_is_one_device(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sharding=None` is the plain path, bit for bit that of a loop that never heard of it

    (pipekit:J4, pipekit:D12.5).
    """
    monkeypatch.setattr("nnx_jax.spmd.mesh.ShardingSpec.__post_init__", lambda _: pytest.fail("a mesh was made"))
    again = loop(max_steps=50, batch_size=8, sharding=None)._train(None)
    assert same(again.operator, one.operator)
    assert one.info["sharding"] is None


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_it_learns_on_two_devices(stream: bool) -> None:
    """300 updates bring the error below half, of rows by number and of a stream (pipekit:J6)."""
    given = {"dataset": ten(rows=64)} if stream else {}
    first = loop(max_steps=1, batch_size=8, sharding=spec(), **given)._train(None)
    last = loop(max_steps=300, batch_size=8, sharding=spec(), **given)._train(None)
    assert last.info["final_metrics"]["loss"] < 0.5 * first.info["final_metrics"]["loss"]
    assert last.info["sharding"] == {
        "mesh_shape": {"data": 2},
        "model_pspec": str(PartitionSpec()),
        "data_pspec": str(PartitionSpec("data")),
        "num_processes": 1,
    }


def test_a_stream_is_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch of a stream goes to both devices, and the numbers are those of one (pipekit:J6, pipekit:D12.1)."""
    plain = loop(max_steps=10, batch_size=4, dataset=ten())._train(None)
    seen = Seen(monkeypatch)
    split = loop(max_steps=10, batch_size=4, dataset=ten(), sharding=spec())._train(None)
    assert seen.batches[0]["x"].sharding.device_set == set(jax.devices()[:2])
    for name, array in plain.operator.arrays().items():
        np.testing.assert_allclose(split.operator.arrays()[name], array, atol=1e-6)
    assert split.info["sharding"]["mesh_shape"] == {"data": 2}


def test_evaluation_is_split_and_the_same(one: Any) -> None:
    """Values of an evaluation over rows that do not fill the devices are those of one device (pipekit:J12)."""
    given: dict[str, Any] = {"max_steps": 4, "batch_size": 8, "val_dataset": Line(rows=13)}
    plain = loop(**given)._train(None).info["final_metrics"]["val_loss"]
    split = loop(**given, sharding=spec(4))._train(None).info["final_metrics"]["val_loss"]
    assert split == pytest.approx(plain, rel=1e-6)


# -- where things lie --------------------------------------------------------------------------------------------


def test_rows_are_split_and_the_model_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every leaf of model, optimizer and counters is on both devices, rows are cut in two

    (pipekit:J1, pipekit:J3, pipekit:D12.3).
    """
    seen = Seen(monkeypatch)
    loop(max_steps=2, batch_size=8, sharding=spec())(None, None)
    names = [name for name in seen.state if name.startswith(("params/", "opt_state/", "counters", "rng"))]
    assert len(names) > 8
    for name in names:
        leaf = seen.state[name]
        assert leaf.sharding.is_fully_replicated, name
        assert leaf.sharding.device_set == set(jax.devices()[:2]), name
    x = seen.batches[0]["x"]
    assert x.shape == (8, 1)
    assert x.sharding.is_equivalent_to(spec().rows, 2)
    assert [shard.data.shape for shard in x.addressable_shards] == [(4, 1), (4, 1)]


def test_a_split_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """model_pspec splits what has as many axes, moments too; numbers without axes stay whole (pipekit:J2)."""
    seen = Seen(monkeypatch)
    given: dict[str, Any] = {"model_op": square(), "dataset": squares(), "batch_size": 8, "max_steps": 4}
    split, _ = loop(**given, sharding=spec(model_pspec=PartitionSpec("data", None)))(None, None)
    assert not seen.state["params/kernel"].sharding.is_fully_replicated
    counts = [leaf for name, leaf in seen.state.items() if name.startswith("opt_state/") and leaf.ndim == 0]
    moments = [leaf for name, leaf in seen.state.items() if name.startswith("opt_state/") and leaf.ndim == 2]
    assert all(leaf.sharding.is_fully_replicated for leaf in counts)
    assert len(counts) >= 1
    assert not any(leaf.sharding.is_fully_replicated for leaf in moments)
    assert len(moments) == 2
    plain, _ = loop(**given)(None, None)
    for name, array in plain.arrays().items():
        np.testing.assert_allclose(split.arrays()[name], array, atol=1e-6)


def test_rules_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern places the leaves it matches, the rest is whole; one that does not divide is named (pipekit:J14)."""
    seen = Seen(monkeypatch)
    given: dict[str, Any] = {"model_op": square(), "dataset": squares(), "batch_size": 8, "max_steps": 1}
    loop(**given, sharding=spec(rules=(("*bias", ("data",)),)))(None, None)
    assert not seen.state["params/bias"].sharding.is_fully_replicated
    assert seen.state["params/kernel"].sharding.is_fully_replicated
    uneven = NNXModelOp(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    rows = ArrayDataset({"x": np.ones((8, 4), np.float32), "y": np.ones((8, 3), np.float32)})
    with pytest.raises(ValueError, match="bias"):
        loop(model_op=uneven, dataset=rows, batch_size=8, max_steps=1, sharding=spec(rules=(("*bias", ("data",)),)))(
            None, None
        )


def test_a_batch_that_does_not_split_is_refused_at_once() -> None:
    """When the loop is made, naming batch_size (pipekit:J8)."""
    with pytest.raises(ValueError, match="batch_size"):
        loop(batch_size=9, sharding=spec())
    with pytest.raises(ConfigError, match="batch_size"):
        loop(batch_size=6, sharding={"data": 4})


# -- commits -----------------------------------------------------------------------------------------------------


def test_a_commit_comes_back_to_where_it_lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split model goes on split, with the bits of an uninterrupted run (pipekit:J5, pipekit:D12.4)."""
    given: dict[str, Any] = {
        "model_op": square(), "dataset": squares(), "batch_size": 8,
        "sharding": spec(model_pspec=PartitionSpec("data", None)),
    }  # fmt: skip
    whole, _ = loop(**given, max_steps=4)(None, None)
    loop(**given, max_steps=2, checkpoint_dir=tmp_path)(None, None)
    seen = Seen(monkeypatch)
    again, _ = loop(**{**given, "model_op": square()}, max_steps=4, checkpoint_dir=tmp_path)(None, None)
    assert same(again, whole)
    kernels = [leaf for name, leaf in seen.state.items() if name.endswith("kernel")]
    assert len(kernels) == 3
    assert not any(leaf.sharding.is_fully_replicated for leaf in kernels)


def test_a_run_moves_to_another_number_of_devices(tmp_path: Path) -> None:
    """Weights and moments are equal after it, and training goes on: 2 devices, then 4, then 1 (pipekit:H20)."""
    reached, stored = {}, {}
    for steps, sharding in ((3, spec(2)), (6, spec(4)), (9, None)):
        made = loop(model_op=own(norm=True), max_steps=steps, batch_size=8, checkpoint_dir=tmp_path, sharding=sharding)
        reached[steps] = made(None, None)[0]
        stored = {point.step: point for point in (find_point(tmp_path, run) for run in run_ids(tmp_path))}
    assert sorted(stored) == [3, 6, 9]
    plain, _ = loop(model_op=own(norm=True), max_steps=9, batch_size=8)(None, None)
    for name, array in plain.arrays().items():
        np.testing.assert_allclose(reached[9].arrays()[name], array, atol=2e-6)
