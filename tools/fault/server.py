"""The process that dies by parts: imports everything once, then forks one child for each request.

Started by driver.py with the shim preloaded, as a script. Requests and answers are JSON lines on stdin and stdout.
A scenario is `FILE.py:NAME`, called as `NAME(shim, request) -> JSON value` in the child; heavy imports belong at the
head of its file, and no accelerator backend may start before the fork.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.fault.ops import Shim


def load(place: str) -> Callable[[Shim, Any], Any]:
    """Import the function a `FILE.py:NAME` names."""
    file, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("fault_scenario", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def run_child(scenario: Callable[[Shim, Any], Any], shim: Shim, request: dict[str, Any]) -> None:
    """Run one request and leave its answer in a file; never returns."""
    out = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    try:
        answer = {"value": scenario(shim, request["argument"])}
    except BaseException as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        answer = {"raised": names, "message": str(error), "trace": traceback.format_exc()}
    shim.disarm()
    Path(request["answer"]).write_text(json.dumps(answer))
    os._exit(0)


def serve(place: str, jobs: int) -> None:
    """Answer batches until stdin ends: each line a list of requests, each answer line one finished request."""
    shim = Shim(os.environ.pop("LD_PRELOAD"))
    scenario = load(place)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        waiting = list(enumerate(json.loads(line)))
        running: dict[int, tuple[int, float]] = {}
        while waiting or running:
            while waiting and len(running) < jobs:
                index, request = waiting.pop(0)
                pid = os.fork()
                if pid == 0:
                    run_child(scenario, shim, request)
                running[pid] = index, time.monotonic() + request["seconds"]
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                index, _ = running.pop(pid)
                print(json.dumps({"index": index, "status": os.waitstatus_to_exitcode(status)}), flush=True)
                continue
            for child, (_, deadline) in running.items():
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGTERM)  # told apart from a kill by the shim
            time.sleep(0.005)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
