"""Records: the step writes rows into a ring on the device; the host reads them all in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.step.state import COUNTERS

CLOSED, COMMITTED, EMPTY, BAD, HALTED = 1, 2, 4, 8, 16
"""Flag bits of a row: it closed a window; that became an update; no valid target; not finite; after a halt."""

HALT_LOST, HALT_NONFINITE, HALT_INVALID, HALT_CONSECUTIVE, HALT_HOOK = -1, 1, 2, 3, 4
"""Why the device stopped updating: rows that a process could not read, a non-finite window, invalid labels, too many
bad windows in a row; from the last on, a hook, whose index among the update hooks is added."""

_INTS = (*COUNTERS, "flags", "halt", "invalid", "bad_batch", "bad_term", "bad_leaf", "veto")


@dataclass(frozen=True)
class RecordLayout:
    """Columns of a row. Integers and the bits of floats share one int32 array: one write, one transfer.

    Attributes:
        terms: names of the loss terms.
        weights: their weights.
        additive: for each term, whether it has no denominator.
        metrics: (name, size) of the metric sums.
        capacity: rows the ring holds between two reads.
        every: "batch" for a row a microbatch, "update" for a row a window.
        dtype: of the floats, float32 or float64; one takes as many columns as it has words of 32 bits.
    """

    terms: tuple[str, ...]
    weights: tuple[float, ...]
    additive: tuple[bool, ...]
    metrics: tuple[tuple[str, int], ...]
    capacity: int
    every: str
    dtype: Any = np.dtype(np.float32)

    @property
    def n_sums(self) -> int:
        """Length of one vector of sums: numerators, denominators, metric sums."""
        return 2 * len(self.terms) + sum(size for _, size in self.metrics)

    @property
    def width(self) -> int:
        """int32 columns of a row."""
        return len(_INTS) + (2 + 2 * self.n_sums) * (self.dtype.itemsize // 4)

    def row(self, counters: Any, ints: Sequence[Any], rate: Any, norm: Any, own: Any, window: Any) -> jax.Array:
        """One row, int32 [width]; `ints` are the integer columns after the counters."""
        floats = jnp.concatenate([jnp.stack([rate, norm]), own, window]).astype(self.dtype)
        bits = jax.lax.bitcast_convert_type(floats, jnp.int32).reshape(-1)  # of a float64 the lower word comes first
        return jnp.concatenate([counters, jnp.stack([jnp.asarray(i, jnp.int32) for i in ints]), bits])

    def read(self, rows: np.ndarray) -> Records:
        """Rows, oldest first, int32 [n, width], as columns."""
        ints = {name: rows[:, index].copy() for index, name in enumerate(_INTS)}
        floats = np.ascontiguousarray(rows[:, len(_INTS) :]).view(self.dtype)
        rate, norm, sums = floats[:, 0].copy(), floats[:, 1].copy(), floats[:, 2:]
        own, window = self._split(sums[:, : self.n_sums]), self._split(sums[:, self.n_sums :])
        return Records(self, ints, rate, norm, *own, *window)

    def _split(self, sums: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
        n = len(self.terms)
        num = {name: sums[:, i].copy() for i, name in enumerate(self.terms)}
        den = {name: sums[:, n + i].copy() for i, name in enumerate(self.terms)}
        metrics, at = {}, 2 * n
        for name, size in self.metrics:
            metrics[name] = sums[:, at : at + size].copy()
            at += size
        return num, den, metrics


@dataclass(frozen=True)
class Records:
    """Rows since the last read as numpy columns of length n, oldest first; floats are of the layout's dtype.

    Attributes:
        layout: names, weights and kinds of the columns.
        ints: int32 columns by name: the counters after the row, `flags`, `halt`, `invalid`, `bad_*`, and `veto`, the
            index of the update hook that vetoed first, -1 for none.
        rate: learning rate the window's update used; 0 on rows without an update.
        grad_norm: global norm before clipping; 0 on rows that closed no window.
        num, den: by term, of the row's microbatch (of the window when rows are written per update).
        metrics: [n, size] by metric, sums of the row's microbatch (or window).
        window_num, window_den, window_metrics: the same sums over the window up to and including this row.
    """

    layout: RecordLayout
    ints: dict[str, np.ndarray]
    rate: np.ndarray
    grad_norm: np.ndarray
    num: dict[str, np.ndarray]
    den: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]
    window_num: dict[str, np.ndarray]
    window_den: dict[str, np.ndarray]
    window_metrics: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.rate)

    @property
    def batch(self) -> np.ndarray:
        """int32, microbatches of the run before the row's (last) one."""
        return self.ints["batch"] - 1

    @property
    def step(self) -> np.ndarray:
        """int32, committed updates after the row."""
        return self.ints["step"]

    @property
    def closed(self) -> np.ndarray:
        """bool, the row closed a window."""
        return self._flag(CLOSED)

    @property
    def committed(self) -> np.ndarray:
        """bool, the window the row closed became an update."""
        return self._flag(COMMITTED)

    @property
    def empty(self) -> np.ndarray:
        """bool, the closed window had no valid target."""
        return self._flag(EMPTY)

    @property
    def halted(self) -> np.ndarray:
        """bool, the device had stopped updating before this row."""
        return self._flag(HALTED)

    @property
    def loss(self) -> np.ndarray:
        """float64, loss of the row's own sums: terms divided, weighted and added; NaN where nothing was valid."""
        return self._loss(self.num, self.den)

    @property
    def window_loss(self) -> np.ndarray:
        """float64, the same over the window so far: on a closing row the loss of its update."""
        return self._loss(self.window_num, self.window_den)

    def _flag(self, bit: int) -> np.ndarray:
        return (self.ints["flags"] & bit) != 0

    def _loss(self, num: dict[str, np.ndarray], den: dict[str, np.ndarray]) -> np.ndarray:
        total, used = np.zeros(len(self)), np.zeros(len(self), bool)
        for name, weight, additive in zip(self.layout.terms, self.layout.weights, self.layout.additive, strict=True):
            top = num[name].astype(np.float64)
            bottom = np.ones_like(top) if additive else den[name].astype(np.float64)
            valid = bottom != 0
            total = total + weight * np.where(valid, top / np.where(valid, bottom, 1.0), 0.0)
            used |= valid
        return np.where(used, total, np.nan)


def write(rows: Any, cursor: Any, row: Any) -> Any:
    """Put `row` at place `cursor` of the ring."""
    return jax.lax.dynamic_update_slice(rows, row[None], (cursor % rows.shape[0], jnp.int32(0)))
