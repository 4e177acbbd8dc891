"""The loop's session as a strategy uses it: its own validation, no history, and a view for events without a session."""

from __future__ import annotations

from typing import Any

from nnx_jax.core.errors import HookStateError
from nnx_jax.core.stages import TrainingStage
from nnx_jax.loop.lifecycle import Session
from nnx_jax.loop.monitors import MonitorRecord
from nnx_jax.loop.records import Rows
from nnx_jax.training.validation import ValidationConfig


class StrategySession(Session):
    """One stretch of a strategy's training; the strategy validates, and after training once more."""

    strategy: Any
    _seen_by_validation: int | None = None

    def _validate(self) -> MonitorRecord | None:
        """Validate where the strategy's own cadence says so; the loop's other occasions are left out."""
        config: ValidationConfig | None = self.strategy.validation_config
        seen = self.plan.start.step if self._seen_by_validation is None else self._seen_by_validation
        self._seen_by_validation = self.step
        if config is None:
            return None
        by_epoch = config.every_n_epochs is not None and self.batch >= self.engine.n_batches
        due = by_epoch and (self.epoch + 1) % (config.every_n_epochs or 1) == 0
        if due or self.cadence.due(config.every_n_steps, seen, self.step):
            self.strategy.validated_in(self)
        return None

    def announce(self, summary: dict[str, Any]) -> None:
        """Fire AFTER_VALIDATION with this summary."""
        watch: Any = self.watch
        watch.validation = summary
        watch.event(TrainingStage.AFTER_VALIDATION)

    def reach(self) -> None:
        """After a batch that was handed over: fire the hooks whose cadence it reached; read only where it may have."""
        watch: Any = self.watch
        reached = self.step + watch.possible
        if any(self.cadence.due(every, self.seen, reached) for every in watch.events.cadences):
            self._read()
            seen, self.seen = self.seen, self.step
            watch.at_boundary(seen)
            watch.serve()

    @property
    def finished_epochs(self) -> int:
        """Passes over the data that are done."""
        return self.epoch + (self.batch >= self.engine.n_batches)

    @property
    def epoch_batch(self) -> int:
        """Microbatches of the pass that has begun."""
        return 0 if self.batch >= self.engine.n_batches else self.batch


class LastRow(Rows):
    """History that only remembers its last loss; a strategy keeps no rows of its own."""

    def append(self, row: dict[str, Any]) -> None:
        """A row of another kind."""

    def append_table(self, table: dict[str, Any], n_rows: int) -> None:
        """Rows of updates by column."""
        losses = table.get("train_loss")
        if isinstance(losses, list) and losses and losses[-1] is not None:
            self.loss = losses[-1]

    loss: float | None = None


class IdleView:
    """What a hook sees of a strategy that has not trained yet."""

    def __init__(self, models: Any, world: int, step: int) -> None:
        self.models, self.world, self.step = models, world, step

    def step_count(self) -> int:
        """Updates made."""
        return self.step

    def look(self, name: str) -> Any:
        """The models; nothing else is there."""
        return dict(self.models) if name == "models" else None

    def request(self, what: str, tag: str | None = None, **more: Any) -> None:
        """Nothing to stop.

        Raises:
            HookStateError: nothing was trained that could be committed.
        """
        if what == "commit":
            raise HookStateError("a hook asks for a commit, but nothing was trained yet; train first")
