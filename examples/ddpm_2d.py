"""Diffusion in the plane: a network learns to take noise away, and makes points of a spiral out of nothing but noise.

One sees the loss of the noise, how far samples lie from the data, and a picture of both, `ddpm_2d.png`.

    python examples/ddpm_2d.py [--out DIR] [--epochs N]
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import nnx_jax as nj
from nnx_jax.objectives import ddpm_objective, ddpm_sample

STEPS = 100


class Denoiser(nnx.Module):
    """The noise in x_t [B, 2] at step t [B], which it is told by waves of several lengths."""

    def __init__(self, rngs, width=128):
        self.first = nnx.Linear(2 + 16, width, rngs=rngs)
        self.hidden = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x, t):
        angle = t[:, None] / STEPS * 2.0 ** jnp.arange(8)
        h = jax.nn.silu(self.first(jnp.concatenate([x, jnp.sin(angle), jnp.cos(angle)], axis=1)))
        for layer in self.hidden:
            h = h + jax.nn.silu(layer(h))
        return self.last(h)


def spiral(rows=4000):
    draw = np.random.default_rng(0)
    angle = 1.5 * np.pi * (1 + 2 * np.sqrt(draw.uniform(size=rows)))
    points = np.stack([angle * np.cos(angle), angle * np.sin(angle)], axis=1) / 8.0
    return (points + 0.03 * draw.normal(size=(rows, 2))).astype(np.float32)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", default="runs", help="where the run and the picture are kept")
    options.add_argument("--epochs", type=int, default=1000)
    given = options.parse_args()
    points, model = spiral(), nj.NNModel(module=Denoiser(nnx.Rngs(0)))
    schedule = nj.NNSchedulerParams(kind="warmup_cosine", clock="optimizer_update")
    optim = nj.NNOptimParams(kind="adam", max_lr=4e-3)
    params = nj.NNTrainParams(n_epochs=given.epochs, optim=optim, scheduler=schedule, overwrite_existing=True)
    data, objective = nj.NNDataParams(train=nj.ArrayDataset(x=points), batch_size=500), ddpm_objective(STEPS, "cosine")
    commits = nj.CheckpointParams(every_n_epochs=None)  # one, at the end
    run = model.train(params, data=data, objective=objective, checkpoint=commits, runs_dir=given.out, quiet=True)
    print(f"loss of the noise: {run.epochs[0]['train_loss']:.3f}, at the end {run.epochs[-1]['train_loss']:.3f}")

    made = np.asarray(ddpm_sample(model, (2000, 2), 0, n_steps=STEPS, schedule="cosine"))
    apart = np.linalg.norm(made[:, None] - points[None], axis=-1).min(axis=1)
    print(f"half of the samples are nearer than {np.median(apart):.3f} to a point of the data")
    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, rows, title in zip(axes, (points, made), ("data", "samples"), strict=True):
        axis.scatter(*rows[:2000].T, s=3, alpha=0.5)
        axis.set(title=title, aspect="equal")
    path = Path(given.out) / "ddpm_2d.png"
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
