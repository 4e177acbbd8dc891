"""LoRA: a language model of Python's source learns English by small additions to weights that keep every bit.

A byte model is trained on the standard library's code; then its linear layers get additions of rank 4, and these alone
are trained on the text of Python's manual (`pydoc_data.topics`). One sees the loss on that text before and after,
how few numbers were trained, that the base weights are bit-identical, and that the merged model gives the same outputs.

    python examples/lora_text.py [--out DIR] [--epochs N]
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from flax import nnx

from nnx_jax import (
    CheckpointParams,
    NNDataParams,
    NNModel,
    NNOptimParams,
    NNTrainParams,
    TextBytesDataset,
    TransformerLMParams,
)


def weights(model):
    """Every parameter by name."""
    return {".".join(map(str, path)): np.asarray(value[...]) for path, value in nnx.to_flat_state(nnx.state(model.net))}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", default="runs", help="where runs are kept")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--max-bytes", type=int, default=300_000, help="of each text")
    given = options.parse_args()
    manual = Path(given.out, "manual.txt")
    manual.parent.mkdir(parents=True, exist_ok=True)
    manual.write_text("\n".join(topics.values()), encoding="utf-8")

    def text(path, split="train"):
        return TextBytesDataset(path=path, split=split, context_length=64, max_bytes=given.max_bytes)

    def train(model, rows, rate):
        optim = NNOptimParams(kind="adamw", max_lr=rate, grad_clip_norm=1.0)
        params = NNTrainParams(n_epochs=given.epochs, optim=optim, overwrite_existing=True)
        data, commits = NNDataParams(train=rows, batch_size=32), CheckpointParams(every_n_epochs=None)
        model.train(params, data=data, checkpoint=commits, runs_dir=given.out, quiet=True)

    unseen = text(str(manual), "val")
    model = NNModel(TransformerLMParams(vocab_size=256, context_length=64, d_model=64, n_layers=2, n_heads=4))
    train(model, text(None), 3e-3)
    print(f"loss on the manual before: {model.evaluate(unseen)['loss']:.3f} nats a byte")

    base = weights(model)
    model.transform("lora", rank=4)
    train(model, text(str(manual)), 1e-2)
    tuned = weights(model)
    same = all(tuned[name].tobytes() == value.tobytes() for name, value in base.items())
    added = sum(value.size for name, value in tuned.items() if name not in base)
    print(f"loss on the manual after:  {model.evaluate(unseen)['loss']:.3f}")
    print(f"trained {added} numbers beside {sum(value.size for value in base.values())}; base bit-identical: {same}")

    rows = unseen.take(np.arange(4))["x"]
    before = model.predict(rows).logits
    model.transform("lora_merge")
    print(f"largest difference of the merged model's outputs: {np.abs(model.predict(rows).logits - before).max():.1e}")


if __name__ == "__main__":
    main()
