"""The parts of a run must fit together; what does not is refused with its place, the value, and what to write."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nnx_jax import params
from nnx_jax.core.errors import ConfigError
from nnx_jax.core.registry import lookup, register
from nnx_jax.params.callbacks import EarlyStoppingParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.schema import json_schema
from nnx_jax.params.train import CheckpointParams, MonitorSpec, NNTrainParams


def run(**parts: Any) -> RunSpec:
    parts = {"data": {"train": "test_rows", "val": {"kind": "test_rows", "n": 7}}, "train": {"n_epochs": 2}} | parts
    return RunSpec.from_state(parts)


def trained(**fields: Any) -> RunSpec:
    return run(train={"n_epochs": 2} | fields)


# -- training parameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2.0, True, "2", 0, -1, 2**31])
@pytest.mark.parametrize("field", ["n_epochs", "max_steps", "steps_per_epoch", "log_every_n_steps"])
def test_counts_are_positive_integers(field: str, value: object) -> None:
    """nnx:B028: 2.0, True, "2" and 0 are a ValueError that names the field."""
    with pytest.raises(ValueError, match=rf"NNTrainParams\.{field}: got .*; expected"):
        NNTrainParams(**{"n_epochs": 1, field: value})


def test_numpy_counts_are_stored_as_int() -> None:
    """nnx:B028."""
    assert type(NNTrainParams(n_epochs=np.int64(2)).n_epochs) is int


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"n_epochs: neither is given; give exactly one of n_epochs and max_steps"),
        ({"n_epochs": 1, "max_steps": 1}, r"n_epochs: both are given"),
        ({"n_epochs": 1, "seed": -1}, r"seed: got -1"),
        ({"n_epochs": 1, "seed": None}, r"seed: got None; expected an integer"),
        ({"n_epochs": 1, "resume_from_checkpoint": "BEST"}, r"resume_from_checkpoint: got 'BEST', which needs"),
        ({"n_epochs": 1, "resume_epochs": "planned"}, r"resume_epochs: got 'planned', which needs resume_from_run_id"),
        ({"n_epochs": 1, "resume_from_run_id": "a", "parent_run_id": "b"}, r"parent_run_id: got 'b', but the run"),
        ({"n_epochs": 1, "extra_metrics": {"x": 3}}, r"extra_metrics: expected a mapping from names to functions"),
        ({"n_epochs": 1, "monitor": {"mode": "MAX"}}, r"monitor\.mode: got 'MAX'; expected one of 'min' or 'max'"),
        ({"n_epochs": 1, "monitor": {"min_delta": -1.0}}, r"monitor\.min_delta: got -1\.0"),
        ({"epochs": 1}, r"unknown key 'epochs'; did you mean 'n_epochs'"),
        (
            {"n_epochs": 1, "optim": {"param_groups": [{"patterns": "a"}]}},
            r"optim\.param_groups\[0\]: the group changes",
        ),
    ],
)
def test_wrong_training_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"NNTrainParams\.(.*\n.*)?(epochs: )?{message}"):
        NNTrainParams(**fields)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", "", ".", "a\0b", "x" * 300, "*", "a b", "~", "$HOME"])
@pytest.mark.parametrize("field", ["resume_from_run_id", "parent_run_id", "resume_from_checkpoint"])
def test_names_of_runs_cannot_leave_the_store(field: str, name: str) -> None:
    """Case H2 of the reliability notes: refused where the configuration is read, before any file is touched."""
    with pytest.raises(ConfigError, match=rf"NNTrainParams\.{field}: got '"):
        NNTrainParams(**{"n_epochs": 1, "resume_from_run_id": "0123456789abcdef", field: name})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: run(mesh={"data": 10**9}), r"mesh\.data: got 1000000000 \(int\); expected a value <= 65536"),
        (lambda: run(mesh={"data": 0}), r"mesh\.data: got 0"),
        (lambda: trained(optim={"max_lr": 1e308}), r"train\.optim\.max_lr: got 1e\+308"),
        (lambda: trained(n_epochs=-(10**9)), r"train\.n_epochs: got -1000000000"),
        (lambda: run(data={"train": "test_rows", "batch_size": 10**9}), r"data\.batch_size: got 1000000000"),
        (lambda: run(checkpoint={"keep": 0}), r"checkpoint\.keep: got 0"),
        (lambda: run(checkpoint={"every_n_steps": 0}), r"checkpoint\.every_n_steps: got 0"),
        (lambda: run(model={"net": {"kind": "conv", "channels": []}}), r"model\.net\.channels: got \(\)"),
        (lambda: run(callbacks=[{"kind": "model_checkpoint", "tag": "../x"}]), r"callbacks\[0\]\.tag: got '\.\./x'"),
        (lambda: run(callbacks=[{"kind": "early_stopping", "patience": -1}]), r"callbacks\[0\]\.patience: got -1"),
        (lambda: run(data=None, backend=""), r"backend: got ''"),
    ],
)
def test_hostile_values_are_refused(build: Callable[[], RunSpec], message: str) -> None:
    """Case H2 of the reliability notes: negative, zero, 1e308, empty lists, a billion devices, path fields."""
    with pytest.raises(ConfigError, match=rf"RunSpec\.{message}"):
        build()


# -- rules between parts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"train": {"n_epochs": 1, "monitor": {"metric": "los"}}},
            r"RunSpec\.train\.monitor\.metric: got 'los', which this run does not record; did you mean 'loss'",
        ),
        (
            {"train": {"n_epochs": 1, "monitor": {}}, "data": {"train": "test_rows"}},
            r"RunSpec\.train\.monitor\.split: got 'val', but there is no validation data",
        ),
        (
            {"callbacks": [{"kind": "early_stopping", "monitor": {"metric": "f1"}}]},
            r"RunSpec\.callbacks\[0\]\.monitor\.metric: got 'f1', which this run does not record",
        ),
    ],
)
def test_a_monitor_names_what_is_recorded(parts: dict[str, Any], message: str) -> None:
    """case:H13: an unknown value, or validation without validation rows, fails before update 1, with the names."""
    with pytest.raises(ConfigError, match=message):
        run(**parts)


def test_a_metric_without_direction_needs_a_mode() -> None:
    """case:H04: no silent "min" for a metric of your own."""
    model = {"metrics": [{"kind": "test_blank_metric", "name": "val_pck_0.15"}]}
    with pytest.raises(ConfigError, match=r"monitor\.mode: the better direction of 'val_pck_0\.15' is not known"):
        run(model=model, train={"n_epochs": 1, "monitor": {"metric": "val_pck_0.15"}})
    chosen = run(model=model, train={"n_epochs": 1, "monitor": {"metric": "val_pck_0.15", "mode": "max"}})
    assert chosen.train.monitor is not None
    assert chosen.train.monitor.mode == "max"
    with pytest.raises(ConfigError, match=r"mode: got 'maximum'; expected one of 'min' or 'max'"):
        MonitorSpec(metric="val_auc", mode="maximum")


def test_extra_metrics_can_be_monitored_and_must_be_free() -> None:
    extra = {"own": lambda outputs, batch: 0.0}
    with pytest.raises(ConfigError, match=r"train\.monitor\.mode: the better direction of 'own' is not known"):
        RunSpec(train=NNTrainParams(n_epochs=1, extra_metrics=extra, val_loader=[1], monitor=MonitorSpec(metric="own")))
    with pytest.raises(ConfigError, match=r"train\.extra_metrics: 'loss' is recorded by the trainer itself"):
        RunSpec(train=NNTrainParams(n_epochs=1, extra_metrics={"loss": extra["own"]}))


def test_data_and_loader_cannot_both_be_given() -> None:
    data = {"train": lookup("dataset", "test_rows")()}
    with pytest.raises(ConfigError, match=r"train\.train_loader: data\.train is given as well"):
        RunSpec(data=data, train=NNTrainParams(n_epochs=1, train_loader=[1]))


@pytest.mark.parametrize(
    ("rows", "batch", "tail", "accumulate", "epochs", "updates"),
    [
        (10, 4, "pad", 2, 3, 6),  # 3 microbatches, 2 windows an epoch
        (10, 4, "drop", 2, 3, 3),
        (10, 4, "keep", 1, 3, 9),
        (32, 1, "pad", 4, 1, 8),
        (32, 4, "pad", 1, 1, 8),
        (3, 4, "drop", 1, 5, 0),
        (1, 4, "pad", 100, 5, 5),
    ],
)
def test_planned_updates(rows: int, batch: int, tail: str, accumulate: int, epochs: int, updates: int) -> None:
    """case:B05 case:B07: the last window of an epoch may be shorter, so each epoch rounds up, never down."""
    spec = run(
        data={"train": {"kind": "test_rows", "n": rows}, "batch_size": batch, "tail": tail},
        train={"n_epochs": epochs, "optim": {"accumulate_grad_batches": accumulate}},
    )
    assert spec.planned_updates() == updates


def test_planned_updates_that_cannot_be_known() -> None:
    assert trained(n_epochs=None, max_steps=9).planned_updates() == 9
    assert trained(steps_per_epoch=5).planned_updates() == 10
    assert RunSpec(train=NNTrainParams(n_epochs=2)).planned_updates() is None
    assert RunSpec(train=NNTrainParams(n_epochs=2, train_loader=[1, 2, 3])).planned_updates() == 6
    assert RunSpec(train=NNTrainParams(n_epochs=2, train_loader=iter([1]))).planned_updates() is None


def test_a_schedule_shorter_than_the_plan_is_refused() -> None:
    """100 rows in batches of 32 are 4 updates an epoch, 8 in 2 epochs."""
    schedule = {"kind": "one_cycle", "clock": "optimizer_update", "total_steps": 7}
    with pytest.raises(ConfigError, match=r"train\.scheduler\.total_steps: got 7, but 8 updates are planned; write 8"):
        trained(scheduler=schedule)
    assert trained(scheduler={**schedule, "total_steps": 8}).planned_updates() == 8
    with pytest.raises(ConfigError, match=r"got 1, but 2 epochs are planned; write 2"):
        trained(scheduler={"kind": "one_cycle", "total_steps": 1})


def test_unreadable_data_does_not_stop_validation() -> None:
    """The data speaks for itself when it is read; the length is then unknown here."""

    @register("test_unreadable", replace=True)
    class Unreadable(lookup("dataset", "test_rows")):
        def __len__(self) -> int:
            raise FileNotFoundError("no such file")

    spec = run(
        data={"train": "test_unreadable"},
        train={"n_epochs": 2, "scheduler": {"kind": "one_cycle", "clock": "optimizer_update", "total_steps": 1}},
    )
    assert spec.train.scheduler.total_steps == 1


def test_a_floor_above_the_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.scheduler\.min_lr: got 0\.5, more than train\.optim\.max_lr=0\.01"):
        trained(scheduler={"kind": "cosine", "min_lr": 0.5})
    assert trained(optim={"max_lr": 0}, scheduler={"kind": "reduce_on_plateau"}).train.optim.max_lr == 0.0


# -- files ------------------------------------------------------------------------------------------------------------


def test_callbacks_and_hooks_are_read_by_kind() -> None:
    spec = run(callbacks=["lr_monitor", {"kind": "early_stopping", "patience": 3}], hooks=[{"kind": "test_ema"}])
    assert [callback.kind for callback in spec.callbacks] == ["lr_monitor", "early_stopping"]
    assert spec.callbacks[1] == EarlyStoppingParams(patience=3)
    assert spec.hooks == (lookup("hook", "test_ema")(),)
    assert spec.checkpoint == CheckpointParams(every_n_epochs=1, keep=1)


def _params_modules() -> list[Any]:
    return [importlib.import_module(f"nnx_jax.params.{found.name}") for found in pkgutil.iter_modules(params.__path__)]


def test_the_schema_offers_every_kind_with_its_meaning() -> None:
    schema = json_schema()
    definitions = schema["$defs"]
    assert schema["oneOf"] == [{"required": ["train"]}, {"required": ["trainer"]}]
    assert {"conv", "feed_forward", "transformer_lm"} <= set(definitions["NNParams"]["anyOf"][0]["enum"])
    forward = definitions["FeedForwardParams"]["properties"]
    assert forward["kind"] == {"const": "feed_forward"}
    assert forward["hidden_dims"]["default"] == [64]
    assert forward["hidden_dims"]["description"] == "Widths of the hidden layers."
    train = definitions["NNTrainParams"]["properties"]
    assert train["seed"] == {
        "default": 0,
        "description": "Seed of everything random: weights, order, dropout.",
        "maximum": 2**32 - 1,
        "minimum": 0,
        "title": "Seed",
        "type": "integer",
    }
    assert not {"train_loader", "val_loader", "extra_metrics"} & set(train)
    written = {name for module in _params_modules() for name in vars(module)}
    undescribed = [
        f"{name}.{field}"
        for name, definition in definitions.items()
        if name in written  # not what other tests have registered
        for field, about in definition.get("properties", {}).items()
        if field != "kind" and "description" not in about
    ]
    assert undescribed == []


def test_every_file_writes_what_the_schema_allows() -> None:
    """The names of the schema are the names that are read."""
    names: set[str] = set(json_schema()["properties"])
    others = {"imports", "backend", "model", "data", "hooks", "callbacks", "checkpoint", "history", "mesh"}
    assert names == others | {"sharding", "elastic", "train", "trainer"}
