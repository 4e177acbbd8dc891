"""A GAN on eight Gaussians, two optimizers: python examples/gan_2d.py --out pictures (a minute on two cores)."""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from flax import nnx

from nnx_jax import ArrayDataset, NNDataParams, NNModel, NNOptimParams, NNTrainerParams, Trainer

CENTRES = 2 * np.exp(2j * np.pi * np.arange(8) / 8).view(np.float64).reshape(8, 2)


def eight_gaussians(rows: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (CENTRES[rng.integers(8, size=rows)] + 0.1 * rng.normal(size=(rows, 2))).astype(np.float32)


class GAN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        dense = lambda a, b: nnx.Linear(a, b, rngs=rngs)  # noqa: E731
        self.g = nnx.Sequential(dense(8, 128), nnx.relu, dense(128, 128), nnx.relu, dense(128, 2))
        self.d = nnx.Sequential(dense(2, 128), nnx.relu, dense(128, 128), nnx.relu, dense(128, 1))


def step(ctx):
    """The discriminator learns to tell data from the generator's points, the generator to be taken for data."""
    real, d, g = ctx.batch["x"], ctx.optimizers["d"], ctx.optimizers["g"]
    noise = jax.random.normal(ctx.rng, (len(real), 8))

    def apart(net):
        slope = jax.grad(lambda x: net.d(x).sum())(real)  # R1 (Mescheder et al. 2018) keeps both from circling
        penalty = 0.15 * ctx.mean(jnp.sum(slope**2, axis=-1))
        return ctx.mean(nnx.softplus(-net.d(real))) + ctx.mean(nnx.softplus(net.d(net.g(noise)))) + penalty

    d_loss, grads = d.value_and_grad(apart)  # by the parameters of d alone
    d.update(grads)
    ctx.report_update("d")
    g_loss, grads = g.value_and_grad(lambda net: ctx.mean(nnx.softplus(-net.d(net.g(noise)))))
    g.update(grads)
    ctx.report_update("g")
    return {"loss": d_loss, "g_loss": g_loss}


def judge(points: np.ndarray) -> str:
    """How many of the eight hold at least 2 % of the points, and the share of points within three deviations of one."""
    distance = np.linalg.norm(points[:, None] - CENTRES, axis=-1)
    near = distance.min(axis=1) < 0.3
    found = np.bincount(distance.argmin(axis=1)[near], minlength=8) >= 0.02 * len(points)
    return f"{found.sum()} of 8 modes, {near.mean():.0%} of the points near one"


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--out", type=Path, default=Path("."), help="directory for the picture and the run")
    read.add_argument("--epochs", type=int, default=40)
    options = read.parse_args()
    net, noise = GAN(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (2000, 8))
    shown = {"data": eight_gaussians(2000, seed=1), "before": np.asarray(net.g(noise))}
    adam = {"kind": "adam", "betas": (0.0, 0.9), "max_lr": 2e-3}
    optims = {name: NNOptimParams(**adam, param_groups=[{"patterns": f"{name}.*"}]) for name in ("d", "g")}
    data = NNDataParams(train=ArrayDataset(x=eight_gaussians(8192)), batch_size=128)
    params = NNTrainerParams(optims=optims, n_epochs=options.epochs, overwrite_existing=True)
    Trainer(NNModel(module=net)).train(params, step, data=data, runs_dir=options.out / "runs")
    shown["after"] = np.asarray(net.g(noise))
    print(*(f"{name}: {judge(points)}" for name, points in shown.items()), sep="\n")
    figure = matplotlib.figure.Figure(figsize=(12, 4))
    for axis, (name, points) in zip(figure.subplots(1, 3), shown.items(), strict=True):
        axis.scatter(*points.T, s=3)
        axis.set(title=name, xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
    figure.savefig(options.out / "gan_2d.png", dpi=120)


if __name__ == "__main__":
    main()
