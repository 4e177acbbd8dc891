"""The backend "lightning": a torch module trained through Lightning's Trainer."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carry import TrainerCarryState


def run(loop: Any, state: TrainerCarryState | None) -> Trained:
    """See `nnx_jax.torch.lightning.run`.

    Raises:
        ImportError: Lightning or torch is missing; it names the extra.
    """
    for package in ("torch", "lightning"):
        if find_spec(package) is None:
            raise ImportError(f"backend: 'lightning' needs {package}; pip install 'nnx_jax[lightning]'")
    return import_module("nnx_jax.torch.lightning").run(loop, state)
