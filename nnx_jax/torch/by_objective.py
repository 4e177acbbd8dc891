"""An objective as the work of the engine: what it is shown of a microbatch, and what is measured of what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nnx_jax.core.errors import ConfigError, StepError
from nnx_jax.engines.work import name_of
from nnx_jax.objectives.metrics import Metric
from nnx_jax.objectives.objective import Average, Objective
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.torch.batches import Batch
from nnx_jax.torch.module import Net, map_tensors
from nnx_jax.torch.objectives import ObjectiveContext, check_result
from nnx_jax.torch.streams import OBJECTIVE, Streams
from nnx_jax.torch.work import Measured, Work, divided, metric_sums


class Place(NamedTuple):
    """Where a training is: microbatches of the run and of the epoch before this one, and the epoch."""

    count: int = 0  # type: ignore[assignment]  # it hides a method of tuples that nobody needs
    epoch: int = 0
    batch: int = 0


class Returned(NamedTuple):
    """What an objective returned: see `objectives.check_result`."""

    terms: tuple[LossTerm, ...]
    record: dict[str, Average]
    outputs: Any


class Asker:
    """Asks an objective about microbatches of one training.

    Args:
        net: the model; the objective calls what its forward pass would call.
        streams: of the device. Noise of an objective's own is not torch's global noise, so that asking for it leaves
            the dropout of the model as it is.
        place: says where the training is.
    """

    def __init__(
        self,
        net: Net,
        objective: Objective,
        streams: Streams,
        place: Callable[[], Place],
        *,
        precision: str,
        extra_metrics: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.net, self.objective, self.streams, self.place = net, objective, streams, place
        self.precision, self.extra_metrics = precision, extra_metrics
        self.called = name_of(objective)

    def ask(self, batch: Batch, train: bool, place: Place | None = None) -> Returned:
        """What the objective returns for a batch; the modes of the model are set by the caller.

        Raises:
            TypeError: no ObjectiveResult.
            ConfigError: no terms, a repeated name, or a record that is not made of numbers.
        """
        at = place or (self.place() if train else Place())
        ctx = ObjectiveContext(
            model=self.net.call,
            batch=batch,
            rng=self.streams.generator(OBJECTIVE, at.count) if train else self._drawn(),
            epoch_idx=at.epoch,
            batch_idx=at.batch,
            train=train,
            precision=self.precision,
            extra_metrics=self.extra_metrics,
        )
        with self.net.autocast():
            result = self.objective(ctx)
        return Returned(*check_result(result, self.called))

    def _drawn(self) -> torch.Generator:
        """A generator for a batch of a validation, which is the same in every validation: its stream begins anew."""
        made = torch.Generator(device=self.streams.device)
        made.manual_seed(int(torch.randint(2**62, ())))
        return made

    def look(self, batch: Batch) -> Returned:
        """What the objective returns for a batch, to see what it is made of; nothing of the model changes."""
        kept = {name: value.clone() for name, value in self.net.state().items()}
        try:
            with torch.no_grad(), self.net.mode(train=False):
                return self.ask(batch, True, Place())
        finally:
            self.net.put_state(kept)

    def work(self, seen: Returned, metrics: Sequence[Metric], invalid: Callable[[Any, Any], Any] | None) -> Work:
        """The work of a microbatch.

        Args:
            seen: what the objective returned for the first look.
            metrics: the declared ones, of its outputs.
            invalid: counts impossible labels from outputs and batch; None where there is nothing to judge.

        Raises:
            ConfigError: it records something under a name that is taken.
            StepError: in a later microbatch, for another record than at the first look.
        """
        if again := {"loss", *(metric.name for metric in metrics)} & set(seen.record):
            raise ConfigError(f"objective {self.called} records {sorted(again)}, which the run records itself")
        names = tuple(seen.record)
        listed = [*metrics, *(Metric(name, 2, None, _never, divided) for name in names)]

        def measure(batch: Batch, train: bool) -> Measured:
            terms, record, outputs = self.ask(batch, train)
            if record.keys() != set(names):
                told = "a step records the same every time; give (0, 0) where there is nothing"
                raise StepError(f"objective {self.called} recorded {sorted(names)} and then {sorted(record)}; {told}")
            with torch.no_grad():
                outputs = map_tensors(torch.Tensor.detach, outputs)
                sums = metric_sums(metrics, outputs, batch)
                sums += [torch.stack([part.to(torch.float32) for part in record[name]]) for name in names]
                bad = None if invalid is None else invalid(outputs, batch)
            return Measured(terms, sums, bad)

        return Work(measure, listed)


def _never(outputs: Any, batch: Any) -> torch.Tensor:
    raise AssertionError("the objective measures it")
