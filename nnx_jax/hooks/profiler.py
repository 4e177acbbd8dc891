"""ProfilerHook: record profiler traces of some batches of a run, one folder a process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, PrivateAttr

from nnx_jax.core import fsio
from nnx_jax.core.errors import ConfigError, HookStateError
from nnx_jax.core.registry import register
from nnx_jax.core.spec import Spec
from nnx_jax.core.stages import TrainingStage
from nnx_jax.hooks.base import HookSpec, engine_of
from nnx_jax.params.fields import Count, Name, Text, Whole

STAGES = (
    TrainingStage.BEFORE_TRAINING,
    TrainingStage.BEFORE_BATCH,
    TrainingStage.AFTER_BATCH,
    TrainingStage.AFTER_TRAINING,
)
"""Where profilers are called."""


class ProfileSchedule(Spec):
    """Which batches are recorded: `wait` + `warmup` pass by, `active` are recorded, and so on, `repeat` times."""

    wait: Whole = 0
    """Batches that pass by before each recording."""
    warmup: Whole = 0
    """More of them; here for the other profilers' sake, whose first batches are slower."""
    active: Count = 1
    """Batches of each recording."""
    repeat: Whole = 1
    """Recordings; 0: until training ends."""

    def cycle(self, batch: int) -> int | None:
        """Return the number of the recording that a batch (0-based) is part of, None when it is not recorded."""
        number, place = divmod(batch, self.wait + self.warmup + self.active)
        over = self.repeat and number >= self.repeat
        return None if over or place < self.wait + self.warmup else number


def schedule(*, wait: int = 0, warmup: int = 0, active: int = 1, repeat: int = 1) -> ProfileSchedule:
    """Return a ProfileSchedule, by the name that torch gives it."""
    return ProfileSchedule(wait=wait, warmup=warmup, active=active, repeat=repeat)


@register("profiler")
class ProfilerHook(HookSpec):
    """Record `jax.profiler` traces, to be opened with Perfetto, XProf or TensorBoard; stages appear under their names.

    It starts when training starts (a lone `train_batch()`: at its first batch), and ends with training or when its run
    is left, also by an error. One hook records one run.
    """

    observes: ClassVar[bool] = True
    stage: ClassVar[TrainingStage] = TrainingStage.BEFORE_TRAINING

    output_dir: Annotated[
        Text, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)
    ]
    """Where the traces go; each process writes below `rank_<n>/`."""
    schedule: ProfileSchedule | None = None
    """Which batches; none: all of them, in one recording."""
    name: Name = "jax"
    """Folder below the process's own."""
    rank_subdirs: bool = True
    """Whether the first process has a folder `rank_0` too; the others always have their own."""
    frequency: Count = 1
    """Only 1: the schedule says which batches are recorded."""

    _batch: int = PrivateAttr(default=0)
    _rank: int = PrivateAttr(default=0)
    _cycle: int | None = PrivateAttr(default=None)
    _began: bool = PrivateAttr(default=False)
    _over: bool = PrivateAttr(default=False)
    _step: contextlib.ExitStack = PrivateAttr(default_factory=contextlib.ExitStack)

    def problems(self) -> Any:
        """Nothing but the schedule chooses batches."""
        yield from super().problems()
        if self.frequency != 1:
            yield "frequency", f"got {self.frequency}; a profile has gaps by its schedule (wait, active, repeat) only"

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in STAGES

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Start, mark the batch, move the schedule on, stop."""
        import jax

        if stage is TrainingStage.AFTER_TRAINING:
            self.close()
            return
        if self._over:
            raise HookStateError(
                f"this ProfilerHook has written {self.output_dir} and ended; make another one for another run"
            )
        if not self._began and engine_of(getattr(ctx, "workflow", None)) == "torch":
            raise ConfigError(
                "ProfilerHook records what JAX does, and this run's engine is 'torch'; TorchProfilerHook takes the "
                "same output_dir and schedule"
            )
        self._rank, self._began = int(ctx.global_rank or 0), True
        if stage is not TrainingStage.AFTER_BATCH:
            self._record(self._wanted())
        if stage is TrainingStage.BEFORE_BATCH:
            self._step.close()
            self._step.enter_context(jax.profiler.StepTraceAnnotation("batch", step_num=self._batch))
        elif stage is TrainingStage.AFTER_BATCH:
            self._batch += 1
            ends = self._cycle is not None and self._wanted() != self._cycle
            if ends and ctx.loss is not None:
                float(ctx.loss)  # what was sent to the device is part of the recording
            self._step.close()
            if ends:
                self._record(None)

    def _wanted(self) -> int | None:
        return 0 if self.schedule is None else self.schedule.cycle(self._batch)

    def _record(self, cycle: int | None) -> None:
        """Be in the recording of this number, or in none."""
        import jax

        if cycle == self._cycle:
            return
        if self._cycle is not None:
            self._cycle = None
            jax.profiler.stop_trace()
        if cycle is None:
            return
        folder = fsio.make_dir(self._folder(cycle))
        try:
            jax.profiler.start_trace(str(folder))
        except RuntimeError as error:
            raise HookStateError(
                f"ProfilerHook cannot record to {folder}: another profiler is active ({error}); leave one of them out"
            ) from error
        self._cycle = cycle

    def _folder(self, cycle: int) -> Path:
        root = Path(self.output_dir)
        if self.rank_subdirs or self._rank:
            root = root / f"rank_{self._rank}"
        root = root / self.name
        return root if self.schedule is None else root / f"cycle_{cycle}"

    def close(self) -> None:
        """End the recording, if there is one; later calls do nothing."""
        self._over = self._over or self._began
        self._step.close()
        self._record(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()
