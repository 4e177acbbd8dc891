"""Killed, refused room, or started twice: the next start of the same command ends with the bits of a quiet run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnx_jax.runs.audit import verify

from .command import (
    PATIENCE,
    UPDATES,
    Ready,
    assert_same_end,
    environment,
    gate,
    last,
    runs_of,
    tree,
    wait_for,
    write_case,
)

KILLED = -signal.SIGKILL
LONG = ["--set", "train.n_epochs=12"]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """Processes for this module."""
    server = Ready(tmp_path_factory.mktemp("ready"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def quiet_run(ready: Ready, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 12 epochs that nothing disturbed."""
    folder = write_case(tmp_path_factory.mktemp("quiet"))
    done = ready.run(folder, *LONG, "--json")
    assert done.code == 0, done.err
    assert done.result["step"] == 12 * UPDATES
    return folder / done.result["run_dir"]


def storm(ready: Ready, folder: Path, quiet_run: Path, kills: int, seed: int) -> None:
    """Kill the command `kills` times at random moments, then let it finish; every state between is sound."""
    dice = random.Random(seed)
    run = folder / "runs" / quiet_run.name
    landed, before = 0, 0
    for kill in range(kills):
        process = ready.start(folder, *LONG)
        if dice.random() < 0.8:  # in training: once it has committed something of its own, and a moment later
            wait_for(lambda old=before, job=process.job: _step(run) > old or Path(job["done"]).exists(), "a commit")
            time.sleep(dice.random() * 0.15)
        else:  # anywhere, the imports' end and the compile included
            time.sleep(dice.random() * 3.0)
        process.send(signal.SIGKILL)
        code = process.wait().code
        assert code in (KILLED, 0), f"seed {seed}, kill {kill}: exit {code}"
        landed += code == KILLED
        if run.is_dir() and last(run) is not None:
            assert verify(run.parent, run.name) == [], f"seed {seed}, kill {kill}"
        assert _step(run) >= before, f"seed {seed}, kill {kill}: LAST went back"
        before = _step(run)
    assert landed, f"seed {seed}: no kill met a living process"
    done = ready.run(folder, *LONG)
    assert done.code == 0, done.err
    assert_same_end(run, quiet_run)
    assert [path.name for path in runs_of(folder)] == [quiet_run.name]


def _step(run: Path) -> int:
    point = last(run)
    return point.step if point else 0


@pytest.mark.slow
def test_killed_five_times_in_a_row(ready: Ready, quiet_run: Path, tmp_path: Path) -> None:
    """case:I01: every state after a SIGKILL is whole and no older than the commit before; the end is bit-equal.

    case:I15: each start takes the dead owner's lease over by itself.
    """
    storm(ready, write_case(tmp_path), quiet_run, kills=5, seed=20)


@pytest.mark.slow
@pytest.mark.long
def test_killed_thirty_times(ready: Ready, quiet_run: Path, tmp_path: Path) -> None:
    """The same in three storms of ten, each with its own seed."""
    for seed in range(3):
        storm(ready, write_case(tmp_path / str(seed)), quiet_run, kills=10, seed=seed)


@pytest.mark.slow
def test_dead_owner_is_named_and_replaced(ready: Ready, quiet_run: Path, tmp_path: Path) -> None:
    """case:I15: a run killed while it held the lease starts again at once, with one warning that names the dead pid."""
    folder = write_case(tmp_path)
    process = ready.start(folder, *LONG, *gate(at=2))
    wait_for((folder / "gate.reached").exists, "epoch 2")
    process.send(signal.SIGKILL)
    assert process.wait().code == KILLED
    done = ready.run(folder, *LONG)
    assert done.code == 0
    assert f"taking over the lease of process {process.pid} " in done.err
    assert_same_end(folder / "runs" / quiet_run.name, quiet_run)


def test_second_process_of_the_same_run_is_refused(ready: Ready, quiet_run: Path, tmp_path: Path) -> None:
    """case:I14: while one process trains, another start says who holds the run, and touches nothing.

    The first one then ends as if it had been alone.
    """
    folder = write_case(tmp_path)
    first = ready.start(folder, *LONG, *gate(at=2))
    wait_for((folder / "gate.reached").exists, "epoch 2")
    run = folder / "runs" / quiet_run.name
    wait_for(lambda: _step(run) == 2 * UPDATES, "the commit of epoch 1")
    settled = _until_still(run)
    second = ready.run(folder, *LONG, "--json")
    assert second.code == 1
    assert f"is held by process {first.pid} on host " in second.err
    assert "another salt" in second.err
    assert (second.result["status"], second.result["run_id"]) == ("failed", quiet_run.name)
    assert tree(run) == settled
    (folder / "gate.go").touch()
    assert first.wait().code == 0
    assert_same_end(run, quiet_run)


@pytest.mark.slow
def test_two_starts_at_once_train_once(ready: Ready, quiet_run: Path, tmp_path: Path) -> None:
    """case:I14: of two processes started together one trains; the other refuses while the first is at its gate."""
    folder = write_case(tmp_path)
    pair = [ready.start(folder, *LONG, *gate(at=1)) for _ in range(2)]
    ended = [Path(process.job["done"]) for process in pair]
    wait_for(lambda: any(path.exists() for path in ended), "one of the two to refuse")
    loser, winner = (pair[0], pair[1]) if ended[0].exists() else (pair[1], pair[0])
    refused = loser.wait()
    assert refused.code == 1
    assert f"is held by process {winner.pid} on host " in refused.err
    (folder / "gate.go").touch()
    assert winner.wait().code == 0
    assert_same_end(folder / "runs" / quiet_run.name, quiet_run)


@pytest.mark.parametrize(
    "blocks", [5, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_no_room_for_files_is_an_error_and_the_next_start_works(
    ready: Ready, quiet_run: Path, tmp_path: Path, blocks: int
) -> None:
    """A file-size limit stands for a full disk: exit 1 with a sentence, no death by SIGXFSZ, and a next start works."""
    folder = write_case(tmp_path)
    command = [sys.executable, "-m", "nnx_jax.train", "--config", "cfg.yaml", *LONG, "--json"]
    done = subprocess.run(
        ["sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh", *command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    told = done.stderr.splitlines()[-1]
    assert told.startswith("nnx_jax.train: ")
    assert "file too large" in told.lower()
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "failed"
    run = folder / "runs" / quiet_run.name
    assert not run.exists() or verify(run.parent, run.name) == []
    assert ready.run(folder, *LONG).code == 0
    assert_same_end(run, quiet_run)


def test_runs_directory_that_cannot_be_made(ready: Ready, tmp_path: Path) -> None:
    """A file in the way and a file system that takes no directories: exit 1, one sentence with the path."""
    folder = write_case(tmp_path)
    (folder / "taken").write_text("not a directory")
    for where in ("taken", "/proc/runs-of-nobody"):
        done = ready.run(folder, "--runs-dir", where)
        assert done.code == 1
        assert where in done.err
        assert "Traceback" not in done.err
    assert (folder / "taken").read_text() == "not a directory"


def _until_still(run: Path) -> dict[str, bytes | None]:
    """The run's files once no background work changes them any more."""
    before: dict[str, bytes | None] | None = None
    while (now := tree(run)) != before:
        before = now
        time.sleep(0.2)
    return now
