"""CSV files: the columns asked for, and every complaint with file:line:column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nnx_jax.core.errors import DataError
from nnx_jax.data import ArrayDataset, CsvDataset, TrainingDataset

TEXT = "height,width,kind\n1.5,2,0\n-3e-1,4,1\n 5.0 ,.5,1\n"


def written(folder: Path, text: str | bytes) -> str:
    path = folder / "data.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_features_and_labels(tmp_path) -> None:
    dataset = CsvDataset(path=written(tmp_path, TEXT), target="kind")
    columns = dataset.arrays()
    np.testing.assert_array_equal(columns["x"], np.array([[1.5, 2], [-0.3, 4], [5, 0.5]], np.float32))
    assert columns["y"].tolist() == [0, 1, 1]
    assert (columns["x"].dtype, columns["y"].dtype) == (np.float32, np.int32)
    assert dataset.info["n_classes"] == 2


def test_chosen_features_keep_the_order_asked_for(tmp_path) -> None:
    state = {"kind": "csv", "path": written(tmp_path, TEXT), "target": "height", "features": ["kind", "width"]}
    columns = TrainingDataset.from_state(state).arrays()
    assert columns is not None
    assert columns["x"].tolist() == [[0, 2], [1, 4], [1, 0.5]]
    np.testing.assert_array_equal(columns["y"], np.array([1.5, -0.3, 5], np.float32))


def test_the_hash_is_of_the_rows_not_the_file(tmp_path) -> None:
    dataset = CsvDataset(path=written(tmp_path, "a,b\n1,0\n2,1\n"), target="b")
    assert dataset.content_hash() == ArrayDataset([[1.0], [2.0]], [0, 1]).content_hash()


def test_target_type(tmp_path) -> None:
    path = written(tmp_path, "a,b\n1,0\n2,1\n")
    assert CsvDataset(path=path, target="b", target_type="float").arrays()["y"].dtype == np.float32
    path = written(tmp_path, "a,b\n1,0\n2,1.5\n")
    assert CsvDataset(path=path, target="b").arrays()["y"].tolist() == [0, 1.5]
    with pytest.raises(DataError, match=r"data\.csv:3:2: column 'b': '1\.5' is not a whole number"):
        len(CsvDataset(path=path, target="b", target_type="int"))


def test_quotes_blank_lines_bom_and_delimiter(tmp_path) -> None:
    path = written(tmp_path, b'\xef\xbb\xbf"a;b";c\r\n"1";2\r\n\r\n3;4\r\n')
    dataset = CsvDataset(path=path, delimiter=";")
    assert dataset.arrays()["x"].tolist() == [[1, 2], [3, 4]]
    assert dataset.columns.keys() == {"x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3,cat\n", r"data\.csv:3:2: column 'b': 'cat' is not a finite number"),
        ("a,b\n1,2\n3,\n", r"data\.csv:3:2: column 'b': the cell is empty"),
        ("a,b\n,2\n", r"data\.csv:2:1: column 'a': the cell is empty"),
        ("a,b\nnan,2\n", r"data\.csv:2:1: column 'a': 'nan' is not a finite number"),
        ("a,b\n1e999,2\n", r"data\.csv:2:1: column 'a': '1e999' is not a finite number"),
        ("a,b\n1_000,2\n", r"data\.csv:2:1: column 'a': '1_000' is not a finite number"),
        ("a,b\n\n\n1\n", r"data\.csv:4: 1 cells, but the header has 2"),
        ("a,b\n1,2,3\n", r"data\.csv:2: 3 cells, but the header has 2"),
        ("a,a\n1,2\n", r"data\.csv:1: the column name 'a' appears more than once"),
        ("", r"data\.csv:1: there is no header"),
        ('a,b\n1,"2\n', r"data\.csv:2: not readable as CSV"),
        (b"a,b\n1,\xff\n", r"data\.csv is not UTF-8"),
    ],
)
def test_complaints_name_the_place(tmp_path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        len(CsvDataset(path=written(tmp_path, text)))


def test_the_line_counts_inside_quoted_cells_too(tmp_path) -> None:
    path = written(tmp_path, 'note,a\n"two\nlines",1\nshort,x\n')
    with pytest.raises(DataError, match=r"data\.csv:4:2: column 'a': 'x'"):
        len(CsvDataset(path=path, features=("a",)))


def test_missing_column_lists_the_names(tmp_path) -> None:
    path = written(tmp_path, TEXT)
    with pytest.raises(DataError, match=r"no column 'kinds'; did you mean 'kind'\? \(columns: height, width, kind\)"):
        len(CsvDataset(path=path, target="kinds"))
    with pytest.raises(DataError, match="no column 'depth'"):
        len(CsvDataset(path=path, features=("depth",)))
    with pytest.raises(DataError, match="no feature column beside the target"):
        len(CsvDataset(path=written(tmp_path, "a\n1\n"), target="a"))


def test_a_header_alone_is_an_empty_dataset(tmp_path) -> None:
    dataset = CsvDataset(path=written(tmp_path, "a,b\n"), target="b")
    assert len(dataset) == 0
    assert dataset.arrays()["x"].shape == (0, 1)


def test_no_such_file(tmp_path) -> None:
    with pytest.raises(DataError, match=r"none\.csv cannot be read: No such file"):
        len(CsvDataset(path=str(tmp_path / "none.csv")))
