"""Callbacks in the (loop, state, metrics) form: their order, what they see, and what becomes of them at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ComponentRestoreError, ConfigError
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.core.registry import register
from nnx_jax.data import ArrayDataset
from nnx_jax.loop import callbacks as own
from nnx_jax.loop.callbacks import CallbackList, TrainContext
from nnx_jax.loop.components import Components
from nnx_jax.loop.signals import Interrupted
from nnx_jax.loop.step_builtin import (
    Checkpoint,
    EarlyStopping,
    LogToExperiment,
    StepCallback,
    ValidationStep,
    status_of,
)
from nnx_jax.loop.step_callbacks import Callback, StepCallbacks, StepState
from nnx_jax.objectives.operators import MSE, Composite
from nnx_jax.params.train import CheckpointParams
from tests.e2e.own import train
from tests.e2e.toys import Slope

ROWS = ArrayDataset(x=np.ones((8, 1), np.float32), y=np.full((8, 1), 2.0, np.float32))


class Spy:
    """Notes every call; breaks in one hook, or at one update, if told so."""

    def __init__(self, log: list[Any], name: str = "", fail_in: str = "", fail_at: int = -1) -> None:
        self.log, self.name, self.fail_in, self.fail_at = log, name, fail_in, fail_at

    def note(self, hook: str, state: StepState, *more: Any) -> None:
        self.log.append((f"{self.name}{hook}", state.step, *more))
        if hook == self.fail_in or state.step == self.fail_at:
            raise ValueError(f"{self.name} broke in {hook}")

    def on_train_begin(self, loop: Any, state: StepState) -> None:
        self.note("begin", state)

    def on_step_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
        self.note("step", state)

    def on_epoch_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
        self.note("epoch", state, state.epoch)

    def on_eval_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
        self.note("eval", state)

    def on_train_end(self, loop: Any, state: StepState) -> None:
        self.fail_at = -1
        self.note("end", state)


class Kept:
    """A metric writer that keeps its records."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log.append(("write", step, dict(metrics)))

    def close(self) -> None:
        self.log.append(("close",))


def run(runs: Path, callbacks: Any, writer: Any = None, *, steps: int = 4, every: int = 100, **more: Any) -> Any:
    """A run of updates on 8 equal rows, 2 a batch; w goes from 0 towards 2."""
    known = {name: more.pop(name) for name in ("log_every", "steps_per_epoch", "read_every") if name in more}
    seen = StepCallbacks("loop", callbacks, writer, known.pop("log_every", 100), lambda ctx: copied(ctx), **known)
    length = {"max_steps": steps, "eval_every_n_steps": every, "eval_every_n_epochs": None}
    given = {"callbacks": [seen, *more.pop("beside", ())], **more.pop("given", {})}
    train(runs, Slope(0.0), ROWS, val=ROWS, loss="mse", batch_size=2, given=given, **length, **more)
    return seen


def copied(ctx: TrainContext) -> Any:
    """What stands for an operator: the weight of this moment."""
    return SimpleNamespace(w=float(ctx.sync().w[0]))


# -- order and what is seen ------------------------------------------------------------------------------------


def test_a_callback_is_no_matter_of_isinstance(tmp_path: Path) -> None:
    """One with a single hook is one. (pipekit:D1)"""
    seen: list[int] = []

    class Only:
        def on_step_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
            seen.append(state.step)

    with pytest.raises(TypeError):
        isinstance(Only(), Callback)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    run(tmp_path, [Only()])
    assert seen == [1, 2, 3, 4]


def test_the_order_of_a_run(tmp_path: Path) -> None:
    """Writer, steps of all, epochs of all, then the evaluation; ends in reverse. (pipekit:D5, pipekit:D6)"""
    log: list[Any] = []
    run(tmp_path, [Spy(log, "A."), Spy(log, "B.")], Kept(log), every=2, log_every=2, steps_per_epoch=2, steps=2)
    assert [each[:2] for each in log] == [
        ("A.begin", 0), ("B.begin", 0),
        ("A.step", 1), ("B.step", 1),
        ("write", 2), ("A.step", 2), ("B.step", 2), ("A.epoch", 2), ("B.epoch", 2),
        ("write", 2), ("A.eval", 2), ("B.eval", 2),
        ("B.end", 2), ("A.end", 2), ("close",),
    ]  # fmt: skip
    records = [each[2] for each in log if each[0] == "write"]
    assert [sorted(each) for each in records] == [["loss", "lr", "mse"], ["eval/val_loss"]]


def test_epochs_are_counted_in_updates(tmp_path: Path) -> None:
    """(pipekit:D4)"""
    log: list[Any] = []
    seen = run(tmp_path, [Spy(log)], steps=10, steps_per_epoch=4)
    assert [each[1:] for each in log if each[0] == "epoch"] == [(4, 1), (8, 2)]
    assert seen.state.epoch == 2


def test_without_a_number_there_are_no_epochs(tmp_path: Path) -> None:
    """(pipekit:D4)"""
    log: list[Any] = []
    seen = run(tmp_path, [Spy(log)], steps=5)
    assert not [each for each in log if each[0] == "epoch"]
    assert seen.state.epoch == 0


def test_the_model_is_of_the_moment(tmp_path: Path) -> None:
    """w <- w - 0.1 * 2 * (w - 2): 0, 0.4, 0.72, ...; the last one is the object that stays. (pipekit:D7, pipekit:D8)"""
    weights: list[float] = []
    last: list[Any] = []

    class Look:
        def on_train_begin(self, loop: Any, state: StepState) -> None:
            weights.append(state.model.w)

        def on_step_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
            assert state.model is state.model
            weights.append(state.model.w)

        def on_train_end(self, loop: Any, state: StepState) -> None:
            last.append(state.model)

    seen = run(tmp_path, [Look()], steps=3)
    expected = [2 * (1 - 0.8**step) for step in range(4)]
    assert weights == pytest.approx(expected)
    assert seen.state.model is last[0]
    assert last[0].w == pytest.approx(expected[-1])


def test_a_change_of_metrics_is_seen_by_nobody_else(tmp_path: Path) -> None:
    """(pipekit:D24)"""
    log: list[Any] = []
    found: list[Any] = []

    class Vandal:
        def on_step_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
            metrics.clear()
            with pytest.raises(TypeError):
                state.metrics["loss"] = -1.0  # type: ignore[index]

        on_eval_end = on_step_end

    class Reader:
        def on_step_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
            found.append(metrics["loss"])

        def on_eval_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
            found.append(metrics["val_loss"])

    run(tmp_path, [Vandal(), Reader()], Kept(log), steps=1, log_every=1)
    assert found == pytest.approx([4.0, (2 - 0.4) ** 2])
    assert {name: log[0][2][name] for name in ("loss", "mse")} == pytest.approx({"loss": 4.0, "mse": 4.0})


def test_the_writer_gets_its_multiples_and_the_last_update(tmp_path: Path) -> None:
    """(pipekit:E5, pipekit:E6)"""
    log: list[Any] = []
    run(tmp_path, [], Kept(log), steps=7, log_every=3)
    assert [each[1] for each in log if "loss" in (each[2] if len(each) > 2 else ())] == [3, 6, 7]
    assert [each[0] for each in log].count("close") == 1


def test_the_device_is_read_after_every_update_only_for_who_asks() -> None:
    class Steps:
        def on_step_end(self, loop: Any, state: Any, metrics: Any) -> None: ...

    class Epochs:
        def on_epoch_end(self, loop: Any, state: Any, metrics: Any) -> None: ...

    def watched(*callbacks: Any, **more: Any) -> list[str]:
        made = CallbackList([StepCallbacks(None, callbacks, **more)])
        return [name for name in ("watching", "reading") if getattr(made, name)]

    assert watched(Steps()) == ["watching"]
    assert watched(EarlyStopping("loss"), metric_writer=Kept([])) == ["reading"]
    assert watched() == []
    assert watched(Epochs(), steps_per_epoch=4) == ["watching"]
    assert watched(Epochs(), steps_per_epoch=4, read_every=3) == ["watching"]
    assert watched(Epochs(), steps_per_epoch=4, read_every=2) == ["reading"]
    assert watched(Epochs()) == ["reading"]


def test_epochs_at_the_reads_of_the_loop_see_the_model_of_the_moment(tmp_path: Path) -> None:
    weights: list[Any] = []

    class Epochs:
        def on_epoch_end(self, loop: Any, state: StepState, metrics: Any) -> None:
            weights.append((state.step, state.model.w))

    more = {"log_every_n_steps": 2}
    run(tmp_path, [Epochs()], Kept([]), steps=6, steps_per_epoch=2, read_every=2, **more)
    assert [step for step, _ in weights] == [2, 4, 6]
    assert [w for _, w in weights] == pytest.approx([2 * (1 - 0.8**step) for step in (2, 4, 6)])


# -- the end ---------------------------------------------------------------------------------------------------


def test_a_failure_ends_every_callback_and_is_raised_as_it_is(tmp_path: Path) -> None:
    """(pipekit:D20, pipekit:E6)"""
    log: list[Any] = []
    ends: list[Any] = []

    class End:
        def on_train_end(self, loop: Any, state: StepState) -> None:
            ends.append(state.error)

    with pytest.raises(ValueError, match="B. broke in step") as caught:
        run(tmp_path, [End(), Spy(log, "A."), Spy(log, "B.", fail_at=3)], Kept(log), log_every=1)
    assert ends == [caught.value]
    assert [each[0] for each in log[-3:]] == ["B.end", "A.end", "close"]
    assert [each[0] for each in log].count("close") == 1


def test_an_error_of_one_end_hides_neither_the_others_nor_the_failure(tmp_path: Path) -> None:
    """(pipekit:D21)"""
    log: list[Any] = []
    bad = [Spy(log, "A.", fail_in="end"), Spy(log, "B.", fail_in="end"), Spy(log, "C.")]
    with pytest.raises(ValueError, match="B. broke"), pytest.warns(RuntimeWarning, match="A. broke"):
        run(tmp_path / "a", bad, Kept(log))
    assert [each[0] for each in log[-4:]] == ["C.end", "B.end", "A.end", "close"]
    worse = [*bad[:2], Spy(log, "D.", fail_at=2)]
    with pytest.raises(ValueError, match="D. broke in step"), pytest.warns(RuntimeWarning) as warned:
        run(tmp_path / "b", worse)
    assert (
        sorted(str(each.message)[-18:] for each in warned) == ["A. broke in end", "B. broke in end"] or len(warned) == 2
    )


def test_only_those_that_began_are_ended() -> None:
    """(pipekit:D22)"""
    log: list[Any] = []
    seen = StepCallbacks(None, [Spy(log, "A."), Spy(log, "B.", fail_in="begin"), Spy(log, "C.")], Kept(log))
    with pytest.raises(ValueError, match="B. broke"):
        CallbackList([seen]).train_begin(TrainContext("0" * 16))
    assert [each[0] for each in log] == ["A.begin", "B.begin", "A.end", "close"]
    assert isinstance(seen.state.error, ValueError)


def test_a_reason_to_stop_is_kept_and_the_run_ends(tmp_path: Path) -> None:
    class Stop:
        def on_step_end(self, loop: Any, state: StepState, metrics: dict[str, float]) -> None:
            if state.step == 3:
                state.request_stop("enough")
                state.request_stop("more than enough")

    log: list[Any] = []
    seen = run(tmp_path, [Stop(), Spy(log)], steps=50)
    assert (seen.state.step, seen.state.stop_reason) == (3, "enough")
    assert [each[0] for each in log[-3:]] == ["step", "eval", "end"]  # the closing evaluation
    with pytest.raises(ConfigError, match="reason"):
        seen.state.request_stop("")


@pytest.mark.parametrize(
    "callback, told",
    [
        (Spy, "class"),
        (own.Callback(), "ctx"),
        (object(), "no callback"),
        (SimpleNamespace(on_stepend=print), "did you"),
    ],
)
def test_what_is_no_callback_is_refused(callback: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        StepCallbacks(None, [callback])


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"log_every": 0}, {"steps_per_epoch": 1.5}, {"read_every": True}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            StepCallbacks(None, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MetricWriter"):
        StepCallbacks(None, metric_writer=object())


class Pair:
    """Stands for a world of two processes."""

    size, alone = 2, False

    def __init__(self, writes: bool) -> None:
        self.writes = writes


def test_among_several_processes_one_writes() -> None:
    log: list[Any] = []

    class Everywhere(Spy):
        distributed = "all"

    class There(Spy):
        distributed = "writer"

    for writes in (True, False):
        seen = StepCallbacks(None, [Everywhere(log, "A."), There(log, "B.")], Kept(log), world=Pair(writes))  # type: ignore[arg-type]
        both = CallbackList([seen])
        both.train_begin(TrainContext("0" * 16))
        both.train_end(TrainContext("0" * 16), None)
        names = [each[0] for each in log]
        assert names == (["A.begin", "B.begin", "B.end", "A.end", "close"] if writes else ["A.begin", "A.end"])
        assert both.watched_each  # on all of them, since one asks for it
        log.clear()
    with pytest.raises(ConfigError, match="distributed"):
        StepCallbacks(None, [Spy(log)], world=Pair(True))  # type: ignore[arg-type]


# -- early stopping --------------------------------------------------------------------------------------------


def told(stopper: EarlyStopping, *values: float, name: str = "val_loss") -> bool:
    """Whether a run would end after evaluations of these values."""
    state = StepState()
    stopper.on_train_begin(None, state)
    for value in values:
        state.step += 1
        stopper.on_eval_end(None, state, {name: value})
    assert stopper.should_stop == (state.stop_reason is not None)
    return stopper.should_stop


@pytest.mark.parametrize(
    "settings, values, stops",
    [
        ({"patience": 2}, (1.0, 1.5), False),
        ({"patience": 2}, (1.0, 1.5, 1.2), True),
        ({"patience": 2}, (1.0, 0.8, 0.6), False),
        ({"patience": 1, "mode": "max"}, (0.5, 0.4), True),
        ({"patience": 1, "mode": "max"}, (0.5, 0.6), False),
        ({"patience": 1, "min_delta": 0.1}, (1.0, 0.95), True),
        ({"patience": 2}, (1.0, 1.5, 0.9, 1.0), False),
    ],
)
def test_early_stopping_counts_evaluations_without_improvement(settings: Any, values: Any, stops: bool) -> None:
    """(pipekit:D9)"""
    assert told(EarlyStopping("val_loss", **settings), *values) is stops
    assert told(EarlyStopping(metric="loss", **settings), *values) is stops  # the short name


def test_a_metric_that_is_never_there_changes_nothing_and_is_told(tmp_path: Path) -> None:
    """(pipekit:D10)"""
    stopper = EarlyStopping("val_accuracy", 1)
    with pytest.warns(RuntimeWarning, match="val_accuracy.*they gave val_loss"):
        seen = run(tmp_path, [stopper], every=1)
    assert (stopper.best, stopper.wait, seen.state.step) == (None, 0, 4)


def test_wrong_settings_of_early_stopping() -> None:
    """(pipekit:D11)"""
    wrong: Any
    for wrong in ({"patience": 0}, {"mode": "x"}, {"min_delta": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            EarlyStopping("loss", **wrong)  # type: ignore[arg-type]
    stopper = EarlyStopping("loss", 1)
    with pytest.raises(TypeError, match="callback"):
        stopper()
    with pytest.raises(TypeError, match="callback"):
        Sequential([stopper])
    assert told(stopper, 1.0, 2.0)
    stopper.reset()
    assert (stopper.best, stopper.wait, stopper.should_stop) == (None, 0, False)
    used = EarlyStopping("loss", 1)
    told(used, 1.0)
    assert used == stopper
    assert StepCallback.from_state(used.state()) == used


def test_early_stopping_ends_a_run_and_the_next_one_starts_anew(tmp_path: Path) -> None:
    """Nothing is ever an improvement by 10. (pipekit:D12, pipekit:D14)"""
    stopper = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    for number in range(2):
        seen = run(tmp_path / str(number), [stopper], every=10, steps=1000)
        assert seen.state.step == 20
        assert "early stopping: val_loss" in seen.state.stop_reason


def test_nan_is_never_the_best() -> None:
    """(pipekit:D13)"""
    stopper = EarlyStopping("val_loss", 3)
    with pytest.warns(RuntimeWarning, match="nonfinite"):
        told(stopper, math.nan, 0.5)
    assert (stopper.best, stopper.wait) == (0.5, 0)


def test_early_stopping_goes_on_after_a_resume(tmp_path: Path) -> None:
    """One bad evaluation before the interruption and one after it are two. (pipekit:D15)"""

    class Cut:
        def on_eval_end(self, loop: Any, state: StepState, metrics: Any) -> None:
            if state.step == 6:
                raise ValueError("cut")

    more: Any = {"given": {"checkpoint": CheckpointParams(every_n_steps=2, every_n_epochs=None)}, "every": 2}
    first = EarlyStopping("val_loss", patience=2, min_delta=10.0)
    with pytest.raises(ValueError, match="cut"):
        run(tmp_path, [first, Cut()], steps=100, **more)
    # the commit at 4 holds the evaluation at 2 as the best, and one without improvement
    stopper = EarlyStopping("val_loss", patience=2, min_delta=10.0)
    seen = run(tmp_path, [stopper, Fine()], steps=100, **more)
    assert seen.state.step == 6
    assert stopper.wait == 2


class Fine:
    """A callback without an effect."""

    def on_eval_end(self, loop: Any, state: StepState, metrics: Any) -> None: ...


def test_a_state_of_another_rule_is_refused() -> None:
    def components(*stoppers: EarlyStopping) -> Components:
        return Components([StepCallbacks(None, stoppers)])

    stored = components(EarlyStopping("loss"), EarlyStopping("mse")).state()
    assert sorted(stored["step_callbacks"]["state"]) == ["EarlyStopping", "EarlyStopping.2"]
    components(EarlyStopping("loss"), EarlyStopping("mse")).load(stored)
    with pytest.raises(ComponentRestoreError, match="it watched"):
        components(EarlyStopping("loss"), EarlyStopping("acc")).load(stored)
    assert not list(Components([StepCallbacks(None, [Fine()])]))


# -- checkpoints and trackers ----------------------------------------------------------------------------------


def test_when_a_snapshot_is_due() -> None:
    """(pipekit:D16)"""
    keep = Checkpoint(every_n_steps=100)
    assert [step for step in (0, 50, 100, 150, 200) if keep.should_snapshot(step)] == [100, 200]
    wrong: Any
    for wrong in ({"every_n_steps": 0}, {"keep_last": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Checkpoint(**wrong)


def test_a_registry_that_cannot_store_is_refused_before_the_training() -> None:
    """(pipekit:D17)"""
    with pytest.raises(TypeError, match="ModelRegistry"):
        Checkpoint(registry=object())


class Shelf:
    """A registry that keeps what it is given."""

    def __init__(self) -> None:
        self.stored: list[Any] = []

    def store(self, model: Any, *, weights: bytes = b"") -> str:
        self.stored.append((model, weights))
        return "abc"

    def digest(self, model: Any, *, weights: bytes = b"") -> str:
        return "abc"


class Weighted:
    """A model with weights."""

    def serialize_weights(self) -> bytes:
        return b"weights"


def test_the_trained_model_is_stored_at_the_end_of_a_good_run() -> None:
    """(pipekit:I3)"""
    shelf, model = Shelf(), Weighted()
    keep = Checkpoint(registry=shelf)
    state = StepState(lambda ctx: model)
    state.move(TrainContext("0" * 16), 3)
    keep.on_train_begin(None, state)
    assert (keep.last_hash, keep.last_uri) == (None, None)
    state.error = ValueError("bad")
    keep.on_train_end(None, state)
    assert not shelf.stored
    state.error, state.writes = None, False
    keep.on_train_end(None, state)
    assert (shelf.stored, keep.last_hash) == ([], "abc")
    state.writes = True
    keep.on_train_end(None, state)
    assert shelf.stored == [(model, b"weights")]
    assert (keep.last_hash, keep.last_uri) == ("abc", "registry://abc")
    Checkpoint(registry=shelf).on_train_end(None, StepState())  # a loop without an operator: nothing to store
    assert len(shelf.stored) == 1


class Tracker:
    """An experiment tracker that notes what it is told."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def start_run(self, name: str, config: Any) -> Any:
        self.log.append(("start", name, config))
        return SimpleNamespace(run_id="r7")

    def log_metrics(self, run: Any, metrics: Any, step: int) -> None:
        self.log.append((run.run_id, metrics, step))

    def end_run(self, run: Any, status: str) -> None:
        self.log.append(("end", run.run_id, status))


def test_a_run_as_an_experiment_tracker_sees_it() -> None:
    """(pipekit:D18)"""
    log: list[Any] = []
    callback = LogToExperiment(Tracker(log), "first", {"lr": 0.1, "note": "mine"})
    loop = SimpleNamespace(get_config=lambda: {"lr": 0.5, "max_steps": 10})
    state = StepState()
    callback.on_step_end(loop, state, {"loss": 1.0})
    assert (log, callback.run, callback.run_id) == ([], None, None)
    callback.on_train_begin(loop, state)
    state.step = 10
    callback.on_step_end(loop, state, {"loss": 0.5})
    callback.on_step_end(loop, state, {})
    callback.on_eval_end(loop, state, {"val_loss": 0.6})
    callback.on_train_end(loop, state)
    callback.on_train_end(loop, state)
    callback.on_step_end(loop, state, {"loss": 1.0})
    assert log == [
        ("start", "first", {"lr": 0.1, "max_steps": 10, "note": "mine"}),
        ("r7", {"loss": 0.5}, 10),
        ("r7", {"eval/val_loss": 0.6}, 10),
        ("end", "r7", "completed"),
    ]
    assert callback.run_id == "r7"


@pytest.mark.parametrize("lack", ["start_run", "log_metrics", "end_run"])
def test_a_tracker_that_lacks_a_method_is_refused(lack: str) -> None:
    """(pipekit:D19)"""
    methods = {name: print for name in ("start_run", "log_metrics", "end_run") if name != lack}
    with pytest.raises(TypeError, match=f"{lack}.*ExperimentTracker"):
        LogToExperiment(SimpleNamespace(**methods), "name")


def test_a_failing_run_is_marked_so(tmp_path: Path) -> None:
    """(pipekit:D20)"""
    log: list[Any] = []
    tracked = LogToExperiment(Tracker(log), "first")
    with pytest.raises(ValueError, match="broke"):
        run(tmp_path, [tracked, Spy([], fail_at=2)])
    assert log[-1] == ("end", "r7", "failed")
    assert [status_of(error) for error in (None, ValueError(), KeyboardInterrupt(), Interrupted(15))] == [
        "completed", "failed", "interrupted", "interrupted",
    ]  # fmt: skip


@pytest.mark.parametrize("run_handle, told_id", [({"run_id": 3}, "3"), ("x1", "x1"), (object(), None)])
def test_the_id_of_a_run_is_never_a_repr(run_handle: Any, told_id: Any) -> None:
    tracker = SimpleNamespace(start_run=lambda name, config: run_handle, log_metrics=print, end_run=print)
    callback = LogToExperiment(tracker, "name")
    callback.on_train_begin(None, StepState())
    assert callback.run_id == told_id


# -- a validation row by row -----------------------------------------------------------------------------------


@register("step_times")
class Times(Operator):
    """Multiplies."""

    factor: float

    def _apply(self, x: Any) -> Any:
        return np.asarray(x) * self.factor


def pairs(n: int) -> ArrayDataset:
    return ArrayDataset(x=np.arange(n, dtype=np.float32), y=2 * np.arange(n, dtype=np.float32))


def test_a_validation_of_pairs() -> None:
    """Pairs (i, 2i): errors i of a model that says 3i. (pipekit:E7)"""
    assert ValidationStep(Times(factor=3.0), pairs(4), (MSE(),))() == {"mse": 3.5, "MSE": 3.5}
    assert ValidationStep(Times(factor=2.0), pairs(4), (MSE(),))() == {"mse": 0.0, "MSE": 0.0}
    assert ValidationStep(Times(factor=2.0), pairs(0), (MSE(),))() == {}
    with pytest.raises(ValueError, match="metrics"):
        ValidationStep(Times(factor=2.0), pairs(4), ())
    for wrong in ((len, pairs(4), (MSE(),)), (Times(factor=1.0), [1], (MSE(),)), (Times(factor=1.0), pairs(1), (len,))):
        with pytest.raises(TypeError):
            ValidationStep(*wrong)


def test_metrics_of_one_name_do_not_hide_each_other() -> None:
    found = ValidationStep(Times(factor=3.0), pairs(4), (MSE(), MSE(), Composite(((1, MSE()),))))()
    assert found == {
        "MSE": 3.5,
        "mse": 3.5,
        "MSE_1": 3.5,
        "MSE_1.mse": 3.5,
        "Composite": 3.5,
        "MSE_0": 3.5,
        "total": 3.5,
    }
