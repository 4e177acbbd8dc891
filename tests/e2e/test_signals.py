"""SIGINT and SIGTERM: the last finished update is committed, and the same command ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax._src import compiler

from nnx_jax.core import fsio
from nnx_jax.engines.batches import TrainBatches
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.loop.callbacks import Callback, CallbackList, TrainContext
from nnx_jax.loop.signals import Interrupted, StopRequest, signals_raise
from nnx_jax.params.train import CheckpointParams
from nnx_jax.runs.audit import verify
from nnx_jax.runs.commit import Committer
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.store import RunStore

from . import helpers
from .command import (
    EPOCHS,
    PATIENCE,
    UPDATES,
    Here,
    assert_same_end,
    fresh,
    gate,
    last,
    quick_compiles,
    runs_of,
    wait_for,
    write_case,
)

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
STEPWISE = ("--set", "train.dispatch=step")
TOTAL = UPDATES * EPOCHS


@pytest.fixture(scope="module", autouse=True)
def _cached() -> Iterator[None]:
    with quick_compiles():
        yield


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(write_case(tmp_path), capsys, monkeypatch)


@pytest.fixture(scope="module")
def quiet_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the undisturbed run; it used the default dispatch."""
    folder = write_case(tmp_path_factory.mktemp("quiet"))
    process = fresh(folder, "--quiet")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return runs_of(folder)[0]


Strike = Callable[..., None]


@pytest.fixture
def strike() -> Iterator[Strike]:
    """Give `strike(owner, name, number, call=1)`: send this process a signal when `owner.name` is called that time."""
    with pytest.MonkeyPatch.context() as patch:

        def at(owner: Any, name: str, number: int, call: int = 1) -> None:
            real, calls = getattr(owner, name), iter(range(1, 1_000_000))

            def struck(*given: Any, **named: Any) -> Any:
                if next(calls) == call:
                    os.kill(os.getpid(), number)
                return real(*given, **named)

            patch.setattr(owner, name, struck)

        at.undo = patch.undo  # type: ignore[attr-defined]
        yield at


def interrupted(here: Here, strike: Strike, number: int, *options: str) -> int:
    """Run until the signal; check exit code, message and the run; return the step that LAST holds."""
    done = here(*options, "--json")
    strike.undo()  # type: ignore[attr-defined]
    assert done.code == CODES[signal.Signals(number)], done.err
    assert f"stopped by {signal.Signals(number).name}" in done.err
    assert "Traceback" not in done.err
    (run,) = runs_of(here.folder)
    assert verify(run.parent, run.name) == []
    point = last(run)
    assert point is not None
    assert not point.final
    assert (done.result["status"], done.result["step"]) == ("interrupted", point.step)
    return point.step


def continued(here: Here, quiet_run: Path, *options: str) -> None:
    """The same command ends with the bits of the undisturbed run."""
    done = here(*options)
    assert done.code == 0, done.err
    assert "continues" in done.err
    assert_same_end(here.folder / "runs" / quiet_run.name, quiet_run)


PLACES: dict[str, tuple[Any, str, int, int | None]] = {
    "before the first step": (CallbackList, "train_begin", 1, 1),
    "in the first compile": (compiler, "compile_or_get_cached", 0, 1),
    "in epoch 1": (TrainBatches, "run", 3, 3),
    "at the end of epoch 1": (TrainBatches, "run", UPDATES, UPDATES),
    "in epoch 2": (TrainBatches, "run", UPDATES + 2, UPDATES + 2),
    "in a validation": (FlaxEngine, "evaluate", 2, 2 * UPDATES),
    "in a commit": (fsio, "sync_tree", 1, None),
}
"""Owner and name of the function during whose n-th call the signal comes, and the step that must be committed."""
QUICK = [
    ("in the first compile", signal.SIGINT),
    ("in epoch 2", signal.SIGTERM),
    ("in a commit", signal.SIGINT),
]
REST = [(place, number) for place in PLACES for number in CODES if (place, number) not in QUICK]


@pytest.mark.parametrize(
    "place, number", [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)], ids=str
)
def test_stops_at_the_next_update_and_continues_bit_for_bit(
    place: str, number: int, here: Here, strike: Strike, quiet_run: Path
) -> None:
    """case:I11 case:L05: wherever the signal comes, LAST holds the last finished update, mid-epoch too.

    The exit code tells which signal it was, and the continued run has the arrays and the history of the quiet one.
    """
    owner, name, call, step = PLACES[place]
    if place == "in the first compile":  # of the step, that is: earlier compiles are small and belong to the start
        begin = TrainBatches.run

        def run(*given: Any, **named: Any) -> Any:
            TrainBatches.run = begin
            strike(owner, name, number)
            return begin(*given, **named)

        TrainBatches.run = run
    else:
        strike(owner, name, number, call)
    committed = interrupted(here, strike, number, *STEPWISE)
    if step is None:  # the signal came from the committing thread, some updates into the second epoch
        assert UPDATES <= committed <= 2 * UPDATES
    else:
        assert committed == step
    continued(here, quiet_run)


def test_what_was_due_at_the_interrupted_update_is_done_on_return(here: Here, strike: Strike) -> None:
    """case:I11: an evaluation due at the very update at which the run stopped is not lost: the history is the same."""
    options = ["--set", "train.eval_every_n_steps=4", *STEPWISE]
    assert here(*options, "--runs-dir", "quiet").code == 0
    (quiet,) = (path for path in (here.folder / "quiet").iterdir() if len(path.name) == 16)
    strike(TrainBatches, "run", signal.SIGTERM, 4)
    assert interrupted(here, strike, signal.SIGTERM, *options) == 4
    continued(here, quiet, *options)


@pytest.mark.slow
def test_last_update_of_a_run_by_updates(here: Here, strike: Strike) -> None:
    """case:I11: stopped at the very update that ends the run, inside an epoch: its evaluation is done on return."""
    options = ["--set", "train.n_epochs=none", "--set", "train.max_steps=9"]
    assert here(*options, "--runs-dir", "quiet").code == 0
    (quiet,) = (path for path in (here.folder / "quiet").iterdir() if len(path.name) == 16)
    strike(TrainBatches, "run", signal.SIGTERM, 9)
    assert interrupted(here, strike, signal.SIGTERM, *options, *STEPWISE) == 9
    continued(here, quiet, *options)


def test_a_run_that_a_callback_ended_stays_ended(here: Here, strike: Strike) -> None:
    """case:I11: early stopping had decided when the signal came: the next start finishes, it does not train on."""
    stop = "callbacks=[{kind: early_stopping, patience: 1, monitor: {metric: accuracy, min_delta: 1.0}}]"
    options = ["--set", stop, *STEPWISE]
    strike(RunStore, "finish", signal.SIGTERM)
    stopped = interrupted(here, strike, signal.SIGTERM, *options)
    assert stopped == 2 * UPDATES
    done = here(*options, "--json")
    assert (done.code, done.result["step"]) == (0, stopped)


@pytest.mark.slow
def test_stopped_again_and_again(here: Here, quiet_run: Path, strike: Strike) -> None:
    """case:I11: a run that is stopped after every third update still ends with the same bits."""
    for step in (3, 6, 9, 12, 15):
        strike(TrainBatches, "run", signal.SIGTERM, 3)
        assert interrupted(here, strike, signal.SIGTERM, *STEPWISE) == step
    continued(here, quiet_run)


def test_second_signal_aborts_and_the_last_commit_stands(here: Here, strike: Strike, quiet_run: Path) -> None:
    """case:L05: a second Ctrl-C while the first one's commit runs ends the command; nothing is lost but that commit."""
    strike(TrainBatches, "run", signal.SIGINT, UPDATES + 2)
    strike(Committer, "commit", signal.SIGINT, 2)
    committed = interrupted(here, strike, signal.SIGINT, *STEPWISE)
    assert committed == UPDATES
    continued(here, quiet_run)


def test_between_training_and_the_end(here: Here, strike: Strike, quiet_run: Path) -> None:
    """case:I11: a signal while the run is being finished: 143, not marked finished, and finished by the next start."""
    strike(RunStore, "finish", signal.SIGTERM)
    assert interrupted(here, strike, signal.SIGTERM) == TOTAL
    continued(here, quiet_run)


@pytest.mark.parametrize("number", CODES)
def test_before_training_leaves_nothing(here: Here, strike: Strike, number: int) -> None:
    """case:I11: a signal while the data and the network are made ready: the exit code says so, no run is left."""
    from nnx_jax.fit import job

    strike(job, "make_feeds", number)
    done = here("--json")
    assert done.code == CODES[signal.Signals(number)]
    assert done.result["status"] == "interrupted"
    assert runs_of(here.folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_from_outside(number: int, here: Here, quiet_run: Path) -> None:
    """case:L05 case:I11: a real command in a real process, signalled from outside: code 130 or 143, no child left."""
    process = fresh(here.folder, *STEPWISE, *gate(at=1))
    wait_for((here.folder / "gate.reached").exists, "epoch 2")
    process.send_signal(number)
    (here.folder / "gate.go").touch()
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == CODES[signal.Signals(number)], err
    assert out == b""
    assert b"stopped by" in err
    assert b"Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    point = last(here.folder / "runs" / quiet_run.name)
    assert point is not None
    assert point.step == UPDATES + 1
    continued(here, quiet_run)


@pytest.mark.slow
def test_twice_from_outside(here: Here, quiet_run: Path) -> None:
    """case:L05: the second Ctrl-C ends a command that is stuck in a callback; the commit before it stands."""
    process = fresh(here.folder, *STEPWISE, *gate(at=1))
    try:
        wait_for((here.folder / "gate.reached").exists, "epoch 2")
        run = here.folder / "runs" / quiet_run.name
        wait_for(lambda: last(run), "the commit of epoch 1")

        def pressed_until_it_ends() -> bool:
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        wait_for(pressed_until_it_ends, "the end")  # a third one is no other than the second
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode in (130, -signal.SIGINT), err
    assert verify(run.parent, run.name) == []
    with warnings.catch_warnings():
        # A press may stop the release of the lease; then it is taken over from this very process.
        warnings.filterwarnings("ignore", f"taking over the lease of process {process.pid} ", RuntimeWarning)
        continued(here, quiet_run)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0])
def test_while_importing(delay: float, here: Here) -> None:
    """A signal in the first moments: the process ends by it, and there is a whole run or none."""
    process = fresh(here.folder)
    try:
        process.communicate(timeout=delay or 0.001)
    except subprocess.TimeoutExpired:
        process.terminate()
    process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 143, -signal.SIGTERM)
    for run in runs_of(here.folder):
        assert verify(run.parent, run.name) == []
    assert here().code == 0


@pytest.mark.slow
def test_hangup_leaves_a_run_that_continues(here: Here, quiet_run: Path) -> None:
    """A closed terminal (SIGHUP) ends the command at once; what was committed continues."""
    process = fresh(here.folder, *gate(at=2))
    run = here.folder / "runs" / quiet_run.name
    wait_for((here.folder / "gate.reached").exists, "epoch 3")
    wait_for(lambda: (point := last(run)) and point.step == 2 * UPDATES, "the commit of epoch 2")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGHUP
    assert verify(run.parent, run.name) == []
    with pytest.warns(RuntimeWarning, match=f"taking over the lease of process {process.pid} "):
        continued(here, quiet_run)


class Press(Callback):
    """Presses Ctrl-C at the start of the second epoch; notes its own end."""

    ended = False

    def on_epoch_begin(self, ctx: TrainContext) -> None:
        if ctx.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)

    def on_train_end(self, ctx: TrainContext) -> None:
        self.ended = True


def test_in_a_notebook(tmp_path: Path) -> None:
    """case:L05 nnx:B014: KeyboardInterrupt reaches the caller; the model predicts with the committed weights.

    Handlers are the caller's again, and the same call continues to the bits of an undisturbed run.
    """
    before = [signal.getsignal(number) for number in CODES]
    straight = helpers.fit(tmp_path / "a")
    model, press = helpers.model(), Press()
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT; the last finished update is committed"):
        helpers.fit(tmp_path / "b", of=model, callbacks=[press], checkpoint=CheckpointParams(), dispatch="step")
    assert press.ended
    assert [signal.getsignal(number) for number in CODES] == before
    left = NNRun.load(straight.id, tmp_path / "b")
    assert left.last is not None
    assert left.last.step == UPDATES + 1
    x = np.zeros((2, 4), np.float32)
    stored = type(model).from_checkpoint(straight.id, runs_dir=tmp_path / "b")
    np.testing.assert_array_equal(model.predict(x).logits, stored.predict(x).logits)
    again = helpers.fit(tmp_path / "b")
    helpers.assert_same_run(again, straight)


def test_first_signal_is_a_flag_the_second_raises() -> None:
    """The first signal of either kind only asks; any second one raises with its own exit code."""
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.number == signal.SIGINT
        with pytest.raises(Interrupted, match="stopped by SIGTERM; what was committed before stands") as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_training_a_signal_raises_at_once() -> None:
    """Ctrl-C in the import or the data check is an Interrupted of code 130; afterwards the handler is the old one."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="stopped by SIGINT") as caught, signals_raise():
        os.kill(os.getpid(), signal.SIGINT)
    assert caught.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
