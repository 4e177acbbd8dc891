"""A torch run is trained, committed, resumed and opened while every way to pickle or unpickle raises."""

from __future__ import annotations

import io
import pickle  # noqa: TID251  what is forbidden here
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # what is imported while pickle is forbidden would stay so
from safetensors.numpy import load_file
from torch.utils.data import DataLoader, TensorDataset

from nnx_jax import FeedForwardParams, NNModelParams, NNOptimParams, NNRun, NNTrainParams
from nnx_jax.loop.callbacks import Callback
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import MonitorSpec
from nnx_jax.torch import NNModel
from tests import pickles

ROWS = 24


@pytest.fixture
def _forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    pickles.forbid(monkeypatch.setattr)


@pytest.mark.usefixtures("_forbidden")
def test_what_is_forbidden_raises(tmp_path: Path) -> None:
    """The test of the test: what this module imported by name, too."""
    for work in (
        lambda: pickle.dumps(1),
        lambda: pickle.Unpickler(io.BytesIO()),
        lambda: torch.save(1, tmp_path / "x"),
        lambda: torch.load(tmp_path / "x"),
        lambda: torch.distributed.all_gather_object([None], 1),
        lambda: np.load(_array_of_objects(tmp_path / "x.npy"), allow_pickle=True),
    ):
        with pytest.raises(pickles.PickledError):
            work()


def _array_of_objects(path: Path) -> Path:
    """The head of an .npy file whose numbers are a pickle."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        file.write(b"\x80\x04.")
    return path


class Stops(Callback):
    """A signal in the middle of the second of three epochs of three updates."""

    def on_optimizer_update(self, ctx: Any, event: Any) -> None:
        if event.update_idx == 5:
            signal.raise_signal(signal.SIGTERM)


def train(runs: Path, **more: Any) -> NNRun:
    """Adam, a plateau, dropout, a shuffling loader of torch's own: every stream and every slot there is."""
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(ROWS, 4)).astype(np.float32))
    y = torch.from_numpy(draw.integers(0, 3, ROWS))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    net = FeedForwardParams(input_dim=4, output_dim=3, hidden_dims=(8,), dropout_prob=0.25, norm="batch")
    optim = NNOptimParams(kind="adam", max_lr=0.02, accumulate_grad_batches=2, grad_clip_norm=0.5)
    params = NNTrainParams(
        n_epochs=3, optim=optim, scheduler=NNSchedulerParams(kind="reduce_on_plateau", patience=0),
        monitor=MonitorSpec(metric="loss", split="val"), train_loader=loader, val_loader=[(x[:6], y[:6])],
    )  # fmt: skip
    model = NNModel(net, NNModelParams.from_state({"metrics": ["accuracy"]}))
    return model.train(params, more.pop("callbacks", ()), runs_dir=runs, quiet=True, **more)


@pytest.mark.usefixtures("_forbidden")
def test_a_run_is_stopped_continued_and_opened(tmp_path: Path) -> None:
    """B1: no pickle is written or read: what is stored are texts, and tensors that another reader opens."""
    random.seed(1)
    torch.manual_seed(1)
    quiet = train(tmp_path / "quiet")
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        train(tmp_path / "runs", callbacks=[Stops()])
    run = train(tmp_path / "runs")
    assert (run.id, run.status) == (quiet.id, "finished")
    assert run.records == quiet.records
    opened = NNModel.from_checkpoint(f"{run.id}@LAST", runs_dir=tmp_path / "runs")
    other = NNModel.from_checkpoint(f"{quiet.id}@LAST", runs_dir=tmp_path / "quiet")
    x = np.ones((2, 4), np.float32)
    assert opened.predict(x).logits.tobytes() == other.predict(x).logits.tobytes()
    assert NNRun.load(run.id, tmp_path / "runs").records == run.records
    opened.export_state_dict(tmp_path / "weights.safetensors")
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        if path.suffix == ".safetensors":
            assert load_file(path), path
        else:
            assert path.read_text(encoding="utf-8").replace("\n", "").isprintable(), path
