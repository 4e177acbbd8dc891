"""Wrong labels are found on the host and named: value, row, number of classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import DataError
from nnx_jax.objectives import check_labels, check_targets


@pytest.mark.parametrize("wrong", [4, -1, -7])
def test_a_wrong_label_is_named(wrong: int) -> None:
    """case:L10 - value, row and number of classes; -100 is allowed while it is the ignore_index."""
    labels = np.array([0, -100, 3, wrong, 9])
    with pytest.raises(
        DataError, match=rf"label {wrong} at row 3 of column 'y' .* 4 classes, 0 to 3 .*2 labels are wrong"
    ):
        check_labels(labels, 4)
    check_labels(labels[:3], 4)
    with pytest.raises(DataError, match="label -100 at row 1 of"):
        check_labels(labels[:3], 4, ignore_index=None)
    with pytest.raises(DataError, match="label -100 at row 1 of"):
        check_labels(labels[:3], 4, ignore_index=-1)


def test_positions_types_and_limits() -> None:
    tokens = np.zeros((3, 2), np.uint8)
    tokens[1, 1] = 200
    with pytest.raises(DataError, match=r"label 200 at row 1, position \(1,\)"):
        check_labels({"y": tokens}, 200)
    check_labels({"y": tokens}, 200, rows=1)
    check_labels(np.array([True, False]), 2)
    check_labels(np.array([], np.int64), 2)
    with pytest.raises(DataError, match="label -1 at row 0"):
        check_labels(np.array([2**64 - 1], np.uint64), 5)


@pytest.mark.parametrize(
    "labels, message",
    [
        (np.array([1.0, 3.5]), "label 3.5 at row 1 of column 'y' is not a whole number"),
        (np.array([np.nan, 1.0]), "label nan at row 0"),
        (np.array([1.0, 2.0]), r"is float64; class labels are integers, convert them with .astype\('int32'\)"),
        (np.array(["a"]), "<U1; class labels are integers"),
    ],
)
def test_float_labels_are_refused(labels: np.ndarray, message: str) -> None:
    """case:L10 - label 3.5, and any other float, is refused."""
    with pytest.raises(DataError, match=message):
        check_labels(labels, 4)


def test_datasets_are_read_by_column() -> None:
    class Rows:
        columns = ("x", "y")

        def __len__(self) -> int:
            return 10

        def arrays(self) -> None:
            return None

        def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            return {"y": np.asarray(indices)}

    check_labels(Rows(), 10)
    check_labels(Rows(), 4, rows=4)
    with pytest.raises(DataError, match="label 4 at row 4"):
        check_labels(Rows(), 4)
    with pytest.raises(DataError, match="no column 'z'; the columns are y"):
        check_labels(Rows(), 4, column="z")


@pytest.mark.parametrize(
    "loss, y, message",
    [
        ("cross_entropy", np.array([0, 2]), "label 2 at row 1"),
        ("binary_cross_entropy", np.array([0.0, 1.5]), "target 1.5 at row 1 of column 'y' is not a number from 0 to 1"),
        ("binary_cross_entropy", np.array([np.nan]), "target nan at row 0"),
        ("mse", np.array([0.0, np.inf]), "target inf at row 1 of column 'y' is not a finite number"),
        ("mae", np.array(["a"]), "'mae' needs numbers"),
    ],
)
def test_targets_of_every_loss(loss: str, y: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_targets(loss, {"y": y}, 2)


@pytest.mark.parametrize("loss, y", [("binary_cross_entropy", [0, 1]), ("mse", [0.5]), (lambda o, t: o, ["any"])])
def test_good_targets_pass(loss: Any, y: list) -> None:
    check_targets(loss, {"y": np.array(y)}, 2)
