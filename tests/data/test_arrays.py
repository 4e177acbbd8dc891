"""Arrays and npz files: what is stored, what identifies the rows, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.data import ArrayDataset, InMemoryDataset, NpzDataset, TrainingDataset, as_dataset

X = np.arange(12.0).reshape(4, 3)
Y = np.array([0, 2, 1, 2])


def test_columns_are_settled_described_and_iterated() -> None:
    dataset = ArrayDataset(X, Y)
    assert len(dataset) == 4
    assert {name: (c.shape, c.dtype.name) for name, c in dataset.columns.items()} == {
        "x": ((3,), "float32"),
        "y": ((), "int32"),
    }
    assert dataset.info == {"input_shape": (3,), "input_dim": 3, "target_shape": (), "n_classes": 3, "output_dim": 3}
    np.testing.assert_array_equal(dataset.take(np.array([2, 0, 2]))["x"], X[[2, 0, 2]])
    rows = list(dataset)
    assert [y for _, y in rows] == [0, 2, 1, 2]
    np.testing.assert_array_equal(rows[3][0], [9, 10, 11])


def test_info_of_values_and_of_declared_classes() -> None:
    assert ArrayDataset(X, Y, n_classes=5).info["n_classes"] == 5
    several = ArrayDataset(X, np.zeros((4, 2))).info
    assert several["output_dim"] == 2
    assert several["target_shape"] == (2,)
    assert "n_classes" not in several
    assert ArrayDataset(X, np.array([0.5, 1, 2, 3])).info["output_dim"] == 1
    assert ArrayDataset(X, np.array([-100, -100, 1, 0])).info["n_classes"] == 2


def test_the_hash_is_of_the_rows() -> None:
    """pipekit:B25 bytes, dtype and shape count, one element is enough; C and F order are equal."""
    base = ArrayDataset(X, Y).content_hash()
    assert ArrayDataset(np.asfortranarray(X), Y.copy()).content_hash() == base
    assert ArrayDataset({"y": Y, "x": X}).content_hash() == base
    changed = X.copy()
    changed[3, 2] += 1e-3
    others = [
        ArrayDataset(changed, Y),
        ArrayDataset(X.reshape(4, 3, 1), Y),
        ArrayDataset(X.astype(np.float16), Y),
        ArrayDataset(X[::-1], Y),
        ArrayDataset(X, Y, n_classes=4),
    ]
    hashes = {base, *(other.content_hash() for other in others)}
    assert len(hashes) == 6


def test_a_later_change_in_place_cannot_make_the_hash_lie() -> None:
    mine = X.astype(np.float32)
    dataset = ArrayDataset(mine, Y)
    mine[:] = -1
    np.testing.assert_array_equal(dataset.arrays()["x"], X)
    with pytest.raises(ValueError, match="read-only"):
        dataset.arrays()["x"][0] = 1.0
    mine[0] = 5  # the caller's own array stays writable


def test_equality_state_and_the_way_back() -> None:
    dataset = ArrayDataset(X, Y)
    assert dataset == ArrayDataset(X, Y)
    assert dataset != ArrayDataset(X + 1, Y)
    assert dataset.state()["kind"] == "arrays"
    with pytest.raises(ConfigError, match="given in Python.*kind: npz"):
        TrainingDataset.from_state(dataset.state())


def test_an_empty_dataset_is_still_a_dataset() -> None:
    assert ArrayDataset(np.zeros((0, 3)))
    assert len(ArrayDataset(np.zeros((0, 3)))) == 0


def test_a_dataset_is_not_called() -> None:
    with pytest.raises(TypeError, match="iterated"):
        ArrayDataset(X, Y)()


def test_ragged_and_missing_columns() -> None:
    with pytest.raises(DataError, match=r"different lengths: 'x' has 4 rows, 'y' has 3"):
        ArrayDataset(X, Y[:3])
    with pytest.raises(DataError, match="no columns"):
        ArrayDataset()
    with pytest.raises(DataError, match="one value, 3.0"):
        ArrayDataset(3.0)
    with pytest.raises(DataError, match="'mask' cannot be a column's name"):
        ArrayDataset({"x": X, "mask": Y})


def test_as_dataset_takes_the_usual_forms() -> None:
    assert as_dataset((X, Y)) == as_dataset({"x": X, "y": Y}) == ArrayDataset(X, Y)
    assert as_dataset(X).names == ("x",)
    assert as_dataset(kept := ArrayDataset(X)) is kept
    with pytest.raises(DataError, match="found int"):
        as_dataset(3)


class Halves(InMemoryDataset):
    n: int = 4

    def load(self) -> dict[str, object]:
        return {"x": np.arange(self.n) / 2, "y": [0] * self.n}


def test_a_dataset_of_your_own_needs_load_only() -> None:
    dataset = Halves(n=3)
    assert len(dataset) == 3
    assert dataset.arrays()["x"].tolist() == [0.0, 0.5, 1.0]
    assert dataset.content_hash() == ArrayDataset([0.0, 0.5, 1.0], [0, 0, 0]).content_hash()


def test_npz_gives_the_same_rows_and_hash(tmp_path) -> None:
    np.savez(tmp_path / "a.npz", images=X, labels=Y)
    dataset = NpzDataset(path=str(tmp_path / "a.npz"), x="images", y="labels")
    assert dataset.content_hash() == ArrayDataset(X, Y).content_hash()
    (tmp_path / "a.npz").rename(tmp_path / "b.npz")
    moved = TrainingDataset.from_state({"kind": "npz", "path": str(tmp_path / "b.npz"), "x": "images", "y": None})
    assert moved.columns.keys() == {"x"}


def test_npz_missing_column_lists_the_names(tmp_path) -> None:
    np.savez(tmp_path / "a.npz", x=X, label=Y)
    with pytest.raises(DataError, match=r"no column 'labels'; did you mean 'label'\?.*columns: x, label"):
        len(NpzDataset(path=str(tmp_path / "a.npz"), y="labels"))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x80\x04K\x01.", b"x,y\n1,2\n"])
def test_npz_that_is_none(tmp_path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz is not an \.npz of plain arrays"):
        len(NpzDataset(path=str(tmp_path / "a.npz")))


def test_npz_that_is_not_there(tmp_path) -> None:
    with pytest.raises(DataError, match=r"none\.npz cannot be read: No such file"):
        len(NpzDataset(path=str(tmp_path / "none.npz")))


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.mark.parametrize("form", ["npz", "npy"])
def test_object_arrays_run_nothing(tmp_path, form: str) -> None:
    """case:J07 a stored object array is refused and its code does not run."""
    marker, path = tmp_path / "ran", tmp_path / f"data.{form}"
    trap = np.array([Trap(str(marker))], dtype=object)
    if form == "npz":
        np.savez(path, x=trap, y=np.zeros(1))
    else:
        np.save(path, trap, allow_pickle=True)
    with pytest.raises(DataError, match="no pickle or object is read"):
        len(NpzDataset(path=str(path)))
    assert not marker.exists()


def test_importing_data_is_light() -> None:
    code = "import nnx_jax.data, sys; print([m for m in ('jax', 'grain', 'sklearn', 'torch') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
