"""The user's own loaders: pairs or dicts, padded to one shape, with a counted position."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nnx_jax.core.errors import DataError
from nnx_jax.data import BatchFeed, BatchIterator, LoaderFeed

PAIRS = [(np.array([[1.0], [2.0]]), np.array([0, 1])), (np.array([[3.0]]), np.array([1]))]


class Shuffling:
    """Batch k of epoch e holds the number 100 e + k; counts how often it was iterated."""

    def __init__(self, batches: int) -> None:
        self.batches, self.epoch, self.calls = batches, -1, []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.calls.append(epoch)

    def __iter__(self) -> Iterator[np.ndarray]:
        self.calls.append("iter")
        return (np.array([100 * self.epoch + k]) for k in range(self.batches))


def numbers(batches) -> list[int]:
    return [int(batch["x"][0]) for batch in batches]


def test_pairs_become_padded_batches_with_a_mask() -> None:
    feed = LoaderFeed(PAIRS)
    assert isinstance(feed, BatchFeed)
    assert (feed.n_batches, feed.rows, feed.arrays()) == (2, None, None)
    signature = {name: (c.shape, c.dtype.name) for name, c in feed.signature().items()}
    assert signature == {"x": ((2, 1), "float32"), "y": ((2,), "int32"), "mask": ((2,), "float32")}
    iterator = feed.batches()
    assert isinstance(iterator, BatchIterator)
    first, second = iterator
    assert first["mask"].tolist() == [1, 1]
    assert (second["x"].tolist(), second["y"].tolist(), second["mask"].tolist()) == ([[3], [3]], [1, 1], [1, 0])


def test_short_batches_can_be_kept() -> None:
    assert [len(batch["x"]) for batch in LoaderFeed(PAIRS, pad=False).batches()] == [2, 1]


def test_dicts_lists_bare_arrays_and_masks() -> None:
    items = [
        {"x": [[1], [2]], "y": [0, 1], "weight": [0.5, 1.0]},
        {"x": [[1], [2]], "y": [0, 1], "weight": [0.5, 1.0], "mask": [True, False]},
    ]
    first, second = LoaderFeed(items).batches()
    assert first["weight"].dtype == np.float32
    assert second["mask"].tolist() == [1, 0]
    assert next(LoaderFeed([[[1, 2], [3, 4]]]).batches())["y"].tolist() == [3, 4]
    assert next(LoaderFeed([np.zeros((3, 2))]).batches()).keys() == {"x", "mask"}


def test_set_epoch_before_each_iteration_and_each_epoch_iterated_once() -> None:
    """nnx:B018 (loader) set_epoch gets the absolute epoch before the epoch is iterated, also at a resume."""
    loader = Shuffling(3)
    feed = LoaderFeed(loader)
    feed.signature(5)
    assert numbers(feed.batches(5)) == [500, 501, 502]
    assert numbers(feed.batches(6, start=2)) == [602]
    assert loader.calls == [5, "iter", 6, "iter"]


def test_position_is_counted_and_skipped() -> None:
    feed = LoaderFeed(Shuffling(5))
    assert feed.n_batches is None
    iterator = feed.batches(2)
    next(iterator), next(iterator)
    state = iterator.state()
    assert state == {"epoch": 2, "next": 2}
    resumed = LoaderFeed(Shuffling(5)).batches(0)
    resumed.restore(state)
    assert numbers(resumed) == [202, 203, 204]
    assert resumed.state() == {"epoch": 2, "next": 5}
    assert numbers(LoaderFeed(Shuffling(5)).batches(0, 5)) == []


def test_a_position_the_loader_does_not_reach() -> None:
    with pytest.raises(DataError, match="the loader gave 3 batches in epoch 1; the position asked for is 4"):
        LoaderFeed(Shuffling(3)).batches(1, 4)


def test_no_batch_and_used_up_iterators() -> None:
    """case:L07 nnx:B015 (loader) nothing in an epoch is an error naming it; a one-shot iterator fails in its second."""
    with pytest.raises(DataError, match="gave no batch in epoch 3: give at least one"):
        LoaderFeed([]).batches(3)
    with pytest.raises(DataError, match="gave no batch in epoch 0"):
        LoaderFeed([]).signature()
    feed = LoaderFeed(pair for pair in PAIRS)
    feed.signature()
    assert len(list(feed.batches(0))) == 2
    with pytest.raises(DataError, match="gave no batch in epoch 1: it is a one-shot iterator, used up"):
        feed.batches(1)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            (np.zeros((2, 1)), np.zeros(3)),
            "batch 0 of epoch 0: columns have different lengths: 'x' has 2 rows, 'y' has 3",
        ),
        ((np.zeros((0, 1)), np.zeros(0)), "batch 0 of epoch 0 has no rows"),
        ((np.array(["a"]), np.zeros(1)), "batch 0 of epoch 0: column 'x' has dtype <U1"),
        (([np.nan], [0]), "batch 0 of epoch 0: column 'x', row 0: nan"),
        ("ab", "batch 0 of epoch 0 is str; a batch is"),
        (7, "batch 0 of epoch 0 is int; a batch is"),
        ((1, 2, 3), "batch 0 of epoch 0 is tuple; a batch is"),
        ({"x": [1, 2], "mask": [1]}, r"the mask has shape \(1,\), the batch has 2 rows"),
    ],
)
def test_wrong_batches_name_their_place(item: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        next(LoaderFeed([item]).batches())


def test_not_iterable() -> None:
    with pytest.raises(TypeError, match="found int"):
        LoaderFeed(3)  # type: ignore[arg-type]


def test_descriptor_carries_the_name_of_the_data() -> None:
    assert LoaderFeed(PAIRS, data_id="v1").descriptor() == {"data_id": "v1", "n_batches": 2}
