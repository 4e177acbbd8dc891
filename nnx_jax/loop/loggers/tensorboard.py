"""TensorBoardCallback: scalars of a run as TensorBoard reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.loggers.base import Logger
from nnx_jax.loop.loggers.event_files import EventFile


class TensorBoardCallback(Logger):
    """Write scalars to event files; look at them with `tensorboard --logdir runs` (`pip install tensorboard`).

    Tags are `train/<metric>`, `val/<metric>`, `lr` and `monitor/...`; with every="update" also `update/loss`. After a
    resume TensorBoard leaves out what the lost session had written beyond its last commit.

    Args:
        log_dir: where the files go; None for `tensorboard` in the run's directory.
        flush_each_epoch: whether the files are complete after each epoch, or only at the end.
        every: "epoch" for one point an epoch, at its number; "update" for a point of every update and validation too,
            all at the count of updates.
    """

    def __init__(
        self, log_dir: str | Path | None = None, flush_each_epoch: bool = True, *, every: str = "epoch"
    ) -> None:
        super().__init__(every)
        self.log_dir, self.flush_each_epoch = log_dir, flush_each_epoch
        self._file: EventFile | None = None

    def open(self, ctx: TrainContext) -> None:
        """Start a file of this session."""
        directory = Path("runs" if ctx.runs_dir is None else ctx.runs_dir, ctx.run_id, "tensorboard")
        start = ctx.epoch if self.every == "epoch" else ctx.step + 1
        self._file = EventFile(directory if self.log_dir is None else Path(self.log_dir), start)

    def log(self, kind: str, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Add one point to every tag."""
        if self._file is not None:
            self._file.add(epoch if self.every == "epoch" else step, values)

    def flush(self) -> None:
        """Write the points, if not only at the end."""
        if self.flush_each_epoch and self._file is not None:
            self._file.flush()

    def close(self, ctx: TrainContext) -> None:
        """Write what is left."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError) if ctx.error is not None else contextlib.nullcontext():
                file.flush()
