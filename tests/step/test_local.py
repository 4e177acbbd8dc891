"""Deferred reduction over eight virtual CPU devices: the numbers of one device, and one reduction a window."""

from __future__ import annotations

import os
import subprocess
import sys


def test_gradients_stay_on_their_device_until_the_window_ends() -> None:
    """Dyadic data, so the plain sums are exact; a microbatch whose rows are all masked is among them."""
    command = [sys.executable, "-m", "tests.step.local_devices"]
    devices = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=devices)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("fine")
