"""Keeps the imports of the command ready: each request forks a process that runs `python -m nnx_jax.train`.

Only imports are shared. The parent starts no JAX backend and no thread, so a fork is as good as a fresh start, without
its seconds. Arguments are more modules to import. Requests are JSON lines on standard input; the pid comes back; the
exit code goes to a file.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import sys
from pathlib import Path
from typing import Any

import grain.python  # noqa: F401
import orbax.checkpoint  # noqa: F401

import nnx_jax.model  # noqa: F401


def become(job: dict[str, Any]) -> None:
    """Run the command of one request in this (forked) process, ending as the interpreter would."""
    os.chdir(job["cwd"])
    for descriptor, where in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT
        opened = os.open(where, flags | os.O_NOCTTY, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, job["cwd"])
    exec(job["prelude"], {"__name__": "prelude"})
    sys.argv = ["nnx_jax.train", *job["argv"]]
    runpy.run_module("nnx_jax.train", run_name="__main__", alter_sys=True)


def serve() -> dict[str, Any] | None:
    """Fork for each request and note how each child ended; return the job to do in a child, None at the end."""
    jobs: dict[int, dict[str, Any]] = {}
    while True:
        if select.select([0], [], [], 0.01)[0]:
            line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]  # unbuffered: select must see the rest
            if not line:
                for pid in jobs:
                    os.kill(pid, signal.SIGKILL)
                return None
            job = json.loads(line)
            if not (pid := os.fork()):
                return job
            jobs[pid] = job
            os.write(1, b"%d\n" % pid)
        while jobs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            done = Path(jobs.pop(pid)["done"])
            done.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
            done.with_suffix(".new").rename(done)


for name in sys.argv[1:]:
    importlib.import_module(name)

if __name__ == "__main__" and (mine := serve()) is not None:
    become(mine)
