"""The bytes of files that are read back: what the readers of `codec` would refuse is refused before it is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nnx_jax.core.codec import (
    JSON_LIMITS,
    YAML_LIMITS,
    Key,
    KeyPath,
    Limits,
    canonical_json,
    dotted,
    dump_json,
    dump_yaml,
)
from nnx_jax.core.errors import ConfigError


def durable_json(obj: Any, *, source: str, limits: Limits = JSON_LIMITS, people: bool = False) -> bytes:
    """Return the bytes of a JSON file that `codec.parse_json` with the same limits reads back equal.

    Args:
        source: the file, for the message.
        people: written for people (see `codec.dump_json`), else canonical with a newline.

    Raises:
        ConfigError: larger than the limits, with the count, the limit and the part that is too large.
    """
    data = dump_json(obj).encode() if people else canonical_json(obj) + b"\n"
    _check_limits(obj, data, 0, source, limits)
    return data


def durable_yaml(obj: Any, *, source: str) -> bytes:
    """Return the bytes of a YAML file that `codec.parse_yaml` reads back equal; raises like `durable_json`."""
    data = dump_yaml(obj).encode()
    _check_limits(obj, data, 1, source, YAML_LIMITS)
    return data


def _check_limits(obj: Any, data: bytes, key_values: int, source: str, limits: Limits) -> None:
    if len(data) > limits.bytes:
        message = f"would be {len(data)} bytes long; at most {limits.bytes} are read back, so nothing is written"
        raise ConfigError(message, file=source)
    count = _count(obj, key_values) if len(data) > limits.values else 0  # no value takes less than a byte
    if count <= limits.values:
        return
    path: KeyPath = ()
    part = obj
    while large := next((item for item in _items(part) if _count(item[1], key_values) > limits.values // 2), None):
        path, part = (*path, large[0]), large[1]
    found = f"{_count(part, key_values)} of {count} values" if path else f"{count} values"
    message = f"has {found}; at most {limits.values} are read back, so nothing is written; keep less there"
    raise ConfigError(message, path=dotted(path), file=source)


def _count(obj: Any, key_values: int) -> int:
    """Count values as the readers do; `key_values` is what a key counts."""
    if isinstance(obj, Mapping):
        return 1 + sum(key_values + _count(value, key_values) for value in obj.values())
    return 1 + sum(_count(value, key_values) for value in obj) if isinstance(obj, list | tuple) else 1


def _items(obj: Any) -> Iterable[tuple[Key, Any]]:
    if isinstance(obj, Mapping):
        return obj.items()
    return enumerate(obj) if isinstance(obj, list | tuple) else ()
