"""python -m nnx_jax.launch: one command in several processes on this machine, which end together whatever happens.

Every process is the head of a process group of its own, so that a Ctrl-C reaches it once, through the launcher, and so
that what it started ends with it. A guardian, forked before anything else, reads a pipe that only the launcher holds:
were the launcher killed, the pipe would end, and the guardian would end the processes in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from nnx_jax.train import fill_standard_files

TRAIN = "nnx_jax.train"
EXIT_USAGE, EXIT_FAILED = 2, 1
_SETTLE_SECONDS = 2.0
"""How long the others may take to end by themselves, in their own words, once one has failed."""
_TIE_SECONDS = 0.2
"""Ends that are closer have no order: one that was killed comes before those that end for the loss of it."""
_DRAIN_SECONDS = 5.0
_NOISE = b"[Gloo] Rank "
"""Beginning of what JAX's CPU collectives print on standard output for each connection, and what nobody asked for."""
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP")


def parser() -> argparse.ArgumentParser:
    """The launcher's own options; importing this module imports neither jax nor the project's other parts."""
    build = argparse.ArgumentParser(
        prog="python -m nnx_jax.launch",
        usage="%(prog)s --processes N [options] -- --config FILE [options of nnx_jax.train]",
        description="Train one model in several processes on this machine: starts N times `python -m nnx_jax.train "
        "--distributed` with the options behind `--`. A cluster's scheduler (srun, mpirun, pods) starts that command "
        "itself.",
        epilog="Exit code: 0 when all processes end so, else that of the first failure (128 + n for signal n). Signals "
        "are passed on to all processes.",
        allow_abbrev=False,
    )
    add = build.add_argument
    add("--processes", type=_count, required=True, metavar="N", help="how many processes")
    add(
        "--devices-per-process",
        type=_count,
        metavar="D",
        help="CPU: how many devices each process makes of it; accelerators: how many each gets (default there: 1)",
    )
    add("--timeout-seconds", type=_seconds, metavar="T", help="bound of every wait for another process (default: 120)")
    add(
        "--grace-seconds",
        type=_seconds,
        default=10.0,
        metavar="G",
        help="when one process has failed: from SIGTERM to SIGKILL of the others (default: 10)",
    )
    what = build.add_mutually_exclusive_group()
    what.add_argument("--module", default=TRAIN, metavar="M", help=f"another module to run (default: {TRAIN})")
    what.add_argument("--script", metavar="FILE", help="a script to run; it calls nnx_jax.distributed itself")
    add("--no-tags", action="store_true", help="do not begin each line of output with its process, as in '[1] '")
    return build


def main(argv: Sequence[str] | None = None) -> int:
    """Run the processes to their end; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, rest = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    args, unknown = parser().parse_known_args(own)
    if unknown:
        parser().error(f"{' '.join(unknown)} is no option of the launcher; the command's own options stand behind --")
    fill_standard_files()
    return _Launch(args, rest).run()


def command(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """What every process runs."""
    if args.script is not None:
        return [sys.executable, args.script, *rest]
    joins = ["--distributed"] if args.module == TRAIN and "--distributed" not in rest else []
    return [sys.executable, "-m", args.module, *joins, *rest]


def environment(args: argparse.Namespace, rank: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of one process."""
    env = {
        **base,
        "NNX_JAX_COORDINATOR": f"127.0.0.1:{port}",
        "NNX_JAX_PROCESSES": str(args.processes),
        "NNX_JAX_PROCESS": str(rank),
        "LOCAL_RANK": str(rank),
        "PYTHONUNBUFFERED": "1",
    }
    if args.timeout_seconds is not None:
        env["NNX_JAX_TIMEOUT_SECONDS"] = repr(args.timeout_seconds)
    if args.devices_per_process is not None:
        env["JAX_NUM_CPU_DEVICES"] = str(args.devices_per_process)
    if args.processes > 1:
        each = args.devices_per_process or 1
        env.setdefault("JAX_LOCAL_DEVICE_IDS", ",".join(str(rank * each + device) for device in range(each)))
    return env


@dataclass
class _End:
    """How one process ended."""

    rank: int
    code: int
    at: float

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 + n for signal n."""
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.code >= 0:
            return f"process {self.rank} ended with exit code {self.code}"
        name = signal.Signals(-self.code).name
        lost = "; so JAX ends a process that has lost process 0 or another one" if name == "SIGABRT" else ""
        return f"process {self.rank} was ended by {name}{lost}"


class _Launch:
    """One launch."""

    def __init__(self, args: argparse.Namespace, rest: Sequence[str]) -> None:
        self.args, self.rest = args, list(rest)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.threads: list[threading.Thread] = []
        self.news: queue.SimpleQueue[_End] = queue.SimpleQueue()
        self.ended: dict[int, _End] = {}
        self.asked: int | None = None
        self._printing = threading.Lock()

    def run(self) -> int:
        """Start all, wait for all; nothing is left running."""
        with _Guardian(self.args.grace_seconds) as guardian, self._signals():
            try:
                self._start(guardian)
                self._watch()
            finally:
                self._kill()
                for thread in self.threads:
                    thread.join(_DRAIN_SECONDS)
        return self._verdict()

    def _start(self, guardian: _Guardian) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.args.processes):
            process = subprocess.Popen(
                command(self.args, self.rest),
                env=environment(self.args, rank, port, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
            self.processes.append(process)
            guardian.began(process.pid)
            self._thread(self._wait, rank, process, guardian)
            for stream, descriptor in ((process.stdout, 1), (process.stderr, 2)):
                self._thread(self._pass_on, rank, stream, descriptor)
            if self.asked is not None:  # the signal came while it was started
                process.send_signal(self.asked)

    def _thread(self, work: Any, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        self.threads.append(thread)

    def _wait(self, rank: int, process: subprocess.Popen[bytes], guardian: _Guardian) -> None:
        code = process.wait()
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started and left
        guardian.ended(process.pid)
        self.news.put(_End(rank, code, at))

    def _pass_on(self, rank: int, stream: IO[bytes], descriptor: int) -> None:
        tag = b"" if self.args.no_tags else b"[%d] " % rank
        while line := stream.readline(1 << 16):
            if line.startswith(_NOISE):
                continue
            whole = tag + line if line.endswith(b"\n") else tag + line + b"\n"
            with self._printing, contextlib.suppress(OSError):  # a reader that left must not end a run
                while whole:
                    whole = whole[os.write(descriptor, whole) :]

    def _watch(self) -> None:
        """Return when all have ended; once one has failed the others are made to, within a bound."""
        due: list[tuple[float, int]] = []
        failed = False
        while len(self.ended) < len(self.processes):
            with contextlib.suppress(queue.Empty):
                wait = min(0.5, due[0][0] - time.monotonic()) if due else 0.5
                end = self.news.get(timeout=max(0.01, wait))
                self.ended[end.rank] = end
                if end.code and not failed:
                    failed, term = True, end.at + _SETTLE_SECONDS
                    due = [(term, signal.SIGTERM), (term + self.args.grace_seconds, signal.SIGKILL)]
            if due and time.monotonic() >= due[0][0]:
                self._send(due.pop(0)[1])

    def _send(self, number: int) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.ended:
                process.send_signal(number)

    def _kill(self) -> None:
        """Whatever went wrong here: no process stays."""
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals on to every process; those that were ignored before stay so, as under nohup."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self.asked = number
            self._send(number)

        before: dict[int, Any] = {}
        for name in _FORWARDED:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, pass_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _verdict(self) -> int:
        failures = sorted((end for end in self.ended.values() if end.code), key=lambda end: end.at)
        if not failures:
            return 0
        tied = [end for end in failures if end.at <= failures[0].at + _TIE_SECONDS]
        first = min(tied, key=lambda end: (end.code == -signal.SIGABRT, end.code > 0, end.at))
        if self.asked is None:
            with contextlib.suppress(OSError):
                os.write(2, f"nnx_jax.launch: {first}; it was the first to fail\n".encode())
        return first.exit_code


class _Guardian:
    """A process that ends the others should the launcher be killed."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._pid, self._pipe = 0, -1

    def __enter__(self) -> _Guardian:
        read, self._pipe = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._pipe)
                self._guard(read)
            finally:
                os._exit(0)
        os.close(read)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)
        os.waitpid(self._pid, 0)

    def began(self, pid: int) -> None:
        """A process, the head of its own group, was started."""
        self._tell(b"+%d\n" % pid)

    def ended(self, pid: int) -> None:
        """It has ended."""
        self._tell(b"-%d\n" % pid)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # it was killed; there is then one protection less
            os.write(self._pipe, line)

    def _guard(self, read: int) -> None:
        os.setsid()  # the terminal's signals are the launcher's
        for name in _FORWARDED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        running: set[int] = set()
        with os.fdopen(read, "rb") as news:
            for line in news:
                (running.add if line[:1] == b"+" else running.discard)(int(line[1:]))
        end = time.monotonic() + self._grace_seconds
        _signal_groups(running, signal.SIGTERM)
        while (running := _signal_groups(running, 0)) and time.monotonic() < end:
            time.sleep(0.05)
        _signal_groups(running, signal.SIGKILL)


def _signal_groups(groups: set[int], number: int) -> set[int]:
    """Send a signal to process groups; return those that there are."""
    there = set()
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            there.add(group)
    return there


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}; at least 1")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"got {text}; a finite number of seconds above 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
