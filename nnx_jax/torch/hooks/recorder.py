"""Recorder: one recording of torch's profiler, written as a Chrome trace when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nnx_jax.core import fsio
from nnx_jax.core.errors import HookStateError


class Recorder:
    """One recording.

    Args:
        asked: has `activities`, `record_shapes`, `profile_memory`, `with_flops` and `with_stack`.
        path: the trace's file; it is there once `stop` returns.
    """

    def __init__(self, asked: Any, path: Path) -> None:
        names = asked.activities or ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
        self.path = path
        self._profile = profile(
            activities=[getattr(ProfilerActivity, name.upper()) for name in names],
            record_shapes=asked.record_shapes,
            profile_memory=asked.profile_memory,
            with_flops=asked.with_flops,
            with_stack=asked.with_stack,
        )

    def start(self) -> None:
        """Begin.

        Raises:
            HookStateError: (a RuntimeError) another profiler is active.
        """
        busy: Any = torch.autograd
        if busy._profiler_enabled():
            raise HookStateError(
                f"TorchProfilerHook cannot record to {self.path}: another profiler is active; leave one of them out"
            )
        self._profile.start()

    def stop(self) -> None:
        """End, and write the trace."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what was sent to the device is part of the recording
        self._profile.stop()
        unfinished = self.path.with_name(f".{self.path.name}")
        self._profile.export_chrome_trace(str(unfinished))
        fsio.atomic_write(self.path, unfinished.read_bytes())
        unfinished.unlink()
