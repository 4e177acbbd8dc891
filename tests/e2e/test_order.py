"""The order of a run as its callbacks see it, the same by both entry points; clocks; what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.data import ArrayDataset
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.loop.builtin import EarlyStopping, ModelCheckpoint
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.loop.signals import Interrupted
from nnx_jax.model import NNModel
from nnx_jax.objectives.objective import supervised_objective
from nnx_jax.optim.epochs import FormulaSchedule, PlateauSchedule
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import MonitorSpec, NNTrainParams
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.runs.run import NNRun
from nnx_jax.trainer import Trainer
from tests.e2e.toys import ON_UPDATES, Slope, column, fit, only_run, slope, steps

SGD = NNOptimParams(kind="sgd", max_lr=0.1, momentum=0.0)
Entry = Callable[..., NNRun]


def by_model(runs: Path, callbacks: Sequence[Any], scheduler: NNSchedulerParams = ON_UPDATES, **more: Any) -> NNRun:
    params = NNTrainParams(optim=SGD, scheduler=scheduler, **more)
    return NNModel(module=Slope(), loss=slope).train(
        params, callbacks, data=data(), runs_dir=runs, progress=QuietProgress()
    )  # fmt: skip


def by_trainer(runs: Path, callbacks: Sequence[Any], scheduler: NNSchedulerParams = ON_UPDATES, **more: Any) -> NNRun:
    params = NNTrainerParams(optims={"main": SGD}, schedulers={"main": scheduler}, **more)
    return Trainer(NNModel(module=Slope(), loss=slope)).train(
        params, callbacks=callbacks, objective=supervised_objective(), data=data(), runs_dir=runs,
        progress=QuietProgress(),
    )  # fmt: skip


def data() -> NNDataParams:
    return NNDataParams(train=steps(2), val=steps(1), batch_size=1, shuffle=False)


both = pytest.mark.parametrize("train", [by_model, by_trainer])


class Log(Callback):
    """Notes every call, with the epoch; may fail in one, and fill the weight at the end."""

    def __init__(self, name: str, log: list[str], *, fail: str = "", fill: float | None = None) -> None:
        self.name, self.log, self.fail, self.fill = name, log, fail, fill

    def note(self, what: str) -> None:
        self.log.append(f"{self.name} {what}")
        if self.fail == what:
            raise ValueError(f"{self.name} broke in {what}")

    def on_train_begin(self, ctx: TrainContext) -> None:
        self.note("begin")

    def on_epoch_begin(self, ctx: TrainContext) -> None:
        self.note(f"epoch {ctx.epoch}")

    def on_optimizer_update(self, ctx: TrainContext, event: Any) -> None:
        self.note(f"update {event.update_idx}")

    def on_validation(self, ctx: TrainContext) -> None:
        self.note("validation")

    def on_epoch_end(self, ctx: TrainContext) -> None:
        self.note(f"end {ctx.epoch}")

    def on_train_end(self, ctx: TrainContext) -> None:
        self.note("train end")
        if self.fill is not None:
            ctx.model.net.w.set_value(jnp.full(1, self.fill))


@both
def test_a_run_from_its_begin_to_the_refresh_of_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Entry
) -> None:
    """nnx:S06 nnx:S07 nnx:S10 nnx:S11 nnx:S20 nnx:S22 nnx:S23 nnx:S24

    The clock moves once an epoch, between validation and the epoch's end. Two epochs and the refresh are three
    generations, and only LAST holds what a callback did at the end.
    """
    log: list[str] = []
    tick = FormulaSchedule.step

    def step(self: FormulaSchedule, value: float | None = None) -> float:
        log.append("clock")
        return tick(self, value)

    monkeypatch.setattr(FormulaSchedule, "step", step)
    by_epoch = NNSchedulerParams(kind="step", step_size=1, factor=0.5)
    callbacks = [Log("A", log, fill=7.0), ModelCheckpoint([0]), Log("B", log)]
    run = train(tmp_path, callbacks, by_epoch, n_epochs=2)
    epochs = [
        [
            f"A epoch {n}", f"B epoch {n}",
            *(f"{name} update {update}" for update in (2 * n + 1, 2 * n + 2) for name in "AB"),
            "A validation", "B validation", "clock", f"A end {n}", f"B end {n}",
        ]
        for n in range(2)
    ]  # fmt: skip
    assert log == ["A begin", "B begin", *epochs[0], *epochs[1], "B train end", "A train end"]
    assert run.last is not None
    assert (run.last.generation, run.status) == (3, "finished")
    assert set(run.checkpoints()) == {"LAST", "BEST", "FIRST", "custom_e0"}
    assert run.checkpoint().load_all()["params/w"] == pytest.approx([7.0])
    assert run.checkpoint("BEST").load_all()["params/w"] != pytest.approx([7.0])


@both
def test_the_update_clock_moves_once_an_update(tmp_path: Path, train: Entry) -> None:
    """nnx:S08 (the rates used: halved at each of four updates)"""
    halving = NNSchedulerParams(kind="step", clock="optimizer_update", step_size=1, factor=0.5)
    run = train(tmp_path, [], halving, n_epochs=2)
    assert column(run, "update", "lr") == pytest.approx([0.1, 0.05, 0.025, 0.0125])


def test_the_update_clock_stands_still_where_there_is_no_update(tmp_path: Path) -> None:
    """nnx:S13 (no tick in the middle of a window, after one of masked rows only, or after one that is not finite)"""
    halving = NNSchedulerParams(kind="step", clock="optimizer_update", step_size=1, factor=0.5)
    y = np.array([1, 1, 1, 1, -1, 1, 1, 1], np.float32)[:, None]  # the gradient of the fifth row is NaN
    rows = ArrayDataset(x=-np.ones_like(y), y=y, weight=np.array([1, 1, 0, 0, 1, 1, 1, 1], np.float32))
    run = fit(tmp_path, Slope(), slope, rows, accumulate=2, scheduler=halving, nonfinite="skip")
    assert column(run, "update", "skipped") == [0, 1, 1, 0]
    assert column(run, "update", "lr") == [pytest.approx(0.1), None, None, pytest.approx(0.05)]


def test_the_decision_and_the_summary_come_before_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:S16 nnx:S17 (the clock is given the value of the decision that BEST and EarlyStopping follow)"""
    seen: list[Any] = []
    context: list[TrainContext] = []

    class Keeps(Callback):
        def on_train_begin(self, ctx: TrainContext) -> None:
            context.append(ctx)

    tick = PlateauSchedule.step

    def step(self: PlateauSchedule, value: float | None = None) -> float:
        ctx = context[0]
        assert ctx.decision is not None
        seen.append((value, ctx.decision.value, ctx.decision.improved, ctx.values["train_loss"], ctx.epoch))
        return tick(self, value)

    monkeypatch.setattr(PlateauSchedule, "step", step)
    monitor, one = MonitorSpec(), np.ones((1, 1), np.float32)
    stopper = EarlyStopping(monitor, patience=9)
    run = fit(
        tmp_path, Slope(1.0), slope, steps(1), val=ArrayDataset(x=one, y=one), callbacks=[Keeps(), stopper],
        monitor=monitor, scheduler=NNSchedulerParams(kind="reduce_on_plateau", patience=9), n_epochs=3,
    )  # fmt: skip
    # The weight rises by 0.1 an epoch, so the loss on a row of 1 does: epoch 0 is the best.
    assert [entry[0] for entry in seen] == [entry[1] for entry in seen] == pytest.approx([1.1, 1.2, 1.3])
    assert [entry[2] for entry in seen] == [True, False, False]
    assert [entry[3] for entry in seen] == pytest.approx([-1.0, -1.1, -1.2])
    assert run.best is not None
    assert (run.best.epoch, stopper.wait, run.checkpoint().host["clock"]["bad_epochs"]) == (0, 2, 2)


@both
def test_a_failure_ends_every_callback_that_began_and_is_the_error_that_is_raised(tmp_path: Path, train: Entry) -> None:
    """nnx:S26 nnx:S27"""
    log: list[str] = []
    callbacks = [Log("A", log, fail="train end"), Log("B", log, fail="train end"), Log("C", log, fail="update 3")]
    with (
        pytest.warns(RuntimeWarning, match="broke in train end") as warned,
        pytest.raises(ValueError, match="C broke in update 3"),
    ):
        train(tmp_path, callbacks, n_epochs=2)
    assert [str(each.message)[-21:] for each in warned] == [" B broke in train end", " A broke in train end"]
    assert log[-3:] == ["C train end", "B train end", "A train end"]
    stopped = only_run(tmp_path)
    assert stopped.last is not None
    assert (stopped.last.epoch, stopped.last.step, stopped.last.generation) == (0, 2, 1)
    log.clear()
    with pytest.raises(ValueError, match="B broke in begin"):
        train(tmp_path, [Log("A", log), Log("B", log, fail="begin"), Log("C", log)], n_epochs=2)
    assert log == ["A begin", "B begin", "A train end"]


def test_callbacks_end_also_where_the_weights_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:S26 a second signal inside an update leaves deleted buffers; every callback ends all the same."""
    ended: list[BaseException | None] = []

    class Struck(Callback):
        def on_optimizer_update(self, ctx: TrainContext, event: Any) -> None:
            raise Interrupted(2, committed=False)

        def on_train_end(self, ctx: TrainContext) -> None:
            ended.append(ctx.error)

    def gone(self: Any, state: Any) -> Any:
        raise RuntimeError("Array has been deleted")

    monkeypatch.setattr(FlaxEngine, "trained", gone)
    with pytest.warns(RuntimeWarning, match="while stopping.*deleted"), pytest.raises(Interrupted) as caught:
        by_model(tmp_path, [Struck()], n_epochs=1)
    assert ended == [caught.value]
