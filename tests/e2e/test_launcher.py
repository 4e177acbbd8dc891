"""The launcher by itself: output, exit codes, signals, and that nothing it started outlives it. Its processes are small
scripts, so that many ways to end can be tried in seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nnx_jax import launch
from nnx_jax.loop import signals

from .command import PATIENCE, wait_for

WORKER = """
import os, signal, subprocess, sys, time
rank = int(os.environ["NNX_JAX_PROCESS"])
notes = sys.argv[1]
mine = dict(word.split("=") for word in sys.argv[2:] if word.startswith(f"{rank}:") for word in [word[2:]])

def note(text):
    with open(f"{notes}/{rank}.{text}", "w") as file:
        file.write(str(os.getpid()))

def on_signal(number, frame):
    note(signal.Signals(number).name)
    if mine.get("on_signal") != "stay":
        sys.exit(128 + number)

if "on_signal" in mine:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
if "child" in mine:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(f"{notes}/{rank}.child", "w") as file:
        file.write(str(child.pid))
print("out of", rank, flush=True)
print("err of", rank, file=sys.stderr, flush=True)
note("ready")
time.sleep(float(mine.get("wait", 0)))
while "until" in mine and not os.path.exists(f"{notes}/{mine['until']}"):
    time.sleep(0.01)
if "die" in mine:
    os.kill(os.getpid(), int(mine["die"]))
sys.stdout.write("the end without a newline" if "code" not in mine else "")
sys.exit(int(mine.get("code", 0)))
"""
FOREVER = "wait=600"


class Launching:
    """Starts the launcher on small workers; what they note down lies in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "worker.py").write_text(WORKER)
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, *words: str, processes: int = 2, options: tuple[str, ...] = (), shell: str = "", **given: Any
    ) -> Any:
        """Words are `rank:name=value`, what a worker does; `shell` starts the command, which is its "$@"."""
        command = [sys.executable, "-m", "nnx_jax.launch", "--processes", str(processes), *options, "--script"]
        command += [str(self.folder / "worker.py"), "--", str(self.notes), *words]
        command = ["sh", "-c", shell, "sh", *command] if shell else command
        env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given}
        process = subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes)
        self.started.append(process)
        return process

    def run(self, *words: str, **given: Any) -> tuple[int, str, str]:
        process = self.start(*words, **given)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    def noted(self, name: str) -> int:
        """Wait for a note; the process id in it."""
        path = self.notes / name
        return int(wait_for(lambda: path.exists() and path.read_text(), f"note {name}"))

    def has(self, name: str) -> bool:
        return (self.notes / name).exists()

    def kill(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for note in self.notes.iterdir():
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(note.read_text()), signal.SIGKILL)


@pytest.fixture
def launching(tmp_path: Path) -> Iterator[Launching]:
    found = Launching(tmp_path)
    yield found
    found.kill()


def gone(pid: int) -> bool:
    """The process has ended, or only waits to be asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_output_is_passed_on_with_tags(launching: Launching) -> None:
    """Every line begins with its process, on the stream it came from; a last line without an end gets one."""
    code, out, err = launching.run(processes=3)
    assert code == 0
    assert sorted(out.splitlines()) == sorted(
        f"[{rank}] {text}" for rank in range(3) for text in (f"out of {rank}", "the end without a newline")
    )
    assert sorted(err.splitlines()) == [f"[{rank}] err of {rank}" for rank in range(3)]


def test_output_without_tags(launching: Launching) -> None:
    """--no-tags leaves the lines as they are."""
    code, out, _ = launching.run(processes=1, options=("--no-tags",))
    assert (code, out.splitlines()) == (0, ["out of 0", "the end without a newline"])


def test_a_reader_that_left(launching: Launching) -> None:
    """A closed pipe at the other end ends nothing."""
    read, write = os.pipe()
    process = launching.start(stdout=write)
    os.close(write)
    os.close(read)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert launching.has("0.ready")


def test_closed_standard_files(launching: Launching) -> None:
    """As some service managers start programs: nothing is printed, everything runs."""
    process = launching.start("0:child=yes", stdout=None, stderr=None, shell='exec "$@" <&- >&- 2>&-')
    assert process.wait(PATIENCE) == 0
    assert launching.has("1.ready")


def test_exit_code_of_the_first_failure(launching: Launching) -> None:
    """The others get SIGTERM, and what they then end with does not hide it."""
    code, _, err = launching.run("0:on_signal=exit", f"0:{FOREVER}", "1:until=0.ready", "1:code=5")
    assert code == 5
    assert launching.has("0.SIGTERM")
    assert "nnx_jax.launch: process 1 ended with exit code 5; it was the first to fail" in err


def test_death_by_a_signal(launching: Launching) -> None:
    """128 + n, as a shell has it; and the name of the signal."""
    code, _, err = launching.run("0:die=9", f"1:{FOREVER}")
    assert code == 137
    assert "process 0 was ended by SIGKILL" in err


def test_an_abort_for_the_loss_of_another_one_is_said_to_be_one(launching: Launching) -> None:
    """JAX ends a process by SIGABRT when another one is lost; the message says so."""
    code, _, err = launching.run("0:die=6", f"1:{FOREVER}")
    assert code == 134
    assert "process 0 was ended by SIGABRT; so JAX ends a process that has lost" in err


@pytest.mark.parametrize("ends, first", [
    ([(0, -6, 10.0), (1, 3, 10.1)], 3),  # no order to speak of: the loss comes after what was lost
    ([(0, -6, 10.0), (1, 3, 11.0)], 134),
    ([(0, 0, 9.0), (1, 2, 10.0), (2, 1, 10.1)], 2),
    ([(0, 1, 10.1), (1, -9, 10.0)], 137),
    ([(0, 1, 10.0), (1, -9, 10.1)], 137),  # the others end within milliseconds of the loss
    ([(0, 1, 10.0), (1, -9, 11.0)], 1),
    ([(0, 0, 9.0), (1, 0, 10.0)], 0),
])  # fmt: skip
def test_which_failure_counts(ends: list[tuple[int, int, float]], first: int) -> None:
    """The first one; among ends that are very close, one that was killed, and no abort."""
    launching = launch._Launch(launch.parser().parse_args(["--processes", "3"]), [])
    launching.ended = {rank: launch._End(rank, code, at) for rank, code, at in ends}
    assert launching._verdict() == first


def test_one_that_ignores_sigterm(launching: Launching) -> None:
    """It is killed after the grace period, and the first failure's code stays."""
    begun = time.monotonic()
    options = ("--grace-seconds", "0.5")
    code, _, _ = launching.run("0:on_signal=stay", f"0:{FOREVER}", "1:until=0.ready", "1:code=4", options=options)
    assert code == 4
    assert launching.has("0.SIGTERM")
    assert time.monotonic() - begun < 60
    assert gone(launching.noted("0.ready"))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_are_passed_on(number: int, code: int, launching: Launching) -> None:
    """Every process gets the launcher's signal once; the launcher ends when they have, with their exit code."""
    process = launching.start(f"0:{FOREVER}", "0:on_signal=exit", f"1:{FOREVER}", "1:on_signal=exit")
    children = [launching.noted(f"{rank}.ready") for rank in range(2)]
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    assert all(launching.has(f"{rank}.{signal.Signals(number).name}") for rank in range(2))
    assert all(gone(pid) for pid in children)
    assert "first to fail" not in err


def test_a_signal_that_everybody_got_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler's SIGTERM for all processes, passed on by the launcher too, is one; a later one ends at once."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with signals.StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] += 0.9
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM
        now[0] += 0.2
        with pytest.raises(signals.Interrupted) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 143
    with signals.StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(signals.Interrupted):
            os.kill(os.getpid(), signal.SIGINT)  # somebody presses it


def test_children_of_the_processes_end_too(launching: Launching) -> None:
    """What a process started and left is ended with it: after a good end, and after a failure."""
    assert launching.run("0:child=yes", "1:until=0.child")[0] == 0
    assert gone(launching.noted("0.child"))
    assert launching.run("1:child=yes", "1:die=9", "0:until=1.child")[0] == 137
    assert gone(launching.noted("1.child"))


def test_nothing_outlives_a_killed_launcher(launching: Launching) -> None:
    """SIGKILL of the launcher: its processes get SIGTERM, then SIGKILL, and so does what they started."""
    process = launching.start(
        f"0:{FOREVER}", "0:on_signal=exit", f"1:{FOREVER}", "1:on_signal=stay", "1:child=yes",
        options=("--grace-seconds", "1"),
    )  # fmt: skip
    pids = [launching.noted(name) for name in ("0.ready", "1.ready", "1.child")]
    process.kill()
    for pid in pids:
        wait_for(lambda pid=pid: gone(pid), "the end of a process")
    assert launching.has("0.SIGTERM")
    assert launching.has("1.SIGTERM")


def test_a_hangup_under_nohup(launching: Launching) -> None:
    """A signal that was ignored when the launcher began stays so."""
    process = launching.start("0:wait=1", "1:wait=1", shell="trap '' HUP; exec \"$@\"")
    launching.noted("1.ready")
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE) == 0


WRONG_USE = [
    ((), "the following arguments are required: --processes"),
    (("--processes", "0"), "argument --processes: got 0; at least 1"),
    (("--processes", "2", "--config", "x.yaml"), "--config x.yaml is no option of the launcher; the command's own"),
    (("--processes", "2", "--timeout-seconds", "nan"), "got nan; a finite number of seconds above 0"),
    (("--processes", "2", "--module", "a", "--script", "b"), "not allowed with argument"),
]


@pytest.mark.parametrize("words, text", WRONG_USE, ids=[text[:20] for _, text in WRONG_USE])
def test_wrong_use(words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and what to write instead, before anything is started."""
    with pytest.raises(SystemExit) as end:
        launch.main(words)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_what_is_run() -> None:
    """Our command with --distributed once; another module and a script as they are."""
    parse: Callable[..., Any] = lambda *words: launch.parser().parse_args(["--processes", "2", *words])  # noqa: E731
    train = [sys.executable, "-m", "nnx_jax.train", "--distributed", "--config", "a"]
    assert launch.command(parse(), ["--config", "a"]) == train
    assert launch.command(parse(), ["--distributed", "--config", "a"]) == train
    assert launch.command(parse(), ["--config", "a", "--distributed"]).count("--distributed") == 1
    assert launch.command(parse("--module", "mine"), ["x"]) == [sys.executable, "-m", "mine", "x"]
    assert launch.command(parse("--script", "mine.py"), []) == [sys.executable, "mine.py"]


def test_what_a_process_is_told() -> None:
    """Its place; CPU devices and accelerators of its own; what the user set stays."""
    args = launch.parser().parse_args(["--processes", "2", "--devices-per-process", "3", "--timeout-seconds", "7"])
    env = launch.environment(args, 1, 4321, {"PATH": "/bin"})
    assert env == {
        "PATH": "/bin",
        "NNX_JAX_COORDINATOR": "127.0.0.1:4321",
        "NNX_JAX_PROCESSES": "2",
        "NNX_JAX_PROCESS": "1",
        "NNX_JAX_TIMEOUT_SECONDS": "7.0",
        "LOCAL_RANK": "1",
        "PYTHONUNBUFFERED": "1",
        "JAX_NUM_CPU_DEVICES": "3",
        "JAX_LOCAL_DEVICE_IDS": "3,4,5",
    }
    plain = launch.parser().parse_args(["--processes", "2"])
    assert launch.environment(plain, 1, 1, {"JAX_LOCAL_DEVICE_IDS": "0"})["JAX_LOCAL_DEVICE_IDS"] == "0"
    assert launch.environment(plain, 1, 1, {})["JAX_LOCAL_DEVICE_IDS"] == "1"
    alone = launch.parser().parse_args(["--processes", "1"])
    assert not {"JAX_LOCAL_DEVICE_IDS", "JAX_NUM_CPU_DEVICES"} & set(launch.environment(alone, 0, 1, {}))


def test_the_launcher_is_light() -> None:
    """It loads the standard library and next to nothing else; what it starts loads the rest, once in each process."""
    code = (
        "import sys, json, nnx_jax.launch as launch; launch.parser().format_help();"
        "print(json.dumps([n for n in sys.modules if n.split('.')[0] not in sys.stdlib_module_names]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    ours = set(json.loads(done.stdout)) - {"__mp_main__"}
    assert {name for name in ours if name.startswith(("nnx_jax", "jax", "numpy", "flax"))} == {
        "nnx_jax", "nnx_jax.launch", "nnx_jax.train",
    }  # fmt: skip


def test_the_page_knows_every_option() -> None:
    """And no other one."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    table = page[page.index("| option |") : page.index("- Ctrl-C and SIGTERM")]
    options = {name for name in launch.parser()._option_string_actions if name.startswith("--")} - {"--help"}
    assert set(re.findall(r"--[a-z][a-z-]+", table)) == options
