"""The types of configuration fields: numbers with their bounds, names, patterns."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from nnx_jax.core.fsio import safe_name

MAX_COUNT = 2**31 - 1  # counters are int32 on the device
MAX_REAL = 3.4028234663852886e38  # larger numbers are infinite in float32

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./@-]{0,63}\Z")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("expected text that is not blank")
    if len(value) > 256 or not value.isprintable():
        raise ValueError("expected one line of at most 256 printable characters")
    return value


def _name(value: str) -> str:
    if not _NAME.match(value):
        raise ValueError("expected a letter, then letters, digits and _ . / @ - (at most 64 in all)")
    return value


def _identifier(value: str) -> str:
    if not _IDENTIFIER.match(value):
        raise ValueError("expected a letter, then letters, digits and _ (at most 64 in all)")
    return value


def _run_id(value: str) -> str:
    return safe_name(value, "run id")


def _tag(value: str) -> str:
    return safe_name(value, "checkpoint name")


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""1, 2, 3, ..."""
Size = Annotated[int, Field(ge=1, le=2**24)]
"""A layer width, a batch, a length: 1 and up."""
Whole = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""0, 1, 2, ..."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A random seed."""
Positive = Annotated[float, Field(gt=0, le=MAX_REAL)]
NonNegative = Annotated[float, Field(ge=0, le=MAX_REAL)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""0 <= value < 1."""
Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, AfterValidator(_name)]
Identifier = Annotated[str, AfterValidator(_identifier)]
"""A name that becomes part of other names: `generator`, `head_2`."""
RunId = Annotated[str, AfterValidator(_run_id)]
Tag = Annotated[str, AfterValidator(_tag)]
Patterns = Annotated[tuple[Text, ...], BeforeValidator(_listed), Field(min_length=1)]
"""Glob patterns over dotted parameter paths ("layers.*.kernel"); one may be written without a list."""

Activation = Literal["relu", "leaky_relu", "gelu", "silu", "elu", "tanh", "sigmoid", "softplus", "identity"]
Norm = Literal["batch", "layer"]
Precision = Literal["float32", "bfloat16", "float64"]
