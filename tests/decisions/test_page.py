"""docs/typed-decisions.md says what is so: its question loads, its options exist, its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nnx_jax import decisions
from nnx_jax.decide import parser
from nnx_jax.decisions import Question

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "typed-decisions.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```yaml question\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_question_files_load() -> None:
    assert [Question.from_yaml(text).option_ids for text in FILES] == [tuple("0123456789")]
    assert Question.from_yaml(FILES[0]).digest()[:16] in PAGE


def test_command_options_exist() -> None:
    known = set(parser()._option_string_actions)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) == known - {"-h", "--help"}


@pytest.mark.parametrize("name", decisions.__all__)
def test_every_public_name_is_mentioned(name: str) -> None:
    assert re.search(rf"\b{name}\b", PAGE)
