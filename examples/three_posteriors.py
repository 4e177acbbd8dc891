"""One model, three engines: python examples/three_posteriors.py [--out DIR] [--draws N] (a minute on two cores).

A straight line with a known error is fitted by variational inference, by NumPyro's NUTS and by BlackJAX's NUTS; only
the backend's name changes. One sees both samplers agree with the posterior in closed form, and the variational one
(independent normals) find its centre and miss its tilt.
"""

import argparse
from pathlib import Path

import matplotlib.figure
import numpy as np
import numpyro
import numpyro.distributions as dist

from nnx_jax import ArrayDataset
from nnx_jax.engines.bayes import NumpyroTask
from nnx_jax.training_loop import TrainingLoop

ERROR, PRIOR = 0.5, 5.0  # standard deviations of an observation and of each coefficient
BACKENDS = ("numpyro-svi", "numpyro-mcmc", "blackjax")


def line(x, y=None):
    w, b = (numpyro.sample(name, dist.Normal(0.0, PRIOR)) for name in ("w", "b"))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("obs", dist.Normal(w * x + b, ERROR), obs=y)


def exact(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [2] and covariance [2, 2] of the posterior of (w, b): normal prior, normal error, so normal."""
    design = np.stack([x, np.ones_like(x)], axis=1).astype(np.float64)
    covariance = np.linalg.inv(design.T @ design / ERROR**2 + np.eye(2) / PRIOR**2)
    return covariance @ design.T @ y / ERROR**2, covariance


def draws_of(operator, backend: str, number: int) -> np.ndarray:
    """Draws [number, 2] of (w, b) from a trained operator; those of a guide of independent normals are made here."""
    found = operator.posterior
    if backend != "numpyro-svi":
        return np.stack([found["w"], found["b"]], axis=1)
    noise = np.random.default_rng(0).normal(size=(number, 2))
    centre = np.array([found[f"{name}_auto_loc"] for name in ("w", "b")])
    return centre + noise * np.array([np.logaddexp(0, found[f"{name}_auto_scale"]) for name in ("w", "b")])


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--out", type=Path, default=Path("."), help="directory for the picture")
    read.add_argument("--draws", type=int, default=1000, help="draws of each chain, and of warmup")
    read.add_argument("--steps", type=int, default=3000, help="updates of the variational fit")
    options = read.parse_args()
    rng = np.random.default_rng(0)
    x = rng.uniform(0.0, 2.0, 40).astype(np.float32)  # not centred, so slope and intercept go together
    y = (2.0 * x + 1.0 + ERROR * rng.normal(size=40)).astype(np.float32)
    task = NumpyroTask(line, num_warmup=options.draws, num_samples=options.draws, num_chains=2)
    mean, covariance = exact(x, y)
    sd, tilt = np.sqrt(np.diag(covariance)), covariance[0, 1] / np.sqrt(np.prod(np.diag(covariance)))
    print(f"{'exact':13} w {mean[0]:.3f} +- {sd[0]:.3f}   b {mean[1]:.3f} +- {sd[1]:.3f}   correlation {tilt:.2f}")
    figure = matplotlib.figure.Figure(figsize=(12, 4))
    turn = np.linspace(0, 2 * np.pi, 100)
    ring = mean[:, None] + 2 * np.linalg.cholesky(covariance) @ np.stack([np.cos(turn), np.sin(turn)])
    for axis, backend in zip(figure.subplots(1, 3, sharex=True, sharey=True), BACKENDS, strict=True):
        svi = {"optimizer_config": {"name": "adam", "lr": 1e-2}, "max_steps": options.steps}
        length = svi if backend == "numpyro-svi" else {"max_steps": options.draws}
        loop = TrainingLoop(task=task, dataset=ArrayDataset(x, y), backend=backend, quiet=True, **length)
        operator, _ = loop.run()
        found = draws_of(operator, backend, 2 * options.draws)
        told = [f"{n} {found[:, i].mean():.3f} +- {found[:, i].std():.3f}" for i, n in enumerate("wb")]
        print(f"{backend:13} {told[0]}   {told[1]}   correlation {np.corrcoef(found.T)[0, 1]:.2f}")
        axis.scatter(*found.T, s=2, alpha=0.5)
        axis.plot(*ring, "k", linewidth=1, label="exact, 2 sd")
        axis.set(title=backend, xlabel="slope", ylabel="intercept")
    figure.savefig(options.out / "three_posteriors.png", dpi=120)


if __name__ == "__main__":
    main()
