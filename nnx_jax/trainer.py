"""Trainer: train one model by several named optimizers, each with parameters, a norm and a schedule of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnx_jax.core.errors import ConfigError
from nnx_jax.fit import TrainCall, given_parts, listed
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.progress import Progress, make_progress
from nnx_jax.model import NNModel
from nnx_jax.objectives.objective import Objective, ObjectiveContext, ObjectiveResult
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.runs.experiment import ExperimentManifest
from nnx_jax.runs.run import NNRun


class Trainer:
    """Trains a model by named optimizers; runs, checkpoints and callbacks are those of `NNModel.train`.

    Args:
        model: what is trained; its weights are the trained ones after `train`.

    Raises:
        TypeError: something that is no NNModel.
    """

    def __init__(self, model: NNModel) -> None:
        if not isinstance(model, NNModel):
            raise TypeError(f"Trainer trains an NNModel, got {type(model).__name__}; wrap it: NNModel(module=...)")
        self.model = model

    def train(
        self,
        params: NNTrainerParams,
        trainer_step_fn: Callable[..., Any] | None = None,
        callbacks: Sequence[Callback | Callable[..., Any]] | Callback | None = (),
        salt: str | None = None,
        components: Sequence[Any] | None = None,
        objective: Objective | Callable[[ObjectiveContext], ObjectiveResult] | None = None,
        provenance: ExperimentManifest | None = None,
        history: HistoryJournal | None = None,
        *,
        eval_step_fn: Callable[..., Mapping[str, Any]] | None = None,
        data: NNDataParams | None = None,
        checkpoint: CheckpointParams | None = None,
        mesh: Mapping[str, int] | None = None,
        sharding: Mapping[str, Any] | None = None,
        elastic: bool = False,
        distributed: Any = None,
        runs_dir: str | Path = "runs",
        wait_seconds: float = 0.0,
        quiet: bool = False,
        progress: Progress | None = None,
    ) -> NNRun:
        """Train, or continue the same run where it was interrupted, and return the finished run.

        Give exactly one of `trainer_step_fn` and `objective`. With an objective every commit steps all optimizers on
        one gradient, each on its own parameters; a step decides itself who steps, and reports it.

        Args:
            params: the optimizers, their schedules, and how long.
            trainer_step_fn: a traced step, called with a TrainerStepContext.
            objective: what makes the loss terms; see `Objective`.
            callbacks, salt, components, provenance, history, eval_step_fn, data, checkpoint, mesh, sharding, elastic,
                distributed, runs_dir, wait_seconds, quiet, progress: see `NNModel.train`.

        Raises:
            ConfigError: (a ValueError) neither a step nor an objective, or both; a parameter with two owners.
            RunExistsError, DataError, ModelError, NonFiniteError, KeyboardInterrupt: see `NNModel.train`.
        """
        if not isinstance(params, NNTrainerParams):
            raise ConfigError(f"params must be NNTrainerParams, got {type(params).__name__}", path="trainer")
        if salt is not None:
            params = params.replace(salt=salt)
        spec = RunSpec(
            backend=self.model.framework.backend,
            model=self.model.params,
            data=data,
            trainer=params,
            checkpoint=checkpoint or CheckpointParams(),
            mesh=dict(mesh or {}),
            sharding=sharding or {},
            elastic=elastic,
            given=given_parts(objective, trainer_step_fn, eval_step_fn),
        )
        call = TrainCall(
            progress=progress or make_progress(quiet),
            callbacks=listed(callbacks),
            train_step_fn=trainer_step_fn,
            eval_step_fn=eval_step_fn,
            objective=objective,
            components=tuple(components or ()),
            history=history,
            provenance=provenance,
            runs_dir=runs_dir,
            wait_seconds=wait_seconds,
            distributed=distributed,
        )
        return self.model.train_spec(spec, call)
