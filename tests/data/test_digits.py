"""The handwritten digits: fixed splits, pinned counts and content."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from nnx_jax.core.errors import ConfigError
from nnx_jax.data import DigitsDataset
from nnx_jax.data.digits import SPLIT_ROWS, split_rows

GOLDEN = {
    "train": "f2860f8042a3d265f2ad30e8058db8b47a903c047ccfe853ce75183dca609178",
    "val": "30ebfca8b47c80f4f8d38198d8b06f18aad297490e272d5e1ecfc948e41487fc",
    "test": "633e97983a8ed30d12872b602eaa6cddf0e3ed1f69e6c740aeccadcab03c7246",
}


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_split_goldens(split) -> None:
    dataset = DigitsDataset(split=split)
    assert len(dataset) == SPLIT_ROWS[split]
    assert dataset.content_hash() == GOLDEN[split]
    columns = dataset.arrays()
    assert (columns["x"].dtype, columns["x"].min(), columns["x"].max()) == (np.float32, 0.0, 1.0)
    assert columns["y"].dtype == np.int32
    assert dataset.info == {
        "input_shape": (64,),
        "input_dim": 64,
        "target_shape": (),
        "n_classes": 10,
        "output_dim": 10,
    }


def test_splits_are_disjoint_complete_and_stratified() -> None:
    labels = load_digits().target
    parts = [split_rows(labels, split) for split in ("train", "val", "test")]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1797))
    shares = np.array([np.bincount(labels[rows], minlength=10) for rows in parts]) / np.bincount(labels)
    assert (abs(shares - [[0.8], [0.1], [0.1]]) < 0.011).all()


def test_split_rule_by_hand() -> None:
    labels = np.array([0] * 10 + [1] * 9)
    assert split_rows(labels, "val").tolist() == [8, 18]
    assert split_rows(labels, "test").tolist() == [9]


def test_image_is_the_same_pixels() -> None:
    flat, image = DigitsDataset(split="val"), DigitsDataset(split="val", image=True)
    assert image.info["input_shape"] == (8, 8, 1)
    np.testing.assert_array_equal(image.arrays()["x"].reshape(-1, 64), flat.arrays()["x"])
    assert image.content_hash() != flat.content_hash()


def test_unknown_split_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="split"):
        DigitsDataset(split="valid")  # type: ignore[arg-type]


def test_without_scikit_learn_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'nnx_jax\[examples\]'"):
        len(DigitsDataset())
