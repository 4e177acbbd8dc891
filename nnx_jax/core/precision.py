"""Names of precisions, the type of sums, and the region of a model that stays in full precision."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

PRECISIONS = ("float32", "bfloat16", "float16")
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_PREFIXES = ("torch.", "jnp.", "jax.numpy.", "numpy.", "np.")
_FULL: ContextVar[bool] = ContextVar("full_precision", default=False)


def sum_dtype(*dtypes: Any) -> np.dtype[Any]:
    """The type in which values of these types are added up: float64 where one of them is, else float32."""
    names = {_text(dtype).removeprefix("torch.") for dtype in dtypes}
    return np.dtype(np.float64 if "float64" in names else np.float32)


def widened(array: Any) -> Any:
    """An array as what sums are made of: float64 stays, everything else becomes float32."""
    return array.astype(sum_dtype(array.dtype))


def enable_float64() -> None:
    """Switch JAX's 64-bit numbers on in this process, for a command: before JAX starts, or before it makes arrays.

    Where the environment says JAX_ENABLE_X64=0 they stay off, and float64 is refused later.
    """
    said = os.environ.setdefault("JAX_ENABLE_X64", "1").strip().lower()
    jax = sys.modules.get("jax")
    if jax is not None and said in ("1", "true", "yes", "on", "y", "t"):
        jax.config.update("jax_enable_x64", True)


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

    It acts while the model is traced; in a torch model it leaves autocast. Arrays made outside keep their type: a Flax
    layer casts its own input up, code of your own says `x.astype(jnp.float32)`, or `x.float()`. Under float32 training
    it changes nothing.
    """
    token = _FULL.set(True)
    try:
        with _without_autocast():
            yield
    finally:
        _FULL.reset(token)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Leave the autocast regions of torch that are open, where torch is loaded at all."""
    torch = sys.modules.get("torch")
    with ExitStack() as left:
        for device in ("cpu", "cuda", "mps") if torch is not None else ():
            if torch.is_autocast_enabled(device):  # type: ignore[union-attr]
                left.enter_context(torch.autocast(device, enabled=False))  # type: ignore[union-attr]
        yield


def in_full_precision() -> bool:
    """Whether the code that asks runs inside `full_precision()`."""
    return _FULL.get()
