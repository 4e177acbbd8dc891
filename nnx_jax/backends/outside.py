"""A training that another library's loop runs: what a TrainingLoop may ask of it, and who is told what happens."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.checks import evaluation_rows
from nnx_jax.backends.facts import Stopwatch, about, peak_memory
from nnx_jax.backends.parts import split_callbacks
from nnx_jax.core.errors import ConfigError, NonFiniteError
from nnx_jax.data.pipeline import Batch, Feed
from nnx_jax.loop import callbacks as own
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.step_callbacks import StepCallbacks
from nnx_jax.loop.updates import UpdateEvent

_REFUSED: Mapping[str, str] = {
    "sharding": "it places arrays itself",
    "distributed": "it starts its processes itself",
    "hooks": "hooks are compiled into this project's own step",
    "metrics": "measure them in a callback's on_eval_end, or with the trained operator",
    "checkpoint_every_n_steps": "commits are made by this project's own loop",
    "max_checkpoints_to_keep": "commits are made by this project's own loop",
    "on_nonfinite": "a loss that is not finite always ends the run",
}
_PASSED_OVER: Mapping[str, str] = {
    "debug": "it has a way of its own to run operation by operation",
    "precision": "its numbers are float32 here",
}


def check_fields(loop: Any, *, takes: tuple[str, ...] = ()) -> None:
    """Check that a loop asks for nothing that another library's loop does not do.

    Args:
        takes: fields that this one does take.

    Raises:
        ConfigError: (a ValueError) naming the field, and why.

    Warns:
        UserWarning: of a field that has no effect.
    """
    told = f"does not apply to the backend '{loop.backend}':"
    for name, why in _REFUSED.items():
        value = getattr(loop, name)
        if name not in takes and value not in (None, (), loop.default_of(name)):
            raise ConfigError(f"{told} {why}; leave it out, or use the backend 'nnx'", path=f"TrainingLoop.{name}")
    if loop.directory is not None:
        why = "its own checkpoints hold pickles, and commits are made by this project's own loop"
        raise ConfigError(f"{told} {why}; leave it out", path="TrainingLoop.checkpoint_dir")
    if loop.resume == "full":
        raise ConfigError(f"{told} it takes over weights only", path="TrainingLoop.resume")
    for name, why in _PASSED_OVER.items():
        if name not in takes and getattr(loop, name) != loop.default_of(name):
            warnings.warn(f"TrainingLoop.{name} {told} {why}", UserWarning, stacklevel=4)


def endless(loop: Any) -> Iterator[Batch]:
    """The batches of a loop's dataset, pass after pass: the same, in the same order, as for every other backend."""
    feed = Feed(loop.dataset, batch_size=loop.batch_size, tail="straddle", seed=loop.seed)
    epoch = 0
    while True:
        yield from feed.batches(epoch)
        epoch += 1


def scored(loop: Any) -> Iterator[Batch]:
    """The batches of the validation set, every row once; the last one is shorter."""
    return iter(Feed(loop.val_dataset, batch_size=loop.batch_size, tail="keep", shuffle=False, augment=False).batches())


def weighs_rows(loop: Any) -> bool:
    """Rows to train or to evaluate on have a column `weight`."""
    return any("weight" in each.columns for each in (loop.dataset, loop.val_dataset) if each is not None)


def counted(batch: Batch) -> float:
    """What a batch of the validation set counts for in a mean: the sum of its weights, its rows where it has none."""
    return float(np.sum(batch["weight"])) if "weight" in batch else float(len(batch["mask"]))


class Outside:
    """Tells a loop's callbacks and writer of updates that are made elsewhere.

    Args:
        loop: the TrainingLoop.
        show: makes the operator with the weights of this moment.
        state: what an earlier loop left; its weights are begun with, and its updates are counted.
    """

    def __init__(self, loop: Any, show: Callable[[], Any], state: TrainerCarryState | None = None) -> None:
        self.loop, self.step = loop, 0
        self.earlier = 0 if state is None else state.step
        self.val = evaluation_rows(loop.val_dataset)
        mine, step_form = split_callbacks(loop.callbacks)
        self.steps = StepCallbacks(
            loop, step_form, loop.metric_writer, loop.log_every_n_steps, lambda ctx: show(),
            steps_per_epoch=loop.steps_per_epoch,
        )  # fmt: skip
        self.callbacks = own.CallbackList([*mine, self.steps])
        self.ctx = TrainContext("outside")
        self.metrics: dict[str, float] = {}
        self.watch = Stopwatch()

    @property
    def stops(self) -> bool:
        """A callback asked for the end."""
        return self.ctx.should_stop or self.ctx.stop_at_update

    @property
    def evaluates(self) -> bool:
        """An evaluation is due after this update, which may be the last one."""
        if self.val is None:
            return False
        return self.step % self.loop.eval_every_n_steps == 0 or self.step == self.loop.max_steps or self.stops

    def begin(self) -> None:
        """Before the first update."""
        self.callbacks.train_begin(self.ctx)

    def updated(self, loss: float, rate: float) -> None:
        """After an update.

        Raises:
            NonFiniteError: (a FloatingPointError) its loss is not finite.
        """
        self.step += 1
        if not math.isfinite(loss):
            raise NonFiniteError(f"update {self.step}: the loss is {loss}")
        self.ctx.step, self.ctx.rate = self.step, rate
        self.metrics = {**self.metrics, "loss": loss}
        name = getattr(self.loop.loss, "name", None) or (self.loop.loss if isinstance(self.loop.loss, str) else "loss")
        event = UpdateEvent("main", self.step, 0, self.step - 1, self.loop.accumulate, {name: loss}, loss, rate)
        self.callbacks.optimizer_update(self.ctx, event)
        self.callbacks.updates(self.ctx, [event])

    def validated(self, values: Mapping[str, float]) -> None:
        """After an evaluation, with its values by bare names."""
        self.ctx.values = {f"val_{name}": value for name, value in values.items()}
        self.metrics |= self.ctx.values
        self.callbacks.validation(self.ctx)

    def end(self, error: BaseException | None) -> None:
        """Callbacks end in reverse, also after a failure."""
        self.callbacks.train_end(self.ctx, error)

    def trained(self, operator: Any, packages: tuple[str, ...]) -> Trained:
        """What the training leaves."""
        loop = self.loop
        epoch = 0 if loop.steps_per_epoch is None else self.step // loop.steps_per_epoch
        state = TrainerCarryState(
            operator, None, self.earlier + self.step, epoch, dict(self.metrics), loop=loop.identity()
        )
        info = {
            **about(loop.backend, packages),
            **self.watch.facts(self.step * loop.batch_size * loop.accumulate),
            **peak_memory(),
            "final_step": self.step,
            "final_metrics": {name: value if np.isfinite(value) else None for name, value in self.metrics.items()},
            "sharding": None,
            "stop_reason": self.steps.state.stop_reason,
            "seed": loop.seed,
        }
        return Trained(operator, state, info)
