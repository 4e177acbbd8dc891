"""Dtypes, finiteness, lengths: defined, or a clear error before any compile."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from nnx_jax.core.errors import DataError
from nnx_jax.data import ArrayDataset, Feed, InMemoryDataset, TrainingDataset, check
from nnx_jax.data.dtypes import settle


@pytest.mark.parametrize(
    ("name", "given", "settled"),
    [
        ("x", "float64", "float32"),
        ("x", "float32", "float32"),
        ("x", "float16", "float16"),
        ("x", "uint8", "uint8"),
        ("x", "int8", "int8"),
        ("x", "int64", "int32"),
        ("x", "uint32", "int32"),
        ("x", "bool", "bool"),
        ("y", "uint8", "int32"),
        ("y", "int64", "int32"),
        ("y", "bool", "int32"),
        ("y", "float64", "float32"),
    ],
)
def test_dtypes_that_reach_the_model(name: str, given: str, settled: str) -> None:
    """case:L09 (types) uint8 images stay uint8 with their values, ids stay whole, bool targets become int32."""
    values = np.array([1, 0, 1]).astype(given)
    result = settle(name, values, "data")
    assert result.dtype == settled
    np.testing.assert_array_equal(result, values)


def test_large_uint8_values_arrive_unchanged() -> None:
    images = np.array([[250, 10]], np.uint8)
    assert ArrayDataset(images).take(np.array([0]))["x"].tolist() == [[250, 10]]


def test_another_byte_order_becomes_the_native_one() -> None:
    assert settle("x", np.array([1.5], ">f4"), "data").dtype.isnative
    assert settle("x", np.array([1, 300], ">u2"), "data").tolist() == [1, 300]


def test_bfloat16_stays() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert settle("x", np.ones(2, ml_dtypes.bfloat16), "data").dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_ids_that_do_not_fit_int32(number: int) -> None:
    with pytest.raises(DataError, match=rf"column 'x', row 1: {number} does not fit int32"):
        settle("x", np.array([0, number]), "data")
    assert settle("x", np.array([2**31 - 1, -(2**31)]), "data").tolist() == [2**31 - 1, -(2**31)]


def test_uint64_that_does_not_fit() -> None:
    with pytest.raises(DataError, match=f"row 0: {2**64 - 1} does not fit int32"):
        settle("x", np.array([2**64 - 1], np.uint64), "data")


def test_float64_that_does_not_fit_float32() -> None:
    with pytest.raises(DataError, match=r"row 2: 1e\+300 does not fit float32"):
        settle("x", np.array([0.0, np.inf, 1e300]), "data")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([{"a": 1}], object), "dtype object"),
        (np.array(["cat"]), "dtype <U3, first value np.str_"),
        (np.array([1j]), "dtype complex128"),
        (np.array(["2020-01-01"], "datetime64[D]"), "dtype datetime64"),
        ([[1, 2], [3]], "cannot be an array"),
        (np.array([], object), "dtype object"),
    ],
)
def test_wrong_dtypes_name_the_column(value: object, message: str) -> None:
    with pytest.raises(DataError, match=rf"column 'x'.*{message}"):
        settle("x", value, "data")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_name_column_and_row(bad: float) -> None:
    x = np.zeros((5, 2))
    x[3, 1] = x[4, 0] = bad
    with pytest.raises(DataError, match=rf"column 'x', row 3: {bad} is not a finite number \(2 such rows\)"):
        Feed(ArrayDataset(x, np.zeros(5)), batch_size=2)
    y = np.array([0.0, bad])
    with pytest.raises(DataError, match=rf"column 'y', row 1: {bad} .*\(1 such row\)"):
        check(ArrayDataset(np.zeros((2, 1)), y), batch_size=1)
    check(ArrayDataset(np.zeros((2, 1)), y), batch_size=1, finite=False)


def test_missing_column_lists_what_there_is() -> None:
    with pytest.raises(DataError, match=r"ArrayDataset has no column 'y'; .*\(columns: x, label\)"):
        check(ArrayDataset({"x": np.zeros(2), "label": np.zeros(2)}), batch_size=1, wanted=("x", "y"))


@pytest.mark.parametrize("tail", ["pad", "drop", "keep"])
def test_empty_dataset(tail: str) -> None:
    """case:L07 (rows) no rows: an error that names the dataset, whatever the tail policy."""
    with pytest.raises(DataError, match=r"ArrayDataset is empty \(0 rows\)"):
        Feed(ArrayDataset(np.zeros((0, 3)), np.zeros(0)), batch_size=4, tail=tail)


def test_batch_larger_than_the_dataset() -> None:
    """case:L08 3 rows, batch 8: one batch of 3 real rows, or with drop an error with both numbers."""
    dataset = ArrayDataset(np.arange(3.0))
    [padded] = Feed(dataset, batch_size=8, tail="pad").batches()
    assert padded["x"].shape == (8,)
    assert padded["mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    [kept] = Feed(dataset, batch_size=8, tail="keep").batches()
    assert sorted(kept["x"]) == [0, 1, 2]
    assert kept["mask"].tolist() == [1, 1, 1]
    with pytest.raises(DataError, match="3 rows, fewer than batch_size 8"):
        Feed(dataset, batch_size=8, tail="drop")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, found 0"),
        ({"batch_size": True}, "batch_size must be .* found True"),
        ({"batch_size": 2.0}, "batch_size must be .* found 2.0"),
        ({"tail": "wrap"}, "tail must be one of pad, drop, keep, straddle, found 'wrap'"),
        ({"seed": -1}, "seed must be a whole number of 0 or more, found -1"),
        ({"prefetch": -1}, "prefetch must be"),
    ],
)
def test_settings_of_a_feed(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Feed(ArrayDataset(np.zeros(3)), **({"batch_size": 1} | changes))


class Streamed(TrainingDataset):
    """Not in memory, float64, with a hole in row 5000."""

    rows: int = 6000
    hole: ClassVar[int] = 5000

    def __len__(self) -> int:
        return self.rows

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": np.where(indices == self.hole, np.nan, indices.astype(np.float64))}


def test_rows_outside_memory_are_checked_and_settled_too() -> None:
    with pytest.raises(DataError, match="column 'x', row 5000: nan"):
        Feed(Streamed(), batch_size=10)
    feed = Feed(Streamed(rows=4), batch_size=4, shuffle=False)
    [batch] = feed.batches()
    assert batch["x"].dtype == feed.signature()["x"].dtype == np.float32
    assert feed.arrays() is None


class Textual(InMemoryDataset):
    def load(self) -> dict[str, object]:
        return {"x": np.array(["a"])}


def test_text_in_a_dataset_of_your_own() -> None:
    with pytest.raises(DataError, match="Textual: column 'x' has dtype <U1"):
        Feed(Textual(), batch_size=1)
