"""Amortised inference: python examples/amortised_inference.py [--out DIR] [--steps N] (half a minute on two cores).

A simulator makes noisy observations of parameters; a network that returns a distribution is trained on the pairs turned
round, by the negative log-likelihood, and then gives the posterior of any observation at once. One sees the true
parameters inside the network's 90 % intervals about 90 % of the time, and where the intervals lie.
"""

import argparse
import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from flax import nnx

from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.data import CachedDataset, SimulationDataset
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.objectives.operators import NLL
from nnx_jax.training_loop import TrainingLoop

TIMES, NOISE = np.linspace(0.0, 4.0, 20), 0.1
NAMES = ("frequency (rad/s)", "damping (1/s)")


@register("oscillator_prior")
class Prior(Operator):
    """Frequency, damping, and the noise of every observation: all that is random, a function of the seed."""

    def _apply(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return np.concatenate([rng.uniform([1.0, 0.05], [4.0, 1.0]), NOISE * rng.normal(size=len(TIMES))])


@dataclasses.dataclass(frozen=True)
class Oscillator:
    """What is seen of a damped oscillator."""

    dt: float = float(TIMES[1])

    def step(self, state: np.ndarray, dt: float) -> np.ndarray:
        frequency, damping, noise = state[0], state[1], state[2:]
        return np.exp(-damping * TIMES) * np.cos(frequency * TIMES) + noise


def turned(drawn: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From (what was drawn, what was seen) to (what was seen, the two parameters)."""
    return seen, drawn[:2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Normal:
    """Independent normals, mean and log standard deviation [N, 2]; NLL asks for `log_prob`."""

    mean: jax.Array
    log_sd: jax.Array

    def log_prob(self, value: jax.Array) -> jax.Array:
        """[N], the sum over both."""
        z = (value - self.mean) * jnp.exp(-self.log_sd)
        return jnp.sum(-0.5 * z**2 - self.log_sd - 0.5 * math.log(2 * math.pi), axis=-1)


class Density(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        dense = lambda a, b: nnx.Linear(a, b, rngs=rngs)  # noqa: E731
        self.net = nnx.Sequential(dense(len(TIMES), 64), nnx.relu, dense(64, 64), nnx.relu, dense(64, 4))

    def __call__(self, seen):
        return Normal(*jnp.split(self.net(seen), 2, axis=-1))


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--out", type=Path, default=Path("."), help="directory for the picture and the cache")
    read.add_argument("--steps", type=int, default=4000)
    read.add_argument("--samples", type=int, default=20_000, help="simulated pairs, eight tenths of them to train on")
    options = read.parse_args()
    simulated = SimulationDataset(forward_model=Oscillator(), prior=Prior(), n_samples=options.samples)
    pairs = CachedDataset(source=simulated, cache_dir=options.out / "cache")
    train, val, test = (pairs.with_split(split).map(turned, on="pair") for split in ("train", "val", "test"))
    loop = TrainingLoop(
        model_op=NNXModelOp(Density(nnx.Rngs(0))), dataset=train, val_dataset=val, loss=NLL(), max_steps=options.steps,
        batch_size=128, optimizer_config={"name": "adam", "lr": {"name": "cosine", "init_value": 2e-3,
                                                                 "decay_steps": options.steps}}, quiet=True,
    )  # fmt: skip
    posterior, artifact = loop.run()
    rows = test.take(np.arange(len(test)))
    found, true = posterior(rows["x"]), rows["y"]
    mean, sd = np.asarray(found.mean), np.exp(np.asarray(found.log_sd))
    inside = np.abs(true - mean) < 1.645 * sd
    print(f"negative log-likelihood {artifact.backend_info['final_metrics']['val_loss']:.3f} on the validation set")
    for place, name in enumerate(NAMES):
        share = inside[:, place].mean()
        print(f"{name}: sd {sd[:, place].mean():.3f} on average, {share:.3f} of the truths in the 90 % intervals")
    figure = matplotlib.figure.Figure(figsize=(9, 4))
    for place, axis in enumerate(figure.subplots(1, 2)):
        axis.errorbar(true[:200, place], mean[:200, place], 1.645 * sd[:200, place], fmt=".", elinewidth=0.5)
        axis.axline((mean[:, place].mean(),) * 2, slope=1, color="k", linewidth=1)
        axis.set(xlabel=f"true {NAMES[place]}", ylabel="posterior mean and 90 %")
    figure.savefig(options.out / "amortised_inference.png", dpi=120)


if __name__ == "__main__":
    main()
