"""What a study may spend, what became of each trial, and what all of them show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.spec import Spec
from nnx_jax.params.fields import Count, Positive

State = Literal["running", "complete", "pruned", "failed"]
Direction = Literal["min", "max"]


class SearchBudget(Spec):
    """What a study may spend."""

    trials: Count
    """Trials of the whole study, whatever becomes of them: those of earlier calls, failed and pruned ones count."""
    updates_per_trial: Count | None = None
    """Committed updates after which a trial ends; none: as long as the plan says."""
    deadline_seconds: Positive | None = None
    """Seconds after the call's begin from which on no trial is started; one that runs is not cut short."""


@dataclass(frozen=True)
class TrialOutcome:
    """One trial.

    Attributes:
        number: place in the study, from 0.
        values: what was tried, by name.
        state: "running" (or stopped in the middle: the next call of the search goes on with it), "complete", "pruned"
            or "failed".
        value: the monitor's value of the epoch BEST holds; None without one.
        updates: updates that were made.
        epochs: epochs that were committed.
        reason: why it ended: "finished", "stopped_early", "update_cap", "pruned" or "failed".
        message: what a failed trial raised.
        run_id, attempt_id: where to find it; no run for trials that leave none.
        measured: (epoch, updates, value) of every validation with a finite value.
    """

    number: int
    values: Mapping[str, Any]
    state: State = "running"
    value: float | None = None
    updates: int = 0
    epochs: int = 0
    reason: str = ""
    message: str = ""
    run_id: str | None = None
    attempt_id: str | None = None
    measured: tuple[tuple[int, int, float], ...] = ()

    def with_(self, **changes: Any) -> Self:
        """Return a changed copy."""
        return replace(self, **changes)

    def to_state(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """Return the outcome `to_state` describes.

        Raises:
            ValueError: for anything else.
        """
        names = set(cls.__dataclass_fields__)
        if not isinstance(state, dict) or set(state) != names:
            raise ValueError(f"expected the keys {', '.join(sorted(names))}")
        kinds = {"number": int, "updates": int, "epochs": int, "values": dict, "measured": list, "reason": str}
        for name, kind in {**kinds, "message": str}.items():
            if type(state[name]) is not kind:
                raise ValueError(f"{name} is {state[name]!r}, expected {kind.__name__}")
        if state["state"] not in get_args(State):
            raise ValueError(f"state is {state['state']!r}")
        value = None if state["value"] is None else float(state["value"])
        measured = tuple((int(epoch), int(step), float(found)) for epoch, step, found in state["measured"])
        values = {name: _tuples(given) for name, given in state["values"].items()}
        return cls(**{**state, "value": value, "measured": measured, "values": values})


@dataclass(frozen=True)
class SearchResult:
    """What a study found.

    Attributes:
        study_name: its name.
        monitor: what it compares, such as "val_loss".
        direction: "min" or "max".
        trials: every trial of the study, those of earlier calls included, by number.
        reason: why the call ended: "trials" (the budget), "deadline" or "exhausted" (the sampler has no more values).
    """

    study_name: str
    monitor: str
    direction: Direction
    trials: tuple[TrialOutcome, ...]
    reason: str

    @property
    def best(self) -> TrialOutcome:
        """The complete trial with the best value, the earliest of equal ones.

        Raises:
            ConfigError: no trial was completed with a value.
        """
        done = [trial for trial in self.trials if trial.state == "complete" and trial.value is not None]
        if not done:
            states = ", ".join(f"{trial.number} {trial.state}" for trial in self.trials) or "there are no trials"
            raise ConfigError(f"study '{self.study_name}' has no complete trial ({states})")
        sign = 1.0 if self.direction == "min" else -1.0
        return min(done, key=lambda trial: (sign * (trial.value or 0.0), trial.number))

    def table(self) -> str:
        """Return the trials as text, one line each, the best marked with *."""
        return table(self.trials, self.monitor, self.direction)


def table(trials: Sequence[TrialOutcome], monitor: str, direction: Direction) -> str:
    """Return trials as aligned text, in the order of their numbers."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    rows = [["trial", *names, monitor, "updates", "state", "why"]]
    result = SearchResult("", monitor, direction, tuple(trials), "")
    has_best = any(trial.state == "complete" and trial.value is not None for trial in trials)
    best = result.best.number if has_best else None
    for trial in trials:
        shown = [short(trial.values[name]) if name in trial.values else "" for name in names]
        why = trial.message.partition("\n")[0] if trial.state == "failed" else trial.reason
        mark = "*" if trial.number == best else ""
        rows.append([f"{mark}{trial.number}", *shown, short(trial.value), str(trial.updates), trial.state, why])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows)


def short(value: Any) -> str:
    """Return a value as people read it in a table."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(short, value))}]"
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
