"""HyperSweep: one TrainingLoop for each point of a search space, sorted by a metric; stop anywhere and go on."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import Field

from nnx_jax.core import codec, fsio
from nnx_jax.core.durable import durable_json
from nnx_jax.core.errors import ConfigError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.core.stateful import CarryState, StatefulOperator
from nnx_jax.params.fields import Count
from nnx_jax.training_loop import TrainingLoop

FORMAT = "nnx_jax.sweep/1"
Point = Mapping[str, Any]


@register("parameter_grid")
class ParameterGrid(Operator):
    """Every combination of some values by name, the last name changing fastest; it can be iterated again and again.

    Raises:
        TypeError: values that are no list (text is none), or a grid that is no mapping.
        ConfigError: (a ValueError) a name without values.
    """

    grid: Mapping[str, Any]

    def __new__(cls, grid: Any = None, /, **data: Any) -> ParameterGrid:
        """Allow the grid by position."""
        return super().__new__(cls, **data)

    def __init__(self, grid: Any = None, /, **data: Any) -> None:
        if grid is not None:
            data["grid"] = grid
        given = data.get("grid", {})
        if not isinstance(given, Mapping):
            raise TypeError(f"a grid is a mapping of names to lists of values, got {type(given).__name__}")
        for name, values in given.items():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise TypeError(f"grid[{name!r}] is {values!r}; give a list of values")
            if not list(values):
                raise ConfigError(f"grid[{name!r}] has no values; leave the name out, or give one")
        super().__init__(**{**data, "grid": {name: tuple(values) for name, values in given.items()}})

    def __len__(self) -> int:
        """Return the number of combinations; none for a grid without names."""
        return math.prod(len(values) for values in self.grid.values()) if self.grid else 0

    def __bool__(self) -> bool:
        """Return True: an empty grid is still a grid."""
        return True

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """Yield one mapping a combination."""
        if self.grid:
            for values in itertools.product(*self.grid.values()):
                yield dict(zip(self.grid, values, strict=True))

    def _apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: there is nothing to call.

        Raises:
            TypeError: always.
        """
        raise TypeError("a ParameterGrid is not called, it is iterated: `for point in grid`")


@dataclass(frozen=True, eq=False)
class SweepCarryState(CarryState):
    """Where a sweep stands: trials done, the best value so far and its trial; both None before a first value."""

    completed: int = 0
    best_metric: float | None = None
    best_trial_index: int | None = None


@dataclass(frozen=True)
class SweepResult:
    """What one trial came to.

    Attributes:
        sweep_id, trial_index: of the sweep, and the trial's place in the order of trying.
        point: the values that were tried.
        metric: the value that is compared; None for a failed trial, NaN where it came to none.
        metrics: all final values by name.
        status: "completed" or "failed"; `error` says what was raised.
        operator, artifact: what the loop returned; None for a failed trial, one that was stored by an earlier call,
            and, for the operator, one that is not kept.
    """

    sweep_id: str
    trial_index: int
    point: Point
    metric: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    status: Literal["completed", "failed"] = "completed"
    error: str = ""
    operator: Any = None
    artifact: Any = None


@register("hyper_sweep")
class HyperSweep(StatefulOperator):
    """Trains one loop for each point and returns the results, best first.

    Args:
        loop_template: a function from a point to a TrainingLoop.
        search_space: a ParameterGrid, any iterable of mappings, or an object with `ask()` (a point, or None at the end)
            and `tell(point, value)`.
        select_metric: a name of the artifact's `final_metrics`. "loss" is the validation's where there is one.
        select_mode: which is better.
        n_trials: at most so many trials; None for all points.
        sweep_id: of every result; by default one of its own.
        on_trial: called as (SweepCarryState, SweepResult) after every trial.
        on_error: "record" goes on after a template or loop that raises, "raise" ends there.
        keep: whose operators are kept in memory.
        storage: a directory that keeps the results; the same sweep called again goes on after them.

    Raises:
        TypeError: a template or a point that is none, or a template that returns no TrainingLoop.
        ConfigError: (a ValueError) everything else that is wrong.
    """

    forbid_in_yaml = True

    loop_template: Any
    search_space: Any
    select_metric: str = "loss"
    select_mode: Literal["min", "max"] = "min"
    n_trials: Count | None = None
    sweep_id: str = Field(default_factory=lambda: secrets.token_hex(6))
    on_trial: Any = None
    on_error: Literal["record", "raise"] = "record"
    keep: Literal["best", "all", "none"] = "best"
    storage: str | Path | None = None

    def __init__(self, /, **fields: Any) -> None:
        if not callable(fields.get("loop_template")):
            told = type(fields.get("loop_template")).__name__
            raise TypeError(f"loop_template is {told}; give a function from a point to a TrainingLoop")
        space = fields.get("search_space")
        if isinstance(space, Mapping | str) or not (isinstance(space, Iterable) or _asks(space)):
            told = "give a ParameterGrid, an iterable of points, or an object with ask and tell"
            raise TypeError(f"search_space is {type(space).__name__}; {told}")
        if "n_trials" in fields and fields["n_trials"] is not None and fields["n_trials"] < 1:
            raise ConfigError(f"n_trials is {fields['n_trials']}; give 1 or more, or None for all points")
        super().__init__(**fields)

    def run(self) -> list[SweepResult]:
        """Try the points and return the results: by the metric, NaN after numbers, failed trials last."""
        return self._apply(None, SweepCarryState())[0]

    def initial_state(self) -> SweepCarryState:
        """Nothing is done yet."""
        return SweepCarryState()

    def _apply(self, carrier: Any, state: Any) -> tuple[list[SweepResult], SweepCarryState]:
        """Return the sorted results, and where the sweep stands."""
        del carrier
        state = state or SweepCarryState()
        results: list[SweepResult] = []
        for index, point in enumerate(self._points()):
            if not isinstance(point, Mapping):
                raise TypeError(f"point {index} is {type(point).__name__}; a point is a mapping of names to values")
            found = self._stored(index, point) or self._try(index, point)
            self._tell(point, found)
            state = self._moved(state, found)
            results = self._kept([*results, found], state)
            if self.on_trial is not None:
                self.on_trial(state, found)
        if not results:
            raise ConfigError("search_space gives no point; there is nothing to try")
        return sorted(results, key=self._rank), state

    # -- trials ------------------------------------------------------------------------------------------------

    def _points(self) -> Iterator[Any]:
        space = self.search_space
        points = iter(space.ask, None) if _asks(space) else iter(space)
        return itertools.islice(points, self.n_trials)

    def _tell(self, point: Point, found: SweepResult) -> None:
        if _asks(self.search_space):
            self.search_space.tell(point, found.metric)

    def _try(self, index: int, point: Point) -> SweepResult:
        self._check_writable(index, point)
        try:
            loop = self.loop_template(dict(point))
            trained = loop.run() if isinstance(loop, TrainingLoop) else None
        except Exception as error:
            if self.on_error == "raise":
                raise
            told = f"{type(error).__name__}: {error}"
            return self._saved(SweepResult(self.sweep_id, index, dict(point), None, status="failed", error=told))
        if trained is None:
            raise TypeError(f"loop_template returned {type(loop).__name__} for {dict(point)}; return a TrainingLoop")
        operator, artifact = trained
        metrics = {n: math.nan if v is None else v for n, v in artifact.backend_info.get("final_metrics", {}).items()}
        value = self._selected(metrics)
        done = SweepResult(self.sweep_id, index, dict(point), value, metrics, operator=operator, artifact=artifact)
        return self._saved(done)

    def _selected(self, metrics: Mapping[str, float]) -> float:
        """The value that is compared; of "loss" the validation's, where there is one.

        Raises:
            ConfigError: (a ValueError) the loop measures no such value.
        """
        names = [f"val_{self.select_metric}", self.select_metric]
        found = next((metrics[name] for name in names if name in metrics), None)
        if found is None:
            raise ConfigError(f"select_metric is {self.select_metric!r}; a trial gives {', '.join(sorted(metrics))}")
        return found

    # -- results -----------------------------------------------------------------------------------------------

    def _better(self, value: float, than: float | None) -> bool:
        if math.isnan(value):
            return False
        return than is None or (value < than if self.select_mode == "min" else value > than)

    def _moved(self, state: SweepCarryState, found: SweepResult) -> SweepCarryState:
        state = state.replace(completed=state.completed + 1)
        if found.metric is not None and self._better(found.metric, state.best_metric):
            return state.replace(best_metric=found.metric, best_trial_index=found.trial_index)
        return state

    def _kept(self, results: list[SweepResult], state: SweepCarryState) -> list[SweepResult]:
        if self.keep == "all":
            return results
        best = state.best_trial_index if self.keep == "best" else None
        return [r if r.trial_index == best or r.operator is None else replace(r, operator=None) for r in results]

    def _rank(self, result: SweepResult) -> tuple[int, float, int]:
        if result.metric is None:
            return 2, 0.0, result.trial_index
        if math.isnan(result.metric):
            return 1, 0.0, result.trial_index
        return 0, result.metric if self.select_mode == "min" else -result.metric, result.trial_index

    # -- storage -----------------------------------------------------------------------------------------------

    def _path(self, index: int) -> Path | None:
        if self.storage is None:
            return None
        return fsio.make_dir(self.storage) / f"{index:05d}.json"

    def _check_writable(self, index: int, point: Point) -> None:
        """Refuse a point that no file can hold before its training is paid for.

        Raises:
            ConfigError: (a ValueError) there is a storage, and the point has a value that is no plain one.
        """
        if self.storage is None:
            return
        try:
            codec.canonical_json(dict(point))
        except ConfigError as error:
            told = f"point {index} cannot be stored: {error}; give plain values, or no storage"
            raise ConfigError(told, path="storage") from None

    def _saved(self, result: SweepResult) -> SweepResult:
        path = self._path(result.trial_index)
        if path is not None:
            state = {
                "format": FORMAT,
                "select_metric": self.select_metric,
                "point": dict(result.point),
                "metric": _stored_number(result.metric),
                "metrics": {name: _stored_number(value) for name, value in result.metrics.items()},
                "status": result.status,
                "error": result.error,
            }
            fsio.atomic_write(path, durable_json(state, source=str(path), people=True))
        return result

    def _stored(self, index: int, point: Point) -> SweepResult | None:
        """What an earlier call found at this point.

        Raises:
            ConfigError: (a ValueError) another point, or another metric, is stored there.
        """
        path = self._path(index)
        if path is None or not path.exists():
            return None
        state: Any = codec.load_json(path)
        for name, now in (("format", FORMAT), ("select_metric", self.select_metric), ("point", _as_file(point))):
            if state.get(name) != now:
                told = f"{path} holds {name} {state.get(name)!r}, this sweep has {now!r}; use another storage"
                raise ConfigError(told, path="storage")
        metrics = {name: float(value) for name, value in state["metrics"].items()}
        metric = None if state["metric"] is None else float(state["metric"])
        return SweepResult(self.sweep_id, index, dict(point), metric, metrics, state["status"], state["error"])


def _asks(space: Any) -> bool:
    return callable(getattr(space, "ask", None)) and callable(getattr(space, "tell", None))


def _as_file(point: Point) -> Any:
    """A point as JSON gives it back."""
    return codec.parse_json(codec.canonical_json(dict(point)))


def _stored_number(value: float | None) -> float | str | None:
    """A number as JSON has it; those that are not finite as text."""
    return value if value is None or math.isfinite(value) else repr(value)
