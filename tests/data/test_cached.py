"""The cache of a dataset: whole or not there, and never asked twice for what it has."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import PrivateAttr

from nnx_jax.core import fsio
from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.data import ArrayDataset, CachedDataset, Feed, IterableDataset, TrainingDataset
from nnx_jax.data.cache_stores import NpyStore, is_remote, local_path
from nnx_jax.data.splits import PartitionedDataset


class Counting(PartitionedDataset):
    """Rows that count how often they are asked for; one of them may be bad."""

    rows: int = 8
    bad: int | None = None
    """A row that raises."""
    odd: int | None = None
    """A row of another shape."""

    _asked: dict[str, int] = PrivateAttr(default_factory=lambda: {"rows": 0})

    def __len__(self) -> int:
        return self.rows

    def take(self, indices: np.ndarray) -> Any:
        found = []
        for index in np.arange(self.rows)[indices]:
            self._asked["rows"] += 1
            if index == self.bad:
                raise RuntimeError(f"interrupted at row {index}")
            found.append(np.full(3 if index != self.odd else 4, 1.0 + index))
        x = np.stack(found) if found else np.zeros((0, 3))
        return {"x": x, "y": x.sum(axis=-1)}


def left(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_the_second_pass_asks_nothing(tmp_path: Path) -> None:
    """Equal rows, no call of the source, its hash; the splits lie apart (pipekit:B16)."""
    source = Counting()
    data = CachedDataset(source=source, cache_dir=str(tmp_path))
    first = [tuple(map(np.copy, row)) for row in data]
    asked = source._asked["rows"]
    assert asked == 8 + 2  # row 0 is looked at for its shape, and for what a network must know
    for again in (data, CachedDataset(source=source, cache_dir=str(tmp_path))):
        for row, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(row[0], other[0])
            np.testing.assert_array_equal(row[1], other[1])
        assert len(again) == 8
        assert again[-1][1] == 24
    assert source._asked["rows"] == asked
    assert data.content_hash() == source.content_hash()
    val: Any = data.with_split("val")
    assert val.cache_path != data.cache_path
    assert Path(val.cache_path).parent == Path(data.cache_path).parent == tmp_path
    assert left(tmp_path) == [source.content_hash()]


def test_invalidate_asks_again(tmp_path: Path) -> None:
    """(pipekit:B17)"""
    source = Counting()
    data = CachedDataset(source=source, cache_dir=str(tmp_path))
    assert data.invalidate() is False
    list(data)
    asked = source._asked["rows"]
    assert data.invalidate() is True
    assert left(tmp_path) == []
    list(data)
    assert source._asked["rows"] == 2 * asked


def test_formats_are_named(tmp_path: Path) -> None:
    """(pipekit:B18)"""
    with pytest.raises(NotImplementedError, match="'parquet'; choose one of npy, zarr"):
        CachedDataset(source=Counting(), cache_dir=str(tmp_path), format="parquet")
    with pytest.raises(ConfigError, match="'npy' is for local folders.*use format='zarr'"):
        CachedDataset(source=Counting(), cache_dir="s3://bucket/x")


def test_what_cannot_be_cached(tmp_path: Path) -> None:
    """(pipekit:B7)"""
    stream = IterableDataset(source=[(1.0, 2.0)], data_id="pairs")
    with pytest.raises(TypeError, match="needs an indexable source, and the rows of IterableDataset have no numbers"):
        CachedDataset(source=stream, cache_dir=str(tmp_path))
    with pytest.raises(TypeError, match="expected a TrainingDataset"):
        CachedDataset(source=[1, 2], cache_dir=str(tmp_path))  # type: ignore[arg-type]


def test_an_empty_source(tmp_path: Path) -> None:
    """(pipekit:B19)"""
    with pytest.raises(ValueError, match=r"ArrayDataset is empty \(0 rows\); there is nothing to cache"):
        list(CachedDataset(source=ArrayDataset(np.zeros((0, 3))), cache_dir=str(tmp_path)).take(np.arange(0)))
    assert left(tmp_path) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    """The source fails at row 5 of 8; the next read writes all of it anew (pipekit:B20)."""
    broken = Counting(bad=5)
    data = CachedDataset(source=broken, cache_dir=str(tmp_path))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="interrupted at row 5"):
            data.take(np.arange(8))
        assert left(tmp_path) == []


def test_a_killed_write_is_not_read(tmp_path: Path) -> None:
    """A process that dies in the middle leaves a temporary that is never taken for a cache (pipekit:B20)."""
    program = textwrap.dedent(
        f"""
        import os, sys
        import numpy as np
        from nnx_jax.core import fsio
        from nnx_jax.data import ArrayDataset, CachedDataset
        fsio.replace_dir = lambda *paths: os._exit(9)  # everything is written but the rename
        data = CachedDataset(source=ArrayDataset(np.arange(8.0)[:, None]), cache_dir={str(tmp_path)!r})
        data.take(np.arange(1))
        """
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    (stranded,) = left(tmp_path)
    source = ArrayDataset(np.arange(8.0)[:, None])
    data = CachedDataset(source=source, cache_dir=str(tmp_path))
    assert stranded.startswith(f".{source.content_hash()}.")
    np.testing.assert_array_equal(data.take(np.arange(8))["x"][:, 0], np.arange(8))
    assert left(tmp_path) == sorted([stranded, source.content_hash()])


@pytest.mark.parametrize("damage", ["manifest", "column", "short", "other", "empty"])
def test_a_cache_that_is_not_whole_is_written_anew(tmp_path: Path, damage: str) -> None:
    """(pipekit:B20) a file that is gone, cut off, or not what was written."""
    source = Counting()
    list(CachedDataset(source=source, cache_dir=str(tmp_path)))
    folder = tmp_path / source.content_hash()
    if damage == "manifest":
        (folder / "cache.json").unlink()
    elif damage == "column":
        (folder / "column0.npy").unlink()
    elif damage == "short":
        os.truncate(folder / "column1.npy", (folder / "column1.npy").stat().st_size - 8)
    elif damage == "other":
        np.save(folder / "column0.npy", np.zeros((8, 4), np.float32))
    else:
        os.truncate(folder / "cache.json", 0)
    asked = source._asked["rows"]
    found = CachedDataset(source=source, cache_dir=str(tmp_path)).take(np.arange(8))["x"]
    np.testing.assert_array_equal(found[:, 0], 1.0 + np.arange(8))
    assert source._asked["rows"] == asked + 10


def test_two_writers_at_once(tmp_path: Path) -> None:
    """Another process finishes the same cache while this one writes: one of the two is kept, whole."""

    class Racing(Counting):
        """Is cached by somebody else when its last row is asked for."""

        def take(self, indices: np.ndarray) -> Any:
            if 7 in indices and not left(tmp_path / self.content_hash()):
                list(CachedDataset(source=Counting(), cache_dir=str(tmp_path / "other")))
                (tmp_path / "other" / Counting().content_hash()).rename(tmp_path / self.content_hash())
            return super().take(indices)

    data = CachedDataset(source=Racing(), cache_dir=str(tmp_path))
    np.testing.assert_array_equal(data.take(np.arange(8))["x"][:, 0], 1.0 + np.arange(8))
    assert left(tmp_path) == sorted(["other", data.content_hash()])


def test_a_bad_folder_that_another_process_repairs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a broken cache and its removal, somebody else writes a whole one: that one is kept."""
    source = Counting()
    data = CachedDataset(source=source, cache_dir=str(tmp_path))
    (tmp_path / source.content_hash()).mkdir()
    discard = NpyStore.discard

    def late(store: NpyStore) -> None:
        monkeypatch.setattr(NpyStore, "discard", discard)
        list(CachedDataset(source=Counting(), cache_dir=str(tmp_path)))
        discard(store)

    monkeypatch.setattr(NpyStore, "discard", late)
    np.testing.assert_array_equal(data.take(np.arange(8))["x"][:, 0], 1.0 + np.arange(8))
    assert source._asked["rows"] == 0
    assert left(tmp_path) == [source.content_hash()]


def test_a_whole_cache_moved_aside_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when it is repaired in the moment before the folder is moved."""
    source = Counting()
    data = CachedDataset(source=source, cache_dir=str(tmp_path))
    folder = tmp_path / source.content_hash()
    folder.mkdir()
    replace = fsio.replace_dir

    def late(temporary: Any, final: Any) -> None:
        monkeypatch.setattr(fsio, "replace_dir", replace)
        folder.rmdir()
        list(CachedDataset(source=Counting(), cache_dir=str(tmp_path)))
        replace(temporary, final)

    monkeypatch.setattr(fsio, "replace_dir", late)
    np.testing.assert_array_equal(data.take(np.arange(8))["x"][:, 0], 1.0 + np.arange(8))
    assert source._asked["rows"] == 0
    assert left(tmp_path) == [source.content_hash()]


STEPS = """
from nnx_jax.core.operator import Operator
BY = {by}
def times(x):
    return x * BY
def step(x):
    return times(x) + {plus}
class Step(Operator):
    def _apply(self, x):
        return step(x)
class Plain:
    def __call__(self, x):
        return step(x)
"""


def _steps(monkeypatch: pytest.MonkeyPatch, **values: float) -> Any:
    """A user's module, as it is imported after an edit."""
    module = types.ModuleType("cached_steps")
    monkeypatch.setitem(sys.modules, "cached_steps", module)
    exec(STEPS.format(**{"by": 2.0, "plus": 1.0} | values), module.__dict__)
    return module


@pytest.mark.parametrize("name", ["step", "Step", "Plain"])
def test_edited_code_is_another_cache(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function, an operator and an object whose code was edited, or a number that it finds by name."""
    found = []
    for values in ({}, {}, {"by": 3.0}, {"plus": 5.0}):
        part = getattr(_steps(monkeypatch, **values), name)
        source = ArrayDataset(np.ones((2, 1), np.float32)).map(part if name == "step" else part())
        found.append(CachedDataset(source=source, cache_dir=str(tmp_path)).take(np.arange(1))["x"].item())
    assert found == [3.0, 3.0, 4.0, 7.0]
    assert len(left(tmp_path)) == 3


def test_a_widened_dataset_has_a_hash_of_its_own() -> None:
    """Also where the hash was asked for before, and kept."""

    class Keeping(PartitionedDataset):
        """Keeps its hash."""

        _kept: dict[str, Any] = PrivateAttr(default_factory=dict)

        def __len__(self) -> int:
            return 2

        def take(self, indices: np.ndarray) -> Any:
            x = np.full((2, 1), 1 / 3)[indices]
            return {"x": x if self.wide else x.astype(np.float32)}

        def content_hash(self) -> str:
            if "hash" not in self._kept:
                self._kept["hash"] = super().content_hash()
            return self._kept["hash"]

    narrow = Keeping()
    first = narrow.content_hash()
    assert narrow.widened().content_hash() == Keeping().widened().content_hash() != first
    assert narrow.widened().widened(False).content_hash() == first == narrow.content_hash()


def test_zarr_needs_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = CachedDataset(source=Counting(), cache_dir=str(tmp_path), format="zarr")
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match=r"a cache of format 'zarr' needs zarr: pip install 'nnx_jax\[cache\]'"):
        data.take(np.arange(1))


def test_a_row_of_another_shape_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(pipekit:B21) also where the source cannot even stack it, and where only the type differs."""
    with pytest.raises(ValueError, match=r"Counting: row 3 is .*\(4,\).*the first row .*\(3,\)"):
        list(CachedDataset(source=Counting(odd=3), cache_dir=str(tmp_path)))
    assert left(tmp_path) == []

    class Turning(Counting):
        """Whole numbers from row 4 on."""

        def take(self, indices: np.ndarray) -> Any:
            found = super().take(indices)
            return {n: c.astype(np.int32) if min(indices, default=0) >= 4 else c for n, c in found.items()}

    monkeypatch.setattr("nnx_jax.data.cached._ROWS", 4)
    with pytest.raises(ValueError, match=r"Turning: row 4 is .*int32.*the first row .*float32"):
        list(CachedDataset(source=Turning(), cache_dir=str(tmp_path)))
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "remote", "local"),
    [
        ("s3://bucket/caches", True, None),
        ("gcs://bucket/caches", True, None),
        ("memory://caches", True, None),
        ("/scratch/caches", False, "/scratch/caches"),
        ("rel/x", False, "rel/x"),
        ("file:///x", False, "/x"),
        ("C:/x", False, "C:/x"),
    ],
)
def test_addresses_and_folders(path: str, remote: bool, local: str | None) -> None:
    """(pipekit:B22)"""
    assert is_remote(path) is remote
    if local is not None:
        assert local_path(path) == local
        data = CachedDataset(source=Counting(), cache_dir=path)
        assert data.cache_path == str(Path(local, data.content_hash()))
        return
    data = CachedDataset(source=Counting(), cache_dir=path, format="zarr")
    assert data.cache_path == f"{path}/{data.content_hash()}.zarr"


def test_types_and_whole_columns(tmp_path: Path) -> None:
    x = np.arange(24).reshape(6, 2, 2).astype(np.uint8)
    source = ArrayDataset(x, np.array([0, 1, 2, 0, 1, 2]), weight=np.linspace(0, 1, 6).astype(np.float16))
    data = CachedDataset(source=source, cache_dir=tmp_path)  # type: ignore[arg-type]  # a Path is taken, too
    assert data.info == source.info
    assert data.columns == source.columns
    for name, column in source.arrays().items():
        np.testing.assert_array_equal(data.arrays()[name], column)  # type: ignore[index]
        assert data.arrays()[name].dtype == column.dtype  # type: ignore[index]
    for one, other in zip(Feed(data, batch_size=4).batches(2), Feed(source, batch_size=4).batches(2), strict=True):
        assert {n: v.tobytes() for n, v in one.items()} == {n: v.tobytes() for n, v in other.items()}
    wide = CachedDataset(source=ArrayDataset(np.array([[1 / 3]])), cache_dir=str(tmp_path)).widened()
    assert wide.take(np.array([0]))["x"].dtype == np.float64
    assert wide.take(np.array([0]))["x"][0, 0] == 1 / 3
    again = TrainingDataset.from_yaml(f"kind: cached\ncache_dir: {tmp_path}\nsource: {{kind: digits, split: test}}\n")
    assert len(again) == 176
    assert again.content_hash() == again.source.content_hash()  # type: ignore[attr-defined]


def test_a_link_in_place_of_a_column_is_not_followed(tmp_path: Path) -> None:
    source = Counting()
    list(CachedDataset(source=source, cache_dir=str(tmp_path)))
    column = tmp_path / source.content_hash() / "column0.npy"
    column.rename(tmp_path / "elsewhere.npy")
    column.symlink_to(tmp_path / "elsewhere.npy")
    asked = source._asked["rows"]
    list(CachedDataset(source=source, cache_dir=str(tmp_path)))
    assert source._asked["rows"] == asked + 10
    with pytest.raises(DataError, match="bfloat16 cannot be cached"):
        import ml_dtypes

        half = ArrayDataset(np.zeros((2, 2), ml_dtypes.bfloat16))
        list(CachedDataset(source=half, cache_dir=str(tmp_path)))
