"""The built-in callbacks of the (loop, state, metrics) form, and the validation of an operator row by row."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PlainValidator, PrivateAttr

from nnx_jax.core.errors import ConfigError, OperatorTypeError
from nnx_jax.core.operator import Operator
from nnx_jax.core.positional import PositionalOperator
from nnx_jax.core.registry import OneOf, register
from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.loop.monitors import MonitorTracker
from nnx_jax.loop.step_callbacks import EVALUATION, StepState
from nnx_jax.params.fields import Count, Name, NonNegative, Text
from nnx_jax.params.train import MonitorSpec


class StepCallback(PositionalOperator):
    """Family `step_callback`: configured callbacks of a TrainingLoop. What they see of a run is no part of them: two
    with the same settings are equal, and a file holds the settings alone."""

    family: ClassVar[str] = "step_callback"
    never_called: ClassVar[str] = "a callback is told of a training, not called; give it to the loop's `callbacks`"
    distributed: ClassVar[Literal["all", "writer"]] = "all"

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise OperatorTypeError(f"{type(self).__name__} is a callback, it is not called; give it to `callbacks`")


@register("early_stopping")
class EarlyStopping(StepCallback):
    """Ask for the end of the run after `patience` evaluations in a row without improvement.

    The first finite value improves; a later one must beat the best by more than `min_delta`. NaN never improves. Every
    run starts anew; a resumed one goes on where it was.

    Attributes:
        best: the best value so far, or None.
        wait: evaluations since.
        should_stop: the run's end was asked for.

    Warns:
        RuntimeWarning: at the end of a run in which no evaluation had the metric.
    """

    metric: Name
    """Name of a value of the evaluations: "val_loss", or "loss" for short."""
    patience: Count = 10
    """Evaluations without improvement before the run stops."""
    mode: Literal["min", "max"] = "min"
    """Which direction is better."""
    min_delta: NonNegative = 0.0
    """Least change that counts."""

    _tracker: MonitorTracker = PrivateAttr()
    _wait: int = PrivateAttr(default=0)
    _stopped: bool = PrivateAttr(default=False)
    _missed: set[str] | None = PrivateAttr(default_factory=set)
    _began: int = PrivateAttr(default=0)

    if TYPE_CHECKING:

        def __init__(
            self, metric: str, patience: int = 10, mode: str = "min", min_delta: float = 0.0, **data: Any
        ) -> None: ...

    def model_post_init(self, context: Any) -> None:
        """Nothing was seen yet."""
        super().model_post_init(context)
        self.reset()

    def reset(self) -> None:
        """Forget everything that was seen."""
        spec = MonitorSpec(metric=self.metric, mode=self.mode, min_delta=self.min_delta)
        self._tracker = MonitorTracker(spec, self.mode)
        self._wait, self._stopped, self._missed = 0, False, set()

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._tracker.best

    @property
    def wait(self) -> int:
        """Evaluations since the best."""
        return self._wait

    @property
    def should_stop(self) -> bool:
        """The run's end was asked for."""
        return self._stopped

    def on_train_begin(self, loop: Any, state: StepState) -> None:
        self.reset()
        self._began = state.step

    def on_eval_end(self, loop: Any, state: StepState, metrics: Mapping[str, float]) -> None:
        value = metrics.get(self.metric, metrics.get(f"val_{self.metric}"))
        if value is None:
            if self._missed is not None:
                self._missed |= set(metrics)
            return
        self._missed = None
        decision = self._tracker.decide({f"val_{self.metric}": float(value)})
        self._wait = 0 if decision.improved else self._wait + 1
        if self._wait >= self.patience and not self._stopped:
            self._stopped = True
            told = f"{self.metric} has not improved on {self.best} in {self._wait} evaluations"
            state.request_stop(f"early stopping: {told}")

    def on_train_end(self, loop: Any, state: StepState) -> None:
        if self._missed is None or state.error is not None or state.step == self._began:
            return
        known = f"they gave {', '.join(sorted(self._missed))}" if self._missed else "there were none"
        message = f"EarlyStopping('{self.metric}') found no such value in the evaluations of this run: {known}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def component_state(self) -> dict[str, Any]:
        rule = self._tracker.rule()
        return {"rule": rule, "best": self.best, "wait": self._wait, "seen": self._missed is None}

    def load_component_state(self, state: Mapping[str, Any]) -> None:
        if state["rule"] != self._tracker.rule():
            raise ValueError(f"EarlyStopping: it watched {state['rule']}, this one watches {self._tracker.rule()}")
        self._tracker.best, self._wait = state["best"], state["wait"]
        self._missed = None if state["seen"] else set()


def _registry(value: Any) -> Any:
    value = OneOf("model_registry").admit(value) if isinstance(value, str | Mapping) else value
    if value is not None and not callable(getattr(value, "store", None)):
        raise TypeError(f"Checkpoint.registry is {type(value).__name__}; a ModelRegistry has store(model, weights=...)")
    return value


@register("checkpoint")
class Checkpoint(StepCallback):
    """Say how often a run is committed and how many commits stay, and store the trained model in a registry at the end.

    The loop reads the cadence, the number and the place; nothing is written here. The last update is always committed.

    Attributes:
        last_hash: under which the model was stored, or None.
        last_uri: the same as `registry://<hash>`.

    Raises:
        TypeError: a registry that cannot store, at construction.
    """

    every_n_steps: Count = 1000
    """Updates between two commits."""
    keep_last: Annotated[int, Field(ge=1, le=10_000)] = 3
    """How many of the newest commits stay."""
    save_dir: Text | None = None
    """Where runs are; none: where the loop says."""
    registry: Annotated[Any, PlainValidator(_registry)] = Field(default=None)
    """A ModelRegistry for the trained model."""
    monitor: Text | None = None
    """Value whose best commit stays besides the newest, as "train_loss"; none: "val_loss" where there is one."""
    mode: Literal["min", "max"] = "min"
    """Which direction of `monitor` is better."""

    _hash: str | None = PrivateAttr(default=None)

    if TYPE_CHECKING:

        def __init__(
            self, every_n_steps: int = 1000, keep_last: int = 3, save_dir: str | None = None, registry: Any = None,
            **data: Any,
        ) -> None: ...  # fmt: skip

    def should_snapshot(self, step: int) -> bool:
        """Whether a commit is due after `step` updates."""
        return step > 0 and step % self.every_n_steps == 0

    @property
    def last_hash(self) -> str | None:
        """Under which the model was stored."""
        return self._hash

    @property
    def last_uri(self) -> str | None:
        """Where the model was stored."""
        return None if self._hash is None else f"registry://{self._hash}"

    def on_train_begin(self, loop: Any, state: StepState) -> None:
        self._hash = None

    def on_train_end(self, loop: Any, state: StepState) -> None:
        """Store the model of a run that did not fail; every process learns its hash, one writes."""
        model = None if self.registry is None or state.error is not None else state.model
        if model is None:
            return
        serialize = getattr(model, "serialize_weights", None)
        more = {"weights": serialize()} if callable(serialize) else {}
        find = getattr(self.registry, "store" if state.writes else "digest", None)
        self._hash = None if find is None else find(model, **more)


def _tracker(value: Any) -> Any:
    value = OneOf("experiment_tracker").admit(value) if isinstance(value, str | Mapping) else value
    lacks = [name for name in ("start_run", "log_metrics", "end_run") if not callable(getattr(value, name, None))]
    if lacks:
        told = f"LogToExperiment.tracker is {type(value).__name__}, without {', '.join(lacks)}"
        raise TypeError(f"{told}; an ExperimentTracker has start_run, log_metrics and end_run")
    return value


@register("log_to_experiment")
class LogToExperiment(StepCallback):
    """Log a run with an experiment tracker: its configuration, every update, every evaluation, and how it ended.

    Args:
        tracker: has `start_run(name, config)`, `log_metrics(run, metrics, step=)` and `end_run(run, status=)`. The
            status is "completed", "failed" after an error, "interrupted" after a signal.

    Attributes:
        run: what `start_run` returned, or None before the first run.
        run_id: its `run_id`, attribute or key, as text.

    Raises:
        TypeError: a tracker that lacks a method, at construction.
    """

    distributed: ClassVar[Literal["all", "writer"]] = "writer"
    tracker: Annotated[Any, PlainValidator(_tracker)]
    """The ExperimentTracker."""
    run_name: Text
    """Name of the run there."""
    config: Mapping[str, Any] | None = None
    """Values to log beside those of the loop, in place of the loop's where both have a name."""

    _run: Any = PrivateAttr(default=None)
    _open: bool = PrivateAttr(default=False)

    if TYPE_CHECKING:

        def __init__(
            self, tracker: Any, run_name: str, config: Mapping[str, Any] | None = None, **data: Any
        ) -> None: ...

    @property
    def run(self) -> Any:
        """What the tracker's `start_run` returned."""
        return self._run

    @property
    def run_id(self) -> str | None:
        """The id that the tracker gave the run; None without one."""
        found = self._run.get("run_id") if isinstance(self._run, Mapping) else getattr(self._run, "run_id", self._run)
        return str(found) if isinstance(found, str | int) else None

    def on_train_begin(self, loop: Any, state: StepState) -> None:
        describe: Any = getattr(loop, "get_config", dict)
        config = {**describe(), **(self.config or {})}
        self._run = self.tracker.start_run(self.run_name, config)
        self._open = True

    def on_step_end(self, loop: Any, state: StepState, metrics: Mapping[str, float]) -> None:
        self._log(metrics, state.step)

    def on_eval_end(self, loop: Any, state: StepState, metrics: Mapping[str, float]) -> None:
        self._log({f"{EVALUATION}{name}": value for name, value in metrics.items()}, state.step)

    def on_train_end(self, loop: Any, state: StepState) -> None:
        if self._open:
            self._open = False
            self.tracker.end_run(self._run, status=status_of(state.error))

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._open and metrics:
            self.tracker.log_metrics(self._run, dict(metrics), step=step)


def status_of(error: BaseException | None) -> str:
    """How a run ended: "completed", "failed", or "interrupted" by a signal."""
    return "completed" if error is None else "failed" if isinstance(error, Exception) else "interrupted"


@register("validation_step")
class ValidationStep(PositionalOperator):
    """Called, it asks a model for every pair of a dataset and returns the mean of each metric over the pairs.

    A metric is an operator `(predicted, target) -> value` or `-> (value, values by name)`. Its mean stands under the
    name of its class, the other values under their own; where two metrics would share a name, the class and its place
    are put in front (`MSE_1`, `MSE_1.mse`). An empty dataset gives {}.

    Raises:
        OperatorTypeError: (a TypeError) a model or metric that is no operator, a dataset that is none.
        ConfigError: (a ValueError) no metric.
    """

    model_op: Operator
    """The model."""
    dataset: TrainingDataset
    """Its rows are (x, y)."""
    metrics: Annotated[tuple[Operator, ...], Field(min_length=1)]
    """What is measured."""

    if TYPE_CHECKING:

        def __init__(self, model_op: Any, dataset: Any, metrics: Any, **data: Any) -> None: ...

    def _apply(self) -> dict[str, float]:
        values: dict[str, list[float]] = {}
        for x, y in self._pairs():
            predicted, row = self.model_op(x), {}
            for number, metric in enumerate(self.metrics):
                for name, value in _measured(metric, metric(predicted, y)):
                    label = f"{type(metric).__name__}_{number}"
                    taken = name if name not in row else label if name == type(metric).__name__ else f"{label}.{name}"
                    row[taken] = float(np.mean(np.asarray(value, np.float64)))
            for name, value in row.items():
                values.setdefault(name, []).append(value)
        return {name: math.fsum(found) / len(found) for name, found in values.items()}

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        for row in self.dataset:
            if not isinstance(row, tuple) or len(row) != 2:
                raise ConfigError(f"ValidationStep needs a dataset of (x, y), got rows of {len(row)} columns")
            yield row[0], row[1]


def _measured(metric: Operator, result: Any) -> Iterator[tuple[str, Any]]:
    """What a metric returned, by name."""
    value, others = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    yield type(metric).__name__, value
    yield from others.items()
