"""Executors for looking closely: the step's own code run by Python, stage by stage, with values one can print.

`staged` compiles the forward pass and its transpose, the loss and the optimizer, each by itself, and runs everything
between them as written; `eager` compiles nothing. Hooks see concrete values in both, so `if will_skip:` works, Python
attributes may change, and host hooks are called at the very place of their stage. Both are slow, and for debugging.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.step import batches
from nnx_jax.step.hooked import HookedBody
from nnx_jax.step.programs import StepPrograms


class ConcretePrograms(StepPrograms):
    """StepPrograms whose programs are Python; same methods, same state, same numbers up to rounding."""

    in_place = True

    def __init__(self, body: HookedBody, init: Any, given: Any, *, compiled: bool, max_in_flight: int = 1) -> None:
        super().__init__(body, init, given, max_in_flight=max_in_flight)
        self._compiled = compiled
        if compiled:
            compile_segments(body)
        self._micro = lambda leaves, batch: self._rows(leaves, [(batch, False)])
        self._apply = lambda leaves, batch: self._rows(leaves, [(batch, True)])
        self._stacked = lambda leaves, block, trip: self._span(leaves, trip, lambda row: batches.take(block, row))
        self._resident = lambda leaves, columns, table, trip: self._span(
            leaves, trip, lambda row: batches.gather(columns, jnp.asarray(table)[row])
        )

    def _span(self, leaves: list[Any], trip: Any, fetch: Callable[[int], Any]) -> Any:
        start, windows, first, last = (int(number) for number in np.asarray(trip))
        rows, at = [], start
        for window in range(windows):
            length = first if window == 0 else last if window == windows - 1 else self.accumulate
            rows += [(fetch(at + place), place == length - 1) for place in range(length)]
            at += length
        return self._rows(leaves, rows)

    def _rows(self, leaves: list[Any], rows: Sequence[tuple[Any, bool]]) -> Any:
        carry = jax.tree.unflatten(self._treedef, leaves)
        body: Any = self._body
        with contextlib.nullcontext() if self._compiled else jax.disable_jit():
            for batch, closes in rows:
                run = body.apply if self.accumulate == 1 else body.last if closes else body.micro
                carry = run(carry, jax.tree.map(jnp.asarray, dict(batch)))
        return self._shut(carry)


def compile_segments(body: HookedBody) -> None:
    """Compile what lies between the hooks, each part by itself."""
    forward, optimizer = body.forward, body.optimizer
    body.forward = jax.jit(forward, static_argnums=4)
    body.optimizer = _Compiled(optimizer)


class _Compiled:
    def __init__(self, optimizer: Any) -> None:
        self.init, self.update = optimizer.init, jax.jit(optimizer.update)
