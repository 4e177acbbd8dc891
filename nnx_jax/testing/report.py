"""What two trainings have in common: group by group equal bits, a difference within a tolerance, or none and where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

GROUPS = ("params", "opt_state", "records")
"""What is compared: weights and statistics; the optimizer's state; every record of the history with BEST."""
_WEIGHTS = ("params/", "frozen/", "model_state/")
_WHEN = ("seconds", "time", "wall_time", "data_wait")
"""Columns of the history that tell of the clock."""
_WHERE = ("batch",)
"""Columns that count microbatches, of which other windows have another number."""


@dataclass(frozen=True)
class Outcome:
    """What a training left behind.

    Attributes:
        arrays: every array of its last checkpoint, by name.
        records: its history.
        best: (epoch, step) of the checkpoint that BEST names; None without one.
    """

    arrays: Mapping[str, np.ndarray]
    records: Sequence[Mapping[str, Any]]
    best: tuple[int, int] | None


@dataclass(frozen=True)
class Difference:
    """How a group of two trainings compares.

    Attributes:
        exact: every bit is equal.
        absolute, relative: the largest differences; of arrays relative to the largest value of their kind: of all
            parameters, of all first moments. A bias before a BatchNorm is rounding and nothing else.
        where: the leaf, or the record and column, with the largest relative difference.
    """

    exact: bool
    absolute: float = 0.0
    relative: float = 0.0
    where: str = ""

    def within(self, rtol: float | None) -> bool:
        """Whether it is good enough: equal bits, or no more than `rtol` apart."""
        return self.exact or (rtol is not None and self.relative <= rtol)


@dataclass(frozen=True)
class Row:
    """One training beside the one it was compared with.

    Attributes:
        case, reference: what they ran on, in words.
        found: the difference by group.
    """

    case: str
    reference: str
    found: Mapping[str, Difference]


@dataclass(frozen=True)
class ExactReport:
    """What `assert_exact` found; its text is a table.

    Attributes:
        rows: one for each training.
        rtol: largest relative difference allowed; None: none at all.
        notes: what holds for all of them.
    """

    rows: tuple[Row, ...]
    rtol: float | None
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Every bit of every training is equal."""
        return all(found.exact for row in self.rows for found in row.found.values())

    @property
    def passed(self) -> bool:
        """Everything is equal or within the tolerance."""
        return all(found.within(self.rtol) for row in self.rows for found in row.found.values())

    def __str__(self) -> str:
        head = ("trained on", "compared with", *GROUPS)
        lines = [head, *(self._line(row) for row in self.rows)]
        widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        text.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*text, *self.notes])

    def _line(self, row: Row) -> tuple[str, ...]:
        return row.case, row.reference, *(self._cell(row.found[group]) for group in GROUPS)

    def _cell(self, found: Difference) -> str:
        if found.exact:
            return "equal bit for bit"
        told = f"{found.relative:.1e} rel, {found.absolute:.1e} abs at {found.where}"
        return f"within {told}" if found.within(self.rtol) else f"NOT EQUAL: {told}"


def compare(found: Outcome, wanted: Outcome, *, same_window: bool) -> dict[str, Difference]:
    """The difference by group.

    Args:
        same_window: both made their updates of equally many microbatches, so that also those are compared.
    """
    weights = {name for name in {**found.arrays, **wanted.arrays} if name.startswith(_WEIGHTS)}
    moments = {name for name in {**found.arrays, **wanted.arrays} if name.startswith("opt_state/")}
    return {
        "params": _arrays(found.arrays, wanted.arrays, weights),
        "opt_state": _arrays(found.arrays, wanted.arrays, moments),
        "records": _records(found, wanted, _WHEN if same_window else (*_WHEN, *_WHERE)),
    }


def _arrays(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], names: set[str]) -> Difference:
    worst, scales = Difference(True), {}
    for name in names & wanted.keys():
        kind, value = name.rpartition("/")[0], float(np.max(np.abs(wanted[name].astype(np.float64)), initial=0.0))
        scales[kind] = max(scales.get(kind, 0.0), value)
    for name in sorted(names):
        a, b = found.get(name), wanted.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            return Difference(False, math.inf, math.inf, f"{name}, which differs in shape or is missing")
        if a.tobytes() != b.tobytes():
            worst = _worse(worst, a, b, name, scales[name.rpartition("/")[0]])
    return worst


def _records(found: Outcome, wanted: Outcome, left_out: Sequence[str]) -> Difference:
    if len(found.records) != len(wanted.records):
        counts = f"{len(found.records)} records in place of {len(wanted.records)}"
        return Difference(False, math.inf, math.inf, counts)
    if found.best != wanted.best:
        return Difference(False, math.inf, math.inf, f"BEST: (epoch, step) is {found.best}, not {wanted.best}")
    worst = Difference(True)
    for number, (left, right) in enumerate(zip(found.records, wanted.records, strict=True)):
        for column in sorted({**left, **right}):
            a, b = left.get(column), right.get(column)
            if column in left_out or a == b or (a != a and b != b):
                continue
            where = f"record {number}, {column}"
            if not isinstance(a, int | float) or not isinstance(b, int | float):
                return Difference(False, math.inf, math.inf, f"{where}: {a} is not {b}")
            worst = _worse(worst, np.asarray(a), np.asarray(b), where, abs(b))
    return worst


def _worse(worst: Difference, a: np.ndarray, b: np.ndarray, where: str, scale: float) -> Difference:
    a, b = a.astype(np.float64), b.astype(np.float64)
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    absolute = float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0.0))
    relative = absolute / max(scale, float(np.finfo(np.float32).tiny))
    if worst.exact or relative > worst.relative:
        return Difference(False, max(absolute, worst.absolute), relative, where)
    return Difference(False, max(absolute, worst.absolute), worst.relative, worst.where)
