"""Stages: a state that one loop leaves, another takes up; states as JSON; models that are never changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.core.errors import ConfigError, ModelError, ResumePointError
from nnx_jax.core.operator import Sequential
from nnx_jax.core.stateful import CarryState, StatefulOperator
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.training_loop import TrainingLoop
from tests.training_loop.scenes import Line, loop, weights
from tests.training_loop.stage_scenes import own, same

ADAM = {"name": "adam", "lr": 1e-2}


def pre(**changes: Any) -> TrainingLoop:
    """The first stage: ten updates of a module with dropout, BatchNorm, whole numbers and bfloat16."""
    return loop(**{"model_op": own(dropout=0.2, norm=True, odd=True), "max_steps": 10, **changes})


def fine(**changes: Any) -> TrainingLoop:
    """The second: five updates on another line, with another rate."""
    given = {"model_op": own(7, dropout=0.2, norm=True, odd=True), "max_steps": 5, "dataset": Line(slope=-1.0)}
    return loop(**{**given, "optimizer_config": {"name": "adam", "lr": 1e-3}, **changes})


@pytest.fixture(scope="module")
def first() -> tuple[Any, TrainerCarryState]:
    """What the first stage leaves."""
    return pre()(None, None)


@pytest.fixture(scope="module")
def second(first: tuple[Any, TrainerCarryState]) -> tuple[Any, TrainerCarryState]:
    """What the second stage leaves, called by hand with what the first left."""
    return fine()(*first)


# -- threading ---------------------------------------------------------------------------------------------------


def test_a_loop_is_a_stateful_operator(first: tuple[Any, TrainerCarryState]) -> None:
    """`loop(carrier, state)` returns the trained operator and a state with the six fields

    (pipekit:D3.1, pipekit:D3.2).
    """
    operator, state = first
    assert isinstance(pre(), StatefulOperator)
    assert isinstance(state, CarryState)
    assert state.model is operator
    assert (state.step, state.epoch) == (10, 0)
    assert set(state.metrics or {}) == {"loss"}
    assert {"rng", "counters"} <= set(state.opt_state or {})
    assert np.array_equal(state.rng, (state.opt_state or {})["rng"])
    assert any("mu" in name for name in state.opt_state or {})


def test_a_sequence_of_loops_is_the_two_by_hand(second: tuple[Any, TrainerCarryState]) -> None:
    """`Sequential([pre, fine])(None, None)` ends with the bits of one after the other (pipekit:G22, pipekit:D3.4)."""
    operator, state = Sequential([pre(), fine()])(None, None)
    assert same(operator, second[0])
    assert state == second[1]


def test_the_second_stage_begins_with_the_weights_of_the_first(
    first: tuple[Any, TrainerCarryState], second: tuple[Any, TrainerCarryState]
) -> None:
    """Not with those of its own model_op; with no rate it leaves them as they were (pipekit:G22)."""
    still, _ = fine(optimizer_config={"name": "sgd", "lr": 0.0}, model_op=own(5, norm=True, odd=True))(None, first[1])
    for name in ("first.kernel", "last.bias", "scale"):
        assert np.array_equal(still.arrays()[name], first[0].arrays()[name])
    assert not same(second[0], first[0])


def test_steps_add_up_and_a_stage_counts_its_own(second: tuple[Any, TrainerCarryState]) -> None:
    """Five updates of its own after ten: the state says 15, the optimizer 5, a fresh one (pipekit:G23)."""
    _, state = second
    assert state.step == 15
    assert {int(a) for name, a in (state.opt_state or {}).items() if name.endswith("count")} == {5}


def test_full_takes_the_optimizer_of_another_loop(first: tuple[Any, TrainerCarryState]) -> None:
    """resume="full" goes on with the moments where structures match, and refuses them where not (pipekit:G23)."""
    whole = pre(max_steps=15)(None, None)[0]
    other = pre(max_steps=5, resume="full", seed=0, val_dataset=Line(), log_every_n_steps=7, model_op=own(3, norm=True))
    operator, state = other(None, first[1])
    assert state.step == 15
    assert same(operator, whole)
    with pytest.raises(ResumePointError, match="optimizer"):
        pre(max_steps=5, resume="full", optimizer_config={"name": "sgd", "lr": 1e-2})(None, first[1])


def test_the_same_loop_goes_on_with_its_state(first: tuple[Any, TrainerCarryState]) -> None:
    """A state of this very loop, with a larger max_steps, is continued to the bits of one run

    (pipekit:G22, pipekit:D3.3).
    """
    operator, state = pre(max_steps=15)(None, first[1])
    assert state.step == 15
    assert same(operator, pre(max_steps=15)(None, None)[0])


def test_a_carrier_goes_before_the_state_and_the_loop(first: tuple[Any, TrainerCarryState]) -> None:
    """A model as the carrier is what the loop begins with (pipekit:G22)."""
    begun = own(11)
    operator, state = loop(max_steps=1, optimizer_config={"name": "sgd", "lr": 0.0})(begun, None)
    assert same(operator, begun)
    assert state.step == 1


def test_what_is_no_state_or_model_is_refused() -> None:
    """A state and a carrier of another kind are a TypeError (pipekit:D3.2)."""
    with pytest.raises(TypeError, match="TrainerCarryState"):
        loop()(None, {"step": 3})
    with pytest.raises(TypeError, match="model as an operator"):
        loop()(3, None)


# -- states as JSON ----------------------------------------------------------------------------------------------


def as_json(state: TrainerCarryState, template: Any = None) -> TrainerCarryState:
    return TrainerCarryState.from_dict(json.loads(json.dumps(state.to_dict())), model=template)


def test_a_state_comes_back_from_json_whole(first: tuple[Any, TrainerCarryState]) -> None:
    """Model, moments, step, epoch, metrics and key are equal after JSON, bfloat16 and statistics too (pipekit:H16)."""
    _, state = first
    template = own(99, dropout=0.2, norm=True, odd=True)
    assert template.input_shape is None
    back = as_json(state, template)
    assert back == state
    assert back.model == state.model
    assert back.model.input_shape == (1,)
    assert back.model.arrays()["scale"].dtype == ml_dtypes.bfloat16
    assert same(back.model, state.model)
    assert back.rng is not None
    assert back.rng.dtype == np.uint32
    assert back.to_dict() == state.to_dict()


def test_a_state_from_json_goes_on_bit_for_bit(first: tuple[Any, TrainerCarryState]) -> None:
    """Resume is one from_dict: ten updates, JSON, five more are the bits of fifteen (pipekit:H16, pipekit:D3.3)."""
    back = as_json(first[1], own(99, dropout=0.2, norm=True, odd=True))
    assert same(pre(max_steps=15)(None, back)[0], pre(max_steps=15)(None, first[1])[0])


def test_metrics_that_are_not_finite_survive(first: tuple[Any, TrainerCarryState]) -> None:
    """NaN and infinities come back, and states that hold them are equal (pipekit:H16)."""
    state = first[1].replace(metrics={"loss": float("nan"), "top": float("inf"), "low": float("-inf")})
    back = as_json(state, own(99, dropout=0.2, norm=True, odd=True))
    assert back == state
    assert np.isnan((back.metrics or {})["loss"])
    assert (back.metrics or {})["low"] == float("-inf")
    assert back != first[1]


def test_a_built_in_network_needs_no_template() -> None:
    """A state whose operator a file describes is whole in itself (pipekit:H16)."""
    _, state = loop(max_steps=2)(None, None)
    back = as_json(state)
    assert back == state
    assert same(back.model, state.model)


def test_a_state_that_does_not_fit_is_refused(first: tuple[Any, TrainerCarryState]) -> None:
    """A missing field, and a template of another structure, are named (pipekit:H16, pipekit:I7)."""
    values = first[1].to_dict()
    with pytest.raises(ConfigError, match="rng is missing"):
        TrainerCarryState.from_dict({name: value for name, value in values.items() if name != "rng"})
    with pytest.raises(ModelError, match="scale"):
        TrainerCarryState.from_dict(values, model=own(dropout=0.2, norm=True))


# -- what stays as it was ----------------------------------------------------------------------------------------


def test_the_model_given_is_not_changed() -> None:
    """The caller's operator and module keep their weights; the trained one is another object (pipekit:G15)."""
    given = own()
    module, before = given.module, weights(given)
    trained, _ = loop(model_op=given, max_steps=3)(None, None)
    assert trained is not given
    assert trained.module is not module
    assert all(np.array_equal(array, given.arrays()[name]) for name, array in before.items())
    assert not same(trained, given)


def test_whole_numbers_and_statistics(first: tuple[Any, TrainerCarryState]) -> None:
    """Integer leaves train along and stay; BatchNorm's mean moves and has no optimizer entry

    (pipekit:G13, pipekit:N11, pipekit:N12).
    """
    operator, state = first
    arrays, before = operator.arrays(), pre().model_op.arrays()
    assert np.array_equal(arrays["table"], np.arange(3))
    assert not np.array_equal(arrays["norm.mean"], before["norm.mean"])
    moments = [name for name in state.opt_state or {} if name.startswith("opt_state/")]
    assert any("first.kernel" in name for name in moments)
    assert not any("norm.mean" in name or "table" in name for name in moments)
    outputs = operator(np.zeros((4, 1), np.float32))
    assert np.array_equal(outputs, operator(np.zeros((4, 1), np.float32)))  # an evaluation moves nothing
    assert np.array_equal(arrays["norm.mean"], operator.arrays()["norm.mean"])


def test_metrics_of_a_state_are_the_latest() -> None:
    """They are the values of the last update, a copy that later updates leave alone (pipekit:G21)."""

    class Losses:
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_step_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
            self.seen.append(metrics["loss"])

    noted = Losses()
    _, state = loop(max_steps=3, steps_per_epoch=2, callbacks=(noted,))(None, None)
    assert state.metrics is not None
    assert (len(noted.seen), state.metrics["loss"], state.epoch) == (3, noted.seen[-1], 1)
    assert noted.seen[0] != noted.seen[-1]


def test_a_state_is_read_in_a_fresh_process(tmp_path: Path) -> None:
    """A built-in operator is found though nothing else was imported."""
    op = NNXModelOp(net=FeedForwardParams(input_dim=1, output_dim=1, hidden_dims=(2,)))
    (tmp_path / "state.json").write_text(json.dumps(TrainerCarryState(op, step=3).to_dict()))
    program = (
        "import json, sys\nfrom nnx_jax.backends.carry import TrainerCarryState\n"
        "state = TrainerCarryState.from_dict(json.load(open(sys.argv[1])))\n"
        "print(state.step, type(state.model).__name__)\n"
    )
    given = [sys.executable, "-c", program, str(tmp_path / "state.json")]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3", "NNXModelOp"], done.stderr
