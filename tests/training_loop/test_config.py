"""A TrainingLoop as a document: what loads trains to the same bits, what cannot be written is refused by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_jax.core import codec
from nnx_jax.core.function import FunctionOperator
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.data import ArrayDataset
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.hooks import EMAHook
from nnx_jax.loop.step_builtin import EarlyStopping, StepCallback
from nnx_jax.loop.writers import JSONLWriter
from nnx_jax.model import NNModel
from nnx_jax.objectives.operators import MSE, Composite
from nnx_jax.params.callbacks import EarlyStoppingParams
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.spmd.mesh import ShardingSpec
from nnx_jax.training_loop import TrainingLoop
from tests.training_loop.scenes import Counter, Diary, Line, Writer, loop, weights


def halved(predicted: Any, target: Any) -> Any:
    """Half the mean squared error, as a function of the top of a module."""
    return ((predicted - target) ** 2).mean() / 2


def full(folder: Path) -> TrainingLoop:
    """A loop with a part of every family, all of registered classes."""
    return loop(
        val_dataset=Line(rows=10), loss=Composite(((1.0, MSE()), (0.5, "mae"))), seed=3, max_steps=12,
        optimizer_config={
            "name": "adamw", "lr": {"name": "cosine", "init_value": 0.05, "decay_steps": 20}, "clip_norm": 1.0,
            "mask": ["*.kernel"], "param_groups": [{"patterns": ["*.bias"], "lr_scale": 0.5}],
        },
        callbacks=[Counter(most=9), EarlyStopping("val_loss", patience=2), EarlyStoppingParams(patience=50)],
        hooks=[EMAHook(decay=0.9)], metric_writer=JSONLWriter(folder / "log.jsonl"), eval_every_n_steps=4,
        checkpoint_dir=folder / "runs",
    )  # fmt: skip


def test_a_loop_that_went_through_a_file_trains_to_the_same_bits(tmp_path: Path) -> None:
    """Loss, callbacks of both forms, hooks, writer, optimizer and data of registered classes (pipekit:F9).

    The document is plain JSON values; the loop made of it is equal, and so are its parts (pipekit:D11.2).
    """
    first = full(tmp_path)
    document = json.loads(json.dumps(first.to_config()))
    second = TrainingLoop.from_config(document)
    third = TrainingLoop.from_yaml(first.to_yaml())
    for other in (second, third):
        assert other == first
        assert other.identity() == first.identity()
        assert other.content_hash() == first.content_hash()
        assert other.to_config() == document
        assert [type(each) for each in other.callbacks] == [Counter, EarlyStopping, EarlyStoppingParams]
        assert other.metric_writer == first.metric_writer
        assert other.directory == str(tmp_path / "runs")
    trained = first(None, None)[0]
    again = second.replace(checkpoint_dir=None)(None, None)
    assert again[1].step == 9
    assert again[0].content_hash() == trained.content_hash()
    assert again[0].content_hash() != first.model_op.content_hash()
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 2 * 4  # updates 9 and evaluations at 4, 8, 9, twice


def test_documents_are_short_and_name_full_kinds(tmp_path: Path) -> None:
    """Defaults are left out; a part is named by family and kind, since any family may stand there."""
    document = loop(loss=MSE("sum"), callbacks=[EarlyStopping("val_loss")], hooks=[EMAHook(decay=0.9)]).to_config()
    assert document["loss"] == {"kind": "loss.squared_error", "reduction": "sum"}
    assert document["callbacks"] == [{"kind": "step_callback.early_stopping", "metric": "val_loss"}]
    assert document["hooks"] == [{"kind": "hook.ema", "decay": 0.9}]
    assert document["dataset"] == {"kind": "dataset.scene_line"}
    assert "seed" not in document
    assert "sharding" not in document


def test_people_may_write_less() -> None:
    """Bare kinds are looked for where they belong; the callbacks of updates go before those of epochs."""
    made = TrainingLoop.from_yaml("""
max_steps: 3
model_op: {kind: nnx_model, net: {kind: feed_forward, hidden_dims: [4]}}
dataset: {kind: dataset.scene_line, rows: 32}
loss: huber
hooks: [{kind: gradient_clip, max_norm: 1.0}]
callbacks: [{kind: early_stopping, metric: loss}, {kind: callback.lr_monitor}]
metric_writer: {kind: jsonl, path: log.jsonl}
sharding: {data: 1}
""")
    assert isinstance(made.callbacks[0], EarlyStopping)
    assert [type(part).__name__ for part in (made.loss, made.hooks[0], made.callbacks[1], made.metric_writer)] == [
        "HuberParams", "GradientClipHook", "LRMonitorParams", "JSONLWriter",
    ]  # fmt: skip
    assert TrainingLoop.from_yaml(made.to_yaml()) == made


@pytest.mark.parametrize(
    ("line", "error", "told"),
    [
        ("callbacks: [{kind: early_stoping, metric: x}]", PermissionError, "callbacks.*early_stopping"),
        ("callbacks: [{kind: early_stopping, metric: x, patienc: 3}]", ValueError, r"callbacks.*patienc.*patience"),
        ("callbacks: [{metric: x}]", ValueError, "callbacks.*needs a `kind`"),
        ("loss: {kind: somewhere.Loss}", PermissionError, "loss.*no loss kind"),
        ("hooks: [{kind: gradient_clip, max_norm: -1}]", ValueError, r"hooks.*max_norm.*-1"),
        ("task: {kind: os.system}", PermissionError, "task.*no task kind"),
        ("loss: !!python/object:os.system {}", ValueError, "tag"),
        ("callbacks: 3", ValueError, "callbacks.*list"),
    ],
)
def test_a_document_is_checked_to_its_last_part(line: str, error: type[Exception], told: str) -> None:
    """Unknown classes and fields are named with their place, and nothing is imported for them (pipekit:F9)."""
    text = "max_steps: 3\nmodel_op: {kind: nnx_model, net: feed_forward}\ndataset: dataset.scene_line\n"
    text += "" if line.startswith("loss") else "loss: mse\n"
    with pytest.raises(error, match=rf"(?s){told}"):
        TrainingLoop.from_yaml(text + line)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("dataset: loss.mse", r"TrainingLoop\.dataset is MSEParams; give a TrainingDataset"),
        ("task: {kind: loss.mse}", r"TrainingLoop\.task is MSEParams; a TrainTask has loss_fn"),
        ("metric_writer: {kind: dataset.scene_line}", r"TrainingLoop\.metric_writer is Line; a MetricWriter"),
        ("model_op: loss.mse", r"TrainingLoop\.model_op is MSEParams; the backend 'nnx' trains an NNXModelOp"),
    ],
)
def test_a_registered_class_in_the_wrong_place_is_refused(line: str, told: str) -> None:
    """As from Python: by what it is and what should stand there (pipekit:F1, pipekit:F14, pipekit:F15)."""
    document = loop().to_config() | codec.parse_yaml(line)
    with pytest.raises(TypeError, match=told):
        TrainingLoop.from_config(document)


def test_a_sequence_of_loops_is_a_document_too() -> None:
    """Two stages, of which the second takes a function of a module (pipekit:D11.2)."""
    stages = loop(max_steps=3) | loop(max_steps=4, loss=FunctionOperator(function=halved))
    again = Sequential.from_yaml(stages.to_yaml())
    assert again == stages
    assert [each.max_steps for each in again] == [3, 4]  # type: ignore[attr-defined]


# -- what no file can hold ----------------------------------------------------------------------------------------


class Unregistered(StepCallback):
    """A callback that no document could name."""

    def on_step_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None: ...


class Task:
    def loss_fn(self, model: Any, batch: Any, key: Any) -> Any: ...


class Own(nnx.Module):
    """A module of one's own."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.layer(x)


ONE = np.zeros((16, 1), np.float32)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"loss": lambda predicted, target: 0.0}, r"TrainingLoop\.loss: .*lambda"),
        ({"loss": Composite(((1.0, MSE()), (2.0, halved)))}, r"TrainingLoop\.loss\.components\[1\]\.loss: .*halved"),
        ({"loss": None, "task": Task()}, r"TrainingLoop\.task: .*Task"),
        ({"callbacks": [Counter(most=3), Diary()]}, r"TrainingLoop\.callbacks\[1\]: .*Diary"),
        ({"callbacks": [Unregistered()]}, r"TrainingLoop\.callbacks\[0\]: Unregistered is not registered"),
        ({"hooks": [lambda ctx, stage: None]}, r"TrainingLoop\.hooks\[0\]: .*lambda"),
        ({"metric_writer": Writer()}, r"TrainingLoop\.metric_writer: .*Writer"),
        ({"optimizer_config": optax.adam(1e-3)}, r"TrainingLoop\.optimizer_config: .*GradientTransformation"),
        ({"model_op": NNXModelOp(Own())}, r"TrainingLoop\.model_op: its weights"),
        ({"dataset": ArrayDataset(ONE, ONE)}, r"TrainingLoop\.dataset.*arrays"),
    ],
    ids=["closure", "nested", "task", "callback", "unregistered", "hook", "writer", "optax", "module", "arrays"],
)
def test_what_no_file_can_hold_is_refused_by_its_place(changes: dict[str, Any], place: str) -> None:
    """Never written as text that means nothing; for people there is `get_config` (pipekit:F9)."""
    made = loop(**changes)
    for write in (made.to_config, made.to_yaml):
        with pytest.raises(ValueError, match=place):
            write()
    assert json.loads(json.dumps(made.get_config()))["max_steps"] == 20
    assert codec.parse_yaml(made.described())["max_steps"] == 20


def test_a_sharding_is_written_as_devices_by_axis() -> None:
    """A mesh of devices is of one machine: it is refused, a mapping is not (pipekit:F9)."""
    spec = ShardingSpec(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match=r"TrainingLoop\.sharding: .*ShardingSpec"):
        loop(sharding=spec).to_config()
    assert TrainingLoop.from_config(loop(sharding={"data": 2}).to_config()).sharding == {"data": 2}
    assert loop(sharding=spec).identity() == loop().identity() == loop(sharding={"data": 2}).identity()


def test_a_function_of_a_module_can_be_written() -> None:
    """By its name, as an operator (pipekit:F9)."""
    made = loop(loss=FunctionOperator(function=halved), max_steps=2)
    again = TrainingLoop.from_config(json.loads(json.dumps(made.to_config())))
    assert again(None, None)[0].content_hash() == loop(loss=halved, max_steps=2)(None, None)[0].content_hash()


def test_a_description_tells_everything() -> None:
    """Every field by name, the hash of the data, a mesh by its sizes; all of it JSON (pipekit:F8, pipekit:D11.1)."""
    spec = ShardingSpec(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))
    found = json.loads(json.dumps(loop(sharding=spec, callbacks=[Diary()], steps_per_epoch=4).get_config()))
    assert set(TrainingLoop.model_fields) < set(found)
    assert found["dataset_hash"] == Line().content_hash()
    assert found["sharding"]["mesh_shape"] == {"data": 2}
    assert (found["max_steps"], found["steps_per_epoch"], found["seed"], found["backend"]) == (20, 4, 0, "nnx")
    cadences = [found[f"{what}_every_n_steps"] for what in ("eval", "log", "checkpoint")]
    assert cadences == [500, 100, None]
    assert found["callbacks"] == ["Diary"]
    assert found["dataset"]["class"] == "Line"
    assert loop().get_config()["sharding"] is None


def test_loops_that_train_differently_have_different_identities() -> None:
    """Functions count by what they do, not by their name; lengths, cadences and places do not count."""

    def scaled(factor: float) -> Any:
        return lambda predicted, target: factor * ((predicted - target) ** 2).mean()

    one, two = loop(loss=scaled(1.0)), loop(loss=scaled(2.0))
    assert one.identity() != two.identity()
    assert one.identity() == loop(loss=scaled(1.0)).identity()
    told = {one.identity(), loop(dataset=Line(rows=32)).identity(), loop(optimizer_config=optax.sgd(0.1)).identity()}
    assert len(told | {loop(optimizer_config=optax.adam(0.1)).identity(), loop(seed=1).identity()}) == 5
    longer = loop(max_steps=99, log_every_n_steps=3, callbacks=[Diary()], metric_writer=Writer(), checkpoint_dir="x")
    assert longer.identity() == loop().identity()


def test_ten_epochs_are_ten_times_the_updates_of_one(tmp_path: Path) -> None:
    """NNModel's five epochs of four batches and TrainingLoop's twenty updates give the same bits (pipekit:G24).

    `max_steps = epochs * rows // batch_size` is what the class says of it (pipekit:D10.3).
    """
    net = FeedForwardParams(input_dim=1, hidden_dims=(16,), output_dim=1)
    by_epochs = NNModel(net, loss=MSE().as_loss())
    by_epochs.train(
        NNTrainParams(n_epochs=5, seed=0, optim=NNOptimParams(kind="adam", max_lr=1e-2)),
        data=NNDataParams(train=Line(), batch_size=16),
        quiet=True,
        runs_dir=tmp_path,
    )
    by_updates = weights(loop(max_steps=5 * 64 // 16, loss=MSE())(None, None)[0])
    found = by_epochs.framework.weights(by_epochs.net)
    for name, value in by_updates.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value)
    assert "max_steps = 10 * rows // batch_size" in str(TrainingLoop.__doc__)


def test_a_loop_is_an_operator() -> None:
    """It stands where operators stand (pipekit:D3.1)."""
    assert isinstance(loop(), Operator)
    assert loop().is_stateful
