"""The backend "numpyro-svi": a probabilistic model trained by gradients of its ELBO, like every other model.

The rows are given to the model as `bayes.model_args` says. Where no `batch_size` is set, all rows are one batch; a
smaller one needs `numpyro.plate(..., subsample_size=)` in the model, see `bayes.check_scales`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.gradient import Recipe, Stage, train
from nnx_jax.backends.optimizers import DEFAULT
from nnx_jax.core.errors import ConfigError, ModelError, ResumePointError
from nnx_jax.engines.bayes import Args, NumpyroTask, model_args, require_numpyro, require_task
from nnx_jax.engines.numpyro_svi import SVIEngine, Variational, VariationalPure, elbo_loss
from nnx_jax.engines.predictive import NumpyroPredictiveOp
from nnx_jax.fit.call import TrainCall
from nnx_jax.fit.framework import Framework, of_model
from nnx_jax.fit.identity import describe_function
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec


def run(loop: Any, state: TrainerCarryState | None) -> Trained:
    """Fit the guide of the loop's task; see `TrainingLoop`.

    Raises:
        ConfigError: (a ValueError) there is no task; or what does not apply to it.
        TypeError: the task is no NumpyroTask.
        DataError: (a ValueError) batches of fewer than all rows, and a model that is not scaled to them.
        SiteError: (a KeyError) the model has no such site as the task predicts.
        ImportError: NumPyro is not installed.
    """
    task = require_task(loop.task, loop.loss, loop.backend)
    require_numpyro()
    return train(loop, state, recipe_of(loop, task), SVIStage)


def batch_rows(loop: Any) -> int:
    """Rows of a microbatch: as set, at most all; all of them where nothing is set."""
    rows = len(loop.dataset)
    return rows if loop.batch_size is None else min(loop.batch_size, rows)


def first_rows(loop: Any, count: int) -> Args:
    """The first rows of the data as a model is called with them, in the loop's precision."""
    dataset = loop.dataset.widened(loop.precision == "float64")
    return model_args(dataset.take(np.arange(count)))


def recipe_of(loop: Any, task: NumpyroTask) -> Recipe:
    """What this backend has of its own, for one loop."""

    def take(op: Any, info: Mapping[str, Any]) -> Variational:
        made = Variational(task, first_rows(loop, batch_rows(loop)), rows=len(loop.dataset), seed=loop.seed)
        if isinstance(op, NumpyroPredictiveOp) and (held := op.guide_arrays()):
            made.put(held)
        return made

    def give(op: Any, module: Variational, shape: tuple[int, ...] | None) -> NumpyroPredictiveOp:
        return module.operator(seed=loop.seed, input_shape=shape)

    def load(module: Variational, arrays: Mapping[str, Any], source: str) -> None:
        SVI.load(module, arrays, None, SVI.backend, source)

    return Recipe("numpyro-svi", VariationalModel, ("numpyro", "optax"), take, give, load)


class SVIStage(Stage):
    """One training of one loop, whose objective is the task's and not a loss."""

    def __init__(self, loop: Any, state: TrainerCarryState | None, recipe: Recipe, folder: str | Path) -> None:
        super().__init__(loop, state, recipe, folder)
        self.batch_rows = batch_rows(loop)
        if loop.optimizer_config == DEFAULT:  # without decay, which would be a prior on the guide's own parameters
            self.optim = NNOptimParams(kind="adam", max_lr=DEFAULT["lr"], accumulate_grad_batches=loop.accumulate)

    def _spec(self, point: Any, steps: int) -> RunSpec:
        return super()._spec(point, steps).replace(given=())

    def _data(self) -> NNDataParams:
        """Full batches; in their own order where each is all rows; a validation in one batch, whose ELBO it is."""
        loop, size = self.loop, self.batch_rows
        val = {} if loop.val_dataset is None else {"val": loop.val_dataset, "eval_batch_size": len(loop.val_dataset)}
        return NNDataParams(
            train=loop.dataset,
            batch_size=size,
            tail="straddle",
            shuffle=size < len(loop.dataset),
            seed=loop.seed,
            **val,
        )

    def _call(self, point: Any) -> TrainCall:
        return dataclasses.replace(super()._call(point), objective=None, eval_step_fn=None)

    def _trained(self, point: Any, operator: Any, reason: str | None, done: int) -> Trained:
        found = super()._trained(point, operator, reason, done)
        module = self.model.net
        assert isinstance(module, Variational)
        return dataclasses.replace(found, info={**found.info, "sites": module.sites})


class SVIFramework(Framework):
    """NumPyro's variational inference: the network is a model with its guide."""

    backend = "numpyro-svi"
    kind = "Variational"
    engine_class = SVIEngine

    def is_module(self, value: Any) -> bool:
        return isinstance(value, Variational)

    def describe(self, module: Variational) -> str:
        task = module.task
        parts = [each for each in (task.model, task.guide, task.loss) if each is not None]
        return "+".join(describe_function(each) for each in parts)

    def parameters(self, module: Variational) -> Mapping[str, Any]:
        return module.params

    def weights(self, module: Variational) -> Mapping[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in {**module.params, **module.model_state}.items()}

    def load(
        self, module: Variational, arrays: Mapping[str, Any], net: NNParams | None, written_by: str, source: str
    ) -> None:
        arrays = self.own_arrays(arrays, net, written_by, source)
        params, state = of_model(arrays), {}
        for name in arrays:
            if name.startswith("model_state/"):
                state[name.removeprefix("model_state/")] = arrays[name]
        if set(params) != set(module.params) or set(state) != set(module.model_state):
            raise ResumePointError(f"the weights of {source} are not those of this model and guide")
        VariationalPure(module).write(module, params, state)

    def frozen_by(self, module: Any, transforms: Sequence[Any]) -> tuple[str, ...]:
        return ()

    def transform(self, module: Any, transforms: Sequence[Any]) -> Any:
        if transforms:
            raise ModelError("a probabilistic model has no layers to transform; write another model")
        return module


SVI = SVIFramework()


class VariationalModel(NNModel):
    """A `Variational` under NNModel's training; what it predicts, its operator says."""

    framework = SVI

    def __init__(self, module: Variational, params: NNModelParams | None = None, loss: Any = None) -> None:
        if loss is not None:
            raise ConfigError("the objective is the task's; give NumpyroTask(loss=...) an ELBO, and no loss")
        super().__init__(module=module, params=params, loss=elbo_loss())
