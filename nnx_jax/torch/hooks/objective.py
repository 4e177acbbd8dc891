"""StagedObjective: an objective that tells when its forward pass is done, so that hooks see and may replace outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nnx_jax.engines.work import name_of
from nnx_jax.objectives.objective import ObjectiveResult


class StagedObjective:
    """An objective as it is, but for one call in training.

    Args:
        objective: what computes the terms.
        forwarded: given its outputs, returns those to go on with: metrics and labels are judged by them.
    """

    def __init__(self, objective: Any, forwarded: Callable[[Any], Any]) -> None:
        self._objective, self._forwarded = objective, forwarded
        self.__name__ = name_of(objective)

    def bind(self, loss: Any) -> StagedObjective:
        """See `Objective.bind`."""
        return StagedObjective(self._objective.bind(loss), self._forwarded)

    def __call__(self, ctx: Any) -> Any:
        result = self._objective(ctx)
        if not (ctx.train and isinstance(result, ObjectiveResult)):
            return result
        outputs = self._forwarded(result.outputs)
        return result if outputs is result.outputs else dataclasses.replace(result, outputs=outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)
