"""Values whose names nobody knew when the history began: kept together as JSON text in one column."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nnx_jax.core.codec import dump_json, parse_json

EXTRA = "val_extra"
"""The column."""
_HEAD = "val_"


def pack(row: Mapping[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """The row with the validation values that have no column of their own put together under `EXTRA`."""
    others = {name for name in row if name not in columns or name == EXTRA}
    extra = {name.removeprefix(_HEAD): row[name] for name in others}
    if not extra or EXTRA not in columns:
        return dict(row)
    # Numbers that JSON has no word for are kept as text.
    plain = {n: v if v == v and abs(v) != float("inf") else repr(v) for n, v in sorted(extra.items())}
    return {name: value for name, value in row.items() if name not in others} | {EXTRA: dump_json(plain)}


def unpack(row: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `pack`."""
    if EXTRA not in row:
        return dict(row)
    rest = {name: value for name, value in row.items() if name != EXTRA}
    text = row[EXTRA]
    if text is None:
        return rest
    found = parse_json(text, source=EXTRA)
    return rest | {f"{_HEAD}{name}": float(value) for name, value in found.items()}
