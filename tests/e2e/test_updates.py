"""Committed updates as callbacks hear of them, and runs that end at one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_jax.loop.builtin import LRMonitor, build_callback
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.loop.updates import UpdateEvent
from nnx_jax.model import NNModel
from nnx_jax.objectives.objective import Objective, ObjectiveContext, ObjectiveResult
from nnx_jax.params.callbacks import CSVLoggerParams, JSONLLoggerParams, TensorBoardParams
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.runs.run import NNRun
from nnx_jax.trainer import Trainer
from tests.e2e.toys import (
    KillAt,
    Killed,
    Slope,
    Target,
    column,
    fit,
    gradients,
    half,
    only_run,
    rows,
    slope,
    steps,
    targets,
)

HALVING = NNSchedulerParams(kind="step", clock="optimizer_update", step_size=1, factor=0.5)


class Hears(Callback):
    """Notes events, and calls `then(ctx, event)`."""

    def __init__(self, then: Callable[[TrainContext, UpdateEvent], Any] | None = None) -> None:
        self.events: list[UpdateEvent] = []
        self.log: list[tuple[str, Any]] = []
        self.then = then

    def on_optimizer_update(self, ctx: TrainContext, event: UpdateEvent) -> None:
        self.events.append(event)
        self.log.append(("update", (ctx.step, ctx.rate, ctx.epoch)))
        if self.then is not None:
            self.then(ctx, event)

    def on_validation(self, ctx: TrainContext) -> None:
        self.log.append(("validation", ctx.step))

    def on_epoch_end(self, ctx: TrainContext) -> None:
        self.log.append(("epoch_end", ctx.step))


class Reads(Callback):
    """Notes the updates of every read."""

    def __init__(self) -> None:
        self.reads: list[list[UpdateEvent]] = []

    def on_updates(self, ctx: TrainContext, events: Any) -> None:
        self.reads.append(list(events))


def stop_at(update: int) -> Callback:
    def then(ctx: TrainContext, event: UpdateEvent) -> None:
        ctx.stop_at_update = event.update_idx == update

    return Hears(then)


def four(runs: Path, *callbacks: Any, **more: Any) -> NNRun:
    """Four updates an epoch, three epochs; the weight counts updates in tenths."""
    return fit(runs, Slope(), slope, steps(4), callbacks=callbacks, n_epochs=3, **more)


# -- events -----------------------------------------------------------------------------------------------------


def test_every_update_is_told_once_before_its_epoch_is_validated(tmp_path: Path) -> None:
    """nnx:S20"""
    hears = Hears()
    fit(tmp_path, Slope(), slope, steps(2), val=steps(1), callbacks=[hears], n_epochs=2)
    assert [what if what != "update" else step[0] for what, step in hears.log] == [
        1, 2, "validation", "epoch_end", 3, 4, "validation", "epoch_end",
    ]  # fmt: skip
    assert [(e.optimizer, e.update_idx, e.epoch_idx, e.batch_idx) for e in hears.events] == [
        ("main", 1, 0, 0), ("main", 2, 0, 1), ("main", 3, 1, 0), ("main", 4, 1, 1),
    ]  # fmt: skip


def test_an_event_has_the_rate_its_update_used(tmp_path: Path) -> None:
    """nnx:B057 (0.12, 0.06, 0.03, as `event.lr`, `ctx.rate` and the optimizer's; the built-in step)"""
    seen: list[tuple[float, ...]] = []

    def look(ctx: TrainContext, event: UpdateEvent) -> None:
        assert ctx.optimizer is not None
        assert ctx.rate is not None
        assert ctx.optimizer.rate is not None
        seen.append((event.lr, ctx.rate, ctx.optimizer.rate))

    fit(tmp_path, Slope(), slope, steps(3), callbacks=[Hears(look)], optim={"max_lr": 0.12}, scheduler=HALVING)
    assert np.array(seen) == pytest.approx(np.repeat([[0.12], [0.06], [0.03]], 3, axis=1))


@pytest.mark.parametrize("every", ["update", "batch"])
def test_an_event_counts_its_microbatches_and_has_the_loss_of_all(tmp_path: Path, every: str) -> None:
    """nnx:B082 (5 microbatches in windows of 2: closed at 1, 3, 4, of 2, 2, 1; rows of half squares 0, 2, 4.5, 8, 12.5)

    The rate is 0, so the losses are those of weight 0: (0 + 0.5 * 4) / 2, ...
    """
    hears = Hears()
    run = fit(
        tmp_path, Target(), half, targets(0, 2, 3, 4, 5), accumulate=2, callbacks=[hears], optim={"max_lr": 0.0},
        record_every=every, n_epochs=2,
    )  # fmt: skip
    assert [(e.batch_idx, e.microbatches) for e in hears.events] == [(1, 2), (3, 2), (4, 1)] * 2
    assert [e.loss for e in hears.events] == pytest.approx([1.0, 6.25, 12.5] * 2)
    assert [list(e.losses.values()) for e in hears.events] == [[pytest.approx(e.loss)] for e in hears.events]
    if every == "batch":
        assert column(run, "batch", "step")[:5] == [0, 1, 1, 2, 3]


def test_a_window_that_is_no_update_is_no_event(tmp_path: Path) -> None:
    """nnx:B088 (events and counts; masked rows 1 and 2 are a window) nnx:B087 (skip: no event)"""
    hears = Hears()
    fit(
        tmp_path, Target(), half, targets(1, 1, 1, 1, 1, 1, weight=[1, 1, 0, 0, 1, 1]), accumulate=2,
        callbacks=[hears],
    )  # fmt: skip
    assert [(e.update_idx, e.batch_idx, e.microbatches) for e in hears.events] == [(1, 1, 2), (2, 5, 2)]
    bad = Hears()
    fit(tmp_path / "bad", Slope(), slope, steps(3, bad=[1]), callbacks=[bad], nonfinite="skip")
    assert [(e.update_idx, e.batch_idx) for e in bad.events] == [(1, 0), (2, 2)]


def test_nobody_who_watches_updates_costs_no_read(tmp_path: Path) -> None:
    """One read an epoch, with all its updates; a listener of single updates makes it one a window, same numbers."""
    reads, both = Reads(), Reads()
    quiet = fit(tmp_path / "a", Slope(), slope, steps(6), callbacks=[reads], n_epochs=2)
    watched = fit(tmp_path / "b", Slope(), slope, steps(6), callbacks=[both, Hears()], n_epochs=2)
    assert [[e.update_idx for e in read] for read in reads.reads] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    assert [[e.update_idx for e in read] for read in both.reads] == [[n] for n in range(1, 13)]
    assert [event for read in reads.reads for event in read] == [event for read in both.reads for event in read]
    assert quiet.records == watched.records


def test_listeners_are_called_after_every_update(tmp_path: Path) -> None:
    """`ctx.update_listeners`, also of one who joins inside an epoch; `committed_updates` and `update_count` agree."""
    seen: list[int] = []

    class Joins(Callback):
        def on_validation(self, ctx: TrainContext) -> None:
            if not ctx.update_listeners:
                ctx.update_listeners.append(lambda ctx: seen.append(ctx.committed_updates))
            assert ctx.update_count == ctx.committed_updates == ctx.step

    fit(tmp_path, Slope(), slope, steps(5), val=steps(1), callbacks=[Joins()], eval_every_n_steps=2)
    assert seen == [3, 4, 5]


def test_an_update_is_told_once_over_a_kill_and_a_resume(tmp_path: Path) -> None:
    """Mid-window too: the microbatches before the kill count (commit after update 1 of windows of 2, killed in 2)."""

    def die(ctx: TrainContext, event: UpdateEvent) -> None:
        if event.update_idx == 2:
            raise Killed

    more: dict[str, Any] = {"accumulate": 2, "checkpoint": {"every_n_steps": 1}, "record_every": "batch"}
    with pytest.raises(Killed):
        fit(tmp_path, Slope(), slope, steps(8), callbacks=[Hears(die)], **more)
    hears = Hears()
    fit(tmp_path, Slope(), slope, steps(8), callbacks=[hears], **more)
    assert [(e.update_idx, e.batch_idx, e.microbatches) for e in hears.events] == [(2, 3, 2), (3, 5, 2), (4, 7, 2)]


def test_the_context_knows_optimizer_run_and_history(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looks(Callback):
        def on_epoch_end(self, ctx: TrainContext) -> None:
            assert ctx.optimizer is not None
            assert ctx.run is not None
            assert ctx.deferred_checkpoint_writes is ctx.deferred
            assert ctx.idps is ctx.records
            assert ctx.idp == ctx.records[-1]
            seen.append((ctx.optimizer.name, ctx.optimizer.updates, ctx.optimizer.params.kind, ctx.run.status))

    run = fit(tmp_path, Slope(), slope, steps(2), callbacks=[Looks()], n_epochs=2)
    assert seen == [("main", 2, "sgd", "running"), ("main", 4, "sgd", "running")]
    assert run.status == "finished"


def test_should_stop_after_an_update_commits_it(tmp_path: Path) -> None:
    def then(ctx: TrainContext, event: UpdateEvent) -> None:
        ctx.should_stop = event.update_idx == 6

    run = four(tmp_path, Hears(then))
    assert run.last is not None
    assert (run.last.step, column(run, "update", "step")[-1], run.status) == (6, 6, "finished")


# -- the end at an update ---------------------------------------------------------------------------------------


class Ruins(Callback):
    """Fills the weight at the end of training."""

    def on_train_end(self, ctx: TrainContext) -> None:
        ctx.model.net.w.set_value(jax.numpy.full(1, 7.0))


def test_a_stop_inside_an_epoch_gives_the_epoch_up(tmp_path: Path) -> None:
    """nnx:B140 nnx:S25"""
    last: list[Any] = []

    class Last(Callback):
        def on_train_end(self, ctx: TrainContext) -> None:
            last.append((ctx.step, len(ctx.records), ctx.records[-1]["kind"]))

    module = Slope()
    run = fit(tmp_path, module, slope, steps(4), callbacks=[stop_at(6), Last(), Ruins()], n_epochs=3)
    assert run.last is not None
    assert (run.last.epoch, run.last.step, run.last.generation) == (0, 4, 1)
    assert {row["epoch"] for row in run.records} == {0}
    assert run.checkpoint().load_all()["params/w"] == pytest.approx([0.4])
    assert module.w[...] == pytest.approx([7.0])
    assert last == [(6, 5, "epoch")]  # four updates and the epoch
    assert run.artifact is not None
    assert (run.artifact["step"], run.artifact["epoch"], run.artifact["stopped_at_update"]) == (4, 1, 6)


def test_a_stop_at_an_epochs_last_update_commits_the_epoch(tmp_path: Path) -> None:
    """nnx:B141 (and LAST holds what a callback did at the end)"""
    run = four(tmp_path, stop_at(8), Ruins())
    assert run.last is not None
    assert (run.last.epoch, run.last.step) == (1, 8)
    assert {row["epoch"] for row in run.records} == {0, 1}
    assert run.checkpoint().load_all()["params/w"] == pytest.approx([7.0])
    assert run.artifact is not None
    assert "stopped_at_update" not in run.artifact


def test_a_stop_before_the_first_commit_leaves_no_last(tmp_path: Path) -> None:
    """nnx:B142 (the same call may be made again, and then trains)"""
    run = four(tmp_path, stop_at(2))
    assert (run.last, run.records, run.artifact, run.status) == (None, [], None, "fresh")
    again = four(tmp_path)
    assert again.id == run.id
    assert len(rows(again, "update")) == 12


def test_a_stop_goes_back_to_the_last_commit_wherever_it_was(tmp_path: Path) -> None:
    """With commits inside epochs it is one of those; the plan's own end is never given up."""
    run = four(tmp_path / "a", stop_at(7), checkpoint={"every_n_steps": 3})
    assert run.last is not None
    assert (run.last.step, column(run, "update", "step")) == (6, [1, 2, 3, 4, 5, 6])
    whole = fit(tmp_path / "b", Slope(), slope, steps(4), callbacks=[stop_at(6)], max_steps=6)
    assert whole.last is not None
    assert (whole.last.step, column(whole, "update", "step")[-1]) == (6, 6)


def test_a_listener_stops_too_and_the_end_is_not_what_a_crash_leaves(tmp_path: Path) -> None:
    """A second run of the same configuration after a stop is refused: the run is finished at its last commit."""

    class Caps(Callback):
        def on_train_begin(self, ctx: TrainContext) -> None:
            def cap(ctx: TrainContext) -> None:
                ctx.stop_at_update = ctx.committed_updates >= 6

            ctx.update_listeners.append(cap)

    run = four(tmp_path, Caps())
    assert run.last is not None
    assert (run.last.step, run.status) == (4, "finished")
    with pytest.raises(FileExistsError):
        four(tmp_path)


# -- rates ------------------------------------------------------------------------------------------------------


def test_lr_monitor_has_the_rate_after_every_update(tmp_path: Path) -> None:
    """One rate an epoch, as its last update used it; on the update clock also what each update's step left."""
    monitor = LRMonitor()
    fit(
        tmp_path, Slope(), slope, steps(2), callbacks=[monitor], n_epochs=2, optim={"max_lr": 0.16}, scheduler=HALVING
    )  # fmt: skip
    assert monitor.history == pytest.approx([0.08, 0.02])
    assert [update for update, _ in monitor.update_history] == [1, 2, 3, 4]
    assert [rate for _, rate in monitor.update_history] == pytest.approx([0.08, 0.04, 0.02, 0.01])


def test_lr_monitor_on_the_epoch_clock_has_no_updates(tmp_path: Path) -> None:
    monitor = LRMonitor()
    by_epoch = NNSchedulerParams(kind="step", step_size=1, factor=0.5)
    fit(tmp_path, Slope(), slope, steps(2), callbacks=[monitor], n_epochs=3, scheduler=by_epoch)
    assert monitor.history == pytest.approx([0.1, 0.05, 0.025])
    assert monitor.update_history == []


def test_lr_monitor_continues_over_a_kill(tmp_path: Path) -> None:
    """At an epoch's end, and inside an epoch, whose earlier updates are in the history."""

    def die(ctx: TrainContext, event: UpdateEvent) -> None:
        if event.update_idx == 6:
            raise Killed

    whole, first, second = LRMonitor(), LRMonitor(), LRMonitor()
    more: dict[str, Any] = {"n_epochs": 3, "scheduler": HALVING, "checkpoint": {"every_n_steps": 5}}
    fit(tmp_path / "whole", Slope(), slope, steps(3), callbacks=[whole], **more)
    with pytest.raises(Killed):
        fit(tmp_path / "cut", Slope(), slope, steps(3), callbacks=[first, Hears(die)], **more)
    stopped = only_run(tmp_path / "cut")
    assert stopped.last is not None
    assert stopped.last.step == 5
    fit(tmp_path / "cut", Slope(), slope, steps(3), callbacks=[second], **more)
    assert [update for update, _ in second.update_history] == list(range(1, 10))
    assert [rate for _, rate in second.update_history] == pytest.approx([rate for _, rate in whole.update_history])
    assert second.history == pytest.approx(whole.history)


def test_lr_monitor_continues_over_a_kill_beyond_the_window_of_a_journal(tmp_path: Path) -> None:
    """Inside an epoch of more updates than the window keeps: the others are read back from the journal."""

    def train(runs: Path, *callbacks: Callback) -> list[tuple[int, float]]:
        monitor = LRMonitor()
        with pytest.raises(Killed) if callbacks else contextlib.nullcontext():
            NNModel(module=Slope(), loss=slope).train(
                NNTrainParams(n_epochs=1, optim=NNOptimParams(kind="sgd", max_lr=0.1, momentum=0.0), scheduler=HALVING),
                [monitor, *callbacks],
                data=NNDataParams(train=steps(12), batch_size=1, shuffle=False),
                history=HistoryJournal(retention=3),
                checkpoint=CheckpointParams(every_n_steps=2),
                runs_dir=runs,
                progress=QuietProgress(),
            )
        return monitor.update_history

    def die(ctx: TrainContext, event: UpdateEvent) -> None:
        if event.update_idx == 9:
            raise Killed

    whole = train(tmp_path / "whole")
    train(tmp_path / "cut", Hears(die))
    assert train(tmp_path / "cut") == whole
    assert [update for update, _ in whole] == list(range(1, 13))


def test_one_hears_of_gradients_that_are_not_the_same(tmp_path: Path) -> None:
    """The weight of `Slope` moves by a tenth of each gradient; events come between, so `ctx.sync` shows each."""
    seen: list[float] = []

    def look(ctx: TrainContext, event: UpdateEvent) -> None:
        module: nnx.Module = ctx.sync()
        seen.append(float(module.w[0]))  # pyright: ignore[reportAttributeAccessIssue]

    fit(tmp_path, Slope(), slope, gradients(-1.0, -2.0, -3.0), callbacks=[Hears(look)])
    assert seen == pytest.approx([0.1, 0.3, 0.6])


# -- several optimizers and objectives --------------------------------------------------------------------------


class Two(nnx.Module):
    """Two weights, each with an optimizer: the output is a * x + b."""

    def __init__(self) -> None:
        self.a, self.b = Slope(), Slope()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.a(x) + self.b.w[...]


class Noted(Objective):
    """The mean output; notes what it is told of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[tuple[str, int], ...]] = []

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        return ObjectiveResult(ctx.mean("up", ctx.apply()[:, 0]))

    def after_update(self, events: Sequence[UpdateEvent]) -> None:
        self.told.append(tuple((event.optimizer, event.update_idx) for event in events))


def test_all_optimizers_of_a_commit_are_told_before_the_next(tmp_path: Path) -> None:
    """nnx:B058 nnx:B089 nnx:S15 both events come with the rates they used; then both schedules move.

    The objective is told first, of both at once.
    """
    objective, seen = Noted(), []

    def look(ctx: TrainContext, event: UpdateEvent) -> None:
        seen.append((event.optimizer, event.update_idx, round(event.lr, 4), ctx.committed_updates, len(objective.told)))

    def halves(pattern: str, rate: float) -> NNOptimParams:
        group = NNParamGroupSpec(patterns=(pattern,), max_lr=rate)
        return NNOptimParams(kind="sgd", max_lr=rate, momentum=0.0, param_groups=(group,))

    Trainer(NNModel(module=Two())).train(
        NNTrainerParams(
            optims={"b": halves("b.*", 0.4), "a": halves("a.*", 0.8)},
            schedulers={"a": HALVING, "b": HALVING},
            n_epochs=1,
        ),
        objective=objective,
        callbacks=[Hears(look)],
        data=NNDataParams(train=steps(2), batch_size=1, shuffle=False),
        runs_dir=tmp_path,
        progress=QuietProgress(),
    )
    assert seen == [
        ("a", 1, 0.8, 1, 1), ("b", 1, 0.4, 1, 1), ("a", 2, 0.4, 2, 2), ("b", 2, 0.2, 2, 2),
    ]  # fmt: skip
    assert objective.told == [(("a", 1), ("b", 1)), (("a", 2), ("b", 2))]


# -- loggers of whole runs --------------------------------------------------------------------------------------


def test_loggers_of_a_killed_run_have_every_row_once(tmp_path: Path) -> None:
    """From a configuration; nothing is read for them, and after a resume the files are those of an unbroken run."""

    def train(name: str, *callbacks: Any) -> NNRun:
        made = [
            build_callback(CSVLoggerParams(path=str(tmp_path / f"{name}.csv"))),
            build_callback(JSONLLoggerParams(path=str(tmp_path / f"{name}.jsonl"), every="update")),
            build_callback(TensorBoardParams()),
        ]
        return fit(
            tmp_path / name, Slope(), slope, steps(3), val=steps(1), callbacks=[*made, *callbacks], n_epochs=3,
            eval_every_n_steps=2, checkpoint={"every_n_steps": 2},
        )  # fmt: skip

    reads = Reads()
    whole = train("whole", reads)
    assert [[event.update_idx for event in read] for read in reads.reads] == [[1, 2], [3], [4], [5, 6], [7, 8], [9]]
    with pytest.raises(Killed):
        train("cut", KillAt("on_epoch_end", 2))
    cut = train("cut")
    assert cut.id == whole.id
    for suffix in ("csv", "jsonl"):
        assert (tmp_path / f"cut.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()
    assert len((tmp_path / "whole.csv").read_text().splitlines()) == 4
    assert len(list((whole.path / "tensorboard").iterdir())) == 1
    assert len(list((cut.path / "tensorboard").iterdir())) == 2
