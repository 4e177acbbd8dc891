"""A toy whose every value is known: one weight goes to 1, so a trial's value is a formula of its rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import MonitorSpec, NNTrainParams
from nnx_jax.plan import ExperimentPlan
from nnx_jax.search import CategoricalParam, GridSampler, SearchBudget, SearchResult, SearchSpace, search
from tests.e2e.toys import SAME, Target, half, targets

LOSS = MonitorSpec()
RATES = SearchSpace(rate=CategoricalParam(choices=(0.1, 0.5, 0.2)))


def sgd(rate: float) -> NNOptimParams:
    return NNOptimParams(kind="sgd", max_lr=rate, momentum=0.0)


def plan(epochs: int = 2) -> ExperimentPlan:
    """Four updates an epoch, of one row each."""
    return (
        ExperimentPlan()
        .with_net(lambda rngs: Target())
        .with_loss(half)
        .with_train(NNTrainParams(n_epochs=epochs, optim=sgd(0.1), scheduler=SAME, save_phase_checkpoints=False))
        .with_data(train=targets(1, 1, 1, 1), val=targets(1.0), batch_size=1, shuffle=False)
    )


def with_rate(plan: ExperimentPlan, values: Mapping[str, Any]) -> ExperimentPlan:
    return plan.with_optim(sgd(values["rate"]))


def value_at(rate: float, updates: int) -> float:
    """Half the squared distance left: every update keeps 1 - rate of the distance."""
    return 0.5 * (1 - rate) ** (2 * updates)


def run(trials: int, *, of: ExperimentPlan | None = None, space: SearchSpace = RATES, **more: Any) -> SearchResult:
    """Search the grid of the rates."""
    cap = more.pop("cap", None)
    deadline = more.pop("deadline", None)
    given: dict[str, Any] = {
        "apply": with_rate,
        "monitor": LOSS,
        "budget": SearchBudget(trials=trials, updates_per_trial=cap, deadline_seconds=deadline),
        "study_name": "toy",
        "sampler": GridSampler(),
        "quiet": True,
    }
    return search(of or plan(), space, **{**given, **more})
