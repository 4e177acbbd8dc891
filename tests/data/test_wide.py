"""Columns of float64 as they are, for training in float64: from every source, under a hash of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.data import ArrayDataset, CsvDataset, NpzDataset
from nnx_jax.data.dataset import TrainingDataset
from nnx_jax.data.deal import dealt_loader
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.data.pipeline import Feed

X = np.array([[0.1, 1e-9], [1 / 3, 2.0], [1e300, -1.0]])
Y = np.array([0.7, 0.2, 0.1])


class Plain(TrainingDataset):
    """A dataset of the user's."""

    def __len__(self) -> int:
        return len(X)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": X[indices, 1:], "y": Y[indices]}


def sources(folder: Path) -> dict[str, Any]:
    np.savez(folder / "rows.npz", x=X[:, 1:], y=Y)
    lines = [f"{a!r},{y!r}" for a, y in zip(X[:, 1].tolist(), Y.tolist(), strict=True)]
    (folder / "rows.csv").write_text("\n".join(["a,y", *lines]))
    csv = CsvDataset(path=str(folder / "rows.csv"), target="y")
    npz = NpzDataset(path=str(folder / "rows.npz"))
    return {"arrays": ArrayDataset(X[:, 1:], Y), "npz": npz, "csv": csv, "own": Plain()}


@pytest.mark.parametrize("source", ["arrays", "npz", "csv", "own"])
def test_a_feed_serves_what_was_given(tmp_path: Path, source: str) -> None:
    narrow = sources(tmp_path)[source]
    wide = narrow.widened()
    for dataset, dtype in ((narrow, np.float32), (wide, np.float64), (wide.widened(False), np.float32)):
        feed = Feed(dataset, batch_size=3, shuffle=False)
        batch = next(feed.batches(0))
        assert batch["x"].dtype == batch["y"].dtype == feed.signature()["x"].dtype == dtype
        np.testing.assert_array_equal(batch["x"], X[:, 1:].astype(dtype))
        np.testing.assert_array_equal(batch["y"], Y.astype(dtype))
        assert batch["mask"].dtype == np.float32
    assert wide.widened() is wide
    assert wide.widened(False).content_hash() == narrow.content_hash()
    if source != "own":  # whose hash is of what `take` gives
        assert wide.content_hash() != narrow.content_hash()


def test_a_number_that_float32_cannot_hold_is_fine_in_float64() -> None:
    """It is refused as float32, so that such arrays come as a loader's batches."""
    feed = LoaderFeed([(X, Y)], wide=True)
    np.testing.assert_array_equal(next(feed.batches(0))["x"], X)


def test_dealt_batches_stay_float64() -> None:
    """The loaders of `nnx_jax.distributed` settle their batches themselves, and are told; so are those of items."""
    for rows in ((X[:2], Y[:2]), [(X[i], Y[i]) for i in range(2)]):
        loader = dealt_loader(rows, 2, seed=3)
        feed = LoaderFeed(loader, wide=True)
        got = next(feed.batches(0))["x"]
        assert got.dtype == feed.signature()["x"].dtype == np.float64
        assert {tuple(row) for row in got} == {tuple(row) for row in X[:2]}
        assert next(LoaderFeed(loader).batches(0))["x"].dtype == np.float32
