"""Which way to call the step: one microbatch a call or many, and how many, so that a call stays short.

Measured on two busy CPU cores, microseconds of CPU time a microbatch (minima; Adam; bare = a plain `jax.jit` loop):

    net                                bare     one a call   span, stacked   span, device-resident
    MLP 16-16-16-10, batch 8            172            340              36                      26
    MLP 64-32-10, batch 32              170            376              65                      43
    decoder 4 x 256, 16 x 128 tokens  2.08 s        2.10 s               -                  1.91 s
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from nnx_jax.core.errors import StepError, nearest
from nnx_jax.step.programs import StepPrograms

MODES = ("auto", "step", "span")

CALL_SECONDS = 0.25
"""Longest call aimed at: what a signal, a log line or a stop request waits for at most, times the calls in flight."""

RESIDENT_BYTES = 256 * 1024**2
"""Columns up to this size are copied to the device; beyond it, memory is worth more than the gather saves."""

BLOCK_BYTES = 16 * 1024**2
"""Largest stacked host block."""

_FLOPS_PER_SECOND = 2e10
"""What two CPU cores reach on matrices of a few hundred, halved: an estimate too slow only makes calls shorter."""

_BATCH_SECONDS = 1e-4
"""Least cost of a microbatch inside a span, whatever it computes: 25 to 75 us were measured."""

_RESIDENT_WINDOWS = 3
"""Least windows of a call over data on the device: a call's temporary memory is new memory, and touching it first took
12 % of a step in the decoder above."""

_STACK_SECONDS = 5e-3
"""Host batches are stacked for steps up to this length; beyond it the cost of a call is under 5 %."""


@dataclass(frozen=True)
class Dispatch:
    """How to run an epoch.

    Attributes:
        mode: "step" for one microbatch a call, "span" for many.
        resident: a span gathers its rows from columns on the device; else host batches are stacked for it.
        windows: most windows of one call; a stacked block has room for exactly these.
        seconds: estimate of one microbatch.
    """

    mode: Literal["step", "span"]
    resident: bool
    windows: int
    seconds: float


def choose_dispatch(programs: StepPrograms, feed: Any, mode: str = "auto") -> Dispatch:
    """Choose by the measured rule.

    On two CPU cores a span was as fast as single calls within the noise, and 3.5 to 12 times faster where a microbatch
    computes for less than the 0.1 to 0.3 ms that a call costs. So: data in memory is put on the device and runs in
    spans; host batches are stacked while the step is short; the rest runs a microbatch a call. FLOPs of the program
    bound how many windows one call takes.

    Args:
        programs: the step.
        feed: `arrays() -> columns or None`, `signature()`, `n_batches`, and `order(epoch)` where rows are numbered.
        mode: "auto", "step" or "span"; "span" keeps its choice of device-resident or stacked data.

    Raises:
        StepError: an unknown mode.
    """
    if mode not in MODES:
        raise StepError(f"dispatch is {mode!r}{nearest(mode, MODES)}")
    batch = {name: jax.ShapeDtypeStruct(col.shape, col.dtype) for name, col in feed.signature().items()}
    columns = _resident_columns(feed)
    if mode == "step":
        return Dispatch("step", False, 1, _seconds(programs, "apply", batch))
    if columns is not None:
        rows = batch["mask"].shape[0]
        table = jax.ShapeDtypeStruct((feed.n_batches, rows), np.int32)
        seconds = _seconds(programs, "resident", columns, table)
        return Dispatch("span", True, _windows(programs, seconds, _RESIDENT_WINDOWS), seconds)
    seconds = _seconds(programs, "apply", batch)
    if mode == "auto" and seconds > _STACK_SECONDS:
        return Dispatch("step", False, 1, seconds)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in batch.values())
    fits = max(1, BLOCK_BYTES // max(1, size * programs.accumulate))
    return Dispatch("span", False, min(_windows(programs, seconds), fits, _epoch_windows(programs, feed)), seconds)


def _resident_columns(feed: Any) -> dict[str, jax.ShapeDtypeStruct] | None:
    """Shapes of the columns to keep on the device, or None: no numbered rows, too large, or a short last batch."""
    columns = feed.arrays() if hasattr(feed, "order") else None
    if columns is None or sum(column.nbytes for column in columns.values()) > RESIDENT_BYTES:
        return None
    if feed.descriptor().get("tail") == "keep" and feed.rows % feed.batch_size:
        return None  # the table would pad the batch that the user asked to keep short
    return {name: jax.ShapeDtypeStruct(column.shape, column.dtype) for name, column in columns.items()}


def _epoch_windows(programs: StepPrograms, feed: Any) -> int:
    return -(-feed.n_batches // programs.accumulate) if feed.n_batches else 1 << 30


def _windows(programs: StepPrograms, seconds: float, least: int = 1) -> int:
    return max(least, int(CALL_SECONDS / (seconds * programs.accumulate)))


def _seconds(programs: StepPrograms, kind: str, *args: Any) -> float:
    """Estimated seconds of one microbatch. XLA counts the body of a loop once, so a span counts one microbatch."""
    analysis = programs.lower(kind, *args).cost_analysis() or {}
    return _BATCH_SECONDS + float(analysis.get("flops", 0.0)) / _FLOPS_PER_SECOND
