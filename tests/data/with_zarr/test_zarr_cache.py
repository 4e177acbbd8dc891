"""Caches as zarr groups, in a folder and at an address of fsspec; and windows over zarr arrays."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from pydantic import PrivateAttr

from nnx_jax.core.errors import DataError
from nnx_jax.data import ArrayDataset, CachedDataset, WindowDataset
from nnx_jax.data.splits import PartitionedDataset


class Counting(PartitionedDataset):
    """Rows that count how often they are asked for; one of them may raise."""

    bad: int | None = None

    _asked: dict[str, int] = PrivateAttr(default_factory=lambda: {"rows": 0})

    def __len__(self) -> int:
        return 8

    def take(self, indices: np.ndarray) -> Any:
        rows = np.arange(8)[indices]
        self._asked["rows"] += len(rows)
        if self.bad in rows:
            raise RuntimeError(f"interrupted at row {self.bad}")
        x = (rows[:, None] * np.array([1.0, 2.0])).astype(np.float32)
        return {"x": x, "y": rows}


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where caches go: each test its own."""
    return str(tmp_path / "caches") if request.param == "folder" else f"memory://{secrets.token_hex(8)}/caches"


def files(place: str) -> list[str]:
    system, path = fsspec.core.url_to_fs(place)
    return sorted(name.rsplit("caches/", 1)[1] for name in system.find(path)) if system.exists(path) else []


def cached(source: Any, place: str) -> CachedDataset:
    return CachedDataset(source=source, cache_dir=place, format="zarr")


def test_round_trip(place: str) -> None:
    """Written once, read from then on, in any order (pipekit:B16, pipekit:B23)."""
    source = Counting()
    data = cached(source, place)
    first = data.take(np.arange(8))
    asked = source._asked["rows"]
    again = cached(source, place)
    found = again.take(np.array([5, 0, 5, -1]))
    np.testing.assert_array_equal(found["x"], first["x"][[5, 0, 5, 7]])
    assert found["y"].tolist() == [5, 0, 5, 7]
    assert found["x"].dtype == np.float32
    assert again.columns == data.columns
    assert again.arrays() is None
    assert source._asked["rows"] == asked
    assert data.cache_path == f"{place}/{source.content_hash()}.zarr"
    assert data.with_split("val").cache_path != data.cache_path  # type: ignore[attr-defined]
    assert data.invalidate()
    assert not data.invalidate()
    assert files(place) == []
    data.take(np.arange(1))
    assert source._asked["rows"] == 2 * asked


def test_an_interrupted_write_leaves_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """(pipekit:B20)"""
    monkeypatch.setattr("nnx_jax.data.cached._ROWS", 2)
    with pytest.raises(RuntimeError, match="interrupted at row 5"):
        cached(Counting(bad=5), place).take(np.arange(8))
    assert files(place) == []


@pytest.mark.parametrize("damage", ["unfinished", "a chunk is gone"])
def test_what_is_half_written_is_written_anew(place: str, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never rows of zeros (pipekit:B20)."""
    monkeypatch.setattr("nnx_jax.data.cached._ROWS", 2)
    source = Counting()
    data = cached(source, place)
    data.take(np.arange(8))
    asked = source._asked["rows"]
    if damage == "unfinished":
        storage = zarr.storage
        remote = place.startswith("memory")
        store = storage.FsspecStore.from_url(data.cache_path) if remote else storage.LocalStore(data.cache_path)
        group = zarr.open_group(store=store, mode="a")
        del group.attrs["cache"]
        group["column0"][:] = 0
    else:
        system, path = fsspec.core.url_to_fs(data.cache_path)
        system.rm(f"{path}/column0/c/2/0")
    found = cached(source, place).take(np.arange(8))
    np.testing.assert_array_equal(found["x"][:, 1], 2 * np.arange(8))
    assert source._asked["rows"] == 2 * asked


def test_a_cache_removed_under_a_reader(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is told, and gets no zeros; asked again it has the rows."""
    monkeypatch.setattr("nnx_jax.data.cached._ROWS", 2)
    data = cached(Counting(), place)
    data.take(np.arange(8))
    assert cached(Counting(), place).invalidate()
    with pytest.raises(DataError, match="column0.* is gone: the cache was removed while it was read"):
        data.take(np.array([1, 4]))
    np.testing.assert_array_equal(data.take(np.arange(8))["x"][:, 1], 2 * np.arange(8))


def test_formats_lie_apart(tmp_path: Path) -> None:
    """The same rows in the other format take nobody's place."""
    data = cached(Counting(), str(tmp_path))
    data.take(np.arange(8))
    other = CachedDataset(source=Counting(), cache_dir=str(tmp_path))
    np.testing.assert_array_equal(other.take(np.arange(8))["x"], data.take(np.arange(8))["x"])
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        [Path(other.cache_path).name, Path(data.cache_path).name]
    )


def test_rows_of_zeros_that_are_meant(place: str) -> None:
    data = cached(ArrayDataset(np.zeros((6, 2)), np.arange(6)), place)
    assert not data.take(np.arange(6))["x"].any()
    size = len(files(place))
    assert not cached(data.source, place).take(np.arange(6))["x"].any()
    assert len(files(place)) == size
    with pytest.raises(DataError, match="is empty"):
        cached(ArrayDataset(np.zeros((0, 2))), place).take(np.arange(0))


def test_windows_over_zarr(tmp_path: Path) -> None:
    series = np.arange(40.0)[:, None]
    array = zarr.create_array(str(tmp_path / "series.zarr"), shape=(40, 1), dtype="float64", chunks=(8, 1))
    array[:] = series
    lazy, plain = (WindowDataset(data=data, input_steps=4, target_steps=2) for data in (array, series))
    for name, column in plain.take(np.array([3, 20])).items():
        np.testing.assert_array_equal(lazy.take(np.array([3, 20]))[name], column)
    assert lazy.content_hash() == plain.content_hash()
