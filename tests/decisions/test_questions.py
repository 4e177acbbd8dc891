"""Questions are exact: what is malformed is refused with its place, and every word and its order make the digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.decisions import (
    Boolean,
    Choice,
    DecisionError,
    InvalidDecisionRequest,
    Option,
    Question,
    Score,
    load_question,
    question_from_state,
)

from .toys import ANIMALS

FOX_CAT = [("x", "Fox"), ("y", "Cat")]
MALFORMED = [
    (lambda: Choice("Which?", []), "Choice.options: a question with 0 of them"),
    (lambda: Choice("Which?", FOX_CAT[:1]), "Choice.options: a question with 1 of them"),
    (lambda: Choice("Which?", [*FOX_CAT, ("x", "Dog")]), "Choice.options[2]: the id 'x' is given twice"),
    (
        lambda: Choice("Which?", [*FOX_CAT, ("z", " ")]),
        "options[2].description: got ' '; expected text that is not blank",
    ),
    (lambda: Choice("Which?", [*FOX_CAT, ("", "Dog")]), "options[2].id: got ''; expected text that is not blank"),
    (
        lambda: Choice("Which?", [*FOX_CAT, (" z", "Dog")]),
        "options[2].id: got ' z'; expected an id without white space",
    ),
    (lambda: Choice("\n", FOX_CAT), "Choice.prompt: got '\\n'; expected text that is not blank"),
    (lambda: Choice("Which?", ["Fox", "Cat"]), "options[0]: got 'Fox'; a bare text says no id; write the pair"),
    (lambda: Choice("Which?", "FC"), "Choice.options: got 'FC'; expected a list"),
    (lambda: Choice("Which?", {"Fox", "Cat"}), "expected a list"),  # a set has no order
    (
        lambda: Choice("Which?", [*FOX_CAT, (0, "Dog")]),
        "options[2].id: got 0 (int); expected text; in a file put it in quotes",
    ),
    (lambda: Choice("Which?", [*FOX_CAT, ("z", True)]), "options[2].description: got True (bool)"),
    (lambda: Choice("Which?", [*FOX_CAT, ("z", "Dog", "!")]), "options[2]: has 3 items"),
    (lambda: Choice("Which?", FOX_CAT, levels=3), "unknown key 'levels'"),
    (lambda: Choice("Which\ud800?", FOX_CAT), "half of a surrogate pair"),
    (lambda: Boolean(" "), "Boolean.prompt"),
    (lambda: Boolean(None), "Boolean.prompt: got None; expected text"),
    (lambda: Score("How bad?", {"low": "Low"}), "Score.levels: a question with 1 of them"),
    (lambda: Score("How bad?", [("a", "A"), ("a", "B")]), "Score.levels[1]: the id 'a' is given twice"),
    (lambda: Option("", "Fox"), "Option.id"),
]


@pytest.mark.parametrize("make, expected", MALFORMED)
def test_malformed_question_is_refused(make: Any, expected: str) -> None:
    """nnx:B173"""
    with pytest.raises(InvalidDecisionRequest) as caught:
        make()
    assert expected in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, DecisionError)
    assert str(caught.value).startswith("decision: ")


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(InvalidDecisionRequest, match="3 problems"):
        Choice(" ", [("", "Fox"), ("y", "")])


def test_pinned_digests() -> None:
    """The two vectors of the ledger, and the rule they follow: SHA-256 of compact sorted JSON."""
    assert ANIMALS.digest() == "e9fdf8def7b11a8cd82dfdafc7e79d40eedf5374187c8544f07fd97c466ed864"
    assert Boolean("Urgent?").digest() == "83054e9f0632edeff40e70aa73d81943ef62db382ae3e15053aa0e96e1eabdc1"
    asked = Score("Größe?", [("s", "klein"), ("l", "groß")])
    text = json.dumps(
        {"kind": "score", "levels": [["s", "klein"], ["l", "groß"]], "prompt": "Größe?"},
        ensure_ascii=False, separators=(",", ":"), sort_keys=True,
    )  # fmt: skip
    assert asked.digest() == hashlib.sha256(text.encode()).hexdigest()


OTHERS = [
    Choice("Which?", [("y", "Cat"), ("x", "Fox"), ("z", "Dog")]),
    Choice("Which?", [("x", "Fox"), ("y", "cat"), ("z", "Dog")]),
    Choice("Which?", [("x", "Fox"), ("c", "Cat"), ("z", "Dog")]),
    Choice("Which? ", [("x", "Fox"), ("y", "Cat"), ("z", "Dog")]),
    Score("Which?", [("x", "Fox"), ("y", "Cat"), ("z", "Dog")]),
    Boolean("Which?"),
]


@pytest.mark.parametrize("other", OTHERS, ids=["order", "description", "id", "prompt", "score", "boolean"])
def test_other_words_or_order_are_another_question(other: Question) -> None:
    """nnx:B174"""
    assert other.digest() != ANIMALS.digest()
    assert other != ANIMALS


def test_equal_words_are_the_same_question_however_written() -> None:
    pairs = Choice("Which?", (["x", "Fox"], ["y", "Cat"], ["z", "Dog"]))
    mapping = Choice("Which?", {"x": "Fox", "y": "Cat", "z": "Dog"})
    named = Choice(prompt="Which?", options=[Option("x", "Fox"), Option(id="y", description="Cat"), Option("z", "Dog")])
    family = Question(kind="choice", prompt="Which?", options=[("x", "Fox"), ("y", "Cat"), ("z", "Dog")])
    assert pairs == mapping == named == family == ANIMALS
    assert {question.digest() for question in (pairs, mapping, named, family)} == {ANIMALS.digest()}
    assert len({pairs, mapping, named, family}) == 1
    assert ANIMALS.option_ids == ("x", "y", "z")
    assert ANIMALS.replace(prompt="What?") == Choice("What?", ANIMALS.options)


def test_a_model_sees_no_id() -> None:
    """nnx:B184 The view is made of the prompt and the descriptions in order; ids occur nowhere in it."""
    ids = ("id-one", "id-two")
    for question, field in (
        (Choice("Which?", [(ids[0], "Fox"), (ids[1], "Cat")]), "options"),
        (Score("How bad?", [(ids[0], "Fox"), (ids[1], "Cat")]), "levels"),
    ):
        assert question.model_view() == {"prompt": question.prompt, field: ["Fox", "Cat"]}
        assert not any(known in json.dumps(question.model_view()) for known in ids)
    assert Boolean("Urgent?").model_view() == {"prompt": "Urgent?"}


def test_a_question_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="replace"):
        ANIMALS.prompt = "What?"
    with pytest.raises(dataclasses.FrozenInstanceError):
        ANIMALS.options[0].id = "q"


# -- as state and as a file -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [ANIMALS, Boolean("Urgent?"), Score("How bad?", {"l": "Low", "h": "High"})])
def test_state_and_yaml_come_back_equal(question: Question) -> None:
    for back in (
        question_from_state(question.state()),
        question_from_state(json.loads(json.dumps(question.state()))),
        type(question).from_state(question.state()),
        Question.from_yaml(question.to_yaml()),
    ):
        assert back == question
        assert type(back) is type(question)
        assert back.digest() == question.digest()


BAD_STATES = [
    ({"kind": "chioce", "prompt": "?"}, "kind: there is no question kind 'chioce'; did you mean 'choice'?"),
    ({"kind": ["choice"], "prompt": "?"}, "kind: there is no question kind ['choice']"),
    ({"prompt": "?"}, "kind: is required: one of boolean, choice, score"),
    ({"kind": "choice", "prompt": "?"}, "Choice.options: is required"),
    ({"kind": "boolean", "prompt": "?", "options": []}, "unknown key 'options'"),
    ({"kind": "boolean"}, "prompt: is required"),
    ([], "holds a list; expected a mapping"),
    (None, "holds nothing; expected a mapping"),
]


@pytest.mark.parametrize("state, expected", BAD_STATES)
def test_bad_state_is_refused(state: Any, expected: str) -> None:
    with pytest.raises(InvalidDecisionRequest) as caught:
        question_from_state(state)
    assert expected in str(caught.value)


BAD_FILES = [
    (
        "kind: choice\nprompt: Which?\noptions:\n- [x, Fox]\n- [1, Cat]\n",
        ":5: options[1].id: got 1 (int); expected text; in a file put it in quotes: '1'",
    ),
    ("kind: choice\nprompt: Which?\noptions: {x: Fox, x: Cat}\n", ":3: options: has the key 'x' twice"),
    ("kind: choice\nprompt: Which?\noptions: {0: Fox, 1: Cat}\n", "keys are text, put it in quotes"),
    ("kind: skore\nprompt: Which?\n", ":1: kind: there is no question kind 'skore'; did you mean 'score'?"),
    ("kind: boolean\nprompt: !!python/name:os.system x\n", "tags are not read"),
    ("", "holds nothing; expected a mapping"),
]


@pytest.mark.parametrize("text, expected", BAD_FILES)
def test_bad_file_names_file_line_and_path(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "q.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidDecisionRequest) as caught:
        load_question(path)
    assert f"{path}" in str(caught.value)
    assert expected in str(caught.value)
    assert caught.value.file == str(path)


def test_missing_file_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidDecisionRequest, match="cannot be read .No such file"):
        load_question(tmp_path / "no.yaml")


def test_a_question_inside_a_larger_file_is_a_wrong_value_there() -> None:
    """A request is a ConfigError too, so whoever handles wrong configuration handles it."""
    assert issubclass(InvalidDecisionRequest, ConfigError)


def test_it_stands_beside_training() -> None:
    """nnx:S03 Asking is a branch of its own: it loads no framework and no trainer, and no trainer knows of it."""
    code = "import sys, nnx_jax.decisions; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert not {"jax", "flax", "optax", "orbax", "torch"} & loaded
    assert not [name for name in loaded if name.split(".")[:2] in (["nnx_jax", "model"], ["nnx_jax", "fit"])]
    package = Path(__file__).resolve().parents[2] / "nnx_jax"
    knows = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if "nnx_jax.decisions" in path.read_text(encoding="utf-8")
    }
    assert knows - {"report"} == {"decisions", "decide.py"}
