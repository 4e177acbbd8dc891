"""Whole runs with a journal: the same numbers in bounded memory, and what callbacks, resumes and readers see of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.engines.validation import EvalStepContext
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.objectives.objective import supervised_objective
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import CheckpointParams
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.runs import audit
from nnx_jax.runs.journal_migrate import migrate_history
from nnx_jax.runs.journal_views import export_history_csv, iter_history
from nnx_jax.runs.run import NNRun
from nnx_jax.trainer import Trainer
from tests.e2e import helpers

JOURNAL = HistoryJournal(retention=6, chunk_size=3)


def data() -> NNDataParams:
    """Four batches of four rows."""
    return helpers.data_params(train=helpers.dataset(16))


def fit(runs: Path, history: Any = JOURNAL, *, callbacks: Any = (), checkpoint: Any = None, **train: Any) -> NNRun:
    """Train the small model; one record per microbatch."""
    params = helpers.train_params(**{"record_every": "batch", "n_epochs": 3, **train})
    return helpers.model().train(
        params,
        callbacks,
        history=history,
        data=data(),
        checkpoint=checkpoint,
        runs_dir=runs,
        progress=QuietProgress(),
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[NNRun, NNRun]:
    """The same run with a journal and without."""
    return fit(tmp_path_factory.mktemp("journal")), fit(tmp_path_factory.mktemp("eager"), None)


def lines(run: NNRun) -> list[Any]:
    return [json.loads(line) for line in (run.history / "index.jsonl").read_text().splitlines()]


def epochs(rows: Any) -> list[int]:
    return [row["epoch"] for row in rows]


def test_a_run_with_a_journal(pair: tuple[NNRun, NNRun]) -> None:
    """nnx:B144 nnx:S33 three epochs of four batches: chunks of 3, 1, 3, 1, 3, 1; 12 records, 6 of them at hand."""
    run, _ = pair
    assert [line["records"] for line in lines(run)] == [3, 1, 3, 1, 3, 1]
    assert json.loads((run.history / "journal.json").read_text())["records"] == 12
    assert epochs(run.records) == [1, 1, 2, 2, 2, 2]
    assert (run.history, run.status) == (run.path / "history", "finished")
    assert not (run.path / "idps.csv").exists()
    assert audit.verify(run.root, run.id) == []
    assert run.state["history"] == {"retention": 6, "chunk_size": 3}


def test_the_numbers_are_those_of_the_file(pair: tuple[NNRun, NNRun], tmp_path: Path) -> None:
    """nnx:B149 nnx:B156 the same id, the same records and weights, and the very bytes of idps.csv when asked for."""
    run, eager = pair
    assert run.id == eager.id
    assert list(iter_history(run.id, run.root, summaries=True)) == eager.records
    assert list(iter_history(run.id, run.root)) == [row for row in eager.records if row["kind"] == "batch"]
    assert (run.epochs, run.artifact) == (eager.epochs, eager.artifact)
    csv = export_history_csv(run.id, tmp_path / "out.csv", run.root)
    assert csv.read_bytes() == (eager.path / "idps.csv").read_bytes()
    ours, theirs = helpers.stored(run), helpers.stored(eager)
    assert {name: value.tobytes() for name, value in ours.items()} == {n: v.tobytes() for n, v in theirs.items()}


def test_a_moved_run_has_the_same_journal(pair: tuple[NNRun, NNRun], tmp_path: Path) -> None:
    """A finished run with idps.csv becomes what it would have been."""
    run, _ = pair
    fit(tmp_path, None)
    moved = migrate_history(run.id, spec=JOURNAL, runs_dir=tmp_path)
    assert {path.name: path.read_bytes() for path in moved.history.iterdir()} == {
        path.name: path.read_bytes() for path in run.history.iterdir()
    }
    assert (moved.status, moved.artifact) == ("finished", run.artifact)


def own_validation(ctx: EvalStepContext) -> dict[str, float]:
    """A value nobody knew before, and one that is not finite."""
    return {"loss": 1.0 / (ctx.epoch_idx + 1), "surprise": ctx.epoch_idx + 0.5, "odd": float("inf")}


def two_optimizers(runs: Path, history: HistoryJournal | None) -> NNRun:
    halves = [
        NNOptimParams(kind="sgd", max_lr=0.1, param_groups=(NNParamGroupSpec(patterns=(p,), max_lr=0.1),))
        for p in ("layers.*", "head.*")
    ]
    params = NNTrainerParams(optims={"low": halves[0], "high": halves[1]}, n_epochs=2, record_every="batch")
    model = NNModel(helpers.net_params(norm=None, dropout_prob=0.0))
    return Trainer(model).train(
        params,
        objective=supervised_objective(),
        eval_step_fn=own_validation,
        history=history,
        data=data(),
        runs_dir=runs,
        progress=QuietProgress(),
    )


def test_columns_of_a_trainer_and_of_a_validation_of_ones_own(tmp_path: Path) -> None:
    """nnx:B156 rates by name, and values without a column of their own: the rows and bytes of the file."""
    run, eager = two_optimizers(tmp_path / "a", JOURNAL), two_optimizers(tmp_path / "b", None)
    assert list(iter_history(run.id, run.root, summaries=True)) == eager.records
    assert [row["val_surprise"] for row in run.epochs] == [0.5, 1.5]
    for known in (run, eager):
        assert {"val_loss", "val_odd", "val_surprise"} == {name for name in known.columns if name.startswith("val_")}
    assert eager.column("val_surprise")[-2:] == [None, 1.5]
    assert eager.column("val_odd")[-1] == float("inf")
    csv = export_history_csv(run.id, tmp_path / "out.csv", run.root)
    assert csv.read_bytes() == (eager.path / "idps.csv").read_bytes()


# Callbacks -----------------------------------------------------------------------------------------------------------


class Plain(Callback):
    def __init__(self, access: str = "window") -> None:
        self.history_access = access
        self.seen: list[int] = []
        self.first: list[Any] = []
        self.window: Any = None

    def on_epoch_end(self, ctx: TrainContext) -> None:
        self.seen.append(len(ctx.records))
        self.first.append((ctx.records[0]["epoch"], ctx.records[0]["batch"]))
        self.window = ctx.records

    def on_train_end(self, ctx: TrainContext) -> None:
        self.seen.append(len(ctx.records))


def test_callbacks_see_the_window_or_everything(tmp_path: Path) -> None:
    """nnx:B145 nnx:B146 nnx:S39 4, 6, 6 records and 4, 8, 12; at the end the same again; the window is read-only."""
    plain, full = Plain(), Plain("full")
    run = fit(tmp_path, callbacks=[plain, full])
    assert (plain.seen, plain.first) == ([4, 6, 6, 6], [(0, 0), (0, 2), (1, 2)])
    assert (full.seen, full.first) == ([4, 8, 12, 12], [(0, 0)] * 3)
    assert list(full.window) == list(iter_history(run.id, tmp_path))
    with pytest.raises(TypeError, match="item assignment"):
        plain.window[0] = {}
    assert not hasattr(plain.window, "append")
    assert list(plain.window) == run.records


@pytest.mark.parametrize(
    ("history", "callback", "error"),
    [
        (JOURNAL, lambda rows: None, "plain function"),
        (JOURNAL, Plain("all"), "history_access is 'all'"),
        (6, Plain(), "must be a HistoryJournal, got int"),
        ({"retention": 6}, Plain(), "must be a HistoryJournal, got dict"),
    ],
)
def test_refused_before_anything_is_reserved(tmp_path: Path, history: Any, callback: Any, error: str) -> None:
    """nnx:B147 a ValueError, or a TypeError for the settings, and no directory."""
    kind = ValueError if history is JOURNAL else TypeError
    with pytest.raises(kind, match=error):
        fit(tmp_path / "runs", history, callbacks=[callback])
    assert not (tmp_path / "runs").exists()


class Spoils(Callback):
    """Removes a committed chunk at the very end."""

    def on_train_end(self, ctx: TrainContext) -> None:
        assert ctx.run is not None
        (ctx.run.history / "chunk-00000000.jsonl").unlink()


def test_a_read_back_that_fails_at_the_end(tmp_path: Path) -> None:
    """nnx:B158 a RuntimeWarning, the window in its place, and the run ends as ever."""
    full = Plain("full")
    with pytest.warns(RuntimeWarning, match="cannot be read back.*chunk-00000000"):
        run = fit(tmp_path, callbacks=[full, Spoils()], n_epochs=2)
    assert full.seen == [4, 8, 6]
    assert run.status == "finished"


# Stops and resumes ---------------------------------------------------------------------------------------------------


class Stops(Callback):
    """Asks at update `at` for the end there, in a way of the caller's choice."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how = at, how
        self.left: list[int] = []

    def on_optimizer_update(self, ctx: TrainContext, event: Any) -> None:
        if ctx.step == self.at:
            if self.how == "signal":
                os.kill(os.getpid(), signal.SIGINT)
            else:
                ctx.stop_at_update = True

    def on_train_end(self, ctx: TrainContext) -> None:
        self.left = [row["step"] for row in ctx.records]


def test_a_run_ended_inside_an_epoch_shows_what_is_committed(tmp_path: Path) -> None:
    """nnx:B143 the records of the epoch that was given up are gone from the window, the files and the run."""
    stops = Stops(6, "cut")
    run = fit(tmp_path, callbacks=[stops])
    assert stops.left == [1, 2, 3, 4]
    assert epochs(run.records) == [0, 0, 0, 0]
    assert [line["records"] for line in lines(run)] == [3, 1]
    assert sorted(path.name for path in run.history.glob("chunk-*")) == ["chunk-00000000.jsonl", "chunk-00000001.jsonl"]
    assert audit.verify(tmp_path, run.id) == []


def test_an_interrupted_run_goes_on_in_its_journal(pair: tuple[NNRun, NNRun], tmp_path: Path) -> None:
    """nnx:B143 nnx:S36 Ctrl-C inside an epoch commits its records; the next call goes on there, bit for bit."""
    stops = Stops(6, "signal")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[stops])
    stopped = NNRun.load(pair[0].id, tmp_path)
    assert stopped.last is not None
    step = stopped.last.step
    assert step in (6, 7)  # the update at which the signal was noticed
    assert stops.left == list(range(step - 5, step + 1))
    assert [row["step"] for row in stopped.records] == stops.left
    assert [line["records"] for line in lines(stopped)] == [3, 1, step - 4]
    with pytest.raises(ValueError, match="plain function"):
        fit(tmp_path, None, callbacks=[lambda rows: None])
    run = fit(tmp_path, None)
    assert list(iter_history(run.id, tmp_path, summaries=True)) == pair[1].records
    assert run.records == pair[0].records
    ours, theirs = helpers.stored(run), helpers.stored(pair[1])
    assert {name: value.tobytes() for name, value in ours.items()} == {n: v.tobytes() for n, v in theirs.items()}


def test_a_continuation_writes_its_own_journal(tmp_path: Path) -> None:
    """nnx:B153 nnx:S40 the source's bytes stay; the line of both has every epoch once."""
    source = fit(tmp_path, n_epochs=2, scheduler={"kind": "constant"})
    before = {path.name: path.read_bytes() for path in source.history.iterdir()}
    child = fit(tmp_path, n_epochs=1, scheduler={"kind": "constant"}, resume_from_run_id=source.id)
    assert {path.name: path.read_bytes() for path in source.history.iterdir()} == before
    assert epochs(iter_history(child.id, tmp_path)) == [2] * 4
    assert epochs(iter_history(child.id, tmp_path, lineage=True)) == [0] * 4 + [1] * 4 + [2] * 4


def test_records_of_updates_and_rare_commits(tmp_path: Path) -> None:
    """nnx:S34 one record per update and a commit every second epoch: an epoch ends a chunk with a commit or without."""
    every_second = CheckpointParams(every_n_epochs=2)
    run = fit(tmp_path, record_every="update", n_epochs=2, checkpoint=every_second, save_phase_checkpoints=False)
    assert [line["records"] for line in lines(run)] == [3, 1, 3, 1]
    assert {row["kind"] for row in run.records} == {"update"}


# Configuration -------------------------------------------------------------------------------------------------------


def test_a_journal_is_written_in_a_configuration() -> None:
    """nnx:B149 under `history`, and never part of the run id."""
    spec = RunSpec.from_yaml("train: {n_epochs: 1}\nhistory: {retention: 1000, chunk_size: 250}\n")
    assert spec.history == HistoryJournal(retention=1000, chunk_size=250)
    assert spec.run_id() == RunSpec.from_yaml("train: {n_epochs: 1}\n").run_id()
    with pytest.raises(ValueError, match="history.chunk_size: got 9, more than retention=4"):
        RunSpec.from_yaml("train: {n_epochs: 1}\nhistory: {retention: 4, chunk_size: 9}\n")
