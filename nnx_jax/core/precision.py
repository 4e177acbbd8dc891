"""Names of precisions, and the region of a model that stays in full precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

PRECISIONS = ("float32", "bfloat16", "float16")
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_PREFIXES = ("torch.", "jnp.", "jax.numpy.", "numpy.", "np.")
_FULL: ContextVar[bool] = ContextVar("full_precision", default=False)


def precision_name(value: Any) -> str:
    """The canonical name of a precision: one of `PRECISIONS`.

    Args:
        value: a name ("bfloat16"), its short form ("bf16"), either in any letter case and with the library's name in
            front ("torch.bfloat16"), or a dtype object of JAX, NumPy or torch.

    Raises:
        ValueError: for anything else, listing what is legal.
    """
    text = value if isinstance(value, str) else _text(value)
    name = text.strip().lower()
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    name = _ALIASES.get(name, name)
    if name not in PRECISIONS:
        raise ValueError(
            f"got {text!r}; expected one of {', '.join(PRECISIONS)}, or in short {', '.join(_ALIASES)}, or such a dtype"
        )
    return name


def _text(value: Any) -> str:
    """How a dtype object calls itself: NumPy's by `name`, scalar types by `__name__`, torch's as text."""
    for attribute in ("name", "__name__"):
        found = getattr(value, attribute, None)
        if isinstance(found, str):
            return found
    return str(value)


@contextmanager
def full_precision() -> Iterator[None]:
    """Around a part of a model's `__call__`: layers and parameters used inside compute in float32 (seed 3, "Autocast").

    It acts while the model is traced. Arrays made outside keep their type: a layer casts its own input up, code of
    your own says `x.astype(jnp.float32)`. Under float32 training it changes nothing.
    """
    token = _FULL.set(True)
    try:
        yield
    finally:
        _FULL.reset(token)


def in_full_precision() -> bool:
    """Whether the code that asks runs inside `full_precision()`."""
    return _FULL.get()
