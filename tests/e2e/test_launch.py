"""A configuration trained by two real processes: started, told to stop, killed and continued by the command that a user
types; compared with one process, and with two that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nnx_jax.runs.audit import verify
from nnx_jax.runs.run import NNRun
from tests.processes import free_port

from .command import (
    EPOCHS,
    PACING,
    PATIENCE,
    UPDATES,
    Done,
    assert_same_end,
    environment,
    gate,
    last,
    runs_of,
    wait_for,
    write_case,
)

LONG = [pytest.mark.slow, pytest.mark.long]
STEPWISE = ("--set", "train.dispatch=step")
TOTAL = UPDATES * EPOCHS
SLOW = '''

@register("slow")
class SlowParams(CallbackParams):
    def __call__(self):
        return Slow()

class Slow(Callback):
    """Rank 1 is slow at every update, rank 0 is busy for long at an epoch's end."""
    distributed = "all"

    def on_optimizer_update(self, ctx, event):
        time.sleep(0.05 * (event.update_idx % 5) if os.environ["NNX_JAX_PROCESS"] == "1" else 0)

    def on_epoch_end(self, ctx):
        time.sleep(8 if os.environ["NNX_JAX_PROCESS"] == "0" and ctx.epoch == 0 else 0)
'''


def case(folder: Path) -> Path:
    """The configuration of the command's tests; its callback says where it runs.

    With SGD: Adam makes a full step of a gradient that is rounding noise, as that of a bias before batch norm is.
    """
    write_case(folder)
    config = (folder / "cfg.yaml").read_text()
    sgd = config.replace("kind: adamw, max_lr: 1e-2", "kind: sgd, max_lr: 5e-2, momentum: 0.9")
    assert sgd != config
    (folder / "cfg.yaml").write_text(sgd)
    text = PACING.replace("class Gate(Callback):", 'class Gate(Callback):\n    distributed = "all"\n')
    (folder / "pacing.py").write_text(text.replace("import time", "import os, time") + SLOW)
    return folder


class Launched:
    """`python -m nnx_jax.launch --processes 2 -- --config cfg.yaml ...` in a folder, one device in each process."""

    def __init__(
        self, folder: Path, *options: str, processes: int = 2, launch: tuple[str, ...] = (), **env: str
    ) -> None:
        words = ["--processes", str(processes), "--devices-per-process", "1", "--timeout-seconds", "60", *launch]
        command = [sys.executable, "-m", "nnx_jax.launch", *words, "--", "--config", "cfg.yaml", *options]
        self.folder, self.begun = folder, time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment(**env), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait(self) -> Done:
        out, err = self.process.communicate(timeout=PATIENCE)
        return Done(self.process.returncode, out, err)

    def rank(self, rank: int) -> int:
        """Process id of one of the processes, found by its environment."""

        def found() -> int | None:
            for place in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    words = (place / "environ").read_bytes().split(b"\0")
                    parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
                    if b"NNX_JAX_PROCESS=%d" % rank in words and int(parent) == self.process.pid:
                        return int(place.name)
            return None

        return wait_for(found, f"rank {rank}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, which nobody disturbs."""
    folder = case(tmp_path_factory.mktemp("alone"))
    command = [sys.executable, "-m", "nnx_jax.train", "--config", "cfg.yaml", "--quiet"]
    env = environment(JAX_NUM_CPU_DEVICES="1")
    subprocess.run(command, cwd=folder, env=env, check=True, timeout=PATIENCE, capture_output=True)
    return runs_of(folder)[0]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done, Done]:
    """The run of two processes, which nobody disturbs; how its command ended, and the same command once more."""
    folder = case(tmp_path_factory.mktemp("straight"))
    with Launched(folder, *STEPWISE, "--json") as first:
        done = first.wait()
    assert done.code == 0, done.err
    with Launched(folder, *STEPWISE) as again:
        return runs_of(folder)[0], done, again.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return case(tmp_path)


def test_two_processes_train_one_run(alone: Path, straight: tuple[Path, Done, Done]) -> None:
    """nnx:S41 nnx:B202: one run directory with the single process's id, and the same numbers."""
    run, done, _ = straight
    assert [each.name for each in runs_of(run.parents[1])] == [alone.name]
    assert verify(run.parent, run.name) == []
    one, two = (NNRun.load(each.name, each.parent) for each in (alone, run))
    assert two.last is not None
    assert (two.last.epoch, two.last.step) == (EPOCHS - 1, TOTAL)
    assert len(one.summaries) == len(two.summaries)
    for left, right in zip(one.summaries, two.summaries, strict=True):
        assert set(left) == set(right)
        numbers = [name for name, value in left.items() if isinstance(value, float) and "time" not in name]
        for name in numbers:
            np.testing.assert_allclose(left[name], right[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_writer_speaks(straight: tuple[Path, Done, Done]) -> None:
    """Progress and the result come once, from the process that writes."""
    run, done, _ = straight
    [line] = done.out.splitlines()
    assert line.startswith('[0] {"run_id": "' + run.name)
    epochs = [line for line in done.err.splitlines() if "] epoch " in line]
    assert len(epochs) == EPOCHS
    assert all(line.startswith("[0] epoch ") for line in epochs)
    assert not [line for line in done.err.splitlines() if line.startswith("[1] ")]


def test_the_same_command_again(straight: tuple[Path, Done, Done]) -> None:
    """A finished run is left alone by every process, and its result said again."""
    run, _, again = straight
    assert again.code == 0, again.err
    assert "finished already" in again.err
    assert f"[0] run {run.name} finished: epoch {EPOCHS}, step {TOTAL}" in again.out


@pytest.mark.slow
def test_a_launch_of_one_process(alone: Path, folder: Path) -> None:
    """nnx:B203: it is the run without a launcher, bit for bit."""
    with Launched(folder, "--quiet", processes=1) as launched:
        done = launched.wait()
    assert done.code == 0, done.err
    assert_same_end(folder / "runs" / alone.name, alone)


RECIPE = """
import json, sys
import numpy as np
from nnx_jax import FeedForwardParams, NNModel, NNModelParams, NNOptimParams, NNTrainParams, distributed

rank, world = distributed.init_process_group()
x = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)
rows = {"x": x, "y": (x[:, 0] > 0).astype(np.int32)}
params = NNTrainParams(
    n_epochs=3,
    optim=NNOptimParams(max_lr=0.05),
    train_loader=distributed.train_loader(rows, batch_size=4, policy="pad", seed=1),
    val_loader=distributed.validation_loader(rows, batch_size=4),
)
model = NNModel(FeedForwardParams(hidden_dims=[8], output_dim=2), NNModelParams(metrics=["accuracy"]))
run = model.train(params, distributed=distributed.DDP(), quiet=True)
print(json.dumps([run.id, run.last.step, run.column("val_accuracy"), world]), flush=True)
distributed.shutdown()
"""


def test_the_recipe(tmp_path: Path) -> None:
    """nnx:S42: join, deal the rows, train, leave; every rank returns the run that rank 0 wrote."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    command = [sys.executable, "-m", "nnx_jax.launch", "--processes", "2", "--devices-per-process", "1"]
    done = subprocess.run([*command, "--script", "recipe.py"], cwd=tmp_path, env=environment(), check=False,
                          capture_output=True, text=True, timeout=PATIENCE)  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = dict(line[1:].split("] ", 1) for line in done.stdout.splitlines())
    assert told["0"] == told["1"]
    run_id, step, accuracy, world = json.loads(told["0"])
    assert [run.name for run in runs_of(tmp_path)] == [run_id]
    assert (step, world) == (9, 2)  # 23 rows are made 24, 12 on each rank: 3 batches of 4
    assert len([value for value in accuracy if value is not None]) == 3


@pytest.mark.parametrize("target, number", [
    pytest.param("launcher", signal.SIGTERM, marks=LONG),
    pytest.param("launcher", signal.SIGINT, marks=LONG),
    pytest.param("rank 0", signal.SIGTERM, marks=LONG),
    ("rank 1", signal.SIGTERM),
])  # fmt: skip
def test_told_to_stop(target: str, number: int, folder: Path, straight: tuple[Path, Done, Done]) -> None:
    """case:I11 case:L05: to all or to one process: all stop after one update, it is committed, all end with 143 or 130.

    Reliability S1, S2. The same command continues to the bits of an undisturbed run.
    """
    run = folder / "runs" / straight[0].name
    with Launched(folder, *STEPWISE, *gate(at=1)) as launched:
        wait_for((folder / "gate.reached").exists, "epoch 2")
        pid = launched.process.pid if target == "launcher" else launched.rank(int(target[-1]))
        os.kill(pid, number)
        time.sleep(1.5)  # every process has heard of it before the next step begins
        (folder / "gate.go").touch()
        done = launched.wait()
    assert done.code == 128 + number, done.err
    assert "first to fail" not in done.err or target != "launcher"
    words = re.findall(r"^\[(\d)\] nnx_jax\.train, rank (\d): stopped by (\w+)", done.err, re.MULTILINE)
    assert sorted(words) == [(str(rank), str(rank), signal.Signals(number).name) for rank in range(2)], done.err
    assert "Traceback" not in done.err
    point = last(run)
    assert point is not None
    assert UPDATES < point.step < TOTAL
    assert verify(run.parent, run.name) == []
    _continued(folder, straight[0])


@pytest.mark.parametrize("rank, number", [
    (1, signal.SIGKILL),
    pytest.param(0, signal.SIGKILL, marks=LONG),
    pytest.param(1, signal.SIGSTOP, marks=LONG),
])  # fmt: skip
def test_one_is_lost(rank: int, number: int, folder: Path, straight: tuple[Path, Done, Done]) -> None:
    """case:L17: one is killed, or stopped (reliability P2): all end in time, not with 0; the exit code is the cause.

    The same command continues as if nothing had been.
    """
    run = folder / "runs" / straight[0].name
    bounds = ("--grace-seconds", "3", "--timeout-seconds", "15")
    with Launched(folder, *STEPWISE, *gate(at=1), launch=bounds) as launched:
        wait_for(lambda: last(run), "the commit of epoch 1")
        wait_for((folder / "gate.reached").exists, "epoch 2")
        os.kill(launched.rank(rank), number)
        begun = time.monotonic()
        (folder / "gate.go").touch()
        done = launched.wait()
        assert time.monotonic() - begun < 40
    if number == signal.SIGKILL:
        assert done.code == 137, done.err
        assert f"nnx_jax.launch: process {rank} was ended by SIGKILL; it was the first to fail" in done.err
    else:
        assert done.code == 1, done.err
        assert "nnx_jax.launch: process 0 ended with exit code 1" in done.err
    assert re.search(rf"rank {rank} failed at '.*': ProcessLost: |process {rank} of 2 is gone: ", done.err), done.err
    assert verify(run.parent, run.name) == []
    _continued(folder, straight[0])


@pytest.mark.slow
def test_one_is_slow(folder: Path, straight: tuple[Path, Done, Done]) -> None:
    """case:L18: reliability P3: whoever is slow or busy is waited for, for longer than a collective operation may take.

    The limit is the group's timeout, 60 s here; that of collective operations is 5 s, and rank 0 is busy for 8.
    """
    slow = ("--set", "callbacks=[{kind: slow}]")
    with Launched(folder, *STEPWISE, *slow, XLA_FLAGS="--xla_cpu_collective_timeout_seconds=5") as launched:
        done = launched.wait()
    assert done.code == 0, done.err
    assert_same_end(folder / "runs" / straight[0].name, straight[0])


def _continued(folder: Path, straight: Path) -> None:
    """The same command ends with the bits of the undisturbed run."""
    with Launched(folder, *STEPWISE, "--quiet") as launched:
        done = launched.wait()
    assert done.code == 0, done.err
    assert_same_end(folder / "runs" / straight.name, straight)


def test_a_wrong_configuration(folder: Path) -> None:
    """Every process says what is wrong, once; the exit code is 2, and nothing was written."""
    with Launched(folder, "--set", "train.optim.max_lr=-1") as launched:
        done = launched.wait()
    assert done.code == 2, done.err
    for rank in range(2):
        assert f"[{rank}] nnx_jax.train, rank {rank}: config: --set train.optim.max_lr=-1: " in done.err
    assert "Traceback" not in done.err
    assert runs_of(folder) == []


def test_what_is_printed_without_a_group(folder: Path) -> None:
    """--print-config and --schema are said once too; nobody has to meet for them."""
    with Launched(folder, "--print-config") as launched:
        done = launched.wait()
    assert done.code == 0, done.err
    assert [line for line in done.out.splitlines() if "# run id " in line] == [done.out.splitlines()[0]]
    assert done.out.startswith("[0] ")


def test_options_of_a_group(folder: Path) -> None:
    """--distributed without a launcher, and a group's options without --distributed, are refused with what to do."""
    command = [sys.executable, "-m", "nnx_jax.train", "--config", "cfg.yaml"]
    for words, code, text in (
        (["--distributed"], 1, "NNX_JAX_COORDINATOR, NNX_JAX_PROCESSES, NNX_JAX_PROCESS are not set"),
        (["--num-processes", "2"], 2, "--num-processes: it is an option of a group of processes; add --distributed"),
        (["--writer-rank", "1"], 2, "--writer-rank: it is an option of a group"),
        (["--distributed", "--timeout-seconds", "0"], 2, "timeout_seconds: got 0.0"),
        (["--distributed", "--writer-rank", "-1"], 2, "DDP.writer_rank: got -1"),
        (["--allow", "journal"], 2, "--allow: it is an option of a group of processes; add --distributed"),
        (["--distributed", "--batch-norm", "sync"], 2, "--batch-norm: it is an option of the engine 'torch'"),
    ):
        done = subprocess.run([*command, *words], cwd=folder, env=environment(), timeout=PATIENCE, check=False,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == code, done.stderr
        assert text in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert runs_of(folder) == []


def test_one_is_missing(folder: Path) -> None:
    """Reliability P1: a process that is not started is named after the timeout, and nothing was written."""
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--process-id", "0"]
    command = [sys.executable, "-m", "nnx_jax.train", "--config", "cfg.yaml", "--distributed", "--timeout-seconds", "2"]
    done = subprocess.run([*command, *place, "--json"], cwd=folder, env=environment(), timeout=PATIENCE, check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line == "nnx_jax.train: process group: process 1 of 2 did not come within 2 s; was it started?"
    assert '"status": "failed"' in done.stdout
    assert not (folder / "runs").exists()


SCRIPT = """
import os, signal
from nnx_jax import distributed
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
rank, world = distributed.init_process_group()
os.kill(os.getpid(), signal.SIGTERM)
assert heard == [signal.SIGTERM], heard
if rank == 1:
    raise ValueError("the file is not there")
distributed.current_world().gather("the first words", rank)
"""


def test_an_error_of_a_script(tmp_path: Path) -> None:
    """nnx:S77: one that nobody catches, before anything was agreed on: the others are told, and end with it.

    Signals stay the script's own in a group.
    """
    (tmp_path / "mine.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "nnx_jax.launch", "--processes", "2", "--script", "mine.py"]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE,
                          check=False)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "[1] ValueError: the file is not there" in done.stderr
    told = "DistributedFailure: process group: rank 1 failed at 'the script': ValueError: the file is not there"
    assert f"[0] nnx_jax.core.errors.{told}" in done.stderr
    assert time.monotonic() - begun < 60  # of 120, the group's timeout


@pytest.mark.slow
def test_a_dry_run_of_a_group(folder: Path) -> None:
    """Both processes check and compile the program of all; the writer prints what lies where, once; nothing is made."""
    with Launched(folder, "--dry-run", "--json", "--set", "mesh={fsdp: 2}") as launched:
        done = launched.wait()
    assert done.code == 0, done.err
    assert {line[:4] for line in done.out.splitlines()} == {"[0] "}, done.out
    [told] = [json.loads(line[4:]) for line in done.out.splitlines() if line.startswith("[0] {")]
    found = told["mesh"]
    assert (found["axes"], found["devices"]) == ({"fsdp": 2}, 2)
    kernels = {row["path"]: row for row in found["parameters"] if row["path"].endswith("kernel")}
    assert kernels
    for row in kernels.values():
        assert "fsdp" in row["spec"]
        assert row["bytes_per_device"] == math.prod(row["shape"]) * 4 // 2
    assert found["collectives"]["all-gather"]["count"] >= 1
    assert not (folder / "runs").exists()
