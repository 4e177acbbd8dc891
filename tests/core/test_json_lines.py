"""JSON Lines: every line is read as strictly as a whole JSON text, and an error names the line within the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nnx_jax.core.codec import parse_json, parse_json_lines
from nnx_jax.core.errors import ConfigError

SYNTAX = st.text(st.sampled_from('0123456789.-+eE{}[]",:\\u/ntrulfasNIy \t\x01é\ud7ff'), max_size=16)


def outcome(read: Callable[[], Any]) -> tuple[str | None, str]:
    try:
        return repr(read()), ""
    except ConfigError as error:
        return None, str(error)


@given(line=SYNTAX)
@example('{"a":1,"a":2}')
@example("[NaN,1]")
@example("1e999")
@example("-" + "9" * 41)
@example("9" * 40)
@example('"\\ud800"')
@example('"\\u00e9"')
@example("[" * 33 + "]" * 33)
@example("\ufeff{}")
@example("-0.0")
@example("Infinity")
@example("[1] [2]")
@example('{"a":"\t"}')
def test_a_line_is_read_as_a_text(line: str) -> None:
    """The same value, of the same type, or the same error."""
    whole = outcome(lambda: parse_json(line.encode(), source="chunk"))
    if line:
        assert outcome(lambda: parse_json_lines(line.encode() + b"\n", source="chunk")[0]) == whole


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b'{"x":[1,{"b":1,"b":1}]}', r"chunk:3: x\[1\]: has the key 'b' twice"),
        (b"", "chunk:3: is not valid JSON: ends too early"),
        (b"[" + b"1," * 300_000 + b"1]", "chunk:3: .*more than 200000 values"),
        (b'"\xff"', "chunk:3: byte 7 is not UTF-8"),
    ],
)
def test_the_line_of_an_error(line: bytes, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_json_lines(b"{}\n[]\n" + line + b"\n{}\n", source="chunk")


def test_any_number_of_lines() -> None:
    """The limits of a text are those of a line: a file of many lines has no limit of its own."""
    data = b'{"a":1.5,"b":[null,true]}\n' * 70_000
    assert parse_json_lines(data) == [{"a": 1.5, "b": [None, True]}] * 70_000
    assert parse_json_lines(b"") == []
    assert parse_json_lines(b"1\n2") == [1, 2]
