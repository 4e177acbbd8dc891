"""The examples that need torch do what their first lines promise: small forms always, whole runs in the slow tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax import NNRun, load_config
from nnx_jax.train import main
from tests.processes import ROOT, SCRUBBED

EXAMPLES = ROOT / "examples"
DIGITS, DDP = EXAMPLES / "torch_digits.yaml", EXAMPLES / "ddp_supervised.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
PATIENCE = 400
SAID = re.compile(r"rank (\d) of (\d): run ([0-9a-f]{16}), (\d+) rates, test accuracy (0\.\d{4})$", re.MULTILINE)


def command(words: list[Any], folder: Path) -> str:
    """Run a command as a user would, in a folder and in no group; its standard output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_configuration_is_that_of_the_jax_engine() -> None:
    torch, flax = load_config(DIGITS), load_config(EXAMPLES / "digits.yaml")
    assert torch.backend == "torch"
    assert torch.replace(backend="flax") == flax
    assert torch.run_id() != flax.run_id()


def test_its_small_form_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--set", "train.n_epochs=2", "--set", "model.net.hidden_dims=[16]"]
    assert main(["--config", str(DIGITS), "--json", "--quiet", *small]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["status"], result["step"]) == ("finished", 92)
    assert result["train"]["loss"] < 2.3  # log(10): better than a guess
    last = tmp_path / result["run_dir"] / "checkpoints" / "LAST"
    assert json.loads(last.read_text())["epoch"] == 1


@pytest.mark.parametrize(("device", "code"), [("cpu", 0), ("cuda:7", 2), ("tpu", 2), ("cpu:", 2)])
@pytest.mark.parametrize("dry", [True, False])
def test_the_command_takes_a_device(
    device: str, code: int, dry: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is not there is an error before anything is written; the run is the same on any."""
    words = ["--config", str(DIGITS), "--runs-dir", str(tmp_path), "--json", "--quiet", "--set", "train.n_epochs=1"]
    assert main([*words, "--device", device, *(["--dry-run"] if dry else [])]) == code
    told = capsys.readouterr()
    if code:
        assert "device is '" in told.err
        assert not list(tmp_path.iterdir())
    else:
        result = json.loads(told.out.splitlines()[-1])
        assert result["run_id"] == load_config(DIGITS, ["train.n_epochs=1"]).run_id()


def test_the_jax_engine_has_no_such_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its devices are JAX's."""
    words = ["--config", str(EXAMPLES / "digits.yaml"), "--runs-dir", str(tmp_path), "--device", "cpu"]
    assert main(words) == 2
    assert "--device: it is an option of the engine 'torch'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_reaches_its_accuracy(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "nnx_jax.train", "--config", DIGITS, "--json", "--quiet"]
    assert json.loads(command(words, tmp_path).splitlines()[-1])["test"]["accuracy"] >= 0.96


@pytest.mark.slow
def test_it_is_the_same_run_under_torchrun(tmp_path: Path) -> None:
    """The second command of its first lines: two processes with half of the rows each."""
    words = [*TORCHRUN, "--nproc_per_node=2", "-m", "nnx_jax.train", "--distributed", "--config", DIGITS]
    small = ["--set", "train.n_epochs=2", "--set", "model.net.dropout_prob=0", "--json", "--quiet"]
    two = json.loads(command([*words, *small], tmp_path).splitlines()[-1])
    one = json.loads(
        command([sys.executable, "-m", "nnx_jax.train", "--config", DIGITS, *small, "--runs-dir", "one"], tmp_path)
    )
    assert (two["run_id"], two["step"]) == (one["run_id"], one["step"])
    assert two["val"] == pytest.approx(one["val"], rel=1e-4)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[tuple[str, ...]]]]:
    """The script by both commands of its first lines, and by one process of torch: folder, and what ranks said."""
    found = {}
    for name, words in {
        "torch": [*TORCHRUN, "--nproc_per_node=2", DDP],
        "jax": [sys.executable, "-m", "nnx_jax.launch", "--processes", "2", "--script", DDP, "--", "--backend", "jax"],
        "one": [*TORCHRUN, "--nproc_per_node=1", DDP],
    }.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = folder, sorted(SAID.findall(command([*words, "--epochs", "3"], folder)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_both_processes_have_one_run(name: str, groups: Any) -> None:
    folder, said = groups[name]
    assert [rank[:2] for rank in said] == [("0", "2"), ("1", "2")]
    assert said[0][2:] == said[1][2:]
    _, _, run_id, rates, accuracy = said[0]
    assert (rates, float(accuracy) > 0.85) == ("3", True)
    assert [path.name for path in (folder / "runs").iterdir() if re.fullmatch("[0-9a-f]{16}", path.name)] == [run_id]
    assert len(list((folder / "runs" / "events").iterdir())) == 1  # of the writer


@pytest.mark.slow
def test_the_run_is_that_of_one_process(groups: Any) -> None:
    """The same id, and every record to the rounding of float32 sums in another order over 138 updates of AdamW."""
    (two, said), (one, alone) = groups["torch"], groups["one"]
    assert said[0][2:4] == alone[0][2:4]
    rows, wanted = (NNRun.load(alone[0][2], folder / "runs").records for folder in (two, one))
    assert len(rows) == len(wanted) == 138 + 3
    for row, want in zip(rows, wanted, strict=True):
        assert row.keys() == want.keys()
        for name, value in want.items():
            if isinstance(value, float):
                np.testing.assert_allclose(row[name], value, rtol=1e-4, atol=1e-7, err_msg=name)
            else:
                assert row[name] == value
