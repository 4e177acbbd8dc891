"""What a column may hold: every array that enters the project is settled here into one of a few dtypes, or refused.

float64 becomes float32 (or stays, for training in float64), wide whole numbers become int32 when every value fits,
inputs of 8 or 16 bits stay as they are (the net scales images, and says so), whole-number targets are int32. Text and
objects are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nnx_jax.core.errors import DataError

Columns = dict[str, np.ndarray]

MASK = "mask"  # the row weight every batch carries: 1.0 for a row of the data, 0.0 for padding

_INT32 = np.iinfo(np.int32)


def settle(name: str, value: object, where: str, *, wide: bool = False) -> np.ndarray:
    """Return `value` as an array of a documented dtype.

    * float64 (and longer) -> float32, with `wide` float64; float16, bfloat16 and float32 stay.
    * int64, uint64, uint32 -> int32 when every value fits; int8/16/32 and uint8/16 stay, except in targets.
    * targets (`y`): whole numbers and bool -> int32, so that arithmetic on them cannot wrap.
    * bool inputs stay bool.

    Raises:
        DataError: objects, text, dates, complex numbers, ragged lists, numbers out of the new range; each names the
            column, and the row where one row is to blame.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:  # numpy refuses ragged nested lists
        raise DataError(f"{where}: column {name!r} cannot be an array: {error}") from error
    if not array.dtype.isnative:  # a file of another byte order
        array = array.astype(array.dtype.newbyteorder("="))
    kind = array.dtype.kind
    if array.dtype in (np.float32, np.int32):
        return array
    if kind not in "biuf" and array.dtype.name != "bfloat16":
        example = f", first value {array.reshape(-1)[0]!r}" if array.size else ""
        raise DataError(
            f"{where}: column {name!r} has dtype {array.dtype}{example}; give numbers or bool "
            "(object arrays and text are never read: encode them first)"
        )
    if kind == "f" and array.dtype.itemsize > 4:
        return array.astype(np.float64, copy=False) if wide else _to_float32(name, array, where)
    target = name == "y"
    if kind in "iu" and (array.dtype.itemsize > 4 or array.dtype == np.uint32 or target):
        return _to_int32(name, array, where)
    return array.astype(np.int32) if kind == "b" and target else array


def _to_float32(name: str, array: np.ndarray, where: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    lost = np.isinf(narrow) & np.isfinite(array)
    if lost.any():
        row, found = _first(lost, array)
        raise DataError(f"{where}: column {name!r}, row {row}: {found} does not fit float32 (up to 3.4e38); scale it")
    return narrow


def _to_int32(name: str, array: np.ndarray, where: str) -> np.ndarray:
    out = (array < _INT32.min) | (array > _INT32.max)
    if out.any():
        row, found = _first(out, array)
        raise DataError(
            f"{where}: column {name!r}, row {row}: {found} does not fit int32 ({_INT32.min}..{_INT32.max}); "
            "renumber the ids, or give floats"
        )
    return array.astype(np.int32)


def _first(marked: np.ndarray, array: np.ndarray) -> tuple[int, object]:
    at = np.unravel_index(int(np.argmax(marked)), marked.shape)
    return (int(at[0]) if at else 0), array[at].item()


def settle_columns(columns: Mapping[str, object], where: str, *, wide: bool = False) -> Columns:
    """Return every column in its documented dtype, all of one length; `wide` as of `settle`.

    Raises:
        DataError: no column, a reserved name, a column without a row axis, unequal lengths (naming both, with numbers).
    """
    if not columns:
        raise DataError(f"{where} has no columns; give at least x")
    settled: Columns = {}
    for name, value in columns.items():
        if not isinstance(name, str) or not name or name == MASK:
            raise DataError(f"{where}: {name!r} cannot be a column's name ({MASK!r} is the row weight the feed adds)")
        array = settle(name, value, where, wide=wide)
        if array.ndim == 0:
            raise DataError(f"{where}: column {name!r} is one value, {array.item()!r}; a column has one entry a row")
        settled[name] = array
    first, *others = settled
    for name in others:
        if len(settled[name]) != len(settled[first]):
            raise DataError(
                f"{where}: columns have different lengths: {first!r} has {len(settled[first])} rows, "
                f"{name!r} has {len(settled[name])}"
            )
    return settled


def check_finite(columns: Mapping[str, np.ndarray], where: str, *, first_row: int = 0) -> None:
    """Raise `DataError` naming column, row and value of the first NaN or infinity."""
    for name, array in columns.items():
        if array.dtype.kind in "iub":
            continue
        bad = ~np.isfinite(array)
        if bad.any():
            row, found = _first(bad, array)
            rows = int(bad.reshape(len(bad), -1).any(axis=1).sum())
            raise DataError(
                f"{where}: column {name!r}, row {row + first_row}: {found} is not a finite number "
                f"({rows} such row{'s' if rows > 1 else ''}); clean or impute the data first"
            )
