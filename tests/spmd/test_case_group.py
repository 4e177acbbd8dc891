"""Bug reports about several processes and devices, with the values that are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_jax.data import ArrayDataset
from nnx_jax.fit import prepare
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from tests.processes import results
from tests.spmd import process_cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="module")
def group(folder: Path) -> list[dict[str, Any]]:
    assert process_cases.signs(folder / "begun by one", process_cases.Broken()) == {}
    return results("tests.spmd.process_cases:all_cases", 2, args={"folder": str(folder)}, timeout=180)


def test_statistics_are_those_of_the_whole_batch(group: list[dict[str, Any]], tmp_path: Path) -> None:
    """case:E01

    Mean 3 and variance 5 of 0, 2 | 4, 6: from 0 and 1 with momentum 0.9 to 0.3 and 1.4; rank 0 alone has 0.1 and 1.0.
    """
    for found in (*(each["statistics"] for each in group), process_cases.statistics(tmp_path, mesh={"data": 2})):
        np.testing.assert_allclose(found["norm.mean"], [0.3], rtol=1e-6)
        np.testing.assert_allclose(found["norm.var"], [1.4], rtol=1e-6)


def test_shards_drop_other_units(group: list[dict[str, Any]], tmp_path: Path) -> None:
    """case:E04

    Eight rows on four devices, or two processes, lose exactly what they lose on one, and no two devices lose the same.
    """
    one = process_cases.masks(tmp_path / "one", mesh={"data": 1})
    four = process_cases.masks(tmp_path / "four", mesh={"data": 4})
    assert four == one
    assert [each["masks"] for each in group] == [one, one]
    shards = [one[first : first + 2] for first in range(0, 8, 2)]
    assert any(shard != shards[0] for shard in shards)


def test_every_row_is_scored_once(group: list[dict[str, Any]]) -> None:
    """case:G06: 8 and 512 rows in full batches; nine rows in batches of five without the tail are five."""
    assert [each["counts"] for each in group] == [[8, 512], [8, 512]]
    assert process_cases.dropped() == 5


def test_one_decision_for_all(group: list[dict[str, Any]]) -> None:
    """case:H08: the losses of both rows together are 1, 1, 0.975, so nobody stops, and BEST is the third epoch."""
    for each in group:
        np.testing.assert_allclose(each["patience"]["losses"], [1.0, 1.0, 0.975], rtol=1e-6)
        assert each["patience"]["stopped"] is None
        assert each["patience"]["best"] == 2


def test_one_update_by_hand(group: list[dict[str, Any]]) -> None:
    """pipekit:J10

    Rows 0, 8 on one process and 1, 9 on the other: (1 + 289 + 9 + 361) / 4 = 165, and the gradient
    -2 (0 + 136 + 3 + 171) / 4 = -155, both exact.
    """
    assert [each["line"] for each in group] == [[165.0, 155.0]] * 2


def test_an_elastic_run_goes_on_with_other_processes(group: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    """Begun by two processes and continued by one, or the other way: the unbroken run's weight and records, exactly."""
    whole = process_cases.signs(tmp_path)
    assert len(whole["records"]) == 10
    assert [each["begun"] for each in group] == [{}, {}]
    assert [each["continued"] for each in group] == [whole, whole]
    assert process_cases.signs(folder / "begun by two", mesh={"data": 2}) == whole


def fitted(data: Any, **call: Any) -> tuple[list[float], dict[str, Any]]:
    """Mean squared error of every epoch of a line, 300 updates in all; and where the run's arrays lay."""
    lying: dict[str, Any] = {}

    class Look(Callback):
        def on_train_end(self, ctx: Any) -> None:
            point = ctx.run.checkpoint()
            lying.update(point.host.get("geometry", {}))

    model = NNModel(module=nnx.Linear(1, 1, rngs=nnx.Rngs(0)), loss="mse")
    adam = NNOptimParams(kind="adam", max_lr=0.01)
    params, rare = NNTrainParams(max_steps=300, optim=adam, **data[1]), CheckpointParams(every_n_epochs=100)
    run = model.train(params, [Look()], data=data[0], checkpoint=rare, **call)
    return [row["train_loss"] for row in run.epochs], lying


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_a_line_on_two_devices(kind: str, tmp_path: Path) -> None:
    """pipekit:J6: numbered rows and a stream of batches; the checkpoint says on what it was made."""
    x = np.random.default_rng(0).normal(size=(48, 1)).astype(np.float32)
    y = 3 * x + 1
    data: Any = (NNDataParams(train=ArrayDataset(x=x, y=y), batch_size=8), {})
    if kind == "stream":
        batches = [(x[at : at + 8], y[at : at + 8]) for at in range(0, 48, 8)]
        data = (None, {"train_loader": batches, "data_id": "line"})
    losses, lying = fitted(data, mesh={"data": 2}, runs_dir=tmp_path, progress=QuietProgress())
    assert losses[-1] < 0.5 * losses[0]
    assert lying == {"processes": 1, "mesh": {"data": 2}, "sharding": []}


def test_without_a_mesh_there_is_no_trace_of_one(tmp_path: Path) -> None:
    """pipekit:J4: the program of a plain run has one partition and names no place; one device of a mesh is the same."""
    split = ArrayDataset(x=np.ones((8, 3), np.float32), y=(np.arange(8) % 2).astype(np.int32))
    texts = []
    for mesh in ({}, {"data": 1}):
        model = NNModel(params=NNModelParams(net=NNParams(kind="feed_forward", hidden_dims=[2])))
        data = NNDataParams(train=split, batch_size=4)
        engine = prepare(
            model, RunSpec(model=model.params, data=data, train=NNTrainParams(n_epochs=1), mesh=mesh)
        ).engine
        assert engine.place.sharding is None
        batch = {name: jax.ShapeDtypeStruct(c.shape, c.dtype) for name, c in engine.feed.signature().items()}
        texts.append(engine.programs.lower("apply", batch).as_text())
    assert texts[0] == texts[1]
    assert "sharding" not in texts[0]
    assert "num_partitions = 1" in texts[0]
