"""Equinox modules under a TrainingLoop, through the same path as every gradient backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ModelError
from nnx_jax.engines.equinox import EquinoxModelOp, EquinoxNet, PureEquinox
from nnx_jax.training_loop import TrainingLoop
from tests.equinox.nets import Scaled, mlp, normed, rows, square


class Task:
    """A loss written as Equinox users write it, a module mapped over rows."""

    def loss_fn(self, model: Any, batch: Any, key: Any) -> Any:
        x, y = batch
        error = jnp.mean(square(jax.vmap(model)(x), y))
        return error + 0 * jnp.sum(model.layers[0].weight), {"custom_mse": error}


def loop(op: Any = None, **changes: Any) -> TrainingLoop:
    given = {
        "loss": square,
        "batch_size": 8,
        "max_steps": 6,
        "optimizer_config": {"name": "adam", "lr": 1e-2},
        **changes,
    }
    return TrainingLoop(
        model_op=op or EquinoxModelOp(mlp()), dataset=rows(), backend="equinox", quiet=True, **given
    )  # fmt: skip


def test_a_loop_gives_a_trained_operator_and_leaves_the_old_one() -> None:
    """A new operator with other weights, one swap from training to serving (pipekit:D8.1) (pipekit:G15) (pipekit:M5)"""
    op = EquinoxModelOp(normed(), input_shape=(4,))
    x, before = rows().arrays()["x"], op.content_hash()
    trained, artifact = loop(op).run()
    assert isinstance(trained, EquinoxModelOp)
    assert op.content_hash() == before != trained.content_hash()
    assert artifact.backend_info["backend"] == "equinox"
    assert artifact.backend_info["final_step"] == 6
    np.testing.assert_array_equal(op.with_weights(trained.serialize_weights())(x), trained(x))
    assert trained(x[0]).shape == (2,)


def test_a_task_maps_the_module_over_rows_and_its_metrics_are_kept() -> None:
    """`jax.vmap(model)(x)` and `model.layers` in a `loss_fn`; its "custom_mse" is a metric. (pipekit:G5)"""
    plain, _ = loop().run()
    found, artifact = loop(loss=None, task=Task(), val_dataset=rows(9, 1), eval_every_n_steps=3).run()
    for name, value in found.arrays().items():
        np.testing.assert_allclose(value, plain.arrays()[name], rtol=1e-5, atol=1e-6)
    assert {"custom_mse", "val_loss"} <= set(artifact.backend_info["final_metrics"])


def test_two_halves_equal_the_whole(tmp_path: Path) -> None:
    """Six updates at once, or three and then three from the directory: the same bits, with dropout and BatchNorm."""
    whole, _ = loop(EquinoxModelOp(normed())).run()
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "runs"), "checkpoint_every_n_steps": 1}
    loop(EquinoxModelOp(normed()), max_steps=3, **options).run()
    resumed, _ = loop(EquinoxModelOp(normed()), max_steps=6, **options).run()
    for name, value in resumed.arrays().items():
        np.testing.assert_array_equal(value, whole.arrays()[name], err_msg=name)


def test_another_operator_is_refused() -> None:
    from flax import nnx

    from nnx_jax.engines.operators import NNXModelOp

    with pytest.raises(TypeError, match="the backend 'equinox' trains an EquinoxModelOp"):
        loop(NNXModelOp(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))).run()


def test_one_row_is_called_as_the_module_would_be() -> None:
    """Its key is the caller's; without one, dropout says so; a state is made of whole batches."""
    pure = PureEquinox(EquinoxNet(Scaled()))
    pure.row_axes = 1
    net = pure.opened(pure.params, {}, jax.random.key(0), train=True)
    key = jax.random.key(3)
    np.testing.assert_array_equal(net(jnp.ones(4), key), Scaled()(jnp.ones(4), key))
    with pytest.raises(RuntimeError, match="requires a key"):
        net(jnp.ones(4))
    pure = PureEquinox(EquinoxNet(*normed()))
    pure.row_axes = 1
    net = pure.opened({**pure.params, **pure.frozen}, pure.model_state, jax.random.key(0), train=True)
    with pytest.raises(ModelError, match="Normed has state, which is made of all rows of a batch"):
        jax.vmap(net)(jnp.ones((3, 4)))
