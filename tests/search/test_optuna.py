"""Optuna's samplers and pruners answer for a study of ours, and keep nothing that a stop could lose."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nnx_jax.search import (
    CategoricalParam,
    FloatParam,
    IntParam,
    MedianPruner,
    OptunaPruner,
    OptunaSampler,
    SearchSpace,
    TrialOutcome,
)

optuna = pytest.importorskip("optuna")
SPACE = SearchSpace(
    x=FloatParam(low=-1.0, high=1.0),
    n=IntParam(low=1, high=9, step=2),
    net=CategoricalParam(choices=("small", (8, 8))),
)


def study(sampler: Any, count: int, trials: tuple[TrialOutcome, ...] = ()) -> tuple[TrialOutcome, ...]:
    """Go on with trials whose value is x squared, every fourth of them failed."""
    while len(trials) < count:
        values = dict(sampler.ask(SPACE, len(trials), trials, "min"))
        fails = len(trials) % 4 == 3
        value = None if fails else values["x"] ** 2
        trials += (TrialOutcome(len(trials), values, state="failed" if fails else "complete", value=value),)
    return trials


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_it_learns_and_goes_on_as_if_it_had_not_stopped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        whole = study(OptunaSampler(seed=2), 30)
    assert study(OptunaSampler(seed=2), 30, whole[:17]) == whole
    for trial in whole:
        assert -1 <= trial.values["x"] <= 1
        assert trial.values["n"] in (1, 3, 5, 7, 9)
        assert trial.values["net"] in ("small", (8, 8))
    early, late = (sum(abs(t.values["x"]) for t in part) / 10 for part in (whole[:10], whole[20:]))
    assert late < 0.8 * early
    assert not caplog.records


def test_a_sampler_of_choice() -> None:
    made: list[int] = []

    def make(seed: int) -> Any:
        made.append(seed)
        return optuna.samplers.RandomSampler(seed=seed)

    study(OptunaSampler(make, seed=5), 3)
    assert made == [5, 6, 7]


def test_its_pruners() -> None:
    """Optuna's median rule and ours agree on a trial behind both earlier ones, and on one ahead."""
    before = tuple(
        TrialOutcome(number, {}, state="complete", value=value, measured=((0, 4, value), (1, 8, value / 2)))
        for number, value in enumerate((0.2, 0.4))
    )
    theirs, ours = OptunaPruner(optuna.pruners.MedianPruner(n_startup_trials=2)), MedianPruner(startup_trials=2)
    for value in (0.1, 0.5):
        answers = {pruner.prune(2, ((0, 4, value),), before, "min") for pruner in (theirs, ours)}
        assert answers == {value > 0.3}
