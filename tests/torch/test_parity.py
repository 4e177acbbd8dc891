"""From equal weights and equal batches, the torch engine and the JAX engine train alike, update by update."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

from nnx_jax.engines.feeds import make_feeds
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.fit.schedules import make_schedules
from nnx_jax.loop.engine import Span
from nnx_jax.nets import build_net as flax_net
from nnx_jax.nets.resolve import resolve
from nnx_jax.objectives.losses import build_loss as flax_loss
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.torch.convert import flax_to_torch, to_torch, torch_to_flax
from nnx_jax.torch.engine import TorchEngine
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.nets import build_net
from tests.torch.engines import columns

UPDATES = 100
EPSILON = 2.0**-24
"""Half the distance between 1 and the next float32."""


def net_params() -> Any:
    given = NNParams.from_state({"kind": "feed_forward", "hidden_dims": [16, 12]})
    return resolve(given, {"input_shape": (6,), "n_classes": 4})


def run_spec(kind: str, schedule: str, window: int, clip: float | None, loader: list[dict[str, np.ndarray]]) -> RunSpec:
    rate = {"sgd": 0.05, "adam": 3e-3, "adamw": 3e-3, "lion": 3e-4}[kind]
    optim = NNOptimParams(kind=kind, max_lr=rate, accumulate_grad_batches=window, grad_clip_norm=clip)
    scheduler = NNSchedulerParams.from_state({"kind": schedule, "clock": "optimizer_update"})
    train = NNTrainParams(n_epochs=UPDATES, optim=optim, scheduler=scheduler, train_loader=loader)
    return RunSpec(model=NNModelParams.from_state({"metrics": ["accuracy"]}), train=train)


def unequal_batches(count: int) -> list[dict[str, np.ndarray]]:
    """Batches of 16 rows of which 1 to 16 count, and labels that are ignored."""
    rng, data = np.random.default_rng(3), columns(16 * count, features=6, classes=4)
    y = np.where(rng.random(len(data["y"])) < 0.2, -100, data["y"])
    masks = [(np.arange(16) < rng.integers(1, 17)).astype(np.float32) for _ in range(count)]
    return [
        {"x": data["x"][16 * i : 16 * i + 16], "y": y[16 * i : 16 * i + 16], "mask": masks[i]} for i in range(count)
    ]


def engines(spec: RunSpec) -> tuple[FlaxEngine, TorchEngine]:
    """Both engines, from the weights of the Flax net."""
    params = net_params()
    flax, other = flax_net(params, rngs=nnx.Rngs(0), info={}), build_net(params, 0)
    feeds, found = [make_feeds(spec), make_feeds(spec)], []
    schedules = make_schedules(spec, feeds[0]["train"].n_batches)
    options: dict[str, Any] = {"schedules": schedules.updates, "schedule_state": schedules.state(spec)}
    jax_engine = FlaxEngine(spec, flax, flax_loss("cross_entropy"), feeds[0], **options)
    start = {name: np.asarray(value) for name, value in jax_engine.pure.params.items()}
    found = {name: to_torch(value) for name, value in flax_to_torch(params, start).items()}
    other.load_state_dict(found)
    return jax_engine, TorchEngine(spec, other, build_loss("cross_entropy"), feeds[1], **options)


def trained(engine: Any) -> tuple[Any, Any]:
    state = engine.start()
    epoch, left = 0, (UPDATES + 20) * engine.accumulate  # some windows hold nothing that counts
    found = []
    while left > 0:
        count = min(left, engine.n_batches)
        state, done = engine.run_span(state, Span(epoch, 0, count), lambda _: False)
        records, failure = engine.read_records(state)
        assert failure is None
        found, left, epoch = [*found, *records], left - done, epoch + 1
    return state, found


def check(kind: str, schedule: str, window: int, clip: float | None) -> None:
    spec = run_spec(kind, schedule, window, clip, unequal_batches(20))
    flax, other = engines(spec)
    (flax_state, theirs), (_, ours) = trained(flax), trained(other)
    join = lambda found, name: np.concatenate([getattr(each, name) for each in found])  # noqa: E731
    np.testing.assert_array_equal(join(ours, "step"), join(theirs, "step"))
    assert join(ours, "step")[-1] >= UPDATES
    np.testing.assert_array_equal(join(ours, "committed"), join(theirs, "committed"))
    top = spec.training.optimizers["main"].max_lr
    np.testing.assert_allclose(join(ours, "rate"), join(theirs, "rate"), rtol=16 * EPSILON, atol=8 * EPSILON * top)
    # One update is wrong by at most so much of its rate: sums of 16 rows and of Adam's moments in another order, and
    # optax's 1 - beta^t in float32, which for beta = 0.999 and t = 1 has lost 10 of its 24 bits. Errors add up over
    # the updates; what the loss makes of them is bounded by the length of the gradient, here below 4.
    step = {"sgd": 64 * EPSILON, "adam": 1024 * EPSILON, "adamw": 1024 * EPSILON, "lion": 64 * EPSILON}[kind]
    bound = UPDATES * step * max(top * 8, 1e-2)
    np.testing.assert_allclose(join(ours, "loss"), join(theirs, "loss"), rtol=4 * bound + 32 * EPSILON, atol=4 * bound)
    np.testing.assert_allclose(join(ours, "grad_norm"), join(theirs, "grad_norm"), rtol=8 * bound, atol=8 * bound)
    held = {n: v.detach().numpy() for n, v in other.module.state_dict().items()}
    now, wanted = torch_to_flax(net_params(), held), flax.programs.state(flax_state).params
    for name, value in wanted.items():
        np.testing.assert_allclose(now[name], np.asarray(value), rtol=0, atol=bound, err_msg=name)
    sums = [np.concatenate([each.sums["accuracy"] for each in found]) for found in (ours, theirs)]
    np.testing.assert_array_equal(sums[0][:, 1], sums[1][:, 1])
    assert np.abs(sums[0] - sums[1]).sum() <= 2, "decisions between two equal logits may differ"


def test_both_engines_train_alike() -> None:
    check("adamw", "cosine", 4, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "schedule", "window", "clip"),
    list(product(["sgd", "adam", "adamw", "lion"], ["constant", "cosine", "one_cycle"], [1, 4], [None, 0.5])),
)
def test_both_engines_train_alike_whatever_is_chosen(kind: str, schedule: str, window: int, clip: float | None) -> None:
    check(kind, schedule, window, clip)


def test_both_engines_score_alike() -> None:
    """Every row once, padded batches or not, to float32 rounding."""
    data = columns(37, features=6, classes=4)
    val = [(data["x"][start : start + 8], data["y"][start : start + 8]) for start in range(0, 37, 8)]
    spec = run_spec("sgd", "constant", 1, None, unequal_batches(2))
    spec = spec.replace(train=spec.train.replace(val_loader=val))
    flax, other = engines(spec)
    theirs, ours = flax.evaluate(flax.start(), "val"), other.evaluate(other.start(), "val")
    assert theirs is not None
    assert ours is not None
    assert (ours.count, theirs.count, set(ours.values)) == (37, 37, set(theirs.values))
    assert ours.values["accuracy"] == theirs.values["accuracy"]
    assert ours.values["loss"] == pytest.approx(theirs.values["loss"], rel=16 * EPSILON)
    rows = torch.from_numpy(data["x"])
    wanted = torch.nn.functional.cross_entropy(other.module(rows), torch.from_numpy(data["y"])).item()
    assert ours.values["loss"] == pytest.approx(wanted, rel=16 * EPSILON)
