"""From a run's configuration to the work of its engine: the model's loss or an objective, and the metrics beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nnx_jax.core.errors import ConfigError
from nnx_jax.data.pipeline import Feed
from nnx_jax.objectives.checks import check_targets
from nnx_jax.objectives.metrics import Metric
from nnx_jax.objectives.objective import Objective
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.params.run import RunSpec
from nnx_jax.torch.batches import Batch
from nnx_jax.torch.by_objective import Asker, Place
from nnx_jax.torch.metrics import build_metric, user_metric
from nnx_jax.torch.module import Net, width
from nnx_jax.torch.streams import Streams
from nnx_jax.torch.work import Work, built_in, divided


class WorkMaker:
    """What a microbatch of a run does.

    Args:
        feeds: "train", and "val" and "test" where the run has them; every target there is, is looked at.
        batch: a few rows, to see what the model makes of them.
    """

    def __init__(self, spec: RunSpec, net: Net, loss: Any, feeds: Mapping[str, Any], batch: Batch) -> None:
        self.spec, self.net, self.loss, self.feeds, self.batch = spec, net, loss, feeds, batch

    def by_loss(self) -> tuple[Work, tuple[LossTerm, ...]]:
        """The model's own loss, and the terms it gave for the rows.

        Raises:
            ModelError: the model does not take them.
            DataError: targets that the loss cannot use.
        """
        outputs = self.net.outputs(self.batch)
        judged = self._judge(outputs)
        work = built_in(self.net, self.loss, self.metrics(outputs), judged=judged)
        with torch.no_grad(), self.net.mode(train=False):
            return work, work.measure(self.batch, False).terms

    def by_step(self, names: Sequence[str]) -> tuple[Work, Work]:
        """Training by a step of the user's own that records these names, and the validation beside it.

        The model's loss and metrics need not fit it: they are looked at where something asks for their values.
        """
        work = Work(_measures_itself, [Metric(name, 2, None, _measures_itself, divided) for name in names])
        asked = bool(self.spec.model.metrics or self.spec.training.extra_metrics)
        return work, self.by_loss()[0] if asked or len(self.feeds) > 1 else work

    def by_objective(
        self, objective: Objective, streams: Streams, place: Callable[[], Place]
    ) -> tuple[Work, Work, tuple[LossTerm, ...]]:
        """Training and validation by an objective that is bound, and the terms it gave for the rows.

        Raises:
            TypeError: it returns no ObjectiveResult.
            ConfigError: it gives no outputs although there are metrics, or records a name that is taken.
        """
        extra = self.spec.training.extra_metrics or {}
        asker = Asker(self.net, objective, streams, place, precision=self.spec.precision, extra_metrics=extra)
        score = self.by_loss()[0] if objective.scores == "loss" else None
        seen = asker.look(self.batch)
        metrics = self.metrics(seen.outputs) if score is None else score.metrics
        work = asker.work(seen, metrics, self.loss.invalid_labels if objective.labels else None)
        return work, score or work, seen.terms

    def metrics(self, outputs: Any) -> list[Metric]:
        """The declared metrics of outputs of these shapes, and the functions of the user's.

        Raises:
            ConfigError: there are metrics and no outputs.
        """
        extra = self.spec.training.extra_metrics or {}
        names = [*(metric.key for metric in self.spec.model.metrics), *extra]
        if names and outputs is None:
            told = "the objective gives no outputs to compute it from; return ObjectiveResult(..., outputs=...)"
            raise ConfigError(f"got {names[0]}, but {told}", path="model.metrics")
        found = [build_metric(metric, width(outputs), loss=self.loss) for metric in self.spec.model.metrics]
        return [*found, *(user_metric(name, function) for name, function in extra.items())]

    def _judge(self, outputs: Any) -> bool:
        """Look at every target there is; whether that was all that training will see."""
        for feed in self.feeds.values():
            if isinstance(feed, Feed) and "y" in feed.dataset.columns:
                check_targets(self.loss, feed.dataset, width(outputs))
        train = self.feeds["train"]
        return isinstance(train, Feed) and not train.augments and "y" in train.dataset.columns


def _measures_itself(*_: Any) -> Any:
    raise AssertionError("the user's step measures itself")
