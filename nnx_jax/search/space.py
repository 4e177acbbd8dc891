"""SearchSpace: which values a study may try, by name; drawn at random or laid out as a grid."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import Field

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.registry import register
from nnx_jax.core.spec import Spec
from nnx_jax.params.fields import Count, Positive


class SearchParam(Spec):
    """Family `search_param`: the values one name may take."""

    family: ClassVar[str] = "search_param"

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> Any:
        """Return one value at random."""

    @abstractmethod
    def grid(self, points: int) -> list[Any]:
        """Return the values of a grid, in order; `points` is how many where there are infinitely many."""


@register("float")
class FloatParam(SearchParam):
    """A number between two others, both included."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    log: bool = False
    """Whether equal ratios are equally likely, in place of equal distances."""
    step: Positive | None = None
    """Distance of the values, counted from `low`; none: every number."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """The ends are in order, and a logarithm exists."""
        yield from super().problems()
        yield from _range_problems(self.low, self.high, self.log, self.step is not None)

    def draw(self, rng: np.random.Generator) -> float:
        """Return a float."""
        if self.step is not None:
            return self._at(int(rng.integers(self._steps() + 1)))
        return float(min(max(_between(self.low, self.high, rng.random(), self.log), self.low), self.high))

    def grid(self, points: int) -> list[float]:
        """Return `points` values with equal distances (or ratios), or every step."""
        if self.step is not None:
            return [self._at(index) for index in range(self._steps() + 1)]
        if points == 1 or self.low == self.high:
            return [self.low]
        inner = [_between(self.low, self.high, index / (points - 1), self.log) for index in range(1, points - 1)]
        return [self.low, *inner, self.high]

    def _steps(self) -> int:
        return math.floor((self.high - self.low) / (self.step or 1.0) * (1 + 1e-12))

    def _at(self, index: int) -> float:
        return min(self.low + index * (self.step or 1.0), self.high)


@register("int")
class IntParam(SearchParam):
    """A whole number between two others, both included."""

    low: int
    """Smallest value."""
    high: int
    """Largest value."""
    log: bool = False
    """Whether equal ratios are equally likely, in place of equal distances."""
    step: Count = 1
    """Distance of the values, counted from `low`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """The ends are in order, and a logarithm exists."""
        yield from super().problems()
        yield from _range_problems(self.low, self.high, self.log, self.step != 1)

    def draw(self, rng: np.random.Generator) -> int:
        """Return an int."""
        if not self.log:
            return self.low + self.step * int(rng.integers((self.high - self.low) // self.step + 1))
        value = _between(self.low - 0.5, self.high + 0.5, rng.random(), log=True)
        return min(max(round(value), self.low), self.high)

    def grid(self, points: int) -> list[int]:
        """Return every value; with `log`, `points` of them with about equal ratios."""
        if not self.log:
            return list(range(self.low, self.high + 1, self.step))
        inner = [_between(self.low, self.high, index / max(points - 1, 1), log=True) for index in range(points)]
        return list(dict.fromkeys(min(max(round(value), self.low), self.high) for value in inner))


@register("categorical")
class CategoricalParam(SearchParam):
    """One of the values listed: numbers, text, true, false, none, or lists of them."""

    choices: Annotated[tuple[Any, ...], Field(min_length=1)]
    """The values."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Every choice can be written down, and is there once."""
        yield from super().problems()
        for index, choice in enumerate(self.choices):
            if not _plain(choice):
                text = f"got a {type(choice).__name__}; a choice is a number, text, true, false, none or a list of them"
                yield f"choices[{index}]", f"{text}; name it, and let apply look it up"
            elif any(type(choice) is type(other) and choice == other for other in self.choices[:index]):
                yield f"choices[{index}]", f"{choice!r} is given twice"

    def draw(self, rng: np.random.Generator) -> Any:
        """Return a choice."""
        return self.choices[int(rng.integers(len(self.choices)))]

    def grid(self, points: int) -> list[Any]:
        """Return every choice."""
        del points
        return list(self.choices)


class SearchSpace(Mapping[str, SearchParam]):
    """The values of every name: `SearchSpace({"lr": FloatParam(low=1e-4, high=1e-1, log=True)})`, or by keyword.

    Raises:
        ConfigError: no name at all, or something that is no FloatParam, IntParam or CategoricalParam.
    """

    def __init__(self, params: Mapping[str, SearchParam] | None = None, /, **more: SearchParam) -> None:
        self._params = {**(params or {}), **more}
        if not self._params:
            raise ConfigError("the space is empty; give at least one name with its values", path="space")
        for name, param in self._params.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(f"got the name {name!r}; names are text", path="space")
            if not isinstance(param, SearchParam):
                text = f"expected a FloatParam, IntParam or CategoricalParam, got {type(param).__name__}"
                raise ConfigError(text, path=f"space.{name}")

    @classmethod
    def from_state(cls, state: Any, *, source: str = "space") -> Self:
        """Return the space a mapping of names to `{kind: float, low: ..., high: ...}` describes.

        Raises:
            ConfigError: naming `source` and every problem.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"holds a {type(state).__name__}; expected a mapping of names to parameters", file=source)
        return cls({name: SearchParam.from_state(entry, source=f"{source}: {name}") for name, entry in state.items()})

    def state(self) -> dict[str, Any]:
        """Return the space as JSON values."""
        return {name: param.state() for name, param in self._params.items()}

    def __getitem__(self, name: str) -> SearchParam:
        return self._params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)

    def __repr__(self) -> str:
        return f"SearchSpace({', '.join(self._params)})"


def _between(low: float, high: float, part: float, log: bool) -> float:
    """The point that lies `part` (0 to 1) of the way from low to high."""
    if log:
        return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
    return low + part * (high - low)


def _range_problems(low: float, high: float, log: bool, stepped: bool) -> Iterator[tuple[str, str]]:
    if low > high:
        yield "high", f"got {high}, less than low={low}"
    if log and low <= 0:
        yield "low", f"got {low}; a logarithmic range begins above 0"
    if log and stepped:
        yield "step", "a logarithmic range has no steps; drop log or step"


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
