"""Which built-in callbacks watch a run; the classes that do the watching live in `loop`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.params.fields import Name, Tag, Text, Whole
from nnx_jax.params.train import MonitorSpec


class CallbackParams(Operator):
    """Family `callback`. One of your own: register a subclass whose `__call__()` returns the callback."""

    family: ClassVar[str] = "callback"


@register("early_stopping")
class EarlyStoppingParams(CallbackParams):
    """Stop when the monitored value has not improved for a while."""

    monitor: MonitorSpec | None = None
    """What to follow; none: the monitor of the run."""
    patience: Whole = 10
    """Evaluations without improvement before the run stops; 0 and 1 behave alike."""
    name: Name | None = None
    """Name of its stored state, when several are used."""


@register("model_checkpoint")
class ModelCheckpointParams(CallbackParams):
    """Keep the checkpoints of some epochs as `<tag>_e<epoch>`."""

    epochs: Annotated[tuple[Whole, ...], Field(min_length=1)] | None = None
    """0-based epochs to keep; none: every epoch."""
    tag: Tag = "custom"
    """First part of the name."""


@register("lr_monitor")
class LRMonitorParams(CallbackParams):
    """Record the rate of every epoch's last update, and on the update clock of every update."""

    bounded: bool = True
    """With a journal: whether only the last `history.retention` epochs are kept."""


class _LoggerParams(CallbackParams):
    """What loggers share."""

    every: Literal["epoch", "update"] = "epoch"
    """A row an epoch, or one of every update and every validation too."""


@register("tensorboard")
class TensorBoardParams(_LoggerParams):
    """Write scalars as TensorBoard reads them; needs no package."""

    log_dir: Text | None = None
    """Directory of the event files; none: `tensorboard` in the run's own."""
    flush_each_epoch: bool = True
    """Whether the files are complete after each epoch, or only at the end."""


@register("wandb")
class WandbParams(_LoggerParams):
    """Log to Weights & Biases; needs `nnx_jax[wandb]`."""

    project: Text | None = None
    """Project of the run; its id is the run's."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Where to; none: as the client is configured."""


@register("csv")
class CSVLoggerParams(_LoggerParams):
    """Append rows to a CSV file, which many runs may share."""

    path: Text
    """The file."""


@register("jsonl")
class JSONLLoggerParams(_LoggerParams):
    """Append one JSON object a line to a file, which many runs may share."""

    path: Text
    """The file."""
