"""Time each engine of a TrainingLoop against the bare loop of its library: same arithmetic, one process, interleaved.

    python tools/bench_engines.py [--case NAME] [--json] [--rounds N] [--steps N] [--commit-every N]

Every case trains through `TrainingLoop(...).run()` with a record of every update and one commit a round. At the commit
that ends a round the clock stops, the bare loop makes as many steps, and the clock goes on with the commit; so a round
of ours has everything between two commits, the copying of one, and the wait until its files have landed. The first
round of both, which compiles, does not count.

- `equinox`, `equinox_tiny`: an MLP by Adam; bare is `eqx.filter_jit` with donated buffers, fed with numpy batches.
- `numpyro_svi`: linear regression with AutoNormal over all 64 rows; bare is a jitted `svi.update`.
- `blackjax`, `blackjax_chains`: NUTS on a normal of 10 dimensions, one chain or four; bare is the kernel under
  `jax.lax.scan`, a round in one call, and its draws brought to the host. Same keys, so the draws must be the same.
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
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench import _images, per_step, quartiles

BAR = 1.05
RATE = {"equinox": 1e-3, "svi": 1e-2}
ROWS, WEIGHTS, NOISE = 64, (1.0, -2.0, 0.5), 0.5
"""Of the linear regression: rows, what made them, and the standard deviation of an observation, which is known."""
SCALES = (0.5, 2.0)
"""Smallest and largest standard deviation of the normal of 10 dimensions that NUTS draws from; they are even between."""
STEP_SIZE = 0.5


class Job(ABC):
    """One job for both sides."""

    @abstractmethod
    def loop(self, steps: int, **where: Any) -> Any:
        """Our side: the TrainingLoop of so many steps."""

    @abstractmethod
    def bare(self, steps: int) -> None:
        """The other side: make the next so many steps, and wait for them."""

    @abstractmethod
    def agreement(self, operator: Any, losses: list[float]) -> dict[str, Any]:
        """What both sides ended with, for the line; `losses` are ours, of every step.

        Raises:
            RuntimeError: they do not agree.
        """


class Equinox(Job):
    """An MLP of equal layers, by Adam, on the rows of tools/bench.py.

    Args:
        inputs, width: 64-256-256-10, say.
        batch: rows of a batch.
        rows: of the data, whole batches.
    """

    def __init__(self, inputs: int, width: int, batch: int, rows: int) -> None:
        import equinox as eqx  # pyright: ignore[reportMissingImports]
        import jax
        import optax

        from nnx_jax import ArrayDataset
        from nnx_jax.data import Feed

        self.columns = _images(rows, inputs)
        self.dataset, self.batch = ArrayDataset(self.columns), batch
        self.module = eqx.nn.MLP(inputs, 10, width, 2, key=jax.random.key(0))
        self.optimizer = optax.adam(RATE["equinox"])
        feed = Feed(self.dataset, batch_size=batch, tail="drop", shuffle=True, seed=0)
        self.batches: Iterator[Any] = itertools.chain.from_iterable(map(feed.order, itertools.count()))
        model = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, self.module)
        self.carry = model, self.optimizer.init(eqx.filter(model, eqx.is_array))
        self.losses: list[float] = []

    def loop(self, steps: int, **where: Any) -> Any:
        from nnx_jax import TrainingLoop
        from nnx_jax.engines.equinox import EquinoxModelOp

        return TrainingLoop(
            model_op=EquinoxModelOp(self.module),
            dataset=self.dataset,
            loss="cross_entropy",
            optimizer_config={"name": "adam", "lr": RATE["equinox"]},
            batch_size=self.batch,
            backend="equinox",
            max_steps=steps,
            **where,
        )

    @functools.cached_property
    def _step(self) -> Callable[..., Any]:
        import equinox as eqx  # pyright: ignore[reportMissingImports]
        import jax
        import optax

        @eqx.filter_value_and_grad
        def loss_of(model: Any, x: Any, y: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

        @eqx.filter_jit(donate="all-except-first")
        def step(batch: Any, model: Any, opt_state: Any) -> Any:
            loss, grads = loss_of(model, *batch)
            updates, opt_state = self.optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, updates), opt_state, loss

        return step

    def bare(self, steps: int) -> None:
        x, y = self.columns["x"], self.columns["y"]
        (model, opt_state), step = self.carry, self._step
        first: Any = None
        loss: Any = None
        for rows in itertools.islice(self.batches, steps):
            model, opt_state, loss = step((x[rows], y[rows]), model, opt_state)
            first = loss if first is None else first
        last = float(loss)
        self.carry = model, opt_state
        self.losses += [float(first), last]

    def agreement(self, operator: Any, losses: list[float]) -> dict[str, Any]:
        first, last, their_first, their_last = losses[0], losses[-1], self.losses[0], self.losses[-1]
        # Equal at the first step; in the end only alike, since Adam makes differences of the last bit grow.
        _require(abs(first - their_first) <= 1e-4 * their_first, "first loss", first, their_first)
        _require(abs(last - their_last) <= 0.25 * their_last + 0.05, "last loss", last, their_last)
        return {"first_loss": _rounded(first, their_first), "last_loss": _rounded(last, their_last)}


def _regression() -> tuple[Any, Any, Callable[..., Any], Any]:
    """(x [64, 3], y [64], the NumPyro model, mean and sd of the exact posterior [2, 3])."""
    import numpy as np
    import numpyro  # pyright: ignore[reportMissingImports]
    import numpyro.distributions as dist  # pyright: ignore[reportMissingImports]

    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, len(WEIGHTS))).astype(np.float32)
    y = (x @ np.array(WEIGHTS) + NOISE * rng.standard_normal(ROWS)).astype(np.float32)

    def model(x: Any, y: Any = None) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([len(WEIGHTS)]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("obs", dist.Normal(x @ w, NOISE), obs=y)

    precision = np.eye(len(WEIGHTS)) + x.T @ x / NOISE**2  # of a standard normal prior
    covariance = np.linalg.inv(precision)
    return x, y, model, np.stack([covariance @ x.T @ y / NOISE**2, np.sqrt(np.diag(covariance))])


class SVI(Job):
    """Linear regression by variational inference with AutoNormal; all rows are one batch."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp
        import optax
        from numpyro.infer import SVI as Inference  # pyright: ignore[reportMissingImports]
        from numpyro.infer import Trace_ELBO  # pyright: ignore[reportMissingImports]
        from numpyro.infer.autoguide import AutoNormal  # pyright: ignore[reportMissingImports]

        from nnx_jax import ArrayDataset

        x, y, self.model, self.exact = _regression()
        self.dataset = ArrayDataset({"x": x, "y": y})
        self.svi = Inference(self.model, AutoNormal(self.model), optax.adam(RATE["svi"]), Trace_ELBO())
        self.rows = jnp.asarray(x), jnp.asarray(y)
        self.state = self.svi.init(jax.random.key(0), *self.rows)
        self.update = jax.jit(self.svi.update, donate_argnums=0)
        self.loss = 0.0

    def loop(self, steps: int, **where: Any) -> Any:
        from nnx_jax import TrainingLoop
        from nnx_jax.engines.bayes import NumpyroTask

        return TrainingLoop(
            dataset=self.dataset,
            task=NumpyroTask(self.model),
            optimizer_config={"name": "adam", "lr": RATE["svi"]},
            backend="numpyro-svi",
            max_steps=steps,
            **where,
        )

    def bare(self, steps: int) -> None:
        state, losses = self.state, []
        for _ in range(steps):
            state, loss = self.update(state, *self.rows)
            losses.append(loss)
        float(losses[-1])
        self.state, self.tail = state, losses[-100:]

    def agreement(self, operator: Any, losses: list[float]) -> dict[str, Any]:
        import numpy as np

        found = operator.guide_arrays()
        theirs = self.svi.get_params(self.state)
        mean, sd = self.exact
        told: dict[str, Any] = {"exact_posterior_mean": _list(mean)}
        ours, other = found["w_auto_loc"], np.asarray(theirs["w_auto_loc"])
        told["posterior_mean"] = [_list(ours), _list(other)]
        last, their_last = float(np.mean(losses[-100:])), float(np.mean([float(each) for each in self.tail]))
        told["mean_of_last_losses"] = _rounded(last, their_last)
        # Each side draws its own noise, so they are alike within what one draw an update leaves of it.
        _require(bool(np.all(np.abs(ours - other) < sd)), "posterior mean", *told["posterior_mean"])
        _require(abs(last - their_last) < 0.05 * abs(their_last), "loss", last, their_last)
        return told


class Nuts(Job):
    """NUTS on a normal of 10 dimensions, without warmup.

    Args:
        chains: moved at once; one chain is not vmapped on the bare side.
    """

    def __init__(self, chains: int) -> None:
        import blackjax  # pyright: ignore[reportMissingImports]
        import jax
        import jax.numpy as jnp

        from nnx_jax.engines.blackjax import _DRAWS

        self.scales = jnp.linspace(*SCALES, 10)
        self.chains, self.kernel, self.drawn = chains, blackjax.nuts.build_kernel(), 0
        self.key = jax.random.fold_in(jax.random.key(0), _DRAWS)  # the loop's, so that the draws are the same
        start = blackjax.nuts.init(jnp.zeros(10), self.density)
        self.state = start if chains == 1 else jax.tree.map(lambda leaf: jnp.stack([leaf] * chains), start)
        self.draws: list[Any] = []

    def density(self, position: Any) -> Any:
        """Log density up to a constant."""
        return -0.5 * ((position / self.scales) ** 2).sum()

    def loop(self, steps: int, **where: Any) -> Any:
        import jax.numpy as jnp
        import numpy as np

        from nnx_jax import ArrayDataset, TrainingLoop
        from nnx_jax.engines.blackjax_task import BlackjaxTask

        task = BlackjaxTask(
            self.density,
            init_position=jnp.zeros(10),
            predict_fn=lambda position, x: position.sum() + 0 * x,
            num_warmup=0,
            num_chains=self.chains,
            step_size=STEP_SIZE,
        )
        dataset = ArrayDataset({"x": np.zeros((2, 1), np.float32)})  # a log density alone touches no rows
        return TrainingLoop(dataset=dataset, task=task, backend="blackjax", max_steps=steps, **where)

    @functools.cached_property
    def _scan(self) -> Callable[..., Any]:
        import jax
        import jax.numpy as jnp

        def one(key: Any, state: Any) -> Any:
            return self.kernel(key, state, self.density, STEP_SIZE, jnp.ones(10))

        def step(state: Any, number: Any) -> Any:
            key = jax.random.fold_in(self.key, number)
            if self.chains == 1:
                state, info = one(jax.random.fold_in(key, 0), state)
            else:
                keys = jax.vmap(lambda chain: jax.random.fold_in(key, chain))(jnp.arange(self.chains))
                state, info = jax.vmap(one)(keys, state)
            return state, (state.position, state.logdensity, info.acceptance_rate, info.is_divergent)

        @functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
        def scan(state: Any, first: Any, count: int) -> Any:
            return jax.lax.scan(step, state, first + jnp.arange(count))

        return scan

    def bare(self, steps: int) -> None:
        import jax

        self.state, found = self._scan(self.state, self.drawn, steps)
        self.drawn += steps
        self.draws.append(jax.device_get(found)[0].reshape(steps, self.chains, 10))

    def agreement(self, operator: Any, losses: list[float]) -> dict[str, Any]:
        import numpy as np

        theirs = np.swapaxes(np.concatenate(self.draws), 0, 1)  # [chains, draws, 10]
        ours = np.asarray(operator.posterior).reshape(theirs.shape)
        first = float(np.abs(ours[:, :20] - theirs[:, :20]).max())
        _require(first < 1e-3, "first 20 draws", ours[0, 19], theirs[0, 19])  # later, roundings decide other turns
        means, sds = ([_list(f(each, axis=(0, 1))) for each in (ours, theirs)] for f in (np.mean, np.std))
        apart = np.abs(np.subtract(*sds)) / np.asarray(self.scales)
        _require(bool(np.all(apart < 0.2)), "posterior sd", *sds)
        same = float(np.mean(np.all(np.abs(ours - theirs) < 1e-3, axis=-1)))
        return {"share_of_equal_draws": round(same, 4), "posterior_mean": means, "posterior_sd": sds}


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
    "blackjax": Case(functools.partial(Nuts, 1), 10_000, 9, "blackjax"),
    "blackjax_chains": Case(functools.partial(Nuts, 4), 10_000, 9, "blackjax"),
}
MCMC_CASE, MCMC_DRAWS, MCMC_ROUNDS = "numpyro_mcmc", 20_000, 3
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
    from nnx_jax.runs.run import NNRun

    if name == MCMC_CASE:
        return _time_mcmc(rounds or MCMC_ROUNDS, steps or MCMC_DRAWS)
    case = CASES[name]
    rounds, steps = rounds or case.rounds, steps or case.steps
    every, total, job = every or steps, steps * (rounds + 1), case.make()
    if steps % every:
        raise ValueError(f"a round of {steps} steps does not end at a commit when there is one every {every}")
    clock = _Clock(job, steps)
    with tempfile.TemporaryDirectory() as folder, _watched(clock.commit), contextlib.redirect_stderr(io.StringIO()):
        loop = job.loop(total, checkpoint_dir=folder, checkpoint_every_n_steps=every)
        clock.start()
        operator, artifact = loop.run()
        records = NNRun.load(artifact.backend_info["run_id"], folder).records
    losses = [row["train_loss"] for row in records if row["kind"] == "update"]
    if len(losses) != total or len(clock.ours) != rounds + 1:
        raise RuntimeError(f"{name}: {len(losses)} records and {len(clock.ours)} rounds for {total} steps")
    line = _line(name, clock.ours[1:], clock.theirs[1:], steps)
    return {**line, "commits_per_round": steps // every, **clock.told(), **job.agreement(operator, losses)}


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
        before = time.perf_counter()
        committer.drain()  # what the commits before have not done yet is of this round
        now = time.perf_counter()
        self.waits.append(now - before)
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

    x, y, model, (exact, _) = _regression()
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
    for _ in range(rounds):
        for side, run in (("ours", ours), ("theirs", theirs)):
            seconds = []
            for count in (draws // 10, draws):
                start = time.perf_counter()
                found[side] = run(count)
                seconds.append(time.perf_counter() - start)
            times[side].append(seconds[1] - seconds[0])
    means = [_list(found[side].mean(axis=0)) for side in ("ours", "theirs")]
    _require(bool(np.allclose(*means, atol=0.02)), "posterior mean", *means)
    line = _line(MCMC_CASE, times["ours"], times["theirs"], draws - draws // 10)
    return {**line, "posterior_mean": means, "exact_posterior_mean": _list(exact)}


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


def _require(holds: bool, what: str, ours: Any, theirs: Any) -> None:
    if not holds:
        raise RuntimeError(f"the two sides do not end alike: {what} is {ours} here and {theirs} in the bare loop")


def _rounded(*values: float) -> list[float]:
    return [round(value, 5) for value in values]


def _list(values: Any) -> list[float]:
    return _rounded(*(float(value) for value in values))


def describe(line: dict[str, Any]) -> str:
    """One line for a person."""
    ours, theirs = line["loop_ms_per_step"]["median"], line["bare_ms_per_step"]["median"]
    return (
        f"{line['case']:15} loop {ours:.4f} ms  bare {theirs:.4f} ms  ratio {line['ratio_to_bare']:.3f} "
        f"{line['ratio_quartiles']}  [{line['bar']}: {'met' if line['met'] else 'MISSED'}]  load {line['load']}"
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
