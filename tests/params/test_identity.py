"""The id of a run counts what changes numbers and nothing else, and survives every way of writing it down."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.spec import ENVIRONMENT, Spec
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import NNTrainParams


def run(**parts: Any) -> RunSpec:
    parts = {"data": {"train": "test_rows", "val": {"kind": "test_rows", "n": 7}}, "train": {"n_epochs": 2}} | parts
    return RunSpec.from_state(parts)


def trained(**fields: Any) -> RunSpec:
    return run(train={"n_epochs": 2} | fields)


# -- identity ---------------------------------------------------------------------------------------------------------


def test_equal_configurations_have_equal_ids_of_sixteen_hex_digits() -> None:
    """nnx:B021: the same configuration twice gives equal ids."""
    assert run().run_id() == run().run_id()
    assert len(run().run_id()) == 16
    assert int(run().run_id(), 16) >= 0


def test_the_golden_identity() -> None:
    """Stored runs are found by this: neither the layout of the identity nor its hash may move.

    The expected id is SHA-256 of the JSON in `expected`, computed with json and hashlib alone.
    """
    spec = run(
        model={"net": {"kind": "feed_forward", "hidden_dims": [8]}, "metrics": ["accuracy"]},
        train={"n_epochs": 2, "seed": 3, "salt": "a", "optim": {"kind": "sgd", "max_lr": 0.1}},
    )
    expected = {
        "data": {"train": "100 rows of 0.0", "val": "7 rows of 0.0"},
        "model": {"metrics": [{"kind": "accuracy"}]},
        "net": {"hidden_dims": [8], "kind": "feed_forward"},
        "salt": "a",
        "train": {"n_epochs": 2, "optim": {"kind": "sgd", "max_lr": 0.1}, "seed": 3},
    }
    assert spec.identity() == expected
    text = json.dumps(expected, sort_keys=True, separators=(",", ":"))
    assert spec.run_id() == hashlib.sha256(text.encode()).hexdigest()[:16] == "b34d362194189b85"


def test_optional_fields_at_their_default_do_not_count() -> None:
    """nnx:B022: every optional field of NNTrainParams written out at its default gives the same id."""
    bare = NNTrainParams(n_epochs=2)
    written = NNTrainParams(**{name: getattr(bare, name) for name in NNTrainParams.model_fields})
    assert written == bare
    assert run().replace(train=written).run_id() == run().run_id()
    assert written.state() == {"n_epochs": 2}


# Another legal value for every field that counts. `test_every_real_field_moves_the_id` refuses a field that is missing.
OTHER: dict[str, Any] = {
    "backend": "equinox",
    "model.net": {"kind": "conv"},
    "model.net.input_dim": 3,
    "model.net.output_dim": 3,
    "model.net.hidden_dims": [5],
    "model.net.activation": "gelu",
    "model.net.dropout_prob": 0.25,
    "model.net.norm": "layer",
    "model.loss": "mse",
    "model.loss.label_smoothing": 0.1,
    "model.loss.ignore_index": -1,
    "model.loss.class_weights": [1.0, 2.0],
    "model.metrics": ["accuracy", "f1"],
    "model.precision": "bfloat16",
    "model.freeze": ["layers.*"],
    "data.train": {"kind": "test_rows", "n": 50},
    "data.train.n": 51,
    "data.train.value": 1.0,
    "data.val": None,
    "data.val.n": 9,
    "data.val.value": 1.0,
    "data.test": "test_rows",
    "data.batch_size": 16,
    "data.tail": "drop",
    "data.shuffle": False,
    "data.seed": 5,
    "data.eval_batch_size": 64,
    "train.n_epochs": 3,
    "train.max_steps": 7,
    "train.steps_per_epoch": 5,
    "train.seed": 1,
    "train.salt": "x",
    "train.data_id": "d",
    "train.precision": "bfloat16",
    "train.optim.kind": "lion",
    "train.optim.max_lr": 0.5,
    "train.optim.weight_decay": 0.5,
    "train.optim.momentum": 0.5,
    "train.optim.nesterov": True,
    "train.optim.betas": [0.5, 0.5],
    "train.optim.eps": 1e-3,
    "train.optim.grad_clip_norm": 1.0,
    "train.optim.accumulate_grad_batches": 2,
    "train.optim.decay_mask": "all",
    "train.optim.param_groups": [{"patterns": "a", "lr_scale": 0.5}],
    "train.optim.options": {"decay": 0.5},
    "train.scheduler.kind": "cosine",
    "train.scheduler.clock": "optimizer_update",
    "train.scheduler.min_lr": 1e-5,
    "train.scheduler.factor": 0.5,
    "train.scheduler.patience": 1,
    "train.scheduler.cooldown": 1,
    "train.scheduler.threshold": 0.5,
    "train.scheduler.step_size": 3,
    "train.scheduler.T_max": 3,
    "train.scheduler.total_steps": 10_000,
    "train.scheduler.warmup_steps": 3,
    "train.monitor": {"split": "train"},
    "train.monitor.metric": "accuracy",
    "train.monitor.split": "train",
    "train.monitor.mode": "max",
    "train.monitor.min_delta": 0.5,
    "train.monitor.on_missing": "error",
    "train.monitor.on_nonfinite": "error",
    "train.record_every": "batch",
    "train.log_every_n_steps": 5,
    "train.eval_every_n_steps": 5,
    "train.eval_every_n_epochs": 2,
    "train.nonfinite": "skip",
    "train.max_consecutive_skips": 3,
    "train.reduction": "canonical",
    "train.reduction_shards": 16,
    "train.save_phase_checkpoints": False,
    "train.resume_from_run_id": "0123456789abcdef",
    "train.resume_from_checkpoint": "BEST",
    "train.resume_epochs": "planned",
    "train.parent_run_id": "0123456789abcdef",
    "trainer": {"n_epochs": 3, "optims": {"main": {}}},
    "hooks": ["test_ema"],
}
SETTING: dict[str, Any] = {  # what must be chosen for a field to mean something
    "train.reduction_shards": {"train.reduction": "canonical"},
    "train.optim.momentum": {"train.optim.kind": "sgd"},
    "train.optim.nesterov": {"train.optim.kind": "sgd"},
    "train.optim.options": {"train.optim.kind": "rmsprop"},
    "train.scheduler.min_lr": {"train.scheduler.kind": "cosine"},
    "train.scheduler.factor": {"train.scheduler.kind": "step"},
    "train.scheduler.patience": {"train.scheduler.kind": "reduce_on_plateau"},
    "train.scheduler.cooldown": {"train.scheduler.kind": "reduce_on_plateau"},
    "train.scheduler.threshold": {"train.scheduler.kind": "reduce_on_plateau"},
    "train.scheduler.step_size": {"train.scheduler.kind": "step"},
    "train.scheduler.T_max": {"train.scheduler.kind": "cosine"},
    "train.scheduler.total_steps": {"train.scheduler.kind": "one_cycle"},
    "train.scheduler.warmup_steps": {"train.scheduler.kind": "warmup_cosine"},
    "train.monitor": {"train.monitor": None},
    "train.max_steps": {"train.n_epochs": None, "train.max_steps": 3},
    "data.val": {"train.monitor": None},
    "train.resume_from_checkpoint": {"train.resume_from_run_id": "0123456789abcdef"},
    "train.resume_epochs": {"train.resume_from_run_id": "0123456789abcdef"},
    "train.parent_run_id": {},
    "trainer": {"train": None, "trainer": {"n_epochs": 2, "optims": {"main": {}}}},
}
BASE: dict[str, Any] = {
    "backend": "flax",
    "model": {"net": {"kind": "feed_forward"}, "loss": {"kind": "cross_entropy"}, "metrics": [{"kind": "accuracy"}]},
    "data": {"train": {"kind": "test_rows"}, "val": {"kind": "test_rows", "n": 7}},
    "train": {"n_epochs": 2, "optim": {"kind": "adam"}, "scheduler": {"kind": "constant"}, "monitor": {}},
}


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of nested mappings with one place changed."""
    first, _, rest = path.partition(".")
    return {**base, first: changed(base.get(first) or {}, rest, value) if rest else value}


def real_paths(spec: Spec, around: str = "") -> Iterator[str]:
    """Yield the dotted path of every field below `spec` that is neither environment nor for Python only."""
    for name, field in type(spec).model_fields.items():
        if field.exclude or ENVIRONMENT in field.metadata:
            continue
        yield f"{around}{name}"
        value = getattr(spec, name)
        if isinstance(value, Spec):
            yield from real_paths(value, f"{around}{name}.")


@pytest.mark.parametrize("path", sorted(OTHER))
def test_every_real_field_moves_the_id(path: str) -> None:
    """nnx:B023: a change of seed, data_id, phase checkpoints, metrics, resume source, or any other real field.

    Law Q7 of the reliability notes, by hand for each field; the next test shows that no field is missing here.
    """
    base = BASE
    for place, value in SETTING.get(path, {}).items():
        base = changed(base, place, value)
    before, after = RunSpec.from_state(base), RunSpec.from_state(changed(base, path, OTHER[path]))
    assert before.run_id() != after.run_id()


def test_no_real_field_is_missing_above() -> None:
    paths = set(real_paths(RunSpec.from_state(BASE)))
    assert len(paths) > 60
    missing = {path for path in paths if not any(f"{known}.".startswith(f"{path}.") for known in OTHER)}
    assert missing == {"data.train.path", "data.val.path"}  # where rows lie


@pytest.mark.parametrize(
    "change",
    [
        {"train.overwrite_existing": True},
        {"train.resume_mode": "weights_only"},
        {"train.dispatch": "span"},
        {"imports": ["os"]},
        {"mesh": {"data": 2}},
        {"sharding": {"head.kernel": [None, "tensor"]}},
        {"elastic": True},
        {"checkpoint": {"every_n_steps": 5, "keep": 3}},
        {"callbacks": ["early_stopping", {"kind": "model_checkpoint", "epochs": [0]}]},
        {"hooks": ["test_watcher"]},
        {"data.train": {"kind": "test_rows", "path": "elsewhere"}},
        {"data.seed": 0},
        {"data.eval_batch_size": 32},
        {"model.loss": "cross_entropy"},
        {"train.precision": "float32"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_environment_never_moves_the_id(change: dict[str, Any]) -> None:
    """nnx:B024: how a run is executed, watched or kept does not count, nor does where the rows lie."""
    state = BASE
    for path, value in change.items():
        state = changed(state, path, value)
    assert RunSpec.from_state(state).run_id() == RunSpec.from_state(BASE).run_id()


def test_python_only_fields_never_move_the_id() -> None:
    """nnx:B024: loaders and extra_metrics."""
    plain = RunSpec(train=NNTrainParams(n_epochs=2))
    loaded = RunSpec(
        train=NNTrainParams(n_epochs=2, train_loader=[1, 2], val_loader=[3], extra_metrics={"own": lambda o, b: 0.0})
    )
    assert loaded.run_id() == plain.run_id()


def test_salt_makes_another_run() -> None:
    """nnx:B025: a salt gives a different id; a blank or a number is a ValueError."""
    assert trained(salt="x").run_id() != run().run_id()
    assert trained(salt="x").run_id() != trained(salt="y").run_id()
    for salt in (" ", "", "\t", 3, "a\nb"):
        with pytest.raises(ValueError, match=r"NNTrainParams\.salt: got .*expected (one line of )?(at most|text)"):
            NNTrainParams(n_epochs=1, salt=salt)


def test_precision_means_the_same_in_both_places() -> None:
    left = run(model={"precision": "bfloat16"})
    right = trained(precision="bfloat16")
    assert left.precision == right.precision == "bfloat16"
    wide = trained(precision="float64")
    assert wide.identity()["model"] == {"precision": "float64"}
    assert wide.run_id() == run(model={"precision": "float64"}).run_id() not in (left.run_id(), run().run_id())
    assert left.run_id() == right.run_id()
    with pytest.raises(ConfigError, match=r"train\.precision: got 'float32', but model\.precision is 'bfloat16'"):
        run(model={"precision": "bfloat16"}, train={"n_epochs": 1, "precision": "float32"})


def test_the_seed_of_the_data_follows_the_seed_of_training() -> None:
    assert trained(seed=4).data_seed == 4
    assert run(data={"train": "test_rows", "seed": 9}).data_seed == 9
    explicit = run(data={"train": "test_rows", "seed": 4}, train={"n_epochs": 2, "seed": 4})
    assert explicit.run_id() == run(data={"train": "test_rows"}, train={"n_epochs": 2, "seed": 4}).run_id()


def test_a_module_and_a_loader_from_python_are_described_by_the_caller() -> None:
    spec = RunSpec(train=NNTrainParams(n_epochs=1))
    ids = {spec.run_id(), spec.run_id(net={"module": "a"}), spec.run_id(data={"loader": "b"})}
    assert len(ids) == 3


# -- round trips ------------------------------------------------------------------------------------------------------

nets = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.just("feed_forward")},
        optional={
            "hidden_dims": st.lists(st.integers(1, 4096), max_size=3),
            "dropout_prob": st.floats(0, 0.99),
            "norm": st.sampled_from([None, "batch", "layer"]),
            "output_dim": st.none() | st.integers(1, 100),
        },
    ),
    st.fixed_dictionaries({"kind": st.just("conv")}, optional={"kernel_size": st.integers(1, 9)}),
    st.just({"kind": "transformer_lm"}),
)
optims = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["adam", "adamw"]),
        "max_lr": st.floats(0, 1e6) | st.integers(0, 5),
        "weight_decay": st.none() | st.floats(0, 1),
        "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
        "eps": st.floats(1e-30, 1),
        "grad_clip_norm": st.none() | st.floats(1e-6, 1e6),
        "accumulate_grad_batches": st.integers(1, 64),
        "decay_mask": st.sampled_from(["auto", "all", ["*.kernel"]]),
    },
)
texts = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)
configs = st.fixed_dictionaries(
    {
        "train": st.fixed_dictionaries(
            {"n_epochs": st.integers(1, 2**31 - 1)},
            optional={
                "seed": st.integers(0, 2**32 - 1),
                "salt": st.none() | texts,
                "optim": optims,
                "scheduler": st.sampled_from([{}, {"kind": "cosine", "clock": "optimizer_update"}, {"kind": "step"}]),
                "monitor": st.sampled_from([None, {}, {"metric": "accuracy", "mode": "max"}]),
                "dispatch": st.sampled_from(["auto", "step", "span"]),
                "save_phase_checkpoints": st.booleans(),
                "eval_every_n_epochs": st.none() | st.integers(1, 5),
            },
        ),
        "data": st.fixed_dictionaries(
            {"train": st.fixed_dictionaries({"kind": st.just("test_rows")}, optional={"value": st.floats(-9, 9)})},
            optional={"val": st.just("test_rows"), "shuffle": st.booleans(), "seed": st.none() | st.integers(0, 9)},
        ).map(lambda data: {"val": "test_rows", **data}),
        "model": st.fixed_dictionaries(
            {"metrics": st.just(["accuracy"])}, optional={"net": nets, "loss": st.just("mse")}
        ),
    },
    optional={
        "mesh": st.dictionaries(st.sampled_from(["data", "model"]), st.integers(1, 8)),
        "hooks": st.just(["test_ema"]),
    },
)


def reordered(value: Any) -> Any:
    """Return nested mappings with every order of keys turned round."""
    if isinstance(value, dict):
        return {key: reordered(item) for key, item in reversed(value.items())}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@given(configs)
def test_configurations_survive_files(config: dict[str, Any]) -> None:
    """nnx:B026 and law Q7: load(dump(c)) == c, the dump is byte-stable, the id ignores key order and defaults."""
    spec = RunSpec.from_state(config)
    text = spec.to_yaml()
    again = RunSpec.from_yaml(text)
    assert again == spec
    assert again.state(environment=True) == spec.state(environment=True)
    assert again.to_yaml() == text
    assert again.run_id() == spec.run_id()
    assert RunSpec.from_state(spec.state()).run_id() == spec.run_id()
    assert RunSpec.from_state(reordered(config)).run_id() == spec.run_id()
    written_out = spec.replace(train=NNTrainParams(**{n: getattr(spec.train, n) for n in NNTrainParams.model_fields}))
    assert written_out.run_id() == spec.run_id()
