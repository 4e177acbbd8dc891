"""Text as bytes: windows, splits, determinism, and what is not read."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.data import Feed, TextBytesDataset


def test_windows_by_hand(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(20)))
    dataset = TextBytesDataset(path=str(tmp_path / "a.txt"), context_length=5)
    assert len(dataset) == 3  # 18 training bytes: (18 - 1) // 5
    batch = dataset.take(np.array([2, 0]))
    assert batch["x"].tolist() == [[10, 11, 12, 13, 14], [0, 1, 2, 3, 4]]
    assert batch["y"].tolist() == [[11, 12, 13, 14, 15], [1, 2, 3, 4, 5]]
    assert batch["x"].dtype == batch["y"].dtype == np.int32
    np.testing.assert_array_equal(dataset.arrays()["y"][[2, 0]], batch["y"])
    assert dataset.info["vocab_size"] == 256
    assert dataset.info["context_length"] == 5


def test_splits_are_contiguous_and_complete(tmp_path) -> None:
    text = bytes(np.random.default_rng(0).integers(0, 128, 999, np.uint8))
    (tmp_path / "a.txt").write_bytes(text)
    parts = [
        TextBytesDataset(path=str(tmp_path / "a.txt"), split=split, context_length=8)
        for split in ("train", "val", "test")
    ]
    assert b"".join(part.tokens.tobytes() for part in parts) == text
    assert [len(part.tokens) for part in parts] == [899, 50, 50]


def test_folder_is_read_in_order_of_relative_path(tmp_path) -> None:
    for name, text in {"b.txt": "B", "a/z.txt": "AZ", "a.txt": "A", ".hidden": "H", "c.md": "C"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text * 100)
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")

    def text_of(**settings: object) -> bytes:
        parts = (
            TextBytesDataset(path=str(tmp_path), split=s, context_length=1, **settings)
            for s in ("train", "val", "test")
        )
        return b"".join(part.tokens.tobytes() for part in parts)

    assert text_of() == b"A" * 100 + b"AZ" * 100 + b"B" * 100 + b"C" * 100
    assert text_of(pattern="*.txt") == b"A" * 100 + b"AZ" * 100 + b"B" * 100
    assert text_of(max_bytes=150) == b"A" * 100 + b"AZ" * 25


def test_the_cut_falls_between_characters(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("é" * 100, encoding="utf-8")
    dataset = TextBytesDataset(path=str(tmp_path / "a.txt"), split="test", context_length=1, max_bytes=101)
    assert dataset.tokens.tobytes().endswith("é".encode())


def test_hash_is_of_bytes_and_window_not_of_path(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 10)
    (tmp_path / "b.txt").write_text("some text " * 10)

    def hash_of(name: str, length: int = 4, split: str = "train") -> str:
        return TextBytesDataset(path=str(tmp_path / name), context_length=length, split=split).content_hash()

    base = hash_of("a.txt")
    assert hash_of("b.txt") == base
    assert len({base, hash_of("a.txt", 5), hash_of("a.txt", 4, "val")}) == 3


def test_unigram_entropy_by_hand(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("abac" * 100)
    entropy = TextBytesDataset(path=str(tmp_path / "a.txt"), context_length=4).unigram_entropy()
    assert entropy == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    (tmp_path / "b.txt").write_text("a" * 100)
    assert TextBytesDataset(path=str(tmp_path / "b.txt"), context_length=4).unigram_entropy() == 0.0


@pytest.fixture(scope="module")
def stdlib() -> TextBytesDataset:
    return TextBytesDataset()


def test_default_is_the_standard_library(stdlib: TextBytesDataset) -> None:
    assert len(stdlib.tokens) == 3_600_000
    assert len(stdlib) == (3_600_000 - 1) // 128
    first = Path(sysconfig.get_path("stdlib"), "__future__.py").read_bytes()
    assert stdlib.tokens[: len(first)].tobytes() == first
    assert 3.0 < stdlib.unigram_entropy() < 3.5


def test_default_is_deterministic(stdlib: TextBytesDataset) -> None:
    again = TextBytesDataset()
    assert again.content_hash() == stdlib.content_hash()
    np.testing.assert_array_equal(again.take(np.array([-1]))["x"], stdlib.take(np.array([len(stdlib) - 1]))["x"])


def test_feeds_batches_of_windows(stdlib: TextBytesDataset) -> None:
    batch = next(Feed(stdlib, batch_size=4).batches())
    assert batch["x"].shape == batch["y"].shape == (4, 128)
    np.testing.assert_array_equal(batch["x"][:, 1:], batch["y"][:, :-1])


def test_refusals(tmp_path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        len(TextBytesDataset(path=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match="no text in"):
        len(TextBytesDataset(path=str(tmp_path)))
    (tmp_path / "b.bin").write_bytes(b"ok \xff")
    with pytest.raises(DataError, match=r"b\.bin is not UTF-8 at byte 3; leave it out with `pattern`"):
        len(TextBytesDataset(path=str(tmp_path)))
    (tmp_path / "s.txt").write_text("short " * 10)
    with pytest.raises(DataError, match="split 'val' of .* has 3 bytes of 60; context_length 128 needs at least 129"):
        len(TextBytesDataset(path=str(tmp_path / "s.txt"), split="val"))
    with pytest.raises(ConfigError, match="context_length"):
        TextBytesDataset(context_length=0)
