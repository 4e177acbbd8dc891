"""A device that ran out of memory, told in words: where it happened, how much was asked for, what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from nnx_jax.core.errors import StepError

_ASKED = re.compile(r"(\d+) bytes")


class OutOfMemoryError(StepError, MemoryError):
    """The device has too little memory; the last commit is intact."""


@contextmanager
def explain_out_of_memory(where: str, signature: Mapping[str, Any], remedy: str) -> Iterator[None]:
    """Turn XLA's RESOURCE_EXHAUSTED into an OutOfMemoryError with the cause kept; everything else passes.

    Args:
        where: "update 3", "evaluation of val".
        signature: the batch's columns, with shapes and dtypes.
        remedy: what to change.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        found = _ASKED.search(text)
        asked = f"{int(found.group(1)) / 2**30:.2f} GiB" if found else "more than there is"
        batch = ", ".join(f"{name} {column.dtype}{list(column.shape)}" for name, column in signature.items())
        raise OutOfMemoryError(
            f"{where}: the device is out of memory; {asked} were asked for with a batch of {batch}; {remedy}"
        ) from error
