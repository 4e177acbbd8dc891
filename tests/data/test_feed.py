"""Feeds: the order of an epoch, the tail, and a position that is exact at every batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import DataError
from nnx_jax.data import ArrayDataset, BatchFeed, BatchIterator, Feed, compare_descriptors
from nnx_jax.data.pipeline import Batch


def numbered(rows: int) -> ArrayDataset:
    """Row i holds x = i and y = 10 i."""
    return ArrayDataset(np.arange(rows), 10.0 * np.arange(rows))


def rows_of(batches) -> list[list[int]]:
    """The real rows of each batch."""
    return [batch["x"][batch["mask"] > 0].tolist() for batch in batches]


def flat(batches) -> list[int]:
    return sum(rows_of(batches), [])


def test_batches_by_hand() -> None:
    feed = Feed(numbered(5), batch_size=2, shuffle=False)
    batches = list(feed.batches())
    assert [b["x"].tolist() for b in batches] == [[0, 1], [2, 3], [4, 0]]  # padding is row 0
    assert [b["y"].tolist() for b in batches] == [[0, 10], [20, 30], [40, 0]]
    assert [b["mask"].tolist() for b in batches] == [[1, 1], [1, 1], [1, 0]]
    assert batches[0]["mask"].dtype == np.float32
    assert (feed.rows, feed.n_batches) == (5, 3)
    assert isinstance(feed, BatchFeed)
    assert isinstance(feed.batches(), BatchIterator)


@pytest.mark.parametrize(("tail", "sizes"), [("pad", [4, 4, 4]), ("keep", [4, 4, 2]), ("drop", [4, 4])])
def test_tails_and_signature(tail: str, sizes: list[int]) -> None:
    feed = Feed(numbered(10), batch_size=4, tail=tail, seed=3)
    batches = list(feed.batches())
    assert [len(b["x"]) for b in batches] == sizes
    assert feed.n_batches == len(sizes)
    signature = {name: (c.shape, c.dtype) for name, c in feed.signature().items()}
    assert signature == {name: (value.shape, value.dtype) for name, value in batches[0].items()}


def device_batch(feed: Feed, rows: np.ndarray) -> Batch:
    """What the device-resident path gathers for one line of the table."""
    whole = feed.arrays()
    assert whole is not None
    taken = {name: value[np.maximum(rows, 0)] for name, value in whole.items()}
    return taken | {"mask": (rows >= 0).astype(np.float32)}


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_the_table_gives_the_same_batches_value_for_value(tail: str) -> None:
    feed = Feed(numbered(11), batch_size=4, tail=tail, seed=5)
    for epoch in (0, 2):
        table = feed.order(epoch)
        assert (table.shape, table.dtype) == ((feed.n_batches, 4), np.int32)
        for line, batch in zip(table, feed.batches(epoch), strict=True):
            gathered = device_batch(feed, line)
            assert gathered.keys() == batch.keys()
            for name, value in batch.items():
                np.testing.assert_array_equal(gathered[name], value)
                assert gathered[name].dtype == value.dtype


@settings(max_examples=25)
@given(
    rows=st.integers(0, 40),
    batch_size=st.integers(1, 45),
    tail=st.sampled_from(["pad", "drop", "keep"]),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 3),
    prefetch=st.sampled_from([0, 0, 2]),
)
def test_every_position_restores_the_remainder(
    rows: int, batch_size: int, tail: str, seed: int, epoch: int, prefetch: int
) -> None:
    """Q8: the state taken at any batch, as JSON, gives the identical remainder in a fresh iterator; each row once."""
    dataset = numbered(rows)
    if rows == 0 or (tail == "drop" and batch_size > rows):
        with pytest.raises(DataError, match="is empty|fewer than batch_size"):
            Feed(dataset, batch_size=batch_size, tail=tail)
        return
    feed = Feed(dataset, batch_size=batch_size, tail=tail, seed=seed, prefetch=prefetch)
    iterator = feed.batches(epoch)
    states, straight = [json.dumps(iterator.state())], []
    for batch in iterator:
        straight.append({name: value.tolist() for name, value in batch.items()})
        states.append(json.dumps(iterator.state()))
    assert len(straight) == feed.n_batches
    served = flat(feed.batches(epoch))
    assert len(set(served)) == len(served) == (rows if tail != "drop" else rows // batch_size * batch_size)
    for position, state in enumerate(states):
        fresh = Feed(numbered(rows), batch_size=batch_size, tail=tail, seed=seed).batches(0)
        fresh.restore(json.loads(state))
        assert [{name: value.tolist() for name, value in batch.items()} for batch in fresh] == straight[position:]
        started = feed.batches(epoch, position)
        assert started.state() == {"epoch": epoch, "next": position}
        assert rows_of(started) == rows_of(feed.batches(epoch))[position:]


PROCESS = """
import json, sys
import numpy as np
from nnx_jax.data import Feed, TrainingDataset

class Mine(TrainingDataset):
    n: int = 64
    def __len__(self): return self.n
    def take(self, indices): return {"x": indices.astype(np.int64)}

feed = Feed(Mine(), batch_size=1, seed=11)
it = feed.batches(0)
seen = []
if len(sys.argv) > 1:
    it.restore(json.loads(sys.argv[1]))
    seen = [int(b["x"][0]) for b in it]
else:
    seen = [int(next(it)["x"][0]) for _ in range(20)]
following = [int(b["x"][0]) for b in feed.batches(1)]
print(json.dumps({"seen": seen, "state": it.state(), "descriptor": feed.descriptor(), "next": following}))
"""


def test_resume_in_a_new_process() -> None:
    """case:F01 case:F15 64 samples, stop after 20, a new process finishes: 0 twice, 0 missing, a new order next.

    The dataset is the user's, without a repr; its identity is equal in both processes.
    """

    def process(*arguments: str) -> dict:
        command = [sys.executable, "-c", PROCESS, *arguments]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    first = process()
    second = process(json.dumps(first["state"]))
    compare_descriptors(first["descriptor"], second["descriptor"])
    assert sorted(first["seen"] + second["seen"]) == list(range(64))
    straight = Feed(ArrayDataset(np.arange(64)), batch_size=1, seed=11)
    assert first["seen"] + second["seen"] == flat(straight.batches(0))
    assert second["next"] == first["next"] == flat(straight.batches(1))
    assert second["next"] != first["seen"] + second["seen"]


def test_epochs_differ_and_repeat() -> None:
    """case:F02 (one process) three epochs, three orders, each row once, the same on a rerun."""
    orders = [flat(Feed(numbered(16), batch_size=4, seed=7).batches(epoch)) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(16)) for order in orders)
    feed = Feed(numbered(16), batch_size=4, seed=7)
    assert [flat(feed.batches(epoch)) for epoch in (2, 0, 1)] == [orders[2], orders[0], orders[1]]
    assert flat(Feed(numbered(16), batch_size=4, seed=8).batches(1)) == orders[2]


def test_position_at_the_epoch_border() -> None:
    """case:F03 4 updates an epoch, position stored after the 4th: epoch 0 is done, epoch 1 has its own four."""
    feed = Feed(numbered(8), batch_size=2, seed=1)
    iterator = feed.batches(0)
    list(iterator)
    state = iterator.state()
    assert state == {"epoch": 0, "next": 4}
    resumed = feed.batches(0)
    resumed.restore(state)
    assert list(resumed) == []
    following = rows_of(feed.batches(1))
    assert len(following) == 4
    assert following != rows_of(feed.batches(0))


def test_first_batch_after_a_resume() -> None:
    """case:F04 20 batches, stored at 10: the first one resumed is 10, and 10 are left."""
    feed = Feed(numbered(20), batch_size=1, shuffle=False)
    iterator = feed.batches()
    for _ in range(10):
        next(iterator)
    resumed = feed.batches()
    resumed.restore(iterator.state())
    assert flat(resumed) == list(range(10, 20))


def test_iterator_made_before_its_state_is_set() -> None:
    """case:F05 (in process) save after 3 batches, one more, save again: the third start is at batch 4."""
    first = Feed(numbered(12), batch_size=2, shuffle=False, prefetch=2).batches()
    for _ in range(3):
        next(first)
    second = Feed(numbered(12), batch_size=2, shuffle=False, prefetch=2).batches()
    next(second)  # already running, with batches fetched ahead
    second.restore(first.state())
    assert next(second)["x"].tolist() == [6, 7]
    third = Feed(numbered(12), batch_size=2, shuffle=False, prefetch=2).batches()
    third.restore(second.state())
    assert next(third)["x"].tolist() == [8, 9]
    for iterator in (first, second, third):
        iterator.close()


def test_position_counts_microbatches() -> None:
    """case:F06 two microbatches an update: after update 3 the next microbatch is 6."""
    feed = Feed(numbered(20), batch_size=1, shuffle=False)
    iterator = feed.batches()
    for _update in range(3):
        next(iterator), next(iterator)
    assert iterator.state()["next"] == 6
    resumed = feed.batches()
    resumed.restore(iterator.state())
    assert next(resumed)["x"].tolist() == [6]


def test_second_resume_in_the_same_epoch() -> None:
    """case:F08 12 batches, stop at 4, resume, stop at 7, resume: 0..11 once each."""
    feed = Feed(numbered(12), batch_size=1, seed=2)
    seen: list[int] = []
    state = {"epoch": 0, "next": 0}
    for stop in (4, 7, 12):
        iterator = feed.batches()
        iterator.restore(state)
        while iterator.state()["next"] < stop:
            seen += next(iterator)["x"].tolist()
        state = json.loads(json.dumps(iterator.state()))
    assert seen == flat(feed.batches())


def test_a_batch_never_spans_two_epochs() -> None:
    """case:F12 5 records, batch 2, 2 epochs: 3 batches each (2, 2, 1), or 2 with drop."""
    feed = Feed(numbered(5), batch_size=2, tail="keep", seed=4)
    sizes = [[len(rows) for rows in rows_of(feed.batches(epoch))] for epoch in (0, 1)]
    assert sizes == [[2, 2, 1], [2, 2, 1]]
    drop = Feed(numbered(5), batch_size=2, tail="drop", seed=4)
    assert [len(list(drop.batches(epoch))) for epoch in (0, 1)] == [2, 2]


def test_evaluation_scores_every_row_once() -> None:
    """case:G08 10 validation rows, batch 4, training drops its tail: evaluation still counts 10."""
    training = Feed(numbered(10), batch_size=4, tail="drop")
    assert training.n_batches == 2
    batches = list(Feed.evaluation(numbered(10), batch_size=4).batches())
    assert sum(batch["mask"].sum() for batch in batches) == 10
    assert flat(batches) == list(range(10))
    assert {batch["x"].shape for batch in batches} == {(4,)}


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_evaluation_of_one_row_tails(rows: int) -> None:
    assert flat(Feed.evaluation(numbered(rows), batch_size=4).batches()) == list(range(rows))


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"epoch": 0},
        {"epoch": 0, "next": -1},
        {"epoch": 0, "next": 1.0},
        {"epoch": 0, "next": True},
        {"epoch": "0", "next": 1},
        {"epoch": 0, "next": 1, "more": 2},
        [0, 1],
    ],
)
def test_a_position_that_is_none_changes_nothing(state) -> None:
    iterator = Feed(numbered(6), batch_size=2, shuffle=False).batches()
    next(iterator)
    with pytest.raises(DataError, match="a position is"):
        iterator.restore(state)
    assert flat(iterator) == [2, 3, 4, 5]


def test_a_position_past_the_end_changes_nothing() -> None:
    iterator = Feed(numbered(6), batch_size=2, shuffle=False).batches()
    with pytest.raises(DataError, match="batch 4 of epoch 0: an epoch has 3 batches"):
        iterator.restore({"epoch": 0, "next": 4})
    assert flat(iterator) == list(range(6))
    with pytest.raises(DataError, match="batch 4 of epoch 1"):
        Feed(numbered(6), batch_size=2).batches(1, 4)


def test_descriptor_names_what_differs() -> None:
    base = Feed(numbered(10), batch_size=4, seed=3)
    stored = json.loads(json.dumps(base.descriptor()))
    compare_descriptors(stored, Feed(numbered(10), batch_size=4, seed=3, prefetch=2).descriptor())
    with pytest.raises(DataError, match="batch_size was 4, is 5; seed was 3, is 4"):
        compare_descriptors(stored, Feed(numbered(10), batch_size=5, seed=4).descriptor())
    with pytest.raises(DataError, match="tail was 'pad', is 'drop'"):
        compare_descriptors(stored, Feed(numbered(10), batch_size=4, seed=3, tail="drop").descriptor())
    changed = ArrayDataset(np.arange(10)[::-1], 10.0 * np.arange(10))
    with pytest.raises(DataError, match="position does not fit this data: dataset was"):
        compare_descriptors(stored, Feed(changed, batch_size=4, seed=3).descriptor())
    with pytest.raises(DataError, match="shuffle was True, is False; seed was 3, is None; order was"):
        compare_descriptors(stored, Feed(numbered(10), batch_size=4, seed=3, shuffle=False).descriptor())
    with pytest.raises(DataError, match="more was 1, is None"):
        compare_descriptors(stored | {"more": 1}, stored)


WORKERS = """
import json
import jax
import numpy as np
from nnx_jax.data import ArrayDataset, Feed

class Augmented(ArrayDataset):
    def augment(self, batch, rng):
        return {"x": rng.integers(2**31, size=len(batch["x"])).astype(np.int32)}

def draws(workers, epoch):
    feed = Feed(Augmented(np.arange(16)), batch_size=4, tail="keep", shuffle=False, workers=workers)
    return [int(value) for batch in feed.batches(epoch) for value in batch["x"]]

def feed(rows, batch, workers):
    return Feed(ArrayDataset(np.arange(rows)), batch_size=batch, tail="keep", shuffle=False, workers=workers)

if __name__ == "__main__":
    sizes = {w: [b["x"].tolist() for b in feed(34, 16, w).batches()] for w in (0, 2)}
    first = feed(12, 2, 2).batches()
    for _ in range(3):
        next(first)
    second = feed(12, 2, 2).batches()
    second.restore(first.state())
    seen = next(second)["x"].tolist()
    third = feed(12, 2, 1).batches()
    third.restore(second.state())
    third_seen = next(third)["x"].tolist()
    for iterator in (first, second, third):
        iterator.close()
    jax.jit(lambda x: x + 1)(1.0).block_until_ready()  # JAX's threads run: workers must not be forked from here
    drawn = {f"{workers}/{epoch}": draws(workers, epoch) for workers in (0, 4) for epoch in (0, 1)}
    print(json.dumps({"sizes": sizes, "second": seen, "third": third_seen, "drawn": drawn}))
"""


@pytest.mark.slow
def test_workers_change_nothing(tmp_path: Path) -> None:
    """case:F14 case:F10 case:F05 case:F09 case:F16

    A plain script with workers, started after JAX: it ends, and gives the same batches and positions as without.
    """
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=300)
    seen = json.loads(result.stdout.splitlines()[-1])
    drawn = seen["drawn"]
    assert drawn["0/0"] == drawn["4/0"]
    assert drawn["0/1"] == drawn["4/1"]
    assert len({*drawn["0/0"], *drawn["0/1"]}) == 32
    expected = [list(range(16)), list(range(16, 32)), [32, 33]]
    assert seen["sizes"] == {"0": expected, "2": expected}
    assert seen["second"] == [6, 7]
    assert seen["third"] == [8, 9]


class Jitter(ArrayDataset):
    """Adds noise to every training row."""

    def augment(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return batch | {"x": batch["x"] + rng.normal(size=batch["x"].shape).astype(np.float32)}


def test_augmentation_is_a_function_of_seed_epoch_and_place() -> None:
    rows = np.zeros((8, 2), np.float32)
    feed = Feed(Jitter(rows), batch_size=4, tail="pad", shuffle=False, seed=3)
    first, again = list(feed.batches(0)), list(feed.batches(0, 1))
    np.testing.assert_array_equal(first[1]["x"], again[0]["x"])  # after a resume at batch 1
    assert not np.array_equal(first[0]["x"], first[1]["x"])
    assert not np.array_equal(first[0]["x"], next(feed.batches(1))["x"])
    assert feed.arrays() is None
    assert np.array_equal(next(Feed.evaluation(Jitter(rows), batch_size=4).batches(0))["x"], rows[:4])


def test_straddling_batches() -> None:
    """Ten rows in batches of 4: five batches are two passes, each pass with an order of its own (pipekit:G7)."""
    feed = Feed(numbered(10), batch_size=4, tail="straddle", seed=3)
    plain = Feed(numbered(10), batch_size=10, seed=3)
    assert (feed.n_batches, feed.passes) == (5, 2)
    first, second = flat(feed.batches(0)), flat(feed.batches(1))
    assert all(np.all(batch["mask"] == 1) for batch in feed.batches(0))
    assert first == flat(plain.batches(0)) + flat(plain.batches(1))
    assert second == flat(plain.batches(2)) + flat(plain.batches(3))
    assert flat(feed.batches(0, 3)) == first[12:]  # after a resume inside the batch that both passes share
    even = Feed(numbered(8), batch_size=4, tail="straddle", seed=3)
    assert rows_of(even.batches(5)) == rows_of(Feed(numbered(8), batch_size=4, seed=3).batches(5))
    with pytest.raises(DataError, match=r"3 rows, fewer than batch_size 4, and tail='straddle'"):
        Feed(numbered(3), batch_size=4, tail="straddle")
