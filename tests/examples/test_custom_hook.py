"""examples/custom_hook.py does what it says, from a configuration and from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core import registry
from nnx_jax.data import ArrayDataset
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.run import NNRun

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
imports: [examples.custom_hook]
model: {net: {kind: feed_forward, hidden_dims: [8]}}
data: {train: {kind: digits, split: train}, batch_size: 64}
train: {n_epochs: 1, optim: {kind: adamw, max_lr: 3e-3}}
hooks:
  - {kind: gradient_clip, max_norm: 1.0}
  - {kind: skip_big, factor: 4.0, warmup: 3}
"""


@pytest.fixture
def skip_big() -> Iterator[Any]:
    """The class of the example; other tests do not see its kind."""
    before = dict(registry._CLASSES)
    try:
        from examples.custom_hook import SkipBig

        yield SkipBig
    finally:
        registry._CLASSES.clear()
        registry._CLASSES.update(before)


def test_it_is_short() -> None:
    lines = (ROOT / "examples" / "custom_hook.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 40


def test_from_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "nnx_jax.train", "--config", "cfg.yaml", "--json", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, check=False, **run)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    point = NNRun.load(result["run_id"], tmp_path / "runs").checkpoint()
    stored = point.load_all()
    accepted, skipped = (int(stored[f"slots/SkipBig/{name}"]) for name in ("accepted", "skipped"))
    assert accepted == result["step"] > 0
    assert accepted + skipped == point.batch


class Slope(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.w[...]


def test_from_python(tmp_path: Path, skip_big: Any) -> None:
    """The gradient of each batch is its row: one of length 100 among ones is left out, and not learned from."""
    lengths = [1.0] * 8 + [100.0] + [1.0] * 6
    x = np.array(lengths, np.float32)[:, None]
    hook = skip_big(factor=4.0, warmup=5)
    model = NNModel(module=Slope(), loss=lambda outputs, y: outputs[:, 0])
    data = NNDataParams(train=ArrayDataset(x=x, y=np.zeros(len(x), np.float32)), batch_size=1, shuffle=False)
    params = NNTrainParams(
        n_epochs=1,
        optim=NNOptimParams(kind="sgd", max_lr=1.0, momentum=0.0),
        scheduler=NNSchedulerParams(kind="constant"),
    )
    model.train(params, data=data, hooks=[hook], runs_dir=tmp_path, quiet=True)
    slot = hook.state_dict()["state"]
    assert (int(slot["accepted"]), int(slot["skipped"])) == (14, 1)
    assert float(slot["mean"]) == pytest.approx(1.0)
    assert float(model.net.w[...][0]) == pytest.approx(-14.0)
