"""What the tests of paradigms share: a context without a run, values and gradients of it, and small runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax.data import ArrayDataset
from nnx_jax.model import NNModel
from nnx_jax.objectives import Objective, ObjectiveContext, total_value
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.run import NNRun


def context(model: Any, batch: Mapping[str, Any], *, seed: Any = 0, train: bool = True) -> ObjectiveContext:
    """A microbatch; all rows are real where the batch has no mask."""
    columns = {name: jnp.asarray(values) for name, values in batch.items()}
    rows = next(iter(columns.values())).shape[0]
    columns = {"mask": jnp.ones(rows, jnp.float32), **columns}
    zero = jnp.int32(0)
    return ObjectiveContext(model, columns, jax.random.key(seed), zero, zero, train, "float32")


def padded(batch: Mapping[str, Any], more: int = 3, fill: float = 7.0) -> dict[str, np.ndarray]:
    """The batch with masked rows of nonsense behind it."""
    columns = {name: np.asarray(values) for name, values in batch.items()}
    rows = len(next(iter(columns.values())))
    out = {n: np.concatenate([c, np.full((more, *c.shape[1:]), fill, c.dtype)]) for n, c in columns.items()}
    return {**out, "mask": np.r_[np.ones(rows), np.zeros(more)].astype(np.float32)}


def masked(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without a real row."""
    rows = len(next(iter(batch.values())))
    return {**batch, "mask": np.zeros(rows, np.float32)}


def value_and_grads(
    objective: Objective, module: nnx.Module, batch: Mapping[str, Any], **more: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of one microbatch and its gradient by parameter."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params: Any) -> jax.Array:
        return total_value(terms_of(objective(context(nnx.merge(graph, params, rest, copy=True), batch, **more))))

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    flat = nnx.to_flat_state(grads)
    return float(value), {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def terms_of(result: Any) -> tuple[Any, ...]:
    return tuple(result.terms) if isinstance(result.terms, Sequence) else (result.terms,)


def loss_of(objective: Objective, model: Any, batch: Mapping[str, Any], **more: Any) -> float:
    return float(total_value(terms_of(objective(context(model, batch, **more)))))


def numeric(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The gradient by central differences in float64."""
    at = np.asarray(at, np.float64)
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        moved = np.zeros_like(at)
        moved[place] = step
        found[place] = (function(at + moved) - function(at - moved)) / (2 * step)
    return found


def fit(
    runs: Path,
    model: NNModel,
    objective: Any,
    columns: Mapping[str, Any],
    *,
    batch: int,
    window: int = 1,
    rate: float = 0.5,
    val: bool = False,
    hooks: Sequence[Any] = (),
    mesh: Mapping[str, int] | None = None,
    **train: Any,
) -> NNRun:
    """Plain SGD with rows in order."""
    given = {name: np.asarray(values) for name, values in columns.items()}
    data = NNDataParams(
        train=ArrayDataset(given), val=ArrayDataset(given) if val else None, batch_size=batch, shuffle=False
    )
    optim = NNOptimParams(kind="sgd", max_lr=rate, momentum=0.0, accumulate_grad_batches=window)
    params = NNTrainParams(optim=optim, scheduler=NNSchedulerParams(kind="constant"), **{"n_epochs": 1, **train})
    return model.train(params, objective=objective, data=data, hooks=hooks, mesh=mesh, runs_dir=runs, quiet=True)


def weights(model: NNModel) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model.net, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def assert_close(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray], tolerance: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=tolerance, atol=tolerance, err_msg=name)
