"""Every exception of the project: each names its layer, the value found and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NnxError(Exception):
    """Base of every error raised on purpose; `layer` names the responsible part of the system."""

    layer = "nnx_jax"

    def __str__(self) -> str:
        return f"{self.layer}: {Exception.__str__(self)}"  # KeyError's own would put it in quotes


class ConfigError(NnxError, ValueError):
    """A configuration value is wrong; carries the place it came from.

    Attributes:
        path: dotted path of the value inside the configuration, `""` when there is none.
        file: file the value was read from, or None for values given in Python.
        line: 1-based line in `file`, or None.
    """

    layer = "config"

    def __init__(self, message: str, *, path: str = "", file: str | None = None, line: int | None = None) -> None:
        self.path, self.file, self.line = path, file, line
        place = ":".join(str(part) for part in (file, line) if part is not None)
        super().__init__(": ".join(part for part in (place, path, message) if part))


class OperatorTypeError(ConfigError, TypeError):
    """Something stands, or was returned, where an operator (or what one must return) is required."""


class UnregisteredError(ConfigError, PermissionError):
    """A document names a class or function that was not registered; nothing was imported or run."""


class NotLoadableError(ConfigError, RuntimeError):
    """A document names a class that is built in Python only."""


class DataError(NnxError, ValueError):
    """A dataset, a column or a label is not what the run needs."""

    layer = "data"


class ModelError(NnxError, ValueError):
    """A network or its weights do not fit the data or the request."""

    layer = "model"


class StepError(NnxError):
    """The compiled step cannot do what was asked."""

    layer = "step"


class NonFiniteError(StepError, FloatingPointError):
    """A loss or gradient is not finite; the state is as before the update it names."""


class HookError(StepError, ValueError):
    """A hook, or a set of hooks, cannot be registered as it is."""


class HookTypeError(StepError, TypeError):
    """A hook is, or returned, something of another type than its stage needs."""


class HookStateError(StepError, RuntimeError):
    """A hook is asked for something at a moment at which it cannot give it: before it began, or after it ended."""


class TraceStateError(StepError, RuntimeError):
    """A hook changed its Python state while the step was traced, which happens once and not once a step."""


class TraceBoundaryError(StepError, RuntimeError):
    """A hook asked for a value, or changed one, at a place where the step does not hand it out."""


class HaltedElsewhere(StepError):
    """The step halted on every process because another one could not give its rows; that one knows why."""


class VetoError(StepError, RuntimeError):
    """A hook rejected too many updates in a row; the state is as before the last of them."""


class CheckpointError(NnxError):
    """The run store cannot read or write what was asked; nothing was changed."""

    layer = "checkpoint"


class UnsafePathError(CheckpointError, ValueError):
    """A run id, tag or path that could leave its directory or follow a link."""


class ResumePointError(CheckpointError, ValueError):
    """A checkpoint is missing, torn, mixed, corrupt, or of another run; nothing was restored."""


class MissingCheckpointError(ResumePointError, FileNotFoundError):
    """There is no run, or no checkpoint of this name, at the address that was given."""


class HistoryCorruptionError(CheckpointError, ValueError):
    """Committed history does not match what LAST says of it."""


class ComponentRestoreError(CheckpointError, ValueError):
    """Stored component state does not fit; `problems` lists every mismatch."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class RunExistsError(CheckpointError, FileExistsError):
    """The run is already finished under this id, `run_id`."""

    def __init__(self, message: str, *, run_id: str = "") -> None:
        self.run_id = run_id
        super().__init__(message)


class LeaseHeldError(CheckpointError):
    """Another process is writing this run."""


class LeaseLostError(CheckpointError):
    """This process no longer holds the right to write the run."""


class CommitError(CheckpointError, OSError):
    """A commit failed before LAST moved; the previous commit stands."""


class ProcessGroupError(NnxError, RuntimeError):
    """The group of processes is missing, incomplete or disagrees."""

    layer = "process group"


class DistributedFailure(ProcessGroupError):
    """Another process of the group failed; this one stops with it.

    Attributes:
        rank: the first process that failed.
        stage: what was being done.
        kind, message: class name and text of its own error, which it raises itself.
    """

    def __init__(self, rank: int, stage: str, kind: str, message: str) -> None:
        self.rank, self.stage, self.kind, self.message = rank, stage, kind, message
        super().__init__(f"rank {rank} failed at '{stage}': {kind}: {message}")


def nearest(name: object, legal: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"`, or the list of legal names when nothing is close."""
    names = sorted(legal)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; legal names: {', '.join(names)}" if names else "; there are no legal names"
