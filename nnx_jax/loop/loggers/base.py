"""What every logger logs: whole-epoch values, and on wish every update and validation, without one more read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from nnx_jax.core.errors import ConfigError, nearest
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.updates import UpdateEvent

EVERY = ("epoch", "update")
FLUSH_SECONDS = 5.0
"""How long updates may wait, so that a run which is read at every update does not wait for the disk as often."""


class Logger(Callback):
    """Base of loggers; override `log`, and `open` and `close` where there is something to.

    Args:
        every: "epoch" for a row an epoch; "update" for one of every update and of every validation too.

    Raises:
        ConfigError: another `every`.
    """

    distributed = "writer"

    def __init__(self, every: str = "epoch") -> None:
        if every not in EVERY:
            raise ConfigError(f"{type(self).__name__}.every is {every!r}{nearest(every, EVERY)}")
        self.every = every
        self._scored: int | None = None
        self._flushed = 0.0
        if every == "update":
            self.on_updates = self._log_updates  # set here, so that a logger of epochs costs no event

    def open(self, ctx: TrainContext) -> None:
        """Begin a session at update `ctx.step`; what was logged of later ones is of a session that was lost."""

    def log(self, kind: str, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Write values by name, "train/loss" and the like: of an "epoch", an "update" or a "validation"."""

    def flush(self) -> None:
        """Bring what was logged to where it is read; called now and then, and after each epoch."""

    def close(self, ctx: TrainContext) -> None:
        """End a session, also after a failure."""

    def on_train_begin(self, ctx: TrainContext) -> None:
        self._scored = None
        self.open(ctx)

    def on_validation(self, ctx: TrainContext) -> None:
        self._scored = ctx.step
        if self.every == "update":
            self.log("validation", ctx.epoch, ctx.step, dict(_scores(ctx)))

    def on_epoch_end(self, ctx: TrainContext) -> None:
        values = {f"train/{n.removeprefix('train_')}": v for n, v in ctx.values.items() if n.startswith("train_")}
        if self._scored == ctx.step:  # else they are of an earlier validation
            values.update(_scores(ctx))
        values.update(_rates({name: view.rate for name, view in ctx.optimizers.items() if view.rate is not None}))
        self.log("epoch", ctx.epoch, ctx.step, values)
        self.flush()

    def on_train_end(self, ctx: TrainContext) -> None:
        self.close(ctx)

    def _log_updates(self, ctx: TrainContext, events: Sequence[UpdateEvent]) -> None:
        for (epoch, _), found in groupby(events, key=lambda event: (event.epoch_idx, event.batch_idx)):
            together = list(found)
            last = together[-1]
            values = {"update/loss": last.loss, **_rates({event.optimizer: event.lr for event in together})}
            if len(last.losses) > 1:
                values.update({f"update/loss/{name}": value for name, value in last.losses.items()})
            self.log("update", epoch, last.update_idx, values)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self.flush()


def _scores(ctx: TrainContext) -> Iterator[tuple[str, Any]]:
    """The values of the validation just made, and what was decided on them."""
    for name, value in ctx.values.items():
        if name.startswith("val_"):
            yield f"val/{name.removeprefix('val_')}", value
    if ctx.decision is not None and ctx.decision.value is not None:
        yield f"monitor/{ctx.decision.name}", ctx.decision.value
        yield "monitor/improved", float(ctx.decision.improved)


def _rates(rates: Mapping[str, float]) -> dict[str, float]:
    """ "lr" of the only optimizer, "lr/<name>" of several."""
    if len(rates) == 1:
        return {"lr": next(iter(rates.values()))}
    return {f"lr/{name}": rate for name, rate in rates.items()}
