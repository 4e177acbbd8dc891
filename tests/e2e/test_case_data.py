"""Data as runs: which row each update saw is read from the history, through stops, resumes and odd row counts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.data import ArrayDataset, Feed, TrainingDataset
from nnx_jax.data.dataset import ColumnInfo
from nnx_jax.loop.builtin import EarlyStopping
from nnx_jax.loop.signals import Interrupted
from nnx_jax.params.metrics import AccuracyParams
from nnx_jax.params.train import MonitorSpec
from nnx_jax.runs.run import NNRun
from tests.e2e.toys import (
    Batches,
    KillAt,
    Killed,
    Scripted,
    Target,
    Watch,
    column,
    fit,
    half,
    only_run,
    rows,
    targets,
    weight,
)


def tag(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss of a row is its target, so that the history says which row it was; the gradient is 0."""
    return 0.0 * outputs + targets


class DieAtStep(KillAt):
    """Dies in the validation of one update, before that update is committed."""

    def __init__(self, step: int) -> None:
        super().__init__("on_validation")
        self.step = step

    def _count(self, ctx: Any) -> None:
        if ctx.step == self.step:
            raise Killed


def tagged(runs: Path, count: int, *, kill_at: int | None = None, **more: Any) -> NNRun:
    """A run over rows 0..count-1, one a microbatch; it dies in the validation after update `kill_at`."""
    more = {"eval_every_n_steps": 1, "checkpoint": {"every_n_steps": 1}, **more}
    if kill_at is None:
        return fit(runs, Target(), tag, targets(*range(count)), **more)
    with pytest.raises(Killed):
        fit(runs, Target(), tag, targets(*range(count)), callbacks=[DieAtStep(kill_at)], **more)
    return only_run(runs)


def seen(run: NNRun, kind: str = "update") -> list[int]:
    return [round(value) for value in column(run, kind, "train_loss")]


@pytest.mark.parametrize("dispatch", ["auto", "step"])
def test_a_resume_inside_an_epoch_goes_on_with_the_same_order(tmp_path: Path, dispatch: str) -> None:
    """case:F01 nnx:B121 (each row once, in the straight order; the next epoch has its own)"""
    more: dict[str, Any] = {"data": {"shuffle": True}, "seed": 3, "n_epochs": 2, "dispatch": dispatch}
    more |= {"checkpoint": {"every_n_steps": 20}, "eval_every_n_steps": 7}
    stopped = tagged(tmp_path, 64, kill_at=21, **more)
    assert stopped.last is not None
    assert stopped.last.step == 20
    run = tagged(tmp_path, 64, **more)
    assert run.id == stopped.id
    feed = Feed(targets(*range(64)), batch_size=1, seed=3)
    assert seen(run) == [*feed.order(0)[:, 0], *feed.order(1)[:, 0]]
    assert sorted(seen(run)[:64]) == list(range(64))
    assert seen(run)[:64] != seen(run)[64:]


def test_every_epoch_has_its_own_order_whatever_the_model(tmp_path: Path) -> None:
    """case:F02"""
    more: dict[str, Any] = {"data": {"shuffle": True}, "seed": 7, "n_epochs": 3}
    first = fit(tmp_path, Target(), tag, targets(*range(16)), **more)
    again = fit(tmp_path, Target(3.0), tag, targets(*range(16)), optim={"kind": "adam", "momentum": None}, **more)
    orders = [seen(first)[16 * e : 16 * e + 16] for e in range(3)]
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert seen(again) == seen(first)
    assert again.id != first.id


def test_a_stop_at_an_epoch_border_repeats_and_skips_no_epoch(tmp_path: Path) -> None:
    """case:F03 (not "done" after 0 more updates, not epoch 0 again to n = 12)"""
    more: dict[str, Any] = {"data": {"shuffle": True}, "n_epochs": 2}
    with pytest.raises(Killed):
        fit(tmp_path, Target(), tag, targets(*range(4)), callbacks=[KillAt("on_epoch_begin", 2)], **more)
    stopped = only_run(tmp_path)
    assert stopped.last is not None
    assert stopped.last.step == 4
    watch = Watch("on_epoch_end", lambda ctx: ctx.step)
    run = fit(tmp_path, Target(), tag, targets(*range(4)), callbacks=[watch], **more)
    assert watch.seen == [8]
    feed = Feed(targets(*range(4)), batch_size=1, seed=0)
    assert seen(run) == [*feed.order(0)[:, 0], *feed.order(1)[:, 0]]


def test_the_first_batch_after_a_resume_is_the_next_one(tmp_path: Path) -> None:
    """case:F04 case:F08 (9 again; the second resume at the first one's offset)"""
    first = tagged(tmp_path, 20, kill_at=11)
    assert first.last is not None
    assert first.last.step == 10
    assert seen(tagged(tmp_path, 20, kill_at=16)) == list(range(15))
    assert seen(tagged(tmp_path, 20)) == list(range(20))


def test_the_position_counts_microbatches(tmp_path: Path) -> None:
    """case:F06 (after update 3 of two microbatches each the next one is 6, not 3)"""
    stopped = tagged(tmp_path, 10, kill_at=4, accumulate=2, record_every="batch")
    assert stopped.last is not None
    assert (stopped.last.step, stopped.last.batch) == (3, 6)
    run = tagged(tmp_path, 10, accumulate=2, record_every="batch")
    assert seen(run, "batch") == list(range(10))


@pytest.mark.parametrize("how", ["signal", "crash"])
def test_a_stop_inside_a_window_loses_nothing_of_it(tmp_path: Path, how: str) -> None:
    """case:F07 (0.975: only t = 7 and 8 used; 0.6125: and divided by 4)

    A signal lets the window end first; after a crash it is replayed from its first microbatch.
    """

    def stop(index: int) -> None:
        if index == 6:
            if how == "crash":
                raise Killed
            os.kill(os.getpid(), signal.SIGTERM)

    batches = [(np.zeros((1, 1), np.float32), np.array([t], np.float32)) for t in range(1, 9)]
    more: dict[str, Any] = {"accumulate": 4, "checkpoint": {"every_n_steps": 1}, "dispatch": "step", "data_id": "t"}
    with pytest.raises(Interrupted if how == "signal" else Killed):
        fit(tmp_path, Target(), half, None, train_loader=Batches(batches, stop), **more)
    stopped = only_run(tmp_path)
    assert stopped.last is not None
    assert stopped.last.step == (2 if how == "signal" else 1)
    run = fit(tmp_path, Target(), half, None, train_loader=Batches(batches), **more)
    assert run.id == stopped.id
    assert weight(run) == pytest.approx(0.875, abs=1e-7)
    assert column(run, "update", "batch") == [3, 7]
    assert len(rows(run, "epoch")) == 1


def test_no_batch_spans_two_epochs(tmp_path: Path) -> None:
    """case:F12 (5 batches, the third made of row 4 and row 0)"""
    run = fit(tmp_path, Target(), tag, targets(*range(5)), n_epochs=2, data={"batch_size": 2})
    assert column(run, "update", "train_loss") == [0.5, 2.5, 4.0] * 2
    assert column(run, "update", "step") == [1, 2, 3, 4, 5, 6]


class Plain(TrainingDataset):
    """A user's own rows: not in memory, without a repr of its own."""

    rows: int

    def __len__(self) -> int:
        return self.rows

    @property
    def columns(self) -> dict[str, ColumnInfo]:
        return {"x": ColumnInfo((1,), np.dtype(np.float32)), "y": ColumnInfo((), np.dtype(np.float32))}

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": np.zeros((len(indices), 1), np.float32), "y": indices.astype(np.float32)}

    def content_hash(self) -> str:
        return f"{self.rows:064x}"


def test_rows_of_the_users_own_class_are_resumed(tmp_path: Path) -> None:
    """case:F15 (compared by repr, two objects of one class are two addresses)"""
    more: dict[str, Any] = {"checkpoint": {"every_n_steps": 1}, "eval_every_n_steps": 1, "data": {"shuffle": True}}
    with pytest.raises(Killed):
        fit(tmp_path, Target(), tag, Plain(rows=6), callbacks=[DieAtStep(4)], **more)
    run = fit(tmp_path, Target(), tag, Plain(rows=6), **more)
    assert run.id == only_run(tmp_path).id
    assert sorted(seen(run)) == list(range(6))
    assert seen(run) == list(Feed(targets(*range(6)), batch_size=1, seed=0).order(0)[:, 0])


# -- evaluation -------------------------------------------------------------------------------------------------


class Logits(nnx.Module):
    """Two classes: output (0, w x)."""

    def __init__(self, w: float = 1.0) -> None:
        self.w = nnx.Param(jnp.float32(w))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.zeros_like(x), x * self.w[...]], axis=1)


def right(*correct: int) -> ArrayDataset:
    """Rows that `Logits` gets right (1) or wrong (0); a row of zeros would count as right."""
    y = np.zeros(len(correct), np.int32)
    x = np.where(np.array(correct) > 0, -1.0, 1.0).astype(np.float32)[:, None]
    return ArrayDataset(x=x, y=y, n_classes=2)


def scored(runs: Path, train: Any, val: Any = None, *, lr: float = 0.0, w: float = 1.0, **more: Any) -> NNRun:
    more = {"data": {"batch_size": 4}, **more}
    return fit(
        runs,
        Logits(w),
        "cross_entropy",
        train,
        val=val,
        model={"metrics": (AccuracyParams(),)},
        optim={"max_lr": lr},
        **more,
    )


def test_padding_is_never_scored(tmp_path: Path) -> None:
    """case:G03 ((b): 8 of 9 rows, not the mean 2/3 of three batches)

    The one-process side of G02: 1 of 5 rows is right, in batches of 4 (0.25 and 0.5 count padding).
    """
    run = scored(tmp_path, right(1, 1, 1, 1, 1, 1, 1, 1, 0), right(1, 0, 0, 0, 0))
    (epoch,) = rows(run, "epoch")
    assert epoch["train_accuracy"] == pytest.approx(8 / 9)
    assert epoch["val_accuracy"] == pytest.approx(0.2)
    loss = (8 * np.log1p(np.exp(-1)) + np.log1p(np.exp(1))) / 9
    assert epoch["train_loss"] == pytest.approx(loss, rel=1e-6)
    assert column(run, "update", "train_accuracy") == [1.0, 1.0, 0.0]


def test_a_ragged_epoch_weighs_rows_not_batches(tmp_path: Path) -> None:
    """case:G03 ((a): 0.7, 0.8 and 0.9 on 256, 256 and 10 rows make 393/522, not 0.8)"""
    flags = [*[1] * 179, *[0] * 77, *[1] * 205, *[0] * 51, *[1] * 9, 0]
    run = scored(tmp_path, right(*flags), right(*flags), data={"batch_size": 256})
    (epoch,) = rows(run, "epoch")
    assert epoch["train_accuracy"] == pytest.approx(393 / 522)
    assert epoch["val_accuracy"] == pytest.approx(393 / 522)


def test_metrics_start_anew_every_epoch(tmp_path: Path) -> None:
    """case:G04 (a running total gives 0.5 in the second epoch)"""
    run = scored(tmp_path, right(0, 0, 0, 0), right(0, 0, 0, 0), lr=0.8, w=1.0, n_epochs=2)
    assert column(run, "epoch", "val_accuracy") == [0.0, 1.0]
    assert column(run, "epoch", "train_accuracy") == [0.0, 0.0]


def test_nothing_is_scored_before_training(tmp_path: Path) -> None:
    """case:G05 (before the first update this model would score 1.0, the best of all)"""
    watch = Watch("on_validation", lambda ctx: ctx.step)
    run = Scripted(0.6, 0.7, before=1.0).fit(
        tmp_path, monitor=MonitorSpec(mode="max"), callbacks=[watch, EarlyStopping(patience=5)]
    )
    assert run.best is not None
    assert run.best.epoch == 1
    assert watch.seen == [1, 2]
    assert column(run, "epoch", "monitor") == pytest.approx([0.6, 0.7])
    assert not rows(run, "eval")


@pytest.mark.parametrize("every, expected", [(5, [5, 10]), (4, [4, 8, 10])])
def test_the_last_update_is_scored_and_stored_once(tmp_path: Path, every: int, expected: list[int]) -> None:
    """case:G07 (both cadences; neither a missing 10 nor a second one)"""
    watch = Watch("on_validation", lambda ctx: ctx.step)
    run = fit(
        tmp_path, Target(), half, targets(*range(20)), val=targets(1), max_steps=10, eval_every_n_steps=every,
        checkpoint={"every_n_steps": every, "keep": 99}, save_phase_checkpoints=False, callbacks=[watch],
    )  # fmt: skip
    assert watch.seen == expected
    assert column(run, "eval", "step") == expected
    stored = {run.checkpoint(str(step)).step for step in expected}
    assert stored == set(expected)
    for step in set(range(1, 11)) - set(expected):
        with pytest.raises(ValueError, match=str(step)):
            run.checkpoint(str(step))


def test_evaluation_takes_every_row_whatever_training_drops(tmp_path: Path) -> None:
    """case:G08 (rows 0..9 in batches of 4: mean 4.5; without the last two 3.5)"""
    run = fit(
        tmp_path, Target(), tag, targets(*range(10)), val=targets(*range(10)), test=targets(*range(10)),
        data={"batch_size": 4, "tail": "drop"},
    )  # fmt: skip
    assert column(run, "epoch", "val_loss") == [4.5]
    assert column(run, "epoch", "train_loss") == [3.5]
    assert run.artifact is not None
    assert run.artifact["test"]["loss"] == 4.5
