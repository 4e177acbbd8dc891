"""Searching over the settings of a plan: spaces, samplers, budgets; names come in when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_NAMES = {
    "CategoricalParam": "nnx_jax.search.space",
    "FloatParam": "nnx_jax.search.space",
    "GridSampler": "nnx_jax.search.samplers",
    "IntParam": "nnx_jax.search.space",
    "MedianPruner": "nnx_jax.search.pruners",
    "OptunaPruner": "nnx_jax.search.optuna_adapter",
    "OptunaSampler": "nnx_jax.search.optuna_adapter",
    "Pruner": "nnx_jax.search.pruners",
    "RandomSampler": "nnx_jax.search.samplers",
    "Sampler": "nnx_jax.search.samplers",
    "SearchBudget": "nnx_jax.search.outcomes",
    "SearchParam": "nnx_jax.search.space",
    "SearchResult": "nnx_jax.search.outcomes",
    "SearchSpace": "nnx_jax.search.space",
    "TrialOutcome": "nnx_jax.search.outcomes",
    "VmappedTrial": "nnx_jax.search.vmapped",
    "search": "nnx_jax.search.study",
    "vmapped_trials": "nnx_jax.search.vmapped",
}

if TYPE_CHECKING:
    from nnx_jax.search.optuna_adapter import OptunaPruner, OptunaSampler
    from nnx_jax.search.outcomes import SearchBudget, SearchResult, TrialOutcome
    from nnx_jax.search.pruners import MedianPruner, Pruner
    from nnx_jax.search.samplers import GridSampler, RandomSampler, Sampler
    from nnx_jax.search.space import CategoricalParam, FloatParam, IntParam, SearchParam, SearchSpace
    from nnx_jax.search.study import search
    from nnx_jax.search.vmapped import VmappedTrial, vmapped_trials

__all__ = [
    "CategoricalParam",
    "FloatParam",
    "GridSampler",
    "IntParam",
    "MedianPruner",
    "OptunaPruner",
    "OptunaSampler",
    "Pruner",
    "RandomSampler",
    "Sampler",
    "SearchBudget",
    "SearchParam",
    "SearchResult",
    "SearchSpace",
    "TrialOutcome",
    "VmappedTrial",
    "search",
    "vmapped_trials",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
