"""The examples do what their first lines promise: small forms always, the full runs in the slow tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def train(example: str, folder: Path, *overrides: str, timeout: int = 600) -> dict[str, Any]:
    """Run the command as a user would; return its JSON line."""
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "nnx_jax.train", "--config", EXAMPLES / example, "--json", "--quiet", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SMALL = {
    "digits.yaml": ["train.n_epochs=2", "model.net.hidden_dims=[16]"],
    "digits_conv.yaml": ["train.n_epochs=1", "model.net.channels=[4]", "model.net.hidden_dims=[8]"],
    "hooks.yaml": [
        "train.n_epochs=2", "model.net.hidden_dims=[16]",
        "hooks.3.warmup=4", "hooks.5.epoch_interval=1", "hooks.5.keep_last=1",
    ],
    "text_lm.yaml": [
        "train.max_steps=4", "model.net.d_model=16", "model.net.n_layers=1",
        *(f"data.{split}.{size}" for split in ("train", "val") for size in ("max_bytes=20000", "context_length=16")),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "example",
    [path.name for path in sorted(EXAMPLES.glob("*.yaml")) if not path.name.startswith("torch_")],  # see tests/torch
)
def test_small_form_finishes(example: str, tmp_path: Path) -> None:
    result = train(example, tmp_path, *SMALL[example])
    assert result["status"] == "finished"
    assert result["step"] > 0
    assert result["train"]["loss"] > 0
    assert (tmp_path / result["run_dir"] / "checkpoints" / "LAST").is_file()


def test_hooks_leave_their_checkpoint(tmp_path: Path) -> None:
    """The policies take part in the update, and the tag that retention keeps is there."""
    result = train("hooks.yaml", tmp_path, *SMALL["hooks.yaml"])
    names = {path.name for path in (tmp_path / result["run_dir"] / "checkpoints").iterdir()}
    assert {"epoch_2", "LAST"} <= names
    assert "epoch_1" not in names


@pytest.mark.slow
def test_digits_reaches_its_accuracy(tmp_path: Path) -> None:
    assert train("digits.yaml", tmp_path)["test"]["accuracy"] >= 0.96


@pytest.mark.slow
def test_hooks_reach_their_accuracy(tmp_path: Path) -> None:
    assert train("hooks.yaml", tmp_path)["test"]["accuracy"] >= 0.96


@pytest.mark.slow
@pytest.mark.long
def test_digits_conv_reaches_its_accuracy(tmp_path: Path) -> None:
    assert train("digits_conv.yaml", tmp_path)["test"]["accuracy"] >= 0.975


@pytest.mark.slow
@pytest.mark.long
def test_text_lm_beats_the_entropy_of_single_bytes(tmp_path: Path) -> None:
    """Within three minutes on two cores; the bound here leaves room for a busy machine."""
    from nnx_jax import load_config

    dataset: Any = load_config(EXAMPLES / "text_lm.yaml").data
    result = train("text_lm.yaml", tmp_path)
    assert result["val"]["loss"] < dataset.val.unigram_entropy()
    assert result["train"]["loss"] < dataset.train.unigram_entropy()


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path) -> None:
    """Every cell, in a kernel of its own, from a folder where only the installed package can be found."""
    import nbclient
    import nbformat

    notebook = nbformat.read(EXAMPLES / "notebook_quickstart.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert (tmp_path / "runs" / "best").exists()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "is finished" in text


def test_notebook_is_stored_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / "notebook_quickstart.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
