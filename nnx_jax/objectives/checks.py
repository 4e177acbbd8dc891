"""Targets looked at on the host, before anything is compiled: a wrong label is named, never trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx_jax.core.errors import DataError
from nnx_jax.objectives.losses import build_loss


def check_labels(
    data: Any, n_classes: int, *, ignore_index: int | None = -100, column: str = "y", rows: int | None = None
) -> None:
    """Check class labels: integers from 0 to `n_classes` - 1, or `ignore_index`.

    Args:
        data: an array of labels, a mapping of columns, or a dataset (`arrays()` or `take(indices)`).
        n_classes: how many classes the model tells apart.
        ignore_index: the label that means "no target"; None allows none.
        column: where the labels are, for a mapping or dataset.
        rows: look at the first so many rows only; None looks at all.

    Raises:
        DataError: naming the first wrong value, its row and the number of classes.
    """
    labels = _column(data, column, rows)
    if not (np.issubdtype(labels.dtype, np.integer) or labels.dtype == np.bool_):
        raise DataError(_float_message(labels, column))
    wide = labels.astype(np.int64)
    wrong = (wide < 0) | (wide >= n_classes)
    if ignore_index is not None:
        wrong &= wide != ignore_index
    if not wrong.any():
        return
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    place = f"row {where[0]}" + (f", position {where[1:]}" if len(where) > 1 else "")
    hint = f" (only ignore_index, {ignore_index}, may be outside)" if ignore_index is not None else ""
    raise DataError(
        f"label {int(wide[where])} at {place} of column '{column}' is not a class: the model has {n_classes} classes, "
        f"0 to {n_classes - 1}{hint}; {int(wrong.sum())} labels are wrong"
    )


def check_targets(loss: Any, data: Any, n_outputs: int, *, column: str = "y", rows: int | None = None) -> None:
    """Check the targets of any built-in loss; a user's own loss checks its own.

    Raises:
        DataError: for a wrong label, a yes/no target outside [0, 1], or a value that is not finite.
    """
    built = build_loss(loss)
    if built.task == "own":
        return
    if built.task == "classes":
        check_labels(data, n_outputs, ignore_index=built.ignore_index, column=column, rows=rows)
        return
    targets = _column(data, column, rows)
    if targets.dtype.kind not in "fiub":
        raise DataError(f"column '{column}' is {targets.dtype}; '{built.name}' needs numbers")
    values = targets.astype(np.float64)
    wrong = ~np.isfinite(values)
    if built.task == "bernoulli":
        wrong |= (values < 0) | (values > 1)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        range_text = "a number from 0 to 1" if built.task == "bernoulli" else "a finite number"
        raise DataError(f"target {values[where]} at row {where[0]} of column '{column}' is not {range_text}")


def _float_message(labels: np.ndarray, column: str) -> str:
    if labels.dtype.kind != "f":
        return f"column '{column}' is {labels.dtype}; class labels are integers"
    odd = labels != np.floor(labels)  # true for NaN as well
    if odd.any():
        where = tuple(int(i) for i in np.argwhere(odd)[0])
        return f"label {labels[where]} at row {where[0]} of column '{column}' is not a whole number"
    return f"column '{column}' is {labels.dtype}; class labels are integers, convert them with .astype('int32')"


def _column(data: Any, column: str, rows: int | None) -> np.ndarray:
    if hasattr(data, "take") and hasattr(data, "columns"):
        count = len(data) if rows is None else min(rows, len(data))
        held = data.arrays()
        data = held if held is not None else data.take(np.arange(count))
    if isinstance(data, Mapping):
        if column not in data:
            raise DataError(f"there is no column '{column}'; the columns are {', '.join(sorted(data))}")
        data = data[column]
    values = np.asarray(data)
    return values if rows is None else values[:rows]
