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
    from nnx_jax.core.operator import Operator
    from nnx_jax.core.registry import register
    from nnx_jax.data.arrays import ArrayDataset, NpzDataset
    from nnx_jax.data.csv import CsvDataset
    from nnx_jax.data.dataset import TrainingDataset
    from nnx_jax.data.digits import DigitsDataset
    from nnx_jax.data.text import TextBytesDataset
    from nnx_jax.engines.inference import PredictionValidationError, ProbabilitySpec
    from nnx_jax.loop.callbacks import Callback, EarlyStopping, LRMonitor, ModelCheckpoint
    from nnx_jax.loop.signals import Interrupted
    from nnx_jax.model import NNModel
    from nnx_jax.objectives.terms import LossTerm
    from nnx_jax.params.data import NNDataParams
    from nnx_jax.params.losses import LossParams
    from nnx_jax.params.metrics import MetricParams
    from nnx_jax.params.model import NNModelParams
    from nnx_jax.params.net import ConvParams, FeedForwardParams, NNParams, TransformerLMParams
    from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
    from nnx_jax.params.run import RunSpec
    from nnx_jax.params.scheduler import NNSchedulerParams
    from nnx_jax.params.train import CheckpointParams, MonitorSpec, NNTrainParams
    from nnx_jax.runs.provenance import ResumeStatus
    from nnx_jax.runs.run import NNRun

__version__ = "0.1.0"

__all__ = [
    "ArrayDataset",
    "Callback",
    "CheckpointError",
    "CheckpointParams",
    "CommitError",
    "ComponentRestoreError",
    "ConfigError",
    "ConvParams",
    "CsvDataset",
    "DataError",
    "DigitsDataset",
    "EarlyStopping",
    "FeedForwardParams",
    "HistoryCorruptionError",
    "Interrupted",
    "LeaseHeldError",
    "LeaseLostError",
    "load_config",
    "LossParams",
    "LossTerm",
    "LRMonitor",
    "MetricParams",
    "ModelCheckpoint",
    "ModelError",
    "MonitorSpec",
    "NNDataParams",
    "NNModel",
    "NNModelParams",
    "NNOptimParams",
    "NNParamGroupSpec",
    "NNParams",
    "NNRun",
    "NNSchedulerParams",
    "NNTrainParams",
    "NnxError",
    "NonFiniteError",
    "NpzDataset",
    "Operator",
    "PredictionValidationError",
    "ProbabilitySpec",
    "ProcessGroupError",
    "register",
    "ResumePointError",
    "ResumeStatus",
    "RunExistsError",
    "RunSpec",
    "StepError",
    "TextBytesDataset",
    "TrainingDataset",
    "TransformerLMParams",
    "UnsafePathError",
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
    "ConfigError": "core.errors",
    "ConvParams": "params.net",
    "CsvDataset": "data.csv",
    "DataError": "core.errors",
    "DigitsDataset": "data.digits",
    "EarlyStopping": "loop.callbacks",
    "FeedForwardParams": "params.net",
    "HistoryCorruptionError": "core.errors",
    "Interrupted": "loop.signals",
    "LeaseHeldError": "core.errors",
    "LeaseLostError": "core.errors",
    "load_config": "config",
    "LossParams": "params.losses",
    "LossTerm": "objectives.terms",
    "LRMonitor": "loop.callbacks",
    "MetricParams": "params.metrics",
    "ModelCheckpoint": "loop.callbacks",
    "ModelError": "core.errors",
    "MonitorSpec": "params.train",
    "NNDataParams": "params.data",
    "NNModel": "model",
    "NNModelParams": "params.model",
    "NNOptimParams": "params.optim",
    "NNParamGroupSpec": "params.optim",
    "NNParams": "params.net",
    "NNRun": "runs.run",
    "NNSchedulerParams": "params.scheduler",
    "NNTrainParams": "params.train",
    "NnxError": "core.errors",
    "NonFiniteError": "core.errors",
    "NpzDataset": "data.arrays",
    "Operator": "core.operator",
    "PredictionValidationError": "engines.inference",
    "ProbabilitySpec": "engines.inference",
    "ProcessGroupError": "core.errors",
    "register": "core.registry",
    "ResumePointError": "core.errors",
    "ResumeStatus": "runs.provenance",
    "RunExistsError": "core.errors",
    "RunSpec": "params.run",
    "StepError": "core.errors",
    "TextBytesDataset": "data.text",
    "TrainingDataset": "data.dataset",
    "TransformerLMParams": "params.net",
    "UnsafePathError": "core.errors",
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
