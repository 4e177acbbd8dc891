"""How a model is trained: how long, how it is watched, what is recorded, where it starts from."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from nnx_jax.core.errors import ConfigError
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


class TrainingParams(Spec):
    """What every training has, whatever its optimizers: length, records, cadences, where it starts from."""

    also_called: ClassVar[Mapping[str, str]] = {
        "epochs": "n_epochs",
        "num_epochs": "n_epochs",
        "max_epochs": "n_epochs",
        "steps": "max_steps",
        "num_steps": "max_steps",
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
    monitor: MonitorSpec | None = None
    """What BEST follows; none: the error or loss of the validation, else of the training."""
    record_every: Literal["update", "batch"] = "update"
    """One row of history per update or per microbatch."""
    log_every_n_steps: Count | None = None
    """Updates between log lines; none: one an epoch. After the tenth line no more than two a second are shown."""
    eval_every_n_steps: Count | None = None
    """Updates between evaluations."""
    eval_every_n_epochs: Count | None = 1
    """Epochs between evaluations; none: only by updates."""
    nonfinite: Literal["fail", "skip"] = "fail"
    """What a loss or gradient that is not finite does: end the run, or leave that update out."""
    max_consecutive_skips: Count = 10
    """With `nonfinite: skip`, how many updates in a row may be left out before the run ends."""
    reduction: Literal["fast", "canonical"] = "fast"
    """How sums over a batch's rows are added: `canonical` gives equal bits on any devices, meshes and processes."""
    reduction_shards: Annotated[int, Field(ge=1, le=2**16)] = 8
    """With `reduction: canonical`, into how many parts a microbatch is cut; a power of two, at least the devices."""
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
        if self.reduction_shards & (self.reduction_shards - 1):
            higher = 1 << self.reduction_shards.bit_length()
            yield "reduction_shards", f"got {self.reduction_shards}; write a power of two, {higher // 2} or {higher}"
        if self.reduction == "fast" and self.reduction_shards != self.default_of("reduction_shards"):
            yield "reduction_shards", f"got {self.reduction_shards}, which needs reduction: canonical"
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

    @property
    @abstractmethod
    def optimizers(self) -> Mapping[str, NNOptimParams]:
        """The optimizers by name, in alphabetical order."""

    @property
    @abstractmethod
    def schedules(self) -> Mapping[str, NNSchedulerParams]:
        """The schedule of every optimizer, by the optimizer's name."""

    @abstractmethod
    def places(self, name: str) -> tuple[str, str]:
        """Return where an optimizer and its schedule are written, as paths for errors."""

    @abstractmethod
    def with_window(self, window: int) -> Self:
        """Return a copy whose every optimizer makes an update of `window` microbatches."""

    @property
    def window(self) -> int:
        """Microbatches of an update, the same for all optimizers.

        Raises:
            ConfigError: the optimizers ask for different windows.
        """
        asked = {name: optim.accumulate_grad_batches for name, optim in self.optimizers.items()}
        if len(set(asked.values())) > 1:
            told = ", ".join(f"{name}: {window}" for name, window in asked.items())
            raise ConfigError(f"accumulate_grad_batches differs ({told}); one window serves all optimizers, write one")
        return next(iter(asked.values()))

    def planned_updates(
        self, batches_per_epoch: int | None, *, window: int | None = None, carries: bool = False
    ) -> int | None:
        """Return the number of updates of the whole run, None when it cannot be known.

        Args:
            batches_per_epoch: microbatches in one pass, None for an endless stream.
            window: microbatches of an update; none: `self.window`.
            carries: a window goes on over the end of an epoch; else the last one is shorter, so every epoch rounds up.
        """
        if self.max_steps is not None:
            return self.max_steps
        window, per_epoch = window or self.window, self.steps_per_epoch
        if per_epoch is None and batches_per_epoch is not None:
            if carries and self.n_epochs is not None:
                return max(self.n_epochs * batches_per_epoch // window, 1)
            per_epoch = math.ceil(batches_per_epoch / window)
        return None if per_epoch is None or self.n_epochs is None else self.n_epochs * per_epoch


class NNTrainParams(TrainingParams):
    """The training of one model by one optimizer. Give exactly one of `n_epochs` and `max_steps`."""

    also_called: ClassVar[Mapping[str, str]] = {
        **TrainingParams.also_called,
        "optimizer": "optim",
        "schedule": "scheduler",
        "lr_scheduler": "scheduler",
    }

    optim: NNOptimParams = NNOptimParams()
    """The optimizer."""
    scheduler: NNSchedulerParams = NNSchedulerParams()
    """The schedule of its rate."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Every group of parameters changes something: all that match none are trained just the same."""
        yield from super().problems()
        for index, group in enumerate(self.optim.param_groups):
            if group.max_lr is group.lr_scale is group.weight_decay is None:
                at = f"optim.param_groups[{index}]"
                yield at, "the group changes nothing; give max_lr, lr_scale or weight_decay"

    @property
    def optimizers(self) -> Mapping[str, NNOptimParams]:
        """The optimizer, called `main`."""
        return {"main": self.optim}

    @property
    def schedules(self) -> Mapping[str, NNSchedulerParams]:
        """The schedule of `main`."""
        return {"main": self.scheduler}

    def places(self, name: str) -> tuple[str, str]:
        """Return ("optim", "scheduler")."""
        return "optim", "scheduler"

    def with_window(self, window: int) -> Self:
        """Return a copy whose updates are of `window` microbatches."""
        return self.replace(optim=self.optim.replace(accumulate_grad_batches=window))
