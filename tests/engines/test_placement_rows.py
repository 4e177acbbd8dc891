"""The law of rows: what all processes gather, put together, is what one gathers, on any mesh; by numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_jax.data import ArrayDataset, Feed
from nnx_jax.data.partition import Share
from nnx_jax.engines.placement import filled_up


class Jitter(ArrayDataset):
    """Adds noise to every training row."""

    def augment(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return batch | {"x": batch["x"] + rng.normal(size=batch["x"].shape).astype(np.float32)}


@st.composite
def meshes(draw: Any) -> tuple[int, list[tuple[int, ...]]]:
    """Parts of a batch, and those that each process holds: every part somewhere, in several processes or in one."""
    parts, processes = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    held: list[set[int]] = [set() for _ in range(processes)]
    for part in range(parts):
        for process in draw(st.sets(st.integers(0, processes - 1), min_size=1)):
            held[process].add(part)
    return parts, [tuple(sorted(each)) for each in held if each]


def one_process(feed: Feed, epoch: int, share: Share) -> list[dict[str, np.ndarray]]:
    """Its batches, filled up as for the devices of one process."""
    batches = []
    for batch in feed.batches(epoch):
        full = share.full(len(batch["mask"]))
        batches.append(filled_up(batch, 0 if full is None else full - len(batch["mask"])))
    return batches


@settings(max_examples=60)
@given(
    mesh=meshes(),
    rows=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    tail=st.sampled_from(["pad", "drop", "keep"]),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 2),
    start=st.integers(0, 3),
    augment=st.booleans(),
)
def test_the_union_of_all_processes_is_one_process(
    mesh: Any, rows: int, batch_size: int, tail: str, seed: int, epoch: int, start: int, augment: bool
) -> None:
    """case:F13 Pad, drop and keep, augmented or not, from any position: equal rows and weights in equal places.

    A position counts whole batches, so it is the same whatever processes and devices there are.
    """
    if tail == "drop" and batch_size > rows:
        return
    parts, held = mesh
    kind: Any = Jitter if augment else ArrayDataset
    data = kind(np.arange(rows, dtype=np.float32), np.arange(rows))
    feed = Feed(data, batch_size=batch_size, tail=tail, seed=seed)
    start = min(start, feed.n_batches)
    shares = [Share(parts, mine, pads=tail == "pad") for mine in held]
    found = [list(feed.batches(epoch, start, share)) for share in shares]
    wanted = one_process(feed, epoch, shares[0])[start:]
    assert {len(batches) for batches in found} == {len(wanted)}
    for number, whole in enumerate(wanted):
        size = len(whole["mask"])
        full = shares[0].full(feed.size(start + number))
        assert size == (full or feed.size(start + number))
        for share, batches in zip(shares, found, strict=True):
            cuts = range(1) if full is None else share.mine
            per = size if full is None else size // parts
            for at, cut in enumerate(cuts):
                for name in ("x", "y", "mask"):
                    own = batches[number][name][at * per : (at + 1) * per]
                    real = whole["mask"][cut * per : (cut + 1) * per] > 0
                    np.testing.assert_array_equal(own[real], whole[name][cut * per : (cut + 1) * per][real])
                np.testing.assert_array_equal(batches[number]["mask"][at * per : (at + 1) * per] > 0, real)


def test_rows_of_a_process_are_all_that_it_reads() -> None:
    """Half of the devices, half of the rows; an augmenting dataset needs whole batches."""
    asked: list[int] = []

    class Asked(ArrayDataset):
        def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            asked.append(len(indices))
            return super().take(indices)

    kind: Any = Asked
    feed = Feed(kind(np.arange(16)), batch_size=8, shuffle=False)
    asked.clear()
    found = [batch["x"].tolist() for batch in feed.batches(0, 0, Share(4, (1, 3)))]
    assert found == [[2, 3, 6, 7], [10, 11, 14, 15]]
    assert asked == [4, 4]


def test_sixteen_rows_resumed_elsewhere() -> None:
    """case:F13 Batches of four, stopped after two: in one process or two, the next rows are 8..11 of the order."""
    feed = Feed(ArrayDataset(np.arange(16)), batch_size=4, seed=1)
    position = feed.batches(0, 2).state()
    order = feed.order(0).reshape(-1)
    assert next(feed.batches(0, position["next"]))["x"].tolist() == order[8:12].tolist()
    halves = [next(feed.batches(0, position["next"], Share(2, (rank,))))["x"] for rank in (0, 1)]
    assert np.concatenate(halves).tolist() == order[8:12].tolist()
