"""From a callback's configuration to the callback."""

from __future__ import annotations

from typing import Any

from nnx_jax.loop.callbacks import Callback, EarlyStopping, LRMonitor, ModelCheckpoint
from nnx_jax.params.callbacks import EarlyStoppingParams, LRMonitorParams, ModelCheckpointParams


def build_callback(params: Any) -> Callback:
    """Return the callback of a built-in configuration, or what the user's own `params()` returns."""
    match params:
        case EarlyStoppingParams():
            return EarlyStopping(params.monitor, params.patience, name=params.name)
        case ModelCheckpointParams():
            return ModelCheckpoint(params.epochs, params.tag)
        case LRMonitorParams():
            return LRMonitor()
    return params()
