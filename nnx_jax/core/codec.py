"""Every parsed byte: strict YAML 1.2 and strict JSON, small enough to read, impossible to run code with.

What YAML means here (the YAML 1.2 core schema, narrowed):
    null      null Null NULL ~ and nothing
    boolean   true True TRUE false False FALSE          (yes, no, on, off are text)
    integer   12 -3 +4 0x1F 0o17                        (012 is refused: 10 for YAML 1.1, 12 for YAML 1.2)
    float     1e-3 1E5 .5 1. -2.5e+8                    (.nan and .inf are refused, and so is 1e999)
    text      everything else; keys are always text
Refused: duplicate keys, keys that are not text, tags, anchors, aliases, merge keys, several documents, BOM, NUL,
non-UTF-8, more than 1 MB, depth above 32, more than 10 000 nodes. Each refusal is a ConfigError with file, line, path.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import decoder
from typing import Any, NoReturn

import yaml

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.fsio import read_bytes


@dataclass(frozen=True)
class Limits:
    """What is read of one file, and therefore all that may be written into it: its size and how many values it holds.

    A list or mapping counts as one value beside what is in it; a key counts in YAML only.
    """

    bytes: int
    values: int


YAML_LIMITS = Limits(2**20, 10_000)
JSON_LIMITS = Limits(16 * 2**20, 200_000)
MAX_DEPTH = 32
MAX_DIGITS = 40  # holds the 128-bit states of random generators; int() of more digits costs quadratic time

Key = str | int
KeyPath = tuple[Key, ...]

_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_TRUES = frozenset(("true", "True", "TRUE"))
_FALSES = frozenset(("false", "False", "FALSE"))
_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_NON_FINITE = re.compile(r"[-+]?(?:\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN")
_BREAK = re.compile("[\n\r\t\x85\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # only its parser is used, never its constructors


def dotted(path: KeyPath) -> str:
    """Write a key path for people: `("a", "b", 0)` is `a.b[0]`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key:.80}" if text else f"{key:.80}"
    return text


def _text_of(text: str | bytes, source: str, limit: int) -> str:
    """Decode strictly and apply the size cap; both formats start here."""
    size = len(text)
    if size > limit:
        raise ConfigError(f"is {size} bytes long; the limit is {limit}", file=source)
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            line = text[: error.start].count(b"\n") + 1
            message = f"byte {error.start} is not UTF-8; save the file as UTF-8"
            raise ConfigError(message, file=source, line=line) from None
    for pattern, what in (("\ufeff", "a byte order mark"), ("\x00", "a NUL byte")):
        if (at := text.find(pattern)) >= 0 and (pattern == "\x00" or at == 0):
            raise ConfigError(f"contains {what}; remove it", file=source, line=text.count("\n", 0, at) + 1)
    if found := _SURROGATE.search(text):
        at = found.start()
        raise ConfigError(f"character {at} is half of a surrogate pair", file=source, line=text.count("\n", 0, at) + 1)
    return text


# YAML ------------------------------------------------------------------------------------------------------------


def parse_yaml(text: str | bytes, *, source: str = "<text>") -> Any:
    """Return the plain value of one YAML document (None when it is empty); see the file's head for the rules."""
    return parse_yaml_with_lines(text, source=source)[0]


def parse_yaml_with_lines(text: str | bytes, *, source: str = "<text>") -> tuple[Any, dict[KeyPath, int]]:
    """Return (value, {key path: 1-based line}), so that later checks can point at the line of a value."""
    return _YamlReader(_text_of(text, source, YAML_LIMITS.bytes), source).document()


def load_yaml_with_lines(path: str | os.PathLike[str], *, follow: bool = False) -> tuple[Any, dict[KeyPath, int]]:
    """Read and parse a YAML file like `parse_yaml_with_lines`.

    `follow` allows a link (a file the user names). OSError when it cannot be read.
    """
    return parse_yaml_with_lines(read_bytes(path, YAML_LIMITS.bytes, follow=follow), source=os.fspath(path))


class _YamlReader:
    """Builds plain values from the parser's events, one event at a time, so that a limit stops the parse at once."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.lines: dict[KeyPath, int] = {}
        self.nodes = 0
        self.path: KeyPath = ()
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=_Loader))

    def fail(self, message: str, event: Any = None) -> NoReturn:
        line = event.start_mark.line + 1 if event is not None else None
        raise ConfigError(message, path=dotted(self.path), file=self.source, line=line)

    def next(self) -> Any:
        try:
            return next(self.events)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            message = " ".join(part for part in (error.context, error.problem) if part)
            self.path = ()
            raise ConfigError(
                f"is not valid YAML: {message}", file=self.source, line=mark.line + 1 if mark else None
            ) from None
        except yaml.reader.ReaderError as error:
            line = self.text.encode()[: error.position].count(b"\n") + 1
            message = f"holds a character YAML does not allow: {error.reason}"
            raise ConfigError(message, file=self.source, line=line) from None
        except StopIteration:
            self.fail("ends too early")

    def document(self) -> tuple[Any, dict[KeyPath, int]]:
        self.next()  # stream start
        start = self.next()
        if isinstance(start, yaml.StreamEndEvent):
            return None, {}
        if start.tags or start.version not in (None, (1, 2)):
            self.fail("has a %TAG or %YAML directive; remove it (YAML 1.2 is read)", start)
        value = self.value(self.next(), 1)
        self.next()  # document end
        after = self.next()
        if not isinstance(after, yaml.StreamEndEvent):
            self.fail("holds more than one document; keep one, without further '---' lines", after)
        return value, self.lines

    def value(self, event: Any, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > YAML_LIMITS.values:
            self.fail(f"has more than {YAML_LIMITS.values} values", event)
        if depth > MAX_DEPTH:
            self.fail(f"is nested deeper than {MAX_DEPTH} levels", event)
        if isinstance(event, yaml.AliasEvent):
            self.fail(f"has the alias *{event.anchor:.80}; write the value out", event)
        if event.anchor is not None:
            self.fail(f"has the anchor &{event.anchor:.80}; write the value out where it is needed", event)
        if event.tag is not None:
            self.fail(f"has the tag {event.tag!r:.80}; tags are not read, use 'kind:' for types", event)
        self.lines.setdefault(self.path, event.start_mark.line + 1)
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style not in (None, "") else self.plain(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(depth)
        return self.mapping(depth)

    def sequence(self, depth: int) -> list[Any]:
        items: list[Any] = []
        outer = self.path
        while not isinstance(event := self.next(), yaml.SequenceEndEvent):
            self.path = (*outer, len(items))
            items.append(self.value(event, depth + 1))
        self.path = outer
        return items

    def mapping(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        outer = self.path
        while not isinstance(event := self.next(), yaml.MappingEndEvent):
            key = self.key(event, depth)
            if key in items:
                self.fail(f"has the key {key!r:.80} twice (first in line {self.lines[(*outer, key)]}); keep one", event)
            self.path = (*outer, key)
            self.lines[self.path] = event.start_mark.line + 1
            items[key] = self.value(self.next(), depth + 1)
            self.path = outer
        return items

    def key(self, event: Any, depth: int) -> str:
        if isinstance(event, yaml.AliasEvent):
            self.value(event, depth)  # refuses it
        if not isinstance(event, yaml.ScalarEvent):
            self.fail("has a list or mapping as a key; keys are text", event)
        if event.style in (None, "") and event.value == "<<":
            self.fail("has a merge key '<<'; write the keys out", event)
        before = self.lines.get(self.path)
        key = self.value(event, depth + 1)
        if before is not None:
            self.lines[self.path] = before
        if not isinstance(key, str):
            self.fail(
                f"has the key {event.value!r:.80}, which is {_named(key)}; keys are text, put it in quotes", event
            )
        return key

    def plain(self, event: Any) -> Any:
        """Resolve an unquoted scalar by the YAML 1.2 core schema."""
        text = event.value
        if text in _NULLS:
            return None
        if text in _TRUES:
            return True
        if text in _FALSES:
            return False
        if _INT.fullmatch(text):
            return self.integer(text, event)
        if _FLOAT.fullmatch(text):
            number = float(text)
            if math.isinf(number):
                self.fail(f"is {text!r:.80}, too large for a float", event)
            return number
        if _NON_FINITE.fullmatch(text):
            self.fail(f"is {text!r}; numbers must be finite, leave the value out or write a number", event)
        return text

    def integer(self, text: str, event: Any) -> int:
        digits = text.lstrip("+-")
        if len(digits) > MAX_DIGITS:
            self.fail(f"is an integer of {len(digits)} digits; at most {MAX_DIGITS} are read", event)
        if digits[:2] in ("0x", "0o"):
            return int(digits, 0)
        if len(digits) > 1 and digits[0] == "0":
            self.fail(
                f"is {text}, which YAML 1.1 and 1.2 read differently; write {int(text)}, 0o{digits.lstrip('0') or '0'} "
                "or put it in quotes",
                event,
            )
        return int(text)


def _named(value: Any) -> str:
    return "empty or null" if value is None else f"the {type(value).__name__} {value!r:.80}"


class _YamlDumper(yaml.SafeDumper):
    """Quotes every text that any YAML version would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in (("int", _INT, "-+0123456789"), ("float", _FLOAT, "-+0123456789.")):
    _anchored = re.compile(f"(?:{_pattern.pattern})$", re.ASCII)
    _YamlDumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _anchored, list(_first))


def _represent_text(dumper: _YamlDumper, text: str) -> yaml.ScalarNode:
    """Escape line breaks of every kind: PyYAML's other quotes lose NEL and the Unicode separators."""
    style = '"' if _BREAK.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_YamlDumper.add_representer(str, _represent_text)


def dump_yaml(obj: Any) -> str:
    """Write a plain value as block YAML that `parse_yaml` reads back equal; keys keep their order."""
    return yaml.dump(_plain(obj), Dumper=_YamlDumper, sort_keys=False, allow_unicode=True, width=2**20)


# JSON ------------------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", re.ASCII)
_WORDS = {"true": True, "false": False, "null": None}
_WORD = re.compile(r"-?[A-Za-z]+")
_scan_string: Any = decoder.scanstring  # type: ignore[attr-defined]  # the quick string reader of the standard library


def parse_json(text: str | bytes, *, source: str = "<text>", limits: Limits = JSON_LIMITS) -> Any:
    """Return the value of one JSON text; duplicate keys, NaN, out-of-range numbers, depth above 32 are ConfigErrors."""
    return _JsonReader(_text_of(text, source, limits.bytes), source, limits).document()


def load_json(path: str | os.PathLike[str], *, limits: Limits = JSON_LIMITS) -> Any:
    """Read and parse a JSON file; links are never followed. OSError when it cannot be read."""
    return parse_json(read_bytes(path, limits.bytes), source=os.fspath(path), limits=limits)


def parse_json_lines(data: bytes, *, source: str = "<text>") -> list[Any]:
    """Return the value of every line of a JSON Lines text, as strict as `parse_json` and several times as fast.

    The text may be of any size; a line is limited like a whole JSON text, and an error names the line within the file.
    """
    values = []
    lines = _text_of(data, source, len(data)).split("\n")
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        try:
            if len(line) > JSON_LIMITS.values or line.count("{") + line.count("[") > MAX_DEPTH or "\\u" in line:
                raise ValueError  # cannot be judged here
            values.append(_quick_decode(line))
        except ValueError:
            reader = _JsonReader("\n" * (number - 1) + line, source, JSON_LIMITS)
            values.append(reader.document())
    return values


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _short(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError
    return int(text)


_quick_decode = json.JSONDecoder(
    object_pairs_hook=_distinct, parse_float=_finite, parse_int=_short, parse_constant=_finite
).decode


class _JsonReader:
    """A small recursive reader: the standard library's says neither line nor path of a duplicate key."""

    def __init__(self, text: str, source: str, limits: Limits) -> None:
        self.text, self.source, self.at, self.limits = text, source, 0, limits
        self.nodes = 0
        self.path: KeyPath = ()

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        line = self.text.count("\n", 0, self.at if at is None else at) + 1
        raise ConfigError(message, path=dotted(self.path), file=self.source, line=line)

    def document(self) -> Any:
        value = self.value(1)
        if self.peek():
            self.fail("is not valid JSON: text after the value")
        return value

    def peek(self) -> str:
        """Skip white space and return the next character, `""` at the end."""
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # the pattern matches nothing too
        return self.text[self.at : self.at + 1]

    def expect(self, char: str) -> None:
        if self.peek() != char:
            found = repr(self.text[self.at : self.at + 20]) if self.at < len(self.text) else "the end"
            self.fail(f"is not valid JSON: expected {char!r}, found {found}")
        self.at += 1

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self.fail(f"is nested deeper than {MAX_DEPTH} levels")
        self.nodes += 1
        if self.nodes > self.limits.values:
            self.fail(f"has more than {self.limits.values} values")
        char = self.peek()
        if char == "{":
            return self.mapping(depth)
        if char == "[":
            return self.sequence(depth)
        if char == '"':
            return self.string()
        if word := _WORD.match(self.text, self.at):
            return self.word(word[0])
        if number := _NUMBER.match(self.text, self.at):
            self.at = number.end()
            return self.number(number)
        self.fail(f"is not valid JSON: {'unexpected ' + repr(char) if char else 'ends too early'}")

    def word(self, word: str) -> Any:
        if word not in _WORDS:
            finite = "; numbers must be finite" if word.lstrip("-") in ("NaN", "Infinity") else ""
            self.fail(f"is not valid JSON: {word!r:.40}{finite}")
        self.at += len(word)
        return _WORDS[word]

    def number(self, found: re.Match[str]) -> int | float:
        if found[1] is None and found[2] is None:
            if len(found[0]) > MAX_DIGITS + 1:
                self.fail(f"is an integer of {len(found[0])} digits; at most {MAX_DIGITS} are read")
            return int(found[0])
        number = float(found[0])
        if math.isinf(number):
            self.fail(f"is {found[0]!r:.80}, too large for a float")
        return number

    def string(self) -> str:
        start = self.at
        try:
            text, self.at = _scan_string(self.text, start + 1, True)
        except json.JSONDecodeError as error:
            self.fail(f"is not valid JSON: {error.msg}", min(error.pos, len(self.text)))
        if _SURROGATE.search(text):
            self.fail("has half of a surrogate pair in a text", start)
        return text

    def sequence(self, depth: int) -> list[Any]:
        items: list[Any] = []
        outer = self.path
        self.at += 1
        if self.peek() == "]":
            self.at += 1
            return items
        while True:
            self.path = (*outer, len(items))
            items.append(self.value(depth + 1))
            self.path = outer
            if self.peek() == "]":
                self.at += 1
                return items
            self.expect(",")

    def mapping(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        outer = self.path
        self.at += 1
        if self.peek() == "}":
            self.at += 1
            return items
        while True:
            if self.peek() != '"':
                self.fail("is not valid JSON: a key must be text in double quotes")
            start = self.at
            key = self.string()
            if key in items:
                self.fail(f"has the key {key!r:.80} twice; keep one", start)
            self.expect(":")
            self.path = (*outer, key)
            items[key] = self.value(depth + 1)
            self.path = outer
            if self.peek() == "}":
                self.at += 1
                return items
            self.expect(",")


def canonical_json(obj: Any) -> bytes:
    """Return the one UTF-8 JSON text of a plain value: sorted keys, no spaces, finite numbers, few escapes.

    Of any size, for hashes and output. A file that is read back is written with `durable.durable_json`.
    """
    text = json.dumps(_plain(obj), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def dump_json(obj: Any) -> str:
    """Write a plain value as JSON for people (two spaces, the keys in their order, a newline at the end)."""
    return json.dumps(_plain(obj), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(obj: Any, path: KeyPath = ()) -> Any:
    """Return a copy made of dict, list, str, int, float, bool, None only; everything else is a ConfigError.

    Strict on purpose: the standard writers turn `{1: x}` into `{"1": x}` and would give two values one hash.
    """
    if len(path) >= MAX_DEPTH:
        raise ConfigError(f"is nested deeper than {MAX_DEPTH} levels", path=dotted(path))
    if obj is None or type(obj) is bool:
        return obj
    if type(obj) is int:
        if abs(obj) >= 10**MAX_DIGITS:
            raise ConfigError(f"is an integer of more than {MAX_DIGITS} digits", path=dotted(path))
        return obj
    if type(obj) is float:
        if not math.isfinite(obj):
            raise ConfigError(f"is {obj!r}; numbers must be finite", path=dotted(path))
        return obj
    if type(obj) is str:
        if _SURROGATE.search(obj):
            raise ConfigError("has half of a surrogate pair in a text", path=dotted(path))
        return obj
    if isinstance(obj, Mapping):
        for key in obj:
            if type(key) is not str or _SURROGATE.search(key):
                raise ConfigError(f"has the key {key!r:.80}; keys must be text", path=dotted(path))
        return {key: _plain(value, (*path, key)) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_plain(value, (*path, index)) for index, value in enumerate(obj)]
    raise ConfigError(f"is {type(obj).__name__} {obj!r:.80}; only plain values can be written", path=dotted(path))
