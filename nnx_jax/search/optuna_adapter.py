"""Optuna's samplers and pruners in a study of ours: each question is put to them with the trials so far."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nnx_jax.search.outcomes import Direction, TrialOutcome
from nnx_jax.search.pruners import Measured
from nnx_jax.search.space import CategoricalParam, FloatParam, IntParam, SearchParam, SearchSpace

_DIRECTIONS = {"min": "minimize", "max": "maximize"}


class OptunaSampler:
    """Values proposed by a sampler of Optuna (`pip install 'nnx_jax[optuna]'`), by default its TPE.

    Optuna keeps nothing: it is told every trial before each question, with a seed of its own. So a study that was
    stopped goes on as if it had not been.

    Args:
        make: returns the sampler for a seed, `lambda seed: optuna.samplers.GPSampler(seed=seed)`.
        seed: of trial 0; trial n gets `seed + n`.

    Raises:
        ImportError: Optuna is not installed.
    """

    def __init__(self, make: Callable[[int], Any] | None = None, seed: int = 0) -> None:
        optuna = _optuna()
        self.make = make or (lambda seed: optuna.samplers.TPESampler(seed=seed))
        self.seed = seed

    def ask(
        self, space: SearchSpace, number: int, trials: Sequence[TrialOutcome], direction: Direction
    ) -> Mapping[str, Any]:
        """Return what Optuna proposes for trial `number`."""
        with _quiet(_optuna()) as optuna:
            study = _study(optuna, trials, direction, space, sampler=self.make(self.seed + number))
            found = study.ask({name: _distribution(optuna, param) for name, param in space.items()}).params
        return {name: _value(space[name], found[name]) for name in space}


class OptunaPruner:
    """A pruner of Optuna: `OptunaPruner(optuna.pruners.SuccessiveHalvingPruner())`. Its steps are epochs.

    Raises:
        ImportError: Optuna is not installed.
    """

    def __init__(self, pruner: Any) -> None:
        _optuna()
        self.pruner = pruner

    def prune(self, number: int, measured: Measured, trials: Sequence[TrialOutcome], direction: Direction) -> bool:
        """Return what the pruner says of the trial that runs."""
        with _quiet(_optuna()) as optuna:
            study = _study(optuna, trials, direction)
            trial = optuna.trial.FrozenTrial(
                number=number,
                trial_id=number,
                state=optuna.trial.TrialState.RUNNING,
                value=None,
                values=None,
                datetime_start=None,
                datetime_complete=None,
                params={},
                distributions={},
                user_attrs={},
                system_attrs={},
                intermediate_values={epoch: value for epoch, _, value in measured},
            )
            return bool(self.pruner.prune(study, trial))


def _study(
    optuna: Any,
    trials: Sequence[TrialOutcome],
    direction: Direction,
    space: SearchSpace | None = None,
    *,
    sampler: Any = None,
) -> Any:
    """An Optuna study in memory that has seen these trials; without a space, of what they measured only."""
    study = optuna.create_study(direction=_DIRECTIONS[direction], sampler=sampler or optuna.samplers.RandomSampler(0))
    states = optuna.trial.TrialState
    for trial in trials:
        state = {"complete": states.COMPLETE, "pruned": states.PRUNED}.get(trial.state, states.FAIL)
        study.add_trial(
            optuna.trial.create_trial(
                state=state if trial.value is not None or state != states.COMPLETE else states.FAIL,
                value=trial.value if state == states.COMPLETE else None,
                params={} if space is None else {n: _told(space[n], value) for n, value in trial.values.items()},
                distributions={} if space is None else {n: _distribution(optuna, space[n]) for n in trial.values},
                intermediate_values={epoch: value for epoch, _, value in trial.measured},
            )
        )
    return study


def _distribution(optuna: Any, param: SearchParam) -> Any:
    kinds = optuna.distributions
    if isinstance(param, FloatParam):
        return kinds.FloatDistribution(param.low, param.high, log=param.log, step=param.step)
    if isinstance(param, IntParam):
        return kinds.IntDistribution(param.low, param.high, log=param.log, step=param.step)
    assert isinstance(param, CategoricalParam)
    return kinds.CategoricalDistribution(list(range(len(param.choices))))  # by place: a choice may be a list


def _told(param: SearchParam, value: Any) -> Any:
    """A value of ours as Optuna's distribution has it."""
    if not isinstance(param, CategoricalParam):
        return value
    return next(i for i, choice in enumerate(param.choices) if type(choice) is type(value) and choice == value)


def _value(param: SearchParam, told: Any) -> Any:
    return param.choices[told] if isinstance(param, CategoricalParam) else told


@contextlib.contextmanager
def _quiet(optuna: Any) -> Iterator[Any]:
    """Optuna logs every study it makes; ours are made by the question."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield optuna
    finally:
        optuna.logging.set_verbosity(before)


def _optuna() -> Any:
    try:
        import optuna  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("Optuna is not installed; pip install 'nnx_jax[optuna]'") from error
    return optuna
