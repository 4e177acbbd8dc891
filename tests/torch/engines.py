"""Small torch engines for tests, and a run of one to a number of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.engines.feeds import make_feeds
from nnx_jax.fit.schedules import make_schedules
from nnx_jax.loop.engine import Records, Span
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import NNTrainParams
from nnx_jax.torch.engine import TorchEngine
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.state import TorchState


def columns(rows: int = 22, features: int = 3, classes: int | None = None, seed: int = 0) -> dict[str, Any]:
    """x [rows, features], and y: values [rows, 1], or classes [rows]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype(np.float32)
    if classes is None:
        return {"x": x, "y": (x.sum(1, keepdims=True) + rng.normal(size=(rows, 1))).astype(np.float32)}
    return {"x": x, "y": rng.integers(0, classes, rows)}


def spec_of(
    train: Mapping[str, Any] | None = None,
    *,
    val: Mapping[str, Any] | None = None,
    batch_size: int = 4,
    optim: Mapping[str, Any] | None = None,
    metrics: Sequence[Any] = (),
    data: Mapping[str, Any] | None = None,
    precision: str = "float32",
    **training: Any,
) -> RunSpec:
    """A run of 3 epochs over these columns."""
    found = None
    if train is not None:
        split = None if val is None else ArrayDataset(**val)
        found = NNDataParams(train=ArrayDataset(**train), val=split, batch_size=batch_size, **(data or {}))
    chosen = NNOptimParams(**(optim or {"kind": "sgd", "max_lr": 0.02}))
    settings: dict[str, Any] = {"n_epochs": 3, "optim": chosen, **training}
    model = NNModelParams.from_state({"precision": precision}).replace(metrics=tuple(metrics))
    return RunSpec(model=model, data=found, train=NNTrainParams(**settings))


def engine_of(spec: RunSpec, module: torch.nn.Module, loss: Any = "mse", **options: Any) -> TorchEngine:
    """An engine with the schedules of its configuration, as `prepare` builds it."""
    feeds = make_feeds(spec)
    schedules = make_schedules(spec, feeds["train"].n_batches)
    options = {"schedules": schedules.updates, "schedule_state": schedules.state(spec), **options}
    return TorchEngine(spec, module, build_loss(loss), feeds, **options)


def mlp(features: int = 3, outputs: int = 1, seed: int = 0, dropout: float = 0.0) -> Any:
    """Two layers with weights of their own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(features, 5), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(5, outputs)]
        return torch.nn.Sequential(*layers)


def advance(engine: TorchEngine, state: TorchState, batches: int, *, closes: bool = True) -> list[Records]:
    """Run so many microbatches from where the state is, epoch after epoch; return the records."""
    found: list[Records] = []
    while batches:
        epoch, place = divmod(state.counters["batch"], engine.n_batches)
        count = min(batches, engine.n_batches - place)
        ends = closes or place + count == engine.n_batches
        _, done = engine.run_span(state, Span(epoch, place, count, ends), lambda _: False)
        batches -= done
        records, failure = engine.read_records(state)
        found += records
        if failure is not None:
            raise failure
    return found


def joined(records: Sequence[Records], name: str) -> np.ndarray:
    """One column of several records, or one of their sums."""
    return np.concatenate([getattr(each, name) if hasattr(each, name) else each.sums[name] for each in records])


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Copies of everything a module holds."""
    return {name: value.detach().cpu().numpy().copy() for name, value in module.state_dict().items()}
