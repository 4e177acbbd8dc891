"""Metrics by id and version: declared without code, looked up when training starts, counted over every valid item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.loop.callbacks import Callback
from nnx_jax.model import NNModel
from nnx_jax.objectives.metrics import build_metric
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.metrics import MetricSpec, register_metric, registered_metrics, unregister_metric
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.train import MonitorSpec
from nnx_jax.runs.run import NNRun
from nnx_jax.step.own import TrainStepContext
from tests.e2e import helpers


class Share:
    """Of the items whose target is `of`, the share of the weight that was decided so."""

    size = 2

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.of = config["of"]

    def update(self, predicted: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
        mine = weight * (targets == self.of)
        return jnp.stack([jnp.sum(mine * (predicted == self.of)), jnp.sum(mine)])

    def compute(self, sums: np.ndarray) -> float:
        return float(sums[0] / sums[1]) if sums[1] else float("nan")


class Sure:
    """Mean probability of class 1, of `yes` for a yes/no output; of values, the mean of predictions minus targets."""

    size = 2

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def update(self, predicted: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
        values = predicted[..., 1] if predicted.ndim > targets.ndim else predicted
        values = values - targets if jnp.issubdtype(targets.dtype, jnp.floating) else values
        return jnp.stack([jnp.sum(weight * values), jnp.sum(weight)])

    compute = Share.compute


def check(config: Mapping[str, Any]) -> None:
    if config["of"] < 0:
        raise ValueError(f"there is no class {config['of']}")


@pytest.fixture(autouse=True)
def registrations() -> Iterator[None]:
    register_metric("my.share", 2, Share, input="labels", mode="max", check_config=check)
    register_metric("my.sure", 1, Sure, input="probabilities", mode="min")
    register_metric("my.bias", 1, Sure, input="continuous", mode="min")
    yield
    for known in (("my.share", 2), ("my.sure", 1), ("my.bias", 1)):
        unregister_metric(*known)


SHARE = MetricSpec(id="my.share", version=2, config={"of": 1}, name="share_1")


def value(spec: MetricSpec, outputs: Any, y: Any, loss: str, mask: Any = None) -> float:
    metric = build_metric(spec, 3, loss=loss)
    rows = jnp.ones(len(y), jnp.float32) if mask is None else jnp.asarray(mask, jnp.float32)
    return metric.compute(np.asarray(metric.update(jnp.asarray(outputs), {"y": jnp.asarray(y), "mask": rows})))


def test_each_input_is_what_it_says() -> None:
    """By hand: logs of probabilities as logits; masked rows and padding count for nothing."""
    logits = np.log([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]])
    assert value(SHARE, logits, [1, 1, 0, 1], "cross_entropy") == pytest.approx(2 / 3)
    assert value(SHARE, logits, [1, 1, 0, 1], "cross_entropy", mask=[1, 0, 1, 1]) == pytest.approx(1.0)
    sure = MetricSpec(id="my.sure")
    assert value(sure, logits, [0, 0, 0, 0], "cross_entropy") == pytest.approx((0.7 + 0.3 + 0.2 + 0.8) / 4)
    assert value(sure, [0.0, np.log(3.0)], [0, 1], "binary_cross_entropy") == pytest.approx((0.5 + 0.75) / 2)
    assert value(MetricSpec(id="my.bias"), [1.0, 4.0], [0.0, 1.0], "mse") == pytest.approx(2.0)


def test_a_built_in_metric_has_an_id_too() -> None:
    assert {("accuracy", 1), ("f1", 1), ("nll", 1), ("brier", 1), ("mae", 1), ("mse", 1)} <= set(registered_metrics())
    named = build_metric(MetricSpec(id="top_k", config={"k": 2}, name="two"), 3)
    plain = build_metric(MetricSpec(id="accuracy"), 3)
    assert (named.name, plain.name, plain.mode) == ("two", "accuracy", "max")


def test_an_unregistered_metric_can_be_stored_and_read_but_not_trained(tmp_path: Path) -> None:
    """nnx:B069 (with a monitor on it; no directory is made)"""
    params = NNModelParams(metrics=(MetricSpec(id="yours", version=3, config={"k": [1, {"a": 2.5}]}, name="y"),))
    assert NNModelParams.from_state(params.state()) == params
    assert NNModelParams.from_yaml(params.to_yaml()) == params
    monitor = MonitorSpec(metric="y")
    with pytest.raises(ValueError, match="metric 'yours' version 3 is not registered"):
        helpers.fit(tmp_path / "runs", of=NNModel(helpers.net_params(), params), monitor=monitor)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match="metric 'my.share' version 1 is not registered; known versions: 2"):
        MetricSpec(id="my.share").resolve()


def test_a_run_records_and_follows_a_registered_metric(tmp_path: Path) -> None:
    """Its direction is the registration's (max), and a stored run is read where nothing is registered."""
    model = NNModel(helpers.net_params(), NNModelParams(metrics=(SHARE,)))
    run = helpers.fit(tmp_path, of=model, n_epochs=2, monitor=MonitorSpec(metric="share_1"))
    unregister_metric("my.share", 2)
    again = NNRun.load(run.id, tmp_path)
    scores = [row for row in again.records if row["kind"] == "epoch"]
    assert [row["monitor"] for row in scores] == [row["val_share_1"] for row in scores]
    assert scores[1]["improved"] == (scores[1]["val_share_1"] > scores[0]["val_share_1"])
    assert NNModelParams.from_state(again.state["model"]).metrics == (SHARE,)


@pytest.mark.parametrize(
    ("spec", "loss", "problem"),
    [
        (SHARE, "mse", "metric 'my.share' version 2 compares 'labels', loss 'mse' gives continuous"),
        (MetricSpec(id="my.bias"), "cross_entropy", "compares 'continuous', loss 'cross_entropy' gives labels, prob"),
        (MetricSpec(id="my.share", version=2, config={"of": -1}), "cross_entropy", "there is no class -1"),
        (MetricSpec(id="my.share", version=2), "cross_entropy", r"does not take config {}: 'of'"),
        (MetricSpec(id="acuracy"), "cross_entropy", "did you mean 'accuracy'"),
    ],
)
def test_what_does_not_fit_is_told_before_training(spec: MetricSpec, loss: str, problem: str) -> None:
    """nnx:B070 (the inputs there are)"""
    with pytest.raises(ConfigError, match=problem):
        build_metric(spec, 3, loss=loss)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": "1st"}, "a metric's id is a letter"),
        ({"version": 0}, "must be a whole number"),
        ({"version": True}, "must be a whole number"),
        ({"input": "logits"}, "input of metric 'm' is 'logits'"),
        ({"mode": "MAX"}, "mode of metric 'm' is 'MAX'"),
        ({"id": "my.share", "version": 2}, "version 2 is registered"),
    ],
)
def test_wrong_registrations_are_refused(change: dict[str, Any], problem: str) -> None:
    given = {"id": "m", "version": 1, "factory": Share, "input": "labels", "mode": "max", **change}
    with pytest.raises(ConfigError, match=problem):
        register_metric(**given)
    assert ("m", 1) not in registered_metrics()
    with pytest.raises(TypeError):
        register_metric("m", 1, 3, input="labels", mode="max")  # pyright: ignore[reportArgumentType]


def test_a_training_monitor_needs_a_step_that_measures_it(tmp_path: Path) -> None:
    """nnx:B072 (a step of the user's own measures what it returns; no directory is made)"""

    def step(ctx: TrainStepContext) -> dict[str, Any]:
        ctx.report_update()
        return {"loss": jnp.float32(1.0)}

    runs = tmp_path / "runs"
    monitor = MonitorSpec(metric="accuracy", split="train")
    with pytest.raises(ValueError, match="train.monitor: it follows 'train_accuracy', which this run does not record"):
        helpers.model().train(
            helpers.train_params(monitor=monitor, scheduler={"kind": "constant"}), [Callback()], step,
            data=NNDataParams(train=helpers.dataset(), batch_size=4), runs_dir=runs,
        )  # fmt: skip
    assert not runs.exists()
