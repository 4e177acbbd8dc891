"""Pruners: which trials are not worth finishing, judged at each validation by those before them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

from nnx_jax.core.errors import ConfigError
from nnx_jax.search.outcomes import Direction, TrialOutcome

Measured = Sequence[tuple[int, int, float]]
"""(epoch, updates, value) of a trial's validations so far."""


class Pruner(Protocol):
    """What a study asks at each validation. A pruner of your own has this method."""

    def prune(self, number: int, measured: Measured, trials: Sequence[TrialOutcome], direction: Direction) -> bool:
        """Return whether the trial ends here.

        Args:
            number: the trial that runs.
            measured: its validations so far, the last one included; never empty.
            trials: those before it, by number.
            direction: "min" or "max", what is better.
        """
        ...


class MedianPruner:
    """End a trial whose best value so far is worse than the median of what earlier trials had reached by that epoch.

    Args:
        startup_trials: complete trials that are waited for.
        warmup_epochs: epochs of every trial that are not judged.
    """

    def __init__(self, startup_trials: int = 5, warmup_epochs: int = 0) -> None:
        for name, value in (("startup_trials", startup_trials), ("warmup_epochs", warmup_epochs)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"MedianPruner.{name} must be a whole number of 0 or more, got {value!r}")
        self.startup_trials, self.warmup_epochs = startup_trials, warmup_epochs

    def prune(self, number: int, measured: Measured, trials: Sequence[TrialOutcome], direction: Direction) -> bool:
        """Return whether the trial is behind."""
        del number
        epoch = measured[-1][0]
        complete = [trial for trial in trials if trial.state == "complete"]
        if epoch < self.warmup_epochs or len(complete) < max(self.startup_trials, 1):
            return False
        better = min if direction == "min" else max
        reached = [[value for at, _, value in trial.measured if at <= epoch] for trial in complete]
        bests = [better(values) for values in reached if values]
        if not bests:
            return False
        own, median = better(value for _, _, value in measured), statistics.median(bests)
        return own > median if direction == "min" else own < median
