"""The same list of hooks trains the same network in both frameworks: weights, vetoes, records and averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax import FeedForwardParams
from nnx_jax.data import ArrayDataset
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, GradientClipHook, SkipNonFinite, SpikeSkipHook
from nnx_jax.model import NNModel as JaxModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.torch import NNModel
from nnx_jax.torch.convert import flax_to_torch, to_torch

pytestmark = pytest.mark.slow

NET = FeedForwardParams(input_dim=4, output_dim=3, hidden_dims=(6,))
UPDATES = 30
TOLERANCE: Any = {"rtol": 2e-6 * UPDATES, "atol": 2e-7 * UPDATES}
"""Float32 rounds at 6e-8 of a value; a few roundings of every update add up over all of them."""


def hooks() -> list[Any]:
    return [
        GradientAccumulationHook(2),
        SkipNonFinite(),
        GradientClipHook(0.3),
        SpikeSkipHook(factor=1.3, decay=0.8, warmup=3, max_consecutive=None),
        EMAHook(decay=0.9, update_every=2, start_step=2),
    ]


def train(model: Any, folder: Path) -> tuple[Any, dict[str, Any], list[Any]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(38, 4)).astype(np.float32)  # ten batches an epoch, the last one of two rows
    x[7] *= 6.0
    data = NNDataParams(train=ArrayDataset(x=x, y=(x[:, :3].argmax(axis=1)).astype(np.int32)), batch_size=4)
    params = NNTrainParams(n_epochs=6, optim=NNOptimParams(kind="sgd", max_lr=0.1), record_every="update")
    used = hooks()
    run = model.train(params, data=data, hooks=used, runs_dir=folder, quiet=True)
    return run, read_point(RunPaths(run.root, run.id), "LAST").load_all(), used


def test_the_same_list_of_hooks_trains_the_same_network(tmp_path: Path) -> None:
    """nvalchemi:156 nvalchemi:60 nvalchemi:88 nvalchemi:91 nvalchemi:97 nvalchemi:99"""
    theirs = JaxModel(net_params=NET, seed=0)
    weights = {name: np.array(value) for name, value in PureModule(theirs.net).params.items()}
    ours: Any = NNModel(net_params=NET, seed=0)
    ours.net.load_state_dict({name: to_torch(v, copy=True) for name, v in flax_to_torch(NET, weights).items()})
    run, found, used = train(ours, tmp_path / "torch")
    jax_run, wanted, jax_used = train(theirs, tmp_path / "jax")

    for prefix in ("params/", "slots/EMAHook/average/"):
        named = {n.removeprefix(prefix): value for n, value in wanted.items() if n.startswith(prefix)}
        for name, value in flax_to_torch(NET, named).items():
            np.testing.assert_allclose(found[prefix + name], value, err_msg=prefix + name, **TOLERANCE)
    slots = [name for name in wanted if name.startswith("slots/") and "/average/" not in name]
    assert set(slots) < set(found)
    for name in slots:
        np.testing.assert_allclose(found[name], wanted[name], err_msg=name, **TOLERANCE)
    assert wanted["slots/SpikeSkipHook/skips"] >= 2
    assert len(run.records) == len(jax_run.records)
    for row, want in zip(run.records, jax_run.records, strict=True):
        assert (row["kind"], row["step"], row["batch"], row["skipped"]) == (
            want["kind"], want["step"], want["batch"], want["skipped"],
        )  # fmt: skip
        for name in ("train_loss", "grad_norm"):
            if want[name] is not None:
                np.testing.assert_allclose(row[name], want[name], err_msg=name, **TOLERANCE)
    averaged, other = (each[-1].get_averaged_model() for each in (used, jax_used))
    assert averaged.n_averaged == other.n_averaged
