"""Work: what one microbatch does and what is measured of it, by the model's loss or by an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nnx_jax.objectives.metrics import Metric
from nnx_jax.objectives.terms import LossTerm, check_terms
from nnx_jax.torch.batches import Batch
from nnx_jax.torch.module import Net, map_tensors
from nnx_jax.torch.terms import Whole


@dataclass
class Measured:
    """What one microbatch gave.

    Attributes:
        terms: loss terms, whose numerators have derivatives in a training pass.
        sums: [size] by metric, in the order of `Work.metrics`.
        invalid: impossible labels, a scalar; None where there are none to be judged.
        whole: the only term of a training pass, where every item counts once and none is impossible; None where that
            is not known.
    """

    terms: tuple[LossTerm, ...]
    sums: list[torch.Tensor]
    invalid: torch.Tensor | None
    whole: Whole | None = None


@dataclass
class Work:
    """The part of a step that depends on how a loss comes about.

    Attributes:
        measure: (batch, train) -> Measured; the modes of the model are set by the caller.
        metrics: whose sums `measure` gives.
    """

    measure: Callable[[Batch, bool], Measured]
    metrics: list[Metric]


def built_in(net: Net, loss: Any, metrics: Sequence[Metric], *, judged: bool) -> Work:
    """The model's outputs, its loss and its metrics; `judged`: every label was looked at before."""
    own, whole = getattr(loss, "task", "own") == "own", getattr(loss, "whole", None)

    def measure(batch: Batch, train: bool) -> Measured:
        outputs = net.forward(batch)
        if train and whole is not None and (found := whole(outputs, batch)) is not None:
            seen = map_tensors(torch.Tensor.detach, outputs) if metrics else outputs
            return Measured((found.term(loss.name),), metric_sums(metrics, seen, batch), None, found)
        terms = loss(outputs, batch)
        if own:
            terms = check_terms(terms)
        seen = map_tensors(torch.Tensor.detach, outputs) if train else outputs
        sums = metric_sums(metrics, seen, batch)
        if judged:
            return Measured(terms, sums, None)
        with torch.no_grad():
            return Measured(terms, sums, loss.invalid_labels(seen, batch))

    return Work(measure, list(metrics))


def metric_sums(metrics: Sequence[Metric], outputs: Any, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """Sums of one batch by metric, each [size]."""
    return [metric.update(outputs, batch) for metric in metrics]


def divided(sums: np.ndarray) -> float:
    """sum / count, NaN without a count."""
    return float(sums[0] / sums[1]) if sums[1] else float("nan")
