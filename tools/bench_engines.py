"""Time each engine of a TrainingLoop against the bare loop of its library: same arithmetic, one process, interleaved.

    python tools/bench_engines.py [--case NAME] [--json] [--rounds N] [--steps N] [--commit-every N]

Every case trains through `TrainingLoop(...).run()` with a record of every update and one commit a round. At the commit
that ends a round the clock stops, the bare loop makes as many steps, and the clock goes on with the commit; so a round
of ours has everything between two commits, the copying of one, and the wait until its files have landed. The first
round of both, which compiles, does not count. Then the same rounds with the engine alone: its steps and their records,
without the loop, its files and its commits. The bar is for that, an engine's step.

- `equinox`, `equinox_tiny`: an MLP by Adam; bare is `eqx.filter_jit` with donated buffers, fed with numpy batches.
- `numpyro_svi`: linear regression with AutoNormal over all 64 rows; bare is a jitted `svi.update`.
- `blackjax`, `blackjax_chains`: NUTS on a logistic regression of 1000 rows, one chain or four; bare is the kernel under
  `jax.lax.scan`, a round in one call, and its draws brought to the host. Same keys, so the draws must be the same.
- `blackjax_tiny`, `blackjax_tiny_chains`: the same on a normal of 10 dimensions, where a draw costs next to nothing.
- `numpyro_mcmc`: one blocking run each of two lengths; what the longer one takes more is the time of its draws. Bare is
  `numpyro.infer.MCMC.run`.

A case whose sides do not end alike is an error, not a line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bare_engines import SVI, Equinox, Job, Logistic, Nuts, as_list, regression, require
from bench import per_step, quartiles

BAR = 1.05


@dataclass(frozen=True)
class Case:
    """What is timed: a job, steps of a round, measured rounds, and the library it needs."""

    make: Callable[[], Job]
    steps: int
    rounds: int
    package: str


CASES = {
    "equinox": Case(functools.partial(Equinox, 64, 256, 128, 128 * 200), 1000, 9, "equinox"),
    "equinox_tiny": Case(functools.partial(Equinox, 16, 16, 8, 8 * 2000), 5000, 9, "equinox"),
    "numpyro_svi": Case(SVI, 10_000, 9, "numpyro"),
    "blackjax": Case(functools.partial(Logistic, 1), 4000, 9, "blackjax"),
    "blackjax_chains": Case(functools.partial(Logistic, 4), 2000, 9, "blackjax"),
    "blackjax_tiny": Case(functools.partial(Nuts, 1), 10_000, 9, "blackjax"),
    "blackjax_tiny_chains": Case(functools.partial(Nuts, 4), 10_000, 9, "blackjax"),
}
MCMC_CASE, MCMC_DRAWS, MCMC_ROUNDS = "numpyro_mcmc", 100_000, 3
NAMES = (*CASES, MCMC_CASE)


def time_case(
    name: str, rounds: int | None = None, steps: int | None = None, every: int | None = None
) -> dict[str, Any]:
    """Train and time one case; return its line.

    Args:
        rounds: measured ones of each side.
        steps: of a round.
        every: updates between two commits, a divisor of those of a round; default: all of them.

    Raises:
        RuntimeError: the sides do not end alike, or the run is not what it should be.
    """
    if name == MCMC_CASE:
        return _time_mcmc(rounds or MCMC_ROUNDS, steps or MCMC_DRAWS)
    case = CASES[name]
    rounds, steps = rounds or case.rounds, steps or case.steps
    every, total = every or steps, steps * (rounds + 1)
    if steps % every:
        raise ValueError(f"a round of {steps} steps does not end at a commit when there is one every {every}")
    from nnx_jax.runs.run import NNRun

    job = case.make()
    clock = _Clock(job, steps)
    with (
        tempfile.TemporaryDirectory() as folder,
        _watched(clock.commit),
        _engines() as engines,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        loop = job.loop(total, checkpoint_dir=folder, checkpoint_every_n_steps=every)
        clock.start()
        operator, artifact = loop.run()
        records = NNRun.load(artifact.backend_info["run_id"], folder).records
    losses = [row["train_loss"] for row in records if row["kind"] == "update"]
    if len(losses) != total or len(clock.ours) != rounds + 1:
        raise RuntimeError(f"{name}: {len(losses)} records and {len(clock.ours)} rounds for {total} steps")
    line = _line(name, clock.ours[1:], clock.theirs[1:], steps)
    told = {"commits_per_round": steps // every, **clock.told(), **job.agreement(operator, losses)}
    return {**line, **_engine_line(engines[0], job, rounds, steps), **told}


def _engine_line(engine: Any, job: Job, rounds: int, steps: int) -> dict[str, Any]:
    """The engine's steps and their records alone, without the loop around them, against the bare loop, in turn."""
    from nnx_jax.loop.engine import Span

    state, epoch, batch = engine.start(), 0, 0
    times: dict[str, list[float]] = {"engine": [], "bare": []}
    for _ in range(rounds + 1):
        start, left = time.perf_counter(), steps
        while left:
            count = min(left, engine.n_batches - batch)
            state, done = engine.run_span(state, Span(epoch, batch, count, True), lambda _: False)
            records, failure = engine.read_records(state)
            if failure is not None or not records:
                raise RuntimeError(f"{done} steps of {type(engine).__name__} left no records: {failure}")
            left, batch = left - done, batch + done
            epoch, batch = (epoch + 1, 0) if batch == engine.n_batches else (epoch, batch)
        now = time.perf_counter()
        job.bare(steps)
        times["engine"].append(now - start)
        times["bare"].append(time.perf_counter() - now)
    ratios = [ours / theirs for ours, theirs in zip(times["engine"][1:], times["bare"][1:], strict=True)]
    ratio = statistics.median(ratios)
    return {
        "engine_ratio_to_bare": round(ratio, 4),
        "engine_ratio_quartiles": [round(value, 4) for value in quartiles(ratios)],
        "engine_ms_per_step": per_step(times["engine"][1:], steps),
        "bar": f"engine_ratio_to_bare <= {BAR}",
        "met": ratio <= BAR,
    }


@contextlib.contextmanager
def _engines() -> Iterator[list[Any]]:
    """The engines of the sessions that begin meanwhile."""
    from nnx_jax.loop.lifecycle import Session

    found: list[Any] = []
    real = Session.__init__

    @functools.wraps(real)
    def begin(self: Any, plan: Any) -> None:
        found.append(plan.engine)
        real(self, plan)

    Session.__init__ = begin
    try:
        yield found
    finally:
        Session.__init__ = real


class _Clock:
    """Times rounds of both sides in turn; `commit` is called at every commit before it is made."""

    def __init__(self, job: Job, steps: int) -> None:
        self.job, self.steps, self.done, self.since = job, steps, 0, 0.0
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.waits: list[float] = []

    def told(self) -> dict[str, float]:
        """The part of our time that waited for the files of a commit, which tells of the disk."""
        return {"commit_wait_ms_per_round": round(1e3 * statistics.median(self.waits[1:]), 2)}

    def start(self) -> None:
        self.since = time.perf_counter()

    def commit(self, committer: Any, point: Any) -> None:
        if point.step < self.done + self.steps:
            return
        import jax

        before = time.perf_counter()
        committer.drain()  # what the commits before have not done yet is of this round
        waited = time.perf_counter()
        jax.block_until_ready(jax.live_arrays())  # and so is what the device was given ahead: not the bare loop's time
        now = time.perf_counter()
        self.waits.append(waited - before)
        self.ours.append(now - self.since)
        self.job.bare(self.steps)
        self.theirs.append(time.perf_counter() - now)
        self.done += self.steps
        self.start()


@contextlib.contextmanager
def _watched(told: Callable[[Any, Any], None]) -> Iterator[None]:
    """Tell of every commit before it is made. No callback could: having one costs a run what others do not pay."""
    from nnx_jax.runs.commit import Committer

    real = Committer.commit

    @functools.wraps(real)
    def commit(self: Any, point: Any) -> None:
        told(self, point)
        real(self, point)

    Committer.commit = commit
    try:
        yield
    finally:
        Committer.commit = real


def _time_mcmc(rounds: int, draws: int) -> dict[str, Any]:
    """NUTS by NumPyro on the linear regression: a run of `draws` less one of a tenth, both sides in turn."""
    import jax
    import numpy as np
    from numpyro.infer import MCMC, NUTS  # pyright: ignore[reportMissingImports]

    from nnx_jax import ArrayDataset, TrainingLoop
    from nnx_jax.engines.bayes import NumpyroTask

    x, y, model, (exact, _) = regression()
    dataset = ArrayDataset({"x": x, "y": y})

    def ours(count: int) -> Any:
        task = NumpyroTask(model, num_warmup=500, num_samples=count)
        operator, _ = TrainingLoop(dataset=dataset, task=task, backend="numpyro-mcmc", max_steps=count).run()
        return operator.arrays()["samples/w"]

    def theirs(count: int) -> Any:
        mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=count, progress_bar=False, chain_method="vectorized")
        mcmc.run(jax.random.key(0), x, y, extra_fields=("diverging", "accept_prob"))
        jax.device_get(mcmc.get_extra_fields())
        return np.asarray(mcmc.get_samples()["w"])

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    found: dict[str, Any] = {}
    for number in range(rounds + 1):
        for side, run in (("ours", ours), ("theirs", theirs)):
            seconds = []
            for count in (draws // 10, draws):
                start = time.perf_counter()
                found[side] = run(count)
                seconds.append(time.perf_counter() - start)
            if number:  # the first compiles what later ones find in the compile cache
                times[side].append(seconds[1] - seconds[0])
    means = [as_list(found[side].mean(axis=0)) for side in ("ours", "theirs")]
    require(bool(np.allclose(*means, atol=0.02)), "posterior mean", *means)
    line = _line(MCMC_CASE, times["ours"], times["theirs"], draws - draws // 10)
    return {**line, "posterior_mean": means, "exact_posterior_mean": as_list(exact)}


def _line(name: str, ours: list[float], theirs: list[float], steps: int) -> dict[str, Any]:
    """What every case tells: `ours` and `theirs` are seconds of rounds of so many steps."""
    from importlib.metadata import version

    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio, package = statistics.median(ratios), CASES[name].package if name in CASES else "numpyro"
    return {
        "case": name,
        "ratio_to_bare": round(ratio, 4),
        "ratio_quartiles": [round(value, 4) for value in quartiles(ratios)],
        "loop_ms_per_step": per_step(ours, steps),
        "bare_ms_per_step": per_step(theirs, steps),
        "steps_per_round": steps,
        "rounds": len(ratios),
        "bar": f"ratio_to_bare <= {BAR}",
        "met": ratio <= BAR,
        package: version(package),
        "jax": version("jax"),
        "load": round(os.getloadavg()[0], 1),
    }


def describe(line: dict[str, Any]) -> str:
    """One line for a person."""
    ours, theirs = line["loop_ms_per_step"]["median"], line["bare_ms_per_step"]["median"]
    return (
        f"{line['case']:15} loop {ours:.4f} ms  bare {theirs:.4f} ms  ratio {line['ratio_to_bare']:.3f} "
        f"{line['ratio_quartiles']}  engine {line.get('engine_ratio_to_bare', line['ratio_to_bare']):.3f}  "
        f"[{line['bar']}: {'met' if line['met'] else 'MISSED'}]  load {line['load']}"
    )


def main() -> int:
    """Run the cases asked for; exit 0 whatever the numbers are, 1 without the library of one that was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--case", action="append", choices=NAMES, help="default: all; repeatable")
    parser.add_argument("--rounds", type=int, help="measured rounds of each side (default: per case)")
    parser.add_argument("--steps", type=int, help="of a round (default: per case)")
    parser.add_argument("--commit-every", type=int, metavar="N", help="steps between commits (default: a round's)")
    parser.add_argument("--json", action="store_true", help="one JSON line a case")
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    for name in args.case or NAMES:
        package = CASES[name].package if name in CASES else "numpyro"
        if importlib.util.find_spec(package) is None:
            told = f"bench_engines: {name} needs {package}; try: pip install 'nnx_jax[{package}]'"
            print(told, file=sys.stderr)
            return 1
        line = time_case(name, args.rounds, args.steps, args.commit_every)
        print(json.dumps(line) if args.json else describe(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
