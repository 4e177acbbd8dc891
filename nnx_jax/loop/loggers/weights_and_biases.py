"""WandbCallback: values of a run at Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx_jax.core.errors import ConfigError
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.loggers.base import Logger


class WandbCallback(Logger):
    """Log values to a run of Weights & Biases (`pip install 'nnx_jax[wandb]'`).

    Args:
        project: for a run of its own, begun when training begins and finished when it ends. It is named by the run id,
            so that a resumed training goes on in it.
        wandb_run: a run of yours, which is logged to and never finished.
        every: "epoch" for a row an epoch, at its number; "update" for one of every update and validation too, at the
            count of updates.
        **init: more for `wandb.init`, as mode="offline" or tags=[...].

    Raises:
        ConfigError: both a run, and settings for one of its own.
        ImportError: wandb is not installed, when training begins.
    """

    def __init__(self, project: str | None = None, wandb_run: Any = None, *, every: str = "epoch", **init: Any) -> None:
        super().__init__(every)
        if wandb_run is not None and (project is not None or init):
            given = ", ".join((*(("project",) if project is not None else ()), *init))
            raise ConfigError(f"WandbCallback has a run; {given} would be for one of its own, leave it out")
        self._given, self._settings = wandb_run, {"project": project, **init}
        self._run: Any = None

    def open(self, ctx: TrainContext) -> None:
        """Begin a run, or go on in the one that was given."""
        if self._given is not None:
            self._run = self._given
            return
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("WandbCallback needs wandb: pip install 'nnx_jax[wandb]'") from error
        self._run = wandb.init(**{"id": ctx.run_id, "name": ctx.run_id, "resume": "allow", **self._settings})

    def log(self, kind: str, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Log one row."""
        if self._run is not None:
            at = epoch if self.every == "epoch" else step
            self._run.log({"epoch": epoch, "updates": step, **values}, step=at)

    def close(self, ctx: TrainContext) -> None:
        """Finish a run of its own; as failed after a failure."""
        run, self._run = self._run, None
        if run is not None and self._given is None:
            run.finish(exit_code=0 if ctx.error is None else 1)
