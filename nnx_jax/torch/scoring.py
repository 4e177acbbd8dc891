"""Scores of a feed: sums over every row once, added in float64 and divided at the end; padded rows are never seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nnx_jax.core.errors import DataError
from nnx_jax.data.pipeline import Feed, settled
from nnx_jax.engines.scoring import loss_value
from nnx_jax.loop.engine import Evaluation
from nnx_jax.params.model import NNModelParams
from nnx_jax.spmd.world import ALONE, World
from nnx_jax.torch.batches import Batch, Source, as_tensor
from nnx_jax.torch.ddp import added
from nnx_jax.torch.metrics import build_metric
from nnx_jax.torch.module import Net, device_of, width
from nnx_jax.torch.streams import BUILDING, EVALUATION, Streams
from nnx_jax.torch.work import Measured, Work, built_in


class Scorer:
    """Adds up what a Work measures of a feed, in evaluation mode; weights, modes and streams stay as they are.

    Args:
        net: the model.
        work: what is measured.
        streams: of the device; noise in an evaluation is the same every time.
        keep: batches of a feed that were placed on the device stay there for the next time.
        world: the processes that score together, each its rows; every one of them gets the same values.
    """

    def __init__(self, net: Net, work: Work, streams: Streams, *, keep: bool = True, world: World = ALONE) -> None:
        self.net, self.work, self.streams, self._keep, self._world = net, work, streams, keep, world
        self._sources: dict[int, Source] = {}

    def score(self, feed: Any) -> Evaluation:
        """Score every row of the feed once; one read from the device.

        Raises:
            DataError: no rows, or labels that are no class of the model.
        """
        sums, rows, key = self.sums(feed)
        if not self._world.alone:
            sums, rows, key = added(self._world, sums, rows, key)
        return self.evaluation(sums, rows, key)

    def sums(self, feed: Any) -> tuple[np.ndarray, int, tuple[tuple[str, float, bool], ...]]:
        """What the rows of a feed add up to: (float64 [numerators, denominators, metrics, invalid labels], rows,
        (name, weight, additive) of every loss term). Among several processes, add the first two over all."""
        source, total, rows = self._source(feed), None, 0
        key: tuple[tuple[str, float, bool], ...] = ()
        with torch.no_grad(), self.net.mode(train=False), self.streams.lent():
            self.streams.begin(EVALUATION)
            for batch in source.whole():
                rows += len(batch["mask"])
                measured = self.work.measure(batch, False)
                key = tuple((term.name, float(term.weight), term.denominator is None) for term in measured.terms)
                found = _flat(measured, self.net.device)
                total = found if total is None else total + found
        return np.zeros(0) if total is None else total.cpu().numpy(), rows, key

    def evaluation(self, sums: np.ndarray, rows: int, key: tuple[tuple[str, float, bool], ...]) -> Evaluation:
        """Values of added-up sums, see `sums`.

        Raises:
            DataError: no rows, or labels that are no class of the model.
        """
        if rows == 0:
            raise DataError("there are no rows to evaluate; give at least one")
        if sums[-1]:
            raise DataError(f"{round(sums[-1])} labels of the evaluated rows are no class of the model; correct them")
        ends = 2 * len(key)
        loss = loss_value(sums[:ends].tolist(), [weight for _, weight, _ in key], [free for *_, free in key])
        values: dict[str, float] = {"loss": loss}
        for metric in self.work.metrics:
            values[metric.name] = float(metric.compute(sums[ends : ends + metric.size]))
            ends += metric.size
        return Evaluation(values, rows)

    def _source(self, feed: Any) -> Source:
        if not self._keep:
            return Source(feed, self.net.device, world=self._world)
        if id(feed) not in self._sources:
            # It holds the feed, so that its id stays its own.
            self._sources[id(feed)] = Source(feed, self.net.device, world=self._world)
        return self._sources[id(feed)]


def _flat(measured: Measured, device: torch.device) -> torch.Tensor:
    """A batch's sums as one vector, float64 where the device has that; nothing waits for a device."""
    if device.type == "cpu":
        row = [float(term.scaled) for term in measured.terms]
        row += [0.0 if term.denominator is None else float(term.denominator) for term in measured.terms]
        for sums in measured.sums:
            row += sums.tolist()
        row.append(0.0 if measured.invalid is None else float(measured.invalid))
        return torch.tensor(row, dtype=torch.float64)
    wide = torch.float32 if device.type == "mps" else torch.float64
    parts = [term.scaled for term in measured.terms]
    parts += [0.0 if term.denominator is None else term.denominator for term in measured.terms]
    flat = [torch.as_tensor(part, dtype=wide, device=device).reshape(1) for part in parts]
    flat += [sums.to(wide) for sums in measured.sums]
    invalid = 0 if measured.invalid is None else measured.invalid
    return torch.cat([*flat, torch.as_tensor(invalid, dtype=wide, device=device).reshape(1)])


class ModelScorer:
    """Scores of one module with one loss and its metrics, outside of a training.

    Args:
        module: the network; its weights are taken as they are at every use, its modes are put back.
        loss: the built loss.
        params: of the model: metrics and precision.
        device: where it computes; None: where the module is.
    """

    def __init__(self, module: torch.nn.Module, loss: Any, params: NNModelParams, device: Any = None) -> None:
        self.module, self.loss, self.params, self._device = module, loss, params, device

    def score(self, feed: Any) -> dict[str, float]:
        """Return loss and metrics over a feed.

        Raises:
            ModelError: the network does not take the data.
            DataError: no rows, or labels that are no class of the model.
        """
        device = device_of(self.module) if self._device is None else torch.device(self._device)
        net = Net(self.module, device=device, precision=self.params.precision, trains=False)
        streams = Streams(device, 0)
        with streams.lent():
            streams.begin(BUILDING)
            outputs = net.outputs(probe(feed, device))
        metrics = [build_metric(metric, width(outputs), loss=self.loss) for metric in self.params.metrics]
        work = built_in(net, self.loss, metrics, judged=False)
        return dict(Scorer(net, work, streams, keep=False).score(feed).values)


def probe(feed: Any, device: torch.device) -> Batch:
    """A batch of one or two rows like those of a feed, to see what a model makes of it."""
    signature = feed.signature()
    count = min(2, signature["mask"].shape[0])
    if isinstance(feed, Feed):
        columns = settled(feed.dataset.take(np.arange(min(count, feed.rows))), feed.dataset)
    else:
        told = {name: column for name, column in signature.items() if name != "mask"}
        columns = {name: np.zeros((count, *column.shape[1:]), column.dtype) for name, column in told.items()}
    rows_here = len(next(iter(columns.values())))
    batch = {name: as_tensor(column, device) for name, column in columns.items()}
    return batch | {"mask": torch.ones(rows_here, device=device)}


def settle(module: torch.nn.Module, feed: Any, device: torch.device, streams: Streams) -> None:
    """Let lazy layers take their sizes from the data."""
    if any(isinstance(value, torch.nn.parameter.UninitializedParameter) for value in module.parameters()):
        batch = probe(feed, device)
        with torch.no_grad(), streams.lent():
            streams.begin(BUILDING)
            module(batch if getattr(type(module), "takes_batch", False) else batch["x"])
