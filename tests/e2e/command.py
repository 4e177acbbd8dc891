"""The command as tests use it: a small configuration on disk, runs in this process, in ready ones and in fresh ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import NnxError
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.pointers import Pointer, read_pointer
from nnx_jax.runs.resume import read_point
from nnx_jax.train import main

PATIENCE = 300.0
"""Seconds until a wait is given up: long, because the machine may be busy; nothing waits for it when all is well."""
UPDATES, EPOCHS = 6, 3

CONFIG = """\
imports: [pacing]
model:
  net: {kind: feed_forward, hidden_dims: [6], dropout_prob: 0.25, norm: batch}
  loss: cross_entropy
  metrics: [accuracy]
data:
  train: {kind: npz, path: train.npz}
  val: {kind: csv, path: val.csv, target: label}
  test: {kind: npz, path: test.npz}
  batch_size: 4
train:
  n_epochs: 3
  seed: 7
  optim: {kind: adamw, max_lr: 1e-2, grad_clip_norm: 1.0}
  scheduler: {kind: step, step_size: 5, clock: optimizer_update}
"""

PACING = '''
"""A callback that waits: at the start of epoch `at` until a file appears, having made another one."""
import time
from pathlib import Path
from nnx_jax.core.registry import register
from nnx_jax.loop.callbacks import Callback
from nnx_jax.params.callbacks import CallbackParams

@register("gate")
class GateParams(CallbackParams):
    at: int
    reached: str
    go: str

    def __call__(self):
        return Gate(self)

class Gate(Callback):
    def __init__(self, params):
        self.params = params

    def on_epoch_begin(self, ctx):
        if ctx.epoch == self.params.at:
            Path(self.params.reached).touch()
            while not Path(self.params.go).exists():
                time.sleep(0.005)
'''


def rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian rows of 4 columns whose label is the largest of the first 3."""
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return x, x[:, :3].argmax(axis=1).astype(np.int32)


def write_case(folder: Path) -> Path:
    """Write the configuration, its data and its module into `folder`; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", 23, 0), ("test", 10, 2)):
        x, y = rows(count, seed)
        np.savez(folder / f"{name}.npz", x=x, y=y)
    x, y = rows(9, 1)
    lines = [",".join([*map(repr, map(float, row)), str(label)]) for row, label in zip(x, y, strict=True)]
    (folder / "val.csv").write_text("\n".join(["a,b,c,d,label", *lines]) + "\n")
    (folder / "pacing.py").write_text(PACING)
    (folder / "cfg.yaml").write_text(CONFIG)
    return folder


def gate(at: int, name: str = "gate") -> list[str]:
    """Options that make a run wait at the start of epoch `at` for `<name>.go`, after making `<name>.reached`."""
    return ["--set", f"callbacks=[{{kind: gate, at: {at}, reached: {name}.reached, go: {name}.go}}]"]


@dataclass
class Done:
    """How a command ended: exit code (minus the signal when one killed it), and what it printed."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """The JSON of the last line of standard output."""
        return json.loads(self.out.splitlines()[-1])


def quick_compiles() -> contextlib.AbstractContextManager[Any]:
    """Keep every compiled program of this process in the tests' cache, however small."""
    import jax

    @contextlib.contextmanager
    def cached() -> Iterator[None]:
        config: Any = jax.config
        names = ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
        before = [getattr(config, name) for name in names]
        for name, value in zip(names, (0.0, -1), strict=True):
            config.update(name, value)
        yield
        for name, value in zip(names, before, strict=True):
            config.update(name, value)

    return cached()


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: this one's, with a compile cache that keeps small programs too."""
    cache = {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split()]),
    }
    return {**os.environ, **cache, **more}


class Here:
    """Runs the command in this process, in a folder."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.folder, self.capture = folder, capture
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))

    def __call__(self, *options: str, config: str | None = "cfg.yaml") -> Done:
        self.capture.readouterr()
        try:
            code = main([*(["--config", config] if config else []), *options])
        except SystemExit as end:
            code = int(end.code or 0)
        return Done(code, *self.capture.readouterr())


class Process:
    """A command in a process of its own that was forked by `Ready`."""

    def __init__(self, job: dict[str, Any], pid: int) -> None:
        self.job, self.pid = job, pid

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not Path(self.job["done"]).exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self) -> Done:
        """Wait for the end."""
        done = Path(self.job["done"])
        try:
            wait_for(done.exists, "the command to end")
        except BaseException:
            self.send(signal.SIGKILL)
            raise
        out, err = (_text(Path(self.job[name])) for name in ("stdout", "stderr"))
        return Done(int(done.read_text()), out, err)


class Ready:
    """Starts commands in processes that need not import anything any more, `modules` neither; see `ready.py`."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder, self.count = folder, 0
        command = [sys.executable, str(Path(__file__).with_name("ready.py")), *modules]
        self._errors = open(folder / "server.err", "w")  # noqa: SIM115
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment()
        )

    def start(self, cwd: Path, *options: str, prelude: str = "", stderr: str | None = None) -> Process:
        """Start the command with `cfg.yaml`; `prelude` is run in its process before it."""
        self.count += 1
        job: dict[str, Any] = {"argv": ["--config", "cfg.yaml", *options], "cwd": str(cwd), "prelude": prelude}
        job |= {name: str(self.folder / f"{self.count}.{name}") for name in ("stdout", "stderr", "done")}
        job["stderr"] = stderr or job["stderr"]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job).encode() + b"\n")
        self._server.stdin.flush()
        return Process(job, int(self._server.stdout.readline()))

    def run(self, cwd: Path, *options: str, prelude: str = "") -> Done:
        """Run the command to its end."""
        return self.start(cwd, *options, prelude=prelude).wait()

    def close(self) -> None:
        """End the server and whatever it still runs."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(PATIENCE)
        self._server.stdout.close()
        self._errors.close()


def fresh(cwd: Path, *options: str, **given: Any) -> subprocess.Popen[bytes]:
    """Start `python -m nnx_jax.train` from nothing, in a session of its own."""
    command = [sys.executable, "-m", "nnx_jax.train", "--config", "cfg.yaml", *options]
    given.setdefault("stdout", subprocess.PIPE)
    given.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen(command, cwd=cwd, env=environment(**given.pop("env", {})), start_new_session=True, **given)


def wait_for(true: Callable[[], Any], what: str) -> Any:
    """Wait until `true()` is, and return it."""
    end = time.monotonic() + PATIENCE
    while not (value := true()):
        assert time.monotonic() < end, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.005)
    return value


def last(run: Path) -> Pointer | None:
    """LAST of a run's directory, None before the first commit."""
    try:
        return read_pointer(RunPaths(run.parent, run.name), "LAST")
    except (NnxError, OSError):
        return None


def stored(run: Path) -> dict[str, np.ndarray]:
    """Every array of LAST, verified, by name."""
    return read_point(RunPaths(run.parent, run.name)).load_all()


def assert_same_end(left: Path, right: Path) -> None:
    """Two finished runs hold the same bits: every array of LAST, every byte of the history, the same result."""
    one, two = stored(left), stored(right)
    assert set(one) == set(two)
    for name in one:
        assert (one[name].dtype, one[name].tobytes()) == (two[name].dtype, two[name].tobytes()), name
    for name in ("idps.csv", "artifact.json"):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes and time of change, every folder as None."""
    files = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): _content(path) if path.is_file() else None for path in files}


def _content(path: Path) -> bytes:
    return path.read_bytes() + str(path.stat().st_mtime_ns).encode()


def runs_of(folder: Path) -> list[Path]:
    """The run directories in `folder/runs`."""
    return sorted(path for path in (folder / "runs").glob("[0-9a-f]" * 16) if path.is_dir())


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "backslashreplace") if path.is_file() else ""


def epochs_line(lines: Sequence[str]) -> list[str]:
    """The lines that tell of an epoch."""
    return [line for line in lines if line.startswith("epoch ")]
