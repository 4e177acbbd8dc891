"""The documents match the code: every Python snippet runs, every YAML snippet loads, every link and command exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnx_jax.config import load_config
from nnx_jax.core.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_EXTRAS = ("torch.md", "engines.md")
"""Their snippets run where the extras are: in tests/torch/test_page.py and tests/examples/test_engines_examples.py."""


def blocks(kind: str, pages: list[Path] = PAGES) -> list[object]:
    """Every fenced block of a kind, as a test parameter named by page and line."""
    params: list[object] = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, found.start()) + 1
            params.append(pytest.param(found[1], id=f"{page.name}:{line}"))
    return params


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python", [page for page in PAGES if page.name not in OF_EXTRAS]))
def test_python_snippet_runs(code: str, tmp_path: Path) -> None:
    """Each in an interpreter of its own, in an empty folder, warnings from the snippet's own imports being errors."""
    command = [sys.executable, "-W", "error::UserWarning", "-W", "error::RuntimeWarning", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_snippet_loads(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cfg.yaml"
    path.write_text(text, encoding="utf-8")
    assert re.fullmatch("[0-9a-f]{16}", load_config(path).run_id())


@pytest.mark.parametrize("text", blocks("yaml invalid"))
def test_invalid_yaml_snippet_gives_the_error_it_quotes(text: str, tmp_path: Path) -> None:
    """Its first line quotes where, and the words at the end of the message."""
    path = tmp_path / "cfg.yaml"
    path.write_text(text, encoding="utf-8")
    where, _, message = text.splitlines()[0].removeprefix("# ").partition(": ")
    with pytest.raises(ConfigError, match=re.escape(message.rpartition("; ")[2])) as caught:
        load_config(path)
    assert where in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_example_configuration_loads(path: Path) -> None:
    assert load_config(path).train.optim.max_lr > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"`((?:docs|tools|examples|tests)/[\w./-]+)`", text)
    for link in links:
        base = ROOT if link.split("/")[0] in ("docs", "tools", "examples", "tests") else page.parent
        assert (base / link).exists(), link


def test_configuration_reference_is_up_to_date() -> None:
    """`python tools/config_reference.py` rewrites it."""
    command = [sys.executable, ROOT / "tools" / "config_reference.py", "--check"]
    assert subprocess.run(command, check=False, timeout=120, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_options_exist(page: Path) -> None:
    """Every option written behind a command of ours is one of its options."""
    from nnx_jax.train import parser

    known = set(parser()._option_string_actions)
    for line in re.findall(r"nnx_jax\.train (.*)", page.read_text(encoding="utf-8")):
        assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= known


def test_runs_commands_exist() -> None:
    text = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")
    usage = subprocess.run(
        [sys.executable, "-m", "nnx_jax.runs", "--help"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for command in re.findall(r"nnx_jax\.runs (\w+)", text):
        assert re.search(rf"\b{command}\b", usage)


def test_every_public_class_is_mentioned() -> None:
    """A public name that no page mentions is one that nobody finds."""
    import nnx_jax

    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [name for name in nnx_jax.__all__ if not re.search(rf"\b{name}\b", text) and name != "__version__"]
    assert missing == []
