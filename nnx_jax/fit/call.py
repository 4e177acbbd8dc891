"""TrainCall: what one call of `train` is given beside the configuration; none of it is configuration itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_jax.core.errors import ConfigError
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.progress import Progress
from nnx_jax.objectives.objective import Objective, as_objective
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.experiment import ExperimentManifest


@dataclass(frozen=True)
class TrainCall:
    """One call of `train`.

    Attributes:
        progress: the display.
        callbacks: Callback objects, or functions of the history rows.
        hooks: what takes part in the step, or watches it stage by stage.
        train_step_fn: a step of the user's own in place of the built-in one; excludes `objective`.
        eval_step_fn: a validation of the user's own in place of the built-in one.
        objective: what makes the loss terms, in place of the model's loss; excludes `train_step_fn`.
        components: objects with state that a generation keeps and a resume restores.
        history: a journal in place of `idps.csv`; None for the file.
        provenance: what the run is said to come from; None writes nothing.
        runs_dir: where runs live.
        wait_seconds: how long to wait while another process writes this very run.
        distributed: a DDP, where the processes of a group train together.
        optimizer: an `optax.GradientTransformation` in place of the configuration's; its steps are its own.
        schedule: a rate for every update in place of the configuration's, see `optim.optax_schedules`.
        start: a moment in memory to continue from, with what a stored one has; see `runs.resume.ResumePoint`.
    """

    progress: Progress
    callbacks: Sequence[Callback | Callable[..., Any]] = ()
    hooks: Sequence[Any] = ()
    train_step_fn: Callable[..., Any] | None = None
    eval_step_fn: Callable[..., Mapping[str, Any]] | None = None
    objective: Any = None
    components: Sequence[Any] = ()
    history: HistoryJournal | None = None
    provenance: ExperimentManifest | None = None
    runs_dir: str | Path = "runs"
    wait_seconds: float = 0.0
    distributed: Any = None
    optimizer: Any = None
    schedule: Any = None
    start: Any = None


def given_parts(objective: Any, step: Any, validation: Any) -> tuple[Any, ...]:
    """Return what `RunSpec.given` says of a call: the names of those that are not None."""
    named = {"objective": objective, "step": step, "validation": validation}
    return tuple(name for name, part in named.items() if part is not None)


def listed(callbacks: Sequence[Any] | Callback | Callable[..., Any] | None) -> tuple[Any, ...]:
    """The callbacks of a call: none, one alone, or a sequence of them."""
    if isinstance(callbacks, Callback) or callable(callbacks):
        return (callbacks,)
    return tuple(callbacks or ())


@dataclass(frozen=True)
class Given:
    """What makes the updates and the validation, checked; None stands for the built-in one."""

    objective: Objective | None = None
    step: Callable[..., Any] | None = None
    validation: Callable[..., Mapping[str, Any]] | None = None


def checked(call: TrainCall | None, spec: RunSpec) -> Given:
    """Return what `call` gives in place of built-in parts.

    Raises:
        ConfigError: (a ValueError) a step and an objective, an objective as a step, or a Trainer without either.
        TypeError: something that cannot be called, or a provenance that is no ExperimentManifest.
    """
    objective = None if call is None else call.objective
    step = None if call is None else call.train_step_fn
    validation = None if call is None else call.eval_step_fn
    kind = "train_step_fn" if spec.trainer is None else "trainer_step_fn"
    if step is not None and objective is not None:
        raise ConfigError(f"both {kind} and objective are given; one of them makes the updates, drop the other")
    if isinstance(step, Objective):
        raise ConfigError(f"{kind} is the objective {type(step).__name__}; pass it as objective=")
    if spec.trainer is not None and step is None and objective is None:
        raise ConfigError(
            "a Trainer has no step of its own; give Trainer.train a trainer_step_fn or an objective, from Python"
        )
    for name, function in ((kind, step), ("eval_step_fn", validation)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function of a context, got {type(function).__name__}")
    provenance = None if call is None else call.provenance
    if provenance is not None and not isinstance(provenance, ExperimentManifest):
        raise TypeError(f"provenance must be an ExperimentManifest, got {type(provenance).__name__}")
    return Given(None if objective is None else as_objective(objective), step, validation)
