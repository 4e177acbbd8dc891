"""Backends: what a TrainingLoop trains with, chosen by name when it runs; none is imported before."""

from nnx_jax.backends.base import Trained, backend_names, check_backend, load_backend, register_backend
from nnx_jax.backends.carry import TrainerCarryState

__all__ = ["Trained", "TrainerCarryState", "backend_names", "check_backend", "load_backend", "register_backend"]
