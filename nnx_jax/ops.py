"""The step-based side of the project in one place: operators, datasets, losses, loops; names load on first use.

`EarlyStopping` and `Callback` are those of the (loop, state, metrics) form here; those of `nnx_jax` belong to
`NNModel.train`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_NAMES = {
    "ArrayDataset": "nnx_jax.data",
    "BlackjaxTask": "nnx_jax.engines.blackjax_task",
    "CSVWriter": "nnx_jax.loop.writers",
    "CachedDataset": "nnx_jax.data",
    "Callback": "nnx_jax.loop.step_callbacks",
    "CarryState": "nnx_jax.core.stateful",
    "CatalogDataset": "nnx_jax.data",
    "Checkpoint": "nnx_jax.loop.step_builtin",
    "Composite": "nnx_jax.objectives.operators",
    "EarlyStopping": "nnx_jax.loop.step_builtin",
    "EquinoxModelOp": "nnx_jax.engines.equinox",
    "ExperimentTracker": "nnx_jax.runs.tracker",
    "ExportedOp": "nnx_jax.engines.exported",
    "FileTracker": "nnx_jax.runs.tracker",
    "FunctionOperator": "nnx_jax.core.function",
    "GrainDataset": "nnx_jax.data",
    "HyperSweep": "nnx_jax.sweep",
    "InferenceArtifact": "nnx_jax.runs.artifact",
    "IterableDataset": "nnx_jax.data",
    "JSONLWriter": "nnx_jax.loop.writers",
    "KL": "nnx_jax.objectives.operators",
    "KerasModelOp": "nnx_jax.engines.keras",
    "LocalModelRegistry": "nnx_jax.runs.registry",
    "LogToExperiment": "nnx_jax.loop.step_builtin",
    "Loss": "nnx_jax.objectives.operators",
    "LossOperator": "nnx_jax.objectives.operators",
    "MLflowWriter": "nnx_jax.loop.writers",
    "MSE": "nnx_jax.objectives.operators",
    "MappedDataset": "nnx_jax.data",
    "MetricWriter": "nnx_jax.loop.writers",
    "ModelOp": "nnx_jax.engines.operators",
    "ModelRegistry": "nnx_jax.runs.registry",
    "MultiWriter": "nnx_jax.loop.writers",
    "NLL": "nnx_jax.objectives.operators",
    "NNXModelOp": "nnx_jax.engines.operators",
    "NumpyroPredictiveOp": "nnx_jax.engines.predictive",
    "NumpyroTask": "nnx_jax.engines.bayes",
    "OnlineState": "nnx_jax.online",
    "OnlineTrainer": "nnx_jax.online",
    "Operator": "nnx_jax.core.operator",
    "ParameterGrid": "nnx_jax.sweep",
    "PartitionedDataset": "nnx_jax.data",
    "RemoteModelRegistry": "nnx_jax.runs.registry",
    "Run": "nnx_jax.runs.tracker",
    "SequenceDataset": "nnx_jax.data",
    "Sequential": "nnx_jax.core.operator",
    "SimulationDataset": "nnx_jax.data",
    "SplitDataset": "nnx_jax.data",
    "StatefulOperator": "nnx_jax.core.stateful",
    "StreamDataset": "nnx_jax.data",
    "StreamLoader": "nnx_jax.data",
    "StreamingDataset": "nnx_jax.data",
    "SweepCarryState": "nnx_jax.sweep",
    "SweepResult": "nnx_jax.sweep",
    "TensorBoardWriter": "nnx_jax.loop.writers",
    "TorchModelOp": "nnx_jax.torch.operators",
    "TrainTask": "nnx_jax.objectives.operators",
    "Trained": "nnx_jax.backends",
    "TrainerCarryState": "nnx_jax.backends",
    "TrainerConfig": "nnx_jax.training_loop",
    "TrainingArtifact": "nnx_jax.runs.artifact",
    "TrainingDataset": "nnx_jax.data",
    "TrainingLoop": "nnx_jax.training_loop",
    "ValidationStep": "nnx_jax.loop.step_builtin",
    "WandbWriter": "nnx_jax.loop.writers",
    "WindowDataset": "nnx_jax.data",
    "adapt": "nnx_jax.data",
    "backend_names": "nnx_jax.backends",
    "dumps": "nnx_jax.core.serial",
    "export_operator": "nnx_jax.engines.exported",
    "from_yaml": "nnx_jax.core.serial",
    "hash_config": "nnx_jax.core.hashing",
    "load_exported": "nnx_jax.engines.exported",
    "loads": "nnx_jax.core.serial",
    "register": "nnx_jax.core.registry",
    "register_backend": "nnx_jax.backends",
    "stream_feed": "nnx_jax.data",
    "to_yaml": "nnx_jax.core.serial",
    "unregister": "nnx_jax.core.registry",
}

if TYPE_CHECKING:
    from nnx_jax.backends import Trained, TrainerCarryState, backend_names, register_backend
    from nnx_jax.core.function import FunctionOperator
    from nnx_jax.core.hashing import hash_config
    from nnx_jax.core.operator import Operator, Sequential
    from nnx_jax.core.registry import register, unregister
    from nnx_jax.core.serial import dumps, from_yaml, loads, to_yaml
    from nnx_jax.core.stateful import CarryState, StatefulOperator
    from nnx_jax.data import (
        ArrayDataset,
        CachedDataset,
        CatalogDataset,
        GrainDataset,
        IterableDataset,
        MappedDataset,
        PartitionedDataset,
        SequenceDataset,
        SimulationDataset,
        SplitDataset,
        StreamDataset,
        StreamingDataset,
        StreamLoader,
        TrainingDataset,
        WindowDataset,
        adapt,
        stream_feed,
    )
    from nnx_jax.engines.bayes import NumpyroTask
    from nnx_jax.engines.blackjax_task import BlackjaxTask
    from nnx_jax.engines.equinox import EquinoxModelOp
    from nnx_jax.engines.exported import ExportedOp, export_operator, load_exported
    from nnx_jax.engines.keras import KerasModelOp
    from nnx_jax.engines.operators import ModelOp, NNXModelOp
    from nnx_jax.engines.predictive import NumpyroPredictiveOp
    from nnx_jax.loop.step_builtin import Checkpoint, EarlyStopping, LogToExperiment, ValidationStep
    from nnx_jax.loop.step_callbacks import Callback
    from nnx_jax.loop.writers import (
        CSVWriter,
        JSONLWriter,
        MetricWriter,
        MLflowWriter,
        MultiWriter,
        TensorBoardWriter,
        WandbWriter,
    )
    from nnx_jax.objectives.operators import KL, MSE, NLL, Composite, Loss, LossOperator, TrainTask
    from nnx_jax.online import OnlineState, OnlineTrainer
    from nnx_jax.runs.artifact import InferenceArtifact, TrainingArtifact
    from nnx_jax.runs.registry import LocalModelRegistry, ModelRegistry, RemoteModelRegistry
    from nnx_jax.runs.tracker import ExperimentTracker, FileTracker, Run
    from nnx_jax.sweep import HyperSweep, ParameterGrid, SweepCarryState, SweepResult
    from nnx_jax.torch.operators import TorchModelOp
    from nnx_jax.training_loop import TrainerConfig, TrainingLoop

__all__ = [
    "ArrayDataset",
    "BlackjaxTask",
    "CSVWriter",
    "CachedDataset",
    "Callback",
    "CarryState",
    "CatalogDataset",
    "Checkpoint",
    "Composite",
    "EarlyStopping",
    "EquinoxModelOp",
    "ExperimentTracker",
    "ExportedOp",
    "FileTracker",
    "FunctionOperator",
    "GrainDataset",
    "HyperSweep",
    "InferenceArtifact",
    "IterableDataset",
    "JSONLWriter",
    "KL",
    "KerasModelOp",
    "LocalModelRegistry",
    "LogToExperiment",
    "Loss",
    "LossOperator",
    "MLflowWriter",
    "MSE",
    "MappedDataset",
    "MetricWriter",
    "ModelOp",
    "ModelRegistry",
    "MultiWriter",
    "NLL",
    "NNXModelOp",
    "NumpyroPredictiveOp",
    "NumpyroTask",
    "OnlineState",
    "OnlineTrainer",
    "Operator",
    "ParameterGrid",
    "PartitionedDataset",
    "RemoteModelRegistry",
    "Run",
    "SequenceDataset",
    "Sequential",
    "SimulationDataset",
    "SplitDataset",
    "StatefulOperator",
    "StreamDataset",
    "StreamLoader",
    "StreamingDataset",
    "SweepCarryState",
    "SweepResult",
    "TensorBoardWriter",
    "TorchModelOp",
    "TrainTask",
    "Trained",
    "TrainerCarryState",
    "TrainerConfig",
    "TrainingArtifact",
    "TrainingDataset",
    "TrainingLoop",
    "ValidationStep",
    "WandbWriter",
    "WindowDataset",
    "adapt",
    "backend_names",
    "dumps",
    "export_operator",
    "from_yaml",
    "hash_config",
    "load_exported",
    "loads",
    "register",
    "register_backend",
    "stream_feed",
    "to_yaml",
    "unregister",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
