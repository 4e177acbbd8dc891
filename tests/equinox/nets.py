"""Small Equinox modules and runs for these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.backends.equinox import EquinoxModel
from nnx_jax.data import ArrayDataset
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.runs.run import NNRun


class Normed(eqx.Module):
    """BatchNorm and dropout, integers and bools that nobody trains, and a key of its own."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    last: eqx.nn.Linear
    places: jax.Array
    flags: np.ndarray
    key: jax.Array

    def __init__(self, seed: int = 0, mode: Any = "batch", drop: float = 0.25, axis: Any = "batch") -> None:
        first, last = jax.random.split(jax.random.key(seed))
        self.first = eqx.nn.Linear(4, 6, key=first)
        self.norm = eqx.nn.BatchNorm(6, axis, momentum=0.9, mode=mode)
        self.drop = eqx.nn.Dropout(drop)
        self.last = eqx.nn.Linear(6, 2, key=last)
        self.places = jnp.arange(4, dtype=jnp.int32)[::-1]
        self.flags = np.array([True, False])
        self.key = jax.random.key(seed + 7)

    def __call__(self, x: Any, state: Any, *, key: Any) -> Any:
        hidden, state = self.norm(self.first(x[self.places]), state)
        return self.last(self.drop(jax.nn.relu(hidden), key=key)), state


class Scaled(eqx.Module):
    """One weight a column, and noise."""

    w: jax.Array
    drop: eqx.nn.Dropout

    def __init__(self, drop: float = 0.5) -> None:
        self.w, self.drop = jnp.ones(4), eqx.nn.Dropout(drop)

    def __call__(self, x: Any, key: Any = None) -> Any:
        return self.drop(x * self.w, key=key)


def normed(*given: Any, **options: Any) -> tuple[Any, Any]:
    return eqx.nn.make_with_state(Normed)(*given, **options)


def mlp(seed: int = 0) -> eqx.nn.MLP:
    return eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(seed))


def rows(count: int = 24, seed: int = 0) -> ArrayDataset:
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return ArrayDataset(x=x, y=np.stack([x.sum(1), x[:, 0] - x[:, 1]], axis=1))


def square(outputs: Any, targets: Any) -> Any:
    return jnp.sum((outputs - targets) ** 2, axis=-1)


def settings(**changes: Any) -> NNTrainParams:
    optim = {"kind": "adam", "max_lr": 1e-2, **changes.pop("optim", {})}
    if "max_steps" not in changes:
        changes.setdefault("n_epochs", 2)
    constant = NNSchedulerParams(kind="constant", clock="optimizer_update")
    return NNTrainParams(optim=NNOptimParams(**optim), scheduler=constant, **changes)


def data(count: int = 24, batch: int = 8, **changes: Any) -> NNDataParams:
    return NNDataParams(**{"train": rows(count), "batch_size": batch, **changes})


def model(module: Any = None, **params: Any) -> EquinoxModel:
    return EquinoxModel(mlp() if module is None else module, NNModelParams(**params), loss=square)


def fit(
    runs: Path,
    of: EquinoxModel,
    *,
    count: int = 24,
    batch: int = 8,
    tail: Any = "pad",
    val: Any = None,
    more: Any = None,
    **changes: Any,
) -> NNRun:
    """Train, quietly; `more` goes to `train` itself."""
    given = dict(more or {})
    given.setdefault("checkpoint", CheckpointParams(every_n_epochs=1))
    return of.train(
        settings(**changes), data=data(count, batch, tail=tail, val=val), runs_dir=runs, quiet=True, **given
    )


def weights(of: EquinoxModel) -> dict[str, np.ndarray]:
    return dict(of.framework.weights(of.net))


def same(left: EquinoxModel, right: EquinoxModel) -> None:
    """Bit for bit."""
    one, two = weights(left), weights(right)
    assert list(one) == list(two)
    for name in one:
        assert one[name].dtype == two[name].dtype
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def close(left: EquinoxModel, right: EquinoxModel, *, rtol: float, atol: float = 1e-7) -> None:
    one, two = weights(left), weights(right)
    assert list(one) == list(two)
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=rtol, atol=atol, err_msg=name)
