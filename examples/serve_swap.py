"""From training to serving by one swap: python examples/serve_swap.py [--out DIR] [--steps N] (half a minute).

A classifier of digits is trained behind the preprocessing it will be served with, stored in a registry, loaded from
there as another program would, put into the pipeline in place of the untrained one, and exported as one file of
StableHLO. One sees that all of them give the same answers, bit for bit or to rounding.
"""

import argparse
from pathlib import Path

import numpy as np

from nnx_jax import DigitsDataset, FeedForwardParams
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.core.registry import register
from nnx_jax.engines.exported import export_operator, load_exported
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.loop.step_builtin import Checkpoint
from nnx_jax.runs.artifact import TrainingArtifact
from nnx_jax.runs.registry import LocalModelRegistry
from nnx_jax.training_loop import TrainingLoop


@register("contrast")
class Contrast(Operator):
    """Pixels spread by a factor around their middle."""

    factor: float = 2.0

    def _apply(self, pixels):
        return (pixels - 0.5) * self.factor


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--out", type=Path, default=Path("."), help="directory for the registry and the files")
    read.add_argument("--steps", type=int, default=600)
    options = read.parse_args()
    contrast, registry = Contrast(), LocalModelRegistry(options.out / "models")
    untrained = NNXModelOp(net=FeedForwardParams(input_dim=64, hidden_dims=[64], output_dim=10), seed=0)
    loop = TrainingLoop(
        model_op=untrained, dataset=DigitsDataset(split="train") | contrast, loss="cross_entropy",
        max_steps=options.steps, batch_size=64, optimizer_config={"name": "adamw", "lr": 3e-3}, quiet=True,
        callbacks=[Checkpoint(registry=registry)],
    )  # fmt: skip
    trained, artifact = loop.run()
    artifact.save(options.out / "artifact.json")

    # What follows is another program's work: it has the artifact and the registry.
    loaded = TrainingArtifact.load(options.out / "artifact.json").reload_model(registry)
    pipeline = Sequential([contrast, untrained])  # what was served so far
    served = Sequential([pipeline[0], loaded])  # the swap
    file = options.out / "digits.stablehlo"
    digits = DigitsDataset(split="test").arrays()
    export_operator(served, digits["x"][:1], file)
    exported = load_exported(file)

    answers = np.asarray(served(digits["x"]))
    same = np.array_equal(answers, np.asarray(trained(contrast(digits["x"]))))
    apart = np.abs(answers - np.asarray(exported(digits["x"]))).max()
    accuracy = (answers.argmax(axis=1) == digits["y"]).mean()
    before = (np.asarray(pipeline(digits["x"])).argmax(axis=1) == digits["y"]).mean()
    print(f"accuracy {before:.3f} before the swap, {accuracy:.3f} after")
    print(f"from the registry bit-identical: {same}; the exported file at most {apart:.1e} apart")
    print(f"{file.name}: {file.stat().st_size / 1024:.0f} KiB, takes {exported.signature['input']}")


if __name__ == "__main__":
    main()
