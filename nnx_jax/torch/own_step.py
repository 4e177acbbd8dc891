"""OwnStep: a step of the user's own in the place of the built-in one, called for every microbatch and undone if bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nnx_jax.core.errors import ConfigError, StepError
from nnx_jax.engines.work import name_of
from nnx_jax.params.run import RunSpec
from nnx_jax.spmd.world import ALONE, World
from nnx_jax.torch import foreach
from nnx_jax.torch.module import Net
from nnx_jax.torch.optim import Optimizers
from nnx_jax.torch.own import TrainerStepContext, TrainStepContext
from nnx_jax.torch.streams import Streams
from nnx_jax.torch.together import Together


@dataclass(frozen=True)
class Seen:
    """What one call of a step of the user's own told.

    Attributes:
        delegates: it calls `default_train_step`, which then does the update and writes the record.
        names: what it records besides the loss, in order.
        reports: it reports updates at all.
    """

    delegates: bool
    names: tuple[str, ...]
    reports: bool


@dataclass
class Outcome:
    """What a microbatch of a step of the user's own came to.

    Attributes:
        sums: of the record: loss times weight, weight, then (sum, count) of everything recorded.
        fault: (term, parameter) that is not finite; None where all is.
        norm: of the last update's gradient.
        rates, reports: by optimizer, the rate of its last update (else of its next) and the updates it reported.
    """

    sums: list[float]
    fault: tuple[str | None, str | None] | None
    norm: float
    rates: dict[str, float]
    reports: dict[str, int] = field(default_factory=dict)


@dataclass
class _Measured:
    """What one microbatch recorded, of one process or of all.

    Attributes:
        loss, weight: of the record; `counted`: the step gives the weight itself, so that all processes' are added.
        infinite, broken: the loss, or a loss that was differentiated or a gradient, is not finite.
        leaf: number of the first parameter whose gradient is not, -1 for none.
        pairs: (sum, count) of everything else; without a count it is a value.
    """

    loss: float
    weight: float
    counted: bool
    infinite: bool
    broken: bool
    leaf: int
    pairs: list[tuple[Any, Any]]

    def sums(self) -> list[float]:
        """loss times weight, weight, then (sum, count) of everything else; a value counts as much as the loss."""
        found = [self.loss * self.weight, self.weight]
        for top, count in self.pairs:
            found += [_number(top) * self.weight, self.weight] if count is None else [_number(top), _number(count)]
        return found


def _of_all(mine: _Measured, together: Together, reports: Mapping[str, int]) -> _Measured:
    """What all processes recorded: values are averaged as gradients are, sums and counts added up."""
    flat = [float(mine.infinite), float(mine.broken), float(mine.leaf), mine.loss, mine.weight]
    for top, count in mine.pairs:
        flat += [_number(top), 0.0 if count is None else _number(count)]
    found = together.ended(flat, reports)
    infinite, broken, _, losses, weights, *rest = (list(column) for column in zip(*found, strict=True))
    weight = sum(weights)
    loss = sum(losses) / together.size
    if mine.counted:
        loss = sum(a * b for a, b in zip(losses, weights, strict=True)) / weight if weight else math.nan
    pairs = [
        (sum(top) / together.size, None) if pair[1] is None else (sum(top), sum(count))
        for pair, top, count in zip(mine.pairs, rest[::2], rest[1::2], strict=True)
    ]
    leaf = max(round(each[2]) for each in found)
    return _Measured(loss, weight, mine.counted, any(infinite), any(broken), leaf, pairs)


class OwnStep:
    """A `train_step_fn` or `trainer_step_fn` and what it works with.

    Args:
        function: (context) -> record: a mapping with "loss", or the loss alone.
        world: the processes that train together; see `together`.

    Attributes:
        moved: an optimizer stepped in this microbatch.
        broken: a loss or gradient of this microbatch is not finite.
        norms: lengths of gradients before clipping, by optimizer.
        seen: see `look`.

    Raises:
        ConfigError: parameters of 16 bits, whose updates only the built-in step rounds once.
    """

    def __init__(
        self, spec: RunSpec, function: Callable[..., Any], net: Net, optimizers: Optimizers, streams: Streams, n: int,
        world: World = ALONE,
    ) -> None:  # fmt: skip
        training = spec.training
        self.function, self.net, self.streams, self.n_batches = function, net, streams, n
        self.called, self.several = name_of(function), optimizers.several
        self.parts, self.accumulate = optimizers.parts, training.window
        self.clip_norm = None if self.several else optimizers.first.optim.grad_clip_norm
        self.precision, self.extra_metrics = spec.precision, training.extra_metrics or {}
        narrow = next((name for part in self.parts.values() for name in part.wide), None)
        if narrow is not None:
            told = "a step of your own updates float32 parameters; make the module float32 and set precision"
            raise ConfigError(f"parameter '{narrow}' has 16 bits, but {told}", path=f"{spec.block}.precision")
        self.moved, self.broken, self.leaf = False, False, None
        self.norms: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._open = False
        group = None if world.alone else Together(world, self.called, list(self.parts), net.device)
        self._group, self.together = group, group
        self._averaged: set[str] = set()
        self._saved: dict[str, torch.Tensor] = {}
        for name, part in self.parts.items():
            part.torch.register_step_pre_hook(self._before_step(name))
        self.seen = Seen(False, (), True)

    def owned(self, name: str | None) -> Mapping[str, torch.nn.Parameter]:
        """Parameters of one optimizer; of the model for None."""
        return self.net.params if name is None else self.parts[name].params

    # -- calls -------------------------------------------------------------------------------------------------

    def look(self, batch: Mapping[str, torch.Tensor]) -> Seen:
        """Call the function once with a few rows to see what it does; everything it does is undone.

        Raises:
            StepError: it returns no record, or another one than default_train_step.
        """
        counters = dict.fromkeys(("batch", "epoch", "epoch_batch"), 0)
        loss = torch.zeros((), device=self.net.device)
        self._begin()
        self.together = None  # nothing of this look is kept, so nobody is waited for
        try:
            with self.net.mode(train=True), torch.enable_grad():
                ctx, returned = self._call(batch, counters, lambda: {"loss": loss})
            record = self._record(returned)
        finally:
            self._undo()
            self._end()
            self.together = self._group
        delegates = ctx.delegated is not None
        if delegates and (record.keys() - {"loss"} or record["loss"] is not loss):
            raise StepError(
                f"{self.called} returns another record than default_train_step, which writes it; return that one, and "
                "give what else is to be recorded as extra_metrics"
            )
        names = () if delegates else tuple(name for name in record if name not in ("loss", "count"))
        if bad := [name for name in names if not name.isidentifier() or name == "lr"]:
            raise ConfigError(f"{self.called} records {bad[0]!r}; a recorded name is an identifier, and not loss or lr")
        for name in names:
            self._pair(record[name], name)
        self.seen = Seen(delegates, names, any(ctx.reports.values()) or delegates)
        if self.together is not None:
            self.together.same("records", "what default_train_step does" if delegates else ["loss", *names])
        return self.seen

    def delegate(
        self, batch: Mapping[str, torch.Tensor], counters: Mapping[str, int], default: Callable[[], dict[str, Any]]
    ) -> None:
        """Call a function that leaves the microbatch to the built-in step.

        Raises:
            StepError: this time it does not.
        """
        self.moved = False
        ctx, _ = self._call(batch, counters, default)
        if ctx.delegated is None:
            raise StepError(f"{self.called} does not always call default_train_step; call it for every microbatch")

    def microbatch(self, batch: Mapping[str, torch.Tensor], counters: Mapping[str, int], *, ignore: bool) -> Outcome:
        """Call a function that makes its own updates; what is not finite undoes them, unless that is ignored."""
        self._begin()
        try:
            with torch.enable_grad():
                ctx, returned = self._call(batch, counters, None)
            record = self._record(returned)
            if tuple(name for name in record if name not in ("loss", "count")) != self.seen.names:
                told = "record the same names for every microbatch"
                raise StepError(f"{self.called} records {list(record)} now and {list(self.seen.names)} before; {told}")
            loss = _number(record.pop("loss"))
            counted = "count" in record
            weight = _number(record.pop("count", float(len(batch["mask"]))))
            pairs = [self._pair(value, name) for name, value in record.items()]
            measured = _Measured(loss, weight, counted, not math.isfinite(loss), self.broken, self._place(), pairs)
            if self.together is not None:
                measured = _of_all(measured, self.together, ctx.reports)
            fault, sums = self._fault(measured), measured.sums()
            if fault is not None and not ignore:
                self._undo()
        except BaseException:
            self._undo()
            raise
        finally:
            self._end()
        rates = {name: self._used.get(name, part.rate) for name, part in self.parts.items()}
        return Outcome(sums, fault, next(reversed(self.norms.values()), 0.0), rates, ctx.reports)

    def _place(self) -> int:
        """Number of the first parameter whose gradient was not finite; -1 for none."""
        return -1 if self.leaf is None else list(self.net.params).index(self.leaf)

    def _fault(self, measured: _Measured) -> tuple[str | None, str | None] | None:
        if not (measured.infinite or measured.broken):
            return None
        leaf = None if measured.leaf < 0 else list(self.net.params)[measured.leaf]
        return "loss" if measured.infinite else None, leaf

    def _call(self, batch: Any, counters: Any, default: Any) -> tuple[TrainStepContext, Any]:
        kind = TrainerStepContext if self.several else TrainStepContext
        ctx = kind(self, batch, counters, default)
        return ctx, self.function(ctx)

    # -- what is undone ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.moved, self.broken, self.leaf = False, False, None
        self.norms, self._used = {}, {}
        self._averaged.clear()
        self._saved = {f"state/{name}": value.clone() for name, value in self.net.state().items()}
        self._counts = {name: part.count for name, part in self.parts.items()}
        self._open = True
        for part in self.parts.values():
            part.prepare()
        for value in self.net.params.values():
            value.grad = None

    def _end(self) -> None:
        self._open, self._saved = False, {}
        for value in self.net.params.values():
            value.grad = None

    def _before_step(self, name: str) -> Callable[..., None]:
        """What happens when torch's optimizer is about to step, whoever asked it to."""

        def look(*_: Any) -> None:
            if not self._open:
                return
            if not self.moved:
                with torch.no_grad():
                    self._saved |= {f"param/{n}": value.clone() for n, value in self.net.params.items()}
                    for part in self.parts.values():
                        self._saved |= {f"slot/{n}": value.clone() for n, value in part.arrays().items()}
            self.moved = True
            part = self.parts[name]
            self.average(name)
            self._averaged.discard(name)
            self._used[name] = part.rate
            held = {n: value.grad for n, value in part.params.items() if value.grad is not None}
            norm = foreach.length(list(held.values())).item() if held else 0.0
            self.norms.setdefault(name, norm)
            if not math.isfinite(norm):
                self.broken = True
                bad = (n for n, grad in held.items() if not math.isfinite(torch.linalg.vector_norm(grad).item()))
                self.leaf = self.leaf or next(bad, None)

        return look

    def average(self, name: str) -> None:
        """Average an optimizer's gradients over all processes, once before it steps."""
        if self.together is not None and name not in self._averaged:
            self._averaged.add(name)
            self.together.average(name, self.parts[name].params)

    def _undo(self) -> None:
        """Put parameters, statistics and optimizers back to where the microbatch began."""
        state = {n.removeprefix("state/"): v for n, v in self._saved.items() if n.startswith("state/")}
        self.net.put_state(state)
        for name, part in self.parts.items():
            part.count = self._counts[name]
        if not self.moved:
            return
        slots = {n: value for part in self.parts.values() for n, value in part.arrays().items()}
        with torch.no_grad():
            for name, value in self.net.params.items():
                value.copy_(self._saved[f"param/{name}"])
            for name, value in slots.items():
                value.copy_(self._saved[f"slot/{name}"])

    # -- records -----------------------------------------------------------------------------------------------

    def _record(self, returned: Any) -> dict[str, Any]:
        """A mapping with "loss", or the loss alone.

        Raises:
            StepError: something else.
        """
        if isinstance(returned, Mapping) and "loss" in returned:
            return dict(returned)
        if isinstance(returned, float) or (isinstance(returned, torch.Tensor) and returned.shape == ()):
            return {"loss": returned}
        told = f"keys {list(returned)}" if isinstance(returned, Mapping) else type(returned).__name__
        raise StepError(f"{self.called} returned {told}; return the loss, or a record such as {{'loss': loss}}")

    def _pair(self, value: Any, name: str) -> tuple[Any, Any]:
        """(sum, count) of a recorded value; a number alone has no count.

        Raises:
            StepError: arrays.
        """
        pair = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        for part in pair:
            shape = list(getattr(part, "shape", ()))
            if shape:
                raise StepError(f"{self.called} records {name!r} of shape {shape}; give one number, or (sum, count)")
        return pair


def _number(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)


def delegates(
    spec: RunSpec,
    function: Callable[..., Any],
    module: torch.nn.Module,
    feed: Any,
    *,
    device: torch.device,
    freeze: Sequence[str] = (),
) -> bool:
    """Whether a step of the user's own calls `default_train_step`, so that the run makes its windows.

    Args:
        device, freeze: as `Net` takes them.

    Raises:
        StepError: see `OwnStep.look`.
    """
    from nnx_jax.torch.scoring import probe, settle

    streams = Streams(device, spec.training.seed)
    settle(module.to(device), feed, device, streams)
    net = Net(module, device=device, freeze=freeze, precision=spec.precision)
    made = Optimizers(spec.training.optimizers, {}, net.params, several=spec.trainer is not None)
    with streams.lent():
        return OwnStep(spec, function, net, made, streams, 1).look(probe(feed, net.device)).delegates
