"""A normal mean with known variance, whose posterior is known in closed form, and a short way to sample it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from nnx_jax.backends.blackjax import build_engine
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.engines.blackjax import BlackjaxEngine, ChainState
from nnx_jax.engines.blackjax_task import BlackjaxTask, as_blackjax_task
from nnx_jax.loop.engine import Span
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import NNTrainParams

ROWS = 64
PRIOR = 10.0
"""Standard deviation of the prior of the mean; that of a row is 1."""


def rows() -> np.ndarray:
    """float32 [ROWS, 1], normal around 3."""
    return np.random.default_rng(0).normal(3.0, 1.0, (ROWS, 1)).astype(np.float32)


def dataset() -> ArrayDataset:
    return ArrayDataset(x=rows())


PRECISION = ROWS + PRIOR**-2
MEAN, SD = float(rows().astype(np.float64).sum() / PRECISION), PRECISION**-0.5
"""Of the posterior: a normal prior and a normal likelihood give precision ROWS / 1 + 1 / PRIOR^2 and this mean."""


def logprior(mean: Any) -> Any:
    return -0.5 * jnp.square(mean / PRIOR)


def loglikelihood(mean: Any, row: Any) -> Any:
    return -0.5 * jnp.sum(jnp.square(row - mean))


def normal_mean(**settings: Any) -> BlackjaxTask:
    """The task; its position is a scalar."""
    start = {} if "init_fn" in settings else {"init_position": jnp.zeros(())}
    return BlackjaxTask(logprior_fn=logprior, loglikelihood_fn=loglikelihood, **start, **settings)


def wide(position: Any) -> Any:
    """Log density of two independent normals: means 3 and -1, standard deviations 1 and 2."""
    return -0.5 * jnp.sum(jnp.square((position["m"] - jnp.array([3.0, -1.0])) / jnp.array([1.0, 2.0])))


def gaussian(**settings: Any) -> BlackjaxTask:
    return BlackjaxTask(wide, {"m": jnp.zeros(2)}, **settings)


def engine_of(
    task: BlackjaxTask, data: Any = None, *, batch: int = 16, seed: int = 0, **training: Any
) -> BlackjaxEngine:
    """The engine over `data`, without a loop."""
    given = None if data is None else NNDataParams(train=data, batch_size=batch)
    train = NNTrainParams(max_steps=training.pop("max_steps", 1000), seed=seed, **training)
    return build_engine(as_blackjax_task(task), RunSpec(backend="blackjax", data=given, train=train))


def draw(
    engine: BlackjaxEngine, count: int, state: ChainState | None = None, *, cuts: tuple[int, ...] = ()
) -> ChainState:
    """Draw `count` times more, in calls of `cuts` draws, epoch by epoch as the loop does."""
    state = engine.start() if state is None else state
    calls = [*cuts, count - sum(cuts)]
    for size in calls:
        while size:
            epoch, first = divmod(state.drawn, engine.n_batches)
            here = min(size, engine.n_batches - first)
            state, done = engine.run_span(state, Span(epoch, first, here), lambda _: False)
            size -= done
    return state


def positions(engine: BlackjaxEngine, state: ChainState) -> np.ndarray:
    """The one array of the draws, [chains, draws, ...]."""
    return next(iter(engine.trained(state).values.values()))
