"""Fine-tuning by LoRA: the base weights keep every bit, and merged weights say what the addition said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nnx_jax.data import ArrayDataset
from nnx_jax.model import NNModel
from nnx_jax.objectives import dpo_objective
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.net import TransformerLMParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import NNTrainParams
from tests.objectives.paradigm_toys import assert_close, weights

IDS = np.random.default_rng(0).integers(0, 11, (12, 9)).astype(np.int32)


def model() -> NNModel:
    net = TransformerLMParams(vocab_size=11, context_length=8, d_model=8, n_layers=1, n_heads=2)
    return NNModel(net_params=net, seed=3)


def params(**optim: object) -> NNTrainParams:
    return NNTrainParams(n_epochs=2, optim=NNOptimParams(kind="adamw", max_lr=3e-2, weight_decay=0.1, **optim))


def parts(tuned: NNModel) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(base weights, additions)."""
    named = weights(tuned)
    added = {name: value for name, value in named.items() if ".lora_" in name}
    return {name: value for name, value in named.items() if name not in added}, added


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_base_weights_are_bit_identical_and_merged_ones_give_the_same(tmp_path: Path, window: int) -> None:
    tuned, rows = model(), ArrayDataset(IDS[:, :-1], IDS[:, 1:])
    base, untuned = weights(tuned), tuned.evaluate(rows)["loss"]
    tuned.transform("lora", rank=2, patterns=["blocks.*"])
    assert tuned.evaluate(rows)["loss"] == pytest.approx(untuned, rel=1e-6)
    first, additions = parts(tuned)
    assert_close(first, base, 0.0)
    assert len(additions) == 8  # two for each of qkv, out, up and down
    data = NNDataParams(train=rows, batch_size=4)
    tuned.train(params(accumulate_grad_batches=window), data=data, runs_dir=tmp_path, quiet=True)
    after, moved = parts(tuned)
    assert all(after[name].tobytes() == base[name].tobytes() for name in base)
    assert all(np.abs(moved[name] - additions[name]).max() > 0 for name in moved)

    before, scored = tuned.predict(IDS[:, :-1]).logits, tuned.evaluate(rows)["loss"]
    assert scored < untuned - 5e-3
    assert np.abs(before - model().predict(IDS[:, :-1]).logits).max() > 1e-3
    tuned.transform("lora_merge")
    assert parts(tuned)[1] == {}
    assert weights(tuned).keys() == base.keys()
    np.testing.assert_allclose(tuned.predict(IDS[:, :-1]).logits, before, rtol=1e-5, atol=1e-5)
    assert tuned.evaluate(rows)["loss"] == pytest.approx(scored, rel=1e-5)


def test_an_objective_moves_the_additions_alone(tmp_path: Path) -> None:
    """Preferences by LoRA: the reference is the model without additions, which is what the model is at first."""
    tuned = model()
    reference, base = tuned.net, weights(tuned)
    objective = dpo_objective(reference, beta=1.0)
    tuned.transform("lora", rank=2)
    counted = np.ones_like(IDS)
    columns = {"chosen": IDS, "rejected": IDS[::-1].copy(), "chosen_mask": counted, "rejected_mask": counted}
    data = NNDataParams(train=ArrayDataset(columns), val=ArrayDataset(columns), batch_size=4)
    run = tuned.train(params(), data=data, objective=objective, runs_dir=tmp_path, quiet=True)
    assert run.column("train_loss")[0] == pytest.approx(np.log(2), abs=1e-5)
    after, _ = parts(tuned)
    assert all(after[name].tobytes() == base[name].tobytes() for name in base)
