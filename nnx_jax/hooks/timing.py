"""StageTimingHook: how long a batch takes from one stage to the next."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, PrivateAttr

from nnx_jax.core import fsio
from nnx_jax.core.registry import register
from nnx_jax.core.stages import REPLACEMENT_STAGES, TrainingStage
from nnx_jax.hooks.base import HookSpec
from nnx_jax.params.fields import Count, Text

COLUMNS = ("rank", "step", "stage", "t_since_init_s", "delta_s")
PRESETS: dict[str, tuple[TrainingStage, ...]] = {
    "all": tuple(stage for stage in TrainingStage if stage.of_batch),
    "detailed": tuple(stage for stage in TrainingStage if stage.of_batch and stage not in REPLACEMENT_STAGES),
    "step": (TrainingStage.BEFORE_BATCH, TrainingStage.AFTER_BATCH),
}


def _names(value: Any) -> Any:
    """A preset's name as it is; stages by name, in the order of a run, whatever collection they came in."""
    if isinstance(value, str) or not isinstance(value, Collection):
        return value
    names = [stage.name if isinstance(stage, TrainingStage) else stage for stage in value]
    order = list(TrainingStage.__members__)
    return tuple(sorted(dict.fromkeys(names), key=lambda name: order.index(name) if name in order else -1))


Stages = Annotated[Literal["all", "detailed", "step"] | tuple[Text, ...], BeforeValidator(_names)]
Path_ = Annotated[Text | None, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)]


@register("stage_timing")
class StageTimingHook(HookSpec):
    """Measure the time between consecutive stages of a batch; `summary()` tells it by `"A->B"`.

    With `dispatch: staged` each stage runs when its hooks are called, so the intervals are those of the stages.
    Otherwise the stages are parts of one compiled program and its hooks are called after it: only the interval from
    BEFORE_BATCH to AFTER_BATCH means something, and with `timer_backend: device` it includes waiting for the device.
    The hook only watches, at the replacement stages too.
    """

    observes: ClassVar[bool] = True

    profiled_stages: Stages = "step"
    """`step` (a batch as a whole), `detailed` (all but the two replacement stages), `all`, or names of stages."""
    frequency: Count = 1
    """Measure when the count of updates is a multiple of this."""
    enable_nvtx: bool = True
    """Whether profiler traces show the intervals by name."""
    timer_backend: Literal["auto", "host", "device"] = "auto"
    """`device` waits for the device before it looks at the clock; `auto` is `host`."""
    log_path: Path_ = None
    """CSV file of every interval, appended to after each batch; none: no file. Process 1 of a group adds `.rank_1`."""
    show_console: bool = False
    """Whether a line for a person goes to standard error."""
    console_frequency: Count = 1
    """Measured batches between these lines."""

    _since: float = PrivateAttr(default_factory=time.perf_counter)
    _stamps: dict[TrainingStage, float] = PrivateAttr(default_factory=dict)
    _intervals: dict[tuple[TrainingStage, TrainingStage], list[float]] = PrivateAttr(default_factory=dict)
    _open: contextlib.ExitStack = PrivateAttr(default_factory=contextlib.ExitStack)
    _batches: int = PrivateAttr(default=0)
    _began: bool = PrivateAttr(default=False)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Two stages or more, each one that a batch has."""
        yield from super().problems()
        if isinstance(self.profiled_stages, str):
            return
        legal = [stage.name for stage in PRESETS["all"]]
        for name in self.profiled_stages:
            if name not in legal:
                known = name in TrainingStage.__members__
                reason = "has no batch to time" if known else "is no stage"
                yield "profiled_stages", f"'{name}' {reason}; stages of a batch are {', '.join(legal)}"
        if len(self.profiled_stages) < 2:
            found = ", ".join(self.profiled_stages) or "none"
            yield "profiled_stages", f"got {found}; at least two stages are needed to measure the time between them"

    @property
    def stages(self) -> tuple[TrainingStage, ...]:
        """The measured stages in the order of a batch."""
        chosen = self.profiled_stages
        return PRESETS[chosen] if isinstance(chosen, str) else tuple(TrainingStage[name] for name in chosen)

    @property
    def stage(self) -> TrainingStage:
        """The first measured stage."""
        return self.stages[0]

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in self.stages

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Look at the clock; after the last measured stage of a batch, keep its intervals."""
        stages = self.stages
        if stage is stages[0] or stage in self._stamps:
            self._stamps.clear()
        if self.timer_backend == "device":
            _wait(ctx)
        self._annotate(stage, last=stage is stages[-1])
        self._stamps[stage] = time.perf_counter()
        if stage is stages[-1]:
            self._keep(ctx)

    def _keep(self, ctx: Any) -> None:
        stamps = list(self._stamps.items())
        pairs = [(a, b, then - now) for (a, now), (b, then) in zip(stamps, stamps[1:], strict=False)]
        self._stamps.clear()
        if not pairs:
            return
        for first, second, seconds in pairs:
            self._intervals.setdefault((first, second), []).append(seconds)
        self._batches += 1
        shows = self.show_console and self._batches % self.console_frequency == 0
        if self.log_path is None and not shows:
            return  # the count of updates may cost a read from the device, and nobody would see it
        rank, step, now = int(ctx.global_rank or 0), int(ctx.step_count), time.perf_counter() - self._since
        if self.log_path is not None:
            self._write(rank, [f"{rank},{step},{a.name}->{b.name},{now:.6f},{seconds:.9f}" for a, b, seconds in pairs])
        if shows:
            text = "  ".join(f"{a.name}->{b.name} {1e3 * seconds:.3f} ms" for a, b, seconds in pairs)
            print(f"rank {rank} step {step}  {text}", file=sys.stderr)

    def _write(self, rank: int, lines: list[str]) -> None:
        path = Path(self.log_path or "")
        if rank:  # a file of its own: two processes would begin the same one
            path = path.with_name(f"{path.stem}.rank_{rank}{path.suffix}")
        if not self._began:
            fsio.make_dir(path.parent)
            fsio.atomic_write(path, (",".join(COLUMNS) + "\n").encode())
            self._began = True
        fsio.append_bytes(path, "".join(f"{line}\n" for line in lines).encode())

    def _annotate(self, stage: TrainingStage, *, last: bool) -> None:
        """End the interval that is open in profiler traces, and open the next one."""
        self._open.close()
        begin = _annotation() if self.enable_nvtx and not last else None
        if begin is not None:
            self._open.enter_context(begin(stage.name))

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def timings(self) -> dict[TrainingStage, list[float]]:
        """Seconds by the stage an interval ends at."""
        found: dict[TrainingStage, list[float]] = {stage: [] for stage in self.stages}
        for (_, end), values in self._intervals.items():
            found[end].extend(values)
        return found

    def summary(self) -> dict[str, dict[str, float]]:
        """By `"A->B"`: mean_s, std_s, min_s, max_s, total_s and n_samples."""
        return {
            f"{first.name}->{second.name}": {
                "mean_s": statistics.fmean(values),
                "std_s": statistics.stdev(values) if len(values) > 1 else 0.0,
                "min_s": min(values),
                "max_s": max(values),
                "total_s": sum(values),
                "n_samples": len(values),
            }
            for (first, second), values in self._intervals.items()
        }

    def reset(self) -> None:
        """Forget every interval, and the part of a batch that was seen; the file stays."""
        self._intervals.clear()
        self._stamps.clear()
        self._batches = 0

    def close(self) -> None:
        """End the interval that is open in profiler traces."""
        self._open.close()
        self._stamps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


def _wait(ctx: Any) -> None:
    """Wait until the device has computed the loss of this microbatch, where there is one."""
    loss = ctx.loss
    if loss is not None:
        float(loss)


def _annotation() -> Callable[[str], Any] | None:
    """What opens an interval in profiler traces; None when no framework that has one is loaded."""
    jax = sys.modules.get("jax")
    return None if jax is None else jax.profiler.TraceAnnotation
