"""TrainContext: what a callback sees of the run, and what it may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nnx_jax.loop.monitors import MonitorRecord
from nnx_jax.runs.run import NNRun


@dataclass
class OptimizerView:
    """One optimizer as callbacks see it.

    Attributes:
        name: "main" where there is only one.
        params: its configuration.
        updates: committed updates so far.
        rate: learning rate of the last of them; None before the first.
        schedule: on the update clock, the rate for the update after so many; None on the epoch clock.
    """

    name: str
    params: Any
    updates: int = 0
    rate: float | None = None
    schedule: Callable[[int], float] | None = None


@dataclass
class TrainContext:
    """What a callback sees; valid during one `train()`.

    Attributes:
        run_id: id of the run.
        model: the model being trained; its weights are brought up to date when a callback asks `ctx.sync()`.
        epoch: the epoch just run, 0-based.
        step: committed updates so far; inside `on_optimizer_update`, that update included.
        values: whole-epoch values by name ("train_loss", "val_accuracy", ...).
        decision: the monitor's decision of this epoch, None before the first.
        records: history rows of the run so far.
        rate: learning rate the last update used.
        data_seconds: how long this session has waited for batches to be read, up to the last event. Beside the seconds
            it took, it tells whether the data is too slow. It is in no record: equal runs have equal records.
        should_stop: set True to end the run at the next commit: this epoch's, or at once after a validation or an
            update that a callback watches.
        stop_at_update: set True to end the run at this very update. Inside an epoch, what no commit holds is given up:
            its records are dropped, and LAST stays where it is. After an epoch's last update the epoch is committed.
        deferred: tags to write as checkpoints after BEST (ModelCheckpoint appends here).
        update_listeners: functions of this context, called after every committed update. As long as there is one, the
            host reads after every update, which costs small models their speed.
        optimizers: the optimizers by name.
        scheduler: the schedule on the epoch clock, with `rate`; None on the update clock.
        error: what ended the training, while `on_train_end` is called after a failure; else None.
        history_retention: rows that `records` keeps; None for all.
    """

    run_id: str
    model: Any = None
    epoch: int = 0
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    decision: MonitorRecord | None = None
    records: Sequence[Mapping[str, Any]] = ()
    rate: float | None = None
    data_seconds: float = 0.0
    should_stop: bool = False
    stop_at_update: bool = False
    deferred: list[str] = field(default_factory=list)
    update_listeners: list[Callable[[TrainContext], Any]] = field(default_factory=list)
    optimizers: Mapping[str, OptimizerView] = field(default_factory=dict)
    scheduler: Any = None
    error: BaseException | None = None
    history_retention: int | None = None
    runs_dir: str | Path | None = None
    sync: Callable[[], Any] = lambda: None
    trace: Callable[[], list[tuple[int, float]]] = list

    @property
    def committed_updates(self) -> int:
        """`step` by another name."""
        return self.step

    @property
    def update_count(self) -> int:
        """`step` by another name."""
        return self.step

    @property
    def update_lrs(self) -> list[tuple[int, float]]:
        """(update, rate after that update's schedule step) of this epoch's updates; empty on the epoch clock."""
        return self.trace()

    @property
    def optimizer(self) -> OptimizerView | None:
        """The alphabetically first optimizer."""
        return self.optimizers[min(self.optimizers)] if self.optimizers else None

    @property
    def run(self) -> NNRun | None:
        """The run as it is committed at this moment, read anew; None for a training without a directory."""
        return None if self.runs_dir is None else NNRun.load(self.run_id, self.runs_dir)

    @property
    def idps(self) -> Sequence[Mapping[str, Any]]:
        """`records` by another name."""
        return self.records

    @property
    def idp(self) -> Mapping[str, Any] | None:
        """The last record, None before the first."""
        return self.records[-1] if len(self.records) else None

    @property
    def deferred_checkpoint_writes(self) -> list[str]:
        """`deferred` by another name."""
        return self.deferred
