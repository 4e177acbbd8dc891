"""python -m nnx_jax.decide: what it prints, what it exits with, and that a wrong request says what to write."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from nnx_jax.core import registry
from nnx_jax.data import ArrayDataset
from nnx_jax.decide import main
from nnx_jax.decisions import Question, load_question
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point

QUESTIONS = {
    "which": 'kind: choice\nprompt: Which is largest?\noptions: {"2": the third, "0": the first, "1": the second}\n',
    "level": 'kind: score\nprompt: How far right?\nlevels: [["0", left], ["1", middle], ["2", right]]\n',
    "yes": "kind: boolean\nprompt: Is the first column positive?\n",
}
Decide = Callable[..., tuple[int, str, str]]


def train(folder: Path, loss: str, classes: int, **more: str) -> str:
    """Train a small model in `folder`/runs; return the run's id."""
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    y = x.argmax(axis=1).astype(np.int32) if classes > 1 else (x[:, :1] > 0).astype(np.float32)
    model = NNModel(
        FeedForwardParams(hidden_dims=(), output_dim=classes), NNModelParams.from_state({"loss": loss, **more})
    )
    data = NNDataParams(train=ArrayDataset(x=x, y=y), val=ArrayDataset(x=x[:6], y=y[:6]), batch_size=8)
    params = NNTrainParams(n_epochs=2, optim=NNOptimParams(kind="sgd", max_lr=0.1))
    return model.train(params, data=data, runs_dir=folder / "runs", quiet=True).id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three classes and one of yes or no, questions, and rows."""
    made = tmp_path_factory.mktemp("decide")
    for name, loss, classes in (("classes", "cross_entropy", 3), ("yes_no", "binary_cross_entropy", 1)):
        (made / name).write_text(train(made, loss, classes))
    for name, text in QUESTIONS.items():
        (made / f"{name}.yaml").write_text(text)
    x = np.array([[4.0, 0.0, 0.0], [0.0, 0.0, 4.0]], np.float32)
    np.savez(made / "x.npz", x=x, none=x[:0], wide=np.zeros((2, 5), np.float32), text=np.array(["a"]), nan=x * np.nan)
    return made


@pytest.fixture
def decide(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Decide:
    """The command in that folder; `RUN` and `YES` stand for the runs' ids."""
    monkeypatch.chdir(folder)

    def call(*words: str) -> tuple[int, str, str]:
        named = {"RUN": (folder / "classes").read_text(), "YES": (folder / "yes_no").read_text()}
        capsys.readouterr()
        try:
            code = main([word.replace("RUN", named["RUN"]).replace("YES", named["YES"]) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


def asking(question: str = "which.yaml", rows: str = "x.npz") -> list[str]:
    return ["--question", question, "--input", rows]


def expected(folder: Path, run: str, rows: np.ndarray) -> np.ndarray:
    source = (folder / run).read_text()
    return NNModel.from_checkpoint(source, runs_dir=folder / "runs").predict_proba(rows).probabilities


def rows_of(folder: Path) -> np.ndarray:
    return np.load(folder / "x.npz")["x"]


def test_one_line_of_json_a_row(folder: Path, decide: Decide) -> None:
    """nnx:S04 The question of the file, answered in its own order by the stored weights."""
    code, out, err = decide("RUN", *asking(), "--json")
    assert (code, err) == (0, "")
    chances = expected(folder, "classes", rows_of(folder))
    question = load_question(folder / "which.yaml")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["row"] for line in lines] == [0, 1]
    for line, row in zip(lines, chances, strict=True):
        assert line["question"] == question.digest()
        assert list(line["probabilities"]) == ["2", "0", "1"]
        assert list(line["probabilities"].values()) == [float(row[2]), float(row[0]), float(row[1])]
        assert line["top"] == str(row.argmax())


def test_a_table_for_people(folder: Path, decide: Decide) -> None:
    code, out, err = decide("RUN@BEST", *asking())
    assert (code, err) == (0, "")
    prompt, asked, head, *lines = out.splitlines()
    assert prompt == "Which is largest?"
    assert asked.endswith("@BEST, choice " + load_question(folder / "which.yaml").digest()[:16] + ", rows: 2")
    assert head.split() == ["row", "answer", "p", "next", "p"]
    best = read_point(RunPaths(folder / "runs", (folder / "classes").read_text()), "BEST").step
    first = json.loads(decide(f"RUN@{best}", *asking(), "--json")[1].splitlines()[0])["probabilities"]
    assert lines[0].split()[:4] == ["0", "0", "the", "first"]
    assert f"{first['0']:.4f}" in lines[0]
    assert lines[1].split()[:4] == ["1", "2", "the", "third"]
    assert lines[0].index("the first") == lines[1].index("the third")


def test_a_score_and_a_yes_or_no(folder: Path, decide: Decide) -> None:
    code, out, _ = decide("RUN", *asking("level.yaml"))
    chances = expected(folder, "classes", rows_of(folder)).astype(np.float64)
    assert code == 0
    assert out.splitlines()[2].split() == ["row", "level", "p", "expected", "index"]
    assert [line.split()[-1] for line in out.splitlines()[3:]] == [f"{row @ [0, 1, 2]:.4f}" for row in chances]
    code, out, _ = decide("YES", *asking("yes.yaml"))
    (one, two) = expected(folder, "yes_no", rows_of(folder)).reshape(-1)
    assert code == 0
    assert out.splitlines()[3].split() == ["0", "yes", f"{one:.4f}"]
    assert out.splitlines()[4].split()[1:] == ["yes" if two >= 0.5 else "no", f"{two:.4f}"]


def test_names_for_the_classes(folder: Path, decide: Decide) -> None:
    (folder / "named.yaml").write_text("kind: choice\nprompt: Where?\noptions: {a: left, b: middle, c: right}\n")
    code, out, _ = decide("RUN", *asking("named.yaml"), "--labels", "c, b,a", "--json")
    assert code == 0
    first = json.loads(out.splitlines()[0])["probabilities"]
    assert list(first.values()) == [float(p) for p in expected(folder, "classes", rows_of(folder))[0][::-1]]


def test_no_rows_no_answers(decide: Decide) -> None:
    assert decide("RUN", *asking(), "--column", "none", "--json") == (0, "", "")
    code, out, _ = decide("RUN", *asking(), "--column", "none")
    assert code == 0
    assert "rows: 0" in out


WRONG: dict[str, tuple[Sequence[str], str]] = {
    "no such run": (["ABC", *asking()], "RUN: there is no run 'ABC' in"),
    "misspelled checkpoint": (["RUN@BSET", *asking()], "has no checkpoint 'BSET'; did you mean 'BEST'?"),
    "no such folder": (["RUN", *asking(), "--runs-dir", "rnus"], "there is no run"),
    "unsafe run": (["../x", *asking()], "../x"),
    "no such question": (["RUN", *asking("no.yaml")], "no.yaml: cannot be read (No such file or directory)"),
    "no question": (["RUN", *asking("bad.yaml")], "bad.yaml:3: options[0].id: got 0 (int); expected text"),
    "no such rows": (["RUN", *asking(rows="no.npz")], "no.npz cannot be read"),
    "not rows": (["RUN", *asking(rows="which.yaml")], "is not an .npz of plain arrays"),
    "no such column": (["RUN", *asking(), "--column", "X"], "x.npz has no column 'X'"),
    "text": (["RUN", *asking(), "--column", "text"], "give numbers or bool"),
    "not finite": (["RUN", *asking(), "--column", "nan"], "row 0: nan is not a finite number"),
    "too wide": (["RUN", *asking(), "--column", "wide"], "was built for 3 inputs a row, the batch has 5"),
    "other labels": (
        ["RUN", *asking("pets.yaml")],
        "asked about 'cat', 'dog'; this provider's labels are '0', '1', '2'",
    ),
    "labels": (["RUN", *asking(), "--labels", "a,b"], "labels: 2 labels for a head of 3 classes"),
    "yes or no of classes": (["RUN", *asking("yes.yaml")], "ask this head a Choice or a Score"),
    "choice of a yes or no": (["YES", *asking()], "give that Boolean"),
    "no such module": (["RUN", *asking(), "--import", "nobody.here"], "the module 'nobody.here' cannot be imported"),
    "no options": (["RUN"], "the following arguments are required: --question, --input"),
}


@pytest.mark.parametrize("words, message", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_exits_with_2(folder: Path, decide: Decide, words: Sequence[str], message: str) -> None:
    (folder / "bad.yaml").write_text("kind: choice\nprompt: Which?\noptions: [[0, zero], [1, one]]\n")
    (folder / "pets.yaml").write_text("kind: choice\nprompt: Which?\noptions: {cat: a cat, dog: a dog}\n")
    code, out, err = decide(*words)
    assert message in err
    assert (code, out) == (2, "")


def test_damaged_weights_are_a_failure(folder: Path, decide: Decide) -> None:
    """Not a wrong request: there is nothing else to write."""
    paths = RunPaths(folder / "runs", (folder / "classes").read_text())
    directory = read_point(paths).directory
    data = max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    whole = data.read_bytes()
    data.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    try:
        code, out, err = decide("RUN", *asking())
    finally:
        data.write_bytes(whole)
    assert (code, out) == (1, "")
    assert data.name in err
    assert decide("RUN", *asking())[0] == 0


MINE = """
from nnx_jax.core.registry import register
from nnx_jax.params.losses import LossParams
import jax.numpy as jnp

@register("mine")
class Mine(LossParams):
    def __call__(self, outputs, batch):
        return jnp.sum(jnp.square(outputs), axis=-1)
"""


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A module of one's own; calling this forgets it, as a new process would not know it."""
    (tmp_path / "my_losses.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(registry._CLASSES)

    def forget() -> None:
        registry._CLASSES.clear()
        registry._CLASSES.update(before)
        sys.modules.pop("my_losses", None)

    yield forget
    forget()


def test_a_loss_of_your_own_is_imported_when_asked_to(
    tmp_path: Path, decide: Decide, strangers: Callable[[], None]
) -> None:
    import_module("my_losses")
    run = train(tmp_path, "mine", 3)
    strangers()
    ask = [run, *asking(), "--runs-dir", str(tmp_path / "runs"), "--json"]
    code, _, err = decide(*ask)
    assert code == 2
    assert "there is no loss kind 'mine'" in err
    code, out, err = decide(*ask, "--import", "my_losses")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 2


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from nnx_jax.decide import parser; parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"jax", "flax", "numpy", "pydantic", "yaml"} & set(done.stdout.split())


def test_questions_of_this_file_are_questions() -> None:
    assert [Question.from_yaml(text).kind for text in QUESTIONS.values()] == ["choice", "score", "boolean"]
