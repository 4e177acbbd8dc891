"""Progress for a person: a bar on a terminal, one plain ASCII line per epoch anywhere else."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

LINE_LENGTH = 200
"""Longest progress line; messages, which may hold a path, are never cut."""
SHOWN = ("train_loss", "val_loss", "train_accuracy", "val_accuracy", "val_perplexity")


class Progress(Protocol):
    """What the loop tells a progress display; nothing here reads the device.

    One with a method `waited(seconds)` is also told how long training has waited for its data so far.
    """

    def start(self, run_id: str, n_epochs: int, n_batches: int) -> None:
        """Training begins."""
        ...

    def advance(self, epoch: int, batch: int) -> None:
        """`batch` microbatches of `epoch` are handed to the device."""
        ...

    def values(self, epoch: int, step: int, values: Mapping[str, float], *, epoch_end: bool) -> None:
        """Values were read at a host event."""
        ...

    def message(self, text: str) -> None:
        """Say one line."""
        ...

    def stop(self) -> None:
        """Training ended, however."""
        ...


class QuietProgress:
    """Says nothing."""

    def start(self, run_id: str, n_epochs: int, n_batches: int) -> None: ...

    def advance(self, epoch: int, batch: int) -> None: ...

    def values(self, epoch: int, step: int, values: Mapping[str, float], *, epoch_end: bool) -> None: ...

    def message(self, text: str) -> None: ...

    def stop(self) -> None: ...


def describe(values: Mapping[str, float]) -> str:
    """The values a person looks at first, short: "train_loss 0.1234 val_accuracy 0.9611"."""
    names = [name for name in SHOWN if name in values]
    names += [name for name in sorted(values) if name not in names][: max(0, 5 - len(names))]
    return "  ".join(f"{name} {_short(values[name])}" for name in names)


def _short(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) and 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def tell_wait(progress: Progress, seconds: float) -> None:
    """Tell a display that wants to know how long training has waited for its data so far."""
    if hasattr(progress, "waited"):
        progress.waited(seconds)  # type: ignore[attr-defined]


def _wait(waited: float, seconds: float) -> str:
    """What to say of a wait for data: nothing while it is short."""
    return f", data {waited:.1f} s" if waited > max(0.05 * seconds, 0.05) else ""


def say(text: str, stream: IO[str] | None) -> None:
    """Print to a stream that may be closed, broken or ASCII only: a reader that left must not end a run."""
    if stream is None:
        return  # it was closed before the program began
    try:
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode("ascii"), file=stream, flush=True)
    except (OSError, ValueError):
        if stream in (sys.__stdout__, sys.__stderr__):
            _give_up(stream)


def _give_up(stream: IO[str]) -> None:
    """Point a broken standard stream at the null device, so that the interpreter's flush at exit succeeds."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class PlainProgress:
    """One ASCII line per epoch and per log event, flushed; no carriage return, no escape code."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = stream
        self._n_epochs = 0
        self._since = self._waited = 0.0

    def start(self, run_id: str, n_epochs: int, n_batches: int) -> None:
        self._n_epochs, self._since = n_epochs, time.monotonic()
        self.message(f"run {run_id}: {n_epochs} epochs of {n_batches} batches")

    def advance(self, epoch: int, batch: int) -> None: ...

    def values(self, epoch: int, step: int, values: Mapping[str, float], *, epoch_end: bool) -> None:
        mark = "" if epoch_end else " ..."
        seconds = time.monotonic() - self._since
        text = f"epoch {epoch + 1}/{self._n_epochs}{mark}  step {step}  {describe(values)}"
        end = f"  {seconds:.1f} s{_wait(self._waited, seconds)}"
        self.message(text[: LINE_LENGTH - len(end)] + end)

    def waited(self, seconds: float) -> None:
        """Training has waited for its data for so long; lines name a wait of more than a twentieth."""
        self._waited = seconds

    def message(self, text: str) -> None:
        say("".join(char if " " <= char <= "~" else "?" for char in text), self.stream or sys.stderr)

    def stop(self) -> None: ...


class BarProgress:
    """A rich bar over the batches of the run, redrawn a few times a second, with the values of the last event."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        # Names and paths are text: a "[" in them must not be read as markup.
        self._bars = Bars(
            TextColumn("epoch {task.fields[epoch]}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._task: Any = None
        self._n_epochs = self._n_batches = 0
        self._since = self._waited = 0.0

    def start(self, run_id: str, n_epochs: int, n_batches: int) -> None:
        self._n_epochs, self._n_batches, self._since = n_epochs, n_batches, time.monotonic()
        self._bars.start()
        self.message(f"run {run_id}")
        self._task = self._bars.add_task("train", total=n_epochs * n_batches, epoch=f"0/{n_epochs}", text="")

    def advance(self, epoch: int, batch: int) -> None:
        done = epoch * self._n_batches + batch
        self._bars.update(self._task, completed=done, epoch=f"{epoch + 1}/{self._n_epochs}")

    def values(self, epoch: int, step: int, values: Mapping[str, float], *, epoch_end: bool) -> None:
        self._bars.update(self._task, text=describe(values) + _wait(self._waited, time.monotonic() - self._since))

    def waited(self, seconds: float) -> None:
        """Training has waited for its data for so long."""
        self._waited = seconds

    def message(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._bars.console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._bars.stop()


def make_progress(quiet: bool = False) -> Progress:
    """A bar when standard error is a terminal that can draw one, plain lines otherwise, nothing when quiet."""
    if quiet:
        return QuietProgress()
    try:
        terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    except (AttributeError, ValueError):
        terminal = False
    return BarProgress() if terminal else PlainProgress()


def shown(path: Path) -> str:
    """A path relative to the working directory, where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
