"""Rows and summaries are sums over sums; a vetoed window leaves only its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnx_jax.loop.clocks import Cadence, span_batches
from nnx_jax.loop.engine import Record
from nnx_jax.loop.records import RecordKeeper, history_columns


def summarize(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    numerator, denominator = sums["loss"]
    return {"loss": numerator / denominator if denominator else 0.0}


def record(batch: int, num: float, den: float, *, closed: bool = True, committed: bool = True) -> Record:
    loss = num / den if den else 0.0
    return Record(batch, batch + 1, loss, 0.1, 1.0, closed, committed, {"loss": (num, den)})


def test_epoch_summary_is_the_full_mean_not_the_mean_of_means() -> None:
    """nnx:B073 (16, 16 and 4 rows with means 1, 2 and 7: 76/36, not 10/3)"""
    keeper = RecordKeeper(summarize, n_batches=3, every="update")
    keeper.begin_epoch()
    rows = keeper.rows([record(0, 16.0, 16.0), record(1, 32.0, 16.0), record(2, 28.0, 4.0)])
    assert [row["train_loss"] for row in rows] == [1.0, 2.0, 7.0]
    assert keeper.summary() == {"train_loss": 76 / 36}


def test_a_skipped_window_has_a_row_but_no_part_in_the_summary() -> None:
    keeper = RecordKeeper(summarize, n_batches=2, every="update")
    keeper.begin_epoch()
    rows = keeper.rows([record(0, 3.0, 1.0), record(1, float("nan"), 1.0, committed=False)])
    assert [row["skipped"] for row in rows] == [0, 1]
    assert keeper.summary() == {"train_loss": 3.0}


def test_a_vetoed_window_of_two_leaves_out_both_microbatches() -> None:
    keeper = RecordKeeper(summarize, n_batches=4, every="batch")
    keeper.begin_epoch()
    keeper.rows([record(0, 2.0, 1.0, closed=False), record(1, 6.0, 1.0, committed=False)])
    keeper.rows([record(2, 1.0, 1.0, closed=False), record(3, 3.0, 1.0)])
    assert keeper.summary() == {"train_loss": 2.0}


def test_rows_per_batch_carry_their_own_loss() -> None:
    keeper = RecordKeeper(summarize, n_batches=4, every="batch")
    keeper.begin_epoch()
    rows = keeper.rows([record(4, 2.0, 1.0, closed=False), record(5, 6.0, 1.0)])
    assert [(row["epoch"], row["batch"], row["train_loss"]) for row in rows] == [(1, 0, 2.0), (1, 1, 6.0)]


def test_columns_are_fixed_at_the_start() -> None:
    names = history_columns(("accuracy",), validates=True)
    assert names[7:] == ("train_loss", "train_accuracy", "val_loss", "val_accuracy", "monitor", "improved")


def test_events_fall_on_multiples_of_updates() -> None:
    """case:A12 case:G07 case:L02 (24 microbatches, accumulate 4: evals after 2, 4, 6, saves after 3, 6)"""
    cadence = Cadence(log=1, evaluate=2, commit=3)
    assert [cadence.next_step(step) for step in range(3)] == [1, 2, 3]
    evals = [step for step in range(1, 7) if cadence.due(2, step - 1, step)]
    saves = [step for step in range(1, 7) if cadence.due(3, step - 1, step)]
    assert (evals, saves) == ([2, 4, 6], [3, 6])
    assert Cadence().next_step(3) is None
    assert Cadence(max_steps=10, evaluate=4).next_step(8) == 10


def test_spans_end_on_window_borders() -> None:
    assert span_batches(step=0, target=2, batch=0, n_batches=7, accumulate=2) == 4
    assert span_batches(step=2, target=9, batch=4, n_batches=7, accumulate=2) == 3
    assert span_batches(step=0, target=None, batch=3, n_batches=7, accumulate=2) == 4
