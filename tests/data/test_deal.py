"""Rows dealt to processes: numbers by hand, what is refused, and that the processes' rows make up the whole."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import PrivateAttr

from nnx_jax.core.errors import DataError
from nnx_jax.data import ArrayDataset, BatchFeed, LoaderFeed, TrainingDataset
from nnx_jax.data.deal import DealtLoader, dealt_loader, validation_shard
from nnx_jax.data.partition import Share


def numbered(rows: int) -> ArrayDataset:
    """Row i holds x = i and y = 10 i."""
    return ArrayDataset(np.arange(rows), 10.0 * np.arange(rows))


def served(loader: Any) -> list[list[int]]:
    """The rows of every batch that count."""
    return [batch["x"][batch["mask"] > 0].tolist() for batch in loader]


def both(rows: int, batch_size: int, **options: Any) -> list[DealtLoader]:
    return [dealt_loader(numbered(rows), batch_size, rank=rank, world=2, **options) for rank in (0, 1)]


def test_eleven_rows_of_two_processes() -> None:
    """nnx:B189 nnx:S50 Pad: six rows each, all ids between them, one repeated; drop: five each, ten ids."""
    pad = [sum(served(loader), []) for loader in both(11, 4, policy="pad")]
    assert [len(rows) for rows in pad] == [6, 6]
    assert set(pad[0] + pad[1]) == set(range(11))
    drop = [sum(served(loader), []) for loader in both(11, 4, policy="drop")]
    assert [len(rows) for rows in drop] == [5, 5]
    assert len(set(drop[0] + drop[1])) == 10


def test_an_epoch_is_a_function_of_its_number() -> None:
    """nnx:B190 nnx:S49 21 rows, batches of 4: 11 rows in 3 batches each; epoch 1 differs, epoch 0 comes back."""
    for loader in both(21, 4, seed=3):
        first = served(loader)
        assert len(loader) == 3
        assert [len(rows) for rows in first] == [4, 4, 3]
        loader.set_epoch(1)
        assert served(loader) != first
        loader.set_epoch(0)
        assert served(loader) == first


@pytest.mark.parametrize("policy", ["pad", "drop"])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_table_of_an_epoch_is_what_is_served(policy: str, epoch: int) -> None:
    """`order` names the rows of `arrays` that make the batches: -1 for those that do not count."""
    for loader in both(21, 4, seed=3, policy=policy):
        columns = loader.arrays()
        assert columns is not None
        loader.set_epoch(epoch)
        table = loader.order(epoch)
        assert table.shape == (len(loader), 4)
        assert [columns["x"][rows[rows >= 0]].tolist() for rows in table] == served(loader)


def test_the_repeated_row_is_trained_on() -> None:
    """nnx:S50 The row that makes the processes even is the first of the order, with weight 1 in both."""
    zero, one = both(3, 1)
    lead = served(zero)[0]
    assert served(one)[1] == lead
    assert all(batch["mask"].tolist() == [1.0] for batch in one)


def test_a_short_batch_is_filled_up_with_weight_0() -> None:
    """Rows that fill a batch up hold row 0 of the data and count nowhere; so every batch has one shape."""
    _, one = both(5, 2, policy="drop")
    batches = list(dealt_loader(numbered(5), 2, rank=0, world=2))
    assert [batch["mask"].tolist() for batch in batches] == [[1, 1], [1, 0]]
    assert batches[1]["x"][1] == 0
    assert [batch["mask"].tolist() for batch in one] == [[1, 1]]


def test_validation_rows_are_dealt_once() -> None:
    """nnx:B191 nnx:S52 Five rows: 0, 2, 4 and 1, 3; no row twice, none left out."""
    shards = [validation_shard(numbered(5), 2, rank=rank, world=2) for rank in (0, 1)]
    assert [served(shard) for shard in shards] == [[[0, 2], [4]], [[1, 3]]]
    assert [len(shard) for shard in shards] == [2, 1]
    assert {shard.partition["batches"] for shard in shards} == {2}


def test_a_process_without_a_row() -> None:
    """One validation row: the other process has no batch, and still knows what one looks like."""
    shard = validation_shard(numbered(1), 2, rank=1, world=2)
    assert (len(shard), list(shard), shard.partition["batches"]) == (0, [], 1)
    signature = LoaderFeed(shard).signature()
    assert {name: column.shape for name, column in signature.items()} == {"x": (2,), "y": (2,), "mask": (2,)}


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"policy": "wrap"}, ValueError, "policy must be one of pad, drop, found 'wrap'"),
        ({"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1, found 0"),
        ({"batch_size": 2.5}, ValueError, "batch_size must be a whole number"),
        ({"seed": -1}, ValueError, "seed must be a whole number of 0 or more, found -1"),
        ({"rank": 2, "world": 2}, ValueError, "rank 2 of world 2"),
        ({"dataset": ArrayDataset(np.zeros(0))}, ValueError, "is empty"),
        ({"policy": "drop", "rank": 0, "world": 8}, ValueError, "'drop' leaves 4 rows to 8 processes, so none"),
        ({"dataset": iter([1, 2])}, TypeError, "list_iterator has no length"),
        ({"dataset": {1, 2}}, TypeError, "set cannot be asked for row i"),
    ],
)
def test_what_cannot_be_dealt(given: dict[str, Any], error: type[Exception], told: str) -> None:
    """nnx:B193 Each is refused when the loader is made, with what was given."""
    options: dict[str, Any] = {"dataset": numbered(4), "batch_size": 2, **given}
    with pytest.raises(error, match=told):
        dealt_loader(**options)


def test_a_sequence_of_items() -> None:
    """A list of (x, y), as a map-style dataset gives them; equal rows have equal hashes."""
    items = [(np.array([i, i], np.float32), i) for i in range(4)]
    batch = next(iter(dealt_loader(items, 2, seed=1)))
    assert batch["x"].shape == (2, 2)
    assert batch["y"].dtype == np.int32
    assert np.array_equal(batch["x"][:, 0], batch["y"])
    other = dealt_loader([dict(zip("xy", item, strict=True)) for item in items], 2, seed=1)
    assert dealt_loader(items, 2, seed=1).partition == other.partition
    with pytest.raises(DataError, match="item 0 is int"):
        list(dealt_loader([1, 2], 1))


def test_the_partition_is_json_and_equal_in_every_process() -> None:
    """Seed, world, sizes and data are in it, and the rank is not: that is what a resume compares."""
    told = [loader.partition for loader in both(11, 4, seed=3)]
    assert told[0] == told[1] == json.loads(json.dumps(told[0]))
    changed = [
        dealt_loader(numbered(11), 4, seed=4, world=2),
        dealt_loader(numbered(11), 4, seed=3, world=3),
        dealt_loader(numbered(11), 5, seed=3, world=2),
        dealt_loader(numbered(11), 4, seed=3, world=2, policy="drop"),
        dealt_loader(numbered(12), 4, seed=3, world=2),
    ]
    assert all(other.partition != told[0] for other in changed)
    feeds = [LoaderFeed(loader) for loader in both(11, 4, seed=3)]
    assert feeds[0].descriptor() == feeds[1].descriptor() == {"data_id": None, "partition": told[0]}
    assert LoaderFeed([]).descriptor() == {"data_id": None, "n_batches": 0}


class Counted(TrainingDataset):
    """Forty rows that say which were asked for."""

    _asked: list[int] = PrivateAttr(default_factory=list)

    def __len__(self) -> int:
        return 40

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self._asked.extend(indices.tolist())
        return {"x": np.asarray(indices)}


def test_a_position_is_taken_up_without_reading_what_was_before() -> None:
    dataset = Counted()
    loader = dealt_loader(dataset, 2, seed=5, rank=1, world=2)
    feed = LoaderFeed(loader)
    assert isinstance(feed, BatchFeed)
    feed.signature()
    for start in range(11):
        loader.set_epoch(2)
        rest = served(loader)[start:]
        dataset._asked.clear()
        iterator = feed.batches(2, start)
        assert len(dataset._asked) <= 2  # one batch
        assert served(iterator) == rest
        assert iterator.state() == {"epoch": 2, "next": 10}
    with pytest.raises(DataError, match="the loader gave 10 batches in epoch 0; the position asked for is 13"):
        feed.batches(0, 13)


class Noisy(TrainingDataset):
    """Eight rows of noise that depends on the generator alone."""

    def __len__(self) -> int:
        return 8

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": np.zeros(len(indices))}

    def augment(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {**batch, "x": batch["x"] + rng.random(len(batch["x"]))}


def test_augmentation_differs_between_processes_and_not_between_runs() -> None:
    def noise(rank: int) -> list[float]:
        return [float(x) for batch in dealt_loader(Noisy(), 2, rank=rank, world=2) for x in batch["x"]]

    assert noise(0) == noise(0)
    assert not set(noise(0)) & set(noise(1))
    whole = validation_shard(Noisy(), 4)
    assert [batch["x"].tolist() for batch in whole] == [[0.0] * 4] * 2


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9), st.integers(0, 3), st.sampled_from(["pad", "drop"]))
def test_all_processes_make_as_many_batches(rows: int, world: int, batch: int, epoch: int, policy: str) -> None:
    """Every process has the same number of batches, of one shape; what they serve is the epoch's order, dealt."""
    if policy == "drop" and rows < world:
        return
    loaders = [dealt_loader(numbered(rows), batch, policy=policy, rank=r, world=world) for r in range(world)]
    for loader in loaders:
        loader.set_epoch(epoch)
    found = [served(loader) for loader in loaders]
    assert {len(batches) for batches in found} == {loaders[0].partition["batches"]} == {len(loaders[-1])}
    flat = [row for batches in found for rows in batches for row in rows]
    assert len(flat) == (-(-rows // world) if policy == "pad" else rows // world) * world
    assert len(set(flat)) == (rows if policy == "pad" else len(flat))


def test_a_share_by_hand() -> None:
    """Six rows in four parts: two each and one place that is filled up; without filling up, all rows everywhere."""
    assert Share(4, (1, 3)).places(6).tolist() == [2, 3, -1, -1]
    assert Share(4, (0,)).places(6).tolist() == [0, 1]
    assert Share(4, (1, 3), pads=False).places(6).tolist() == [0, 1, 2, 3, 4, 5]
    assert Share(3, (2,), pads=False).places(6).tolist() == [4, 5]
    assert (Share(4, (0,)).full(6), Share(4, (0,), pads=False).full(6)) == (8, None)
