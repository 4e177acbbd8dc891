"""The tools that measure the torch engine and check it on a GPU, in the smallest form that a CPU can show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.processes import ROOT, SCRUBBED

pytestmark = pytest.mark.slow


def tool(name: str, *words: str) -> tuple[list[dict[str, Any]], str]:
    """Run a tool with --json; its lines, and everything it printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
    command = [sys.executable, ROOT / "tools" / name, "--json", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_checked() -> None:
    lines, said = tool("gpu_check.py")
    assert lines == []
    assert "no GPU here" in said


def test_the_rehearsal_of_the_gpu_check() -> None:
    """Every check, engine and precision has its line, and all are well."""
    lines, said = tool("gpu_check.py", "--cpu")
    assert all(line["ok"] for line in lines), said
    assert "all well on CPU" in said
    trained = {(line["engine"], line["precision"]) for line in lines if line["check"] == "train"}
    assert trained == {(e, p) for e in ("jax", "torch") for p in ("float32", "bfloat16", "float16")}
    assert [line["optimizer"] for line in lines if line["check"] == "parity"] == ["sgd", "adamw"]
    for check in ("resume", "memory"):
        assert [line["engine"] for line in lines if line["check"] == check] == ["jax", "torch"]
    timed = [(line["engine"], line["case"], line.get("precision")) for line in lines if line["check"] == "bench"]
    assert len(timed) == len(set(timed)) == 3 + 2 * 3


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_torch_bench(processes: str) -> None:
    """Both sides train alike, or the tool raises; the line says in what it was measured."""
    [line], _ = tool("bench_torch.py", "--case", "digits", "--processes", processes, "--rounds", "1", "--threads", "1")
    assert (line["processes"], line["threads"], line["rounds"]) == (int(processes), 1, 1)
    assert line["first_loss"][0] == pytest.approx(line["first_loss"][1], rel=1e-4)
    ours, theirs = (line[f"{side}_ms_per_step"]["median"] for side in ("trainer", "bare"))
    assert line["ratio_to_bare"] == pytest.approx(ours / theirs, rel=0.01)
