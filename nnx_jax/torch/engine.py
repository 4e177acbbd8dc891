"""The torch engine: module, loss, optimizer and data of one run as steps under the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from nnx_jax.core.errors import ModelError
from nnx_jax.engines.checks import check_tail, epoch_batches
from nnx_jax.engines.scoring import loss_terms, loss_value
from nnx_jax.engines.validation import agreed
from nnx_jax.loop.engine import Evaluation, Poll, Records, Snapshot, Span
from nnx_jax.loop.records import history_columns
from nnx_jax.params.run import RunSpec
from nnx_jax.spmd.world import ALONE, World
from nnx_jax.torch import loaders, quick
from nnx_jax.torch.arrays import host
from nnx_jax.torch.batches import Batch, Source
from nnx_jax.torch.by_objective import Place
from nnx_jax.torch.halts import Fault, Table, find_fault, invalid_labels, not_finite
from nnx_jax.torch.make_work import WorkMaker
from nnx_jax.torch.module import Net, pick_device, weight_arrays
from nnx_jax.torch.optim import Optimizers, Schedules
from nnx_jax.torch.own_step import OwnStep
from nnx_jax.torch.records import Ledger, Row
from nnx_jax.torch.scoring import Scorer, probe, settle
from nnx_jax.torch.stand_in import StandIn
from nnx_jax.torch.state import TorchState
from nnx_jax.torch.streams import BUILDING, DROPOUT, Streams
from nnx_jax.torch.validation import own_scores
from nnx_jax.torch.views import SeenByHooks
from nnx_jax.torch.window import OWN_PLAN, Alone, Plan, Sync, Window, plan_terms, sums_of
from nnx_jax.torch.work import Work

POLL_SECONDS = 0.02
"""How often one process alone asks whether to stop, at most; several ask after every window."""


class TorchEngine(SeenByHooks):
    """One torch module under the loop; the module itself is trained.

    Args:
        spec: the run's configuration.
        module: the network; its weights are the start. It is moved to the device.
        loss: the built loss.
        feeds: "train", and "val" and "test" where the run has them.
        schedules: by optimizer, those on the update clock: rate from the optimizer's own count.
        schedule_state: plain description of the schedule, compared on resume.
        net_state: plain configuration of a built-in network with all its sizes; None for a module of the user's.
        freeze: glob patterns of parameters that are not trained.
        still: names of parameters that have gradients, but no updates.
        nonfinite: in place of `train.nonfinite`; "ignore" applies what is not finite.
        world: the processes that train together.
        device: where it computes: cpu, cuda[:n] or mps.
        sync: how several processes make one update; None for one alone.

    Raises:
        ModelError: the network does not take the data, or has nothing to train.
        DataError: targets that the loss cannot use.
    """

    make_net, make_window, make_state = Net, Window, TorchState

    def __init__(
        self,
        spec: RunSpec,
        module: torch.nn.Module,
        loss: Any,
        feeds: Mapping[str, Any],
        *,
        schedules: Schedules | None = None,
        schedule_state: Mapping[str, Any] | None = None,
        net_state: Mapping[str, Any] | None = None,
        freeze: Sequence[str] = (),
        still: frozenset[str] = frozenset(),
        nonfinite: str | None = None,
        objective: Any = None,
        train_step: Callable[..., Any] | None = None,
        eval_step: Callable[..., Any] | None = None,
        world: World = ALONE,
        device: Any = None,
        sync: Sync | None = None,
    ) -> None:
        training = spec.training
        self.spec, self.module, self.loss, self.feeds, self.world = spec, module, loss, dict(feeds), world
        self.nonfinite = nonfinite or training.nonfinite
        self.schedules = dict(schedules or {})
        self.schedule_state, self.net_state = dict(schedule_state or {}), net_state
        self.feed, self.device, self.objective = feeds["train"], pick_device(device), objective
        self.sync: Sync = sync or Alone()
        self.accumulate = training.window
        self.n_batches = epoch_batches(self.feed, training.steps_per_epoch, self.accumulate)
        self.streams = Streams(self.device, training.seed, world.rank)
        loaders.look(self.feed, self.device)
        module.to(self.device)
        settle(module, self.feed, self.device, self.streams)
        self.net = self.make_net(module, device=self.device, freeze=freeze, precision=spec.precision)
        check_tail(self.net, self.feed)  # type: ignore[arg-type]  # of a net it asks for its BatchNorms alone
        self.several = spec.trainer is not None
        moving = {name: value for name, value in self.net.params.items() if name not in still}
        self.optimizers = Optimizers(training.optimizers, self.schedules, moving, several=self.several)
        self.own = None
        if train_step is not None:
            options = self.net, self.optimizers, self.streams, self.n_batches, world
            self.own = OwnStep(spec, train_step, *options)
        self.work, self.score_work, self.plan = self._build()
        self.metrics, self.score_metrics = self.work.metrics, self.score_work.metrics
        self.metric_names = tuple(metric.name for metric in self.metrics)
        self.score_names = tuple(metric.name for metric in self.score_metrics)
        self.scorer, self.eval_step = Scorer(self.net, self.score_work, self.streams, world=world), eval_step
        self.watched: tuple[str, ...] = ()
        """Validation values that monitors follow; a validation of the user's own must return them."""
        self.wrote = False
        """The module has had weights of this training, see `undo`."""
        self.ledger = Ledger(self.plan, self.metrics, every=training.record_every)
        ahead = 0 if spec.data is None else spec.data.prefetch or 0
        self.source = Source(self.feed, self.device, ahead=ahead, begins=self._epoch_begins, world=world)
        self._start = {name: value.detach().to("cpu", copy=True) for name, value in weight_arrays(module).items()}
        self._n_sums = 2 * len(self.plan.terms) + sum(metric.size for metric in self.metrics) + 1
        self._state: TorchState | None = None
        self._epoch, self._polled = 0, 0.0
        self.common = False
        """Windows may end the short way, see `quick`."""
        self.stand_in = StandIn(self.feed, self.device)

    # -- building ----------------------------------------------------------------------------------------------

    def _build(self) -> tuple[Work, Work, Plan]:
        """What a microbatch does, what a row of a validation is scored by, and how the loss's terms are added up."""
        batch = probe(self.feed, self.device)
        maker = WorkMaker(self.spec, self.net, self.loss, self.feeds, batch)
        with self.streams.lent():
            self.streams.begin(BUILDING)
            if self.own is not None and not self.own.look(batch).delegates:
                self.accumulate = 1  # it makes its own updates, and every microbatch is a window
                return (*maker.by_step(self.own.seen.names), OWN_PLAN)
            if self.objective is None:
                work, terms = maker.by_loss()
                score = work
            else:
                work, score, terms = maker.by_objective(self.objective.bind(self.loss), self.streams, self._place)
        return work, score, plan_terms(terms, self.accumulate, alone=self.sync.size == 1)

    def _place(self) -> Place:
        """Where the training is."""
        assert self._state is not None
        at = self._state.counters
        return Place(at["batch"], at["epoch"], at["epoch_batch"])

    @property
    def owns_windows(self) -> bool:
        """The run itself makes an update of every window, so their number can be planned."""
        return self.own is None or self.own.seen.delegates

    @property
    def never_updates(self) -> bool:
        """A step of the user's own that reports no update at all."""
        return self.own is not None and not self.own.seen.reports

    # -- the Engine protocol -----------------------------------------------------------------------------------

    def batch_count(self, state: TorchState) -> int:
        """Microbatches handed over so far."""
        return state.counters["batch"]

    def open_batches(self, state: TorchState) -> int:
        """Microbatches in the open window."""
        return state.counters["micro"]

    def start(self) -> TorchState:
        """The first state: the module's weights, empty moments."""
        window = self.make_window(self.plan, self.net.params, self._n_sums, self.sync, self.device)
        self.common = quick.is_common(self, window)
        # An objective may call the model as often as it likes, and the parts of it; a wrapper counts its own calls.
        alone = self.objective is None and self.owns_windows
        self.sync.wrap(self.net, averages=window.plain and alone)
        state = self.make_state(self.net, self.optimizers, window, self.accumulate, loaders.generator_of(self.feed))
        state.reset()
        self._state = state
        return state

    def run_span(self, state: TorchState, span: Span, poll: Poll) -> tuple[TorchState, int]:
        """Run the span window by window; `poll` is asked between them."""
        self._epoch, done = span.epoch, 0
        if span.first_batch == 0:
            state.counters.update(epoch=span.epoch, epoch_step=0, epoch_batch=0)
        # A loader of the user's own may draw from the streams, so they are lent between its batches alone.
        lent = self.streams.lent() if self.source.resident else nullcontext()
        with self.net.mode(train=True), lent:
            while done < span.n_batches and state.halted is None:
                batch = self.source.read(span.epoch, span.first_batch + done)
                done += 1
                full = self.open_batches(state) + 1 == self.accumulate
                last = full or (span.closes and done == span.n_batches)
                with nullcontext() if self.source.resident else self.streams.lent():
                    self.streams.begin(DROPOUT, state.counters["batch"])
                    self._step(state, batch, last)
                if last and self._asks(done == span.n_batches) and poll(done):
                    break
            else:
                poll(done)
        return state, done

    def _step(self, state: TorchState, batch: Batch, last: bool) -> None:
        """One microbatch, and the window's end with the last one; by the user's function where there is one."""
        if self.own is None:
            self._microbatch(state, batch, last=last)
            if last:
                self._close(state)
        elif self.own.seen.delegates:
            self.own.delegate(batch, state.counters, partial(self._default, state, batch, last))
        else:
            self._own_microbatch(state, batch)

    def _asks(self, ends: bool) -> bool:
        """Whether to ask now: several processes do after every window, so that they all do at the same ones."""
        if ends:
            return False  # the end of the span asks
        now = time.monotonic()
        if self.world.alone and now - self._polled < POLL_SECONDS:
            return False
        self._polled = now
        return True

    def _microbatch(self, state: TorchState, batch: Batch, *, last: bool) -> None:
        """Forward and backward of one microbatch; one without a real row counts nothing and is not looked at."""
        window, counters = state.window, state.counters
        if not len(window):
            state.opened = dict(counters)
            window.entry = {name: value.clone() for name, value in self.net.state().items()}
        rows = len(batch["mask"])
        with self.sync.backward(last=last, rows=bool(rows)):
            if rows:
                if self.sync.joins:
                    self.stand_in.seen = batch
                measured = self.work.measure(batch, True)
                if window.takes_whole and measured.whole is not None:
                    window.add_whole(*measured.whole, measured.sums)
                else:
                    num, den = sums_of(measured.terms, self.plan, self.device, window.dtype)
                    window.backward(num, den)
                    window.measured(num, den, measured.sums, measured.invalid)
            else:
                if self.sync.joins:
                    window.backward(*self.stand_in.sums(self.work, self.plan, window.dtype))
                window.note(None)
        counters["batch"] += 1
        counters["micro"] += 1
        counters["epoch_batch"] += 1

    def _close(self, state: TorchState) -> None:
        """Divide -> finite check -> clip -> step, kept only if nothing speaks against it; then the records."""
        if self.common and quick.close(self, state):
            return
        window, counters = state.window, state.counters
        table = window.table(ends=True)
        if self._invalid(state, table):
            return
        sums = [sum(column) for column in zip(*table, strict=True)] if len(table) > 1 else table[0]
        n = len(self.plan.terms)
        grads, factor, norm = window.gradient(self.plan.factors(sums[n : 2 * n]))
        fault = find_fault(self.plan, window, table, counters["batch"] - len(table), norm)
        bad = fault is not None and self.nonfinite != "ignore"
        keep = not bad and not self.plan.is_empty(sums[n : 2 * n])
        if keep:
            self.optimizers.update(dict(zip(self.net.params, grads, strict=True)), factor, norm)
            counters["step"] += 1
            counters["epoch_step"] += 1
            counters["consecutive"] = 0
            self.wrote = True
        else:
            self.net.put_state(window.entry)
            if fault is not None and bad:
                if self._gives_up(state, fault):
                    return
            else:
                counters["skipped"] += 1
        counters["micro"] = 0
        rates = self.optimizers.rates()
        row = Row(counters["batch"] - 1, counters["step"], True, keep, self.optimizers.first.used, norm, (), rates)
        self.ledger.close(row, table, sums, window.told)
        window.clear()

    # -- a step of the user's own ------------------------------------------------------------------------------

    def _own_microbatch(self, state: TorchState, batch: Batch) -> None:
        """A microbatch whose updates the user's function makes: it is a window, dropped whole where it is bad."""
        assert self.own is not None
        state.opened, counters = dict(state.counters), state.counters
        with self.sync.lent():
            outcome = self.own.microbatch(batch, counters, ignore=self.nonfinite == "ignore")
        bad = outcome.fault is not None and self.nonfinite != "ignore"
        counters["batch"] += 1
        counters["epoch_batch"] += 1
        self.wrote = True
        if bad and self._gives_up(state, Fault(counters["batch"] - 1, *(outcome.fault or (None, None)))):
            return
        if not bad:
            made = any(outcome.reports.values())
            counters["step"] += made
            counters["epoch_step"] += made
            counters["consecutive"] = 0
        reports = {name: 0 if bad else count for name, count in outcome.reports.items()}
        rates = outcome.rates if self.several else None
        rate = next(iter(outcome.rates.values()))
        step = counters["step"]
        self.ledger.add(
            Row(counters["batch"] - 1, step, True, not bad, rate, outcome.norm, outcome.sums, rates, reports)
        )

    def _default(self, state: TorchState, batch: Batch, last: bool) -> dict[str, Any]:
        """What `default_train_step` does: the built-in step; the record is its loss, over the microbatch alone."""
        self._microbatch(state, batch, last=last)
        loss = self.plan.value(state.window.last)
        if last:
            self._close(state)
        return {"loss": loss}

    # -- halts -------------------------------------------------------------------------------------------------

    def _gives_up(self, state: TorchState, fault: Fault) -> bool:
        """Count a window that is not finite; whether it ends training."""
        counters = state.counters
        counters["skipped"] += 1
        counters["nonfinite"] += 1
        counters["consecutive"] += 1
        limit = 0 if self.nonfinite == "fail" else self.spec.training.max_consecutive_skips
        if counters["consecutive"] <= limit:
            return False
        bad = None if self.nonfinite == "fail" else counters["consecutive"]
        self._halt(state, not_finite(fault, counters["step"], bad))
        return True

    def _invalid(self, state: TorchState, table: Table) -> bool:
        """Halt at labels that no class has."""
        error = invalid_labels(table, state.counters["batch"] - len(table), state.counters["step"])
        if error is not None:
            self._halt(state, error)
        return error is not None

    def _halt(self, state: TorchState, error: Exception) -> None:
        """End training; the state goes back to before the window, so that a resume replays it."""
        state.rewind()
        state.halted = error

    # -- records -----------------------------------------------------------------------------------------------

    def read_records(self, state: TorchState) -> tuple[list[Records], Exception | None]:
        """Records since the last call; with the error, and the state before it, when training halted."""
        if self.ledger.every == "batch" and len(state.window) > state.window.told and state.halted is None:
            table = state.window.table()
            if not self._invalid(state, table):
                first = state.counters["batch"] - len(table)
                self.ledger.open(first, state.counters["step"], table, state.window.told)
                state.window.told = len(table)
        return [self.ledger.take()], state.halted

    def summarize(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Loss and metric values of added-up sums, in float64."""
        values = {"loss": loss_value(sums["loss"], self.plan.weights, self.plan.additive)}
        for metric in self.metrics:
            values[metric.name] = float(metric.compute(np.asarray(sums[metric.name], np.float64)))
        return values

    def values(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Metric values of records, in float64."""
        return {metric.name: metric.values(sums[metric.name]) for metric in self.metrics}

    def losses(self, sums: Sequence[float]) -> tuple[float, dict[str, float]]:
        """Loss of a window's loss sums, and every term divided; NaN for one without a valid target."""
        plan = self.plan
        return loss_terms(sums, plan.terms, plan.weights, plan.additive)

    def columns(self) -> tuple[str, ...]:
        """Columns of the history."""
        optimizers = tuple(self.optimizers.parts) if self.several else ()
        scores = self.score_names if "val" in self.feeds else None
        return history_columns(self.metric_names, scores, optimizers=optimizers, extra=self.eval_step is not None)

    # -- scores ------------------------------------------------------------------------------------------------

    def evaluate(self, state: TorchState, split: str) -> Evaluation | None:
        """Score a split with the weights of now: every row once, one read at the end."""
        feed = self.feeds.get(split)
        if feed is None:
            return None
        score = partial(self.scorer.score, feed)
        if split == "val" and self.eval_step is not None:
            validate = partial(own_scores, self.eval_step, self, feed, score, self._epoch)
            return agreed(self.world, validate)
        return score()

    # -- state -------------------------------------------------------------------------------------------------

    def set_rate(self, state: TorchState, rate: Any) -> TorchState:
        """Set the epoch clock's learning rate, or one by optimizer."""
        self.optimizers.set_rate(rate)
        return state

    def snapshot(self, state: TorchState, epoch: int, batch: int) -> Snapshot:
        """The state's arrays by name, the data's position, and what both must fit on resume."""
        return Snapshot(self.sync.stored(state.arrays()), {"epoch": epoch, "next": batch}, self.topology)

    @cached_property
    def topology(self) -> dict[str, Any]:
        """Plain description of what a stored state fits: engine, net, optimizer, schedule, window, data."""
        kinds = self.optimizers.kinds
        kind = {"kinds": kinds} if self.several else {"kind": next(iter(kinds.values()))}
        moments = self.optimizers.arrays().items()
        state = {n: {"shape": list(v.shape), "dtype": str(v.dtype).removeprefix("torch.")} for n, v in moments}
        return {
            "engine": "torch",
            "net": self.net_state,
            "optimizer": {**kind, "state": state},
            "schedule": self.schedule_state,
            "accumulate": self.accumulate,
            "precision": self.spec.precision,
            "data": self.feed.descriptor(),
            "n_batches": self.n_batches,
        }

    def abstract(self, state: TorchState, stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Shape and dtype of every array a snapshot holds; of the streams those that are `stored`."""
        forms = state.forms()
        if stored is None:
            return forms
        streams = {name: leaf for name, leaf in stored.items() if name.startswith("rng/")}
        own = {name: value for name, value in forms.items() if not name.startswith("rng/") or name in streams}
        return {**{name: (tuple(leaf.shape), leaf.dtype) for name, leaf in streams.items()}, **own}

    def restore(self, state: TorchState, arrays: Mapping[str, Any], *, weights_only: bool = False) -> TorchState:
        """The stored state, exactly; or a fresh one with the stored weights.

        Raises:
            ResumePointError: a name, shape or dtype differs; nothing is changed.
        """
        if weights_only:
            state.put_weights({n: v for n, v in arrays.items() if n.startswith(("params/", "frozen/", "model_state/"))})
            state.reset()
        else:
            state.put(self.sync.restored(arrays))
            loaders.forget(self.feed)
        self.wrote = True
        self.ledger.clear()
        self.source.close()
        return state

    def trained(self, state: TorchState) -> torch.nn.Module:
        """The module, which has the state's weights."""
        self.wrote = True
        return self.module

    def undo(self) -> None:
        """Give the module back the weights it had before this training."""
        if self.wrote:
            with torch.no_grad():
                for name, value in weight_arrays(self.module).items():
                    value.copy_(self._start[name])
        self.wrote = False

    def weights(self, model: Any) -> dict[str, np.ndarray]:
        """Every parameter and statistic of the model's network as it is now, whatever its topology became."""
        return {name: host(value) for name, value in weight_arrays(model.net).items()}

    def absorb(self, state: TorchState) -> TorchState:
        """The state has the module's weights, whoever changed them."""
        if list(weight_arrays(self.module)) != list(self._start):
            raise ModelError("the module has other parameters than when training began; nothing of them is stored")
        return state

    # -- loaders -----------------------------------------------------------------------------------------------

    def _epoch_begins(self, first: bool) -> Callable[[], None] | None:
        """Before a loader is opened; see `loaders.epoch_begins`."""
        if self._state is None:
            return None
        return loaders.epoch_begins(self.feed, self._state, self.device, first=first)
