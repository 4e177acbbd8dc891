"""Evaluations of a TrainingLoop: means over samples, in evaluation mode, compiled, without a trace in the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.registry import register
from nnx_jax.data import ArrayDataset
from nnx_jax.data.dataset import InMemoryDataset
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.loop.step_builtin import EarlyStopping, ValidationStep
from nnx_jax.objectives.operators import MSE
from tests.training_loop.scenes import Line, Writer, loop, weights


class Slope(nnx.Module):
    """The output is w * x; it can be kept where it is by a rate of 0."""

    def __init__(self, w: float) -> None:
        self.w = nnx.Param(jnp.float32([w]))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.w[...]


def slope(w: float) -> NNXModelOp:
    return NNXModelOp(Slope(w))


class Values:
    """Keeps the values of evaluations."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_eval_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        self.found.append(metrics)


def test_the_mean_is_over_samples() -> None:
    """Squared errors 0 eight times and 9 twice, in batches of 4, 4 and 2: 1.8, not 3 (pipekit:E8)."""
    x = np.float32([1] * 10)[:, None]
    ten = ArrayDataset(x, np.float32([1] * 8 + [4] * 2)[:, None])
    values = Values()
    loop(
        model_op=slope(1.0), dataset=ArrayDataset(x, x), val_dataset=ten, batch_size=4, max_steps=2,
        callbacks=[values], eval_every_n_steps=2, metrics=("mae",),
    )(None, None)  # fmt: skip
    assert values.found == [{"val_loss": pytest.approx(1.8), "val_mae": pytest.approx(0.6)}]


def test_the_values_of_pairs_one_by_one() -> None:
    """Pairs (i, 2i) for i = 0, 1, 2, ... under x3: the mean of i squared (pipekit:E7)."""
    pairs = ArrayDataset(np.float32([0, 1, 2, 3])[:, None], np.float32([0, 2, 4, 6])[:, None])
    assert ValidationStep(slope(3.0), pairs, (MSE(),))() == {"mse": 3.5, "MSE": 3.5}
    assert ValidationStep(slope(2.0), pairs, (MSE(),))() == {"mse": 0.0, "MSE": 0.0}


# -- tasks --------------------------------------------------------------------------------------------------------


class Task:
    """The squared error, and its root beside it."""

    def __init__(self) -> None:
        self.traced: list[int] = []

    def loss_fn(self, model: Any, batch: Any, key: Any) -> Any:
        x, y = batch
        error = ((model(x) - y) ** 2).mean()
        return error, {"root": jnp.sqrt(error)}


class Judged(Task):
    """Evaluated by a function of its own."""

    def eval_fn(self, model: Any, batch: Any, key: Any) -> Mapping[str, Any]:
        self.traced.append(len(batch[0]))
        x, y = batch
        return {"worst": jnp.abs(model(x) - y), "drawn": jax.random.uniform(key)}


def evaluated(task: Task, **changes: Any) -> tuple[list[dict[str, float]], Any]:
    values = Values()
    operator, _ = loop(
        loss=None, task=task, val_dataset=Line(rows=10), max_steps=4, batch_size=4, eval_every_n_steps=2,
        callbacks=[values], **changes,
    )(None, None)  # fmt: skip
    return values.found, operator


def test_a_task_that_says_how_is_evaluated_so() -> None:
    """`eval_fn` is what evaluations call, for batches of 4, 4 and 2; it is compiled once for each size (pipekit:E10).

    Its key does not depend on the update, so evaluations of one model agree (pipekit:D9.2, pipekit:E9).
    """
    task = Judged()
    found, operator = evaluated(task)
    assert [sorted(each) for each in found] == [["val_drawn", "val_worst"]] * 2
    x, y = Line(rows=10).arrays()["x"], Line(rows=10).arrays()["y"]
    assert found[-1]["val_worst"] == pytest.approx(float(np.abs(operator(x) - y).mean()), rel=1e-5)
    assert found[0]["val_drawn"] == found[1]["val_drawn"]
    assert sorted(task.traced) == [2, 4]


def test_a_task_that_does_not_is_evaluated_by_its_loss() -> None:
    """The loss and what it reports besides, as means over the ten rows (pipekit:E10)."""
    found, operator = evaluated(Task())
    x, y = Line(rows=10).arrays()["x"], Line(rows=10).arrays()["y"]
    assert sorted(found[-1]) == ["val_loss", "val_root"]
    assert found[-1]["val_loss"] == pytest.approx(float(((operator(x) - y) ** 2).mean()), rel=1e-5)


# -- without a trace ----------------------------------------------------------------------------------------------


class Modes(nnx.Module):
    """An MLP with dropout and batch norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm = nnx.Linear(1, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


@pytest.fixture(scope="module")
def modes() -> NNXModelOp:
    return NNXModelOp(Modes(nnx.Rngs(0)))


def test_evaluations_leave_no_trace(modes: NNXModelOp) -> None:
    """With dropout and batch norm: a run with evaluations ends in the very state of one without.

    Weights, statistics, moments and the random state, bit by bit. The values are those of evaluation mode: asked
    twice, the trained operator gives them again (pipekit:E9, pipekit:E11).
    """
    values = Values()
    fields = {"model_op": modes, "max_steps": 6}
    operator, state = loop(
        **fields, val_dataset=Line(rows=10), eval_every_n_steps=2, callbacks=[values]
    )(None, None)  # fmt: skip
    alone, without = loop(**fields)(None, None)
    assert operator.content_hash() == alone.content_hash()
    assert sorted(state.opt_state) == sorted(without.opt_state)
    for name, value in without.opt_state.items():
        np.testing.assert_array_equal(state.opt_state[name], value, err_msg=name)
    x, y = Line(rows=10).arrays()["x"], Line(rows=10).arrays()["y"]
    again = float(((operator(x) - y) ** 2).mean())
    assert values.found[-1]["val_loss"] == pytest.approx(again, rel=1e-5)
    assert again == float(((operator(x) - y) ** 2).mean())


def test_evaluations_of_a_task_leave_no_trace(modes: NNXModelOp) -> None:
    """The keys of evaluations are a stream of their own (pipekit:E11)."""
    with_values = evaluated(Judged(), model_op=modes)[1]
    alone = loop(model_op=modes, loss=None, task=Judged(), max_steps=4, batch_size=4)(None, None)[0]
    assert with_values.content_hash() == alone.content_hash()


@register("scene_nothing")
class Nothing(InMemoryDataset):
    """No rows."""

    def load(self) -> Mapping[str, Any]:
        return {"x": np.zeros((0, 1), np.float32), "y": np.zeros((0, 1), np.float32)}


@pytest.mark.filterwarnings("ignore:EarlyStopping.*found no such value:RuntimeWarning")
def test_nothing_to_evaluate_on_is_told_and_changes_nothing() -> None:
    """A warning, no values, and early stopping goes on (pipekit:E12)."""
    values, writer = Values(), Writer()
    stopping = EarlyStopping("val_loss", patience=1)
    with pytest.warns(UserWarning, match="val_dataset.*no rows"):
        state = loop(
            val_dataset=Nothing(), eval_every_n_steps=2, max_steps=6, callbacks=[values, stopping],
            metric_writer=writer,
        )(None, None)[1]  # fmt: skip
    assert state.step == 6
    assert (stopping.best, stopping.wait, values.found) == (None, 0, [])
    assert not any(name.startswith("eval/") for _, record in writer.records for name in record)


# -- losses as functions ------------------------------------------------------------------------------------------


def squared(predicted: Any, target: Any) -> Any:
    """A scalar: the mean over the batch."""
    return ((predicted - target) ** 2).mean()


def test_a_function_of_predicted_and_target_is_a_loss() -> None:
    """A scalar stands for its batch: windows, uneven batches and evaluations are those of the mean (pipekit:D4.1)."""
    fields = {"val_dataset": Line(rows=10), "max_steps": 4, "batch_size": 4, "accumulate": 3, "eval_every_n_steps": 4}
    values = Values(), Values()
    mine = loop(loss=squared, callbacks=[values[0]], **fields)(None, None)[0]
    theirs = loop(loss=MSE(), callbacks=[values[1]], **fields)(None, None)[0]
    for name, value in weights(theirs).items():
        np.testing.assert_allclose(weights(mine)[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert values[0].found[0]["val_loss"] == pytest.approx(values[1].found[0]["val_loss"], rel=1e-5)
