"""docs/torch.md: every Python and shell snippet runs, and what it says of links inside the page is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.launch import parser
from tests.processes import ROOT, SCRUBBED

TEXT = (ROOT / "docs" / "torch.md").read_text(encoding="utf-8")
PATIENCE = 400


def blocks(kind: str) -> list[Any]:
    """Every fenced block of a kind, as a test parameter named by its line."""
    return [
        pytest.param(found[1], id=f"line {TEXT.count(chr(10), 0, found.start()) + 1}")
        for found in re.finditer(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    ]


def run(command: list[str], folder: Path) -> None:
    """Run a command in a folder and in no group; its programs are those of this interpreter."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
    programs = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env |= {"PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python"))
def test_python_snippet_runs(code: str, tmp_path: Path) -> None:
    run([sys.executable, "-W", "error::UserWarning", "-W", "error::RuntimeWarning", "-c", code], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("bash"))
def test_shell_snippet_runs(code: str, tmp_path: Path) -> None:
    """As from the project's folder, except that what it writes is written somewhere else."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run(["bash", "-e", "-c", code], tmp_path)


def test_links_inside_the_page() -> None:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    there = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
    links = re.findall(r"\]\(#([\w-]+)\)", TEXT)
    assert len(links) >= 2
    assert set(links) <= set(there)
    assert len(there) == len(set(there))


def test_options_of_the_launcher_exist() -> None:
    known = set(parser()._option_string_actions)
    for line in re.findall(r"nnx_jax\.launch (.*?) --(?: |$)", TEXT, re.MULTILINE):
        assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= known
