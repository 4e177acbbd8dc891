"""From device records to history rows and whole-epoch summaries: sums are added, never means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nnx_jax.loop.engine import Record

Sums = Mapping[str, Sequence[float]]
Summarize = Callable[[Sums], dict[str, float]]

FIXED = ("kind", "epoch", "batch", "step", "lr", "grad_norm", "skipped")


def history_columns(metrics: Sequence[str], *, validates: bool) -> tuple[str, ...]:
    """Columns of idps.csv: fixed ones, then train and validation values by name ("loss" and every metric)."""
    names = ("loss", *metrics)
    train = tuple(f"train_{name}" for name in names)
    val = tuple(f"val_{name}" for name in names) if validates else ()
    return (*FIXED, *train, *val, "monitor", "improved")


class SumTotals:
    """Adds record sums in float64, in the order they came."""

    def __init__(self, totals: Sums | None = None) -> None:
        self.totals: dict[str, list[float]] = {name: list(values) for name, values in (totals or {}).items()}

    def add(self, sums: Sums) -> None:
        """Add one record's sums."""
        for name, values in sums.items():
            total = self.totals.setdefault(name, [0.0] * len(values))
            for index, value in enumerate(values):
                total[index] += value


class RecordKeeper:
    """Turns the records of one epoch into rows and into the epoch's training summary.

    `every` is "update" or "batch": what one record stands for. A microbatch counts in the summary when its window
    became an update, so a vetoed window leaves no trace but its row. Commits happen at window borders, where no
    window is open; the totals are then all there is to store.
    """

    def __init__(self, summarize: Summarize, *, n_batches: int, every: str) -> None:
        self.summarize, self.n_batches, self.every = summarize, n_batches, every
        self.epoch = SumTotals()
        self._open: list[Sums] = []

    def begin_epoch(self, totals: Sums | None = None) -> None:
        """Start an epoch, or continue one from stored totals."""
        self.epoch = SumTotals(totals)
        self._open = []

    def rows(self, records: Sequence[Record]) -> list[dict[str, Any]]:
        """Rows for these records, oldest first; adds them to the epoch's summary."""
        rows: list[dict[str, Any]] = []
        for record in records:
            rows.append(self._row(record))
            self._open.append(record.sums)
            if record.closed:
                if record.committed:
                    for sums in self._open:
                        self.epoch.add(sums)
                self._open = []
        return rows

    def _row(self, record: Record) -> dict[str, Any]:
        epoch, batch = divmod(record.batch, self.n_batches)
        row: dict[str, Any] = {"kind": self.every, "epoch": epoch, "batch": batch, "step": record.step}
        row.update(lr=record.rate, grad_norm=record.grad_norm, skipped=int(record.closed and not record.committed))
        for name, value in {**self.summarize(record.sums), "loss": record.loss}.items():
            nothing_counted = math.isnan(value) and not any(record.sums[name])
            row[f"train_{name}"] = None if nothing_counted else value
        return row

    def summary(self) -> dict[str, float]:
        """Whole-epoch training values so far, by name ("train_loss", ...); empty before the first update."""
        if not self.epoch.totals:
            return {}
        return {f"train_{name}": value for name, value in self.summarize(self.epoch.totals).items()}
