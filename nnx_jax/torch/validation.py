"""A validation of the user's own over a torch module: called with a copy of it, in place of the built-in scoring."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nnx_jax.engines.validation import EvalStepContext, own_validation
from nnx_jax.loop.engine import Evaluation
from nnx_jax.torch.batches import Source


class TensorBatches:
    """The validation's batches as tensors on the device, real rows only, from the beginning at every iteration."""

    def __init__(self, feed: Any, device: torch.device) -> None:
        self._feed, self._device = feed, device

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return Source(self._feed, self._device).whole()

    def __len__(self) -> int:
        return self._feed.n_batches


def own_scores(
    function: Callable[..., Any], engine: Any, feed: Any, default: Callable[[], Evaluation], epoch: int
) -> Evaluation:
    """Call an `eval_step_fn` with an EvalStepContext: a copy of the module in evaluation mode, nothing of it is kept.

    Raises:
        StepError: it returns no record, or not what a monitor follows.
    """
    model = copy.deepcopy(engine.module).eval()
    extra = engine.spec.training.extra_metrics or {}
    batches = TensorBatches(feed, engine.device)
    ctx = EvalStepContext(model, batches, epoch, engine.score_names, extra, lambda: default().values)
    with torch.no_grad():
        return own_validation(function, ctx, feed.rows or 0, engine.watched)
