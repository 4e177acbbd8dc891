"""NNModel as a person uses it: predict, score, freeze, export, open a stored run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from sklearn.metrics import accuracy_score, f1_score, log_loss

from nnx_jax.core.errors import ConfigError, DataError, ModelError, ResumePointError
from nnx_jax.data import ArrayDataset, Feed
from nnx_jax.engines.inference import PredictionValidationError, ProbabilitySpec
from nnx_jax.loop.builtin import EarlyStopping
from nnx_jax.model import NNModel
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.train import MonitorSpec
from nnx_jax.runs.run import NNRun

from .helpers import data_params, dataset, fit, model, net_params, stored, train_params

SIZES = {"input_dim": 4, "output_dim": 3}
ROWS = dataset().arrays()


class Linear(nnx.Module):
    """A module of the user's own."""

    def __init__(self, seed: int = 0) -> None:
        self.layer = nnx.Linear(4, 3, rngs=nnx.Rngs(seed))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[NNModel, NNRun]:
    net = model()
    return net, fit(tmp_path_factory.mktemp("runs"), of=net, n_epochs=2)


def test_exactly_one_network_is_needed() -> None:
    for arguments in ({}, {"net_params": net_params(), "module": Linear()}):
        with pytest.raises(ConfigError, match="give one network"):
            NNModel(**arguments)
    with pytest.raises(ConfigError, match="got str"):
        NNModel(module="net")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="needs input_dim"):
        _ = NNModel(net_params()).net


def test_prediction_does_not_touch_modes_even_when_it_fails() -> None:
    """nnx:B185"""
    net = NNModel(net_params(**SIZES))
    net.net.train()
    flags = [part.deterministic for _, part in nnx.iter_modules(net.net) if isinstance(part, nnx.Dropout)]
    first = net.predict(ROWS["x"])
    logits, classes = net.predict(ROWS["x"])
    np.testing.assert_array_equal(first.logits, logits)
    np.testing.assert_array_equal(first.classes, classes)
    with pytest.raises(ModelError, match="built for 4 inputs a row, the batch has 5"):
        net.predict(np.zeros((2, 5), np.float32))
    assert flags
    assert flags == [part.deterministic for _, part in nnx.iter_modules(net.net) if isinstance(part, nnx.Dropout)]
    assert not any(flags)


def test_outputs_do_not_depend_on_the_batch_size() -> None:
    """nnx:B187"""
    net = NNModel(net_params(**SIZES), NNModelParams(metrics=("accuracy", "f1", "nll")))
    whole = net.predict(ROWS["x"], batch_size=64).logits
    for size in (1, 7, 23):
        np.testing.assert_allclose(net.predict(ROWS["x"], batch_size=size).logits, whole, rtol=1e-6, atol=1e-6)
    scores = [net.evaluate(dataset(), batch_size=size) for size in (4, 23)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)
    predicted = whole.argmax(axis=1)
    chances = net.predict_proba(ROWS["x"]).probabilities
    assert scores[0]["accuracy"] == accuracy_score(ROWS["y"], predicted)
    assert scores[0]["f1"] == pytest.approx(f1_score(ROWS["y"], predicted, average="macro", zero_division=0), abs=1e-12)
    assert scores[0]["nll"] == pytest.approx(log_loss(ROWS["y"], chances, labels=[0, 1, 2]), rel=1e-6)
    with pytest.raises(DataError, match="row"):
        net.evaluate(ArrayDataset(x=np.zeros((0, 4), np.float32), y=np.zeros(0, np.int32), n_classes=3))
    with pytest.raises(DataError, match="at least one row"):
        net.predict(np.zeros((0, 4), np.float32))


def test_probabilities_are_checked() -> None:
    """nnx:B186"""
    net = NNModel(net_params(**SIZES))
    found = net.predict_proba(ROWS["x"], ProbabilitySpec("categorical", labels=("a", "b", "c")))
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1.0, atol=1e-6)
    np.testing.assert_array_equal(found.classes, net.predict(ROWS["x"]).classes)
    np.testing.assert_array_equal(found.sample_ids, np.arange(23))
    for spec, problem in (
        (ProbabilitySpec("categorical", labels=("a", "b")), "2 labels for 3 classes"),
        (ProbabilitySpec("categorical", class_axis=0), "class_axis is 0"),
        (ProbabilitySpec("softmax"), "kind is 'softmax'"),
    ):
        with pytest.raises(PredictionValidationError, match=problem):
            net.predict_proba(ROWS["x"], spec)
    broken = Linear()
    broken.layer.kernel[...] = broken.layer.kernel[...].at[0, 0].set(np.nan)
    with pytest.raises(PredictionValidationError, match="outputs of row 0 are not finite"):
        NNModel(module=broken).predict_proba(ROWS["x"])
    with pytest.raises(TypeError, match="give a ProbabilitySpec"):
        NNModel(module=Linear(), params=NNModelParams(loss="mse")).predict_proba(ROWS["x"])


def test_shuffled_rows_are_said_to_be_positions() -> None:
    """nnx:B188"""
    net = NNModel(module=Linear())
    with pytest.warns(UserWarning, match="sample_ids are positions"):
        net.predict_proba(Feed(dataset(), batch_size=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.predict_proba(Feed.evaluation(dataset(), batch_size=4))


def test_yes_no_outputs_are_read_as_such() -> None:
    net = NNModel(module=Linear(), params=NNModelParams(loss="binary_cross_entropy"))
    found = net.predict_proba(ROWS["x"])
    logits = net.predict(ROWS["x"]).logits
    np.testing.assert_allclose(found.probabilities, 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=1e-6)
    np.testing.assert_array_equal(found.classes, (logits >= 0).astype(np.int64))
    np.testing.assert_array_equal(net.predict(ROWS["x"]).classes, found.classes)


def test_frozen_parameters_stay_bitwise_and_keep_no_moments(tmp_path: Path) -> None:
    """case:K02 (frozen layer; the norm is in the step's tests)"""
    net = NNModel(net_params(**SIZES), NNModelParams())
    before = {name: np.asarray(value) for name, value in _weights(net).items()}
    net.freeze("layers.0")
    run = fit(tmp_path, of=net, n_epochs=1)
    after = _weights(net)
    for name, value in before.items():
        assert np.array_equal(value, after[name]) == name.startswith("layers.0."), name
    assert not [name for name in stored(run) if name.startswith("opt_state") and "layers.0" in name]
    net.unfreeze()
    fit(tmp_path, of=net, n_epochs=1)
    assert not np.array_equal(before["layers.0.kernel"], _weights(net)["layers.0.kernel"])
    with pytest.raises(ModelError, match="'layer.9' matches no parameter"):
        net.freeze("layer.9")
    with pytest.raises(ModelError, match="is not frozen"):
        net.unfreeze("head")


def _weights(net: NNModel) -> dict[str, np.ndarray]:
    from nnx_jax.engines.inference import weights_of

    return {name: np.array(value) for name, value in weights_of(net.net).items()}


def test_every_parameter_frozen_is_an_error_before_the_run(tmp_path: Path) -> None:
    """nnx:B016"""
    net = NNModel(net_params(**SIZES))
    net.freeze("*")
    with pytest.raises(ModelError, match="no parameter is left to train"):
        fit(tmp_path, of=net)
    assert list(tmp_path.iterdir()) == []


def test_exported_weights_are_plain_safetensors(trained: tuple[NNModel, NNRun], tmp_path: Path) -> None:
    net, run = trained
    path = net.export_state_dict(tmp_path / "weights.safetensors")
    found, kept = load_file(path), stored(run)
    assert "layers.0.kernel" in found
    assert "norms.0.mean" in found
    for name, value in found.items():
        np.testing.assert_array_equal(value, kept.get(f"params/{name}", kept.get(f"model_state/{name}")))


def test_a_stored_run_opens_as_a_model(trained: tuple[NNModel, NNRun]) -> None:
    net, run = trained
    opened = NNModel.from_checkpoint(run.id, runs_dir=run.root)
    np.testing.assert_array_equal(opened.predict(ROWS["x"]).logits, net.predict(ROWS["x"]).logits)
    assert opened.evaluate(dataset(9, seed=1))["accuracy"] == pytest.approx(run.artifact["val"]["accuracy"])  # type: ignore[index]
    assert NNModel.from_checkpoint(f"{run.id}@BEST", runs_dir=run.root).params.net == opened.params.net
    with pytest.raises(ResumePointError, match="has no checkpoint 'NEXT'"):
        NNModel.from_checkpoint(f"{run.id}@NEXT", runs_dir=run.root)


def test_records_come_back_as_they_were(trained: tuple[NNModel, NNRun]) -> None:
    """nnx:B098 case:L03"""
    _, run = trained
    again = NNRun.load(run.id, run.root)
    assert again.records == run.records
    assert (again.path / "idps.csv").read_text().count("kind,epoch,batch,step") == 1
    assert [row["epoch"] for row in again.records if row["kind"] == "epoch"] == [0, 1]


def test_a_module_of_the_users_own_trains_in_place(tmp_path: Path) -> None:
    module = Linear()
    before = np.array(module.layer.kernel[...])
    net = NNModel(module=module)
    run = fit(tmp_path, of=net, n_epochs=1)
    assert net.net is module
    assert not np.array_equal(before, module.layer.kernel[...])
    opened = NNModel.from_checkpoint(run.id, runs_dir=tmp_path, module=Linear(seed=5))
    np.testing.assert_array_equal(opened.predict(ROWS["x"]).logits, net.predict(ROWS["x"]).logits)
    with pytest.raises(ModelError, match="give it as module="):
        NNModel.from_checkpoint(run.id, runs_dir=tmp_path)
    other = fit(tmp_path, of=NNModel(module=Linear(seed=5)), n_epochs=1)
    assert other.id != run.id  # other first weights are another run


def test_training_again_goes_on_from_the_weights_as_a_run_of_its_own(tmp_path: Path) -> None:
    """case:L06 (a notebook cell run twice never overwrites)"""
    net = model()
    first = fit(tmp_path, of=net, n_epochs=1)
    second = fit(tmp_path, of=net, n_epochs=1)
    assert first.id != second.id
    assert {r.id for r in NNRun.all(tmp_path)} == {first.id, second.id}
    assert second.records[0]["train_loss"] != first.records[0]["train_loss"]


def test_a_loss_of_the_users_own(tmp_path: Path) -> None:
    def squared(predicted: Any, target: Any) -> Any:
        return ((predicted - jax.nn.one_hot(target, 3)) ** 2).sum(axis=-1)

    run = fit(tmp_path, of=NNModel(module=Linear(), loss=squared), n_epochs=2, optim={"kind": "sgd", "max_lr": 0.1})
    losses = [row["train_loss"] for row in run.records if row["kind"] == "epoch"]
    assert losses[1] < losses[0]
    outputs = NNModel.from_checkpoint(run.id, runs_dir=tmp_path, module=Linear()).predict(ROWS["x"]).logits
    assert outputs.shape == (23, 3)


def test_a_metric_of_the_users_own_is_recorded_and_may_be_watched(tmp_path: Path) -> None:
    """nnx:B043 (as values a row, so that padding and batching never count)"""

    def margin(outputs: Any, batch: Any) -> Any:
        top = jax.lax.top_k(outputs, 2)[0]
        return top[:, 0] - top[:, 1]

    net = NNModel(module=Linear())
    run = fit(
        tmp_path, of=net, n_epochs=1, extra_metrics={"margin": margin}, monitor=MonitorSpec(metric="margin", mode="max")
    )
    last = next(row for row in run.records if row["kind"] == "epoch")
    top = np.sort(net.predict(dataset(9, seed=1)).logits.astype(np.float64), axis=1)
    assert last["val_margin"] == pytest.approx(float((top[:, 2] - top[:, 1]).mean()), rel=1e-5)
    assert last["monitor"] == last["val_margin"]
    with pytest.raises(ConfigError, match="one value a row"):
        fit(tmp_path, of=NNModel(module=Linear()), n_epochs=1, salt="x", extra_metrics={"m": lambda o, b: o.mean()})


def test_batches_from_a_loader_train_like_the_dataset(tmp_path: Path) -> None:
    rows = dataset(8).arrays()
    batches = [(rows["x"][i : i + 4], rows["y"][i : i + 4]) for i in (0, 4)]
    plain: dict[str, Any] = {"net": {"norm": None, "dropout_prob": 0.0}, "n_epochs": 2}
    known = fit(tmp_path, data=data_params(train=dataset(8), val=None, shuffle=False), **plain)
    net = NNModel(net_params(norm=None, dropout_prob=0.0, **SIZES), NNModelParams(metrics=("accuracy",)))
    loaded = net.train(train_params(n_epochs=2, train_loader=batches, data_id="toy"), runs_dir=tmp_path, quiet=True)
    left, right = stored(known), stored(loaded)
    assert {n: a.tobytes() for n, a in left.items()} == {n: a.tobytes() for n, a in right.items()}


def test_a_missing_argument_is_told(tmp_path: Path) -> None:
    """nnx:B017"""
    with pytest.raises(ValueError, match="params must be NNTrainParams, got NoneType"):
        NNModel(module=Linear()).train(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="there is no training data"):
        NNModel(module=Linear()).train(train_params(), runs_dir=tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("loss", "targets"), [("mse", [0, 5, 2, 7]), ("binary_cross_entropy", [0, 1, 1, 0])])
def test_whole_number_targets_of_a_regression_need_no_cast(tmp_path: Path, loss: str, targets: list[int]) -> None:
    rows = ArrayDataset(x=dataset(4).arrays()["x"], y=np.array(targets))
    net = NNModel(net_params(norm=None), NNModelParams(loss=loss))
    fit(tmp_path, of=net, n_epochs=1, data=data_params(train=rows, val=None))
    assert net.predict(rows.arrays()["x"]).logits.shape == (4, 1)


def test_a_forward_pass_may_sow(tmp_path: Path) -> None:
    class Sows(Linear):
        def __call__(self, x: jax.Array) -> jax.Array:
            outputs = super().__call__(x)
            self.sow(nnx.Intermediate, "h", outputs)
            return outputs

    assert fit(tmp_path, of=NNModel(module=Sows()), n_epochs=1).status == "finished"


def test_two_losses_of_one_name_are_two_runs(tmp_path: Path) -> None:
    def scaled(factor: float) -> Any:
        def loss(predicted: Any, target: Any) -> Any:
            return factor * ((predicted - jax.nn.one_hot(target, 3)) ** 2).sum(axis=-1)

        return loss

    runs = {fit(tmp_path, of=NNModel(module=Linear(), loss=scaled(f)), n_epochs=1).id for f in (1.0, 2.0)}
    assert len(runs) == 2


def test_scoring_again_compiles_nothing(tmp_path: Path) -> None:
    net = NNModel(module=Linear())
    net.evaluate(dataset(9, seed=1))
    scorer = net._scorer
    net.evaluate(dataset(9, seed=1))
    assert scorer is not None
    assert scorer is net._scorer


def test_prediction_uses_the_precision_of_the_training(tmp_path: Path) -> None:
    net = model(norm=None)
    run = fit(tmp_path, of=net, n_epochs=1, precision="bfloat16")
    assert net.params.precision == "bfloat16"
    assert NNModel.from_checkpoint(run.id, runs_dir=tmp_path).params.precision == "bfloat16"


def test_one_callback_may_stand_alone(tmp_path: Path) -> None:
    """As an object or as a function of the rows: what a list of it does."""
    seen: list[int] = []
    stopper = EarlyStopping(MonitorSpec(split="train", min_delta=1e9), patience=1)
    assert fit(tmp_path, n_epochs=5, callbacks=stopper).epochs[-1]["epoch"] < 4
    fit(tmp_path, n_epochs=2, salt="f", callbacks=lambda rows: seen.append(len(rows)))
    assert len(seen) == 2
