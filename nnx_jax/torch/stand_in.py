"""Rows that pass through the network where a process has none, since layers in it wait for every process."""

from __future__ import annotations

from typing import Any

import torch

from nnx_jax.torch.batches import Batch
from nnx_jax.torch.ddp import nothing_of
from nnx_jax.torch.scoring import probe
from nnx_jax.torch.window import Plan, sums_of
from nnx_jax.torch.work import Work


class StandIn:
    """Two rows of the last batch that had some, else of the first; they count nothing and move nothing.

    Args:
        feed: the training data.
        device: where batches are.
    """

    def __init__(self, feed: Any, device: torch.device) -> None:
        self.feed, self.device = feed, device
        self.seen: Batch | None = None

    def sums(self, work: Work, plan: Plan, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(numerators: 0, and so are their derivatives; denominators [terms]: 0)."""
        rows = {name: column[:2] for name, column in (self.seen or probe(self.feed, self.device)).items()}
        num, den = sums_of(work.measure(rows, True).terms, plan, self.device, dtype)
        return nothing_of(num), torch.zeros_like(den)
