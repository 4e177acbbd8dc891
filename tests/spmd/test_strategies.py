"""Strategies over several devices: validation, averages and open windows, and checkpoints that go elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nnx_jax.hooks import DDPHook, EMAHook, GradientAccumulationHook
from nnx_jax.training import TrainingStrategy, ValidationConfig
from tests.training.toys import batches, strategy, toy, w


def test_validation_sees_the_averages(tmp_path: Path) -> None:
    """A set of batches that do not split, scored with averaged weights that lie on every device."""
    config = ValidationConfig(batches(*[np.arange(6) - 1.0] * 3), use_ema="always")
    found = []
    for hooks in ([], [DDPHook()]):
        made = strategy(hooks=[*hooks, EMAHook(decay=0.5)], num_epochs=2, validation_config=config)
        made.run(batches(*[np.arange(8) - 2.0] * 3))
        summary = made.validate()
        assert summary["model_source"] == "ema"
        found.append(summary["total_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_an_open_window_goes_on_elsewhere(tmp_path: Path) -> None:
    """One of two microbatches is summed on four devices when it is stored; it goes on on four, two or one."""

    def hooks(*devices: int) -> list[object]:
        window = GradientAccumulationHook(2, defer_reduce=True)
        return [*(DDPHook(devices=count) for count in devices), window, EMAHook(decay=0.5)]

    made = strategy(hooks=hooks(4), models=toy, loss_fn="mse")
    for batch in batches(*[np.arange(8) - 3.0] * 3):
        made.train_batch(batch)
    made.save_checkpoint(tmp_path / "run")
    rest = batches(*[np.arange(8) - 1.0] * 3)
    for batch in rest:
        made.train_batch(batch)
    for devices in ((), (2,), (4,)):
        other = TrainingStrategy.load_checkpoint(tmp_path / "run", hooks=hooks(*devices))
        for batch in rest:
            other.train_batch(batch)
        assert (other.step_count, other.global_step_count) == (3, 3 * sum(devices or (1,)))
        assert w(other) == w(made) if devices == (4,) else w(other) == pytest.approx(w(made), rel=1e-6)
