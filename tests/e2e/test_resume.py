"""A run that was stopped anywhere ends with the same bits as one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import (
    ComponentRestoreError,
    ConfigError,
    NnxError,
    ResumePointError,
    RunExistsError,
)
from nnx_jax.data import ArrayDataset
from nnx_jax.loop.builtin import EarlyStopping, LRMonitor, ModelCheckpoint
from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.model import NNModel
from nnx_jax.params.train import CheckpointParams, MonitorSpec
from nnx_jax.runs.run import NNRun

from .helpers import assert_same_run, data_params, dataset, fit, model, stored

EVERY_STEP = CheckpointParams(every_n_steps=1, keep=50)
CONSTANT: dict[str, Any] = {"scheduler": {"kind": "constant", "clock": "optimizer_update"}}


class Bomb(Callback):
    """Fails at a chosen moment, once."""

    def __init__(self, *, step: int | None = None, epoch: int | None = None) -> None:
        self.step, self.epoch = step, epoch

    def on_validation(self, ctx: TrainContext) -> None:
        if self.step is not None and ctx.step >= self.step:
            raise RuntimeError("stopped here")

    def on_epoch_begin(self, ctx: TrainContext) -> None:
        if self.epoch == ctx.epoch:
            raise RuntimeError("stopped here")


def files_of(run: NNRun) -> dict[str, bytes]:
    return {str(p.relative_to(run.path)): p.read_bytes() for p in sorted(run.path.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("stop", "settings"),
    [
        (Bomb(epoch=1), {}),
        (Bomb(step=4), {"eval_every_n_steps": 2}),
        (Bomb(step=4), {"eval_every_n_steps": 1, "optim": {"accumulate_grad_batches": 2}, "record_every": "batch"}),
        (Bomb(step=9), {"eval_every_n_steps": 3, "dispatch": "step", "scheduler": {"clock": "epoch"}}),
    ],
    ids=["epoch border", "mid-epoch", "windows of two", "epoch clock, one call a batch"],
)
def test_an_interrupted_run_continues_bit_for_bit(tmp_path: Path, stop: Bomb, settings: dict[str, Any]) -> None:
    """nnx:S21 case:E05 case:F01 case:F03 case:F06

    Dropout, BatchNorm, AdamW, a clip, a padded tail: every stored array and every byte of the history are equal.
    """
    straight = fit(tmp_path / "straight", checkpoint=EVERY_STEP, **settings)
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path / "stopped", checkpoint=EVERY_STEP, callbacks=[stop], **settings)
    interrupted = NNRun.load(straight.id, tmp_path / "stopped")
    assert interrupted.status == "interrupted"
    assert interrupted.last is not None
    assert interrupted.last.step > 0
    assert_same_run(fit(tmp_path / "stopped", checkpoint=EVERY_STEP, **settings), straight)


def test_two_stops_in_one_epoch_and_other_dispatch_change_nothing(tmp_path: Path) -> None:
    """case:F08 and dispatch: the second resume starts where the second stop was, whatever way calls are made."""
    settings: dict[str, Any] = {"eval_every_n_steps": 1, "n_epochs": 1}
    straight = fit(tmp_path / "a", checkpoint=EVERY_STEP, **settings)
    for step, dispatch in ((2, "span"), (4, "step")):
        with pytest.raises(RuntimeError, match="stopped here"):
            fit(tmp_path / "b", checkpoint=EVERY_STEP, callbacks=[Bomb(step=step)], dispatch=dispatch, **settings)
    assert_same_run(fit(tmp_path / "b", checkpoint=EVERY_STEP, **settings), straight)


def test_the_same_run_twice_is_refused_and_left_alone(tmp_path: Path) -> None:
    """nnx:B021 case:L06 case:I13"""
    run = fit(tmp_path, n_epochs=1)
    before = files_of(run)
    with pytest.raises(RunExistsError, match=f"run {run.id} in .* is finished") as caught:
        fit(tmp_path, n_epochs=1)
    assert isinstance(caught.value, FileExistsError)
    assert files_of(run) == before
    again = fit(tmp_path, n_epochs=1, overwrite_existing=True)
    assert again.id == run.id
    assert_same_run(again, run)


def test_what_says_how_to_run_is_no_part_of_the_id(tmp_path: Path) -> None:
    """nnx:B024 nnx:B025"""
    ids = {
        fit(tmp_path / "a", n_epochs=1).id,
        fit(tmp_path / "b", n_epochs=1, dispatch="step", checkpoint=EVERY_STEP, callbacks=[LRMonitor()]).id,
    }
    assert len(ids) == 1
    assert fit(tmp_path / "a", n_epochs=1, salt="x").id not in ids
    with pytest.raises(ConfigError, match="salt"):
        fit(tmp_path / "a", n_epochs=1, salt=" ")


def test_planned_epochs_continue_a_run_in_a_directory_of_its_own(tmp_path: Path) -> None:
    """nnx:B121 nnx:B123 nnx:B136"""
    straight = fit(tmp_path, n_epochs=4, checkpoint=EVERY_STEP)
    source = fit(tmp_path, n_epochs=4, salt="stopped", checkpoint=EVERY_STEP, callbacks=[_stop_after(1)])
    before = files_of(source)
    resumed = fit(tmp_path, n_epochs=4, resume_from_run_id=source.id, resume_epochs="planned")
    assert resumed.id not in (straight.id, source.id)
    assert [row["epoch"] for row in resumed.records if row["kind"] == "epoch"] == [2, 3]
    assert resumed.records == [row for row in straight.records if row["epoch"] >= 2]
    left, right = stored(resumed), stored(straight)
    assert {n: a.tobytes() for n, a in left.items()} == {n: a.tobytes() for n, a in right.items()}
    assert files_of(source) == before
    status = resumed.resume_status
    assert (status.mode, status.source_run_id, status.source_epoch) == ("stateful", source.id, 1)
    assert status.source_generation == source.pointers["LAST"].generation
    for settings, problem in (
        ({"n_epochs": 5, "resume_from_run_id": source.id}, "n_epochs was 4, is 5"),
        ({"n_epochs": 4, "resume_from_run_id": straight.id}, "is done at LAST"),
        ({"n_epochs": 4, "resume_from_run_id": source.id, "resume_mode": "weights_only"}, "not weights_only"),
        ({"n_epochs": 4}, "needs resume_from_run_id"),
    ):
        with pytest.raises(ConfigError, match=problem):
            fit(tmp_path, resume_epochs="planned", **settings)


def _stop_after(epoch: int) -> Callback:
    class Stop(Callback):
        def on_epoch_end(self, ctx: TrainContext) -> None:
            ctx.should_stop = ctx.epoch >= epoch

    return Stop()


def test_additional_epochs_and_phases_count_from_the_checkpoint(tmp_path: Path) -> None:
    """nnx:B122 case:L06"""
    settings: dict[str, Any] = {"scheduler": {"kind": "constant", "clock": "epoch"}}
    source = fit(tmp_path, n_epochs=2, **settings)
    more = fit(tmp_path, n_epochs=2, resume_from_run_id=source.id, **settings)
    assert [row["epoch"] for row in more.records if row["kind"] == "epoch"] == [2, 3]
    assert more.pointers["FIRST"].epoch == 2
    straight = fit(tmp_path, n_epochs=4, **settings)
    assert {n: a.tobytes() for n, a in stored(more).items()} == {n: a.tobytes() for n, a in stored(straight).items()}


def test_weights_only_keeps_the_numbering_and_nothing_else(tmp_path: Path) -> None:
    """nnx:B124"""
    source = fit(tmp_path, n_epochs=2)
    fresh = fit(tmp_path, n_epochs=1, resume_from_run_id=source.id, resume_mode="weights_only", optim={"kind": "sgd"})
    assert fresh.resume_status.mode == "weights_only"
    assert [row["epoch"] for row in fresh.records if row["kind"] == "epoch"] == [2]
    assert [row["step"] for row in fresh.records if row["kind"] == "update"] == list(range(1, 7))
    zero = fit(tmp_path, n_epochs=1, salt="z", resume_from_run_id=source.id, resume_mode="weights_only",
               optim={"max_lr": 0.0, "weight_decay": 0.0})  # fmt: skip
    for name, value in stored(source).items():
        if name.startswith("params/"):
            np.testing.assert_array_equal(stored(zero)[name], value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"optim": {"kind": "sgd"}}, "topology.optimizer"),
        ({"optim": {"accumulate_grad_batches": 2}}, "topology.accumulate"),
        ({"scheduler": {"kind": "constant", "clock": "epoch"}}, "topology.schedule.clock"),
        ({"net": {"hidden_dims": (7,)}}, "topology.net"),
        ({"data": data_params(batch_size=5)}, "topology.data.batch_size"),
        ({"data": data_params(train=dataset(22))}, "topology.data.rows"),
        ({"monitor": MonitorSpec(metric="loss")}, "monitor"),
        ({"seed": 1}, "topology.data.seed"),
    ],
    ids=["optimizer", "window", "clock", "net", "batch", "rows", "monitor", "seed"],
)
def test_a_checkpoint_of_another_configuration_is_refused(
    source_run: NNRun, change: dict[str, Any], problem: str
) -> None:
    """nnx:B129 case:I10"""
    with pytest.raises(ResumePointError, match=problem) as caught:
        fit(source_run.root, **{"n_epochs": 2, "resume_from_run_id": source_run.id, **CONSTANT, **change})
    assert "the checkpoint has" in str(caught.value)
    assert len(NNRun.all(source_run.root)) == 1


@pytest.fixture(scope="module")
def source_run(tmp_path_factory: pytest.TempPathFactory) -> NNRun:
    return fit(tmp_path_factory.mktemp("source"), n_epochs=2, **CONSTANT)


def test_a_missing_source_or_tag_is_refused_before_anything_is_made(source_run: NNRun) -> None:
    """nnx:B130"""
    for change, problem in (
        ({"resume_from_run_id": "0" * 16}, "there is no run"),
        ({"resume_from_run_id": source_run.id, "resume_from_checkpoint": "Q2x"}, "has no checkpoint 'Q2x'"),
    ):
        with pytest.raises(ResumePointError, match=problem):
            fit(source_run.root, n_epochs=1, **change)
    assert len(NNRun.all(source_run.root)) == 1


def test_a_damaged_source_is_refused_whole(tmp_path: Path) -> None:
    """nnx:B126 case:I04 (through train)"""
    source = fit(tmp_path, n_epochs=1)
    generation = source.path / "checkpoints" / "generations" / str(source.pointers["LAST"].generation)
    victim = max((p for p in generation.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    other = model()
    with pytest.raises(ResumePointError, match=victim.name):
        fit(tmp_path, of=other, n_epochs=1, salt="next", resume_from_run_id=source.id)
    assert len(NNRun.all(tmp_path)) == 1


def test_early_stopping_stops_at_the_same_epoch_after_a_resume(tmp_path: Path) -> None:
    """nnx:B133 case:H05 case:H06"""
    settings: dict[str, Any] = {"n_epochs": 8, "optim": {"max_lr": 0.0}}
    straight = fit(tmp_path / "a", callbacks=[EarlyStopping(patience=4)], **settings)
    assert straight.artifact is not None
    assert straight.artifact["epoch"] == 5  # epoch 0 improves, then four that do not
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path / "b", callbacks=[EarlyStopping(patience=4), Bomb(epoch=3)], **settings)
    host = NNRun.load(straight.id, tmp_path / "b").checkpoint().host
    assert host["components"]["early_stopping"]["state"]["wait"] == 2  # what epoch 2 decided is in LAST of epoch 2
    resumed = fit(tmp_path / "b", callbacks=[EarlyStopping(patience=4)], **settings)
    assert_same_run(resumed, straight)


def test_a_component_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    """nnx:B134"""
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path, callbacks=[EarlyStopping(), Bomb(epoch=1)])
    with pytest.raises(ComponentRestoreError, match="component early_stopping: it watched"):
        fit(tmp_path, callbacks=[EarlyStopping("val_loss")])


def test_best_is_kept_over_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"n_epochs": 6, "monitor": MonitorSpec(metric="accuracy")}
    straight = fit(tmp_path / "a", **settings)
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path / "b", callbacks=[Bomb(epoch=3)], **settings)
    resumed = fit(tmp_path / "b", **settings)
    assert straight.best is not None
    assert resumed.best is not None
    assert (straight.best.epoch, straight.best.step) == (resumed.best.epoch, resumed.best.step)


def test_a_callback_checkpoint_appears_after_last_and_can_be_loaded(tmp_path: Path) -> None:
    """nnx:B119"""
    seen: list[list[str]] = []

    class Look(Callback):
        def on_epoch_begin(self, ctx: TrainContext) -> None:
            folder = tmp_path / ctx.run_id / "checkpoints"
            seen.append(sorted(p.name for p in folder.iterdir() if p.is_file()))

    run = fit(tmp_path, n_epochs=2, callbacks=[ModelCheckpoint([0], tag="snap"), Look()])
    assert seen[0] == []
    assert "snap_e0" in run.pointers
    assert run.pointers["snap_e0"].epoch == 0
    loaded = NNModel.from_checkpoint(f"{run.id}@snap_e0", runs_dir=tmp_path)
    assert loaded.predict(dataset().arrays()["x"]).logits.shape == (23, 3)


def test_a_failing_last_leaves_the_history_of_the_commit_before(tmp_path: Path, monkeypatch: Any) -> None:
    """nnx:S28 nnx:B099 nnx:B100 through a run: the error propagates, the next start continues."""
    from nnx_jax.runs import commit as commit_module

    real, calls = commit_module.pointers.write_pointer, []

    def fail_second_last(paths: Any, name: str, pointer: Any) -> None:
        calls.append(name)
        if name == "LAST" and calls.count("LAST") == 2:
            raise OSError(28, "No space left on device")
        real(paths, name, pointer)

    straight = fit(tmp_path / "a", n_epochs=3)
    with monkeypatch.context() as patch:
        patch.setattr(commit_module.pointers, "write_pointer", fail_second_last)
        with pytest.raises(OSError, match="No space left on device"):
            fit(tmp_path / "b", n_epochs=3)
    left = NNRun.load(straight.id, tmp_path / "b")
    assert left.last is not None
    assert left.last.epoch == 0
    assert {row["epoch"] for row in left.records} == {0}
    assert_same_run(fit(tmp_path / "b", n_epochs=3), straight)


def test_nothing_is_left_when_the_first_update_fails(tmp_path: Path) -> None:
    """nnx:B020 (a value that is not finite in the data is refused earlier, so the loss makes it)"""
    rows = dataset(8)
    huge = ArrayDataset(x=np.full((8, 4), 3e38, np.float32), y=rows.arrays()["y"])
    with pytest.raises(FloatingPointError, match="update 1, microbatch 0"):
        fit(tmp_path, data=data_params(train=huge, val=None), net={"norm": None})
    assert [p for p in tmp_path.iterdir() if not p.name.startswith(".")] == []


def test_errors_come_before_the_directory(tmp_path: Path) -> None:
    """case:H13 case:L07 case:L08 case:L10 nnx:B017"""
    bad_label = ArrayDataset(x=np.zeros((4, 4), np.float32), y=np.array([0, 1, 2, 7], np.int32), n_classes=8)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"monitor": MonitorSpec(metric="los")}, "did you mean 'loss'"),
        ({"data": data_params(val=None), "monitor": MonitorSpec()}, "there is no validation data"),
        ({"data": data_params(tail="drop", batch_size=64)}, "64"),
        ({"data": data_params(val=bad_label)}, "label 7 at"),
        ({"net": {"input_dim": 5}}, "input_dim = 5, the data has 4"),
        ({"callbacks": [EarlyStopping("val_los")]}, "watches 'val_los'.* did you mean 'val_loss'"),
        ({"callbacks": [EarlyStopping("val_loss")], "data": data_params(val=None)}, "watches 'val_loss'"),
    ]
    for settings, problem in cases:
        with pytest.raises(NnxError, match=problem):
            fit(tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_run_from_weights_counts_from_its_first_epoch_and_can_be_continued(tmp_path: Path) -> None:
    source = fit(tmp_path, n_epochs=2)
    settings: dict[str, Any] = {"n_epochs": 2, "resume_from_run_id": source.id, "resume_mode": "weights_only"}
    straight = fit(tmp_path, checkpoint=EVERY_STEP, **settings)
    updates = [(row["epoch"], row["batch"]) for row in straight.records if row["kind"] == "update"]
    assert updates == [(epoch, batch) for epoch in (2, 3) for batch in range(6)]
    settings["eval_every_n_steps"] = 2
    whole = fit(tmp_path, salt="whole", checkpoint=EVERY_STEP, **settings)
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path, salt="cut", checkpoint=EVERY_STEP, callbacks=[Bomb(step=4)], **settings)
    cut = fit(tmp_path, salt="cut", checkpoint=EVERY_STEP, **settings)
    assert (cut.path / "idps.csv").read_bytes() == (whole.path / "idps.csv").read_bytes()


def test_a_continuation_keeps_its_length_when_its_source_moves_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"scheduler": {"kind": "constant", "clock": "epoch"}}
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path, n_epochs=3, callbacks=[Bomb(epoch=1)], **settings)
    source = NNRun.all(tmp_path)[0]
    child: dict[str, Any] = {"n_epochs": 2, "resume_from_run_id": source.id, "salt": "child", **settings}
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(tmp_path, callbacks=[Bomb(epoch=2)], **child)
    fit(tmp_path, n_epochs=3, **settings)
    done = fit(tmp_path, **child)
    assert [row["epoch"] for row in done.records if row["kind"] == "epoch"] == [1, 2]


def test_the_same_call_after_a_signal_continues_the_same_run(tmp_path: Path) -> None:
    """case:L05 on one model object: what the message promises."""
    import os
    import signal

    class Signal(Callback):
        def on_epoch_begin(self, ctx: TrainContext) -> None:
            if ctx.epoch == 1:
                os.kill(os.getpid(), signal.SIGINT)

    net = model()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "a", of=net, callbacks=[Signal()])
    assert net.predict(dataset().arrays()["x"]).logits.shape == (23, 3)
    again = fit(tmp_path / "a", of=net)
    assert_same_run(again, fit(tmp_path / "b"))
    assert len(NNRun.all(tmp_path / "a")) == 1


def test_early_stopping_takes_the_direction_of_the_metric(tmp_path: Path) -> None:
    """case:H04 accuracy that rises is an improvement, whether the monitor comes by name or by spec."""
    for number, monitor in enumerate((MonitorSpec(metric="accuracy"), "val_accuracy")):
        stopper = EarlyStopping(monitor, patience=1)
        run = fit(tmp_path / str(number), n_epochs=12, callbacks=[stopper], optim={"max_lr": 3e-2})
        seen = [row["val_accuracy"] for row in run.records if row["kind"] == "epoch"]
        best, stop = -1.0, None
        for epoch, value in enumerate(seen):
            if value <= best:
                stop = epoch
                break
            best = value
        assert stopper.stopped_epoch == stop
        assert stopper.direction == "max"


def test_evaluation_by_updates_only(tmp_path: Path) -> None:
    run = fit(tmp_path, n_epochs=3, eval_every_n_epochs=None)
    epochs = [row for row in run.records if row["kind"] == "epoch"]
    assert [row["val_loss"] is None for row in epochs] == [True, True, False]  # the last state is always scored


def test_what_the_engine_would_ignore_is_refused(tmp_path: Path) -> None:
    from nnx_jax.fit import prepare
    from nnx_jax.params.run import RunSpec

    from .helpers import net_params, train_params

    spec = RunSpec(model={"net": net_params()}, data=data_params(), train=train_params(), mesh={"data": 64})
    with pytest.raises(ConfigError, match="mesh: got .* but there are 4 devices"):
        prepare(NNModel(params=spec.model), spec)
