"""Strict YAML and JSON: documented values, typed refusals with a place, hostile input in well under a second."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nnx_jax.core import codec
from nnx_jax.core.codec import canonical_json, dump_json, dump_yaml, parse_json, parse_yaml, parse_yaml_with_lines
from nnx_jax.core.durable import durable_json, durable_yaml
from nnx_jax.core.errors import ConfigError, UnsafePathError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("5e-5", 5e-05),
        ("-1e-3", -0.001),
        ("1e3", 1000.0),
        ("1.0e-3", 0.001),
        ("1e-08", 1e-08),
        ("1E5", 100000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("+.5e+1", 5.0),
        ("0", 0),
        ("-0", 0),
        ("+7", 7),
        ("0x1F", 31),
        ("0o17", 15),
        ("340282366920938463463374607431768211455", 2**128 - 1),  # the state of a 128-bit generator fits
    ],
)
def test_numbers_follow_yaml_1_2(text: str, value: float) -> None:
    """case:J01: an exponent without a dot is a float, not text; integers and floats keep their type."""
    parsed = parse_yaml(f"lr: {text}")["lr"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "yes",
        "on",
        "off",
        "No",
        "None",
        "nan",
        "inf",
        "1_000",
        "1:30",
        "0b11",
        "2001-01-01",
        "=",
        "1e",
        "-",
        "0x",
        "e5",
    ]
    + ["'1e-3'", '"true"', "'null'", "tRUE"],
)
def test_everything_else_is_text(text: str) -> None:
    """YAML 1.1 reads many of these as booleans, dates or base-60 numbers; here they stay what was written."""
    if text == "-":
        assert parse_yaml("a: '-'") == {"a": "-"}
    else:
        assert parse_yaml(f"a: {text}") == {"a": text.strip("'\"")}


@pytest.mark.parametrize(("text", "value"), [("~", None), ("null", None), ("", None), ("TRUE", True), ("false", False)])
def test_null_and_booleans(text: str, value: object) -> None:
    assert parse_yaml(f"a: {text}")["a"] is value


def test_empty_documents_are_none() -> None:
    assert parse_yaml("") is None
    assert parse_yaml("# only a comment\n") is None
    assert parse_yaml("--- \n...\n") is None
    assert parse_yaml("%YAML 1.2\n---\na: 1\n") == {"a": 1}


REFUSED = {
    "python tag": ("a: 1\nb: !!python/object/apply:os.system [echo]\n", 2, "b: has the tag"),
    "plain tag": ("a: !!str 1\n", 1, "a: has the tag"),
    "local tag": ("a: !x 1\n", 1, "a: has the tag"),
    "bare tag": ("a: ! 1\n", 1, "a: has the tag"),
    "tag on key": ("!!str a: 1\n", 1, "has the tag"),
    "duplicate": ("optim:\n  lr: 1\n  wd: 0\n  lr: 2\n", 4, r"optim: has the key 'lr' twice \(first in line 2\)"),
    "duplicate by quotes": ("a: 1\n'a': 2\n", 2, "has the key 'a' twice"),
    "duplicate in flow": ("x: {a: 1, a: 1}\n", 1, "x: has the key 'a' twice"),
    "anchor": ("a: &x [1]\n", 1, "a: has the anchor &x"),
    "anchor on key": ("&x a: 1\n", 1, "has the anchor &x"),
    "alias": ("b: *x\n", 1, r"b: has the alias \*x|undefined alias"),
    "alias as key": ("*x : 1\n", 1, r"has the alias \*x|undefined alias"),
    "merge key": ("a:\n  <<: {b: 1}\n", 2, "a: has a merge key"),
    "octal look-alike": ("a: 012\n", 1, "a: is 012, which YAML 1.1 and 1.2 read differently; write 12, 0o12 or"),
    "leading zero": ("a: 00\n", 1, "a: is 00, which"),
    "nan": ("a: .nan\n", 1, "a: is '.nan'; numbers must be finite"),
    "infinity": ("a: [1, -.inf]\n", 1, r"a\[1\]: is '-.inf'; numbers must be finite"),
    "overflow": ("a: 1e999\n", 1, "a: is '1e999', too large for a float"),
    "huge integer": ("a: " + "9" * 5000 + "\n", 1, "a: is an integer of 5000 digits"),
    "huge hex": ("a: 0x" + "f" * 5000 + "\n", 1, "a: is an integer of 5002 digits"),
    "number as key": ("a: {1: x}\n", 1, "a: has the key '1', which is the int 1; keys are text"),
    "boolean as key": ("true: x\n", 1, "has the key 'true', which is the bool True"),
    "null as key": ("a:\n  ~: x\n", 2, "a: has the key '~', which is empty or null"),
    "list as key": ("? [a]\n: 1\n", 1, "has a list or mapping as a key"),
    "two documents": ("a: 1\n---\nb: 2\n", 2, "more than one document"),
    "YAML 1.1 asked for": ("%YAML 1.1\n---\na: no\n", 1, "%YAML directive"),
    "tag directive": ("%TAG ! tag:x,2000:\n---\na: 1\n", 1, "%TAG"),
    "byte order mark": ("\ufeffa: 1\n", 1, "a byte order mark"),
    "NUL": ("a: 1\nb: \0\n", 2, "a NUL byte"),
    "control character": ("a: 1\nb: \x07\n", 2, "a character YAML does not allow"),
    "surrogate": ("a: 1\nb: \ud800\n", 2, "half of a surrogate pair"),
    "escaped surrogate": ('a: "\\ud800"\n', 1, "is not valid YAML"),
    "open bracket": ("a: [1\n", None, "is not valid YAML"),
    "tab": ("a:\n\t- 1\n", 2, "is not valid YAML"),
    "two colons": ("a: b: c\n", 1, "is not valid YAML"),
    "deep": ("x: " + "[" * 33 + "]" * 33, 1, "is nested deeper than 32 levels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_yaml_names_file_line_and_path(name: str) -> None:
    """case:J02 (a key given twice) and every other refusal of H1, with the place to look at."""
    text, line, match = REFUSED[name]
    with pytest.raises(ConfigError, match=match) as caught:
        parse_yaml(text, source="cfg.yaml")
    assert caught.value.file == "cfg.yaml"
    if line is not None:
        assert caught.value.line == line
        assert f"cfg.yaml:{line}" in str(caught.value)


def test_error_carries_the_path() -> None:
    with pytest.raises(ConfigError, match=r"cfg.yaml:3: a.b\[1\].c: is '.inf'") as caught:
        parse_yaml("a:\n  b: [1,\n    {c: .inf}]\n", source="cfg.yaml")
    assert caught.value.path == "a.b[1].c"


def test_not_utf8() -> None:
    with pytest.raises(ConfigError, match="f.yaml:2: byte 8 is not UTF-8"):
        parse_yaml(b"a: 1\nb: \xff\n", source="f.yaml")
    with pytest.raises(ConfigError, match="not UTF-8"):
        parse_yaml("a: 1".encode("utf-16"))


def test_depth_32_is_still_read() -> None:
    value = parse_yaml("[" * 32 + "]" * 32)
    for _ in range(31):
        (value,) = value
    assert value == []


HOSTILE = {
    "open lists": "[" * 10**6,
    "open maps": "{" * 10**6,
    "4000 lists": "[" * 4000 + "]" * 4000,
    "maps in lists": "[{" * 4 * 10**5,
    "maps": "{a: " * 2 * 10**5,
    "indented": "".join(" " * i + "a:\n" for i in range(1300)),
    "dashes": "- " * 5 * 10**5,
    "questions": "? " * 5 * 10**5,
    "colons": ": " * 5 * 10**5,
    "ampersands": "&" * 10**6,
    "exclamation marks": "!" * 10**6,
    "tabs": "\t" * 10**6,
    "quotes": '"' * 10**6,
    "many values": "[" + "1," * 4 * 10**5 + "]",
    "many keys": "".join(f"k{i}: 1\n" for i in range(60000)),
    "alias bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
    "too long": "a" * (2**20 + 1),
    "50 MB": "a: 1\n" * 10**7,
    "long key": "k" * 10**6 + ": [" * 40,
    "many digits": "a: " + "9" * 10**6,
    "float digits": "a: " + "9" * 10**6 + "e-1x, .inf",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_refused_at_once(name: str) -> None:
    """H1: PyYAML alone needs 3.7 s for 8 KB of nesting and loads the alias bomb."""
    start = time.process_time()
    if name == "float digits":
        assert isinstance(parse_yaml(HOSTILE[name])["a"], str)
    else:
        with pytest.raises(ConfigError, match="cfg.yaml") as caught:
            parse_yaml(HOSTILE[name], source="cfg.yaml")
        assert len(str(caught.value)) < 5000
    assert time.process_time() - start < 1.0


def test_large_harmless_documents_are_read_quickly() -> None:
    start = time.process_time()
    assert parse_yaml("\n" * 10**6) is None
    assert len(parse_yaml("a: " + "b " * 490_000)["a"]) == 979_999
    assert time.process_time() - start < 1.0


def test_lines_of_every_value() -> None:
    value, lines = parse_yaml_with_lines("a: 1\nb:\n  - x\n  - y: 2\n\nc:\n    d\n")
    assert value == {"a": 1, "b": ["x", {"y": 2}], "c": "d"}
    assert lines == {(): 1, ("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "y"): 4, ("c",): 6}


def test_load_yaml_with_lines(tmp_path: Path) -> None:
    file = tmp_path / "cfg.yaml"
    file.write_text("lr: 1e-3\nlr: 2\n")
    with pytest.raises(ConfigError, match=rf"{file}:2: has the key 'lr' twice"):
        codec.load_yaml_with_lines(file)
    file.write_text("lr: 1e-3\n")
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    found = codec.load_yaml_with_lines(file)
    assert codec.load_yaml_with_lines(link, follow=True) == found == ({"lr": 0.001}, {(): 1, ("lr",): 1})
    with pytest.raises(UnsafePathError, match="link.yaml is a symbolic link"):
        codec.load_yaml_with_lines(link)
    with pytest.raises(FileNotFoundError, match="missing.yaml"):
        codec.load_yaml_with_lines(tmp_path / "missing.yaml")


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40) + 1, 10**40 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal values of equal types (1 is not 1.0, -0.0 is not 0.0)."""
    return repr(a) == repr(b)


@given(plain)
@example(
    {"<<": "<<", "no": "no", "=": "=", "012": "1_000", "~": "~", "": "", ".inf": ".NaN", "1e3": "1E5", "0o7": "0x1"}
)
@example(
    [
        "2001-01-01",
        "1:30",
        "null",
        "- a",
        "# b",
        "a: b",
        "\n",
        " a",
        "a ",
        "\x85",
        "\ufeff",
        "\x00",
        "é",
        "😀",
        "---",
        "...",
    ]
)
@example([-0.0, 1e22, 1e-7, 5e-324, 1.0, 10**39, -1])
@example("text at the top")
@settings(max_examples=150, deadline=None)
def test_yaml_round_trip(value: Any) -> None:
    """What is written is read back equal, with the same types."""
    text = dump_yaml(value)
    assert same(parse_yaml(text), value)
    assert dump_yaml(parse_yaml(text)) == text


@given(st.one_of(st.text("no1e-+.x0:_~fals'\" #&*!,[]{}|>%@`\n\t", max_size=8), st.text(max_size=6)))
@settings(max_examples=200, deadline=None)
def test_dumped_text_is_text_for_other_readers_too(text: str) -> None:
    """YAML 1.1 tools (PyYAML) read the written text as the same text."""
    assert yaml.safe_load(dump_yaml({"k": text})) == {"k": text}


@given(st.binary(max_size=200))
@example(b"\xef\xbb\xbfa: 1")
@example(b"%YAML 1.2\n%YAML 1.2\n---\n")
@example(b"\xff\xfea\x00")
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_only_the_typed_error(data: bytes) -> None:
    """Q10 for both formats."""
    for parse in (parse_yaml, parse_json):
        with contextlib.suppress(ConfigError):
            parse(data)


@given(st.text("[]{}:,-?&*!|>'\"%@`#~<=. \n\t01eaxn\\u", max_size=60))
@settings(max_examples=300, deadline=None)
def test_random_syntax_raises_only_the_typed_error(text: str) -> None:
    """Q10 with characters that mean something."""
    for parse in (parse_yaml, parse_json):
        try:
            value = parse(text)
        except ConfigError:
            continue
        canonical_json(value)  # whatever is accepted is a plain, finite value


def strict_reference(text: str) -> Any:
    """Parse with the standard library, refusing what our reader refuses by rule."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in items}) != len(items):
            raise ValueError("duplicate")
        return dict(items)

    def constant(name: str) -> Any:
        raise ValueError(name)

    return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)


@given(st.text('{}[]:,"-+.0123456789eE aflnrstu\\\n', max_size=40))
@settings(max_examples=300, deadline=None)
def test_json_accepts_what_the_standard_library_accepts(text: str) -> None:
    """Same language and same values; ours only adds limits and places."""
    try:
        expected = strict_reference(text)
        canonical_json(expected)
    except ValueError:
        with pytest.raises(ConfigError, match="<text>:"):
            parse_json(text)
    else:
        assert same(parse_json(text), expected)


@given(plain)
@settings(max_examples=150, deadline=None)
def test_json_round_trip(value: Any) -> None:
    assert same(parse_json(dump_json(value)), value)
    canonical = canonical_json(value)
    assert canonical_json(parse_json(canonical)) == canonical


@pytest.mark.parametrize(
    ("text", "line", "match"),
    [
        ('{"a": 1,\n "a": 2}', 2, "has the key 'a' twice"),
        ('{"x": [1,\n{"b": 1, "b": 1}]}', 2, r"x\[1\]: has the key 'b' twice"),
        ("[1, NaN]", 1, r"\[1\]: is not valid JSON: 'NaN'; numbers must be finite"),
        ("-Infinity", 1, "numbers must be finite"),
        ("1e999", 1, "too large for a float"),
        ("9" * 5000, 1, "integer of 5000 digits"),
        ("[" * 33 + "]" * 33, 1, "nested deeper than 32"),
        ("[" * 10**6, 1, "nested deeper than 32"),
        ('{"a":' * 10**5, 1, "nested deeper than 32"),
        ("", 1, "ends too early"),
        ("\n\n[1,]", 3, "unexpected ']'"),
        ("{1: 2}", 1, "a key must be text in double quotes"),
        ("{'a': 2}", 1, "a key must be text in double quotes"),
        ('{"a" 1}', 1, "expected ':', found '1}'"),
        ('{"a": 1', 1, "expected ',', found the end"),
        ("012", 1, "text after the value"),
        ("[1] [2]", 1, "text after the value"),
        ("True", 1, "'True'"),
        ('"abc', 1, "Unterminated string"),
        ('"\\ud800"', 1, "half of a surrogate pair"),
        ('"a\tb"', 1, "Invalid control character"),
        ("\ufeff{}", 1, "a byte order mark"),
        ("1\n\0", 2, "a NUL byte"),
        ("[" + "1," * 300_000 + "1]", 1, "more than 200000 values"),
    ],
)
def test_refused_json(text: str, line: int, match: str) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError, match=match) as caught:
        parse_json(text, source="LAST")
    assert (caught.value.file, caught.value.line) == ("LAST", line)
    assert time.process_time() - start < 3.0


def test_json_file(tmp_path: Path) -> None:
    file = tmp_path / "LAST"
    file.write_bytes(b'{"epoch": 3, "rate": 0.5}')
    assert codec.load_json(file) == {"epoch": 3, "rate": 0.5}
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=f"{file}:1: is not valid JSON: ends too early"):
        codec.load_json(file)
    file.write_bytes(b"1" * 30)
    with pytest.raises(OSError, match="more than the limit of 20"):
        codec.load_json(file, limits=codec.Limits(20, 100))
    with pytest.raises(ConfigError, match="30 bytes long; the limit is 20"):
        parse_json(file.read_bytes(), limits=codec.Limits(20, 100))


def test_canonical_json_is_one_text() -> None:
    """Sorted keys, no spaces, tuples as lists, UTF-8 as it is; floats keep their point."""
    value = {"b": (1, 1.0, -0.0, 1e-7), "a": {"é": None, "Z": True}}
    assert canonical_json(value) == '{"a":{"Z":true,"é":null},"b":[1,1.0,-0.0,1e-07]}'.encode()


class Text(str):
    """A subclass that a lenient writer would let through."""


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({1: "x"}, "has the key 1; keys must be text"),
        ({"a": {None: 1}}, "a: has the key None"),
        ({"a": [float("nan")]}, r"a\[0\]: is nan; numbers must be finite"),
        ([float("-inf")], r"\[0\]: is -inf"),
        ({"a": {1, 2}}, "a: is set"),
        ({"a": b"x"}, "a: is bytes"),
        ({"a": Text("x")}, "a: is Text"),
        ({"a": 10**40}, "a: is an integer of more than 40 digits"),
        ({"a": "\ud800"}, "a: has half of a surrogate pair"),
        ({"\udfff": 1}, "keys must be text"),
    ],
)
def test_only_plain_values_are_written(value: Any, match: str) -> None:
    for write in (canonical_json, dump_json, dump_yaml):
        with pytest.raises(ConfigError, match=match):
            write(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested deeper than 32 levels"):
        dump_yaml(loop)


# Files -----------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(value=plain, values=st.integers(1, 12), size=st.integers(2, 40))
def test_what_is_written_into_a_file_is_what_its_reader_takes(value: Any, values: int, size: int) -> None:
    """The writer refuses exactly what the reader with the same limits would refuse."""
    limits = codec.Limits(size, values)
    text = canonical_json(value) + b"\n"
    try:
        written = durable_json(value, source="x.json", limits=limits)
    except ConfigError as error:
        message = str(error)
    else:
        assert written == text
        assert parse_json(written, limits=limits) == value
        return
    assert message.startswith("config: x.json: ")
    with pytest.raises(ConfigError, match="bytes long; the limit is|has more than"):
        parse_json(text, limits=limits)


def test_limits_of_files_are_those_of_the_readers() -> None:
    """At the limit both work, one value more and both refuse; a key counts in YAML and not in JSON."""
    small = codec.Limits(1000, 3)
    assert parse_json(durable_json({"a": 1, "b": 2}, source="f", limits=small, people=True), limits=small)
    with pytest.raises(ConfigError, match="f: has 4 values; at most 3 are read back"):
        durable_json([1, 2, 3], source="f", limits=small)
    with pytest.raises(ConfigError, match="f: would be 27 bytes long; at most 26 are read back"):
        durable_json(["x" * 22], source="f", limits=codec.Limits(26, 3))
    mapping = {f"k{number}": number for number in range(4999)}
    assert parse_yaml(durable_yaml({**mapping}, source="f")) == mapping
    with pytest.raises(ConfigError, match="f: has 10001 values; at most 10000 are read back"):
        durable_yaml({**mapping, "last": 0}, source="f")
    with pytest.raises(ConfigError, match="has more than 10000 values"):
        parse_yaml(dump_yaml({**mapping, "last": 0}))


def test_hashes_and_output_have_no_limit() -> None:
    assert len(canonical_json(list(range(250_000)))) > 10**6
