"""A plan says everything that is wrong with it at once, and does nothing to find out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError
from nnx_jax.loop.builtin import EarlyStopping
from nnx_jax.loop.callbacks import Callback
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import MonitorSpec, NNTrainParams
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.plan import ExperimentPlan, PlanError
from tests.e2e.helpers import data_params, net_params, train_params


class Linear(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


REPLACING = NNTrainParams(n_epochs=1, overwrite_existing=True)


def whole() -> ExperimentPlan:
    """A plan without problems."""
    return ExperimentPlan().with_net(net_params()).with_train(train_params()).with_data(data_params())


def paths(plan: ExperimentPlan) -> list[str]:
    return [problem.path for problem in plan.validate()]


def forbidden(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("validate calls nothing")


class Untouched:
    """A loader that nobody may iterate."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        forbidden()
        yield


def test_an_empty_plan_lists_all_that_is_missing(tmp_path: Path) -> None:
    """nnx:B160"""
    assert paths(ExperimentPlan()) == ["model", "train", "data.train"]
    with pytest.raises(PlanError) as caught:
        ExperimentPlan().fit(runs_dir=tmp_path / "runs")
    assert [problem.path for problem in caught.value.diagnostics] == ["model", "train", "data.train"]
    assert {ValueError, TypeError} <= set(type(caught.value).__mro__)
    assert all(path in str(caught.value) for path in ("model: ", "train: ", "data.train: "))
    assert not (tmp_path / "runs").exists()


def test_a_whole_plan_has_no_problem() -> None:
    assert whole().validate() == ()


def test_every_problem_has_the_path_of_its_field() -> None:
    plan = (
        whole()
        .with_metrics("acuracy")
        .with_epochs(0)
        .with_optim(NNOptimParams(max_lr=0.1))
        .with_data(batch_size=0)
        .with_callbacks(EarlyStopping, 3)
        .with_callback_factories(EarlyStopping())
    )
    found = {problem.path: problem.message for problem in plan.validate()}
    assert list(found) == [
        "model.metrics[0]",
        "data.batch_size",
        "train.n_epochs",
        "callbacks[0]",
        "callbacks[1]",
        "callback_factories[0]",
    ]
    assert "did you mean 'accuracy'" in found["model.metrics[0]"]
    assert "got 0" in found["train.n_epochs"]
    assert "EarlyStopping is a class" in found["callbacks[0]"]


@pytest.mark.parametrize(
    "change, path, message",
    [
        (lambda p: p.with_train(REPLACING), "train.overwrite_existing", "name an attempt"),
        (lambda p: p.with_train(NNTrainParams(n_epochs=1, salt="x")), "train.salt", "attempt"),
        (lambda p: p.with_model({"metrics": ["accuracy"]}), "model", "expected NNModelParams, got dict"),
        (lambda p: p.with_train(NNTrainerParams(n_epochs=1, optims={"main": {}})), "train", "got NNTrainerParams"),
        (lambda p: p.with_net(Linear(nnx.Rngs(0))), "net", "trained in place"),
        (lambda p: p.with_net("mlp"), "net", "got str"),
        (lambda p: p.with_data(train=7), "data.train", "got int"),
        (lambda p: p.with_data(train=None), "data.train", "is required"),
        (lambda p: p.with_data(val=iter(())), "data.val", "used up"),
        (lambda p: p.with_data(test=[]), "data.test", "is a loader"),
        (lambda p: p.with_data(train=[]), "data.val", "is a dataset while data.train is a loader"),
        (lambda p: p.with_data(train=[], val=None), "data.batch_size", "makes its own batches"),
        (lambda p: p.with_data(batchsize=3), "data.batchsize", "did you mean 'batch_size'"),
        (lambda p: p.with_monitor(MonitorSpec(metric="f1")), "train.monitor.metric", "does not record"),
        (lambda p: p.with_data(val=None).with_monitor(MonitorSpec()), "train.monitor.split", "no validation data"),
        (lambda p: p.with_step_fns(train=3), "step_fns.train", "expected a function"),
        (lambda p: p.with_step_fns(train=forbidden).with_objective(forbidden), "objective", "give one of them"),
        (lambda p: p.with_checkpoint({"keep": 3}), "checkpoint", "expected CheckpointParams"),
        (lambda p: p.with_history(100), "history", "expected HistoryJournal, got int"),
        (lambda p: p.with_provenance("mine"), "provenance", "expected ExperimentManifest, got str"),
        (lambda p: p.with_components(object()), "components[0]", "object has no component_spec"),
        (lambda p: p.with_mesh({"data": 0}), "mesh.data", "got 0"),
        (lambda p: p.with_mesh({"data": 2}, {"*.bias": ["date"]}), "sharding.*.bias", "did you mean 'data'"),
        (lambda p: p.resuming("../other"), "train.resume_from_run_id", "cannot be a file name"),
    ],
)  # fmt: skip
def test_one_problem(change: Any, path: str, message: str) -> None:
    """nnx:B167 among them: a fit replaces no other run."""
    found = {problem.path: problem.message for problem in change(whole()).validate()}
    assert path in found
    assert message in found[path]


def test_validation_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:B164: no factory is called, no loader iterated, no model built and no directory made, whatever is wrong."""
    monkeypatch.chdir(tmp_path)
    loader = Untouched()
    plan = (
        ExperimentPlan()
        .with_net(forbidden)
        .with_model(NNModelParams(metrics=("accuracy",)), loss=forbidden)
        .with_train(NNTrainParams(max_steps=3, monitor=MonitorSpec()))
        .with_data(train=forbidden, val=forbidden, test=forbidden)
        .with_callback_factories(forbidden)
        .with_extra_metrics({"mine": forbidden})
        .with_step_fns(evaluate=forbidden)
    )
    assert plan.validate() == plan.validate() == ()
    assert plan.with_data(train=loader, val=loader, test=None).validate() == ()
    assert paths(plan.with_data(train=forbidden, batch_size=-1)) == ["data.batch_size"]
    assert os.listdir(tmp_path) == []


def test_no_plan_ever_changes() -> None:
    """nnx:B163: neither by `with_...`, nor by what happens to the caller's lists later."""
    source = whole()
    before = source.settings
    callbacks: list[Callback] = [EarlyStopping()]
    metrics: dict[str, Any] = {"mine": forbidden}
    x = np.zeros((2, 4), np.float32)
    batches = [(x, np.zeros(2, np.int32))]
    plan = source.with_callbacks(callbacks).with_extra_metrics(metrics).with_data(train=batches, val=None)
    kept = plan.settings
    callbacks.append(EarlyStopping())
    metrics["other"] = forbidden
    batches.clear()
    assert source.settings is before
    assert source.settings.callbacks == ()
    assert source.with_epochs(9).settings.train_changes == {"n_epochs": 9}
    assert source.settings.train_changes == {}
    assert len(kept.callbacks) == 1
    assert set(kept.train_changes["extra_metrics"]) == {"mine"}
    assert len(kept.data_changes["train"]) == 1
    with pytest.raises(AttributeError, match="never changes"):
        plan.settings = before
    with pytest.raises(TypeError):
        kept.train_changes["n_epochs"] = 3  # pyright: ignore[reportIndexIssue]


def test_a_later_call_wins_in_what_it_says() -> None:
    """Single fields stay when an object follows that does not speak of them; a length takes the other one back."""

    def train(plan: ExperimentPlan) -> dict[str, Any]:
        return plan.settings.state_of("train")

    plan = ExperimentPlan().with_seed(3).with_epochs(9).with_train(NNTrainParams(n_epochs=2))
    assert train(plan) == {"n_epochs": 2, "seed": 3}
    assert train(plan.with_epochs(5)) == {"n_epochs": 5, "seed": 3}
    assert train(plan.with_epochs(5).with_train(NNTrainParams(max_steps=7))) == {"max_steps": 7, "seed": 3}
    assert train(ExperimentPlan().with_train(NNTrainParams(max_steps=7)).with_epochs(1)) == {"n_epochs": 1}
    resumed = plan.resuming("abc", "BEST", epochs="planned")
    assert train(resumed)["resume_from_checkpoint"] == "BEST"
    assert resumed.without_resume().with_net(net_params()).with_data(data_params()).validate() == ()
    net = ExperimentPlan().with_net(Linear).with_net(net_params()).settings
    assert net.module is None
    assert net.model_changes["net"] == net_params()


def test_a_plan_of_a_configuration() -> None:
    spec = RunSpec(model={"net": net_params()}, train=train_params(), data=data_params())
    assert ExperimentPlan.from_spec(spec).validate() == ()
    split = spec.replace(mesh={"tensor": 2}, sharding={"head.kernel": ["tensor"]}, elastic=True)
    kept = ExperimentPlan.from_spec(split).settings
    assert (kept.mesh, kept.sharding, kept.elastic) == (split.mesh, split.sharding, True)
    several = RunSpec(model={"net": net_params()}, trainer={"n_epochs": 1, "optims": {"main": {}}}, data=data_params())
    with pytest.raises(ConfigError, match="one optimizer"):
        ExperimentPlan.from_spec(several)


def test_datasets_may_be_named() -> None:
    plan = ExperimentPlan().with_net(net_params()).with_epochs(1).with_data(train={"kind": "digits"}, val="digits")
    assert plan.validate() == ()
    assert paths(plan.with_data(train="digitz")) == ["data.train"]
