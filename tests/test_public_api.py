"""The public names: the table, `__all__` and what type checkers see agree, and every name is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nnx_jax

TREE = ast.parse(Path(nnx_jax.__file__).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", nnx_jax.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    value = getattr(nnx_jax, name)
    assert name == "__version__" or value.__name__ == name
    assert name in dir(nnx_jax)


def test_names_are_sorted_and_few() -> None:
    names = [name for name in nnx_jax.__all__ if name != "__version__"]
    assert names == sorted(names, key=str.casefold)
    assert len(names) == len(set(names)) <= 110  # users of the older library change an import: its names are kept


def test_table_all_and_type_checkers_agree() -> None:
    """A name that only one of the three lists knows would be missing for somebody."""
    typed = {
        alias.name: (node.module or "").removeprefix("nnx_jax.")
        for block in TREE.body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == nnx_jax._WHERE
    assert set(nnx_jax.__all__) == {*nnx_jax._WHERE, "__version__"}


def test_names_of_the_step_based_side() -> None:
    """`nnx_jax.ops` has each name in its table, for type checkers and in `__all__`; none needs an extra."""
    import nnx_jax.ops as ops

    tree = ast.parse(Path(ops.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == ops._NAMES
    assert sorted(ops.__all__) == sorted(typed)
    for name in set(typed) - {"TorchModelOp"}:  # which is shown where torch is
        assert getattr(ops, name).__name__ == name
    assert {"TrainingLoop", "Sequential"} <= set(dir(ops))
    with pytest.raises(AttributeError, match="'TrainingLop'"):
        ops.TrainingLop  # noqa: B018


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nnx_jax' has no attribute 'NNMode'"):
        nnx_jax.NNMode  # noqa: B018


def test_a_parameter_class_loads_no_framework() -> None:
    code = "import sys; from nnx_jax import NNTrainParams, ConfigError; print(*{n.split('.')[0] for n in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"jax", "flax", "optax", "orbax", "grain", "torch"} & set(done.stdout.split())
