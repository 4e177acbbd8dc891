"""One trial: a fit of the plan with these values, watched, and read back into a TrialOutcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nnx_jax.core.errors import RunExistsError
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.context import TrainContext
from nnx_jax.plan import ExperimentPlan
from nnx_jax.runs.run import NNRun
from nnx_jax.search.outcomes import TrialOutcome
from nnx_jax.search.pruners import Measured

Judge = Callable[[Measured], bool]
"""Whether a trial with these validations ends here."""


class TrialWatch(Callback):
    """Ends a trial at its cap of updates, or where a pruner says so, and notes its validations.

    Attributes:
        measured: (epoch, updates, value) of every finite validation, by updates.
        updates: updates made; 0 when nobody counted.
        reason: "update_cap" or "pruned" when it was this that ended the trial, else "".
    """

    def __init__(self, cap: int | None, judge: Judge | None) -> None:
        self.cap, self.judge = cap, judge
        self.measured: dict[int, tuple[int, int, float]] = {}
        self.updates, self.reason = 0, ""

    def on_train_begin(self, ctx: TrainContext) -> None:
        """Take over what a part before an interruption measured; count updates only when there is a cap.

        A listener makes the host read after every update, which would cost every trial its speed.
        """
        self.measured = measured(ctx.records)
        if self.cap is not None:
            ctx.update_listeners.append(self._count)

    def on_validation(self, ctx: TrainContext) -> None:
        if ctx.decision is None or ctx.decision.status != "ok" or ctx.decision.value is None:
            return
        self.measured[ctx.step] = (ctx.epoch, ctx.step, float(ctx.decision.value))
        if self.judge is not None and self.judge(tuple(self.measured.values())):
            ctx.should_stop, self.reason = True, "pruned"

    def _count(self, ctx: TrainContext) -> None:
        self.updates = ctx.step
        if self.cap is not None and ctx.step >= self.cap:
            ctx.stop_at_update, self.reason = True, "update_cap"


def run_trial(
    plan: ExperimentPlan,
    trial: TrialOutcome,
    *,
    cap: int | None,
    judge: Judge | None,
    runs_dir: str | Path,
    quiet: bool,
) -> TrialOutcome:
    """Fit `plan` as `trial.attempt_id` and return what became of it; a fit that raises is a failed trial.

    An attempt that was interrupted goes on; one that was finished, but not noted, is read from its run.
    """
    watch = TrialWatch(cap, judge)
    try:
        watched = plan.with_callbacks(*plan.settings.callbacks, watch)
        run = watched.fit(trial.attempt_id, runs_dir=runs_dir, quiet=quiet).run
    except RunExistsError as known:
        run = NNRun.load(known.run_id, runs_dir)
    except Exception as failure:  # whatever a fit raises is this trial's own affair; the study goes on
        message = f"{type(failure).__name__}: {failure}"
        return trial.with_(state="failed", reason="failed", message=message, updates=watch.updates)
    return read_outcome(run, trial, watch)


def read_outcome(run: NNRun, trial: TrialOutcome, watch: TrialWatch) -> TrialOutcome:
    """Return what a finished run says of its trial; `watch` knows more when it was there."""
    if run.last is None:
        return trial.with_(
            state="failed", run_id=run.id, updates=watch.updates, reason="failed", message=no_value(watch.updates, True)
        )
    host, stored = run.checkpoint().host, run.last.step
    ended, end = host["position"]["epoch"], host["length"]["end_epoch"]
    cut = not host["stopped"] and end is not None and ended < end  # only a stop inside an epoch leaves LAST behind it
    capped = watch.cap is not None and (cut or stored >= watch.cap)
    source = run.resume_status.source_epoch
    seen = {step: found for step, found in {**measured(run.records), **watch.measured}.items() if step <= stored}
    found = trial.with_(
        run_id=run.id,
        value=_best_value(run, seen),
        updates=max(stored, watch.updates or (watch.cap or 0 if capped else 0)),
        epochs=ended if source is None else ended - source - 1,
        reason=watch.reason or ("update_cap" if capped else "stopped_early" if host["stopped"] else "finished"),
        measured=tuple(seen[step] for step in sorted(seen)),
    )
    if found.reason == "pruned":
        return found.with_(state="pruned")
    if found.value is None:
        return found.with_(state="failed", message=no_value(found.updates, capped))
    return found.with_(state="complete")


def _best_value(run: NNRun, seen: Mapping[int, tuple[int, int, float]]) -> float | None:
    """The monitor's value at the validation that BEST holds, None without a BEST."""
    if run.best is None:
        return None
    if run.best.step in seen:
        return seen[run.best.step][2]
    decision = run.checkpoint("BEST").host["decision"]  # a journal no longer has the row in memory
    return None if decision is None else float(decision["value"])


def no_value(updates: int, capped: bool) -> str:
    """Say why a trial that ended by itself has no value."""
    early = ", which ended before a validation; raise updates_per_trial" if capped else ""
    return f"there was no finite value to compare in {updates} updates{early}"


def measured(records: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, int, float]]:
    """Return (epoch, updates, value) of every validation among history rows with a finite value, by updates."""
    return {
        int(row["step"]): (int(row["epoch"]), int(row["step"]), float(row["monitor"]))
        for row in records
        if row["kind"] in ("epoch", "eval") and row.get("monitor") is not None and math.isfinite(row["monitor"])
    }
