"""The torch bridge: the same model, run and rules over torch modules. Names are loaded on first use."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_jax.engines.validation import EvalStepContext
    from nnx_jax.objectives.objective import Objective, ObjectiveResult
    from nnx_jax.objectives.terms import LossTerm
    from nnx_jax.step.own import default_train_step
    from nnx_jax.torch import convert, distributed
    from nnx_jax.torch.model import NNModel
    from nnx_jax.torch.objectives import ObjectiveContext, kd_objective, supervised_objective
    from nnx_jax.torch.own import TrainerStepContext, TrainStepContext, finalize_step
    from nnx_jax.torch.paradigms.diffusion import ddpm_objective, ddpm_sample, noise_schedule
    from nnx_jax.torch.paradigms.mixup import mixup_objective
    from nnx_jax.torch.paradigms.preference import dpo_objective, reference_columns, sequence_log_probs
    from nnx_jax.torch.paradigms.simclr import simclr_objective
    from nnx_jax.trainer import Trainer

__all__ = [
    "convert",
    "ddpm_objective",
    "ddpm_sample",
    "default_train_step",
    "distributed",
    "dpo_objective",
    "EvalStepContext",
    "finalize_step",
    "kd_objective",
    "LossTerm",
    "mixup_objective",
    "NNModel",
    "noise_schedule",
    "Objective",
    "ObjectiveContext",
    "ObjectiveResult",
    "reference_columns",
    "sequence_log_probs",
    "simclr_objective",
    "supervised_objective",
    "Trainer",
    "TrainerStepContext",
    "TrainStepContext",
]

# Where each public name is defined; parameters, data, callbacks and runs are those of `nnx_jax`.
_WHERE = {
    "ddpm_objective": "torch.paradigms.diffusion",
    "ddpm_sample": "torch.paradigms.diffusion",
    "default_train_step": "step.own",
    "dpo_objective": "torch.paradigms.preference",
    "EvalStepContext": "engines.validation",
    "finalize_step": "torch.own",
    "kd_objective": "torch.objectives",
    "LossTerm": "objectives.terms",
    "mixup_objective": "torch.paradigms.mixup",
    "NNModel": "torch.model",
    "noise_schedule": "torch.paradigms.diffusion",
    "Objective": "objectives.objective",
    "ObjectiveContext": "torch.objectives",
    "ObjectiveResult": "objectives.objective",
    "reference_columns": "torch.paradigms.preference",
    "sequence_log_probs": "torch.paradigms.preference",
    "simclr_objective": "torch.paradigms.simclr",
    "supervised_objective": "torch.objectives",
    "Trainer": "trainer",
    "TrainerStepContext": "torch.own",
    "TrainStepContext": "torch.own",
}
_MODULES = ("convert", "distributed")

if find_spec("torch") is None:
    raise ImportError("nnx_jax.torch needs torch; pip install 'nnx_jax[torch]'", name="torch")


def __getattr__(name: str) -> Any:
    """Import a public name on first use and keep it."""
    if name in _MODULES:
        return import_module(f"nnx_jax.torch.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'nnx_jax.torch' has no attribute {name!r}")
    value = getattr(import_module(f"nnx_jax.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*__all__, *globals()})
