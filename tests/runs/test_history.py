"""The history file: strict CSV, an extent that says what counts, and roll-back without a gap."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_jax.core.errors import CheckpointError, HistoryCorruptionError
from nnx_jax.runs.history import Extent, History, parse_csv, read_history


def written(path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...] = ("epoch", "loss")) -> Extent:
    history = History(path, columns)
    history.append(rows)
    return history.flush()


def test_bytes_are_the_csv_written_by_hand(tmp_path: Path) -> None:
    """case:L03 one header, one row an epoch, each value under its own name, None empty, nan and inf spelled."""
    path = tmp_path / "idps.csv"
    rows = [
        {"epoch": 0, "train": 0.5},
        {"epoch": 1, "val": None, "train": math.nan, "note": 'a "b", c'},
        {"epoch": 2, "val": math.inf, "train": -math.inf, "ok": True},
    ]
    extent = written(path, rows, ("epoch", "train", "val", "ok", "note"))
    assert path.read_text() == 'epoch,train,val,ok,note\n0,0.5,,,\n1,nan,,,"a ""b"", c"\n2,-inf,inf,true,\n'
    columns, found = read_history(path, extent)
    assert columns == ("epoch", "train", "val", "ok", "note")
    assert found[0] == {"epoch": 0, "train": 0.5, "val": None, "ok": None, "note": None}
    assert math.isnan(found[1].pop("train"))
    assert found[1] == {"epoch": 1, "val": None, "ok": None, "note": 'a "b", c'}
    assert found[2] == {"epoch": 2, "train": -math.inf, "val": math.inf, "ok": True, "note": None}


def test_a_strict_reader_of_somebody_else_reads_it(tmp_path: Path) -> None:
    """case:L03 Python's csv module in strict mode sees the same cells."""
    path = tmp_path / "idps.csv"
    written(path, [{"epoch": 0, "loss": 'x,"y"\nz'}, {"epoch": 1, "loss": None}])
    assert list(csv.reader(io.StringIO(path.read_text()), strict=True)) == [
        ["epoch", "loss"],
        ["0", 'x,"y"\nz'],
        ["1", ""],
    ]


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)


@given(rows=st.lists(st.tuples(values, values), max_size=8))
def test_values_come_back_as_written(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, Any]]) -> None:
    """Any mix of numbers, text that looks like a number, and None reads back equal and of the same type."""
    path = tmp_path_factory.mktemp("csv") / "idps.csv"
    dicts = [{"a": a, "b": b} for a, b in rows]
    _, found = read_history(path, written(path, dicts, ("a", "b")))
    assert found == dicts
    assert [[type(value) for value in row.values()] for row in found] == [[type(a), type(b)] for a, b in rows]


def test_float32_reads_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "idps.csv"
    value = np.float32(0.1)
    _, found = read_history(path, written(path, [{"epoch": np.int64(3), "loss": value}]))
    assert found == [{"epoch": 3, "loss": float(value)}]
    assert np.float32(found[0]["loss"]).tobytes() == value.tobytes()


def test_every_kind_of_number_has_its_one_spelling(tmp_path: Path) -> None:
    """Python's numbers, which take a short way, are written as numpy's are; True is no 1."""
    columns = ("a", "b", "c", "d")
    plain = [{"a": 7, "b": 0.5, "c": True, "d": math.nan}, {"a": -1, "b": -math.inf, "c": False}]
    boxed = [
        {"a": np.int32(7), "b": np.float32(0.5), "c": np.bool_(True), "d": np.float64(np.nan)},
        {"a": np.int64(-1), "b": np.float32(-np.inf), "c": np.asarray(False), "d": None},
    ]
    written(tmp_path / "a.csv", plain, columns)
    written(tmp_path / "b.csv", boxed, columns)
    assert (tmp_path / "a.csv").read_bytes() == b"a,b,c,d\n7,0.5,true,nan\n-1,-inf,false,\n"
    assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "a.csv").read_bytes()


def test_a_table_gives_the_bytes_of_its_rows(tmp_path: Path) -> None:
    """Columns at once and rows one by one are the same file."""
    losses = [0.1, math.nan, None]
    a = History(tmp_path / "a.csv", ("epoch", "step", "loss", "note"))
    a.append_table({"epoch": 7, "step": [0, 1, 2], "loss": losses, "note": "x"}, 3)
    b = History(tmp_path / "b.csv", ("epoch", "step", "loss", "note"))
    b.append([{"epoch": 7, "step": i, "loss": losses[i], "note": "x"} for i in range(3)])
    assert a.flush() == b.flush()
    assert a.path.read_bytes() == b.path.read_bytes()


def test_a_table_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    history = History(tmp_path / "a.csv", ("step",))
    with pytest.raises(CheckpointError, match="'step' has 2 values for 3 rows"):
        history.append_table({"step": [1, 2]}, 3)


def test_equal_runs_write_equal_bytes(tmp_path: Path) -> None:
    rows = [{"epoch": i, "loss": 1 / (i + 1)} for i in range(20)]
    assert written(tmp_path / "a.csv", rows) == written(tmp_path / "b.csv", rows)


def test_the_writer_cuts_what_last_does_not_cover(tmp_path: Path) -> None:
    """case:L03 a row logged but not committed does not come back, nor twice, after the next start."""
    path = tmp_path / "idps.csv"
    extent = written(path, [{"epoch": 0, "loss": 1.0}])
    with path.open("ab") as file:
        file.write(b"1,0.5\n2,0.")
    history = History(path, ("epoch", "loss"), extent=extent)
    history.append([{"epoch": 1, "loss": 0.25}])
    history.flush()
    assert path.read_text() == "epoch,loss\n0,1.0\n1,0.25\n"


def test_rollback_keeps_the_rows_for_the_next_flush(tmp_path: Path) -> None:
    """After a failed commit the file is short again, and the next commit writes both epochs: no gap."""
    path = tmp_path / "idps.csv"
    history = History(path, ("epoch",))
    history.append([{"epoch": 0}])
    history.flush()
    history.settle()
    history.append([{"epoch": 1}])
    history.flush()
    history.append([{"epoch": 2}])
    history.rollback()
    assert path.read_text() == "epoch\n0\n"
    assert (history.committed.rows, history.rows) == (1, 3)
    extent = history.flush()
    assert path.read_text() == "epoch\n0\n1\n2\n"
    assert read_history(path, extent)[1] == [{"epoch": 0}, {"epoch": 1}, {"epoch": 2}]


def test_rows_that_no_commit_covers_can_be_given_up(tmp_path: Path) -> None:
    """Buffered or written, they do not come with the next flush."""
    path = tmp_path / "idps.csv"
    history = History(path, ("epoch",))
    history.append([{"epoch": 0}])
    history.flush()
    history.settle()
    history.append([{"epoch": 1}])
    history.flush()
    history.append([{"epoch": 2}])
    history.discard()
    assert (history.rows, path.read_text()) == (1, "epoch\n0\n")
    history.append([{"epoch": 7}])
    history.flush()
    assert path.read_text() == "epoch\n0\n7\n"


def test_other_columns_are_refused(tmp_path: Path) -> None:
    """case:L03 columns cannot shift on resume: the header of the first start stands."""
    path = tmp_path / "idps.csv"
    extent = written(path, [{"epoch": 0}])
    with pytest.raises(CheckpointError, match="fixed at its first start as epoch,loss"):
        History(path, ("epoch", "loss", "accuracy"), extent=extent)


def test_an_undeclared_column_is_refused(tmp_path: Path) -> None:
    history = History(tmp_path / "idps.csv", ("epoch", "loss"))
    with pytest.raises(CheckpointError, match="'los' was not declared.*did you mean 'loss'"):
        history.append([{"epoch": 0, "los": 1.0}])


@pytest.mark.parametrize("columns", [(), ("a", "a")])
def test_columns_are_distinct_and_some(tmp_path: Path, columns: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError, match="distinct and at least one"):
        History(tmp_path / "idps.csv", columns)


def test_objects_are_refused(tmp_path: Path) -> None:
    history = History(tmp_path / "idps.csv", ("a",))
    with pytest.raises(CheckpointError, match="numbers, text, booleans or None, got list"):
        history.append([{"a": [1, 2]}])


def test_no_last_means_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "idps.csv"
    written(path, [{"epoch": 0}])
    assert read_history(path, None) == ((), [])


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Extent, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("d8") / "idps.csv"
    rows = [{"epoch": i, "loss": 1 / (i + 1)} for i in range(6)]
    extent = written(path, rows)
    return path.read_bytes(), extent, rows


def edits() -> st.SearchStrategy[tuple[str, int, int]]:
    kinds = st.sampled_from(["cut", "twice", "swap", "flip", "foreign", "tail"])
    return st.tuples(kinds, st.integers(0, 10**6), st.integers(0, 10**6))


def outcome(path: Path, extent: Extent) -> list[dict[str, Any]] | str:
    try:
        return read_history(path, extent)[1]
    except HistoryCorruptionError as error:
        return f"refused {path}" if str(path) in str(error) else str(error)


@given(edit=edits())
def test_damaged_history_is_refused_or_the_committed_rows(
    tmp_path_factory: pytest.TempPathFactory,
    committed: tuple[bytes, Extent, list[dict[str, Any]]],
    edit: tuple[str, int, int],
) -> None:
    """Torn, duplicated, reordered, foreign or flipped: the reader gives LAST's rows or raises, it never invents one."""
    data, extent, rows = committed
    kind, i, j = edit
    lines = data.splitlines(keepends=True)
    i, j = i % len(lines), j % len(lines)
    if kind == "cut":
        data = data[: edit[1] % len(data)]
    elif kind == "twice":
        data = b"".join([*lines[:i], lines[i], *lines[i:]])
    elif kind == "swap":
        lines[i], lines[j] = lines[j], lines[i]
        data = b"".join(lines)
    elif kind == "flip":
        at = edit[1] % len(data)
        data = data[:at] + bytes([data[at] ^ (1 << edit[2] % 8)]) + data[at + 1 :]
    elif kind == "foreign":
        data = b"".join([*lines[:i], b"9,0.125\n", *lines[i:]])
    else:
        data += b"6,0.1\n7,"
    path = tmp_path_factory.mktemp("d8") / "idps.csv"
    path.write_bytes(data)
    assert outcome(path, extent) in (rows, f"refused {path}")


@pytest.mark.parametrize("text", ["a,b\n1\n", "a,b\n1,2,3\n", "a\n1", 'a\n"x', 'a\n"x"y\n', 'a\nx"y\n'])
def test_torn_lines_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        parse_csv(text.encode())
