"""Runs whose step, objective or validation is given from Python, on the toys of `toys.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nnx_jax.data import ArrayDataset
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.objectives.objective import ObjectiveContext, ObjectiveResult
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.runs.run import NNRun
from nnx_jax.trainer import Trainer
from tests.e2e.toys import ON_UPDATES, Slope

HALVING = NNSchedulerParams(kind="step", clock="optimizer_update", step_size=1, factor=0.5)


class Two(nnx.Module):
    """Two weights, each with an optimizer of its own: the output is a * x + b."""

    def __init__(self, a: float = 0.0, b: float = 0.0) -> None:
        self.a, self.b = Slope(a), Slope(b)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.a(x) + self.b.w[...]


def train(
    runs: Path,
    module: nnx.Module,
    data: Any,
    *,
    loss: Any = None,
    val: Any = None,
    batch_size: int = 1,
    optim: Mapping[str, Any] | None = None,
    accumulate: int = 1,
    scheduler: NNSchedulerParams = ON_UPDATES,
    model: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    **params: Any,
) -> NNRun:
    """One run of a toy: batches in order, plain SGD of rate 0.1, one epoch, unless told otherwise.

    `given` is handed to `NNModel.train`: train_step_fn, objective, eval_step_fn, callbacks, checkpoint, ...
    """
    settings = {"kind": "sgd", "max_lr": 0.1, "momentum": 0.0, "accumulate_grad_batches": accumulate, **(optim or {})}
    if "max_steps" not in params:
        params.setdefault("n_epochs", 1)
    return NNModel(params=NNModelParams(**(model or {})), module=module, loss=loss).train(
        NNTrainParams(optim=NNOptimParams(**settings), scheduler=scheduler, **params),
        data=None if data is None else NNDataParams(train=data, val=val, batch_size=batch_size, shuffle=False),
        runs_dir=runs,
        progress=QuietProgress(),
        **(given or {}),
    )


def sgd(pattern: str, rate: float = 0.1, **more: Any) -> NNOptimParams:
    """Plain descent of the parameters that match."""
    group = NNParamGroupSpec(patterns=(pattern,), max_lr=rate)
    return NNOptimParams(**{"kind": "sgd", "max_lr": rate, "momentum": 0.0, "param_groups": (group,), **more})


def trainer(
    runs: Path,
    module: nnx.Module,
    data: Any,
    step: Callable[..., Any] | None = None,
    *,
    optims: Mapping[str, NNOptimParams] | None = None,
    val: Any = None,
    batch_size: int = 1,
    model: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    **params: Any,
) -> NNRun:
    """One run of a Trainer: by default optimizers a and b for the weights of `Two`."""
    if "max_steps" not in params:
        params.setdefault("n_epochs", 1)
    return Trainer(NNModel(params=NNModelParams(**(model or {})), module=module)).train(
        NNTrainerParams(optims=optims or {"b": sgd("b.*"), "a": sgd("a.*")}, **params),
        step,
        data=NNDataParams(train=data, val=val, batch_size=batch_size, shuffle=False),
        checkpoint=CheckpointParams(**(checkpoint or {})),
        runs_dir=runs,
        progress=QuietProgress(),
        **(given or {}),
    )


def up(ctx: ObjectiveContext) -> ObjectiveResult:
    """The mean output of `Slope` or `Two` as an objective: gradients are mean inputs."""
    outputs = ctx.apply()
    return ObjectiveResult(ctx.mean("up", outputs[:, 0]), outputs=outputs)


def climb(ctx: Any) -> dict[str, Any]:
    """The same as a step of one's own, which reports its update."""
    loss, grads = ctx.value_and_grad(lambda net: ctx.mean(net(ctx.batch["x"])[:, 0]))
    ctx.update(grads)
    ctx.report_update()
    return {"loss": loss}


def cross_entropy(ctx: Any, net: Any) -> jax.Array:
    """Mean cross entropy over the real rows of a context's batch."""
    outputs = net(ctx.batch["x"]).astype(jnp.float32)
    return ctx.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, ctx.batch["y"]))


def rows_of(*values: float) -> ArrayDataset:
    """One-column rows with these inputs, and no target."""
    return ArrayDataset(x=np.array(values, np.float32)[:, None])
