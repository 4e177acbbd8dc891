"""Running out of device memory is told with the place, the bytes and what to change; the last commit stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from nnx_jax.core.errors import StepError
from nnx_jax.engines.batches import TrainBatches
from nnx_jax.engines.scoring import Scorer
from nnx_jax.runs.run import NNRun
from tests.e2e.helpers import fit

XLA = "RESOURCE_EXHAUSTED: Out of memory allocating 6727663616 bytes."


def test_out_of_memory_at_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """case:L11"""
    real = TrainBatches.run

    def run(self: TrainBatches, carry: Any, epoch: int, first: int, count: int, *, closes: bool) -> None:
        if carry.batch == 2 * 6:
            raise jax.errors.JaxRuntimeError(XLA)
        real(self, carry, epoch, first, count, closes=closes)

    monkeypatch.setattr(TrainBatches, "run", run)
    with pytest.raises(StepError, match="update 13: .* 6.27 GiB .*x float32.4, 4.*accumulate_grad_batches") as caught:
        fit(tmp_path)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    run_ = NNRun.all(tmp_path)[0]
    assert run_.last is not None
    assert run_.last.step == 12
    assert run_.checkpoint().load_all()["counters"][2] == 12


def test_out_of_memory_in_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """case:L11"""

    def score(self: Scorer, *args: Any) -> None:
        raise jax.errors.JaxRuntimeError(XLA)

    monkeypatch.setattr(Scorer, "score", score)
    with pytest.raises(StepError, match="evaluation of val: .*eval_batch_size"):
        fit(tmp_path)
