"""Distillation: a small network learns from a large one, most of the time from images that have no label.

A teacher is trained on all labels of the digits. Two small students then have 60 labels: one is trained on these alone,
one sees all images and learns on those without a label from what the teacher says. One sees the accuracy of all three
on the test images; the second student comes near its teacher.

    python examples/distill_digits.py [--out DIR] [--epochs N]
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
    kd_objective,
)

LABELS = 60


def classifier(*hidden):
    params = NNModelParams(metrics=["accuracy"])
    return NNModel(FeedForwardParams(input_dim=64, output_dim=10, hidden_dims=hidden), params)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", default="runs", help="where runs are kept")
    options.add_argument("--epochs", type=int, default=40)
    given = options.parse_args()

    def train(model, rows, **more):
        """As many updates for each, whatever the number of its images."""
        optim, updates = NNOptimParams(kind="adamw", max_lr=3e-3), given.epochs * len(y) // 64
        params = NNTrainParams(max_steps=updates, optim=optim, overwrite_existing=True)
        data, commits = NNDataParams(train=rows, batch_size=64), CheckpointParams(every_n_epochs=None)
        model.train(params, data=data, checkpoint=commits, runs_dir=given.out, quiet=True, **more)
        return model.evaluate(test)["accuracy"]

    digits, test = DigitsDataset(split="train").arrays(), DigitsDataset(split="test")
    x, y = digits["x"], digits["y"]
    few = ArrayDataset(x[:LABELS], y[:LABELS], n_classes=10)
    unlabelled = ArrayDataset(x, np.where(np.arange(len(y)) < LABELS, y, -100), n_classes=10)

    teacher, alone, student = classifier(256, 256), classifier(16), classifier(16)
    print(f"teacher, {len(y)} labels:             accuracy {train(teacher, ArrayDataset(x, y)):.3f}")
    print(f"student, {LABELS} labels:               accuracy {train(alone, few):.3f}")
    objective = kd_objective(teacher, alpha=0.9, temperature=2.0)
    distilled = train(student, unlabelled, objective=objective)
    print(f"student, {LABELS} labels and a teacher: accuracy {distilled:.3f}")


if __name__ == "__main__":
    main()
