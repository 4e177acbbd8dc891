"""Several real processes train the step that one process trains: same rows, same hooks, same parameters."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np


def train(world: int) -> list[dict[str, Any]]:
    """What each of `world` processes printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.step.process_rows"]
    one_device = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    started = [
        subprocess.Popen(
            [*command, str(rank), str(world), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=one_device
        )
        for rank in range(world)
    ]
    results = [process.communicate(timeout=240) for process in started]
    for process, (_, errors) in zip(started, results, strict=True):
        assert process.returncode == 0, errors.decode()[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in results]


def test_two_processes_equal_one() -> None:
    """nvalchemi:128, nvalchemi:129, nvalchemi:131

    Each process reads its own half of the rows, complementary and in another order every epoch. Adam's division makes
    the last bit of a sum, whose order differs, grow a little: 2e-6 of the largest weight.
    """
    one, (first, second) = train(1)[0], train(2)
    for epoch in range(2):
        assert sorted(first["rows"][epoch] + second["rows"][epoch]) == list(range(24))
        assert not set(first["rows"][epoch]) & set(second["rows"][epoch])
    assert first["rows"][0] != first["rows"][1]
    assert first["state"] == second["state"]
    for path, want in one["state"].items():
        np.testing.assert_allclose(first["state"][path], want, rtol=2e-6, atol=2e-6, err_msg=path)
    assert one["state"]["counters"] == first["state"]["counters"]
    assert first["compiles"] == one["compiles"] == {"micro": 1, "apply": 1}
