"""CompileWatch: how often each program was compiled, and which argument made it compile again."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


class RecompileWarning(UserWarning):
    """A program that should be compiled once was compiled again; the message names the argument."""


_CALLS = threading.local()
"""`.watch`: whose program this thread called last; JAX reports a compile only by the function's name."""


class CompileWatch:
    """Wraps functions for `jax.jit` and counts.

    A body is run by Python only while JAX traces it, so the check of a signature costs nothing per call. Compiles are
    counted from JAX's own events, which also tell of one without a trace (another device or sharding).

    Attributes:
        reports: one line for every trace after a program's first, naming the argument that changed.
    """

    def __init__(self, *, warn: bool = True) -> None:
        """Watch; with `warn`, a second trace of a program is also a RecompileWarning."""
        self._warn = warn
        self.reports: list[str] = []
        self._traces: dict[str, int] = {}
        self._compiles: dict[str, int] = {}
        self._first: dict[str, dict[str, str]] = {}

    def jit(self, name: str, body: Callable[..., Any], names: Sequence[Any], **options: Any) -> Watched:
        """`jax.jit(body, **options)` under watch.

        `names[i]` is the path of argument i for reports, or a list of paths when the argument is a list of leaves.
        """

        def watched(*args: Any) -> Any:
            found = body(*args)
            self._traced(name, _signature(args, names))  # a trace that failed will be done again
            return found

        watched.__name__ = name
        return Watched(self, jax.jit(watched, **options))

    @property
    def compiles(self) -> dict[str, int]:
        """Compiles by program, of those compiled at least once."""
        return dict(self._compiles)

    def check(self) -> list[str]:
        """Reports so far, with a line for every program compiled again without a change in shapes or dtypes."""
        extra = [
            f"{name} was compiled {count} times for {self._traces[name]} signatures: an argument moved to another "
            "device or sharding"
            for name, count in self._compiles.items()
            if count > self._traces.get(name, 0)
        ]
        return [*self.reports, *extra]

    def compiled(self, name: str) -> None:
        """Count a compile of the program `name`, if it is one of this watch."""
        if name in self._traces:
            self._compiles[name] = self._compiles.get(name, 0) + 1

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


class Watched:
    """A jitted function that says whose it is before every call."""

    def __init__(self, watch: CompileWatch, jitted: Any) -> None:
        self._watch, self._jitted = watch, jitted

    def __call__(self, *args: Any) -> Any:
        _CALLS.watch = self._watch
        return self._jitted(*args)

    def lower(self, *args: Any) -> Any:
        """`jax.stages.Lowered` for these arguments; its compile is the caller's and is not counted."""
        _CALLS.watch = None
        return self._jitted.lower(*args)


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    watch = getattr(_CALLS, "watch", None)
    if watch is not None and event == "/jax/core/compile/backend_compile_duration":
        watch.compiled(str(kwargs.get("fun_name", "")).removeprefix("jit(").removesuffix(")"))


jax.monitoring.register_event_duration_secs_listener(_listen)


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
