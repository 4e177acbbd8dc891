"""Learning from a stream: every sample is predicted first, and k updates are those of a loop with batches of one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, DataError, NonFiniteError
from nnx_jax.data import ArrayDataset, Feed
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.objectives.operators import MSE
from nnx_jax.online import OnlineState, OnlineTrainer
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.training_loop import TrainingLoop

ROWS = 8
X = np.linspace(-1, 1, ROWS, dtype=np.float32)[:, None]
Y = 2 * X + 1
OPTIM = {"name": "adam", "lr": 0.05}


class Noisy(nnx.Module):
    """A linear layer behind dropout."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layer, self.drop = nnx.Linear(1, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.drop(self.layer(x)))


MODEL = NNXModelOp(Noisy())


@pytest.fixture(scope="module")
def trainer() -> OnlineTrainer:
    return OnlineTrainer(model_op=MODEL, loss="mse", optimizer_config=OPTIM)


def in_order(updates: int) -> list[int]:
    """Rows in the order that a loop of batches of one sees them."""
    feed = Feed(ArrayDataset(X, Y), batch_size=1, tail="straddle")
    rows = [int(row) for epoch in range(2) for row in feed.order(epoch)[:, 0]]
    return rows[:updates]


def fed(trainer: OnlineTrainer, rows: list[int], state: OnlineState | None = None) -> OnlineState:
    for row in rows:
        _, state = trainer.update(X[row], Y[row], state)
    assert state is not None
    return state


def weights(operator: Any) -> dict[str, np.ndarray]:
    return operator.arrays()


@pytest.fixture(scope="module")
def looped() -> Any:
    """Ten updates by a TrainingLoop with batches of one, dropout included: (operator, state)."""
    loop = TrainingLoop(
        model_op=MODEL, dataset=ArrayDataset(X, Y), loss="mse", optimizer_config=OPTIM, batch_size=1, max_steps=10,
        quiet=True,
    )  # fmt: skip
    return loop(None, None)


def test_updates_are_those_of_a_loop(trainer: OnlineTrainer, looped: Any) -> None:
    """Ten calls are ten updates of batches of one, bit for bit; a state taken after four goes on (pipekit:N15)."""
    rows = in_order(10)
    fourth = fed(trainer, rows[:4])
    stored = {name: np.asarray(array) for name, array in fourth.arrays.items()}
    whole = trainer.trained(fed(trainer, rows[4:], OnlineState(stored, 4)))
    for name, array in weights(looped[0]).items():
        np.testing.assert_array_equal(weights(whole)[name], array)
    again = trainer.trained(fed(trainer, rows[4:], fourth))  # the state is still good
    assert again.content_hash() == whole.content_hash()
    assert MODEL.content_hash() == NNXModelOp(Noisy()).content_hash()  # what it began with is unchanged


def test_a_loop_is_gone_on_from(trainer: OnlineTrainer, looped: Any) -> None:
    """After a loop of ten updates, two online ones are the eleventh and twelfth."""
    rows = in_order(12)
    state = trainer.begin(looped[1], (X[0], Y[0]))
    assert state.step == 10
    twelfth = trainer.trained(fed(trainer, rows[10:], state))
    assert twelfth.content_hash() == trainer.trained(fed(trainer, rows)).content_hash()
    with pytest.raises(ConfigError, match="of another loop or model"):
        OnlineTrainer(model_op=NNXModelOp(nnx.Linear(1, 1, rngs=nnx.Rngs(0))), loss="mse").begin(
            looped[1].replace(model=NNXModelOp(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))), (X[0], Y[0])
        )


def test_predictions_come_before_updates(trainer: OnlineTrainer) -> None:
    """The prediction is the model's before the update, in evaluation mode; its loss is in the mean."""
    first, state = trainer((X[3], Y[3]), None)
    np.testing.assert_allclose(first, np.asarray(MODEL(X[3][None]))[0], rtol=1e-6)
    second, state = trainer((X[3], Y[3]), state)
    assert not np.array_equal(first, second)
    errors = [float((found[0] - Y[3][0]) ** 2) for found in (first, second)]
    assert state.mean_loss == pytest.approx(np.mean(errors), rel=1e-5)
    assert json.dumps(state.step) == "2"


def test_past_samples_are_trained_on_again() -> None:
    """With replay an update is of the new sample and of drawn ones; by hand with plain gradient descent on one weight.

    Sample 1 has nothing before it, so it counts alone; for sample 2 both draws are sample 1.
    """
    model = NNXModelOp(nnx.Linear(1, 1, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0)))
    trainer = OnlineTrainer(
        model_op=model, loss="mse", optimizer_config={"name": "sgd", "lr": 0.5}, replay=2, replay_capacity=1
    )
    x1, y1, x2, y2 = (np.full(1, value, np.float32) for value in (1.0, 2.0, -1.0, 4.0))
    _, state = trainer.update(x1, y1)
    w = 0.0 - 0.5 * 2 * (0.0 * 1.0 - 2.0) * 1.0  # 2.0
    np.testing.assert_allclose(weights(trainer.trained(state))["kernel"], [[w]], rtol=1e-6)
    _, state = trainer.update(x2, y2, state)
    gradient = (2 * (-w - 4.0) * -1.0 + 2 * (2 * (w - 2.0) * 1.0)) / 3
    np.testing.assert_allclose(weights(trainer.trained(state))["kernel"], [[w - 0.5 * gradient]], rtol=1e-6)
    assert state.past is not None
    assert state.past["x"].tolist() == [[-1.0]]  # the one kept


def test_what_is_refused(trainer: OnlineTrainer) -> None:
    """No pair, another shape, no loss, a backend without gradients, and a target that is no number."""
    with pytest.raises(DataError, match="a sample is a pair"):
        trainer(X[0], None)
    with pytest.raises(DataError, match=r"x is of shape \[2\], that of the first sample was \[1\]"):
        trainer((np.zeros(2, np.float32), Y[0]), fed(trainer, [0]))
    with pytest.raises(ConfigError, match="no loss is given"):
        OnlineTrainer(model_op=MODEL)((X[0], Y[0]), None)
    with pytest.raises(ConfigError, match="does not train a model by gradients"):
        OnlineTrainer(model_op=MODEL, loss="mse", backend="numpyro-mcmc")((X[0], Y[0]), None)
    good = fed(trainer, [0])
    with pytest.raises(NonFiniteError):
        trainer((X[0], np.full(1, np.nan, np.float32)), good)
    assert fed(trainer, [1], good).step == 2  # the state given stays good


def test_an_optax_transformation() -> None:
    """Any transformation of optax does: here the two steps of plain gradient descent on one weight, by hand."""
    model = NNXModelOp(nnx.Linear(1, 1, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0)))
    trainer = OnlineTrainer(model_op=model, loss="mse", optimizer_config=optax.sgd(0.25))
    one, two = np.ones(1, np.float32), np.full(1, 2.0, np.float32)
    _, state = trainer.update(one, two)
    _, state = trainer.update(one, two, state)
    # w: 0 -> 0 + 0.25 * 2 * 2 = 1 -> 1 + 0.25 * 2 * 1 = 1.5
    np.testing.assert_allclose(weights(trainer.trained(state))["kernel"], [[1.5]], rtol=1e-6)


def test_yaml_round_trip() -> None:
    """A trainer read back from YAML has the same loss and optimizer, and trains."""
    op = NNXModelOp(net=FeedForwardParams(input_dim=1, output_dim=1, hidden_dims=(2,)))
    one = OnlineTrainer(model_op=op, loss=MSE(), optimizer_config={"name": "sgd", "lr": 0.1})
    again = OnlineTrainer.from_yaml(one.to_yaml())
    assert again == one
    assert isinstance(again.loss, MSE)
    assert fed(again, [0]).step == 1
    assert OnlineTrainer(model_op=op, loss="mse").optimizer_config == {"name": "adamw", "lr": 3e-4}


def test_a_function_of_one_number_is_a_loss(trainer: OnlineTrainer) -> None:
    """`(predicted, target) -> scalar`, as a TrainingLoop takes it: the updates of the built-in loss."""
    squared = lambda predicted, target: ((predicted - target) ** 2).mean()  # noqa: E731
    own = OnlineTrainer(model_op=MODEL, loss=squared, optimizer_config=OPTIM)
    found, wanted = (weights(each.trained(fed(each, [0, 5]))) for each in (own, trainer))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-7)
