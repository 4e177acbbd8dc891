"""Whole runs with a manifest: what the two files say after every kind of end, and that nothing else changes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.loop.signals import Interrupted
from nnx_jax.model import NNModel
from nnx_jax.objectives.objective import supervised_objective
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
from nnx_jax.params.train import NNTrainParams
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.plan.plan import ExperimentPlan
from nnx_jax.runs.experiment import Attempt, ExperimentManifest, load_provenance
from nnx_jax.runs.run import NNRun
from nnx_jax.trainer import Trainer
from tests.e2e.helpers import assert_same_run, data_params, model, train_params
from tests.e2e.toys import only_run

PLAN = ExperimentManifest(task={"kind": "multiclass"}, labels=("a", "b", "c"), config={"question": 1})


def fit(runs: Path, said: Any = PLAN, *callbacks: Any, of: NNModel | None = None, **train: Any) -> NNRun:
    """Train the small model for two epochs."""
    params = train_params(**{"n_epochs": 2, "scheduler": {"kind": "constant"}, **train})
    return (of or model()).train(
        params, callbacks, provenance=said, data=data_params(), runs_dir=runs, progress=QuietProgress()
    )


def attempt_of(run: NNRun) -> Attempt:
    assert run.attempt is not None
    return run.attempt


class At(Callback):
    """Does something at the end of one epoch, before its commit."""

    def __init__(self, epoch: int, act: Callable[[TrainContext], Any]) -> None:
        self.epoch, self.act = epoch, act

    def on_epoch_end(self, ctx: TrainContext) -> None:
        if ctx.epoch == self.epoch:
            self.act(ctx)


def boom(ctx: TrainContext) -> None:
    raise RuntimeError("boom")


def interrupt(ctx: TrainContext) -> None:
    raise KeyboardInterrupt("boom")


def press_ctrl_c(ctx: TrainContext) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_finished_run_says_what_it_is_and_how_it_ended(tmp_path: Path) -> None:
    """nnx:B235 both files are there, the attempt is completed, and the last commit is named; the id is unchanged."""
    plain = fit(tmp_path / "plain", None)
    run = fit(tmp_path / "said")
    assert run.id == plain.id
    assert_same_run(run, plain)
    assert (plain.provenance, plain.attempt) == (None, None)
    known = run.provenance
    assert known is not None
    assert known.manifest == PLAN
    assert known.fingerprint == PLAN.fingerprint()
    assert run.last is not None
    attempt = json.loads((run.path / "attempt.json").read_text())
    place = {"tag": "LAST", "epoch": 1, "step": run.last.step, "generation": run.last.generation}
    assert attempt["last_committed"] == place
    assert (attempt["status"], attempt["run_id"], attempt["fingerprint"]) == ("completed", run.id, PLAN.fingerprint())
    assert (attempt["parent"], attempt["error"]) == (None, None)
    assert attempt["started_at"] <= attempt["finished_at"]
    assert json.loads((run.path / "provenance.json").read_text())["fingerprint"] == PLAN.fingerprint()


@pytest.mark.parametrize("wrong", [{"task": "x"}, "v1", 3], ids=["dict", "text", "number"])
def test_another_type_is_refused_before_anything_is_made(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(TypeError, match="provenance must be an ExperimentManifest, got"):
        fit(tmp_path / "runs", wrong)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("act", "error", "status", "epoch"),
    [(boom, RuntimeError, "failed", 0), (interrupt, KeyboardInterrupt, "cancelled", 0)],
    ids=["failed", "cancelled"],
)
def test_an_attempt_that_an_error_ended_says_so(
    tmp_path: Path, act: Any, error: type[BaseException], status: str, epoch: int
) -> None:
    """nnx:B236 in the second epoch: the first one's commit is named, and the error is what was raised."""
    with pytest.raises(error, match="boom"):
        fit(tmp_path, PLAN, At(1, act))
    run = only_run(tmp_path)
    attempt = attempt_of(run)
    assert attempt.status == status
    assert attempt.error == {"type": error.__name__, "message": "boom"}
    assert attempt.last_committed is not None
    assert run.last is not None
    assert attempt.last_committed["epoch"] == run.last.epoch == epoch
    assert attempt.last_committed["generation"] == run.last.generation


def test_ctrl_c_is_a_cancelled_attempt_and_the_next_one_continues_it(tmp_path: Path) -> None:
    """nnx:B236 the real signal; the same call then finishes the run, its parent being the attempt before."""
    trained = model()
    with pytest.raises(Interrupted):
        fit(tmp_path, PLAN, At(0, press_ctrl_c), of=trained)
    run = only_run(tmp_path)
    first = attempt_of(run)
    assert first.status == "cancelled"
    assert first.error is not None
    assert "SIGINT" in first.error["message"]
    assert run.last is not None
    at = {"tag": "LAST", "epoch": run.last.epoch, "step": run.last.step, "generation": run.last.generation}
    assert first.last_committed == at
    done = fit(tmp_path, PLAN, of=trained)
    second = attempt_of(done)
    assert done.id == run.id
    assert (second.status, second.error) == ("completed", None)
    assert second.parent == {"run_id": run.id, "attempt_id": first.attempt_id, **at}
    assert second.attempt_id != first.attempt_id


def test_an_attempt_without_a_commit_leaves_its_record_only(tmp_path: Path) -> None:
    """nnx:B236 what was asked for is kept; the next start begins afresh, and is nobody's continuation."""
    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path, PLAN, At(0, boom))
    run = only_run(tmp_path)
    assert run.status == "fresh"
    assert (attempt_of(run).status, attempt_of(run).last_committed) == ("failed", None)
    again = attempt_of(fit(tmp_path))
    assert (again.status, again.parent, again.run_id) == ("completed", None, run.id)
    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path / "plain", None, At(0, boom))
    assert NNRun.all(tmp_path / "plain") == []  # without a manifest nothing stays


def spoil(ctx: TrainContext) -> None:
    """No file can take the place of a directory, whoever writes it."""
    path = Path(str(ctx.runs_dir), ctx.run_id, "attempt.json")
    path.unlink()
    path.mkdir()


def spoil_and_fail(ctx: TrainContext) -> None:
    spoil(ctx)
    boom(ctx)


def test_a_record_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    """nnx:B236 the error of training is raised, the trouble is a warning."""
    with (
        pytest.warns(RuntimeWarning, match="this attempt is failed, but attempt.json cannot say so"),
        pytest.raises(RuntimeError, match="boom"),
    ):
        fit(tmp_path, PLAN, At(1, spoil_and_fail))
    assert only_run(tmp_path).status == "interrupted"


def test_a_record_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="this attempt is completed, but attempt.json cannot say so"):
        run = fit(tmp_path, PLAN, At(1, spoil))
    assert run.status == "finished"


def test_a_run_from_another_names_its_parent(tmp_path: Path) -> None:
    """The checkpoint it starts from, and the attempt that made it where that run has provenance."""
    source = fit(tmp_path)
    child = attempt_of(fit(tmp_path, PLAN, resume_from_run_id=source.id, resume_from_checkpoint="FIRST"))
    first = source.pointers["FIRST"]
    assert child.parent == {
        "run_id": source.id, "attempt_id": attempt_of(source).attempt_id,
        "tag": "FIRST", "epoch": 0, "step": first.step, "generation": first.generation,
    }  # fmt: skip
    plain = fit(tmp_path, None, salt="plain")
    other = attempt_of(fit(tmp_path, PLAN, resume_from_run_id=plain.id))
    assert other.parent is not None
    assert (other.parent["run_id"], other.parent["attempt_id"]) == (plain.id, None)


def test_replacing_a_run_replaces_its_provenance(tmp_path: Path) -> None:
    fit(tmp_path)
    other = ExperimentManifest(config={"question": 2})
    run = fit(tmp_path, other, overwrite_existing=True)
    assert run.provenance is not None
    assert run.provenance.manifest == other
    assert load_provenance(fit(tmp_path, None, overwrite_existing=True).id, tmp_path) is None


@pytest.mark.parametrize("act", [None, boom], ids=["completed", "failed"])
def test_a_trainers_run_is_recorded_too(tmp_path: Path, act: Any) -> None:
    """nnx:B235 nnx:B236 by the Trainer as by the model."""
    groups = {name: NNParamGroupSpec(patterns=(f"{name}.*",), max_lr=0.1) for name in ("layers", "head")}
    optims = {name: NNOptimParams(kind="sgd", max_lr=0.1, param_groups=(group,)) for name, group in groups.items()}
    callbacks = [] if act is None else [At(1, act)]

    def train() -> NNRun:
        return Trainer(model(norm=None, dropout_prob=0.0)).train(
            NNTrainerParams(optims=optims, n_epochs=2),
            objective=supervised_objective(),
            callbacks=callbacks,
            provenance=PLAN,
            data=data_params(val=None),
            runs_dir=tmp_path,
            quiet=True,
        )

    if act is None:
        assert (attempt_of(train()).status, train_epoch(tmp_path)) == ("completed", 1)
        return
    with pytest.raises(RuntimeError, match="boom"):
        train()
    assert (attempt_of(only_run(tmp_path)).status, train_epoch(tmp_path)) == ("failed", 0)


def train_epoch(runs: Path) -> int:
    """The epoch of the last commit that the attempt names."""
    last = attempt_of(only_run(runs)).last_committed
    assert last is not None
    return last["epoch"]


def test_a_plan_hands_it_on(tmp_path: Path) -> None:
    data = data_params()
    net = model().params.net
    assert net is not None
    plan = (
        ExperimentPlan()
        .with_net(net)
        .with_data(train=data.train, batch_size=4)
        .with_train(NNTrainParams(n_epochs=1))
        .with_provenance(PLAN)
    )
    result = plan.fit(runs_dir=tmp_path, quiet=True)
    assert result.run.provenance is not None
    assert result.run.provenance.fingerprint == PLAN.fingerprint()
