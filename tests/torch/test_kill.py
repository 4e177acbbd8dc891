"""The command on the torch engine, alone and as two gloo processes, killed or told to stop: the next ends alike."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from nnx_jax.runs.audit import verify
from tests.e2e.command import Process, Ready, last, stored, wait_for
from tests.processes import ROOT, free_port

pytestmark = pytest.mark.slow

EPOCHS = 2
OPTIONS = (
    "--set", "backend=torch", "--set", "model.net.hidden_dims=[16]", "--set", f"train.n_epochs={EPOCHS}",
    "--set", "data.batch_size=2", "--set", "train.log_every_n_steps=20",
)  # fmt: skip
OFTEN = ("--set", "checkpoint.every_n_steps=50")
FATAL = ("--set", "imports=[fatal]")
SEEDS = (0, 1, 2)
WORLDS = (1, 2)
SURVIVOR_SECONDS = 30.0
"""In which a process whose partner was killed has to end."""
PRELUDE = "import os, sys, torch; sys.path.append({path!r}); os.environ.update({env!r}); torch.set_num_threads(1)"


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """Processes for this module."""
    modules = ("nnx_jax.torch.model", "nnx_jax.torch.distributed", "torch._dynamo", "sklearn.datasets")
    server = Ready(tmp_path_factory.mktemp("ready"), *modules)
    yield server
    server.close()


class Started:
    """The command on examples/digits.yaml in a folder, alone or in every process of a group."""

    def __init__(
        self, ready: Ready, folder: Path, world: int, *options: str, env: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "examples" / "digits.yaml", folder / "cfg.yaml")
        self.processes: list[Process] = []
        group = ("--distributed", "--timeout-seconds", "60") if world > 1 else ()
        port = str(free_port())
        for rank in range(world):
            mine = {"RANK": str(rank), **(env or {})}
            if world > 1:
                mine |= {"WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
                mine |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            prelude = PRELUDE.format(path=str(Path(__file__).parent), env=mine)
            self.processes.append(ready.start(folder, *OPTIONS, *group, *options, prelude=prelude))

    def codes(self) -> list[int]:
        """Wait for all; how each ended, minus the signal where one killed it."""
        return [process.wait().code for process in self.processes]

    def ended(self) -> bool:
        """Whether one has ended."""
        return any(Path(process.job["done"]).exists() for process in self.processes)

    def said(self, rank: int = 0) -> str:
        """What a process has printed to standard error."""
        path = Path(self.processes[rank].job["stderr"])
        return path.read_text(errors="backslashreplace") if path.exists() else ""

    def step(self) -> int:
        """The last update that process 0 has told of."""
        told = re.findall(r"step (\d+)", self.said())
        return int(told[-1]) if told else 0


def finish(ready: Ready, folder: Path, world: int, *options: str, env: Mapping[str, str] | None = None) -> Path:
    """Run the command to its end, from where it stands; return the run's directory."""
    begun = committed(folder) and last(run_in(folder))
    started = Started(ready, folder, world, *options, env=env)
    codes = started.codes()
    assert codes == [0] * world, "\n".join(started.said(rank) for rank in range(world))
    assert not begun or begun.final or "continues" in started.said(), started.said()
    return run_in(folder)


def run_in(folder: Path) -> Path:
    (run,) = (path for path in (folder / "runs").iterdir() if re.fullmatch("[0-9a-f]{16}", path.name))
    return run


def committed(folder: Path) -> int:
    """The update that LAST holds."""
    if not (folder / "runs").is_dir() or not list((folder / "runs").glob("[0-9a-f]*")):
        return 0
    point = last(run_in(folder))
    return 0 if point is None else point.step


def assert_sound(folder: Path) -> None:
    if committed(folder):
        run = run_in(folder)
        assert verify(run.parent, run.name) == []


def assert_same_end(left: Path, right: Path) -> None:
    """Parameters, optimizer state, counters and every record are the same bits.

    What python's, numpy's and torch's global streams hold when a process begins is no business of a run.
    """
    assert left.name == right.name
    one, two = stored(left), stored(right)
    assert set(one) == set(two)
    assert {name.split("/")[0] for name in one} >= {"params", "opt_state", "counters"}
    for name in one:
        if not name.startswith("rng/"):
            assert (one[name].dtype, one[name].tobytes()) == (two[name].dtype, two[name].tobytes()), name
    for name in ("idps.csv", "artifact.json"):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


Quiet = dict[int, tuple[Path, list[int]]]


@pytest.fixture(scope="module")
def quiet(ready: Ready, tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    """Runs that nothing disturbed, by the number of processes, and how many calls their commits took on each."""
    found: Quiet = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"quiet-{world}")
        run = finish(ready, folder, world, *OFTEN, *FATAL, env={"COUNTS": str(folder)})
        found[world] = run, [int((folder / str(rank)).read_text()) for rank in range(world)]
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_moments(seed: int, ready: Ready, quiet: Quiet, tmp_path: Path) -> None:
    """B1, C5, case:I01: SIGKILL from outside, three times in a row, in training or on the way there."""
    dice, landed, before = random.Random(seed), 0, 0
    for kill in range(3):
        started = Started(ready, tmp_path, 1, *OFTEN)
        if kill or dice.random() < 0.8:
            wait_for(lambda old=before, now=started: committed(tmp_path) > old or now.ended(), "a commit")
            time.sleep(dice.random() * 0.15)
        else:
            time.sleep(dice.random() * 2.0)
        started.processes[0].send(signal.SIGKILL)
        (code,) = started.codes()
        assert code in (-signal.SIGKILL, 0), started.said()
        landed += code != 0
        assert_sound(tmp_path)
        assert committed(tmp_path) >= before, f"seed {seed}, kill {kill}: LAST went back"
        before = committed(tmp_path)
    assert landed, f"seed {seed}: no kill met a living process"
    assert_same_end(finish(ready, tmp_path, 1, *OFTEN), quiet[1][0])


@pytest.mark.parametrize("seed", SEEDS)
def test_one_of_two_is_killed_in_a_commit(seed: int, ready: Ready, quiet: Quiet, tmp_path: Path) -> None:
    """B1, C6: first one, then the other, each at a random call of its commits; the one that is left ends in time.

    Both start again by the same command, and end with the bits of the group that nobody disturbed.
    """
    dice, before = random.Random(seed), 0
    run, calls = quiet[2]
    for victim in dice.sample(range(2), 2):
        at = dice.randrange(1, calls[victim] // 4)  # of what is left after the first, too
        started = Started(ready, tmp_path, 2, *OFTEN, *FATAL, env={"DIES_AT": f"{victim}:{at}"})
        killed, left = started.processes[victim], started.processes[1 - victim]
        assert killed.wait().code == -signal.SIGKILL, started.said(victim)
        begun = time.monotonic()
        assert left.wait().code == 1, started.said(1 - victim)
        assert time.monotonic() - begun < SURVIVOR_SECONDS
        assert "Traceback" not in started.said(1 - victim)
        assert_sound(tmp_path)
        assert committed(tmp_path) >= before, f"seed {seed}: LAST went back"
        before = committed(tmp_path)
    assert_same_end(finish(ready, tmp_path, 2, *OFTEN), run)


STOPS = [(1, (0,), 0), (2, (0,), 1), (2, (1,), 2), (2, (0, 1), 3)]


@pytest.mark.parametrize("world, asked, seed", STOPS)
def test_asked_to_stop(world: int, asked: Sequence[int], seed: int, ready: Ready, quiet: Quiet, tmp_path: Path) -> None:
    """B1, S1, S2, case:I11: SIGTERM to one or to all: one commit, at one update, and exit code 143 everywhere.

    It comes in the first epoch, before whose end nothing is committed, so the first generation is the signal's.
    """
    started = Started(ready, tmp_path, world)
    wait_for(lambda: started.step() or started.ended(), "the first updates")
    time.sleep(random.Random(seed).random() * 0.15)
    for rank in asked:
        started.processes[rank].send(signal.SIGTERM)
    codes = started.codes()
    told = [started.said(rank) for rank in range(world)]
    assert codes == [143] * world, "\n".join(told)
    assert all("SIGTERM" in text and "Traceback" not in text for text in told), "\n".join(told)
    point, whole = last(run_in(tmp_path)), last(quiet[world][0])
    assert point is not None
    assert whole is not None
    assert (point.generation, point.final, point.epoch) == (1, False, 0)
    assert 20 <= point.step < whole.step / EPOCHS
    assert_sound(tmp_path)
    assert_same_end(finish(ready, tmp_path, world), quiet[world][0])
