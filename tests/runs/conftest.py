"""Fixtures of the run store's tests: one finished little run, copied for every test that damages it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runs import scenario


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs directory with one run of two committed epochs; never written to."""
    root = tmp_path_factory.mktemp("pristine")
    scenario.run(root, 2, keep=None)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """A private copy of the pristine runs directory."""
    copy = tmp_path / "runs"
    shutil.copytree(pristine, copy, symlinks=True)
    return copy
