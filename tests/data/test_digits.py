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
    "train": "86090d388af38d0af5849c3abfaf0863be44f9d9104dad369d252e56544835c8",
    "val": "d879ea41b44fcc24c17cfa877a36598c4bdf0362f6df079a242e0708e9b41494",
    "test": "df37ada457d8c9f1a3dc5a9ee0ebd1b2fa0e0e426a67b3cb527c6089cf48ba8c",
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
