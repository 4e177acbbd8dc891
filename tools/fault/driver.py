"""Runs a scenario once for each fault point, in forked children of a process that has imported everything.

with Driver("tests/fault/scenario.py:commit") as driver:
    outcomes = driver.run([Point(root, Fault("kill before", at=3)), ...])
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.fault.build import build
from tools.fault.ops import Fault, Op

SERVER = Path(__file__).with_name("server.py")


@dataclass(frozen=True)
class Outcome:
    """How one request ended.

    Attributes:
        status: exit status; negative is the signal (-9: killed at the point, -15: it hung and was stopped).
        value: what the scenario returned. raised: class names of what it raised (with its bases), and `message`.
        output: what the child printed.
    """

    status: int
    value: Any = None
    raised: tuple[str, ...] = ()
    message: str = ""
    trace: str = ""
    output: str = field(default="", repr=False)

    @property
    def killed(self) -> bool:
        return self.status == -9


class Driver:
    """A fork server with the shim preloaded; use as a context manager.

    Args:
        scenario: `FILE.py:NAME` of `NAME(shim, argument) -> JSON value`.
        jobs: children at the same time.
        seconds: how long one child may take before it counts as hung.
    """

    def __init__(self, scenario: str, *, jobs: int = 2, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._files = tempfile.TemporaryDirectory(prefix="fault-")
        environment = {**os.environ, "LD_PRELOAD": str(build()), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), scenario, str(jobs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._count = 0
        if self._line() != "ready":
            raise RuntimeError("the fault server did not start")

    def run(self, arguments: Sequence[Any]) -> list[Outcome]:
        """Run the scenario once for each JSON argument; outcomes in the same order."""
        folder = Path(self._files.name)
        requests = []
        for argument in arguments:
            self._count += 1
            answer, output = (str(folder / f"{self._count}.{kind}") for kind in ("answer", "output"))
            requests.append({"argument": argument, "answer": answer, "output": output, "seconds": self._seconds})
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        found: dict[int, Outcome] = {}
        while len(found) < len(requests):
            line = self._line()
            found[line["index"]] = _outcome(line["status"], requests[line["index"]])
        return [found[index] for index in range(len(requests))]

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fault server ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the server."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()
        self._files.cleanup()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _outcome(status: int, request: dict[str, Any]) -> Outcome:
    output = Path(request["output"])
    text = output.read_text(errors="replace") if output.exists() else ""
    answer = Path(request["answer"])
    if status != 0 or not answer.exists():
        return Outcome(status, output=text)
    obj = json.loads(answer.read_text())
    return Outcome(
        status, obj.get("value"), tuple(obj.get("raised", ())), obj.get("message", ""), obj.get("trace", ""), text
    )


def occurrences(ops: Sequence[Op]) -> list[Fault]:
    """Return, for each operation of a recorded run, the filter that finds it again in another run.

    Threads change the overall number of an operation by a few; its number among the same operations on the same path
    (random parts left out) stays.
    """
    seen: dict[tuple[str, str], int] = {}
    found = []
    for op in ops:
        key = op.op, op.template
        seen[key] = seen.get(key, 0) + 1
        found.append(Fault(at=seen[key], ops=(op.op,), pattern=escape(op.template)))
    return found


def escape(template: str) -> str:
    """Return a template as a shell pattern in which only `*` is special."""
    return "".join("\\" + char if char in "[]?\\()|@+!" else char for char in template)
