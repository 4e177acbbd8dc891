"""An emulator of a simulated pendulum: python examples/emulator.py [--out DIR] [--steps N] (half a minute).

A dataset simulates pairs (state, state after dt), a loop trains a network on them, and the trained operator takes the
simulator's place in a rollout. One sees both swing for ten seconds, and how far they are apart.
"""

import argparse
import dataclasses
from pathlib import Path

import matplotlib.figure
import numpy as np
from flax import nnx

from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.data import CachedDataset, SimulationDataset
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.objectives.operators import MSE
from nnx_jax.training_loop import TrainingLoop


@dataclasses.dataclass(frozen=True)
class Pendulum:
    """A damped pendulum, state [angle (rad), velocity (rad/s)]; a forward model has `dt` and `step(state, dt)`."""

    omega: float = 2.0
    damping: float = 0.1
    dt: float = 0.1

    def step(self, state: np.ndarray, dt: float) -> np.ndarray:
        for _ in range(4):  # classical Runge-Kutta, four steps of dt / 4
            h = dt / 4
            k1 = self.slope(state)
            k2 = self.slope(state + h / 2 * k1)
            k3 = self.slope(state + h / 2 * k2)
            state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.slope(state + h * k3))
        return state

    def slope(self, state: np.ndarray) -> np.ndarray:
        return np.array([state[1], -(self.omega**2) * np.sin(state[0]) - self.damping * state[1]])


@register("pendulum_start")
class Start(Operator):
    """The prior: angle and velocity, uniform; a function of the seed alone."""

    def _apply(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).uniform([-2.5, -5.0], [2.5, 5.0])


class Increment(nnx.Module):
    """A network that learns what one step adds."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        dense = lambda a, b: nnx.Linear(a, b, rngs=rngs)  # noqa: E731
        self.net = nnx.Sequential(dense(2, 64), nnx.tanh, dense(64, 64), nnx.tanh, dense(64, 2))

    def __call__(self, state):
        return state + self.net(state)


@register("neural_forward")
class NeuralForward(Operator):
    """A trained operator in a forward model's place; its dt is the one it was trained at."""

    model_op: Operator
    dt: float

    def step(self, state: np.ndarray, dt: float) -> np.ndarray:
        del dt
        return np.asarray(self.model_op(np.asarray(state, np.float32)))


def rollout(model, state: np.ndarray, steps: int) -> np.ndarray:
    """States [steps + 1, 2] of any forward model."""
    states = [np.asarray(state)]
    for _ in range(steps):
        states.append(model.step(states[-1], model.dt))
    return np.stack(states)


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--out", type=Path, default=Path("."), help="directory for the picture and the cache")
    read.add_argument("--steps", type=int, default=10_000)
    read.add_argument("--samples", type=int, default=10_000, help="simulated pairs, eight tenths of them to train on")
    options = read.parse_args()
    pendulum = Pendulum()
    simulated = SimulationDataset(forward_model=pendulum, prior=Start(), n_samples=options.samples)
    cached = CachedDataset(source=simulated, cache_dir=options.out / "cache")  # simulated once
    loop = TrainingLoop(
        model_op=NNXModelOp(Increment(nnx.Rngs(0))), dataset=cached, val_dataset=cached.with_split("val"), loss=MSE(),
        max_steps=options.steps, batch_size=128, quiet=True,
        optimizer_config={"name": "adam", "lr": {"name": "cosine", "init_value": 3e-3, "decay_steps": options.steps}},
    )  # fmt: skip
    emulator, artifact = loop.run()
    val = artifact.backend_info["final_metrics"]["val_loss"]
    told = f"one step: root mean square error {val**0.5:.2e} on states that were not trained on"
    start, times = np.array([2.0, 0.0]), np.arange(101) * pendulum.dt
    true = rollout(pendulum, start, 100)
    found = rollout(NeuralForward(model_op=emulator, dt=pendulum.dt), start, 100)
    print(f"{told}\n10 s: at most {np.abs(true - found)[:, 0].max():.2e} rad from the simulator")
    figure = matplotlib.figure.Figure(figsize=(8, 4))
    axis = figure.subplots()
    axis.plot(times, true[:, 0], label="simulator")
    axis.plot(times, found[:, 0], "--", label="emulator")
    axis.set(xlabel="time (s)", ylabel="angle (rad)")
    axis.legend()
    figure.savefig(options.out / "emulator.png", dpi=120)


if __name__ == "__main__":
    main()
