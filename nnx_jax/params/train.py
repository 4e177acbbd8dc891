"""How a model is trained: how long, how it is watched, what is recorded, where it starts from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nnx_jax.core.spec import ENVIRONMENT, Spec
from nnx_jax.params.fields import Count, Name, NonNegative, Precision, RunId, Seed, Tag, Text
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams


class MonitorSpec(Spec):
    """The one value that BEST, the plateau schedule and early stopping follow."""

    metric: Name = "loss"
    """`loss`, or the name of a declared metric."""
    split: Literal["val", "train"] = "val"
    """Whose value."""
    mode: Literal["min", "max"] | None = None
    """Which direction is better; none: the metric's own (a metric of your own must be told)."""
    min_delta: NonNegative = 0.0
    """Smallest improvement that counts."""
    on_missing: Literal["skip", "error"] = "skip"
    """What to do when an evaluation gives no value."""
    on_nonfinite: Literal["skip", "error"] = "skip"
    """What to do when the value is not finite."""


class CheckpointParams(Spec):
    """When the run is committed and how many commits stay. Never part of a run's identity."""

    every_n_steps: Count | None = None
    """Commit after so many updates."""
    every_n_epochs: Count | None = 1
    """Commit after so many epochs; none: only by updates, and at the end."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 1
    """How many of the newest commits stay, besides those that BEST, a phase or a tag names."""


class NNTrainParams(Spec):
    """The training of one model. Give exactly one of `n_epochs` and `max_steps`."""

    also_called: ClassVar[Mapping[str, str]] = {
        "epochs": "n_epochs",
        "num_epochs": "n_epochs",
        "max_epochs": "n_epochs",
        "steps": "max_steps",
        "num_steps": "max_steps",
        "optimizer": "optim",
        "schedule": "scheduler",
        "lr_scheduler": "scheduler",
    }

    n_epochs: Count | None = None
    """Length in epochs."""
    max_steps: Count | None = None
    """Length in optimizer updates."""
    steps_per_epoch: Count | None = None
    """Updates that make an epoch; none: one pass over the data."""
    seed: Seed = 0
    """Seed of everything random: weights, order, dropout."""
    salt: Text | None = None
    """Any text; another salt is another run of the same configuration."""
    data_id: Text | None = None
    """Name of the data when it comes from a loader and has no hash."""
    precision: Precision | None = None
    """Number format; none: the model's. Here for convenience, the model's field means the same."""
    optim: NNOptimParams = NNOptimParams()
    """The optimizer."""
    scheduler: NNSchedulerParams = NNSchedulerParams()
    """The schedule of its rate."""
    monitor: MonitorSpec | None = None
    """What BEST follows; none: the error or loss of the validation, else of the training."""
    record_every: Literal["update", "batch"] = "update"
    """One row of history per update or per microbatch."""
    log_every_n_steps: Count | None = None
    """Updates between log lines; none: one an epoch."""
    eval_every_n_steps: Count | None = None
    """Updates between evaluations."""
    eval_every_n_epochs: Count | None = 1
    """Epochs between evaluations; none: only by updates."""
    nonfinite: Literal["fail", "skip"] = "fail"
    """What a loss or gradient that is not finite does: end the run, or leave that update out."""
    max_consecutive_skips: Count = 10
    """With `nonfinite: skip`, how many updates in a row may be left out before the run ends."""
    save_phase_checkpoints: bool = True
    """Whether FIRST, Q1, Q2 and Q3 are kept."""
    resume_from_run_id: RunId | None = None
    """Run to start from; it is only read."""
    resume_from_checkpoint: Tag = "LAST"
    """Which of its checkpoints."""
    resume_epochs: Literal["additional", "planned"] = "additional"
    """Whether the length counts from the checkpoint, or is that of the whole line of runs."""
    parent_run_id: RunId | None = None
    """Run this one descends from, when it does not resume it."""
    resume_mode: Annotated[Literal["auto", "stateful", "weights_only"], ENVIRONMENT] = "auto"
    """What is taken from a checkpoint: everything, or the weights."""
    overwrite_existing: Annotated[bool, ENVIRONMENT] = False
    """Whether a finished (or damaged) run of the same configuration is replaced; an interrupted one is continued."""
    dispatch: Annotated[Literal["auto", "step", "span", "staged", "eager"], ENVIRONMENT] = "auto"
    """How updates are sent to the device; the numbers are the same. `staged` and `eager` are slow and for debugging."""
    train_loader: Any = Field(default=None, exclude=True)
    """Python only: iterable of batches to train on, instead of `data.train`."""
    val_loader: Any = Field(default=None, exclude=True)
    """Python only: iterable of batches to evaluate on, instead of `data.val`."""
    extra_metrics: Any = Field(default=None, exclude=True)
    """Python only: mapping name -> function(outputs, batch); recorded, never part of the identity."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """One length; resume settings that belong together."""
        yield from super().problems()
        if (self.n_epochs is None) == (self.max_steps is None):
            given = "neither is given" if self.n_epochs is None else "both are given (none takes one back)"
            yield "n_epochs", f"{given}; give exactly one of n_epochs and max_steps"
        if self.resume_from_run_id is None:
            for name in ("resume_from_checkpoint", "resume_epochs"):
                if getattr(self, name) != self.default_of(name):
                    yield name, f"got '{getattr(self, name)}', which needs resume_from_run_id"
        elif self.parent_run_id not in (None, self.resume_from_run_id):
            yield "parent_run_id", f"got '{self.parent_run_id}', but the run resumes '{self.resume_from_run_id}'"
        if not isinstance(self.extra_metrics, dict | None) or not all(
            isinstance(name, str) and callable(fn) for name, fn in (self.extra_metrics or {}).items()
        ):
            yield "extra_metrics", "expected a mapping from names to functions (outputs, batch) -> value"

    def planned_updates(
        self, batches_per_epoch: int | None, *, window: int | None = None, carries: bool = False
    ) -> int | None:
        """Return the number of updates of the whole run, None when it cannot be known.

        Args:
            batches_per_epoch: microbatches in one pass, None for an endless stream.
            window: microbatches of an update; none: `accumulate_grad_batches`.
            carries: a window goes on over the end of an epoch; else the last one is shorter, so every epoch rounds up.
        """
        if self.max_steps is not None:
            return self.max_steps
        window, per_epoch = window or self.optim.accumulate_grad_batches, self.steps_per_epoch
        if per_epoch is None and batches_per_epoch is not None:
            if carries and self.n_epochs is not None:
                return max(self.n_epochs * batches_per_epoch // window, 1)
            per_epoch = math.ceil(batches_per_epoch / window)
        return None if per_epoch is None or self.n_epochs is None else self.n_epochs * per_epoch
