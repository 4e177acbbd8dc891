"""nnx_jax: a JAX-native trainer. Public names are loaded on first use; importing the package imports no framework."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_jax.config import load_config
    from nnx_jax.core.errors import (
        CheckpointError,
        CommitError,
        ComponentRestoreError,
        ConfigError,
        DataError,
        DistributedFailure,
        HistoryCorruptionError,
        LeaseHeldError,
        LeaseLostError,
        ModelError,
        NnxError,
        NonFiniteError,
        ProcessGroupError,
        ResumePointError,
        RunExistsError,
        StepError,
        UnsafePathError,
    )
    from nnx_jax.core.operator import Operator, Sequential
    from nnx_jax.core.registry import register
    from nnx_jax.data.arrays import ArrayDataset, NpzDataset
    from nnx_jax.data.csv import CsvDataset
    from nnx_jax.data.dataset import TrainingDataset
    from nnx_jax.data.digits import DigitsDataset
    from nnx_jax.data.text import TextBytesDataset
    from nnx_jax.engines.inference import PredictionValidationError, ProbabilitySpec
    from nnx_jax.engines.operators import NNXModelOp
    from nnx_jax.engines.transforms import TransformAtEnd, register_transform
    from nnx_jax.engines.validation import EvalStepContext
    from nnx_jax.loop.builtin import EarlyStopping, LRMonitor, ModelCheckpoint
    from nnx_jax.loop.callbacks import Callback
    from nnx_jax.loop.components import ComponentSpec, StatefulComponent
    from nnx_jax.loop.context import TrainContext
    from nnx_jax.loop.loggers.tables import CSVLogger, JSONLLogger
    from nnx_jax.loop.loggers.tensorboard import TensorBoardCallback
    from nnx_jax.loop.loggers.weights_and_biases import WandbCallback
    from nnx_jax.loop.monitors import MonitorUnavailableError
    from nnx_jax.loop.signals import Interrupted
    from nnx_jax.loop.updates import UpdateEvent
    from nnx_jax.model import NNModel
    from nnx_jax.objectives.objective import (
        Objective,
        ObjectiveContext,
        ObjectiveResult,
        kd_objective,
        supervised_objective,
    )
    from nnx_jax.objectives.terms import LossTerm
    from nnx_jax.params.data import NNDataParams
    from nnx_jax.params.history import HistoryJournal
    from nnx_jax.params.losses import LossParams
    from nnx_jax.params.metrics import MetricParams, MetricSpec, register_metric, registered_metrics, unregister_metric
    from nnx_jax.params.model import NNModelParams
    from nnx_jax.params.net import ConvParams, FeedForwardParams, NNParams, TransformerLMParams
    from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
    from nnx_jax.params.run import RunSpec
    from nnx_jax.params.scheduler import NNSchedulerParams
    from nnx_jax.params.train import CheckpointParams, MonitorSpec, NNTrainParams
    from nnx_jax.params.trainer import NNTrainerParams
    from nnx_jax.plan.plan import ExperimentPlan
    from nnx_jax.plan.results import PlanError
    from nnx_jax.runs.experiment import ExperimentManifest, IdentityRef
    from nnx_jax.runs.journal_migrate import migrate_history
    from nnx_jax.runs.journal_views import export_history_csv, iter_history
    from nnx_jax.runs.provenance import ResumeStatus
    from nnx_jax.runs.run import NNRun
    from nnx_jax.runs.transforms import NNCheckpointTransform
    from nnx_jax.spmd.mesh import ShardingSpec, make_sharding
    from nnx_jax.spmd.rules import shardings_for
    from nnx_jax.step.own import TrainerStepContext, TrainStepContext, default_train_step, finalize_step
    from nnx_jax.trainer import Trainer
    from nnx_jax.training_loop import TrainingLoop

__version__ = "0.1.0"

__all__ = [
    "ArrayDataset",
    "Callback",
    "CheckpointError",
    "CheckpointParams",
    "CommitError",
    "ComponentRestoreError",
    "ComponentSpec",
    "ConfigError",
    "ConvParams",
    "CsvDataset",
    "CSVLogger",
    "DataError",
    "default_train_step",
    "DigitsDataset",
    "DistributedFailure",
    "EarlyStopping",
    "EvalStepContext",
    "ExperimentManifest",
    "ExperimentPlan",
    "export_history_csv",
    "FeedForwardParams",
    "finalize_step",
    "HistoryCorruptionError",
    "HistoryJournal",
    "IdentityRef",
    "Interrupted",
    "iter_history",
    "JSONLLogger",
    "kd_objective",
    "LeaseHeldError",
    "LeaseLostError",
    "load_config",
    "LossParams",
    "LossTerm",
    "LRMonitor",
    "make_sharding",
    "MetricParams",
    "MetricSpec",
    "migrate_history",
    "ModelCheckpoint",
    "ModelError",
    "MonitorSpec",
    "MonitorUnavailableError",
    "NNCheckpointTransform",
    "NNDataParams",
    "NNModel",
    "NNModelParams",
    "NNOptimParams",
    "NNParamGroupSpec",
    "NNParams",
    "NNRun",
    "NNSchedulerParams",
    "NNTrainerParams",
    "NNTrainParams",
    "NnxError",
    "NNXModelOp",
    "NonFiniteError",
    "NpzDataset",
    "Objective",
    "ObjectiveContext",
    "ObjectiveResult",
    "Operator",
    "PlanError",
    "PredictionValidationError",
    "ProbabilitySpec",
    "ProcessGroupError",
    "register",
    "register_metric",
    "register_transform",
    "registered_metrics",
    "ResumePointError",
    "ResumeStatus",
    "RunExistsError",
    "RunSpec",
    "Sequential",
    "shardings_for",
    "ShardingSpec",
    "StatefulComponent",
    "StepError",
    "supervised_objective",
    "TensorBoardCallback",
    "TextBytesDataset",
    "TrainContext",
    "Trainer",
    "TrainerStepContext",
    "TrainingDataset",
    "TrainingLoop",
    "TrainStepContext",
    "TransformAtEnd",
    "TransformerLMParams",
    "unregister_metric",
    "UnsafePathError",
    "UpdateEvent",
    "WandbCallback",
    "__version__",
]

# Where each public name is defined.
_WHERE = {
    "ArrayDataset": "data.arrays",
    "Callback": "loop.callbacks",
    "CheckpointError": "core.errors",
    "CheckpointParams": "params.train",
    "CommitError": "core.errors",
    "ComponentRestoreError": "core.errors",
    "ComponentSpec": "loop.components",
    "ConfigError": "core.errors",
    "ConvParams": "params.net",
    "CsvDataset": "data.csv",
    "CSVLogger": "loop.loggers.tables",
    "DataError": "core.errors",
    "default_train_step": "step.own",
    "DigitsDataset": "data.digits",
    "DistributedFailure": "core.errors",
    "EarlyStopping": "loop.builtin",
    "EvalStepContext": "engines.validation",
    "ExperimentManifest": "runs.experiment",
    "ExperimentPlan": "plan.plan",
    "export_history_csv": "runs.journal_views",
    "FeedForwardParams": "params.net",
    "finalize_step": "step.own",
    "HistoryCorruptionError": "core.errors",
    "HistoryJournal": "params.history",
    "IdentityRef": "runs.experiment",
    "Interrupted": "loop.signals",
    "iter_history": "runs.journal_views",
    "JSONLLogger": "loop.loggers.tables",
    "kd_objective": "objectives.objective",
    "LeaseHeldError": "core.errors",
    "LeaseLostError": "core.errors",
    "load_config": "config",
    "LossParams": "params.losses",
    "LossTerm": "objectives.terms",
    "LRMonitor": "loop.builtin",
    "make_sharding": "spmd.mesh",
    "MetricParams": "params.metrics",
    "MetricSpec": "params.metrics",
    "migrate_history": "runs.journal_migrate",
    "ModelCheckpoint": "loop.builtin",
    "ModelError": "core.errors",
    "MonitorSpec": "params.train",
    "MonitorUnavailableError": "loop.monitors",
    "NNCheckpointTransform": "runs.transforms",
    "NNDataParams": "params.data",
    "NNModel": "model",
    "NNModelParams": "params.model",
    "NNOptimParams": "params.optim",
    "NNParamGroupSpec": "params.optim",
    "NNParams": "params.net",
    "NNRun": "runs.run",
    "NNSchedulerParams": "params.scheduler",
    "NNTrainerParams": "params.trainer",
    "NNTrainParams": "params.train",
    "NnxError": "core.errors",
    "NNXModelOp": "engines.operators",
    "NonFiniteError": "core.errors",
    "NpzDataset": "data.arrays",
    "Objective": "objectives.objective",
    "ObjectiveContext": "objectives.objective",
    "ObjectiveResult": "objectives.objective",
    "Operator": "core.operator",
    "PlanError": "plan.results",
    "PredictionValidationError": "engines.inference",
    "ProbabilitySpec": "engines.inference",
    "ProcessGroupError": "core.errors",
    "register": "core.registry",
    "register_metric": "params.metrics",
    "register_transform": "engines.transforms",
    "registered_metrics": "params.metrics",
    "ResumePointError": "core.errors",
    "ResumeStatus": "runs.provenance",
    "RunExistsError": "core.errors",
    "RunSpec": "params.run",
    "Sequential": "core.operator",
    "shardings_for": "spmd.rules",
    "ShardingSpec": "spmd.mesh",
    "StatefulComponent": "loop.components",
    "StepError": "core.errors",
    "supervised_objective": "objectives.objective",
    "TensorBoardCallback": "loop.loggers.tensorboard",
    "TextBytesDataset": "data.text",
    "TrainContext": "loop.context",
    "Trainer": "trainer",
    "TrainerStepContext": "step.own",
    "TrainingDataset": "data.dataset",
    "TrainingLoop": "training_loop",
    "TrainStepContext": "step.own",
    "TransformAtEnd": "engines.transforms",
    "TransformerLMParams": "params.net",
    "unregister_metric": "params.metrics",
    "UnsafePathError": "core.errors",
    "UpdateEvent": "loop.updates",
    "WandbCallback": "loop.loggers.weights_and_biases",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use and keep it."""
    if name not in _WHERE:
        raise AttributeError(f"module 'nnx_jax' has no attribute {name!r}")
    value = getattr(import_module(f"nnx_jax.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*__all__, *globals()})
