"""DPO: a byte model of English is told, by pairs of its own texts alone, that somebody likes texts with few e.

A model is trained on Python's manual (`pydoc_data.topics`) and continues each of some hundred starts twice. Of two
continuations the one with fewer e is the chosen one. One sees the share of unseen pairs where the chosen text gained
more on the first model than the rejected one, epoch by epoch, and how many e the model writes before and after.

    python examples/dpo_text.py [--out DIR] [--epochs N]
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

import nnx_jax as nj
from nnx_jax.objectives import dpo_objective

LENGTH, START = 48, 16
COUNTED = np.arange(LENGTH) >= START


def continued(model, texts, seed):
    """Texts [N, LENGTH] with everything behind the start written by the model, each byte drawn as it thinks likely."""
    draw, texts = np.random.default_rng(seed), np.where(COUNTED, 0, texts).astype(np.int32)
    for at in range(START, LENGTH):
        likely = model.predict(texts).logits[:, at - 1]
        texts[:, at] = np.argmax(likely + draw.gumbel(size=likely.shape), axis=1)
    return texts


def number_of_e(texts):
    return np.sum(COUNTED & (texts == ord("e")), axis=1)


def pairs(model, texts, seed):
    both = np.stack([continued(model, texts, seed), continued(model, texts, seed + 1)])
    both = both[:, number_of_e(both[0]) != number_of_e(both[1])]
    fewer = number_of_e(both[0]) < number_of_e(both[1])
    chosen, rejected = (np.where(which[:, None], both[0], both[1]) for which in (fewer, ~fewer))
    mask = np.tile(COUNTED.astype(np.int32), (len(fewer), 1))
    return nj.ArrayDataset(chosen=chosen, rejected=rejected, chosen_mask=mask, rejected_mask=mask)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", default="runs", help="where runs are kept")
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--rows", type=int, default=400, help="number of starts")
    given = options.parse_args()

    def train(model, data, epochs, rate, **more):
        optim = nj.NNOptimParams(kind="adamw", max_lr=rate, grad_clip_norm=1.0)
        params = nj.NNTrainParams(n_epochs=epochs, optim=optim, overwrite_existing=True)
        commits = nj.CheckpointParams(every_n_epochs=None)
        return model.train(params, data=data, checkpoint=commits, runs_dir=given.out, quiet=True, **more)

    text = Path(given.out, "manual.txt")
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("\n".join(topics.values()), encoding="utf-8")
    known, unseen = (nj.TextBytesDataset(path=str(text), split=s, context_length=LENGTH) for s in ("train", "val"))
    model = nj.NNModel(nj.TransformerLMParams(vocab_size=256, context_length=LENGTH, d_model=64, n_layers=2, n_heads=4))
    rows = np.random.default_rng(0).permutation(len(known))[: 8 * given.rows]
    train(model, nj.NNDataParams(train=nj.ArrayDataset(known.take(rows)), batch_size=32), 5, 3e-3)

    asked = unseen.take(np.arange(len(unseen))[: given.rows // 2])["x"]
    print(f"e in a text: {number_of_e(continued(model, asked, 7)).mean():.2f}")
    train_pairs, val_pairs = pairs(model, known.take(rows[: given.rows])["x"], 1), pairs(model, asked, 3)
    data = nj.NNDataParams(train=train_pairs, val=val_pairs, batch_size=32)
    run = train(model, data, given.epochs, 1e-4, objective=dpo_objective(model, beta=0.2))
    for number, epoch in enumerate(run.epochs, 1):
        print(f"epoch {number}: preference accuracy {epoch['val_preference_accuracy']:.3f}", end=", ")
        print(f"reward margin {epoch['val_reward_margin']:.3f}")
    after = continued(model, asked, 7)
    print(f"e in a text: {number_of_e(after).mean():.2f}, such as {bytes(after[0].tolist())!r}")


if __name__ == "__main__":
    main()
