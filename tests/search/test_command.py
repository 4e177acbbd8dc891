"""python -m nnx_jax.search: files in, a table out, the same command goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nnx_jax.config import load_config
from nnx_jax.runs.run import NNRun
from nnx_jax.search.__main__ import main, words

CONFIG = """
model: {net: {kind: feed_forward, hidden_dims: [4]}}
data: {train: {kind: digits, split: test}, val: {kind: digits, split: test}, batch_size: 128}
train: {n_epochs: 1, optim: {kind: sgd, max_lr: 3e-3}, save_phase_checkpoints: false}
"""
SPACE = """
train.optim.max_lr: {kind: float, low: 1e-3, high: 1e-1, log: true}
train.seed: {kind: int, low: 0, high: 1}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cfg.yaml").write_text(CONFIG)
    Path("space.yaml").write_text(SPACE)


def command(*more: str) -> list[str]:
    return ["--config", "cfg.yaml", "--space", "space.yaml", "--sampler", "grid", "--points", "2", "--quiet", *more]


def test_the_table_and_the_way_to_train_the_best_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--trials", "1", "--set", "train.optim.momentum=0.5")) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["trial", "train.optim.max_lr", "train.seed", "val_loss", "updates", "state", "why"]
    assert out[1].split()[:3] == ["*0", "0.001", "0"]
    (run,) = NNRun.all("runs")
    assert out[3] == f"best: trial 0, run {run.id}"
    sets = [word.strip("' ") for word in out[4].split("--set")[1:]]
    assert sets == ["train.optim.momentum=0.5", "train.optim.max_lr=0.001", "train.seed=0"]
    again = load_config("cfg.yaml", sets)
    assert again.train.optim.max_lr == run.state["train"]["optim"]["max_lr"]


def test_the_same_command_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--trials", "1", "--vmapped", "--json")) == 0
    assert main(command("--trials", "4", "--vmapped", "--json", "--study", "cfg")) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert second["trials"][0] == first["trials"][0]
    values = [tuple(trial["values"].values()) for trial in second["trials"]]
    assert values == [(0.001, 0), (0.001, 1), (0.1, 0), (0.1, 1)]
    assert second["best"] in range(4)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "space, more, message",
    [
        (SPACE.replace("max_lr", "max_lrr"), (), "there is no 'max_lrr' here; did you mean 'max_lr'"),
        (SPACE.replace("low: 0", "lo: 0"), (), "space.yaml: train.seed: IntParam|space.yaml: train.seed"),
        ("- 1", (), "expected a mapping of names to parameters"),
        (SPACE, ("--monitor", "loss"), "--monitor: got 'loss'"),
        (SPACE, ("--monitor", "val_f1"), "which this run does not record"),
        (SPACE, ("--space", "no.yaml"), "no.yaml: cannot be read"),
        (SPACE, ("--updates", "0"), "updates_per_trial: got 0"),
    ],
)
def test_what_is_wrong_is_said(
    space: str, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("space.yaml").write_text(space)
    assert main(command("--trials", "1", *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith("nnx_jax.search: ")
    assert any(part in error for part in message.split("|"))
    assert not Path("runs").exists()


def test_values_as_words() -> None:
    values = {"a": 1e-5, "b": "gelu", "c": (8, 16), "d": None, "e": True}
    assert words(values) == ["a=1e-05", "b=gelu", "c=[8,16]", "d=null", "e=true"]
