"""The backend "keras": Keras' training step makes the updates of a bare loop over the same batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_jax.backends.keras import _loss
from nnx_jax.core.errors import ConfigError, ModelError, NonFiniteError
from nnx_jax.data import ArrayDataset
from nnx_jax.engines.keras import KerasModelOp, keras_module
from nnx_jax.objectives.operators import MSE
from nnx_jax.training_loop import TrainingLoop
from tests.adapters.told import BATCH, DATA, HALF, STEPS, WANTED, Notes, X, Y, batches

keras = keras_module()
keras.utils.set_random_seed(0)
NET = keras.Sequential([keras.Input((1,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def loop(**more: Any) -> TrainingLoop:
    given: dict[str, Any] = {
        "model_op": KerasModelOp(NET), "dataset": DATA, "loss": "mse", "max_steps": STEPS, "batch_size": BATCH,
        "backend": "keras", "optimizer_config": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "quiet": True,
    }  # fmt: skip
    return TrainingLoop(**{**given, **more})


def bare(windows: int = 1, rate: Any = lambda step: 0.1, weight: Any = jnp.ones_like) -> list[np.ndarray]:
    """The same updates in plain JAX: the arrays in the order of Keras' weights. `weight(x)`: what rows count for."""
    params = [jnp.asarray(weight) for weight in NET.get_weights()]

    def loss(held: Any, x: Any, y: Any) -> Any:
        hidden = jnp.tanh(x @ held[0] + held[1])
        each = weight(x) * (hidden @ held[2] + held[3] - y) ** 2
        return jnp.sum(each) / jnp.maximum(jnp.sum(weight(x)), 1)

    velocity = [jnp.zeros_like(value) for value in params]
    seen = iter(batches())
    for step in range(STEPS):
        found = [jax.grad(loss)(params, *next(seen)) for _ in range(windows)]
        grads = [sum(each) / windows for each in zip(*found, strict=True)]
        velocity = [0.9 * v - rate(step) * g for v, g in zip(velocity, grads, strict=True)]
        params = [p + v for p, v in zip(params, velocity, strict=True)]
    return [np.asarray(value) for value in params]


def same(operator: KerasModelOp, wanted: list[np.ndarray]) -> None:
    """Equal to some roundings: sums in another order, over seven updates of momentum."""
    for name, value in zip(operator.arrays(), wanted, strict=True):
        np.testing.assert_allclose(operator.arrays()[name], value, rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def trained() -> Any:
    """(operator, artifact, what its callback was told)."""
    notes = Notes()
    found = loop(val_dataset=DATA, callbacks=(notes,), eval_every_n_steps=3, steps_per_epoch=3).run()
    return *found, notes


def test_updates_are_those_of_a_bare_loop(trained: Any) -> None:
    """Weights after seven updates; the model given is unchanged (pipekit:M1)."""
    operator, artifact, notes = trained
    same(operator, bare())
    assert artifact.backend_info["final_step"] == STEPS
    error = float(np.mean((operator(X) - Y) ** 2))
    assert artifact.backend_info["final_metrics"]["val_loss"] == pytest.approx(error, rel=1e-5)
    assert notes.model is operator
    assert KerasModelOp(NET).content_hash() == loop().model_op.content_hash()


def test_callbacks_are_told(trained: Any) -> None:
    """The events of a loop, in its order; the first loss is that of the first batch before any update."""
    notes = trained[2]
    assert notes.events == WANTED
    x, y = batches()[0]
    assert notes.losses[0] == pytest.approx(float(np.mean((KerasModelOp(NET)(x) - y) ** 2)), rel=1e-5)


def test_windows_and_schedules() -> None:
    """Two microbatches of an update and a rate that moves, as by hand."""
    lr = {"name": "linear", "init_value": 0.1, "end_value": 0.0, "transition_steps": 10}
    found = loop(accumulate=2, optimizer_config={"name": "sgd", "lr": lr, "momentum": 0.9}).run()[0]
    same(found, bare(windows=2, rate=lambda step: 0.1 * (1 - step / 10)))


def test_losses_and_refusals(tmp_path: Any) -> None:
    """A loss operator and a function make the same updates; what Keras does not do is refused."""
    wanted = bare()
    for given in (MSE(), lambda predicted, target: jnp.mean((predicted - target) ** 2)):
        same(loop(loss=given).run()[0], wanted)
    with pytest.raises(ConfigError, match="TrainingLoop.checkpoint_dir: does not apply to the backend 'keras'"):
        loop(checkpoint_dir=tmp_path).run()
    with pytest.raises(ConfigError, match="is no Keras optimizer"):
        loop(optimizer_config=optax.sgd(0.1)).run()
    with pytest.raises(ConfigError, match="Keras is asked for"):
        loop(optimizer_config={"name": "yogi", "lr": 0.1}).run()
    with pytest.raises(NonFiniteError, match="update 1"):
        loop(loss=lambda predicted, target: jnp.nan * jnp.sum(predicted)).run()


def test_weights_of_rows() -> None:
    """Rows of weight 0 count for nothing, in an update and in an evaluation, with a built-in loss and a function."""
    wanted = bare(weight=lambda x: (x > 0).astype(jnp.float32))
    for given in ("mse", lambda predicted, target: jnp.mean((predicted - target) ** 2)):
        operator, artifact = loop(dataset=HALF, val_dataset=HALF, loss=given).run()
        same(operator, wanted)
        error = float(np.mean((operator(X) - Y)[X > 0] ** 2))
        assert artifact.backend_info["final_metrics"]["val_loss"] == pytest.approx(error, rel=1e-5)
    other = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "tensorflow"))
    with pytest.raises(ConfigError, match="says nothing of the column 'weight'"):
        _loss(other, loop(dataset=HALF, loss=lambda predicted, target: predicted - target))


def test_labels_and_stages() -> None:
    """Whole numbers stay labels; an empty validation set is a warning; a second stage's updates are counted on."""
    labels = (X[:, 0] > 0).astype(np.int32)
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
    seen = Notes()
    rows = ArrayDataset(X, labels)
    first = loop(model_op=KerasModelOp(net), dataset=rows, loss="cross_entropy", max_steps=1, callbacks=(seen,))
    _, state = first(None, None)
    x, y = batches()[0]
    scores = np.asarray(jax.nn.log_softmax(KerasModelOp(net)(x)))
    assert seen.losses[0] == pytest.approx(-scores[np.arange(BATCH), (x[:, 0] > 0).astype(int)].mean(), rel=1e-5)
    with pytest.warns(UserWarning, match="has no rows: nothing is evaluated"):
        _, state = first.replace(val_dataset=ArrayDataset(X[:0], labels[:0]), seed=1)(None, state)
    assert state.step == 2


def test_the_operator() -> None:
    """Its weights are in its hash and in a blob; one sample or a batch."""
    op = KerasModelOp(NET, input_shape=(1,))
    np.testing.assert_allclose(op(X[0]), op(X)[0], rtol=1e-6)
    fresh = KerasModelOp(
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    )
    assert fresh.content_hash() != op.content_hash()
    np.testing.assert_array_equal(fresh.with_weights(op.serialize_weights())(X), op(X))
    with pytest.raises(ModelError, match="do not fit KerasModelOp"):
        KerasModelOp(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])).with_weights(op.serialize_weights())
    with pytest.raises(ModelError, match="is not built"):
        KerasModelOp(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(TypeError, match=r"keras\.Model"):
        KerasModelOp("net")
