"""The trainings of several processes: each is started as a command, makes the model itself, and leaves run directories.

`python -m nnx_jax.testing.group FOLDER` is what they run: nobody else needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from safetensors import numpy as safetensors

from nnx_jax.core import codec, fsio
from nnx_jax.core.errors import ConfigError, ProcessGroupError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.params.train import NNTrainParams
from nnx_jax.testing.cases import Case, Setting, fresh, train

_TASK = "task.json"


def train_in_processes(
    setting: Setting, given: tuple[Any, Any], cases: Sequence[Case], folder: Path, *, timeout: float
) -> None:
    """Train cases of equally many processes and devices; their runs lie where `cases.place` says.

    Args:
        given: the functions that make the model and the hooks.

    Raises:
        ConfigError: a function that another process cannot import.
        ProcessGroupError: a process failed; with the end of what it printed.
    """
    case = cases[0]
    home = folder / f"processes-{case.processes}-{case.devices}"
    fsio.make_dir(home)
    columns = {"train": setting.train, "val": setting.val}
    for name, dataset in columns.items():
        if dataset is not None:
            fsio.create_file(home / f"{name}.safetensors", safetensors.save(_columns(dataset)))
    task = {
        "model": reference(given[0], "model"),
        "hooks": None if given[1] is tuple else reference(given[1], "hooks"),
        "params": setting.params.to_yaml(),
        "rows": setting.rows,
        "shards": setting.shards,
        "classes": [None if data is None else getattr(data, "n_classes", None) for data in columns.values()],
        "cases": [asdict(case) for case in cases],
        "folder": str(folder),
    }
    fsio.create_file(home / _TASK, codec.dump_json(task).encode())
    _run(home, case, timeout)


def reference(function: Any, argument: str) -> str:
    """`module:name` of a function at the top of a module.

    Raises:
        ConfigError: it is none.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found = sys.modules.get(module) if module and module != "__main__" else None
    if found is None or getattr(found, name, None) is not function:
        raise ConfigError(
            f"got {type(function).__name__} {name or function!r}, which another process cannot import; for several "
            "processes give a function at the top of a module",
            path=argument,
        )
    return f"{module}:{name}"


def _columns(dataset: Any) -> dict[str, Any]:
    columns = dataset.arrays()
    return dataset.take(range(len(dataset))) if columns is None else dict(columns)


def _run(home: Path, case: Case, timeout: float) -> None:
    """Start the processes, wait for them, and end those that are left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = len(os.sched_getaffinity(0))
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": str(case.devices // case.processes),
        # As many threads as here: XLA splits a long sum among them, so with another number it has other bits.
        "PJRT_NPROC": os.environ.get("PJRT_NPROC", str(max(cores, len(jax.local_devices())))),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "NNX_JAX_COORDINATOR": f"127.0.0.1:{port}",
        "NNX_JAX_PROCESSES": str(case.processes),
    }
    command = [sys.executable, "-m", "nnx_jax.testing.group", str(home)]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(case.processes)]
        started = [
            subprocess.Popen(command, env=environment | {"NNX_JAX_PROCESS": str(rank)}, stdout=log, stderr=log)
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(timeout) for process in started]
        except subprocess.TimeoutExpired as late:
            raise ProcessGroupError(f"{case} did not end within {timeout:g} s; give more timeout_seconds") from late
        finally:
            for process in started:
                process.kill()
                process.wait()
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
            if code:
                log.seek(0)
                told = log.read()[-2000:].decode("utf-8", "replace")
                raise ProcessGroupError(f"process {rank} of '{case}' ended with {code}:\n{told}")


def work(home: Path) -> None:
    """What one process does: join the others, train every case, leave."""
    from nnx_jax import distributed

    distributed.init_process_group()
    task = codec.load_json(home / _TASK)
    rows = [
        ArrayDataset(safetensors.load(fsio.read_bytes(path)), n_classes=classes) if path.exists() else None
        for name, classes in zip(("train", "val"), task["classes"], strict=True)
        for path in [home / f"{name}.safetensors"]
    ]
    make = _imported(task["model"])
    setting = Setting(
        make=lambda: fresh(make, None),
        train=rows[0],  # pyright: ignore[reportArgumentType]  # there always is one
        val=rows[1],
        params=NNTrainParams.from_yaml(task["params"]),
        rows=task["rows"],
        shards=task["shards"],
        hooks=tuple if task["hooks"] is None else _imported(task["hooks"]),
    )
    for case in task["cases"]:
        train(setting, Case(**case), Path(task["folder"]), distributed=distributed.DDP())
    distributed.shutdown()


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
