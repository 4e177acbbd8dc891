"""From device records to history rows and whole-epoch summaries: sums are added, never means."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from nnx_jax.loop.engine import Records
from nnx_jax.runs.extra import EXTRA

Sums = Mapping[str, Sequence[float]]
Summarize = Callable[[Sums], dict[str, float]]
Tables = Mapping[str, np.ndarray]

FIXED = ("kind", "epoch", "batch", "step", "lr", "grad_norm", "skipped")


def history_columns(
    metrics: Sequence[str], scores: Sequence[str] | None = None, *, optimizers: Sequence[str] = (), extra: bool = False
) -> tuple[str, ...]:
    """Columns of a history.

    Args:
        metrics: names of the training values besides the loss.
        scores: names of the validation values besides the loss; None without a validation.
        optimizers: names of several optimizers; each has its rate under `lr_<name>`.
        extra: validations return more than these names.
    """
    train = tuple(f"train_{name}" for name in ("loss", *metrics))
    val = () if scores is None else tuple(f"val_{name}" for name in ("loss", *scores))
    rates = tuple(f"lr_{name}" for name in optimizers)
    return (*FIXED, *rates, *train, *val, *((EXTRA,) if extra and val else ()), "monitor", "improved")


class SumTotals:
    """Adds record sums in float64, one after the other in the order they came, so that a resume adds the same way."""

    def __init__(self, totals: Sums | None = None) -> None:
        self.totals: dict[str, list[float]] = {name: list(values) for name, values in (totals or {}).items()}

    def add(self, sums: Mapping[str, np.ndarray]) -> None:
        """Add the sums of records, float64 [n, size] by name."""
        for name, values in sums.items():
            if len(values):
                before = np.asarray(self.totals.get(name, np.zeros(values.shape[1])), np.float64)
                self.totals[name] = np.add.accumulate(np.vstack([before, values]))[-1].tolist()


class Rows(Sequence[dict[str, Any]]):
    """History rows of a session; rows that came as columns become dicts only when somebody looks at them."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        self._parts: list[list[dict[str, Any]] | tuple[dict[str, Any], int]] = [list(rows)]
        self._ends = [len(self._parts[0])]

    @property
    def view(self) -> Sequence[Mapping[str, Any]]:
        """What callbacks see."""
        return self

    @property
    def retention(self) -> int | None:
        """How many rows callbacks see; None for all."""
        return None

    def since(self, epoch: int) -> Sequence[Mapping[str, Any]]:
        """The rows from some place at or before the beginning of an epoch on: all of them."""
        return self

    @property
    def first_epoch(self) -> int | None:
        """Epoch of the run's first row, None before there is one."""
        return self[0]["epoch"] if len(self) else None

    def append(self, row: dict[str, Any]) -> None:
        """Add one row."""
        self._add([row], 1)

    def append_table(self, table: dict[str, Any], n_rows: int) -> None:
        """Add rows given by column, see `RecordKeeper.table`."""
        self._add((table, n_rows), n_rows)

    def cut(self, n_rows: int) -> None:
        """Keep the first `n_rows` rows."""
        kept = self[:n_rows]
        self._parts.clear()
        self._parts.append(kept)
        self._ends = [len(kept)]

    def _add(self, part: Any, n_rows: int) -> None:
        self._parts.append(part)
        self._ends.append(self._ends[-1] + n_rows)

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        at = bisect_right(self._ends, place)
        part, offset = self._parts[at], place - (self._ends[at - 1] if at else 0)
        if isinstance(part, list):
            return part[offset]
        return {name: values[offset] if isinstance(values, list) else values for name, values in part[0].items()}


class RecordKeeper:
    """Turns the records of one epoch into rows and into the epoch's training summary.

    `every` is "update" or "batch": what one record stands for; `shift` is added to the records' microbatch count. A
    microbatch counts in the summary when its window became an update, so a vetoed window leaves no trace but its row.
    The sums of a window that is open at a commit, or at the epoch's end, wait in `open` for its end. `summarize` and
    `values` are the engine's, for sums added up and for those of many records; see `loop.engine.Engine`.
    """

    def __init__(
        self,
        summarize: Summarize,
        values: Callable[[Tables], Tables],
        *,
        n_batches: int,
        every: str,
        shift: int = 0,
    ) -> None:
        self.summarize, self.values = summarize, values
        self.n_batches, self.every, self.shift = n_batches, every, shift
        self.epoch = SumTotals()
        self._open: list[Mapping[str, np.ndarray]] = []

    def begin_epoch(self, totals: Sums | None = None) -> None:
        """Start an epoch, or continue one from stored totals; a window that is open goes on."""
        self.epoch = SumTotals(totals)

    @property
    def open(self) -> dict[str, list[list[float]]]:
        """Sums of the microbatches in the open window by name, oldest first; empty between windows."""
        names = self._open[0] if self._open else ()
        return {name: np.concatenate([sums[name] for sums in self._open]).tolist() for name in names}

    def resume(self, open_sums: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Continue with a stored `open`."""
        stored = {name: np.asarray(rows, np.float64) for name, rows in open_sums.items()}
        self._open = [stored] if stored else []

    def table(self, records: Records) -> dict[str, Any]:
        """History columns for these records, each a list or one value for all; adds them to the epoch's summary."""
        self._add(records)
        epoch, batch = np.divmod(records.batch + self.shift, self.n_batches)
        skipped = records.closed & ~records.committed
        table: dict[str, Any] = {
            "kind": self.every,
            "epoch": epoch.tolist(),
            "batch": batch.tolist(),
            "step": records.step.tolist(),
            "lr": _or_none(records.rate, records.committed),
            "grad_norm": _or_none(records.grad_norm, records.closed),
            "skipped": skipped.astype(int).tolist(),
        }
        for name, rates in (records.rates or {}).items():
            table[f"lr_{name}"] = _or_none(rates, records.committed & (records.updates or {})[name].astype(bool))
        for name, values in {**self.values(records.sums), "loss": records.loss}.items():
            table[f"train_{name}"] = _or_none(values, ~np.isnan(values) | records.sums[name].any(axis=1))
        return table

    def _add(self, records: Records) -> None:
        """Add up the windows that became updates; keep the sums of the one still open."""
        closing = np.flatnonzero(records.closed)
        end = int(closing[-1]) + 1 if len(closing) else 0
        counts = records.committed[closing[np.searchsorted(closing, np.arange(end))]] if end else np.zeros(0, bool)
        if end:
            for sums in self._open if records.committed[closing[0]] else ():
                self.epoch.add(sums)
            self.epoch.add({name: sums[:end][counts] for name, sums in records.sums.items()})
            self._open = []
        if end < len(records):
            self._open.append({name: sums[end:] for name, sums in records.sums.items()})

    def summary(self) -> dict[str, float]:
        """Whole-epoch training values so far, by name ("train_loss", ...); empty before the first update."""
        if not self.epoch.totals:
            return {}
        return {f"train_{name}": value for name, value in self.summarize(self.epoch.totals).items()}


def _or_none(values: np.ndarray, counts: np.ndarray) -> list[Any]:
    """Python numbers, None where it does not count."""
    listed: list[Any] = values.tolist()
    for place in np.flatnonzero(~counts).tolist():
        listed[place] = None
    return listed
