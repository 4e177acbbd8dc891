"""From rows of the device's ring to the loop's records: what counts, in float64, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nnx_jax.engines.rates import Rates
from nnx_jax.loop.engine import Records
from nnx_jax.step import records as step_records
from nnx_jax.step.custom import RATES, UPDATES
from nnx_jax.step.state import COUNTERS

HIDDEN = "~"
"""How the names of columns begin that no user sees."""


class RowReader:
    """Reads rows for the loop.

    Args:
        metrics: names of the metric columns.
        rates: the optimizers' rates.
        vetoes: hooks take part in the step.

    Attributes:
        counters: int32, the counters after the last window that closed before a halt; None before the first.
    """

    def __init__(self, metrics: Sequence[str], rates: Rates, *, vetoes: bool) -> None:
        self.metrics, self.rates, self.vetoes = tuple(metrics), rates, vetoes
        self.counters: np.ndarray | None = None

    def read(self, rows: step_records.Records) -> Records:
        """Rows, as far as they count: a window that halted the run is gone whole, with its first microbatches."""
        halted = np.flatnonzero(rows.ints["halt"])
        good = int(halted[0]) if len(halted) else len(rows)
        closed = np.flatnonzero(rows.closed[:good])
        if len(halted):
            good = int(closed[-1]) + 1 if len(closed) else 0
        if len(closed):
            self.counters = np.array([rows.ints[name][closed[-1]] for name in COUNTERS], np.int32)
        sums = self._columns(rows)
        hidden = {name: sums.pop(name)[:good] for name in (UPDATES, RATES) if name in sums}
        return Records(
            batch=rows.batch[:good].astype(np.int64),
            step=rows.step[:good],
            loss=rows.loss[:good],
            rate=rows.rate[:good].astype(np.float64),
            grad_norm=rows.grad_norm[:good].astype(np.float64),
            closed=rows.closed[:good],
            committed=rows.committed[:good],
            sums={name: column[:good] for name, column in sums.items()},
            veto=rows.ints["veto"][:good] if self.vetoes else None,
            **self._by_optimizer(rows.step[:good], rows.committed[:good], hidden),
        )

    def _by_optimizer(
        self, step: np.ndarray, committed: np.ndarray, hidden: Mapping[str, np.ndarray]
    ) -> dict[str, dict[str, np.ndarray] | None]:
        """The rates of several optimizers, and the updates of each where they do not all step at every commit."""
        names = list(self.rates.held)
        found: dict[str, dict[str, np.ndarray] | None] = {"rates": None, "updates": None}
        if UPDATES in hidden:
            found["updates"] = {name: hidden[UPDATES][:, place].astype(int) for place, name in enumerate(names)}
        if RATES in hidden:
            found["rates"] = {name: hidden[RATES][:, place] for place, name in enumerate(names)}
        elif self.rates.several:
            found = {"rates": self.rates.used(step), "updates": {name: committed.astype(int) for name in names}}
        return found

    def _columns(self, rows: step_records.Records) -> dict[str, np.ndarray]:
        """Sums by name, float64 [n, size]: "loss" holds every term's numerator, then every denominator."""
        terms = [*rows.num.values(), *rows.den.values()]
        columns = {"loss": np.stack(terms, axis=1).astype(np.float64)}
        return columns | {name: rows.metrics[name].astype(np.float64) for name in self.metrics}
