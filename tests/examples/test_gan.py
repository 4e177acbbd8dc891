"""examples/gan_2d.py: a short form always, the promise of its first line in a slow test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnx_jax.runs.run import NNRun

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gan_2d.py"


def train(folder: Path, *options: str) -> list[tuple[int, int]]:
    """Run it as a user would; return (modes, share in percent) of data, before and after."""
    command = [sys.executable, EXAMPLE, "--out", folder, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [(int(modes), int(share)) for modes, share in re.findall(r"(\d) of 8 modes, (\d+)%", done.stdout)]


def test_a_short_form_leaves_a_picture_and_a_run(tmp_path: Path) -> None:
    """Two epochs; run again, it trains again: the figures of merit are printed each time."""
    found = train(tmp_path, "--epochs", "2")
    assert found[0] == (8, 99)
    assert len(found) == 3
    assert (tmp_path / "gan_2d.png").read_bytes().startswith(b"\x89PNG")
    (run,) = NNRun.all(tmp_path / "runs")
    assert (run.status, run.last.step if run.last else None) == ("finished", 128)
    assert [row["lr_g"] for row in run.records if row["kind"] == "update"] == pytest.approx([2e-3] * 128)


@pytest.mark.slow
def test_it_finds_the_modes(tmp_path: Path) -> None:
    _, before, after = train(tmp_path)
    assert before[0] <= 1
    assert after[0] >= 7
    assert after[1] >= 70
