"""Rows: a batch of which it is known that every row counts once, and between which values its targets are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

Span = tuple[float, float]
UNKNOWN: Span = (np.inf, -np.inf)
"""The span of targets that nobody looked at."""


class Rows(dict[str, Tensor]):
    """Columns by name. What is known of them holds as long as they are the tensors they were, unchanged.

    Args:
        columns: with "mask"; and "y" for `span` to mean something.
        span: the lowest and the highest target, of a batch whose rows all have a mask of 1; `UNKNOWN` for others.
    """

    def __init__(self, columns: Mapping[str, Tensor], span: Span = UNKNOWN) -> None:
        super().__init__(columns)
        self._seen: tuple[Any, ...] = ()
        self.read_as: tuple[Tensor, int, int | None, Any] | None = None
        """(outputs, their version, ignored class, items): what the last outputs were read as, for several metrics."""
        self.span = UNKNOWN if "weight" in columns else span
        if self.span is not UNKNOWN:
            y, mask = self["y"], self["mask"]
            if y.is_inference() or mask.is_inference():  # whose changes nobody counts
                self.span = UNKNOWN
            else:
                self._seen = y, y._version, mask, mask._version


def span_of(batch: Mapping[str, Any]) -> Span:
    """The lowest and the highest target of a batch whose rows all count once; `UNKNOWN` where that is not known."""
    if type(batch) is not Rows or batch.span is UNKNOWN:
        return UNKNOWN
    y, y_version, mask, mask_version = batch._seen
    same = batch.get("y") is y and batch.get("mask") is mask and "weight" not in batch
    return batch.span if same and y._version == y_version and mask._version == mask_version else UNKNOWN


def span_of_column(batch: Mapping[str, np.ndarray]) -> Span:
    """The span of a host batch's targets, whatever its mask; `UNKNOWN` for one without, and with NaN among them."""
    y = batch.get("y")
    if y is None or not y.size or y.dtype.kind not in "fiub":
        return UNKNOWN
    low, high = float(y.min()), float(y.max())
    return (low, high) if low <= high else UNKNOWN
