"""An operator as a document, and back: JSON of one form, or YAML, naming registered classes by their kind.

A document holds `kind` and the fields that are not at their default, operators inside in the same way:

    kind: sequential
    operators:
    - kind: scale
      factor: 2.0
    - kind: loss.mse

Loading runs no code of the document's choice: a kind is looked up among the classes that this process has registered,
nothing is imported, and YAML tags are refused. So every load is a sandbox; `unregister` narrows it. The classes that
a document needs are registered by importing their modules first, or by `imports=`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import nnx_jax.core.function  # noqa: F401  # registers the kind `function`
from nnx_jax.core import codec
from nnx_jax.core.errors import ConfigError, OperatorTypeError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import allow_imports
from nnx_jax.core.spec import named


def to_document(operator: Operator) -> dict[str, Any]:
    """Return the plain values that `from_document` gives an equal operator of: its full kind, then its fields.

    An operator of a class that is not registered, or that is built in Python only, has a document too, for people to
    read; loading refuses it.

    Raises:
        OperatorTypeError: (a TypeError) for anything but an operator.
        ConfigError: when a field holds something a file cannot (an array, a function).
    """
    if not isinstance(operator, Operator):
        raise OperatorTypeError(f"got a {type(operator).__name__}; only an operator is written as a document")
    return named(operator, operator.state(environment=True))


def from_document(
    document: Any,
    *,
    source: str | None = None,
    lines: Mapping[tuple[Any, ...], int] | None = None,
    imports: Iterable[str] = (),
) -> Operator:
    """Return the operator that a document describes.

    Args:
        document: what `to_document` gives, or what a file holds.
        source: file to name in errors.
        lines: line of each path in that file.
        imports: modules to import first, for the classes and functions they register. The caller's word, never the
            document's: importing runs their code.

    Raises:
        UnregisteredError: (a ConfigError and a PermissionError) it names a class or function that is not registered.
        NotLoadableError: (a ConfigError and a RuntimeError) it names a class that is built in Python only.
        ConfigError: (a ValueError) it is no mapping, has no kind, or holds values that are not valid.
    """
    allow_imports(imports)
    if not isinstance(document, Mapping):
        raise ConfigError(f"expected a mapping with a kind, got a {type(document).__name__}", file=source)
    return Operator.from_state(document, source=source, lines=lines)


def dumps(operator: Operator) -> str:
    """Return the operator's document as JSON: sorted keys, no spaces, the same bytes every time.

    Errors as of `to_document`.
    """
    return codec.canonical_json(to_document(operator)).decode("utf-8")


def loads(text: str | bytes, *, source: str = "<text>", imports: Iterable[str] = ()) -> Operator:
    """Return the operator that `dumps` wrote; text that is not strict JSON, and the rest, as in `from_document`."""
    return from_document(codec.parse_json(text, source=source), source=source, imports=imports)


def to_yaml(operator: Operator) -> str:
    """Return the operator's document as YAML, the kind first and the fields as declared. Errors as of `to_document`."""
    return codec.dump_yaml(to_document(operator))


def from_yaml(text: str | bytes, *, source: str = "<text>", imports: Iterable[str] = ()) -> Operator:
    """Return the operator written in YAML; errors name the line. They are those of `from_document`."""
    document, lines = codec.parse_yaml_with_lines(text, source=source)
    return from_document(document, source=source, lines=lines, imports=imports)
