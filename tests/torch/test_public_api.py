"""What `nnx_jax.torch` offers: its table, `__all__`, type checkers and docs/api.md agree; importing it is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nnx_jax
import nnx_jax.objectives
import nnx_jax.torch as bridge

ROOT = Path(__file__).resolve().parents[2]
TREE = ast.parse(Path(bridge.__file__).read_text(encoding="utf-8"))
MODULES = {"convert", "distributed"}
ENGINES_OWN = {
    "NNModel", "ObjectiveContext", "TrainStepContext", "TrainerStepContext", "finalize_step", "kd_objective",
    "supervised_objective",
}  # fmt: skip
"""Names of `nnx_jax` that are another thing under torch."""


@pytest.mark.parametrize("name", bridge.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    value = getattr(bridge, name)
    assert value.__name__.rpartition(".")[2] == name
    assert name in dir(bridge)


def test_the_three_lists_agree() -> None:
    typed = {
        alias.name: (node.module or "").removeprefix("nnx_jax.")
        for block in TREE.body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == bridge._WHERE | dict.fromkeys(MODULES, "torch")
    assert set(bridge.__all__) == {*bridge._WHERE, *MODULES}
    assert bridge.__all__ == sorted(bridge.__all__, key=str.casefold)


def test_names_are_those_of_the_jax_engine() -> None:
    """Every name is one that `nnx_jax` or `nnx_jax.objectives` has, and the same object where it knows no framework."""
    for name in set(bridge.__all__) - {"convert"}:
        assert hasattr(nnx_jax, name) or hasattr(nnx_jax.objectives, name) or name == "distributed", name
        if hasattr(nnx_jax, name) and name not in MODULES:
            assert (getattr(bridge, name) is getattr(nnx_jax, name)) == (name not in ENGINES_OWN), name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=re.escape("module 'nnx_jax.torch' has no attribute 'NNMode'")):
        bridge.NNMode  # noqa: B018


def test_importing_the_bridge_imports_no_framework() -> None:
    code = "import sys, nnx_jax.torch as b; dir(b); print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"jax", "flax", "optax", "orbax", "grain", "torch"} & set(done.stdout.split())


def test_the_page_lists_them() -> None:
    """docs/api.md names each in its section, and nothing that is not there."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    part = text.partition("\n## Over torch\n")[2].partition("\n## ")[0]
    listed = [
        name for cells in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for name in re.findall(r"`(\w+)`", cells)
    ]
    assert sorted(listed, key=str.casefold) == bridge.__all__
