"""Row numbers as pure functions: pinned orders, and the laws for several processes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_jax.core.errors import DataError
from nnx_jax.data.partition import batch_table, deal, epoch_order, validation_rows


def test_order_is_pinned() -> None:
    """The order of a stored run must be the same under every numpy: these values may never change."""
    assert epoch_order(8, 7, 0).tolist() == [4, 1, 6, 3, 2, 7, 5, 0]
    assert epoch_order(8, 7, 1).tolist() == [4, 3, 1, 6, 7, 2, 5, 0]
    digest = hashlib.sha256(epoch_order(60000, 7, 3).astype("<i8").tobytes()).hexdigest()
    assert digest == "e92bdf6f1a0243100e05ab9b93143277c7c0b6ef3667bdf4f90fc89e166bdc10"


def test_order_is_a_function_of_seed_plus_epoch() -> None:
    np.testing.assert_array_equal(epoch_order(50, 7, 1), epoch_order(50, 8, 0))
    np.testing.assert_array_equal(epoch_order(5, 7, 1, shuffle=False), np.arange(5))
    with pytest.raises(DataError, match="epoch -1"):
        epoch_order(5, 0, -1)


@given(st.integers(0, 40), st.integers(0, 2**40), st.integers(0, 5))
def test_order_is_a_permutation(rows: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(rows, seed, epoch)) == list(range(rows))


def test_tables_by_hand() -> None:
    order = np.array([4, 2, 0, 1, 3])
    assert batch_table(order, 2, "pad").tolist() == [[4, 2], [0, 1], [3, -1]]
    assert batch_table(order, 2, "keep").tolist() == [[4, 2], [0, 1], [3, -1]]
    assert batch_table(order, 2, "drop").tolist() == [[4, 2], [0, 1]]
    assert batch_table(order, 5, "pad").tolist() == [[4, 2, 0, 1, 3]]
    assert batch_table(order, 2, "pad").dtype == np.int32


def test_three_orders_for_two_processes() -> None:
    """case:F02 16 samples, seed 7, 2 processes: three orders, each epoch covers 0..15 once, a rerun repeats them."""

    def epochs() -> list[list[list[int]]]:
        return [[deal(epoch_order(16, 7, e), rank, 2, "pad").tolist() for rank in (0, 1)] for e in range(3)]

    first = epochs()
    assert len({str(ranks) for ranks in first}) == 3
    assert all(sorted(ranks[0] + ranks[1]) == list(range(16)) for ranks in first)
    np.random.default_rng(7).random(5)
    assert epochs() == first


def test_pad_and_drop_by_hand() -> None:
    order = np.arange(11)
    pad = [deal(order, rank, 2, "pad").tolist() for rank in (0, 1)]
    assert pad == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 0]]
    drop = [deal(order, rank, 2, "drop").tolist() for rank in (0, 1)]
    assert drop == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    with pytest.raises(DataError, match="policy must be one of pad, drop, found 'wrap'"):
        deal(order, 0, 2, "wrap")
    with pytest.raises(DataError, match="rank 2 of world 2"):
        deal(order, 2, 2, "pad")


def test_no_row_is_lost_to_the_remainder() -> None:
    """case:F11 5 records over 2 shards: the union is every record, for training with pad and for validation."""
    order = epoch_order(5, 0, 0)
    assert set(np.concatenate([deal(order, rank, 2, "pad") for rank in (0, 1)])) == {0, 1, 2, 3, 4}
    assert [validation_rows(5, rank, 2).tolist() for rank in (0, 1)] == [[0, 2, 4], [1, 3]]
    assert [validation_rows(1, rank, 2).tolist() for rank in (0, 1)] == [[0], []]


@given(st.integers(0, 40), st.integers(1, 9))
def test_union_laws(rows: int, world: int) -> None:
    """Every process has the same number of rows; pad keeps every row, drop keeps the largest even number of them."""
    order = epoch_order(rows, 3, 1)
    pads = [deal(order, rank, world, "pad").tolist() for rank in range(world)]
    assert {len(part) for part in pads} == {-(-rows // world)}
    assert set(sum(pads, [])) == set(range(rows))
    drops = [deal(order, rank, world, "drop").tolist() for rank in range(world)]
    assert {len(part) for part in drops} == {rows // world}
    assert len(set(sum(drops, []))) == rows // world * world
    scored = sum((validation_rows(rows, rank, world).tolist() for rank in range(world)), [])
    assert sorted(scored) == list(range(rows))
