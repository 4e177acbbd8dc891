"""What callbacks and writers of a TrainingLoop are told, when, in which order, and how a run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.loop.step_builtin import Checkpoint, EarlyStopping, LogToExperiment
from nnx_jax.runs.best import run_ids
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import find_point, probe
from tests.training_loop.scenes import Counter, Diary, Line, Tracker, Writer, loop, weights


class Looking(Diary):
    """A diary that also keeps what the state and the directory of commits look like."""

    def __init__(self, name: str, log: list[Any], folder: Path) -> None:
        super().__init__(name, log)
        self.folder = folder
        self.predictions: dict[int, float] = {}
        self.arrays: dict[int, dict[str, np.ndarray]] = {}
        self.committed: dict[int, int] = {}
        self.last: Any = None

    def on_step_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        super().on_step_end(loop, state, metrics)
        metrics["loss"] = -1.0  # its own copy
        if state.step in (1, 25):
            self.arrays[state.step] = weights(state.model)
            self.predictions[state.step] = float(state.model(np.float32([[0.5]]))[0, 0])

    def on_eval_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
        super().on_eval_end(loop, state, metrics)
        self.committed[state.step] = committed(self.folder)

    def on_train_end(self, loop: Any, state: Any) -> None:
        super().on_train_end(loop, state)
        self.last = state.model


def committed(folder: Path) -> int:
    """The update that LAST stands for; 0 for none."""
    ids = run_ids(RunPaths(folder, "_").root) if folder.is_dir() else []
    return max((find_point(folder, each).step for each in ids if probe(folder, each)), default=0)


class Told:
    """One run of 25 updates, with everything there is to tell."""

    def __init__(self, folder: Path) -> None:
        self.log: list[Any] = []
        self.first, self.second = Looking("a", self.log, folder), Diary("b", self.log)
        self.writer = Writer(self.log)
        self.loop = loop(
            val_dataset=Line(rows=10), max_steps=25, eval_every_n_steps=10, log_every_n_steps=5, steps_per_epoch=4,
            callbacks=[self.first, self.second], metric_writer=self.writer, checkpoint_dir=folder,
            checkpoint_every_n_steps=25,
        )  # fmt: skip
        self.operator, self.state = self.loop(None, None)

    def of(self, name: str, event: str) -> list[int]:
        return [step for who, what, step in self.log if (who, what) == (name, event)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("told") / "runs")


def test_evaluations_come_at_their_cadence_and_once_at_the_end(told: Told) -> None:
    """25 updates, one evaluation every 10: at 10, 20 and 25 (pipekit:D3)."""
    assert told.of("a", "eval") == [10, 20, 25]


def test_epochs_end_every_so_many_updates_and_nothing_else_depends_on_them(told: Told) -> None:
    """Events at 4, 8, ...; the state's epoch counts them (pipekit:D4).

    There are four batches of rows; they come again until the length is reached (pipekit:D10.2).
    """
    assert told.of("a", "epoch") == [4, 8, 12, 16, 20, 24]
    assert told.state.epoch == 6
    assert told.of("a", "step") == list(range(1, 26))


@pytest.mark.parametrize(("every", "length", "events"), [(1, 3, [1, 2, 3]), (None, 3, []), (4, 10, [4, 8])])
def test_an_epoch_is_a_number_of_updates(every: int | None, length: int, events: list[int]) -> None:
    """And none where no number is given (pipekit:D4)."""
    diary = Diary()
    state = loop(max_steps=length, steps_per_epoch=every, callbacks=[diary])(None, None)[1]
    assert [step for _, what, step in diary.log if what == "epoch"] == events
    assert state.epoch == len(events)


def test_what_happens_at_one_update_has_one_order(told: Told) -> None:
    """Writer, on_step_end, on_epoch_end, on_eval_end (pipekit:D5)."""
    at_20 = [(who, what) for who, what, step in told.log if step == 20]
    a, b = "a", "b"
    assert at_20 == [
        ("writer", "write"), (a, "step"), (b, "step"), (a, "epoch"), (b, "epoch"), ("writer", "eval"), (a, "eval"),
        (b, "eval"),
    ]  # fmt: skip


def test_the_commit_of_an_update_comes_after_its_evaluation(told: Told, tmp_path: Path) -> None:
    """While the evaluation of update 25 is told of, LAST does not stand for it yet; afterwards it does (pipekit:D5)."""
    assert told.first.committed[25] < 25
    assert committed(told.first.folder) == 25


def test_callbacks_begin_in_their_order_and_end_in_reverse(told: Told) -> None:
    """(pipekit:D6)."""
    assert [who for who, what, _ in told.log if what == "begin"] == ["a", "b"]
    assert [who for who, what, _ in told.log if what == "end"] == ["b", "a"]


def test_the_state_counts_updates_and_shows_the_weights_of_the_moment(told: Told) -> None:
    """Step 0 at the beginning, then 1, 2, ...; the model predicts with current weights (pipekit:D7)."""
    assert told.of("a", "begin") == [0]
    first, last = told.first.arrays[1], told.first.arrays[25]
    assert all(not np.array_equal(first[name], last[name]) for name in first)
    fresh = told.loop.model_op(np.float32([[0.5]]))[0, 0]
    assert len({float(fresh), *told.first.predictions.values()}) == 3
    assert told.first.predictions[25] == float(told.operator(np.float32([[0.5]]))[0, 0])


def test_the_last_callback_sees_the_very_operator_that_is_returned(told: Told) -> None:
    """(pipekit:D8)."""
    assert told.first.last is told.operator
    assert told.state.model is told.operator


def test_a_writer_gets_its_cadence_the_last_update_and_the_evaluations(told: Told) -> None:
    """Training records at 5, 10, ..., 25; those of evaluations are told apart by their names (pipekit:E5)."""
    training = [step for step, values in told.writer.records if "loss" in values]
    evaluations = [(step, list(values)) for step, values in told.writer.records if "loss" not in values]
    assert training == [5, 10, 15, 20, 25]
    assert evaluations == [(step, ["eval/val_loss"]) for step in (10, 20, 25)]


def test_a_writer_is_closed_once(told: Told) -> None:
    """(pipekit:E6)."""
    assert told.writer.closed == 1


def test_what_a_callback_writes_into_its_metrics_is_its_own(told: Told) -> None:
    """The first callback overwrites its loss; neither writer nor state see that (pipekit:D24)."""
    assert all(values["loss"] >= 0 for _, values in told.writer.records if "loss" in values)
    assert told.state.metrics["loss"] >= 0


def test_twenty_updates_with_two_evaluations() -> None:
    """begin, step 1 to 10, eval 10, step 11 to 20, eval 20, end; one record off the cadence for the last (pipekit:D2).

    The writer's cadence of 8 gives 8 and 16, and 20 because it is the last (pipekit:E5).
    """
    diary, writer = Diary(), Writer()
    loop(val_dataset=Line(rows=10), eval_every_n_steps=10, callbacks=[diary], metric_writer=writer,
         log_every_n_steps=8)(None, None)  # fmt: skip
    events = [(what, step) for _, what, step in diary.log]
    first, second = [[("step", n) for n in numbers] for numbers in (range(1, 11), range(11, 21))]
    assert events == [("begin", 0), *first, ("eval", 10), *second, ("eval", 20), ("end", 20)]
    assert [step for step, values in writer.records if "loss" in values] == [8, 16, 20]


# -- stopping -----------------------------------------------------------------------------------------------------


def test_a_loop_that_is_run_again_stops_again_where_it_should() -> None:
    """Patience 1 and a delta nothing beats: update 20 is the second evaluation, and the last (pipekit:D12).

    The same loop, run again, has forgotten the first run (pipekit:D14).
    """
    stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    once = loop(val_dataset=Line(rows=10), max_steps=1000, eval_every_n_steps=10, callbacks=[stopping])
    first, second = once(None, None)[1], once(None, None)[1]
    assert (first.step, second.step) == (20, 20)
    assert stopping.should_stop
    assert stopping.best is not None


def test_patience_goes_on_where_a_run_was_cut(tmp_path: Path) -> None:
    """One bad evaluation before the end at 20, one more after the resume: the run stops at 30 (pipekit:D15)."""
    fields = {
        "val_dataset": Line(rows=10), "eval_every_n_steps": 10, "checkpoint_dir": tmp_path,
        "checkpoint_every_n_steps": 10,
    }  # fmt: skip
    first = EarlyStopping("val_loss", patience=2, min_delta=10.0)
    loop(max_steps=20, callbacks=[first], **fields)(None, None)
    assert (first.wait, first.should_stop) == (1, False)
    second = EarlyStopping("val_loss", patience=2, min_delta=10.0)
    state = loop(max_steps=100, callbacks=[second], **fields)(None, None)[1]
    assert state.step == 30
    assert second.should_stop


def test_a_callback_may_ask_for_the_end_and_the_reason_is_recorded() -> None:
    """What is due at that update is done, then the run ends (pipekit:D23)."""
    diary = Diary()
    operator, artifact = loop(
        val_dataset=Line(rows=10), callbacks=[Counter(most=7), diary], max_steps=1000, eval_every_n_steps=7
    ).run()
    assert artifact.backend_info["stop_reason"] == "7 are enough"
    assert artifact.backend_info["final_step"] == 7
    assert [(what, step) for _, what, step in diary.log][-3:] == [("step", 7), ("eval", 7), ("end", 7)]


# -- failures -----------------------------------------------------------------------------------------------------


class Failing(Diary):
    """Raises in one hook, at one update."""

    def __init__(self, name: str, log: list[Any], hook: str, at: int = 0, error: Exception | None = None) -> None:
        super().__init__(name, log)
        self.hook, self.at, self.error = hook, at, error or RuntimeError(f"{name} fails in {hook}")

    def note(self, event: str, state: Any) -> None:
        super().note(event, state)
        if event == "end" and state.error is not None:
            self.log.append((self.name, "saw", str(state.error)))
        if event == self.hook and state.step >= self.at:
            raise self.error


def test_after_a_failure_everything_that_began_is_ended() -> None:
    """An error at update 7: all callbacks end, the tracker is told "failed", the writer is closed.

    The error itself reaches the caller, unchanged (pipekit:D20, pipekit:E6).
    """
    log: list[Any] = []
    tracker, writer = Tracker(), Writer()
    failing = Failing("b", log, "step", 7)
    callbacks = [Diary("a", log), failing, LogToExperiment(tracker, "night"), Diary("d", log)]
    with pytest.raises(RuntimeError, match="b fails in step") as caught:
        loop(callbacks=callbacks, metric_writer=writer)(None, None)
    assert caught.value is failing.error
    assert [entry[0] for entry in log if entry[1] == "end"] == ["d", "b", "a"]
    assert [call for call in tracker.calls if call[0] == "end"] == [("end", "failed")]
    assert writer.closed == 1


@pytest.mark.filterwarnings("ignore:.*on_train_end.*:RuntimeWarning")
def test_an_error_while_ending_neither_stops_the_others_nor_hides_the_first() -> None:
    """(pipekit:D21)."""
    log: list[Any] = []
    callbacks = [Diary("a", log), Failing("b", log, "end"), Failing("c", log, "step", 3)]
    with pytest.raises(RuntimeError, match="c fails in step"):
        loop(callbacks=callbacks)(None, None)
    assert [entry[0] for entry in log if entry[1] == "end"] == ["c", "b", "a"]
    assert ("b", "saw", "c fails in step") in log


def test_an_error_while_ending_a_run_that_went_well_is_raised() -> None:
    """And the callbacks before it are ended all the same (pipekit:D21)."""
    log: list[Any] = []
    with pytest.raises(RuntimeError, match="b fails in end"):
        loop(max_steps=2, callbacks=[Diary("a", log), Failing("b", log, "end")])(None, None)
    assert ("a", "end", 2) in log


def test_only_what_began_is_ended() -> None:
    """The second of three fails as it begins: the first is ended, the second and the third are not (pipekit:D22)."""
    log: list[Any] = []
    callbacks = [Diary("a", log), Failing("b", log, "begin"), Diary("c", log)]
    with pytest.raises(RuntimeError, match="b fails in begin"):
        loop(callbacks=callbacks)(None, None)
    assert [entry[:2] for entry in log if entry[1] != "saw"] == [("a", "begin"), ("b", "begin"), ("a", "end")]


def test_a_run_is_logged_with_the_settings_of_the_loop() -> None:
    """One beginning with the loop's configuration and one's own over it, one end (pipekit:D18)."""
    tracker = Tracker()
    loop(max_steps=2, callbacks=[LogToExperiment(tracker, "night", {"seed": "mine"})])(None, None)
    (start,) = [call for call in tracker.calls if call[0] == "start"]
    assert (start[1], start[2]["max_steps"], start[2]["seed"]) == ("night", 2, "mine")
    assert [call[2] for call in tracker.calls if call[0] == "log"] == [1, 2]
    assert tracker.calls[-1] == ("end", "completed")


# -- construction -------------------------------------------------------------------------------------------------


def test_a_registry_that_cannot_store_is_refused_before_any_training() -> None:
    """(pipekit:D17)."""
    with pytest.raises(TypeError, match="ModelRegistry"):
        loop(callbacks=[Checkpoint(registry=object())])


def test_a_tracker_that_cannot_log_is_refused_before_any_training() -> None:
    """(pipekit:D19)."""

    class Half:
        def start_run(self, name: str, config: dict[str, Any]) -> None: ...

    with pytest.raises(TypeError, match="ExperimentTracker"):
        loop(callbacks=[LogToExperiment(Half(), "night")])


def test_a_callback_may_have_one_hook_alone() -> None:
    """The Protocol cannot be asked with isinstance, since every part of it is optional (pipekit:D1, pipekit:D9.3)."""
    from nnx_jax.loop.step_callbacks import Callback

    class Only:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step_end(self, loop: Any, state: Any, metrics: dict[str, float]) -> None:
            self.steps.append(state.step)

    only = Only()
    loop(max_steps=2, callbacks=[only])(None, None)
    assert only.steps == [1, 2]
    with pytest.raises(TypeError):
        isinstance(only, Callback)
