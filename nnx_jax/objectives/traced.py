"""Tell a user which line of theirs asks for a value that does not exist while the step is traced."""

from __future__ import annotations

import contextlib
import linecache
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax

from nnx_jax.core.errors import StepError

_UNTRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.UnexpectedTracerError,
)
_OURS = str(Path(__file__).parents[1])


@contextlib.contextmanager
def explained(called: str) -> Iterator[None]:
    """Turn JAX's errors about values of tracers into one that names the line, and what to write in its place.

    Args:
        called: what the function of the user's is called.

    Raises:
        StepError: in place of JAX's error.
    """
    try:
        yield
    except _UNTRACED as error:
        frames = traceback.extract_tb(error.__traceback__)
        mine = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(_OURS)]
        at = (mine or list(frames))[-1]
        line = (at.line or linecache.getline(at.filename, at.lineno or 0)).strip()
        raise StepError(
            f"{called}, {at.filename}:{at.lineno}: `{line}` needs the value of an array, but the step is traced "
            "once and compiled, so its arrays have no values; choose with jnp.where or jax.lax.cond, loop with "
            "jax.lax.fori_loop, look with jax.debug.print, and do what needs Python in a callback or hook"
        ) from error
