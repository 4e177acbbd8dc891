"""A plan trains exactly as the script written by hand, as often as asked, and says what came out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ModelError, ProcessGroupError
from nnx_jax.data import ArrayDataset
from nnx_jax.loop.builtin import LRMonitor
from nnx_jax.loop.callbacks import Callback
from nnx_jax.model import NNModel
from nnx_jax.params.callbacks import LRMonitorParams
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.plan import ExperimentPlan, FitResult, PlanError
from nnx_jax.runs.run import NNRun
from tests.e2e.helpers import assert_same_run, data_params, dataset, net_params, train_params
from tests.e2e.toys import Killed


class Linear(nnx.Module):
    """Draws from NumPy's global stream when it is made, as careless code does."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(4, 3, rngs=rngs)
        self.shift = nnx.Variable(np.float32(np.random.rand()))

    def __call__(self, x: jax.Array) -> jax.Array:
        random.random()
        return self.layer(x) + self.shift[...]


def noisy() -> ArrayDataset:
    """A factory that draws its rows from the global streams."""
    x = np.random.normal(size=(20, 4)).astype(np.float32) + np.float32(random.random())
    return ArrayDataset(x=x, y=x[:, :3].argmax(axis=1).astype(np.int32))


def made_plan() -> ExperimentPlan:
    """Everything comes out of a factory."""
    return (
        ExperimentPlan()
        .with_net(Linear)
        .with_metrics("accuracy")
        .with_train(train_params(n_epochs=2, seed=7))
        .with_data(train=noisy, val=noisy, batch_size=4)
        .with_callback_factories(LRMonitor)
    )


def script(runs: Path) -> tuple[NNModel, NNRun]:
    """The same by hand."""
    random.seed(7)
    np.random.seed(7)
    data = NNDataParams(train=noisy(), val=noisy(), batch_size=4)
    callbacks = [LRMonitor()]
    model = NNModel(module=Linear(nnx.Rngs(7)), params=NNModelParams(metrics=("accuracy",)))  # pyright: ignore
    train = train_params(n_epochs=2, seed=7)
    run = model.train(train, callbacks, data=data, salt="plan-attempt:A", runs_dir=runs, quiet=True)
    return model, run


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[FitResult, FitResult, Path]:
    """One plan fitted as "A" and once more."""
    runs = tmp_path_factory.mktemp("runs")
    plan = made_plan()
    return plan.fit("A", runs_dir=runs, quiet=True), plan.fit(runs_dir=runs, quiet=True), runs


def test_a_plan_equals_the_script(fitted: tuple[FitResult, FitResult, Path], tmp_path: Path) -> None:
    """nnx:B162: same run id, every stored array and every byte of the history, seeded factories and all."""
    model, run = script(tmp_path)
    result = fitted[0]
    assert run.id == result.run.id
    assert_same_run(run, result.run)
    left, right = (nnx.state(each.net, nnx.Param) for each in (model, result.model))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


def test_fitted_twice(fitted: tuple[FitResult, FitResult, Path]) -> None:
    """nnx:B161: two runs with equal losses; an attempt that is finished is not run again."""
    first, second, runs = fitted
    assert first.run.id != second.run.id
    assert first.attempt_id == "A" != second.attempt_id
    assert_same_run(first.run, second.run)
    with pytest.raises(FileExistsError, match=first.run.id):
        made_plan().fit("A", runs_dir=runs, quiet=True)


def test_what_came_out(fitted: tuple[FitResult, FitResult, Path]) -> None:
    result = fitted[0]
    for split in ("train", "val"):
        found = result.metrics[split]
        assert (found.available, found.epoch, found.source, found.reason) == (True, 1, "epoch", "")
        assert found.values["loss"] == result.run.column(f"{split}_loss")[-1]
        assert set(found.values) == {"loss", "accuracy"}
    assert not result.metrics["test"].available


def test_a_split_without_data_has_a_reason(tmp_path: Path) -> None:
    """nnx:B165; the test split is scored once, at the end."""
    plan = ExperimentPlan().with_net(net_params()).with_train(train_params(n_epochs=1))
    result = plan.with_data(train=dataset(), test=dataset(9, seed=1), batch_size=8).fit(runs_dir=tmp_path, quiet=True)
    val, test = result.metrics["val"], result.metrics["test"]
    assert (val.available, val.epoch, val.source, val.values) == (False, None, None, {})
    assert "no validation data" in val.reason
    assert result.metrics["train"].available
    assert (test.available, test.source) == (True, "end")
    assert test.values["loss"] == pytest.approx(result.model.evaluate(dataset(9, seed=1))["loss"], rel=1e-6)


class Counted:
    """A factory that counts its calls."""

    def __init__(self, make: Any) -> None:
        self.make, self.calls = make, 0

    def __call__(self) -> Any:
        self.calls += 1
        return self.make()


class Batches:
    def __iter__(self) -> Iterator[Any]:
        rows = dataset(8).arrays()
        yield from [(rows["x"][:4], rows["y"][:4]), (rows["x"][4:], rows["y"][4:])]

    def __len__(self) -> int:
        return 2


def test_factories_are_called_once_and_may_make_loaders(tmp_path: Path) -> None:
    class Epochs(Callback):
        seen = 0

        def on_epoch_end(self, ctx: Any) -> None:
            self.seen += 1

    train, val, watch = Counted(Batches), Counted(Batches), Counted(Epochs)
    plan = ExperimentPlan().with_net(net_params(input_dim=4, output_dim=3, norm=None)).with_epochs(3)
    plan = plan.with_data(train=train, val=val).with_callback_factories(watch).with_callbacks(LRMonitorParams())
    result = plan.fit(runs_dir=tmp_path, quiet=True)
    assert (train.calls, val.calls, watch.calls) == (1, 1, 1)
    assert result.run.last is not None
    assert result.run.last.step == 6
    assert "lr_monitor" in result.run.checkpoint().host["components"]


def test_what_factories_return_is_looked_at(tmp_path: Path) -> None:
    """Every problem at once, before a model or a directory is made."""
    plan = made_plan().with_data(train=lambda: None, val=lambda: 3).with_callback_factories(lambda: 4, LRMonitor)
    assert plan.validate() == ()
    with pytest.raises(PlanError) as caught:
        plan.fit(runs_dir=tmp_path / "runs", quiet=True)
    found = {problem.path: problem.message for problem in caught.value.diagnostics}
    assert list(found) == ["data.train", "data.val", "callback_factories[0]"]
    assert "returned None" in found["data.train"]
    with pytest.raises(PlanError, match="data.batch_size: a loader makes its own batches"):
        made_plan().with_data(train=Batches, val=None).fit(runs_dir=tmp_path / "runs", quiet=True)
    with pytest.raises(PlanError, match="net: the function returned a int"):
        made_plan().with_net(lambda rngs: 3).fit(runs_dir=tmp_path / "runs", quiet=True)
    with pytest.raises(PlanError, match="attempt: an attempt '../x' cannot be a file name"):
        made_plan().fit("../x", runs_dir=tmp_path / "runs", quiet=True)
    assert not (tmp_path / "runs").exists()


def test_global_streams_are_left_alone(tmp_path: Path) -> None:
    """A fit seeds them for its factories; afterwards they go on as if it had not been, also after a failure."""
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    plan = made_plan().with_data(val=lambda: 1 / np.random.randint(0, 1))
    with pytest.raises(ZeroDivisionError):
        plan.fit(runs_dir=tmp_path, quiet=True)
    assert (random.random(), np.random.rand()) == expected


def test_one_of_several_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is called or written; how many processes there are is JAX's to say."""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    train = Counted(noisy)
    with pytest.raises(ProcessGroupError, match=r"ExperimentPlan.fit trains in one process, and this is one of 3"):
        made_plan().with_data(train=train).fit(runs_dir=tmp_path / "runs")
    assert train.calls == 0
    assert not (tmp_path / "runs").exists()


class StopAt(Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_begin(self, ctx: Any) -> None:
        if ctx.epoch == self.epoch:
            raise Killed


def test_an_interrupted_attempt_goes_on(fitted: tuple[FitResult, FitResult, Path], tmp_path: Path) -> None:
    """What was committed is not trained again, and the whole equals the uninterrupted fit."""
    with pytest.raises(Killed):
        made_plan().with_callbacks(StopAt(1)).fit("A", runs_dir=tmp_path, quiet=True)
    starts: list[int] = []

    class Begin(Callback):
        def on_train_begin(self, ctx: Any) -> None:
            starts.append(ctx.epoch)

    result = made_plan().with_callbacks(Begin()).fit("A", runs_dir=tmp_path, quiet=True)
    assert starts == [1]
    assert_same_run(result.run, fitted[0].run)


# -- probe --------------------------------------------------------------------------------------------------------

ROWS = dataset(6).arrays()


def test_probe_shows_shapes_and_loss() -> None:
    plan = ExperimentPlan().with_net(net_params()).with_data(data_params())
    found = plan.probe((ROWS["x"], ROWS["y"]))
    assert found.inputs["x"].shape == (6, 4)
    assert (found.outputs.shape, found.outputs.dtype) == ((6, 3), np.float32)
    assert found.parameters == 4 * 6 + 6 + 2 * 6 + 6 * 3 + 3
    model = NNModel(net_params(input_dim=4, output_dim=3), seed=0)
    assert found.loss == pytest.approx(model.evaluate(ArrayDataset(x=ROWS["x"], y=ROWS["y"]))["loss"], rel=1e-6)
    assert plan.probe(ROWS["x"]).loss is None
    assert plan.with_train(NNTrainParams(n_epochs=1, seed=3)).probe({"x": ROWS["x"], "y": ROWS["y"]}).loss != found.loss


class Fails(Linear):
    def __call__(self, x: jax.Array) -> jax.Array:
        np.random.rand()
        raise ValueError("no such shape")


@pytest.mark.parametrize("net", [Linear, Fails], ids=["works", "fails"])
def test_probe_leaves_the_random_streams_alone(net: Any) -> None:
    """nnx:B166: the network draws from them when it is made and when it is called."""
    before, legacy = random.getstate(), np.random.get_state()
    plan = ExperimentPlan().with_net(net)
    if net is Fails:
        with pytest.raises(ModelError, match=r"Fails does not take the batch \(x float32\[6, 4\]\): no such shape"):
            plan.probe(ROWS["x"])
    else:
        assert plan.probe(ROWS["x"]).outputs.shape == (6, 3)
    assert random.getstate() == before
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), legacy, strict=True))


def test_probe_needs_a_network_only() -> None:
    with pytest.raises(PlanError, match="model: there is no network"):
        ExperimentPlan().probe(ROWS["x"])
    with pytest.raises(PlanError, match=r"model.metrics\[0\]"):
        ExperimentPlan().with_net(Linear).with_metrics("acc").with_epochs(0).probe(ROWS["x"])
