"""The jobs of `tools/bench_engines.py`: for each a TrainingLoop, and the bare loop of its library written by hand."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from bench import _images

RATE = {"equinox": 1e-3, "svi": 1e-2}
ROWS, WEIGHTS, NOISE = 64, (1.0, -2.0, 0.5), 0.5
"""Of the linear regression: rows, what made them, and the standard deviation of an observation, which is known."""
SCALES = (0.5, 2.0)
"""Smallest and largest standard deviation of the normal of 10 dimensions; the others are evenly between."""


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
        require(abs(first - their_first) <= 1e-4 * their_first, "first loss", first, their_first)
        require(abs(last - their_last) <= 0.25 * their_last + 0.05, "last loss", last, their_last)
        return {"first_loss": rounded(first, their_first), "last_loss": rounded(last, their_last)}


def regression() -> tuple[Any, Any, Callable[..., Any], Any]:
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

        x, y, self.model, self.exact = regression()
        self.dataset = ArrayDataset({"x": x, "y": y})
        self.svi = Inference(self.model, AutoNormal(self.model), optax.adam(RATE["svi"]), Trace_ELBO())
        self.rows = jnp.asarray(x), jnp.asarray(y)
        self.state = self.svi.init(jax.random.key(0), *self.rows)
        self.update = jax.jit(self.svi.update, donate_argnums=0)
        self.tail: list[Any] = []

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
        told: dict[str, Any] = {"exact_posterior_mean": as_list(mean)}
        ours, other = found["w_auto_loc"], np.asarray(theirs["w_auto_loc"])
        told["posterior_mean"] = [as_list(ours), as_list(other)]
        last, their_last = float(np.mean(losses[-100:])), float(np.mean([float(each) for each in self.tail]))
        told["mean_of_last_losses"] = rounded(last, their_last)
        # Each side draws its own noise, so they are alike within what one draw an update leaves of it.
        require(bool(np.all(np.abs(ours - other) < sd)), "posterior mean", *told["posterior_mean"])
        require(abs(last - their_last) < 0.05 * abs(their_last), "loss", last, their_last)
        return told


class Nuts(Job):
    """NUTS on a normal of 10 dimensions, without warmup.

    Args:
        chains: moved at once; one chain is not vmapped on the bare side.
    """

    step_size = 0.5

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
            step_size=self.step_size,
        )
        dataset = ArrayDataset({"x": np.zeros((2, 1), np.float32)})  # a log density alone touches no rows
        return TrainingLoop(dataset=dataset, task=task, backend="blackjax", max_steps=steps, **where)

    @functools.cached_property
    def _scan(self) -> Callable[..., Any]:
        import jax
        import jax.numpy as jnp

        def one(key: Any, state: Any) -> Any:
            return self.kernel(key, state, self.density, self.step_size, jnp.ones(10))

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
        require(first < 1e-3, "first 20 draws", ours[0, 19], theirs[0, 19])  # later, roundings decide other turns
        means, sds = ([f(each, axis=(0, 1)) for each in (ours, theirs)] for f in (np.mean, np.std))
        apart = np.abs(sds[0] - sds[1]) / sds[1]
        require(bool(np.all(apart < 0.2)), "posterior sd", *map(as_list, sds))
        same = float(np.mean(np.all(np.abs(ours - theirs) < 1e-3, axis=-1)))
        told = {"share_of_equal_draws": round(same, 4), "posterior_mean": list(map(as_list, means))}
        return {**told, "posterior_sd": list(map(as_list, sds))}


class Logistic(Nuts):
    """NUTS on the posterior of a logistic regression: 10 weights with a standard normal prior, 1000 rows."""

    step_size = 0.06

    def __init__(self, chains: int) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((1000, 10), np.float32)
        p = 1 / (1 + np.exp(-self.x @ np.linspace(-1, 1, 10)))
        self.sign = np.where(rng.random(1000) < p, -1, 1).astype(np.float32)
        super().__init__(chains)

    def density(self, position: Any) -> Any:
        import jax
        import jax.numpy as jnp

        return -0.5 * (position**2).sum() - jax.nn.softplus(self.sign * (jnp.asarray(self.x) @ position)).sum()


def require(holds: bool, what: str, ours: Any, theirs: Any) -> None:
    if not holds:
        raise RuntimeError(f"the two sides do not end alike: {what} is {ours} here and {theirs} in the bare loop")


def rounded(*values: float) -> list[float]:
    return [round(value, 5) for value in values]


def as_list(values: Any) -> list[float]:
    return rounded(*(float(value) for value in values))
