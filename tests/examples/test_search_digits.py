"""examples/search_digits.py finds a rate and a width."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "search_digits.py"


def call(folder: Path, trials: int) -> list[str]:
    command = [sys.executable, EXAMPLE, "--trials", str(trials), "--epochs", "1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 80


def test_it_searches(tmp_path: Path) -> None:
    """Six trials at once, one with a run, and the winner's fit."""
    lines = call(tmp_path, 1)
    assert lines[0].split()[:3] == ["trial", "rate", "seed"]
    assert len(lines) == 7 + 2 + 1
    assert float(lines[-1].split()[-1]) > 0.1
    assert len(list((tmp_path / "runs").glob("[0-9a-f]" * 16))) == 2
    assert len(list((tmp_path / "studies" / "rates" / "trials").iterdir())) == 6
