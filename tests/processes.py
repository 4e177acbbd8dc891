"""Real processes for tests: N of them join a group, call one function of a test module, and tell what it returned.

    done = run("tests.spmd.some:function", 2, devices=2, args={"seed": 3}, timeout=60)
    assert [each.code for each in done] == [0, 0]
    assert done[1].result == {...}          # the function's JSON value, by rank

The function is called with `args` after the process has joined; `nnx_jax.distributed` and `jax` are then ready, or
`nnx_jax.torch.distributed` and `torch` where `framework` is "torch", with the environment that torchrun makes. A start
costs seconds on a small machine: let one start show many things. Nothing is left behind, whatever happens.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_")
SCRUBBED = (
    *TORCHRUN,
    "NNX_JAX_",
    "SLURM_",
    "OMPI_",
    "JAX_COORDINATOR",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "XLA_FLAGS",
)


@dataclass(frozen=True)
class Ended:
    """How one process ended.

    Attributes:
        code: exit code, minus the signal's number when one killed it (ours at the timeout: -9).
        result: JSON value that the function returned; None when it did not return.
        err, out: end of what it printed.
        seconds: from the start to its end.
    """

    rank: int
    code: int
    result: Any
    err: str
    out: str
    seconds: float


class Group:
    """Processes that run; `with Group(...) as group: ...; group.wait(60)`. Leaving it kills what still runs."""

    def __init__(
        self,
        function: str,
        world: int,
        *,
        devices: int = 1,
        args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = 60,
        ranks: tuple[int, ...] | None = None,
        framework: str = "jax",
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="nnx-jax-processes-"))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.begun = time.monotonic()
        self.ended: dict[int, float] = {}
        base = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
        base |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *base.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(
                os.pathsep
            ),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "TESTS_FRAMEWORK": framework,
            "TESTS_FUNCTION": function,
            "TESTS_ARGS": json.dumps(dict(args or {})),
            "TESTS_TIMEOUT": str(timeout_seconds),
        }
        port = str(free_port())
        if framework == "torch":
            base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
        else:
            base |= {"NNX_JAX_COORDINATOR": f"127.0.0.1:{port}", "NNX_JAX_PROCESSES": str(world)}
        watched, self._held = os.pipe()  # it ends with this process, however that ends, and so do the others then
        for rank in ranks if ranks is not None else range(world):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
            mine = mine if framework == "torch" else {"NNX_JAX_PROCESS": str(rank)}
            mine["TESTS_RESULT"] = str(self.folder / f"{rank}.json")
            mine |= {name: value.replace("{rank}", str(rank)) for name, value in (env or {}).items()}
            with open(self.folder / f"{rank}.err", "wb") as err, open(self.folder / f"{rank}.out", "wb") as out:
                self.processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", "tests.processes"],
                    cwd=ROOT, env=base | mine, stdin=watched, stdout=out, stderr=err, start_new_session=True,
                )  # fmt: skip
        os.close(watched)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._held)
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill every process that still runs, and all that they started."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def send(self, rank: int, number: int) -> None:
        """Send a signal to one process."""
        self.processes[rank].send_signal(number)

    def wait(self, timeout: float) -> list[Ended]:
        """Wait for all, by rank; whoever still runs after so many seconds is killed."""
        return wait_for_all({"": self}, timeout)[""]

    def look(self) -> set[int]:
        """Note who has ended; return who still runs."""
        for rank, process in self.processes.items():
            if rank not in self.ended and process.poll() is not None:
                self.ended[rank] = time.monotonic() - self.begun
        return set(self.processes) - set(self.ended)

    def outcome(self) -> list[Ended]:
        """Kill whoever still runs; how each ended, by rank."""
        self.kill()
        return [self._ended(rank) for rank in sorted(self.processes)]

    def _ended(self, rank: int) -> Ended:
        told = self.folder / f"{rank}.json"
        result = json.loads(told.read_text()) if told.exists() else None
        err, out = (_tail(self.folder / f"{rank}.{name}") for name in ("err", "out"))
        seconds = self.ended.get(rank, time.monotonic() - self.begun)
        return Ended(rank, int(self.processes[rank].returncode), result, err, out, seconds)


def run(
    function: str,
    world: int,
    devices: int = 1,
    args: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    timeout_seconds: float = 60,
    framework: str = "jax",
) -> list[Ended]:
    """Run `module:name` in `world` processes of `devices` CPU devices each; how each ended, by rank.

    Args:
        args: keyword arguments of the function, JSON values.
        env: more environment variables; "{rank}" in a value is the process's number.
        timeout: seconds after which what still runs is killed.
        timeout_seconds: of the group: bound of every wait inside it.
        framework: "jax" or "torch", whose group it is.
    """
    more: dict[str, Any] = {"timeout_seconds": timeout_seconds, "framework": framework}
    with Group(function, world, devices=devices, args=args, env=env, **more) as group:
        return group.wait(timeout)


def results(function: str, world: int, **given: Any) -> list[Any]:
    """What the function returned, by rank; an assertion error with what they printed unless all ended well."""
    ended = run(function, world, **given)
    assert all(each.code == 0 for each in ended), "\n".join(f"[{each.rank}] {each.code}\n{each.err}" for each in ended)
    return [each.result for each in ended]


def wait_for_all(
    groups: Mapping[str, Group], timeout: float, hanging: Mapping[str, int] | None = None
) -> dict[str, list[Ended]]:
    """Wait for several groups at once.

    Args:
        hanging: the rank, by group, that is not waited for, since it will not end.
    """
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        running = {name: group.look() - {(hanging or {}).get(name)} for name, group in groups.items()}
        if not any(running.values()):
            break
        time.sleep(0.02)
    return {name: group.outcome() for name, group in groups.items()}


def wait_until_said(group: Group, word: bytes, timeout: float = 120) -> None:
    """Wait until every process has printed a word; an assertion error with what they printed if one ends before."""
    end = time.monotonic() + timeout
    silent = dict(group.processes)
    while silent:
        for rank, process in list(silent.items()):
            if word in (group.folder / f"{rank}.out").read_bytes():
                del silent[rank]
            else:
                lasts = process.poll() is None and time.monotonic() < end
                assert lasts, f"[{rank}] {process.poll()}\n{_tail(group.folder / f'{rank}.err')}"
        time.sleep(0.02)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(path: Path, size: int = 6000) -> str:
    return path.read_bytes()[-size:].decode("utf-8", "backslashreplace") if path.exists() else ""


def _end_with_the_tests() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _main() -> None:
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    torch = os.environ["TESTS_FRAMEWORK"] == "torch"
    distributed: Any = importlib.import_module("nnx_jax.torch.distributed" if torch else "nnx_jax.distributed")
    module, _, name = os.environ["TESTS_FUNCTION"].partition(":")
    distributed.init_process_group(timeout_seconds=float(os.environ["TESTS_TIMEOUT"]))
    told = Path(os.environ["TESTS_RESULT"])
    result = getattr(importlib.import_module(module), name)(**json.loads(os.environ["TESTS_ARGS"]))
    told.with_suffix(".part").write_text(json.dumps(result))
    told.with_suffix(".part").replace(told)
    if "TESTS_STAY" not in os.environ:  # till the script's own end
        distributed.shutdown()


if __name__ == "__main__":
    _main()
