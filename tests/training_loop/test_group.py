"""A TrainingLoop of several processes: the same numbers as one process on as many devices, written by one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import results
from tests.training_loop import group_runs


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Weights, evaluations and a resume, bit for bit, on every process; the writer alone writes.

    (pipekit:J12, pipekit:J15, pipekit:D12.6)
    """
    found = results("tests.training_loop.group_runs:trains", 2, args={"folder": str(tmp_path / "group")}, timeout=200)
    one = group_runs.trains(str(tmp_path / "one"), alone=True)
    assert found[0]["weights"] == found[1]["weights"] == one["weights"]
    assert found[0]["metrics"] == found[1]["metrics"] == one["metrics"]
    assert found[0]["events"] == found[1]["events"] == one["events"]
    assert (found[0]["step"], found[0]["written"], found[1]["written"]) == (10, one["written"], [])


@pytest.mark.slow
def test_what_a_group_is_refused(tmp_path: Path) -> None:
    """Processes without a directory in common, or without a DDP, are told what to give; nothing is written."""
    for first, second in results("tests.training_loop.group_runs:refused", 2, args={"folder": str(tmp_path / "runs")}):
        assert "TrainingLoop.checkpoint_dir: is None, but 2 processes train together" in first
        assert "TrainingLoop would train 2 models here" in second
    assert not (tmp_path / "runs").exists()
