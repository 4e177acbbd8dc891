"""Mixup: mixtures of two images, each owing its label a share of the loss, in place of the images themselves.

Of all labels of the digits 40 % are replaced by random ones, and a network is trained on them twice. One sees its
accuracy on these labels and on the true ones of the test images: without mixup it learns the wrong labels by heart.

    python examples/mixup_digits.py [--out DIR] [--epochs N]
"""

import argparse

import numpy as np

from nnx_jax import (
    ArrayDataset,
    CheckpointParams,
    DigitsDataset,
    FeedForwardParams,
    NNDataParams,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNTrainParams,
)
from nnx_jax.objectives import mixup_objective

WRONG = 0.4


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", default="runs", help="where runs are kept")
    options.add_argument("--epochs", type=int, default=100)
    options.add_argument("--alpha", type=float, default=4.0, help="of the Beta distribution of the shares")
    given = options.parse_args()

    draw, digits, test = np.random.default_rng(0), DigitsDataset(split="train").arrays(), DigitsDataset(split="test")
    x, y = digits["x"], digits["y"]
    noisy = ArrayDataset(x, np.where(draw.uniform(size=len(y)) < WRONG, draw.integers(0, 10, len(y)), y))
    print(f"{'':8}{'accuracy on noisy labels':>26}{'on test images':>18}{'test loss':>12}")
    for name, objective in (("plain", None), ("mixup", mixup_objective(given.alpha))):
        model = NNModel(FeedForwardParams(hidden_dims=[256, 256]), NNModelParams(metrics=["accuracy"]))
        optim = NNOptimParams(kind="adamw", max_lr=1e-3)
        params = NNTrainParams(n_epochs=given.epochs, optim=optim, overwrite_existing=True)
        data, commits = NNDataParams(train=noisy, batch_size=64), CheckpointParams(every_n_epochs=None)
        model.train(params, data=data, objective=objective, checkpoint=commits, runs_dir=given.out, quiet=True)
        known, unknown = model.evaluate(noisy)["accuracy"], model.evaluate(test)
        print(f"{name:8}{known:26.3f}{unknown['accuracy']:18.3f}{unknown['loss']:12.3f}")


if __name__ == "__main__":
    main()
