"""The Flax NNX engine: model, loss, optimizer and data of one run as compiled programs under the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError, NnxError, ResumePointError
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.batches import TrainBatches
from nnx_jax.engines.checks import check_tail, epoch_batches
from nnx_jax.engines.costs import costs_of
from nnx_jax.engines.deferral import settle
from nnx_jax.engines.double import check_parameters
from nnx_jax.engines.hook_plan import CONCRETE, carries, described, fit_sharding, float32_layers, window_length
from nnx_jax.engines.hook_views import SeenByHooks
from nnx_jax.engines.memory import explain_out_of_memory
from nnx_jax.engines.nnx_forward import PureModule, evaluating
from nnx_jax.engines.placement import in_place, make_placement, readable, refit
from nnx_jax.engines.rates import Rates, Schedules
from nnx_jax.engines.reduction import make_shards
from nnx_jax.engines.rows import HIDDEN, RowReader
from nnx_jax.engines.scoring import Scorer, loss_terms, loss_value, width
from nnx_jax.engines.validation import Batches, EvalStepContext, agreed, own_validation
from nnx_jax.engines.work import Work, built_in, by_objective, by_step, own_step
from nnx_jax.loop.engine import Evaluation, Poll, Records, Snapshot, Span
from nnx_jax.loop.records import history_columns
from nnx_jax.objectives.checks import check_targets
from nnx_jax.objectives.losses import Loss
from nnx_jax.objectives.metrics import Metric, build_metric, user_metric
from nnx_jax.objectives.objective import Objective
from nnx_jax.optim.partial import hold
from nnx_jax.params.run import RunSpec
from nnx_jax.spmd.world import ALONE, World
from nnx_jax.step import build_step
from nnx_jax.step import records as step_records
from nnx_jax.step.body import StepBody
from nnx_jax.step.custom import CustomBody
from nnx_jax.step.dispatch import Dispatch, choose_dispatch
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.programs import Carry, StepPrograms

WEIGHTS = ("params/", "frozen/", "model_state/")
"""Prefixes of the leaves that are the model; the rest belongs to training."""


class FlaxEngine(SeenByHooks):
    """One Flax NNX module under the loop.

    Args:
        spec: the run's configuration.
        module: the network; its weights are the start, and `trained` writes them back.
        loss: the built loss.
        feeds: "train", and "val" and "test" where the run has them.
        schedules: by optimizer, those on the update clock: rate from the optimizer's own count.
        schedule_state: plain description of the schedule, compared on resume.
        net_state: plain configuration of a built-in network with all its sizes; None for a module of the user's.
        freeze: glob patterns of parameters that are not trained.
        still: names of parameters that have gradients, but no updates.
        hooks: what takes part in the step, see `engines.hook_plan.plan_hooks`; decides window and precision.
        nonfinite: in place of `train.nonfinite`; "ignore" applies what is not finite.
        objective: what makes the loss terms, in place of `loss`.
        train_step: a step of the user's own, in place of the built-in one.
        eval_step: a validation of the user's own, in place of the built-in one.
        world: the processes that train together.
        optimizer: an `optax.GradientTransformation` in place of the specification's.

    Raises:
        ModelError: the network does not take the data, or has nothing to train.
        DataError: targets that the loss cannot use.
    """

    backend = "flax"
    make_pure: Any = PureModule
    """What makes named leaves and a forward pass of a module; another library's engine has another."""
    most_rows = 8192
    """Record rows the device keeps: an epoch of fewer updates is read once."""

    def __init__(
        self,
        spec: RunSpec,
        module: nnx.Module,
        loss: Loss,
        feeds: Mapping[str, Any],
        *,
        schedules: Schedules | None = None,
        schedule_state: Mapping[str, Any] | None = None,
        net_state: Mapping[str, Any] | None = None,
        freeze: Sequence[str] = (),
        still: frozenset[str] = frozenset(),
        hooks: HookPlan | None = None,
        nonfinite: str | None = None,
        objective: Objective | None = None,
        train_step: Callable[..., Any] | None = None,
        eval_step: Callable[..., Any] | None = None,
        world: World = ALONE,
        optimizer: Any = None,
    ) -> None:
        self.world = world
        self.hooks, self.nonfinite = hooks, nonfinite or spec.training.nonfinite
        self.spec, self.module, self.loss, self.feeds = spec, module, loss, dict(feeds)
        self.rates = Rates(spec, schedules or {}, optimizer)
        self.schedule_state, self.net_state = dict(schedule_state or {}), net_state
        self.feed = feeds["train"]
        self.accumulate, self.carries = window_length(hooks, spec), carries(hooks)
        self.n_batches = self._epoch_batches()
        dtype = jnp.dtype(spec.precision) if hooks is None else hooks.compute_dtype
        kept = float32_layers(hooks)
        self.pure = self.make_pure(module, freeze=freeze, compute_dtype=dtype, keep_float32=kept, mask_rows=True)
        check_parameters(self.pure.params, dtype)
        self._check_tail()
        hooks = fit_sharding(hooks, self.pure, module)
        moving = {name: value for name, value in self.pure.params.items() if name not in still}
        self.optimizer = hold(self._optimizer(moving), still) if still else self._optimizer(moving)
        self.work = self._work(objective, train_step, scores=eval_step is None)
        self.shards, scoring, hooks = make_shards(spec, hooks, self.pure, self.work, self.feed)
        self.hooks = settle(hooks, self.pure, self.work, self.feed, spec)
        self.place = make_placement(self.hooks, self.feed)
        self.metrics = self.work.metrics
        self.metric_names = tuple(metric.name for metric in self.metrics if not metric.name.startswith(HIDDEN))
        self.score_names = tuple(metric.name for metric in self.work.score_metrics)
        if self.work.custom is not None and not self.work.custom[1].delegates:
            self.accumulate = 1  # it makes its own updates, and every microbatch is a window
        self.rows = RowReader([m.name for m in self.metrics], self.rates, vetoes=self.hooks is not None)
        self.programs = self._programs()
        self.accumulate = self.programs.accumulate  # 1 where hooks decide themselves what is kept
        self.scorer = Scorer(
            self.work.score_forward, self.work.score_terms, self.work.score_metrics, placement=self.place,
            shards=None if scoring is None else scoring.of_window(self.accumulate),
        )  # fmt: skip
        self.eval_step = eval_step
        self.wrote = False
        """The module has had weights of this training, see `trained`."""
        self.watched: tuple[str, ...] = ()
        """Validation values that monitors follow; a validation of the user's own must return them."""
        self._batches: TrainBatches | None = None
        self._epoch = 0
        self._early: list[step_records.Records] = []

    # -- the Engine protocol -----------------------------------------------------------------------------------

    def batch_count(self, state: Carry) -> int:
        """Microbatches handed over so far, known without reading the device."""
        return state.batch

    def open_batches(self, state: Carry) -> int:
        """Microbatches in the open window, known without reading the device."""
        return state.micro

    def start(self) -> Carry:
        """The first state, from the module's weights and the run's seed."""
        carry = self.programs.init(
            self.pure.params, self.pure.model_state, frozen=self.pure.frozen, seed=self.spec.training.seed
        )
        self.rows.counters = np.asarray(self.programs.state(carry).counters)
        return carry

    def run_span(self, state: Carry, span: Span, poll: Poll) -> tuple[Carry, int]:
        """Run the span in calls of a bounded size; `poll` is asked between them."""
        self._epoch = span.epoch
        if span.first_batch == 0:
            self.programs.start_epoch(state, span.epoch)
        with self._memory("placing the data", self.feed):
            batches = self.batches
        done = 0
        while done < span.n_batches:
            if self.programs.room(state) < self._rows(1):
                self._early.append(self.programs.read_records(state, check=False))
            count = self._call_size(state, span.n_batches - done)
            with self._memory(f"update {state.batch // self.accumulate + 1}", self.feed):
                first, closes = span.first_batch + done, span.closes and done + count == span.n_batches
                batches.run(state, span.epoch, first, count, closes=closes)
            done += count
            if poll(done):
                break
        return state, done

    def read_records(self, state: Carry) -> tuple[list[Records], Exception | None]:
        """Records since the last call; with the error, and the state before it, when training halted."""
        with self._memory(f"an update before {state.batch // self.accumulate + 1}", self.feed):
            found, self._early = [*self._early, self.programs.read_records(state, check=False)], []
        records: list[Records] = []
        for rows in found:
            records.append(self.rows.read(rows))
            try:
                self.programs.raise_if_halted(rows)
            except NnxError as failure:
                self._rewind(state)
                return records, self.batches.cause(failure)
        return records, None

    def _memory(self, where: str, feed: Any) -> AbstractContextManager[None]:
        remedy = "lower data.eval_batch_size"
        if feed is self.feed:
            remedy = "lower data.batch_size and raise train.optim.accumulate_grad_batches: the updates stay the same"
        return explain_out_of_memory(where, feed.signature(), remedy)

    def _rewind(self, state: Carry) -> None:
        """Put the counters back to the last window before the halt, so that a resume replays the one that failed."""
        train = self.programs.state(state)
        self.programs.put(state, dataclasses.replace(train, counters=jnp.asarray(self.rows.counters)))

    def summarize(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Loss and metric values of added-up sums, in float64."""
        layout = self.programs.layout
        loss = loss_value(sums["loss"], layout.weights, layout.additive)
        shown = [metric for metric in self.metrics if metric.name in self.metric_names]
        return {"loss": loss, **{m.name: float(m.compute(np.asarray(sums[m.name], np.float64))) for m in shown}}

    def values(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Metric values of records, in float64."""
        return {m.name: m.values(sums[m.name]) for m in self.metrics if m.name in self.metric_names}

    def losses(self, sums: Sequence[float]) -> tuple[float, dict[str, float]]:
        """Loss of a window's loss sums, and every term divided; NaN for one without a valid target."""
        layout = self.programs.layout
        return loss_terms(sums, layout.terms, layout.weights, layout.additive)

    def evaluate(self, state: Carry, split: str) -> Evaluation | None:
        """Score a split with the state's weights: every row once, padding with weight 0, one read at the end."""
        feed = self.feeds.get(split)
        if feed is None:
            return None
        if split == "val" and self.eval_step is not None:
            ctx, rows = self._eval_context(state, feed), feed.rows or 0
            return agreed(self.world, partial(own_validation, self.eval_step, ctx, rows, self.watched))
        return self._score(state, split)

    def _score(self, state: Carry, split: str) -> Evaluation:
        train, feed = self.programs.state(state), self.feeds[split]
        with self._memory(f"evaluation of {split}", feed):
            return self.scorer.score({**train.frozen, **train.params}, train.model_state, feed)

    def _eval_context(self, state: Carry, feed: Any) -> EvalStepContext:
        """What a validation of the user's own sees: a copy of the model, so that nothing it does is kept."""
        model = evaluating(nnx.clone(self.trained(state)))
        extra = self.spec.training.extra_metrics or {}
        default = lambda: self._score(state, "val").values  # noqa: E731
        return EvalStepContext(model, Batches(feed), self._epoch, self.score_names, extra, default)

    def columns(self) -> tuple[str, ...]:
        """Columns of the history."""
        optimizers = tuple(self.rates.held) if self.rates.several else ()
        scores = self.score_names if "val" in self.feeds else None
        return history_columns(self.metric_names, scores, optimizers=optimizers, extra=self.eval_step is not None)

    @property
    def owns_windows(self) -> bool:
        """The run itself makes an update of every window, so their number can be planned."""
        return self.work.custom is None or self.work.custom[1].delegates

    @property
    def never_updates(self) -> bool:
        """A step of the user's own that reports no update at all."""
        return self.work.custom is not None and not self.work.custom[1].reports

    def set_rate(self, state: Carry, rate: float | Mapping[str, float]) -> Carry:
        """Set the epoch clock's learning rate, or one by optimizer: one small write to the device."""
        train = self.programs.state(state)
        opt_state = self.rates.set(self.optimizer, train.opt_state, rate)
        self.programs.put(state, dataclasses.replace(train, opt_state=opt_state))
        return state

    def snapshot(self, state: Carry, epoch: int, batch: int) -> Snapshot:
        """The state's arrays by name, the data's position, and what both must fit on resume."""
        return Snapshot(self.programs.named(state), self.batches.position(epoch, batch), self.topology)

    @cached_property
    def topology(self) -> dict[str, Any]:
        """Plain description of what a stored state fits: engine, net, optimizer, schedule, window, data."""
        like = jax.eval_shape(self.optimizer.init, self.pure.params)
        return {
            "engine": self.backend,
            "net": self.net_state,
            "optimizer": self.rates.topology(like),
            "schedule": self.schedule_state,
            "accumulate": self.accumulate,
            "precision": self.spec.precision,
            "data": self.feed.descriptor(),
            "n_batches": self.n_batches,
        } | ({"hooks": found} if (found := described(self.hooks)) else {})

    def abstract(self, state: Carry, stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Shape and dtype of every array a snapshot holds; of those `stored`, as far as `restore` takes them.

        What is cut over devices has its place as well, so that nobody ever holds all of it.
        """
        return in_place(readable(self.programs.abstract(), stored or {}, self._spread), self.programs.placed())

    def restore(self, state: Carry, arrays: Mapping[str, Any], *, weights_only: bool = False) -> Carry:
        """The stored state, exactly; or a fresh one with the stored weights.

        Raises:
            ResumePointError: a name, shape or dtype differs; nothing is changed.
        """
        if weights_only:
            kept = {name: value for name, value in arrays.items() if name.startswith(WEIGHTS)}
            arrays = {**{n: v for n, v in self.programs.named(state).items() if not n.startswith(WEIGHTS)}, **kept}
        try:
            carry = self.programs.load_named(refit(arrays, self.programs.abstract(), self._spread))
            train = self.programs.state(carry)
            self.rows.counters = np.asarray(train.counters)
            self.rates.read(train.opt_state)
            return carry
        except NnxError as error:
            raise ResumePointError(f"the checkpoint does not fit this run: {error}") from error

    def trained(self, state: Carry) -> nnx.Module:
        """Write copies of the state's weights into the module and return it."""
        self.wrote = True
        train = self.programs.state(state)
        self.pure.write(self.module, *self.place.home(({**train.frozen, **train.params}, train.model_state)))
        return self.module

    def undo(self) -> None:
        """Give the module back the weights it had before this training."""
        if self.wrote:
            self.pure.write(self.module, self.pure.held, self.pure.held)
        self.wrote = False

    def weights(self, model: Any) -> dict[str, jax.Array]:
        """Every parameter and statistic of the model's network as it is now, whatever its topology became."""
        now = self.make_pure(model.net, compute_dtype=self.pure.compute_dtype)
        return {
            **{f"params/{name}": value for name, value in now.params.items()},
            **{f"model_state/{name}": value for name, value in now.model_state.items()},
        }

    def absorb(self, state: Carry) -> Carry:
        """The state with the module's weights, where someone changed them since `trained`."""
        now = self.make_pure(self.module, compute_dtype=self.pure.compute_dtype)
        held = {**now.params, **now.frozen}
        train = self.programs.state(state)
        self.programs.put(
            state,
            dataclasses.replace(
                train,
                params={name: held[name] for name in train.params},
                frozen={name: held[name] for name in train.frozen},
                model_state={name: now.model_state[name] for name in train.model_state},
            ),
        )
        return state

    def costs(self) -> dict[str, Any]:
        """What one update costs each device, from the compiled program: counts, FLOPs and bytes; nothing is run."""
        return costs_of(self)

    # -- building ----------------------------------------------------------------------------------------------

    def _epoch_batches(self) -> int:
        return epoch_batches(self.feed, self.spec.training.steps_per_epoch, self.accumulate)

    def _check_tail(self) -> None:
        check_tail(self.pure, self.feed)

    def _outputs(self, feed: Any) -> Any:
        """Shapes of the outputs for this feed's batches, found without computing."""
        batch = _specs(feed.signature())
        key = jax.eval_shape(lambda: jax.random.key(0))
        params = {**self.pure.params, **self.pure.frozen}
        forward = lambda p, s, b, k: self.pure.forward(p, s, b, k, True)[0]  # noqa: E731
        try:
            return jax.eval_shape(forward, params, self.pure.model_state, batch, key)
        except NnxError:
            raise
        except (TypeError, ValueError, AssertionError) as error:
            raise self._untaken(batch, error) from error

    def _untaken(self, batch: Mapping[str, Any], error: Exception) -> ModelError:
        """What to say when the model does not take a batch."""
        shape = f"{batch['x'].dtype}{list(batch['x'].shape)}"
        return ModelError(
            f"{type(self.module).__name__} does not take a batch x of {shape}: {error}; fix the net's input size "
            "or the data's shape"
        )

    def _check_targets(self, outputs: Any) -> None:
        for feed in self.feeds.values():
            if isinstance(feed, Feed) and "y" in feed.dataset.columns:
                check_targets(self.loss, feed.dataset, width(outputs))

    def _optimizer(self, params: Mapping[str, Any]) -> Any:
        return self.rates.build(params)

    def _work(self, objective: Objective | None, train_step: Callable[..., Any] | None, *, scores: bool) -> Work:
        """What a microbatch does; `scores`: the validation is the built-in one."""
        training, batch = self.spec.training, _specs(self.feed.signature())
        if train_step is not None:
            own = own_step(
                self.pure, self.spec, train_step, self.optimizer, self.rates.schedules, n_batches=self.n_batches
            )
            asked = bool(self.spec.model.metrics or training.extra_metrics)
            metrics = self._metrics_of_outputs() if asked or (scores and len(self.feeds) > 1) else []
            return by_step(self.pure, own, self.loss, metrics, batch)
        if objective is None:
            return built_in(self.pure, self.loss, self._metrics_of_outputs())
        return by_objective(
            self.pure,
            objective.bind(self.loss),
            self.loss,
            self._metrics_of_outputs if objective.scores == "loss" else self._metrics,
            batch,
            precision=self.spec.precision,
            extra_metrics=training.extra_metrics or {},
        )

    def _metrics_of_outputs(self, _: Any = None) -> list[Metric]:
        """The metrics of the model's outputs, once these and the targets are checked."""
        outputs = self._outputs(self.feed)
        self._check_targets(outputs)
        return self._metrics(outputs)

    def _metrics(self, outputs: Any) -> list[Metric]:
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

    def _programs(self) -> StepPrograms:
        train = self.spec.training
        rows = self.n_batches if train.record_every == "batch" else -(-self.n_batches // self.accumulate) + self.carries
        make_body = StepBody
        if self.work.custom is not None:
            own, seen = self.work.custom
            make_body = partial(CustomBody, own=own, seen=seen)
        return build_step(
            self.work.forward,
            self.work.terms,
            self.optimizer,
            params=self.pure.params,
            model_state=self.pure.model_state,
            frozen=self.pure.frozen,
            signature={name: (c.shape, c.dtype) for name, c in self.place.signature(self.feed.signature()).items()},
            metrics=self.metrics,
            invalid=self.work.invalid,
            accumulate=self.accumulate,
            clip_norm=None if self.rates.several else train.optimizers["main"].grad_clip_norm,
            nonfinite=self.nonfinite,
            max_consecutive=train.max_consecutive_skips,
            record_every=train.record_every,
            capacity=max(min(rows, self.most_rows), self._rows(1)),
            hooks=self.hooks,
            executor=train.dispatch if train.dispatch in CONCRETE else "compiled",
            sharding=self.place.sharding,
            make_body=make_body,
            shards=self.shards,
        )

    @property
    def batches(self) -> TrainBatches:
        """How batches reach the device; decided once, before the first update."""
        if self._batches is None:
            mode = self.spec.training.dispatch
            if mode in CONCRETE:
                dispatch = Dispatch("step", False, 1, 0.0)
            else:
                one_by_one = self.hooks is not None and self.hooks.taps
                dispatch = choose_dispatch(self.programs, self.place.feed(self.feed), "step" if one_by_one else mode)
            ahead = None if self.spec.data is None else self.spec.data.prefetch
            self._batches = TrainBatches(
                self.programs, self.feed, dispatch, self.place, prefetch=ahead, n_batches=self.n_batches
            )
        return self._batches

    @property
    def _spread(self) -> bool:
        """The open window has a leading axis of devices."""
        return self.hooks is not None and self.hooks.mesh is not None

    # -- records -----------------------------------------------------------------------------------------------

    def _rows(self, windows: int) -> int:
        return windows * self.accumulate if self.spec.training.record_every == "batch" else windows

    def _call_size(self, state: Carry, left: int) -> int:
        """Microbatches of the next call: a bounded number of whole windows that fits the record ring."""
        windows = min(self.batches.windows, max(self.programs.room(state) // self._rows(1), 1))
        return min(left, windows * self.accumulate - state.micro)


def _specs(signature: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(column.shape, column.dtype) for name, column in signature.items()}
