"""TorchProfilerHook: record torch's profiler over some batches of a run, Chrome traces, one folder a process."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, PrivateAttr

from nnx_jax.core import fsio
from nnx_jax.core.errors import ConfigError, HookStateError
from nnx_jax.core.registry import register
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import HookSpec, engine_of
from nnx_jax.hooks.profiler import STAGES, ProfileSchedule
from nnx_jax.params.fields import Count, Name, Text

ACTIVITIES = ("cpu", "cuda")


def _named(value: Any) -> Any:
    """Activities as names, torch's own members too."""
    if value is None:
        return None
    listed = (value,) if isinstance(value, str) else tuple(value)
    return tuple(str(getattr(each, "name", each)).lower() for each in listed)


def _planned(value: Any) -> Any:
    """A schedule that `torch.profiler.schedule` made, as ours.

    Raises:
        ValueError: a function of another sort, or one that skips batches at the beginning only.
    """
    if isinstance(value, ProfileSchedule) or not callable(value):
        return value
    held: Any = inspect.getclosurevars(value).nonlocals
    names = ("wait", "warmup", "active", "repeat")
    if not set(names) <= set(held) or held.get("skip_first"):
        raise ValueError("got a function; give wait, warmup, active and repeat, or what torch.profiler.schedule makes")
    return ProfileSchedule(**{name: held[name] for name in names})


@register("torch_profiler")
class TorchProfilerHook(HookSpec):
    """Record `torch.profiler` over a run of the torch engine; each recording is a Chrome trace.

    It starts when training starts (a lone batch: at the first one), moves its schedule on after every batch, and ends
    with training or when its run is left, also by an error. One hook records one run.

    Raises (when training starts):
        ConfigError: (a ValueError) the engine is not torch's.
        HookStateError: (a RuntimeError) another profiler is active, or the hook has recorded a run already.
    """

    observes: ClassVar[bool] = True
    stage: ClassVar[TrainingStage] = TrainingStage.BEFORE_TRAINING

    output_dir: Annotated[
        Text, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)
    ]
    """Where the traces go; each process writes below `rank_<n>/`."""
    activities: Annotated[tuple[Text, ...] | None, BeforeValidator(_named)] = None
    """What is recorded, of `cpu` and `cuda`; none: the CPU, and the GPU where there is one."""
    schedule: Annotated[ProfileSchedule | None, BeforeValidator(_planned)] = None
    """Which batches; none: all of them, in one recording."""
    record_shapes: bool = True
    """Whether operations carry the shapes of their inputs."""
    profile_memory: bool = True
    """Whether memory is followed."""
    with_flops: bool = True
    """Whether matrix products and convolutions carry their operations."""
    with_stack: bool = False
    """Whether operations carry the lines of Python they came from."""
    name: Name = "torch"
    """Folder below the process's own."""
    rank_subdirs: bool = True
    """Whether the first process has a folder `rank_0` too; the others always have their own."""
    frequency: Count = 1
    """Only 1: the schedule says which batches are recorded."""

    _rank: int = PrivateAttr(default=0)
    _batch: int = PrivateAttr(default=0)
    _cycle: int | None = PrivateAttr(default=None)
    _recorder: Any = PrivateAttr(default=None)
    _began: bool = PrivateAttr(default=False)
    _over: bool = PrivateAttr(default=False)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Known activities; nothing but the schedule chooses batches."""
        yield from super().problems()
        for name in self.activities or ():
            if name not in ACTIVITIES:
                yield "activities", f"got '{name}'; the activities are {', '.join(ACTIVITIES)}"
        if self.frequency != 1:
            yield "frequency", f"got {self.frequency}; a profile has gaps by its schedule (wait, active, repeat) only"

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in STAGES

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Start, move the schedule on, stop."""
        if stage is TrainingStage.AFTER_TRAINING:
            self.close()
            return
        if self._over:
            raise HookStateError(
                f"this TorchProfilerHook has written {self.output_dir} and ended; make another one for another run"
            )
        if not self._began:
            _check_engine(ctx.workflow)
        self._rank, self._began = int(ctx.global_rank or 0), True
        if stage is TrainingStage.AFTER_BATCH:
            self._batch += 1
            if self._cycle is not None and self._wanted() != self._cycle:
                self._record(None)
        else:
            self._record(self._wanted())

    def _wanted(self) -> int | None:
        return 0 if self.schedule is None else self.schedule.cycle(self._batch)

    def _record(self, cycle: int | None) -> None:
        """Be in the recording of this number, or in none."""
        if cycle == self._cycle:
            return
        if self._recorder is not None:
            recorder, self._recorder, self._cycle = self._recorder, None, None
            recorder.stop()
        if cycle is None:
            return
        made = importlib.import_module("nnx_jax.torch.hooks.recorder").Recorder(self, self._path(cycle))
        made.start()
        self._recorder, self._cycle = made, cycle

    def _path(self, cycle: int) -> Path:
        root = Path(self.output_dir)
        if self.rank_subdirs or self._rank:
            root = root / f"rank_{self._rank}"
        return fsio.make_dir(root / self.name) / f"trace_{cycle}.json"

    def close(self) -> None:
        """End the recording, if there is one; later calls do nothing."""
        self._over = self._over or self._began
        self._record(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


def _check_engine(owner: Any) -> None:
    if engine_of(owner, unowned="torch") != "torch":
        raise ConfigError(
            "TorchProfilerHook profiles the engine 'torch' (from nnx_jax.torch import NNModel, or backend: torch); "
            "ProfilerHook takes the same output_dir and schedule under JAX"
        )
