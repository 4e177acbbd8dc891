"""One run trained by both NNModels from equal weights and rows: loss curve and parameters within float32's rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

from nnx_jax import NNModel as FlaxModel
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.nets import build_net as build_flax
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.torch import NNModel as TorchModel
from nnx_jax.torch.convert import torch_to_flax
from nnx_jax.torch.nets import build_net
from tests.torch.engines import advance, engine_of, joined, spec_of

EPS = float(np.finfo(np.float32).eps)
ROWS, FEATURES, HIDDEN, CLASSES, BATCHES = 8, 6, 7, 3, 26
NET = FeedForwardParams(input_dim=FEATURES, output_dim=CLASSES, hidden_dims=(HIDDEN,), activation="tanh")
LONGEST = ROWS * 4
"""Terms of the longest sum of a run: the rows of a window of four."""


def loader() -> list[dict[str, np.ndarray]]:
    """26 microbatches with 1 to 8 real rows each, one without any; the last window of four is one of two."""
    rng = np.random.default_rng(0)
    real = rng.integers(1, ROWS + 1, BATCHES)
    real[5] = 0
    inputs = rng.normal(size=(BATCHES, ROWS, FEATURES)).astype(np.float32)
    classes = (inputs @ rng.normal(size=(FEATURES, CLASSES))).argmax(-1)
    masks = (np.arange(ROWS) < real[:, None]).astype(np.float32)
    return [{"x": x, "y": y, "mask": mask} for x, y, mask in zip(inputs, classes, masks, strict=True)]


def settings(optimizer: str, schedule: str, window: int, clip: float | None) -> dict[str, Any]:
    """A run of at least 100 updates; the rate is one at which the loss falls."""
    updates = BATCHES - 1 if window == 1 else -(-BATCHES // window)
    return {
        "n_epochs": -(-100 // updates),
        "optim": NNOptimParams(
            kind=optimizer,
            max_lr=0.05 if optimizer == "sgd" else 5e-3,
            grad_clip_norm=clip,
            accumulate_grad_batches=window,
        ),
        "scheduler": NNSchedulerParams(kind=schedule, clock="optimizer_update"),  # type: ignore[arg-type]
    }


def exact(options: dict[str, Any], nudge: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Losses and parameters of the run in float64.

    `nudge` seeds changes of one float32 rounding unit: at every microbatch of each parameter, as storing it rounds it,
    and of what each layer puts out, and with it of the gradients that come back.
    """
    module = build_net(NET, 0).double()
    generator = torch.Generator().manual_seed(nudge)

    def moved(value: torch.Tensor) -> torch.Tensor:
        return value * (1 + EPS * (torch.randint(0, 2, value.shape, generator=generator) * 2 - 1))

    def round_weights(part: torch.nn.Module, _: Any) -> None:
        with torch.no_grad():
            for value in part.parameters():
                value.copy_(moved(value))

    if nudge:
        module.register_forward_pre_hook(round_weights)
        for part in module.modules():
            part.register_forward_hook(lambda _, __, output: moved(output))
    run = {"n_epochs": options["n_epochs"], "scheduler": options["scheduler"], "train_loader": loader()}
    spec = spec_of(optim=options["optim"].state(), precision="float64", **run)
    engine = engine_of(spec, module, "cross_entropy")
    records = advance(engine, engine.start(), BATCHES * options["n_epochs"])
    return joined(records, "loss"), torch_to_flax(NET, module.state_dict())


def trained(model: Any, options: dict[str, Any], runs_dir: Path) -> np.ndarray:
    """Train through the face; return the losses of the updates."""
    run = model.train(NNTrainParams(train_loader=loader(), **options), runs_dir=runs_dir, quiet=True)
    losses = [row["train_loss"] for row in run.records if row["kind"] == "update"]
    return np.array([np.nan if loss is None else loss for loss in losses])


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, schedule, window, clip",
    [
        ("sgd", "constant", 1, 0.5),
        ("sgd", "one_cycle", 4, None),
        ("adam", "cosine", 1, None),
        ("adam", "constant", 4, 0.5),
        ("adamw", "one_cycle", 1, 0.5),
        ("adamw", "cosine", 4, None),
    ],
)
def test_the_same_run_by_both(optimizer: str, schedule: str, window: int, clip: float | None, tmp_path: Path) -> None:
    """Both float32 runs are within rounding of the float64 run.

    The tolerance: float32 computes a sum of n products as the exact sum of factors changed by at most n rounding units
    (Higham, Accuracy and Stability, section 3.1). How far one unit everywhere carries this very run in float64, over
    all its updates, is measured with three draws of signs; n times that is what float32 may do to it.
    """
    options = settings(optimizer, schedule, window, clip)
    flax_net, torch_net = build_flax(NET, rngs=nnx.Rngs(1)), build_net(NET, 0)
    PureModule(flax_net).write(flax_net, torch_to_flax(NET, torch_net.state_dict()), {})
    losses, weights = exact(options)
    nudged = [exact(options, nudge) for nudge in (1, 2, 3)]
    results = {
        "flax": (trained(FlaxModel(module=flax_net), options, tmp_path / "flax"), PureModule(flax_net).params),
        "torch": (
            trained(TorchModel(module=torch_net), options, tmp_path / "torch"),
            torch_to_flax(NET, torch_net.state_dict()),
        ),
    }
    there = np.isfinite(losses)  # the window without a real row has no loss
    assert there.sum() >= 100
    assert np.nanmean(losses[-26:]) < 0.9 * np.nanmean(losses[:26])
    unit = np.max([np.abs(other - losses) for other, _ in nudged], axis=0)
    units = {name: max(np.abs(other[name] - value).max() for _, other in nudged) for name, value in weights.items()}
    for framework, (found, held) in results.items():
        np.testing.assert_array_equal(np.isfinite(found), there, err_msg=framework)
        far = np.abs(found - losses) > LONGEST * np.fmax.accumulate(unit) + EPS * np.abs(losses)
        assert not far.any(), (framework, np.flatnonzero(far))
        for name, value in weights.items():
            apart = float(np.abs(np.asarray(held[name]) - value).max())
            assert apart <= LONGEST * units[name] + EPS * float(np.abs(value).max()), (framework, name, apart)
