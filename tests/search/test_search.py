"""Studies: what counts, what is refused, what a trial is worth, and how a study goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, LeaseHeldError, ProcessGroupError
from nnx_jax.loop.builtin import EarlyStopping
from nnx_jax.loop.callbacks import Callback
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.train import MonitorSpec
from nnx_jax.plan import ExperimentPlan, PlanError
from nnx_jax.runs.run import NNRun
from nnx_jax.search import CategoricalParam, MedianPruner, SearchResult, SearchSpace
from nnx_jax.search.storage import open_study
from tests.search.toy import LOSS, RATES, plan, run, value_at, with_rate


def runs_in(folder: Path) -> int:
    return len(NNRun.all(folder)) if folder.is_dir() else 0


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchResult, SearchResult, Path]:
    """Two trials, and then the same call with a budget of three."""
    root = tmp_path_factory.mktemp("study")
    where = {"storage": root / "studies", "runs_dir": root / "runs"}
    return run(2, **where), run(3, **where), root


def test_a_budget_is_of_the_whole_study(study: tuple[SearchResult, SearchResult, Path]) -> None:
    """nnx:B168"""
    first, second, root = study
    assert [trial.values["rate"] for trial in first.trials] == [0.1, 0.5]
    assert second.trials[:2] == first.trials
    assert [trial.values["rate"] for trial in second.trials] == [0.1, 0.5, 0.2]
    assert (first.reason, second.reason) == ("trials", "trials")
    assert runs_in(root / "runs") == 3


def test_what_a_trial_says(study: tuple[SearchResult, SearchResult, Path]) -> None:
    result, root = study[1], study[2]
    for trial in result.trials:
        rate = trial.values["rate"]
        assert (trial.state, trial.reason, trial.updates, trial.epochs) == ("complete", "finished", 8, 2)
        assert trial.value == pytest.approx(value_at(rate, 8), rel=1e-5)
        assert [(epoch, step) for epoch, step, _ in trial.measured] == [(0, 4), (1, 8)]
        assert trial.measured[0][2] == pytest.approx(value_at(rate, 4), rel=1e-5)
        assert trial.run_id is not None
        stored = NNRun.load(trial.run_id, root / "runs").state["train"]
        assert stored["salt"] == f"plan-attempt:{trial.attempt_id}"
        assert stored["optim"]["max_lr"] == rate
    assert result.best.values == {"rate": 0.5}
    assert (result.monitor, result.direction) == ("val_loss", "min")
    lines = result.table().splitlines()
    assert lines[0].split() == ["trial", "rate", "val_loss", "updates", "state", "why"]
    assert lines[2].split() == ["*1", "0.5", f"{result.best.value:.6g}", "8", "complete", "finished"]


def test_the_value_is_that_of_the_best_epoch(tmp_path: Path) -> None:
    """A rate of 2.5 moves away by half of the distance at every update: the first epoch is the best."""
    far = SearchSpace(rate=CategoricalParam(choices=(2.5,)))
    trial = run(1, space=far, runs_dir=tmp_path).best
    assert trial.value == pytest.approx(value_at(2.5, 4), rel=1e-5)
    assert trial.measured[1][2] == pytest.approx(value_at(2.5, 8), rel=1e-5)


def test_a_trial_that_its_own_callback_ends(tmp_path: Path) -> None:
    """A rate of 2.5 only gets worse, so patience of one ends it after two epochs of four."""
    far = SearchSpace(rate=CategoricalParam(choices=(2.5,)))
    patient = plan(4).with_callback_factories(lambda: EarlyStopping(patience=1))
    trial = run(1, of=patient, space=far, runs_dir=tmp_path).best
    assert (trial.reason, trial.epochs, trial.updates) == ("stopped_early", 2, 8)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"space": SearchSpace(rate=CategoricalParam(choices=(0.1, 0.5)))}, r"space.rate.choices was"),
        ({"monitor": MonitorSpec(min_delta=0.5)}, "monitor.min_delta was not given, is 0.5"),
        ({"of": plan(3)}, "plan.train.n_epochs was 2, is 3"),
        ({"of": plan().with_data(batch_size=2)}, "plan.data.batch_size was 1, is 2"),
        ({"of": plan().with_loss(lambda outputs, y: (outputs - y) ** 2)}, "plan.loss was"),
        ({"cap": 5}, "updates_per_trial was None, is 5"),
    ],
)
def test_another_study_of_that_name_is_refused(
    changes: dict[str, Any], message: str, study: tuple[SearchResult, SearchResult, Path]
) -> None:
    """nnx:B169"""
    root = study[2]
    with pytest.raises(ValueError, match=message):
        run(9, storage=root / "studies", runs_dir=root / "runs", **changes)
    assert runs_in(root / "runs") == 3


def test_a_cap_of_updates(tmp_path: Path) -> None:
    """nnx:B170: six updates at four an epoch; only the first epoch is committed, and the value is its value."""
    trial = run(1, of=plan(3), cap=6, runs_dir=tmp_path).best
    assert (trial.updates, trial.epochs, trial.reason, trial.state) == (6, 1, "update_cap", "complete")
    assert trial.value == pytest.approx(value_at(0.1, 4), rel=1e-5)
    assert trial.run_id is not None
    found = NNRun.load(trial.run_id, tmp_path)
    assert found.last is not None
    assert found.last.step == 4


def test_a_cap_before_the_first_validation(tmp_path: Path) -> None:
    (trial,) = run(1, cap=3, runs_dir=tmp_path).trials
    assert (trial.state, trial.updates, trial.epochs) == ("failed", 3, 0)
    assert "raise updates_per_trial" in trial.message


class RaiseAt(Callback):
    """Raises in the second epoch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_epoch_begin(self, ctx: Any) -> None:
        if ctx.epoch == 1:
            raise self.error


def test_a_failed_fit_is_a_failed_trial(tmp_path: Path) -> None:
    """nnx:B171: it is noted with its message, counts, and the next one runs."""

    def apply(plan: ExperimentPlan, values: Mapping[str, Any]) -> ExperimentPlan:
        trial = with_rate(plan, values)
        return trial.with_callbacks(RaiseAt(OSError("disk on fire"))) if values["rate"] == 0.1 else trial

    result = run(2, apply=apply, runs_dir=tmp_path)
    failed, done = result.trials
    assert (failed.state, failed.value, failed.message) == ("failed", None, "OSError: disk on fire")
    assert done.state == "complete"
    assert result.best is done
    assert "disk on fire" in result.table()


def test_a_broken_apply_stops_the_search(tmp_path: Path) -> None:
    """nnx:B171: its error ends the search, and the trial it was asked for has not begun."""
    where = {"storage": tmp_path / "studies", "runs_dir": tmp_path / "runs"}

    def apply(plan: ExperimentPlan, values: Mapping[str, Any]) -> ExperimentPlan:
        if values["rate"] == 0.5:
            raise KeyError("rte")
        return with_rate(plan, values)

    with pytest.raises(KeyError, match="rte"):
        run(3, apply=apply, **where)
    with pytest.raises(TypeError, match="apply returned None"):
        run(3, apply=lambda plan, values: None, **where)
    result = run(3, **where)
    assert [trial.state for trial in result.trials] == ["complete"] * 3
    assert runs_in(tmp_path / "runs") == 3


LOADER = [(np.zeros((1, 1), np.float32), np.ones(1, np.float32))]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"monitor": MonitorSpec(split="train")}, "monitor.split: got 'train'"),
        ({"of": ExperimentPlan().with_data(train=LOADER)}, "data.train: a loader would be shared by all trials"),
        ({"of": plan().with_monitor(MonitorSpec(min_delta=0.1))}, "train.monitor: the plan follows"),
        ({"of": plan().with_data(val=None)}, "there is no validation data"),
        ({"of": plan().with_epochs(0)}, "train.n_epochs: got 0"),
        ({"monitor": MonitorSpec(metric="f1")}, "which this run does not record"),
        ({"monitor": "val_loss"}, "monitor: expected MonitorSpec, got str"),
        ({"apply": None}, "apply: expected a function"),
        ({"study_name": "../x"}, "cannot be a file name"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """nnx:B172: before any trial."""
    with pytest.raises(ValueError, match=message):
        run(2, runs_dir=tmp_path / "runs", storage=tmp_path / "studies", **changes)
    assert list(tmp_path.iterdir()) == []


def test_every_problem_of_the_plan_is_listed() -> None:
    with pytest.raises(PlanError) as caught:
        run(1, of=ExperimentPlan())
    assert [problem.path for problem in caught.value.diagnostics] == ["model", "train", "data.train"]


def test_one_of_several_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any study, factory or run."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ProcessGroupError, match="search trains in one process, and this is one of 2"):
        run(1, runs_dir=tmp_path / "runs", storage=tmp_path / "studies")
    assert list(tmp_path.iterdir()) == []


# -- going on -----------------------------------------------------------------------------------------------------


def test_an_interrupted_trial_goes_on(tmp_path: Path, study: tuple[SearchResult, SearchResult, Path]) -> None:
    """Where its run was committed last, under the same number; it counts once, and ends as if nothing had happened."""
    where = {"storage": tmp_path / "studies", "runs_dir": tmp_path / "runs"}
    starts: list[int] = []

    class Begin(Callback):
        def on_train_begin(self, ctx: Any) -> None:
            starts.append(ctx.step)

    def interrupted(plan: ExperimentPlan, values: Mapping[str, Any]) -> ExperimentPlan:
        return with_rate(plan, values).with_callbacks(RaiseAt(KeyboardInterrupt()))

    with pytest.raises(KeyboardInterrupt):
        run(2, apply=interrupted, **where)
    stored = json.loads((tmp_path / "studies" / "toy" / "trials" / "00000.json").read_text())
    assert (stored["state"], stored["values"]) == ("running", {"rate": 0.1})
    result = run(2, apply=lambda plan, values: with_rate(plan, values).with_callbacks(Begin()), **where)
    assert starts == [4, 0]
    assert [trial.measured for trial in result.trials] == [trial.measured for trial in study[0].trials]
    assert runs_in(tmp_path / "runs") == 2


def test_a_trial_that_was_finished_but_not_noted(tmp_path: Path) -> None:
    """Killed between the run's end and the study's file: it is read, not trained again."""
    where = {"storage": tmp_path / "studies", "runs_dir": tmp_path / "runs"}
    (done,) = run(1, **where).trials
    path = tmp_path / "studies" / "toy" / "trials" / "00000.json"
    state = json.loads(path.read_text())
    state.update(state="running", value=None, measured=[], updates=0, epochs=0, reason="", run_id=None)
    path.write_text(json.dumps(state))
    assert run(1, **where).trials == (done,)
    assert runs_in(tmp_path / "runs") == 1


def test_a_journal_that_no_longer_holds_the_best_epoch(tmp_path: Path) -> None:
    """A rate of 2.5 is best in its first epoch; the run keeps three records in memory, the study's file is lost."""
    far = {"space": SearchSpace(rate=CategoricalParam(choices=(2.5,))), "runs_dir": tmp_path / "runs"}
    of = plan(3).with_history(HistoryJournal(retention=3))
    (done,) = run(1, of=of, storage=tmp_path / "studies", **far).trials
    path = tmp_path / "studies" / "toy" / "trials" / "00000.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": "running"}))
    (read,) = run(1, of=of, storage=tmp_path / "studies", **far).trials
    assert (read.state, read.value, read.epochs) == ("complete", done.value, 3)
    assert done.value == pytest.approx(value_at(2.5, 4), rel=1e-5)
    assert len(read.measured) < len(done.measured) == 3


def test_a_capped_trial_that_was_not_noted(tmp_path: Path) -> None:
    """LAST stands before the cap, and the run's length after it: so it was the cap."""
    where = {"cap": 6, "of": plan(3), "storage": tmp_path / "studies", "runs_dir": tmp_path / "runs"}
    (done,) = run(1, **where).trials
    path = tmp_path / "studies" / "toy" / "trials" / "00000.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": "running", "updates": 0}))
    assert run(1, **where).trials == (done,)


def test_a_deadline_starts_no_more_trials(tmp_path: Path) -> None:
    """The clock gives 0 at the call, and 4 and 8 before the trials; the second one is past 5 seconds."""
    seconds = iter([0.0, 4.0, 8.0])
    result = run(3, deadline=5.0, clock=lambda: next(seconds), runs_dir=tmp_path)
    assert (len(result.trials), result.reason) == (1, "deadline")


def test_an_exhausted_grid_ends_the_search(tmp_path: Path) -> None:
    one = SearchSpace(rate=CategoricalParam(choices=(0.1,)))
    result = run(5, space=one, of=plan(1), runs_dir=tmp_path)
    assert (len(result.trials), result.reason) == (1, "exhausted")


def test_a_trial_behind_the_median_is_pruned(tmp_path: Path) -> None:
    """After rates 0.5 and 0.2, one of 0.1 is worse than both after its first epoch."""
    rates = SearchSpace(rate=CategoricalParam(choices=(0.5, 0.2, 0.1)))
    result = run(3, space=rates, pruner=MedianPruner(startup_trials=2), runs_dir=tmp_path)
    assert [trial.state for trial in result.trials] == ["complete", "complete", "pruned"]
    assert (result.trials[2].epochs, result.trials[2].reason) == (1, "pruned")
    assert result.best.values["rate"] == 0.5


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        open_study(tmp_path, "toy", {}),
        pytest.raises(LeaseHeldError, match="study 'toy' .* open in another process"),
        open_study(tmp_path, "toy", {}),
    ):
        pass


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("trials/00000.json", "{", "remove it to lose this trial alone"),
        ("trials/00000.json", '{"format": "nnx_jax.trial/2"}', "it is not of the form nnx_jax.trial/1"),
        ("study.json", "", "what the study's trials have in common"),
    ],
)
def test_a_damaged_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    with open_study(tmp_path, "toy", {"a": 1}):
        pass
    path = tmp_path / "toy" / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught, open_study(tmp_path, "toy", {"a": 1}):
        pass
    assert caught.value.file == str(path)


def test_no_complete_trial_has_no_best() -> None:
    with pytest.raises(ConfigError, match="has no complete trial"):
        _ = SearchResult("toy", "val_loss", "min", (), "deadline").best
    assert RATES.state()["rate"]["choices"] == [0.1, 0.5, 0.2]
    assert LOSS.split == "val"
