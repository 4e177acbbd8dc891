"""Named optimizers are configured in a `trainer` block: whose names fit together, whose order does not count."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from nnx_jax.config import load_config
from nnx_jax.core.errors import ConfigError
from nnx_jax.core.spec import ENVIRONMENT
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import MonitorSpec, NNTrainParams
from nnx_jax.params.trainer import NNTrainerParams

COSINE = NNSchedulerParams(kind="cosine")


def owning(pattern: str, **fields: Any) -> NNOptimParams:
    return NNOptimParams(param_groups=[{"patterns": pattern}], **fields)


def two(**fields: Any) -> NNTrainerParams:
    optims = {"enc": owning("enc.*", max_lr=0.1), "dec": owning("dec.*", max_lr=0.2)}
    return NNTrainerParams(**{"n_epochs": 2, "optims": optims} | fields)


def run(trainer: Any, **parts: Any) -> RunSpec:
    data = {"train": "test_rows", "val": {"kind": "test_rows", "n": 7}}
    return RunSpec.from_state({"data": data, "trainer": trainer} | parts)


# -- the names --------------------------------------------------------------------------------------------------------


def test_the_order_of_optimizers_does_not_count() -> None:
    """nnx:B027: optimizers and schedules in another order are the same training, the same file and the same id."""
    optims, schedulers = dict(two().optims), {"enc": COSINE, "dec": NNSchedulerParams(kind="step")}
    there = two(optims=optims, schedulers=schedulers)
    back = two(optims=dict(reversed(optims.items())), schedulers=dict(reversed(schedulers.items())))
    assert list(there.optims) == list(back.optims) == ["dec", "enc"]
    assert there == back
    assert RunSpec(trainer=there).to_yaml() == RunSpec(trainer=back).to_yaml()
    assert RunSpec(trainer=there).run_id() == RunSpec(trainer=back).run_id()
    swapped = two(optims={"enc": optims["dec"], "dec": optims["enc"]}, schedulers=schedulers)
    assert RunSpec(trainer=swapped).run_id() != RunSpec(trainer=there).run_id()


def test_a_schedule_needs_its_optimizer() -> None:
    """nnx:B034: the builder's `build()` is a ValueError that names the unknown optimizer and those there are."""
    builder = NNTrainerParams.builder().n_epochs(1)
    for name, optim in two().optims.items():
        builder.optimizer(name, optim)
    with pytest.raises(ValueError, match=r"there is no optimizer 'head'; the optimizers are dec, enc"):
        builder.copy().scheduler("head", COSINE).build()
    assert dict(builder.scheduler("enc", COSINE).build().schedulers) == {"enc": COSINE}


def test_built_parameters_keep_what_they_were_given() -> None:
    """nnx:B035: later changes to the caller's dicts change nothing, and the mappings refuse assignment."""
    optims, schedulers = {"main": NNOptimParams(max_lr=0.1)}, {"main": COSINE}
    params = NNTrainerParams(n_epochs=1, optims=optims, schedulers=schedulers)
    before = params.content_hash()
    optims["main"] = NNOptimParams(max_lr=0.9)
    optims["other"] = NNOptimParams()
    schedulers.clear()
    assert dict(params.optims) == {"main": NNOptimParams(max_lr=0.1)}
    assert dict(params.schedulers) == {"main": COSINE}
    assert params.content_hash() == before
    for mapping in (params.optims, params.schedulers):
        with pytest.raises(TypeError, match="frozen specification"):
            mapping["main"] = mapping["main"]  # type: ignore[index]
        with pytest.raises(TypeError, match="frozen specification"):
            del mapping["main"]  # type: ignore[attr-defined]


def test_several_optimizers_need_patterns() -> None:
    """nnx:B233 (its second half): of two optimizers, the one without `param_groups` is a ValueError naming it."""
    with pytest.raises(ValueError, match=r"optims\.dec\.param_groups: is empty, .*give 'dec' the patterns"):
        two(optims={"enc": owning("enc.*"), "dec": NNOptimParams()})
    assert NNTrainerParams(n_epochs=1, optims={"dec": NNOptimParams()}).optims["dec"].param_groups == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optims": {}}, r"optims: got \{\}; name at least one optimizer"),
        ({"optims": {"a b": {}}}, r"optims\.a b.*: got 'a b'; expected a letter, then letters, digits and _"),
        ({"optims": {"../a": {}}}, r"got '\.\./a'; expected a letter"),
        ({"optims": {"a.b": {}}}, r"got 'a\.b'; expected a letter"),
        ({"optims": {"": {}}}, r"got ''; expected a letter"),
        ({"optims": {"a" * 65: {}}}, r"at most 64"),
        ({"optims": {3: {}}}, r"got 3 \(int\); expected text"),
        ({"optims": [{}]}, r"optims: got .*; expected a mapping"),
        ({"optims": {"a": {"kin": "adam"}}}, r"optims\.a\.kin: unknown key 'kin'; did you mean 'kind'"),
        ({"schedulers": {"a": {"kind": "cosine"}}, "optims": {}}, r"no optimizer 'a'; the optimizers are none"),
        ({"optimizers": {"a": {}}}, r"unknown key 'optimizers'; did you mean 'optims'"),
        ({"max_steps": 4}, r"n_epochs: both are given"),
        ({"n_epochs": None}, r"n_epochs: neither is given"),
        ({"n_epochs": 2.0}, r"n_epochs: got 2\.0 \(float\); expected an integer"),
        ({"resume_epochs": "planned"}, r"resume_epochs: got 'planned', which needs resume_from_run_id"),
    ],
)
def test_wrong_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        two(**fields)


def test_optimizers_are_required() -> None:
    with pytest.raises(ConfigError, match=r"NNTrainerParams\.optims: is required"):
        NNTrainerParams(n_epochs=1)  # pyright: ignore[reportCallIssue]


def test_an_optimizer_without_a_schedule_has_that_of_a_single_one() -> None:
    params = two(schedulers={"dec": COSINE})
    assert params.schedules == {"dec": COSINE, "enc": NNTrainParams(n_epochs=1).scheduler}


# -- what both kinds of training share --------------------------------------------------------------------------------


def test_both_kinds_of_training_have_the_same_fields_but_for_the_optimizers() -> None:
    single, several = NNTrainParams.model_fields, NNTrainerParams.model_fields
    assert set(single) - set(several) == {"optim", "scheduler"}
    assert set(several) - set(single) == {"optims", "schedulers", "auto_step_schedulers"}
    for name in set(single) & set(several):
        assert single[name].default == several[name].default
        assert single[name].description == several[name].description


def test_the_window_is_one_for_all_optimizers() -> None:
    assert NNTrainParams(n_epochs=1, optim=NNOptimParams(accumulate_grad_batches=3)).window == 3
    assert two().window == 1
    assert two().with_window(4).window == 4
    assert two().with_window(4).optims["enc"].max_lr == 0.1
    uneven = two(optims={"enc": owning("enc.*", accumulate_grad_batches=2), "dec": owning("dec.*")})
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches differs \(dec: 1, enc: 2\)"):
        _ = uneven.window


def test_planned_updates_are_those_of_the_window() -> None:
    """100 rows in batches of 32 are 4 batches: 4 updates an epoch, or 2 windows of 3 and 1."""
    assert run(two()).planned_updates() == 8
    assert run(two().with_window(3)).planned_updates() == 4
    assert run(two(n_epochs=None, max_steps=5)).planned_updates() == 5


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_the_golden_identity() -> None:
    """The id is SHA-256 of the JSON in `expected`, computed with json and hashlib alone: trainer in place of train."""
    spec = run(two(seed=3, salt="a", auto_step_schedulers=False, schedulers={"dec": COSINE}), hooks=["test_ema"])
    expected = {
        "data": {"train": "100 rows of 0.0", "val": "7 rows of 0.0"},
        "model": {},
        "net": {},
        "salt": "a",
        "trainer": {
            "auto_step_schedulers": False,
            "hooks": [{"kind": "test_ema"}],
            "n_epochs": 2,
            "optims": {
                "dec": {"max_lr": 0.2, "param_groups": [{"patterns": ["dec.*"]}]},
                "enc": {"max_lr": 0.1, "param_groups": [{"patterns": ["enc.*"]}]},
            },
            "schedulers": {"dec": {"kind": "cosine"}},
            "seed": 3,
        },
    }
    assert spec.identity() == expected
    text = json.dumps(expected, sort_keys=True, separators=(",", ":"))
    assert spec.run_id() == hashlib.sha256(text.encode()).hexdigest()[:16]


OTHER: dict[str, Any] = {
    "n_epochs": 3,
    "max_steps": 7,
    "steps_per_epoch": 5,
    "seed": 1,
    "salt": "x",
    "data_id": "d",
    "precision": "bfloat16",
    "monitor": {"split": "train"},
    "record_every": "batch",
    "log_every_n_steps": 5,
    "eval_every_n_steps": 5,
    "eval_every_n_epochs": 2,
    "nonfinite": "skip",
    "max_consecutive_skips": 3,
    "reduction": "canonical",
    "reduction_shards": 16,
    "save_phase_checkpoints": False,
    "resume_from_run_id": "0123456789abcdef",
    "resume_from_checkpoint": "BEST",
    "resume_epochs": "planned",
    "parent_run_id": "0123456789abcdef",
    "optims": {"main": {"max_lr": 0.5}},
    "schedulers": {"main": {"kind": "cosine"}},
    "auto_step_schedulers": False,
}
NEEDS: dict[str, dict[str, Any]] = {
    "reduction_shards": {"reduction": "canonical"},
    "max_steps": {"n_epochs": None, "max_steps": 3},
    "resume_from_checkpoint": {"resume_from_run_id": "0123456789abcdef"},
    "resume_epochs": {"resume_from_run_id": "0123456789abcdef"},
}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_every_real_field_moves_the_id(name: str) -> None:
    base = {"n_epochs": 2, "optims": {"main": {}}} | NEEDS.get(name, {})
    assert run(base).run_id() != run(base | {name: OTHER[name]}).run_id()


def test_no_real_field_is_missing_above_and_environment_never_moves_the_id() -> None:
    fields = NNTrainerParams.model_fields
    kept_out = {name for name, field in fields.items() if field.exclude or ENVIRONMENT in field.metadata}
    assert set(fields) - kept_out == set(OTHER)
    given = two(overwrite_existing=True, dispatch="step", train_loader=[1], extra_metrics={"own": lambda o, b: 0.0})
    assert RunSpec(trainer=given).run_id() == RunSpec(trainer=two()).run_id()


def test_one_optimizer_of_either_kind_is_another_run() -> None:
    """A Trainer's step is another program with another state, so `trainer` and `train` never share a directory."""
    single = RunSpec(train=NNTrainParams(n_epochs=1))
    assert RunSpec(trainer=NNTrainerParams(n_epochs=1, optims={"main": {}})).run_id() != single.run_id()


def test_exactly_one_of_train_and_trainer_is_given() -> None:
    with pytest.raises(ConfigError, match=r"RunSpec\.trainer: train is given as well; write one of them"):
        run(two(), train={"n_epochs": 1})
    with pytest.raises(ConfigError, match=r"RunSpec\.train: is required \(or trainer, with several optimizers\)"):
        RunSpec()
    single, several = RunSpec(train=NNTrainParams(n_epochs=1)), RunSpec(trainer=two())
    assert (single.block, several.block) == ("train", "trainer")
    assert single.training is single.train
    assert several.training is several.trainer
    assert single.with_training(two()) == several
    assert several.with_training(single.train) == single


def test_a_run_reads_the_common_fields_from_either_block() -> None:
    spec = run(two(seed=5, precision="bfloat16"))
    assert (spec.data_seed, spec.precision, spec.batches_per_epoch()) == (5, "bfloat16", 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"monitor": {"metric": "los"}}, r"trainer\.monitor\.metric: got 'los', which this run does not record"),
        ({"precision": "float32"}, r"trainer\.precision: got 'float32', but model\.precision is 'bfloat16'"),
        (
            {"schedulers": {"enc": {"kind": "cosine", "min_lr": 0.5}}},
            r"trainer\.schedulers\.enc\.min_lr: got 0\.5, more than trainer\.optims\.enc\.max_lr=0\.1",
        ),
        (
            {"schedulers": {"dec": {"kind": "one_cycle", "total_steps": 1}}},
            r"trainer\.schedulers\.dec\.total_steps: got 1, but 2 epochs are planned",
        ),
    ],
)
def test_errors_name_the_block(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(two(**fields), model={"precision": "bfloat16"})


def test_a_schedule_on_the_update_clock_may_be_shorter_than_the_windows() -> None:
    """A step of one's own may update an optimizer every other window; only the Trainer knows."""
    short = {"kind": "one_cycle", "clock": "optimizer_update", "total_steps": 1}
    assert run(two(schedulers={"dec": short})).trainer.schedulers["dec"].total_steps == 1  # type: ignore[union-attr]


def test_a_file_and_words_describe_it(tmp_path: Any) -> None:
    """The YAML form; errors carry the line, and overrides reach into a named optimizer."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "trainer:\n  n_epochs: 2\n  optims:\n    gen: {max_lr: 1e-3, param_groups: [{patterns: gen.*}]}\n"
        "    disc:\n      kind: sgd\n      param_groups: [{patterns: [disc.*]}]\n"
    )
    spec = load_config(path, ["trainer.optims.gen.max_lr=0.5", "trainer.seed=4"])
    assert spec.trainer is not None
    assert (spec.trainer.optims["gen"].max_lr, spec.trainer.seed, spec.trainer.optims["disc"].kind) == (0.5, 4, "sgd")
    again = RunSpec.from_yaml(spec.to_yaml())
    assert again == spec
    assert again.run_id() == spec.run_id()
    path.write_text("trainer:\n  n_epochs: 2\n  optims:\n    gen:\n      max_lr: fast\n")
    with pytest.raises(ConfigError, match=rf"{path}:5: trainer\.optims\.gen\.max_lr: got 'fast'; expected a number"):
        load_config(path)


# -- the builder ------------------------------------------------------------------------------------------------------


def test_the_builder_sets_every_thing_once() -> None:
    monitor, extra = MonitorSpec(split="train"), {"own": lambda outputs, batch: 0.0}
    params = (
        NNTrainerParams.builder()
        .optimizer("main", NNOptimParams(max_lr=0.5))
        .optimizer("main", NNOptimParams(max_lr=0.1))
        .scheduler("main", COSINE)
        .max_steps(9)
        .n_epochs(3)
        .seed(4)
        .salt("s")
        .data_id("d")
        .precision("bfloat16")
        .monitor(monitor)
        .resume_from("0123456789abcdef", "BEST", epochs="planned", mode="stateful")
        .overwrite_existing()
        .save_phase_checkpoints(False)
        .auto_step_schedulers(False)
        .train_loader([1])
        .val_loader([2])
        .extra_metrics(extra)
        .build()
    )
    assert params.changed() == {
        "n_epochs": 3,
        "seed": 4,
        "salt": "s",
        "data_id": "d",
        "precision": "bfloat16",
        "monitor": monitor,
        "save_phase_checkpoints": False,
        "resume_from_run_id": "0123456789abcdef",
        "resume_from_checkpoint": "BEST",
        "resume_epochs": "planned",
        "resume_mode": "stateful",
        "overwrite_existing": True,
        "train_loader": [1],
        "val_loader": [2],
        "extra_metrics": extra,
        "optims": {"main": NNOptimParams(max_lr=0.1)},
        "schedulers": {"main": COSINE},
        "auto_step_schedulers": False,
    }


def test_the_last_length_wins() -> None:
    builder = NNTrainerParams.builder().optimizer("main", NNOptimParams())
    assert builder.n_epochs(2).max_steps(np.int64(5)).build().max_steps == 5  # type: ignore[arg-type]
    assert builder.n_epochs(2).build().n_epochs == 2
    with pytest.raises(ConfigError, match="neither is given"):
        NNTrainerParams.builder().optimizer("main", NNOptimParams()).build()


def test_a_builder_never_changes_what_it_built() -> None:
    """nnx:B033: copies and built values stay, `from_params(p).build() == p`, another type is a TypeError."""
    builder = NNTrainerParams.builder().optimizer("a", owning("a.*")).n_epochs(1)
    built, twin = builder.build(), builder.copy()
    twin.optimizer("b", owning("b.*")).scheduler("b", COSINE).seed(9)
    assert builder.build() == built
    builder.optimizer("a", owning("a.*", max_lr=0.5)).scheduler("a", COSINE)
    assert built.optims["a"].max_lr == 1e-2
    assert not built.schedulers
    assert list(twin.build().optims) == ["a", "b"]
    params = two(schedulers={"dec": COSINE}, train_loader=[1], overwrite_existing=True)
    again = type(builder).from_params(params)
    assert again.build() == params
    assert again.build().overwrite_existing
    assert again.optimizer("enc", owning("enc.*", max_lr=0.7)).build().optims["enc"].max_lr == 0.7
    assert params.optims["enc"].max_lr == 0.1
    with pytest.raises(TypeError, match="TrainerBuilder builds NNTrainerParams, got a NNTrainParams"):
        type(builder).from_params(NNTrainParams(n_epochs=1))  # type: ignore[arg-type]
