"""What a plan answers: problems by field path, one error for all of them, and the result of a fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nnx_jax.core.errors import ConfigError
from nnx_jax.runs.run import NNRun

if TYPE_CHECKING:
    from nnx_jax.model import NNModel

Source = Literal["epoch", "eval", "last_batch", "end"]
_SOURCES: dict[str, Source] = {"epoch": "epoch", "eval": "eval"}


@dataclass(frozen=True)
class Diagnostic:
    """One problem of a plan: the path of its field (`train.n_epochs`, `callbacks[1]`), and what is wrong."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class PlanError(ConfigError, TypeError):
    """A plan cannot be run; `diagnostics` lists every problem with its field. A ValueError and a TypeError."""

    layer = "plan"

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        first = self.diagnostics[0]
        if len(self.diagnostics) == 1:
            super().__init__(first.message, path=first.path)
            return
        super().__init__(f"{len(self.diagnostics)} problems:" + "".join(f"\n  - {each}" for each in self.diagnostics))
        self.path = first.path


@dataclass(frozen=True)
class SplitMetrics:
    """What a fit measured on one split.

    Attributes:
        split: train, val or test.
        available: there are values; else `reason` says why not.
        epoch: the 0-based epoch the values belong to, None without values.
        source: "epoch" for a whole epoch; "eval" for an evaluation inside one (train: the epoch so far);
            "last_batch" when only single batches were recorded; "end" for the one scoring of the test split.
        values: by name ("loss", "accuracy", ...).
        reason: why there are no values, "" when there are.
    """

    split: str
    available: bool
    epoch: int | None
    source: Source | None
    values: Mapping[str, float]
    reason: str = ""


@dataclass(frozen=True)
class FitResult:
    """One finished fit of a plan.

    Attributes:
        model: the trained model.
        run: the run on the disk.
        metrics: `SplitMetrics` of "train", "val" and "test"; those without data are not available.
        attempt_id: what tells this run from another fit of the same plan.
    """

    model: NNModel
    run: NNRun
    metrics: Mapping[str, SplitMetrics]
    attempt_id: str


def read_metrics(run: NNRun) -> dict[str, SplitMetrics]:
    """Return what a run measured last on each split, from its committed history and its result."""
    return {"train": _from_history(run, "train"), "val": _from_history(run, "val"), "test": _from_artifact(run)}


def _from_history(run: NNRun, split: str) -> SplitMetrics:
    head = f"{split}_"
    if not any(name.startswith(head) for name in run.columns):
        return _missing(split, "the plan has no validation data; give data.val")
    row = _newest(run.summaries, head, ("epoch", "eval")) or _newest(run.records, head, ("update", "batch"))
    if row is None:
        return _missing(split, "nothing of it was committed")
    return SplitMetrics(split, True, int(row["epoch"]), _SOURCES.get(row["kind"], "last_batch"), _values(row, head))


def _newest(rows: Sequence[Mapping[str, Any]], head: str, kinds: tuple[str, ...]) -> Mapping[str, Any] | None:
    return next((row for row in reversed(rows) if row["kind"] in kinds and _values(row, head)), None)


def _from_artifact(run: NNRun) -> SplitMetrics:
    values = {
        name: float(value) for name, value in ((run.artifact or {}).get("test") or {}).items() if value is not None
    }
    if not values or run.last is None:
        return _missing("test", "the plan has no test data; give data.test")
    return SplitMetrics("test", True, run.last.epoch, "end", values)


def _values(row: Mapping[str, Any], head: str) -> dict[str, float]:
    return {
        name.removeprefix(head): float(value)
        for name, value in row.items()
        if name.startswith(head) and isinstance(value, int | float)
    }


def _missing(split: str, reason: str) -> SplitMetrics:
    return SplitMetrics(split, False, None, None, {}, reason)
