"""CompileWatch: how often each program was compiled, and which argument made it compile again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


class RecompileWarning(UserWarning):
    """A program that should be compiled once was compiled again; the message names the argument."""


class CompileWatch:
    """Wraps functions for `jax.jit` and counts.

    A body is run by Python only while JAX traces it, so the check of a signature costs nothing per call. A compile
    without a trace (another device or sharding) shows in the size of the jitted function's own cache.

    Attributes:
        reports: one line for every compile after a program's first.
    """

    def __init__(self, *, warn: bool = True) -> None:
        """Watch; with `warn`, a second compile of a program is also a RecompileWarning."""
        self._warn = warn
        self.reports: list[str] = []
        self._traces: dict[str, int] = {}
        self._first: dict[str, dict[str, str]] = {}
        self._jitted: dict[str, Any] = {}

    def jit(self, name: str, body: Callable[..., Any], names: Sequence[str], **options: Any) -> Any:
        """`jax.jit(body, **options)` under watch; `names` are the paths of its arguments for reports.

        `names[i]` may be a string, or a list of paths when argument i is a list of leaves.
        """

        def watched(*args: Any) -> Any:
            self._traced(name, _signature(args, names))
            return body(*args)

        watched.__name__ = name
        self._jitted[name] = jax.jit(watched, **options)
        return self._jitted[name]

    @property
    def compiles(self) -> dict[str, int]:
        """Compiles by program, of those called at least once."""
        sizes = {name: jitted._cache_size() for name, jitted in self._jitted.items()}
        found = {name: max(size, self._traces.get(name, 0)) for name, size in sizes.items()}
        return {name: count for name, count in found.items() if count}

    def check(self) -> list[str]:
        """Reports so far, with a line for every program compiled again without a change in shapes or dtypes."""
        extra = [
            f"{name} was compiled {jitted._cache_size()} times for one signature: an argument moved to another device "
            "or sharding"
            for name, jitted in self._jitted.items()
            if jitted._cache_size() > max(1, self._traces.get(name, 0))
        ]
        return [*self.reports, *extra]

    def _traced(self, name: str, signature: dict[str, str]) -> None:
        self._traces[name] = self._traces.get(name, 0) + 1
        first = self._first.setdefault(name, signature)
        if self._traces[name] == 1:
            return
        changed = [
            f"{path}: {first.get(path, 'absent')} -> {signature.get(path, 'absent')}"
            for path in [*first, *(path for path in signature if path not in first)]
            if first.get(path) != signature.get(path)
        ]
        why = "; ".join(changed) or "the same shapes and dtypes as the first time"
        self.reports.append(f"{name} is compiled again ({self._traces[name]}): {why}")
        if self._warn:
            warnings.warn(self.reports[-1], RecompileWarning, stacklevel=2)


def _signature(args: Sequence[Any], names: Sequence[Any]) -> dict[str, str]:
    found = {}
    for arg, name in zip(args, names, strict=True):
        for place, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(arg)):
            if isinstance(name, str):
                tail = jax.tree_util.keystr(path, simple=True, separator="/")
                label = f"{name}/{tail}" if tail else name
            else:
                label = name[place]
            weak = ", weak type" if getattr(leaf, "weak_type", False) else ""
            found[label] = f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}{weak}"
    return found
