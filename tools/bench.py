"""Time the trainer against the loop you would have written by hand: same step, same batches, one process, interleaved.

    python tools/bench.py [--case NAME] [--json] [--rounds N]
    python tools/bench.py --peer nnx    # another trainer on the same job; see bench_peer.py

A step case trains through the public `NNModel.train`, with history, progress and one commit an epoch. After each of its
epochs a callback runs as many steps of a bare loop: a jitted, donated step over a dict of arrays, fed with numpy
batches gathered on the host, which keeps no history and waits for the device once an epoch. Both start from equal
weights, see the same rows in the same order, and must agree on the first loss. What the trainer does between two epochs
(reading records, writing history, handing the commit over, waiting for the one before) counts as its time; the first
epoch of both, which compiles, does not.

The case `hooks` trains with bfloat16, windows of 4 microbatches, clipping, averaged weights and spike skipping, all of
them hooks of the trainer; its bare loop has the same arithmetic written by hand in two jitted functions. The case
`canonical` times steps of `reduction: canonical` beside the fast ones; see bench_canonical.py.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bare_loops import CLIP, DECAY, FACTOR, MEMORY, RATE, WARMUP, Bare, BareHooks
from bench_canonical import describe_canonical, time_canonical
from bench_peer import PEERS, describe_peer, time_peer


@dataclass(frozen=True)
class Case:
    """One step to time.

    Attributes:
        net: the network, as in a configuration.
        data: makes `x` [N, ...] and `y` [N, ...].
        batch: rows of a batch.
        rounds: measured epochs of each side.
        bar: "ratio" (trainer's time at most 1.02 of the bare loop's) or "speedup" (at least 3 times as fast).
        window: microbatches of an update; more than one is the case with hooks.
    """

    net: dict[str, Any]
    data: Callable[[], dict[str, Any]]
    batch: int
    rounds: int
    bar: str
    window: int = 1


def _images(rows: int, width: int) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, rows).astype(np.int32)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    x[:, :10] += 2 * np.eye(10, dtype=np.float32)[y]
    return {"x": x, "y": y}


def _text(rows: int, length: int) -> dict[str, Any]:
    import numpy as np

    steps = np.random.default_rng(0).integers(0, 4, (rows, length + 1))
    text = (np.cumsum(steps, axis=1) % 256).astype(np.int32)
    return {"x": text[:, :-1], "y": text[:, 1:]}


def _digits(copies: int) -> dict[str, Any]:
    import numpy as np
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    x, y = bunch.data.astype(np.float32) / 16, bunch.target.astype(np.int32)
    return {"x": np.tile(x, (copies, 1)), "y": np.tile(y, copies)}


CASES = {
    "mlp": Case(
        {"kind": "feed_forward", "hidden_dims": [512, 512]}, functools.partial(_images, 60_032, 784), 128, 9, "ratio"
    ),
    "decoder": Case(
        {
            "kind": "transformer_lm",
            "d_model": 256,
            "n_layers": 4,
            "n_heads": 4,
            "vocab_size": 256,
            "context_length": 128,
        },
        functools.partial(_text, 16 * 30, 128),
        16,
        7,
        "ratio",
    ),
    "digits": Case({"kind": "feed_forward", "hidden_dims": [32]}, functools.partial(_digits, 64), 32, 9, "speedup"),
    "tiny": Case(
        {"kind": "feed_forward", "hidden_dims": [16, 16]}, functools.partial(_images, 160_000, 16), 8, 7, "speedup"
    ),
    "hooks": Case(
        {"kind": "feed_forward", "hidden_dims": [512, 512]},
        functools.partial(_images, 128 * 240, 784),
        128,
        9,
        "ratio",
        window=4,
    ),
}


class Job:
    """The same job for both sides: data, network, and what the trainer is told."""

    def __init__(self, case: Case, epochs: int) -> None:
        from nnx_jax import ArrayDataset, NNDataParams, NNModel, NNOptimParams, NNParams, NNTrainParams
        from nnx_jax.data import Feed

        self.columns, self.window = case.data(), case.window
        dataset = ArrayDataset(self.columns)
        self.data = NNDataParams(train=dataset, batch_size=case.batch, tail="drop")
        self.train = NNTrainParams(n_epochs=epochs, optim=NNOptimParams(kind="adam", max_lr=RATE))
        self.model = NNModel(net_params=NNParams.from_state(case.net))
        self.feed = Feed(dataset, batch_size=case.batch, tail="drop", shuffle=True, seed=0)

    def bare(self) -> Bare | BareHooks:
        net = self.model.build(dict(self.data.train.info), 0)
        if self.window > 1:
            return BareHooks(net, self.columns, self.feed.order, self.window)
        return Bare(net, self.columns, self.feed.order)

    def hooks(self) -> list[Any]:
        """The hooks of the case that has some."""
        from nnx_jax import hooks

        if self.window == 1:
            return []
        return [
            hooks.GradientAccumulationHook(self.window),
            hooks.MixedPrecisionHook("bfloat16"),
            hooks.GradientClipHook(CLIP),
            hooks.SpikeSkipHook(factor=FACTOR, decay=MEMORY, warmup=WARMUP),
            hooks.EMAHook(decay=DECAY),
        ]

    def run(self, callbacks: list[Any], folder: str) -> Any:
        """Train through the public face, with history, a progress line an epoch, and a commit an epoch."""
        from nnx_jax.loop.progress import PlainProgress

        progress = PlainProgress(io.StringIO())
        common = {"data": self.data, "runs_dir": folder, "progress": progress}
        return self.model.train(self.train, callbacks, hooks=self.hooks(), **common)


def time_case(name: str, rounds: int | None) -> dict[str, Any]:
    """Train and time one case; return its line."""
    from nnx_jax import Callback

    case = CASES[name]
    rounds = rounds or case.rounds
    job = Job(case, rounds + 1)
    bare = job.bare()
    held: list[float] = []
    _watch_commits(held)
    programs: list[Any] = []
    _watch_programs(programs)

    class Interleave(Callback):
        """After each epoch of the trainer: wait for the commit in flight, then run the bare loop's epoch."""

        def __init__(self, folder: str) -> None:
            self.folder, self.since = Path(folder), time.perf_counter()
            self.times: dict[str, list[float]] = {"trainer": [], "bare": [], "wait": [], "floor": []}
            self.losses: list[float] = []

        def on_epoch_end(self, ctx: Any) -> None:
            now = time.perf_counter()
            if ctx.epoch:
                self._landed(ctx.run_id, ctx.epoch - 1)
            waited = time.perf_counter()
            seconds, *theirs = bare.epoch(ctx.epoch)
            floor = bare.compiled_epoch(ctx.epoch) if case.bar == "speedup" else math.nan
            if ctx.epoch:  # the first compiles
                for side, value in (
                    ("trainer", waited - self.since),
                    ("bare", seconds),
                    ("wait", waited - now),
                    ("floor", floor),
                ):
                    self.times[side].append(value)
            if not ctx.epoch:
                rows = [row["train_loss"] for row in ctx.records if row["kind"] == "update"]
                self.losses = [rows[0], rows[-1], *theirs]
            self.since = time.perf_counter()

        def _landed(self, run_id: str, epoch: int) -> None:
            last = self.folder / run_id / "checkpoints" / "LAST"
            until = time.monotonic() + 120
            while not last.exists() or json.loads(last.read_bytes())["epoch"] < epoch:
                if time.monotonic() > until:
                    raise TimeoutError(f"{last}: the commit of epoch {epoch} did not land")
                time.sleep(0.0005)

    with tempfile.TemporaryDirectory() as folder:
        watch = Interleave(folder)
        run = job.run([watch], folder)
        rows = len([row for row in run.records if row["kind"] == "update"])
    steps = job.feed.n_batches // case.window
    if rows != steps * (rounds + 1):
        raise RuntimeError(f"{name}: {rows} history rows for {steps * (rounds + 1)} updates")
    first, last, their_first, their_last = watch.losses
    # Equal at the first step; after an epoch only alike, since Adam makes differences of the last bit grow.
    if abs(first - their_first) > 1e-4 * their_first or abs(last - their_last) > 0.25 * their_last + 0.05:
        raise RuntimeError(f"{name}: the two sides do not train alike: {watch.losses}")
    ours, theirs = watch.times["trainer"], watch.times["bare"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    return {
        "case": name,
        "ratio_to_bare": round(ratio, 4),
        "ratio_quartiles": [round(value, 4) for value in quartiles(ratios)],
        "speedup_over_bare": round(1 / ratio, 2),
        "trainer_ms_per_step": per_step(ours, steps),
        "bare_ms_per_step": per_step(theirs, steps),
        **({"floor_ms_per_step": per_step(watch.times["floor"], steps)} if case.bar == "speedup" else {}),
        "steps_per_round": steps,
        "programs_compiled": sum(sum(made.watch.compiles.values()) for made in programs),
        "rounds": rounds,
        "commit_wait_ms_per_round": round(1e3 * statistics.median(watch.times["wait"]), 2),
        "commit_hold_ms": round(1e3 * statistics.median(held), 2),
        "first_loss": [round(first, 5), round(their_first, 5)],
        "bar": "ratio_to_bare <= 1.02" if case.bar == "ratio" else "speedup_over_bare >= 3",
        "met": ratio <= 1.02 if case.bar == "ratio" else 1 / ratio >= 3,
    }


def _watch_commits(held: list[float]) -> None:
    """Note how long each commit holds the loop: from the call until training may go on."""
    from nnx_jax.runs.commit import Committer

    real = getattr(Committer.commit, "__wrapped__", Committer.commit)

    @functools.wraps(real)
    def commit(self: Any, point: Any) -> None:
        self.drain()  # waiting for the commit before is no hold of this one
        start = time.perf_counter()
        real(self, point)
        held.append(time.perf_counter() - start)

    Committer.commit = commit


def _watch_programs(made: list[Any]) -> None:
    """Note whose compiles to count: every set of programs of a step."""
    from nnx_jax.step.programs import StepPrograms

    real = getattr(StepPrograms.__init__, "__wrapped__", StepPrograms.__init__)

    @functools.wraps(real)
    def init(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        made.append(self)

    StepPrograms.__init__ = init


def quartiles(values: list[float]) -> list[float]:
    """[lower, upper]."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def per_step(seconds: list[float], steps: int) -> dict[str, Any]:
    """Milliseconds a step, of rounds of so many: median and quartiles."""
    scale = 1e3 / steps
    spread = [round(value * scale, 4) for value in quartiles(seconds)]
    return {"median": round(statistics.median(seconds) * scale, 4), "quartiles": spread}


def _wall(*args: str, repeat: int = 5) -> float:
    """Median seconds of a command, in a process of its own."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run([sys.executable, *args], check=True, capture_output=True, env=_environment())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def time_start(rounds: int | None) -> dict[str, Any]:
    """Import, `--help`, and from a fresh interpreter to the end of a job of one step, compile cache empty or filled."""
    idle = _wall("-c", "pass")
    line: dict[str, Any] = {
        "case": "start",
        "import_ms": round(1e3 * (_wall("-c", "import nnx_jax") - idle), 1),
        "help_s": round(_wall("-m", "nnx_jax.train", "--help"), 3),
    }
    for side in ("trainer", "bare"):
        with tempfile.TemporaryDirectory() as cache:
            times = [_child(side, "digits", 1, cache)["seconds"] for _ in range(1 + (rounds or 3))]
        line[f"{side}_first_step_s"] = {"cold": round(times[0], 2), "cached": round(statistics.median(times[1:]), 2)}
    return line


def peak_memory(rounds: int | None) -> dict[str, Any]:
    """Peak resident memory of a whole process: trainer against bare loop."""
    line: dict[str, Any] = {"case": "memory"}
    for name, epochs in (("digits", 2), ("mlp", 2)):
        with tempfile.TemporaryDirectory() as cache:
            sides = {side: _child(side, name, epochs, cache)["peak_mb"] for side in ("trainer", "bare")}
        line[name] = {f"{side}_peak_mb": round(value) for side, value in sides.items()}
        line[name]["ratio_to_bare"] = round(sides["trainer"] / sides["bare"], 3)
    return line


def _child(side: str, name: str, epochs: int, cache: str) -> dict[str, Any]:
    """Run one side alone in a fresh process; seconds from its start, and its peak memory."""
    command = [sys.executable, __file__, "--child", side, name, str(epochs)]
    environment = {**_environment(), "JAX_COMPILATION_CACHE_DIR": cache}
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return {"seconds": time.perf_counter() - start, **json.loads(done.stdout.splitlines()[-1])}


def run_child(side: str, name: str, epochs: int) -> None:
    """The process that `_child` starts."""
    case = CASES[name]
    if epochs == 1:  # time to the first step: one batch is the whole job
        case = Case(case.net, functools.partial(_first_rows, case), case.batch, case.rounds, case.bar)
    job = Job(case, epochs)
    if side == "bare":
        bare = job.bare()
        for epoch in range(epochs):
            bare.epoch(epoch)
    else:
        with tempfile.TemporaryDirectory() as folder:
            job.run([], folder)
    print(json.dumps({"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def _first_rows(case: Case) -> dict[str, Any]:
    return {name: column[: case.batch] for name, column in case.data().items()}


def describe(line: dict[str, Any]) -> str:
    """One line for a person."""
    name = line["case"]
    if name == "canonical":
        return describe_canonical(line)
    if name == "start":
        text = f"import {line['import_ms']} ms  --help {line['help_s']} s  first step"
        for side in ("trainer", "bare"):
            first = line[f"{side}_first_step_s"]
            text += f"  {side} {first['cold']} s (compile cache filled: {first['cached']} s)"
    elif name == "memory":
        cases = [(case, found) for case, found in line.items() if case != "case"]
        text = "  ".join(f"{case} {m['trainer_peak_mb']} MB, bare {m['bare_peak_mb']} MB" for case, m in cases)
    else:
        ours, theirs = line["trainer_ms_per_step"]["median"], line["bare_ms_per_step"]["median"]
        text = (
            f"trainer {ours:9.4f} ms  bare {theirs:9.4f} ms  ratio {line['ratio_to_bare']:.3f} "
            f"{line['ratio_quartiles']}  x{line['speedup_over_bare']}  commit holds {line['commit_hold_ms']} ms  "
            f"[{line['bar']}: {'met' if line['met'] else 'MISSED'}]"
        )
    return f"{name:8} {text}"


def main() -> int:
    """Run the cases asked for; exit 0 whatever the numbers are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    names = [*CASES, "start", "memory", "canonical"]
    parser.add_argument("--case", action="append", choices=names, help="default: all; repeatable")
    parser.add_argument("--peer", choices=PEERS, help="another trainer on one job, in place of the cases")
    parser.add_argument("--rounds", type=int, help="measured rounds of each side (default: per case)")
    parser.add_argument("--json", action="store_true", help="one JSON line a case")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args.child[0], args.child[1], int(args.child[2]))
        return 0
    if args.peer:
        line = time_peer(args.peer, args.rounds)
        print(json.dumps(line) if args.json else describe_peer(line), flush=True)
        return 0
    for name in args.case or names:
        special = {"start": time_start, "memory": peak_memory, "canonical": time_canonical}.get(name)
        line = special(args.rounds) if special else time_case(name, args.rounds)
        print(json.dumps(line) if args.json else describe(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
