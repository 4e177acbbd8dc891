"""Samples listed in a catalog: entries, files, operators, splits and identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import DataError
from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.data import CachedDataset, CatalogDataset, Feed, TrainingDataset

SPLITS = ("train", "val", "test")


@register("catalog_scale_for_tests")
class Scale(Operator):
    """x * by."""

    by: float = 2.0

    def _apply(self, x: Any) -> Any:
        return x * self.by


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A catalog of ten files, x is 2 values, y the entry's number modulo 3."""
    (tmp_path / "fields").mkdir()
    entries = []
    for number in range(10):
        np.save(tmp_path / "fields" / f"{number}.npy", np.array([number, -number], np.float32))
        entries.append({"id": f"e{number}", "x": f"fields/{number}.npy", "y": number % 3})
    (tmp_path / "catalog.json").write_text(json.dumps(entries))
    return tmp_path


def catalog(folder: Path, **fields: Any) -> CatalogDataset:
    return CatalogDataset(**({"catalog": str(folder / "catalog.json")} | fields))


def test_every_entry_is_in_one_split(folder: Path) -> None:
    parts = [catalog(folder, split=split) for split in SPLITS]
    assert [len(part) for part in parts] == [8, 1, 1]
    found = [int(x[0]) for part in parts for x, _ in part]
    assert sorted(found) == list(range(10))
    assert found[:8] == sorted(found[:8])  # in the order of the catalog
    assert {int(x[0]) for x, _ in catalog(folder, seed=1)} != set(found[:8])
    for x, y in parts[0]:
        assert x[1] == -x[0]
        assert y == int(x[0]) % 3
    assert parts[0].info == {
        "input_shape": (2,), "input_dim": 2, "target_shape": (), "n_classes": 3, "output_dim": 3,
    }  # fmt: skip
    batches = list(Feed(parts[0], batch_size=4).batches())
    assert batches[0]["y"].dtype == np.int32
    np.testing.assert_array_equal(parts[0].take(np.array([-1, 0]))["x"][:, 0], [found[7], found[0]])
    assert parts[1].take(np.arange(0))["x"].shape == (0, 2)


def test_splits_that_the_catalog_names() -> None:
    entries = [{"x": [float(i)], "split": SPLITS[i % 3]} for i in range(7)]
    assert [[int(x[0]) for (x,) in CatalogDataset(catalog=entries, split=split)] for split in SPLITS] == [
        [0, 3, 6], [1, 4], [2, 5],
    ]  # fmt: skip
    with pytest.raises(DataError, match="entry 3 has no split, entry 0 has; give it in all or in none"):
        len(CatalogDataset(catalog=[*entries[:3], {"x": [1.0]}]))
    with pytest.raises(DataError, match="entry 'a' has split 'trian'; expected one of train, val, test"):
        len(CatalogDataset(catalog={"a": {"x": [1.0], "split": "trian"}}))


def test_operators() -> None:
    entries = {f"e{i}": {"x": [float(i)], "y": [10.0 * i], "split": "train"} for i in range(3)}
    data = CatalogDataset(catalog=entries, preprocess=Scale(by=2.0), target_op=Scale(by=0.5))
    assert [(float(x[0]), float(y[0])) for x, y in data] == [(0, 0), (2, 5), (4, 10)]
    without = {name: {"x": entry["x"], "split": "train"} for name, entry in entries.items()}
    derived = CatalogDataset(catalog=without, preprocess=Scale(by=2.0), target_op=Scale(by=3.0))
    assert [(float(x[0]), float(y[0])) for x, y in derived] == [(0, 0), (2, 3), (4, 6)]  # of x as it was read
    assert list(CatalogDataset(catalog=without).columns) == ["x"]
    read = CatalogDataset(catalog=[{"x": "three.txt", "split": "train"}], reader=lambda path: np.full(3, len(path)))
    assert read[0][0].tolist() == [9, 9, 9]
    with pytest.raises(TypeError, match="preprocess: expected an operator or a function; got a int"):
        CatalogDataset(catalog=entries, preprocess=3)
    with pytest.raises(ValueError, match="catalog: got a int; expected a file, a list of entries, or a mapping"):
        CatalogDataset(catalog=5)


def test_identity_is_of_what_is_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = catalog(folder).content_hash()
    others = [
        catalog(folder, split="val"),
        catalog(folder, seed=1),
        catalog(folder, preprocess=Scale()),
        catalog(folder, target_op=Scale()),
        catalog(folder, preprocess=Scale(by=3.0)),
    ]
    hashes = {base, *(other.content_hash() for other in others)}
    assert len(hashes) == 6
    elsewhere = tmp_path_factory.mktemp("moved") / "data"
    folder.rename(elsewhere)
    moved = CatalogDataset(catalog=str(elsewhere / "catalog.json"))
    assert moved.content_hash() == base
    first = moved.entries[0]["x"]
    np.save(elsewhere / first, np.array([99.0, 1.0], np.float32))
    assert CatalogDataset(catalog=str(elsewhere / "catalog.json")).content_hash() != base


def test_the_way_through_a_file_and_a_cache(folder: Path) -> None:
    data = catalog(folder, preprocess=Scale(by=3.0))
    back = TrainingDataset.from_yaml(data.to_yaml())
    assert back == data
    np.testing.assert_array_equal(back[2][0], data[2][0])
    cached = CachedDataset(source=data, cache_dir=str(folder / "cache"))
    np.testing.assert_array_equal(cached.take(np.arange(8))["x"], data.take(np.arange(8))["x"])
    (folder / "catalog.yaml").write_text("a: {x: fields/1.npy, y: 0}\nb: {x: fields/2.npy, y: 1}\n")
    named = CatalogDataset(catalog=str(folder / "catalog.yaml"))
    assert [entry["id"] for split in SPLITS for entry in named.with_split(split).entries] in (["a", "b"], ["b", "a"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (["no"], "entry 0 is a str; an entry is a mapping with x"),
        ([{"y": 1}], "entry 0 has no x"),
        ([{"x": [1.0], "label": 2}], "entry 0 has the key 'label'; keys are id, x, y and split"),
        ({"a": {"x": {"no": 1}}}, "entry 'a': x is no file and no numbers"),
        ([{"x": "missing.npy"}], r"entry 0: missing.npy is not an .npy of numbers that can be read"),
        ([], "the catalog has no entries"),
    ],
)
def test_entries_that_are_none(entries: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        CatalogDataset(catalog=entries).columns  # noqa: B018


def test_files_that_cannot_be_read(folder: Path) -> None:
    with pytest.raises(DataError, match="nowhere.yaml cannot be read: No such file"):
        len(CatalogDataset(catalog=str(folder / "nowhere.yaml")))
    (folder / "text.yaml").write_text("just text\n")
    with pytest.raises(DataError, match="holds no list of entries"):
        len(CatalogDataset(catalog=str(folder / "text.yaml")))
    np.savez(folder / "fields" / "0.npz", a=np.zeros(2))
    (folder / "bad.yaml").write_text("[{x: fields/0.npz, split: train}, {x: gone.npy, split: train}]\n")
    bad = CatalogDataset(catalog=str(folder / "bad.yaml"))
    with pytest.raises(DataError, match="entry 0: .*0.npz holds several arrays"):
        bad.take(np.arange(1))
    with pytest.raises(DataError, match="entry 1: gone.npy cannot be read: No such file"):
        bad.content_hash()
    np.save(folder / "fields" / "1.npy", np.zeros(3, np.float32))
    (folder / "ragged.yaml").write_text("[{x: fields/2.npy, split: train}, {x: fields/1.npy, split: train}]\n")
    with pytest.raises(DataError, match=r"ragged.yaml \(train\): row 1 has shapes"):
        list(CatalogDataset(catalog=str(folder / "ragged.yaml")))
    np.save(folder / "fields" / "o.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(DataError, match="not an .npy of numbers"):
        CatalogDataset(catalog=[{"x": str(folder / "fields" / "o.npy"), "split": "train"}])[0]


def test_whole_and_broken_numbers_are_one_dtype() -> None:
    """Every batch of a column has the dtype of all its entries, also in a split that has whole numbers only."""
    splits = ["train"] * 4 + ["val"] * 2
    entries = [{"x": [1, 2], "y": n if n % 2 == 0 else 2.5, "split": s} for n, s in enumerate(splits)]
    data = CatalogDataset(catalog=entries)
    assert data.columns["y"].dtype == np.float64
    for row in range(4):
        found = data.take(np.array([row]))
        assert found["y"].dtype == np.float64
        assert found["x"].dtype.kind == "i"
    assert "n_classes" not in data.info
    whole = CatalogDataset(catalog=[entry | {"y": int(entry["y"])} for entry in entries])
    assert whole.columns["y"].dtype.kind == "i"
    alone = [entries[0], entries[2], entries[4] | {"y": 4}, entries[5]]
    mixed, plain = (CatalogDataset(catalog=[*alone[:3], alone[3] | {"y": last}]) for last in (2.5, 2))
    assert mixed.take(np.arange(2))["y"].dtype != plain.take(np.arange(2))["y"].dtype
    assert mixed.content_hash() != plain.content_hash()  # of the train split: the same entries, other dtypes
