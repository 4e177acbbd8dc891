"""Optimizers and schedules: settings belong to a kind, bounds hold, builders give equal values."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.params.optim import (
    NNOptimParams,
    NNParamGroupSpec,
    OptimBuilder,
    add_optimizer_kind,
    optimizer_kinds,
)
from nnx_jax.params.scheduler import NNSchedulerParams, SchedulerBuilder

# -- optimizer --------------------------------------------------------------------------------------------------------


def test_the_defaults_of_each_kind() -> None:
    adam, sgd, adamw, lion = (NNOptimParams(kind=kind) for kind in ("adam", "sgd", "adamw", "lion"))
    assert (adam.betas, adam.eps, adam.weight_decay, adam.momentum) == ((0.9, 0.999), 1e-8, 0.0, None)
    assert (sgd.momentum, sgd.nesterov, sgd.weight_decay, sgd.betas, sgd.eps) == (0.9, False, 0.0, None, None)
    assert (adamw.betas, adamw.weight_decay) == ((0.9, 0.999), 1e-2)
    assert (lion.betas, lion.eps) == ((0.9, 0.99), None)
    assert (adam.max_lr, adam.grad_clip_norm, adam.accumulate_grad_batches) == (1e-2, None, 1)


def test_writing_a_default_out_changes_nothing() -> None:
    written = NNOptimParams(kind="adamw", betas=[0.9, 0.999], weight_decay=0.01, eps=1e-8, momentum=None)
    assert written == NNOptimParams(kind="adamw")
    assert written.state() == {"kind": "adamw"}
    assert NNOptimParams(kind="adam", weight_decay=0.01).state() == {"weight_decay": 0.01}
    assert NNOptimParams(kind="sgd", momentum=0.0).state() == {"kind": "sgd", "momentum": 0.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"grad_clip_norm": 0}, r"grad_clip_norm: got 0 \(int\); expected a value > 0"),
        ({"grad_clip_norm": 0.0}, r"grad_clip_norm: got 0\.0"),
        ({"grad_clip_norm": -1.0}, r"grad_clip_norm: got -1\.0"),
        ({"accumulate_grad_batches": 0}, r"accumulate_grad_batches: got 0 \(int\); expected a value >= 1"),
        ({"accumulate_grad_batches": 2.0}, r"accumulate_grad_batches: got 2\.0 \(float\); expected an integer"),
        ({"max_lr": -1e-9}, r"max_lr: got -1e-09 \(float\); expected a value >= 0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]: got 1\.0 \(float\); expected a value < 1"),
        ({"betas": (-0.1, 0.9)}, r"betas\[0\]: got -0\.1"),
        ({"betas": (0.9,)}, r"betas\[1\]: is required"),
        ({"kind": "sgd", "eps": 1e-8}, r"eps: got 1e-08, which does not apply to sgd; sgd has weight_decay, momentum"),
        ({"kind": "sgd", "betas": (0.9, 0.99)}, r"betas: got \(0\.9, 0\.99\), which does not apply to sgd"),
        ({"kind": "adam", "momentum": 0.9}, r"momentum: got 0\.9, which does not apply to adam"),
        ({"kind": "adam", "nesterov": False}, r"nesterov: got False, which does not apply to adam"),
        ({"kind": "adam", "options": {"b1": 0.9}}, r"options: got .*b1.*, which does not apply to adam"),
        ({"kind": "rmsprop", "eps": 1e-8}, r"eps: got 1e-08, which does not apply to rmsprop; write it under options"),
        ({"kind": "sgd", "momentum": 0, "nesterov": True}, r"nesterov: needs a momentum above 0"),
        ({"kind": "sgd", "momentum": 1.0}, r"momentum: got 1\.0"),
        ({"kind": "adm"}, r"kind: got 'adm'; there is no optimizer of that name; did you mean 'adam'"),
        ({"kind": "rmsprop", "options": {"decay": math.nan}}, r"options\.decay: got nan \(float\); expected a fin"),
        ({"kind": "rmsprop", "options": {"decay": [1]}}, r"options\.decay: expected a number, text, true"),
        ({"decay_mask": []}, r"decay_mask: expected auto, all, or a list of patterns"),
        ({"decay_mask": ["a", 3]}, r"decay_mask: expected auto, all, or a list of patterns"),
        ({"weight_decay": 1e308}, r"weight_decay: got 1e\+308"),
        ({"lr": 0.1}, r"lr: unknown key 'lr'; did you mean 'max_lr'"),
        ({"weigth_decay": 0.1}, r"weigth_decay: unknown key 'weigth_decay'; did you mean 'weight_decay'"),
    ],
)
def test_wrong_optimizers_are_refused(values: dict[str, Any], message: str) -> None:
    """nnx:B030: bounds of clip, accumulation, rate and betas; eps does not belong to sgd."""
    with pytest.raises(ValueError, match=rf"NNOptimParams\.{message}"):
        NNOptimParams(**values)


@pytest.mark.parametrize("field", ["max_lr", "weight_decay", "eps", "grad_clip_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_real_settings_are_finite(field: str, value: float) -> None:
    """nnx:B029."""
    with pytest.raises(ValueError, match=rf"NNOptimParams\.{field}: got .*expected a finite number"):
        NNOptimParams(**{field: value})


def test_a_rate_of_zero_is_accepted() -> None:
    """nnx:B030."""
    assert NNOptimParams(max_lr=0).max_lr == 0.0
    assert NNOptimParams(kind="sgd", momentum=0).momentum == 0.0


def test_numpy_counts_are_stored_as_int() -> None:
    """nnx:B028."""
    assert type(NNOptimParams(accumulate_grad_batches=np.int64(4)).accumulate_grad_batches) is int


def test_every_kind_is_an_optimizer_of_optax() -> None:
    optax = importlib.import_module("optax")  # a core dependency; imported here, since params never need it
    own = [kind for kind in optimizer_kinds() if not kind.startswith("test_")]  # other tests may have added theirs
    assert [kind for kind in own if not hasattr(optax, kind)] == []


def test_a_kind_of_your_own_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnx_jax.params.optim._FURTHER", {"rmsprop"})
    with pytest.raises(ConfigError, match="there is no optimizer of that name"):
        NNOptimParams(kind="my_optimizer")
    add_optimizer_kind("my_optimizer")
    assert NNOptimParams(kind="my_optimizer", options={"a": 1}).options == {"a": 1}


def test_patterns_may_be_one_word() -> None:
    assert NNOptimParams(decay_mask="*.kernel").decay_mask == ("*.kernel",)
    assert NNOptimParams(decay_mask="all").decay_mask == "all"
    assert NNParamGroupSpec(patterns="a.*", lr_scale=0.5).patterns == ("a.*",)


def test_the_first_matching_group_wins_and_none_merge() -> None:
    """nnx:B036: rules are tried in order, never merged; what matches none is in the default group."""
    optim = NNOptimParams(
        max_lr=0.1,
        param_groups=[
            {"patterns": ["head.bias"], "weight_decay": 0.0},
            {"patterns": ["head.*", "neck.*"], "max_lr": 0.02, "weight_decay": 0.5},
            {"patterns": "*.bias", "lr_scale": 2},
        ],
    )
    found = {path: optim.group_of(path) for path in ("head.bias", "head.kernel", "neck.bias", "body.bias", "body.x")}
    assert found == {"head.bias": 0, "head.kernel": 1, "neck.bias": 1, "body.bias": 2, "body.x": None}
    assert [optim.lr_scale_of(group) for group in (0, 1, 2, None)] == pytest.approx([1.0, 0.2, 2.0, 1.0])
    assert optim.param_groups[0].lr_scale is None  # nothing taken over from the second rule, which matches as well


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patterns": ["a"], "max_lr": 0.1, "lr_scale": 2.0}, r"lr_scale: both max_lr and lr_scale are given"),
        ({"patterns": [], "lr_scale": 2.0}, r"patterns: got \(\) \(tuple\); expected at least 1 items"),
        ({"patterns": [" "], "lr_scale": 2.0}, r"patterns\[0\]: got ' '; expected text that is not blank"),
        ({"lr_scale": 2.0}, r"patterns: is required"),
    ],
)
def test_wrong_groups_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NNParamGroupSpec(**values)


def test_a_group_rate_needs_a_rate_to_scale() -> None:
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\.max_lr: a group cannot have a rate of its own"):
        NNOptimParams(max_lr=0.0, param_groups=[{"patterns": "a", "max_lr": 0.1}])


def test_replace_drops_what_the_new_kind_does_not_know() -> None:
    assert NNOptimParams(kind="adam", max_lr=0.1).replace(kind="sgd") == NNOptimParams(kind="sgd", max_lr=0.1)
    with pytest.raises(ConfigError, match="eps: got 1e-06, which does not apply to sgd"):
        NNOptimParams(kind="adam", eps=1e-6).replace(kind="sgd")


def test_optimizer_builder_variants_and_modifiers() -> None:
    """nnx:B032: no variant is a ValueError; the last variant wins; modifiers survive it."""
    with pytest.raises(ValueError, match=r"NNOptimParams builder has no variant yet; call one of \.sgd\(\)"):
        NNOptimParams.builder().max_lr(0.1).build()
    built = NNOptimParams.builder().max_lr(0.1).sgd(momentum=0.5).grad_clip_norm(1.0).adamw(eps=1e-6).build()
    assert built == NNOptimParams(kind="adamw", max_lr=0.1, grad_clip_norm=1.0, eps=1e-6)


def test_builder_values_are_validated_when_built() -> None:
    with pytest.raises(ConfigError, match="grad_clip_norm: got 0"):
        NNOptimParams.builder().adam().grad_clip_norm(0).build()


@pytest.mark.parametrize(
    "params",
    [
        NNOptimParams(),
        NNOptimParams(kind="sgd", momentum=0.5, nesterov=True, weight_decay=0.1, max_lr=0.0),
        NNOptimParams(kind="adamw", betas=(0.8, 0.9), accumulate_grad_batches=3, decay_mask=("*.kernel",)),
        NNOptimParams(kind="rmsprop", options={"decay": 0.9}, param_groups=({"patterns": "a", "lr_scale": 0.1},)),
    ],
)
def test_optimizer_builder_round_trip(params: NNOptimParams) -> None:
    """nnx:B033 nnx:B026."""
    builder = OptimBuilder.from_params(params)
    assert builder.build() == params
    twin = builder.copy().lion().max_lr(0.7)
    assert builder.build() == params
    assert twin.build().kind == "lion"
    assert NNOptimParams.from_state(params.state()) == params


def test_optimizer_builder_refuses_other_params() -> None:
    """nnx:B033."""
    with pytest.raises(TypeError, match="OptimBuilder builds NNOptimParams, got a NNSchedulerParams"):
        OptimBuilder.from_params(NNSchedulerParams())  # type: ignore[arg-type]


def test_further_optimizers_by_name() -> None:
    built = NNOptimParams.builder().optax("rmsprop", decay=0.95).build()
    assert built.state() == {"kind": "rmsprop", "options": {"decay": 0.95}}


# -- schedule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["optimizer_update", "batch"])
def test_the_plateau_belongs_to_the_epoch_clock(clock: str) -> None:
    """nnx:B055: plateau with the update clock, or a clock "batch", is a ValueError at construction."""
    with pytest.raises(ValueError, match=rf"NNSchedulerParams\.clock: got '{clock}'"):
        NNSchedulerParams(kind="reduce_on_plateau", clock=clock)


def test_no_kind_has_a_batch_clock() -> None:
    """nnx:B055."""
    with pytest.raises(ValueError, match=r"clock: got 'batch'; expected one of 'epoch' or 'optimizer_update'"):
        NNSchedulerParams(kind="cosine", clock="batch")


def test_the_epoch_clock_is_not_written() -> None:
    """nnx:B056: with the epoch clock state() has no clock key and the hash is as before; the update clock adds it."""
    assert NNSchedulerParams(kind="cosine", clock="epoch").state() == {"kind": "cosine"}
    hashes = {NNSchedulerParams(kind="cosine", **clock).content_hash() for clock in ({}, {"clock": "epoch"})}
    assert len(hashes) == 1
    assert NNSchedulerParams(kind="cosine", clock="optimizer_update").state() == {
        "kind": "cosine",
        "clock": "optimizer_update",
    }


def test_schedule_defaults_of_each_kind() -> None:
    plateau = NNSchedulerParams(kind="reduce_on_plateau")
    assert (plateau.factor, plateau.patience, plateau.cooldown, plateau.threshold, plateau.min_lr) == (
        0.95, 8, 2, 1e-3, 1e-7,
    )  # fmt: skip
    assert (NNSchedulerParams(kind="step").factor, NNSchedulerParams(kind="step").step_size) == (0.1, None)
    assert NNSchedulerParams(kind="cosine").min_lr == 0.0
    assert NNSchedulerParams().factor is None
    assert NNSchedulerParams(kind="reduce_on_plateau", patience=8).state() == {"kind": "reduce_on_plateau"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "constant", "min_lr": 0.1}, r"min_lr: got 0\.1, which does not apply to constant; it has no"),
        ({"kind": "cosine", "patience": 3}, r"patience: got 3, which does not apply to cosine; it has T_max, min_lr"),
        ({"kind": "step", "total_steps": 3}, r"total_steps: got 3, which does not apply to step"),
        ({"kind": "step", "step_size": 0}, r"step_size: got 0"),
        ({"kind": "step", "factor": 1.0}, r"factor: got 1\.0"),
        ({"kind": "warmup_cosine", "total_steps": 5, "warmup_steps": 6}, r"warmup_steps: got 6, more than total_steps"),
        ({"kind": "one_cicle"}, r"kind: got 'one_cicle'.*did you mean 'one_cycle'"),
        ({"kind": "cosine", "min_lr": -0.1}, r"min_lr: got -0\.1"),
        ({"kind": "cosine", "T_max": 2.0}, r"T_max: got 2\.0 \(float\); expected an integer"),
    ],
)
def test_wrong_schedules_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"NNSchedulerParams\.{message}"):
        NNSchedulerParams(**values)


@pytest.mark.parametrize(
    "params",
    [
        NNSchedulerParams(),
        NNSchedulerParams(kind="step", step_size=3, factor=0.5),
        NNSchedulerParams(kind="warmup_cosine", clock="optimizer_update", warmup_steps=0, total_steps=10),
        NNSchedulerParams(kind="reduce_on_plateau", patience=0),
    ],
)
def test_schedule_builder_round_trip(params: NNSchedulerParams) -> None:
    """nnx:B033 nnx:B026."""
    assert SchedulerBuilder.from_params(params).build() == params
    assert NNSchedulerParams.from_state(params.state()) == params


def test_schedule_builder_variants() -> None:
    """nnx:B032."""
    with pytest.raises(ValueError, match="NNSchedulerParams builder has no variant yet"):
        NNSchedulerParams.builder().clock("optimizer_update").build()
    built = NNSchedulerParams.builder().clock("optimizer_update").step(step_size=2).one_cycle(total_steps=9).build()
    assert built == NNSchedulerParams(kind="one_cycle", clock="optimizer_update", total_steps=9)


def test_every_schedule_has_a_builder_method() -> None:
    for kind in SchedulerBuilder.variants:
        assert getattr(NNSchedulerParams.builder(), kind)().build().kind == kind
