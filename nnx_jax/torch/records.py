"""Rows of what windows measured, kept until the loop asks for them, and given to it as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nnx_jax.loop.engine import Records
from nnx_jax.objectives.metrics import Metric
from nnx_jax.torch.window import Plan


class Row(NamedTuple):
    """One record; see `loop.engine.Records` for the fields."""

    batch: int
    step: int
    closed: bool
    committed: bool
    rate: float
    norm: float
    sums: Sequence[float]
    rates: Mapping[str, float] | None = None
    updates: Mapping[str, int] | None = None
    veto: int = -1


class Ledger:
    """The records since the loop last asked.

    Args:
        plan: of the loss terms.
        metrics: whose sums follow those of the terms.
        every: "batch" for a row a microbatch, "update" for a row a window.
        vetoes: hooks may veto windows.
    """

    def __init__(self, plan: Plan, metrics: Sequence[Metric], *, every: str, vetoes: bool = False) -> None:
        self.plan, self.metrics, self.every, self.vetoes = plan, tuple(metrics), every, vetoes
        self._rows: list[Row] = []

    def clear(self) -> None:
        """Forget what was not asked for."""
        self._rows = []

    def add(self, row: Row) -> None:
        """A row with its sums."""
        self._rows.append(row)

    def open(self, first: int, step: int, table: Sequence[Sequence[float]], told: int) -> None:
        """Rows of the microbatches of a window that is open; `first` is its first one, `told` were given before."""
        for place in range(told, len(table)):
            self._rows.append(Row(first + place, step, False, False, 0.0, 0.0, table[place]))

    def close(self, row: Row, table: Sequence[Sequence[float]], sums: Sequence[float], told: int) -> None:
        """The row of a window that ended, after those of its first microbatches where each has its own."""
        if self.every == "batch":
            if len(table) > 1:
                first = row.batch - len(table) + 1
                self.open(first, row.step - row.committed, table[:-1], told)
            sums = table[-1]
        self._rows.append(row._replace(sums=sums))

    def take(self) -> Records:
        """Every row so far, as columns."""
        rows, self._rows = self._rows, []
        n = len(self.plan.terms)
        width = 2 * n + sum(metric.size for metric in self.metrics)
        table = np.array([row.sums[:width] for row in rows], np.float64).reshape(len(rows), width)
        sums, at = {"loss": table[:, : 2 * n]}, 2 * n
        for metric in self.metrics:
            sums[metric.name] = table[:, at : at + metric.size]
            at += metric.size
        committed = np.array([row.committed for row in rows], bool)
        return Records(
            batch=np.array([row.batch for row in rows], np.int64),
            step=np.array([row.step for row in rows], np.int64),
            loss=self._loss(sums["loss"]),
            rate=np.array([row.rate for row in rows], np.float64) * committed,
            grad_norm=np.array([row.norm for row in rows], np.float64),
            closed=np.array([row.closed for row in rows], bool),
            committed=committed,
            sums=sums,
            veto=np.array([row.veto for row in rows], np.int64) if self.vetoes else None,
            **self._by_optimizer(rows, committed),
        )

    def _loss(self, sums: np.ndarray) -> np.ndarray:
        """Terms divided, weighted and added; NaN where nothing was valid."""
        n = len(self.plan.terms)
        total, used = np.zeros(len(sums)), np.zeros(len(sums), bool)
        for index, (weight, additive) in enumerate(zip(self.plan.weights, self.plan.additive, strict=True)):
            bottom = np.ones(len(sums)) if additive else sums[:, n + index]
            valid = bottom != 0
            total = total + weight * np.where(valid, sums[:, index] / np.where(valid, bottom, 1.0), 0.0)
            used |= valid
        return np.where(used, total, np.nan)

    def _by_optimizer(self, rows: Sequence[Row], committed: np.ndarray) -> dict[str, Any]:
        """Rates and updates of several optimizers; None for a single one."""
        rates, updates = _columns(rows, "rates", float), _columns(rows, "updates", int)
        if rates is not None and updates is None:  # all of them step at every commit
            updates = {name: committed.astype(int) for name in rates}
        return {"rates": rates, "updates": updates}


def _columns(rows: Sequence[Row], name: str, kind: type) -> dict[str, np.ndarray] | None:
    """A mapping of every row as columns, 0 where a row has none; None where no row has one."""
    last: Any = next((getattr(row, name) for row in reversed(rows) if getattr(row, name) is not None), None)
    if last is None:
        return None
    return {key: np.array([(getattr(row, name) or {}).get(key, 0) for row in rows], kind) for key in last}
