"""Samplers: which values come next. Each is a function of the study so far, so a study can stop and go on anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nnx_jax.core.codec import canonical_json
from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.search.outcomes import Direction, TrialOutcome
from nnx_jax.search.space import SearchSpace


class Sampler(Protocol):
    """What a study asks before each trial. A sampler of your own has this method, and keeps nothing between calls."""

    def ask(
        self, space: SearchSpace, number: int, trials: Sequence[TrialOutcome], direction: Direction
    ) -> Mapping[str, Any] | None:
        """Return a value for every name of the space, None when there is nothing left to try.

        Args:
            number: of the trial to come.
            trials: those before it, by number.
            direction: "min" or "max", what is better.
        """
        ...


class RandomSampler:
    """Independent values; those of trial n depend on the seed and n alone."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = _whole("RandomSampler.seed", seed, least=0)

    def ask(
        self, space: SearchSpace, number: int, trials: Sequence[TrialOutcome], direction: Direction
    ) -> Mapping[str, Any]:
        """Return values for trial `number`."""
        del trials, direction
        rng = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        drawn = {name: space[name].draw(rng) for name in sorted(space)}
        return {name: drawn[name] for name in space}


class GridSampler:
    """Every combination once, the last name changing fastest; those a study has tried already are passed over.

    Args:
        points: values of a continuous range, for all names or by name; ranges with steps and choices are taken whole.
    """

    def __init__(self, points: int | Mapping[str, int] = 5) -> None:
        self.points = dict(points) if isinstance(points, Mapping) else points
        for given in self.points.values() if isinstance(self.points, dict) else [self.points]:
            _whole("GridSampler.points", given, least=1)

    def ask(
        self, space: SearchSpace, number: int, trials: Sequence[TrialOutcome], direction: Direction
    ) -> Mapping[str, Any] | None:
        """Return the first combination that is not among `trials`."""
        del number, direction
        tried = {_key(trial.values) for trial in trials}
        return next((values for values in self._all(space) if _key(values) not in tried), None)

    def _all(self, space: SearchSpace) -> Iterator[dict[str, Any]]:
        points = self.points if isinstance(self.points, dict) else dict.fromkeys(space, self.points)
        for name in points:
            if name not in space:
                raise ConfigError(f"GridSampler.points names {name!r}{nearest(name, space)}")
        for combination in itertools.product(*(space[name].grid(points.get(name, 5)) for name in space)):
            yield dict(zip(space, combination, strict=True))


def _key(values: Mapping[str, Any]) -> bytes:
    return canonical_json(dict(values))


def _whole(what: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be a whole number of {least} or more, got {value!r}")
    return value
