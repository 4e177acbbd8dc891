"""Rows and summaries are sums over sums; a vetoed window leaves only its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_jax.loop.clocks import Cadence, Pace, span_batches
from nnx_jax.loop.engine import Records
from nnx_jax.loop.records import RecordKeeper, Rows, history_columns
from nnx_jax.objectives.metrics import build_metric


def summarize(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    numerator, denominator = sums["loss"]
    return {"loss": numerator / denominator if denominator else 0.0}


def no_metrics(_: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {}


class Record(NamedTuple):
    batch: int
    num: float
    den: float
    closed: bool = True
    committed: bool = True


def records(*found: Record) -> Records:
    sums = np.array([(r.num, r.den) for r in found], np.float64).reshape(-1, 2)
    batch = np.array([r.batch for r in found], np.int32)
    return Records(
        batch=batch,
        step=batch + 1,
        loss=np.array([r.num / r.den if r.den else np.nan for r in found]),
        rate=np.full(len(found), 0.1),
        grad_norm=np.ones(len(found)),
        closed=np.array([r.closed for r in found], bool),
        committed=np.array([r.committed for r in found], bool),
        sums={"loss": sums},
    )


def rows(keeper: RecordKeeper, *found: Record) -> Rows:
    made = Rows()
    made.append_table(keeper.table(records(*found)), len(found))
    return made


def test_epoch_summary_is_the_full_mean_not_the_mean_of_means() -> None:
    """nnx:B073 (16, 16 and 4 rows with means 1, 2 and 7: 76/36, not 10/3)"""
    keeper = RecordKeeper(summarize, no_metrics, n_batches=3, every="update")
    keeper.begin_epoch()
    made = rows(keeper, Record(0, 16.0, 16.0), Record(1, 32.0, 16.0), Record(2, 28.0, 4.0))
    assert [row["train_loss"] for row in made] == [1.0, 2.0, 7.0]
    assert keeper.summary() == {"train_loss": 76 / 36}


def test_a_skipped_window_has_a_row_but_no_part_in_the_summary() -> None:
    keeper = RecordKeeper(summarize, no_metrics, n_batches=2, every="update")
    keeper.begin_epoch()
    made = rows(keeper, Record(0, 3.0, 1.0), Record(1, float("nan"), 1.0, committed=False))
    assert [(row["skipped"], row["lr"]) for row in made] == [(0, 0.1), (1, None)]
    assert keeper.summary() == {"train_loss": 3.0}


def test_a_vetoed_window_of_two_leaves_out_both_microbatches() -> None:
    keeper = RecordKeeper(summarize, no_metrics, n_batches=4, every="batch")
    keeper.begin_epoch()
    rows(keeper, Record(0, 2.0, 1.0, False, False), Record(1, 6.0, 1.0, committed=False))
    rows(keeper, Record(2, 1.0, 1.0, False, False), Record(3, 3.0, 1.0))
    assert keeper.summary() == {"train_loss": 2.0}


def test_rows_per_batch_carry_their_own_loss() -> None:
    keeper = RecordKeeper(summarize, no_metrics, n_batches=4, every="batch")
    keeper.begin_epoch()
    made = rows(keeper, Record(4, 2.0, 1.0, False, False), Record(5, 6.0, 1.0))
    assert [(row["epoch"], row["batch"], row["train_loss"]) for row in made] == [(1, 0, 2.0), (1, 1, 6.0)]


def test_a_record_without_valid_items_has_no_loss() -> None:
    keeper = RecordKeeper(summarize, no_metrics, n_batches=4, every="update")
    made = rows(keeper, Record(0, 0.0, 0.0, committed=False), Record(1, float("nan"), 1.0, committed=False))
    assert made[0]["train_loss"] is None
    assert np.isnan(made[1]["train_loss"])


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.booleans(), st.booleans()), max_size=12), st.data())
def test_the_summary_does_not_depend_on_when_records_are_read(found: list[Any], data: st.DataObject) -> None:
    """Bit for bit: a resumed run reads at other moments than the straight one. Windows may lie across two reads."""
    each = [Record(n, num, 1.0, closed, closed and kept) for n, (num, closed, kept) in enumerate(found)]
    total, window = 0.0, []
    for record in each:  # the rule, one record after the other
        window.append(record.num)
        if record.closed:
            for value in window if record.committed else ():
                total += value
            window = []
    keeper = RecordKeeper(lambda sums: {"loss": sums["loss"][0]}, no_metrics, n_batches=100, every="batch")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(each)), max_size=3)))
    for start, end in zip([0, *cuts], [*cuts, len(each)], strict=True):
        if end > start:
            keeper.table(records(*each[start:end]))
    assert keeper.summary().get("train_loss", 0.0) == total


def test_rows_are_a_sequence_whatever_they_came_as() -> None:
    made = Rows([{"step": 0}])
    made.append_table({"kind": "update", "step": [1, 2, 3]}, 3)
    made.append({"step": 4})
    assert len(made) == 5
    assert [row["step"] for row in made] == [0, 1, 2, 3, 4]
    assert made[-2] == {"kind": "update", "step": 3}
    assert made[1:5:2] == [{"kind": "update", "step": 1}, {"kind": "update", "step": 3}]
    assert next(row for row in reversed(made) if row.get("kind"))["step"] == 3
    with pytest.raises(IndexError, match="row 5 of 5"):
        made[5]


def test_columns_are_fixed_at_the_start() -> None:
    names = history_columns(("accuracy",), ("accuracy",))
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


def test_log_events_of_quick_updates_are_thinned_out_to_two_a_second() -> None:
    """Updates of 0.9 ms, `log=100`: ten events as asked for, then one every 500; those of slow ones are all shown."""
    cadence, pace, step, now, seen = Cadence(log=100, commit=450), Pace(100), 0, 0.0, []
    for _ in range(14):
        target = (step // cadence.log + 1) * cadence.log
        step, now = target, now + (target - step) * 9e-4
        cadence = pace.after(cadence, step, now)
        seen.append(step)
    assert seen == [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1500, 2000, 2500, 3000]
    assert cadence.commit == 450  # commits are not thinned out
    assert pace.after(cadence, 3500, now + 500.0).log == 100


def test_values_of_many_records_are_those_of_each() -> None:
    """Bit for bit, with an empty record (0/0) among them; a metric that is no ratio is computed one by one."""
    rng = np.random.default_rng(0)
    sums = np.stack([rng.uniform(0, 9, 50), rng.integers(0, 3, 50).astype(float)], axis=1)
    for kind in ("accuracy", "perplexity"):
        metric = build_metric(kind, 3)
        np.testing.assert_array_equal(metric.values(sums), [metric.compute(row) for row in sums])
    assert np.isnan(metric.values(sums)[sums[:, 1] == 0]).all()
    assert metric.values(sums[:0]).shape == (0,)
    counts = rng.integers(0, 3, (50, 9)).astype(float)
    counts[0] = counts[1, [0, 3, 6]] = 0  # nothing at all; a label that nobody saw
    for kind in ("precision", "recall", "f1"):
        metric = build_metric(kind, 3)
        np.testing.assert_array_equal(metric.values(counts), [metric.compute(row) for row in counts])
