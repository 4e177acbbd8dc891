"""SimCLR: an encoder learns from images without a label, by telling two views of one image from those of all others.

One sees how well a linear classifier reads digits from the encoder's features, given 50 labels: from the untrained
encoder, and from the trained one, which no label has seen.

    python examples/simclr_digits.py [--out DIR] [--epochs N]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sklearn.linear_model import LogisticRegression

from nnx_jax import DigitsDataset, NNDataParams, NNModel, NNOptimParams, NNSchedulerParams, NNTrainParams
from nnx_jax.objectives import simclr_objective

LABELS = 50


class Encoder(nnx.Module):
    """Features [B, 128] of images, and behind them the head that only the training needs."""

    def __init__(self, rngs):
        self.conv_1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv_2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.features = nnx.Linear(4 * 4 * 32, 128, rngs=rngs)
        self.head = nnx.Linear(128, 32, rngs=rngs)

    def encode(self, x):
        x = jax.nn.relu(self.conv_2(jax.nn.relu(self.conv_1(x))))
        return jax.nn.relu(self.features(x.reshape(x.shape[0], -1)))

    def __call__(self, x):
        return self.head(self.encode(x))


def augment(key, image):
    """Moved by up to a pixel, turned a little, brighter or darker, with noise: still the same digit."""
    keys = jax.random.split(key, 4)
    shift, angle = jax.random.uniform(keys[0], (2,), minval=-1.2, maxval=1.2), 0.3 * jax.random.normal(keys[1])
    at = jnp.stack(jnp.meshgrid(jnp.arange(8.0), jnp.arange(8.0), indexing="ij")) - 3.5
    turn = jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])
    place = jnp.einsum("ij,jhw->ihw", turn, at) + 3.5 + shift[:, None, None]
    moved = jax.scipy.ndimage.map_coordinates(image[..., 0], place, order=1)
    light = jax.random.uniform(keys[2], minval=0.6, maxval=1.2)
    return (light * moved + 0.05 * jax.random.normal(keys[3], moved.shape))[..., None]


def probe(model):
    """Accuracy on the test images of a linear classifier of the features of LABELS images."""
    train, test = DigitsDataset(split="train", image=True).arrays(), DigitsDataset(split="test", image=True).arrays()
    features = nnx.jit(lambda net, x: net.encode(x))
    known, asked = (np.asarray(features(model.net, rows)) for rows in (train["x"][:LABELS], test["x"]))
    return LogisticRegression(max_iter=2000).fit(known, train["y"][:LABELS]).score(asked, test["y"])


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", default="runs", help="where the run is kept")
    options.add_argument("--epochs", type=int, default=30)
    given = options.parse_args()
    model = NNModel(module=Encoder(nnx.Rngs(0)))
    print(f"linear probe before: accuracy {probe(model):.3f}")
    rate = {"optim": NNOptimParams(kind="adamw", max_lr=3e-3), "scheduler": NNSchedulerParams(kind="warmup_cosine")}
    params = NNTrainParams(n_epochs=given.epochs, overwrite_existing=True, **rate)
    data = NNDataParams(train=DigitsDataset(split="train", image=True), batch_size=128, tail="drop")
    run = model.train(params, data=data, objective=simclr_objective(augment, 0.2), runs_dir=given.out, quiet=True)
    first, last = (run.epochs[at]["train_pair_accuracy"] for at in (0, -1))
    print(f"views paired rightly: {first:.3f} in the first epoch, {last:.3f} in the last")
    print(f"linear probe after:  accuracy {probe(model):.3f}")


if __name__ == "__main__":
    main()
