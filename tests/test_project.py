"""The project's own files: the lock, the licence, README's commands and CI agree with each other."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCK = (ROOT / "requirements" / "ci.txt").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def bare(requirement: str) -> str:
    """The normalised name in a requirement line."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0]).lower()


def locked() -> dict[str, set[str]]:
    """Name -> locked versions (several when they differ by platform)."""
    pins: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.+]+)", LOCK, re.MULTILINE):
        pins.setdefault(bare(name), set()).add(version)
    return pins


def needed() -> list[str]:
    dev = PROJECT["optional-dependencies"]["dev"] + PROJECT["optional-dependencies"]["examples"]
    return [line for line in PROJECT["dependencies"] + dev if not line.startswith("nnx_jax")]


@pytest.mark.parametrize("requirement", needed())
def test_every_dependency_is_locked(requirement: str) -> None:
    assert bare(requirement) in locked()


def test_lock_is_pinned_hashed_and_names_no_source() -> None:
    entries = [line for line in LOCK.splitlines() if line and line[0] not in " #"]
    assert len(entries) > 50
    assert all(re.match(r"[\w.\[\]-]+==\S+( ; .+)? \\$", line) for line in entries)
    for block in re.split(r"^(?=\w)", LOCK, flags=re.MULTILINE)[1:]:
        assert re.search(r"^    --hash=sha256:[0-9a-f]{64}", block, re.MULTILINE), block.splitlines()[0]
    assert "://" not in LOCK
    assert "index-url" not in LOCK


def test_lock_holds_no_torch() -> None:
    assert "torch" not in locked()


@pytest.mark.parametrize("name", ["jax", "flax", "orbax-checkpoint", "grain"])
def test_fragile_dependencies_are_bounded_by_their_minor_version(name: str) -> None:
    """The run store and the step rest on unpromised behaviour of these four."""
    assert [line for line in PROJECT["dependencies"] if bare(line) == name and ",<0." in line]


def test_readme_opens_with_two_commands() -> None:
    blocks = re.findall(r"^```bash (\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["run", "test"]
    assert README.index("```bash test") < README.index("\n## ")
    assert all(text.count("\n") == 1 for _, text in blocks), "each is one line"
    assert "python -m nnx_jax.train --config examples/digits.yaml" in blocks[0][1]


def test_ci_finds_readme_test_command() -> None:
    """CI takes the command out of README with this expression; it must yield an install and a test."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    line = next(line for line in script.splitlines() if line.startswith("command=$("))
    shell = f'venv=.other; {line}; printf %s "$command"'
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    assert "pip install -e '.[dev]'" in done.stdout
    assert ".other/bin/python -m pytest" in done.stdout
    assert ".venv" not in done.stdout
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True, timeout=30)


def test_license_is_the_whole_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text.splitlines()[1]
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_version_is_said_once() -> None:
    import nnx_jax

    assert PROJECT["version"] == nnx_jax.__version__
