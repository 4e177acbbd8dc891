"""The Flax NNX engine: model, loss, optimizer and data of one run as compiled programs under the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_jax.core.errors import ConfigError, DataError, ModelError, NnxError, ResumePointError
from nnx_jax.data.pipeline import Feed
from nnx_jax.engines.batches import TrainBatches
from nnx_jax.engines.hook_plan import CONCRETE, StateSlot, carries, described, float32_layers, window_length
from nnx_jax.engines.memory import explain_out_of_memory
from nnx_jax.engines.nnx_forward import ModuleCopies, PureModule
from nnx_jax.engines.scoring import Scorer, loss_value, width
from nnx_jax.loop.engine import Evaluation, Poll, Records, Snapshot, Span
from nnx_jax.objectives.checks import check_targets
from nnx_jax.objectives.losses import Loss
from nnx_jax.objectives.metrics import build_metric, user_metric
from nnx_jax.optim.build import describe, set_rate
from nnx_jax.optim.partial import hold
from nnx_jax.optim.specs import build_optimizer
from nnx_jax.params.run import RunSpec
from nnx_jax.step import build_step
from nnx_jax.step import records as step_records
from nnx_jax.step.dispatch import Dispatch, choose_dispatch
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.programs import Carry, StepPrograms
from nnx_jax.step.state import COUNTERS, own

WEIGHTS = ("params/", "frozen/", "model_state/")
"""Prefixes of the leaves that are the model; the rest belongs to training."""


class FlaxEngine:
    """One Flax NNX module under the loop.

    Args:
        spec: the run's configuration.
        module: the network; its weights are the start, and `trained` writes them back.
        loss: the built loss.
        feeds: "train", and "val" and "test" where the run has them.
        schedule: on the update clock, rate from the optimizer's own count; None on the epoch clock.
        schedule_state: plain description of the schedule, compared on resume.
        net_state: plain configuration of a built-in network with all its sizes; None for a module of the user's.
        freeze: glob patterns of parameters that are not trained.
        still: names of parameters that have gradients, but no updates.
        hooks: what takes part in the step, see `engines.hook_plan.plan_hooks`; decides window and precision.
        nonfinite: in place of `train.nonfinite`; "ignore" applies what is not finite.

    Raises:
        ModelError: the network does not take the data, or has nothing to train.
        DataError: targets that the loss cannot use.
    """

    most_rows = 8192
    """Record rows the device keeps: an epoch of fewer updates is read once."""

    def __init__(
        self,
        spec: RunSpec,
        module: nnx.Module,
        loss: Loss,
        feeds: Mapping[str, Any],
        *,
        schedule: Callable[[Any], Any] | None = None,
        schedule_state: Mapping[str, Any] | None = None,
        net_state: Mapping[str, Any] | None = None,
        freeze: Sequence[str] = (),
        still: frozenset[str] = frozenset(),
        hooks: HookPlan | None = None,
        nonfinite: str | None = None,
    ) -> None:
        train = spec.train
        self.hooks, self.nonfinite = hooks, nonfinite or train.nonfinite
        self.spec, self.module, self.loss, self.feeds = spec, module, loss, dict(feeds)
        self.schedule = schedule
        self.schedule_state, self.net_state = dict(schedule_state or {}), net_state
        self.feed = feeds["train"]
        self.accumulate, self.carries = window_length(hooks, spec), carries(hooks)
        self.n_batches = self._epoch_batches()
        dtype = jnp.dtype(spec.precision) if hooks is None else hooks.compute_dtype
        kept = float32_layers(hooks)
        self.pure = PureModule(module, freeze=freeze, compute_dtype=dtype, keep_float32=kept, mask_rows=True)
        self._check_tail()
        outputs = self._outputs(self.feed)
        self._check_targets(outputs)
        self.metrics = [build_metric(metric, width(outputs), loss=loss) for metric in spec.model.metrics]
        self.metrics += [user_metric(name, function) for name, function in (train.extra_metrics or {}).items()]
        self.metric_names = tuple(metric.name for metric in self.metrics)
        moving = {name: value for name, value in self.pure.params.items() if name not in still}
        self.optimizer = self._optimizer(moving)
        if still:
            self.optimizer = hold(self.optimizer, still)
        self.programs = self._programs()
        self.accumulate = self.programs.accumulate  # 1 where hooks decide themselves what is kept
        self.scorer = Scorer(self.pure, loss, self.metrics)
        self._batches: TrainBatches | None = None
        self._early: list[step_records.Records] = []
        self._counters: Any = None

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
            self.pure.params, self.pure.model_state, frozen=self.pure.frozen, seed=self.spec.train.seed
        )
        self._counters = np.asarray(self.programs.state(carry).counters)
        return carry

    def run_span(self, state: Carry, span: Span, poll: Poll) -> tuple[Carry, int]:
        """Run the span in calls of a bounded size; `poll` is asked between them."""
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
            records.append(self._records(rows))
            try:
                self.programs.raise_if_halted(rows)
            except NnxError as failure:
                self._rewind(state)
                return records, failure
        return records, None

    def _memory(self, where: str, feed: Any) -> AbstractContextManager[None]:
        remedy = (
            "lower data.eval_batch_size"
            if feed is not self.feed
            else ("lower data.batch_size and raise train.optim.accumulate_grad_batches: the updates stay the same")
        )
        return explain_out_of_memory(where, feed.signature(), remedy)

    def _rewind(self, state: Carry) -> None:
        """Put the counters back to the last window before the halt, so that a resume replays the one that failed."""
        train = self.programs.state(state)
        self.programs.put(state, dataclasses.replace(train, counters=jnp.asarray(self._counters)))

    def summarize(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Loss and metric values of added-up sums, in float64."""
        layout = self.programs.layout
        values = {"loss": loss_value(sums["loss"], layout.weights, layout.additive)}
        for metric in self.metrics:
            values[metric.name] = float(metric.compute(np.asarray(sums[metric.name], np.float64)))
        return values

    def evaluate(self, state: Carry, split: str) -> Evaluation | None:
        """Score a split with the state's weights: every row once, padding with weight 0, one read at the end."""
        feed = self.feeds.get(split)
        if feed is None:
            return None
        train = self.programs.state(state)
        with self._memory(f"evaluation of {split}", feed):
            return self.scorer.score({**train.frozen, **train.params}, train.model_state, feed)

    def set_rate(self, state: Carry, rate: float) -> Carry:
        """Set the epoch clock's learning rate: one small write to the device."""
        train = self.programs.state(state)
        self.programs.put(state, dataclasses.replace(train, opt_state=set_rate(train.opt_state, rate)))
        return state

    def snapshot(self, state: Carry, epoch: int, batch: int) -> Snapshot:
        """The state's arrays by name, the data's position, and what both must fit on resume."""
        return Snapshot(self.programs.named(state), self.batches.position(epoch, batch), self.topology)

    @cached_property
    def topology(self) -> dict[str, Any]:
        """Plain description of what a stored state fits: engine, net, optimizer, schedule, window, data."""
        like = jax.eval_shape(self.optimizer.init, self.pure.params)
        return {
            "engine": "flax",
            "net": self.net_state,
            "optimizer": {"kind": self.spec.train.optim.kind, "state": describe(like)},
            "schedule": self.schedule_state,
            "accumulate": self.accumulate,
            "precision": self.spec.precision,
            "data": self.feed.descriptor(),
            "n_batches": self.n_batches,
        } | ({"hooks": found} if (found := described(self.hooks)) else {})

    def abstract(self, state: Carry) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array a snapshot holds."""
        return self.programs.abstract()

    def restore(self, state: Carry, arrays: Mapping[str, Any], *, weights_only: bool = False) -> Carry:
        """The stored state, exactly; or a fresh one with the stored weights.

        Raises:
            ResumePointError: a name, shape or dtype differs; nothing is changed.
        """
        if weights_only:
            kept = {name: value for name, value in arrays.items() if name.startswith(WEIGHTS)}
            arrays = {**{n: v for n, v in self.programs.named(state).items() if not n.startswith(WEIGHTS)}, **kept}
        try:
            carry = self.programs.load_named(arrays)
            self._counters = np.asarray(self.programs.state(carry).counters)
            return carry
        except NnxError as error:
            raise ResumePointError(f"the checkpoint does not fit this run: {error}") from error

    def trained(self, state: Carry) -> nnx.Module:
        """Write copies of the state's weights into the module and return it."""
        train = self.programs.state(state)
        self.pure.write(self.module, {**train.frozen, **train.params}, train.model_state)
        return self.module

    def absorb(self, state: Carry) -> Carry:
        """The state with the module's weights, where someone changed them since `trained`."""
        now = PureModule(self.module)
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

    # -- hooks -------------------------------------------------------------------------------------------------

    @property
    def in_place(self) -> bool:
        """Host hooks at stages inside the step are called by the step itself."""
        return self.spec.train.dispatch in CONCRETE

    def bind(self, state: Carry) -> None:
        """Give every hook with state its slot in this state, and the averages something to be made from."""
        hooks: tuple[Any, ...] = (*self.hooks.update, *self.hooks.traced) if self.hooks is not None else ()
        for hook in hooks:
            if hasattr(hook, "attach"):
                hook.attach(self.copies())
            if hasattr(hook, "bind") and (slot := self.slot(state, hook)) is not None:
                hook.bind(slot)

    @property
    def dynamic(self) -> bool:
        """Hooks decide batch by batch what is accumulated, so no window has a length that is known here."""
        return self.programs.dynamic

    def copies(self) -> Any:
        """What an average makes its model from."""
        return ModuleCopies(self.module)

    def slot(self, state: Carry, hook: Any) -> StateSlot | None:
        """Where a hook's state lives; None for a hook without any."""
        if self.hooks is None or self.hooks.keys.get(id(hook)) not in self.programs.state(state).slots:
            return None
        return StateSlot(self.programs, state, self.hooks.key(hook))

    def hook_name(self, number: int) -> str:
        """Class of the update hook with this number in `Records.veto`."""
        return type(self.hooks.update[number]).__name__ if self.hooks is not None else "nobody"

    def batch(self, epoch: int, place: int) -> Any:
        """Columns of the microbatch to come, or of the last one, read-only; None where they are not kept."""
        return self.batches.look(epoch, place)

    def look(self, state: Carry, name: str) -> Any:
        """A value for hooks that watch, copied on the device; None where there is none."""
        if name == "models":
            return {"main": self.trained(state)}
        if name == "grad_scaler":
            scaling = [hook for hook in self.hooks.update if getattr(hook, "scaling", False)] if self.hooks else []
            return self.slot(state, scaling[0]) if scaling else None
        train = self.programs.state(state)
        held = {
            "params": {**train.frozen, **train.params},
            "learning_rate": getattr(train.opt_state, "rate", None),
            **train.accum.get("taps", {}),
        }.get(name)
        leaves, structure = jax.tree.flatten(held)
        return jax.tree.unflatten(structure, own(leaves))

    def parts(self) -> dict[str, Any]:
        """The optimizer, and the schedule of its rate where the step drives it."""
        return {"optimizers": [self.optimizer], "lr_schedulers": [self.schedule]}

    def costs(self) -> dict[str, int]:
        """What one update costs, from the compiled program: counts, FLOPs and bytes; nothing is run."""
        if self.in_place:
            dispatch = self.spec.train.dispatch
            raise ConfigError(f"'{dispatch}' compiles no update whose cost could be told", path="train.dispatch")
        batch = _specs(self.feed.signature())
        compiled = {"apply": self.programs.lower("apply", batch).compile()}
        if self.accumulate > 1:
            compiled["micro"] = self.programs.lower("micro", batch).compile()
        flops = {name: int((program.cost_analysis() or {}).get("flops", 0)) for name, program in compiled.items()}
        memory = compiled["apply"].memory_analysis()
        sizes = {name: int(value.size) for name, value in {**self.pure.params, **self.pure.frozen}.items()}
        return {
            "parameters": sum(sizes.values()),
            "trainable_parameters": sum(sizes[name] for name in self.pure.params),
            "updates_per_epoch": -(-self.n_batches // self.accumulate),
            "flops_per_update": flops["apply"] + (self.accumulate - 1) * flops.get("micro", 0),
            "state_bytes": int(memory.argument_size_in_bytes),
            "temporary_bytes": int(memory.temp_size_in_bytes),
            "peak_bytes": int(memory.argument_size_in_bytes + memory.temp_size_in_bytes),
        }

    # -- building ----------------------------------------------------------------------------------------------

    def _epoch_batches(self) -> int:
        asked, pass_ = self.spec.train.steps_per_epoch, self.feed.n_batches
        if asked is None and pass_ is None:
            raise DataError("the loader has no length; give it __len__, or set train.steps_per_epoch")
        wanted = pass_ if asked is None else asked * self.accumulate
        if pass_ is not None and wanted > pass_:
            raise DataError(f"train.steps_per_epoch needs {wanted} batches, one pass has {pass_}; lower it")
        return wanted

    def _check_tail(self) -> None:
        rows, size = self.feed.rows, getattr(self.feed, "batch_size", None)
        if not (self.pure.batch_norms and rows and size) or self.feed.descriptor().get("tail") == "drop":
            return
        if rows % size == 1 or size == 1:
            raise DataError(
                f"BatchNorm ({self.pure.batch_norms[0]}) needs two rows or more, but {rows} rows in batches of {size} "
                "leave a batch of one; use data.tail: drop or another batch_size"
            )

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
        return build_optimizer(self.spec.train.optim, self.schedule, params)

    def _programs(self) -> StepPrograms:
        train = self.spec.train
        rows = self.n_batches if train.record_every == "batch" else -(-self.n_batches // self.accumulate) + self.carries
        return build_step(
            self.pure.forward,
            self.loss,
            self.optimizer,
            params=self.pure.params,
            model_state=self.pure.model_state,
            frozen=self.pure.frozen,
            signature={name: (column.shape, column.dtype) for name, column in self.feed.signature().items()},
            metrics=self.metrics,
            invalid=self.loss.invalid_labels,
            accumulate=self.accumulate,
            clip_norm=train.optim.grad_clip_norm,
            nonfinite=self.nonfinite,
            max_consecutive=train.max_consecutive_skips,
            record_every=train.record_every,
            capacity=max(min(rows, self.most_rows), self._rows(1)),
            hooks=self.hooks,
            executor=train.dispatch if train.dispatch in CONCRETE else "compiled",
        )

    @property
    def batches(self) -> TrainBatches:
        """How batches reach the device; decided once, before the first update."""
        if self._batches is None:
            mode = self.spec.train.dispatch
            if mode in CONCRETE:
                dispatch = Dispatch("step", False, 1, 0.0)
            else:
                one_by_one = self.hooks is not None and self.hooks.taps
                dispatch = choose_dispatch(self.programs, self.feed, "step" if one_by_one else mode)
            self._batches = TrainBatches(self.programs, self.feed, dispatch)
        return self._batches

    # -- records -----------------------------------------------------------------------------------------------

    def _rows(self, windows: int) -> int:
        return windows * self.accumulate if self.spec.train.record_every == "batch" else windows

    def _call_size(self, state: Carry, left: int) -> int:
        """Microbatches of the next call: a bounded number of whole windows that fits the record ring."""
        windows = min(self.batches.windows, max(self.programs.room(state) // self._rows(1), 1))
        return min(left, windows * self.accumulate - state.micro)

    def _records(self, rows: step_records.Records) -> Records:
        halted = np.flatnonzero(rows.ints["halt"])
        good = int(halted[0]) if len(halted) else len(rows)
        closed = np.flatnonzero(rows.closed[:good])
        if len(halted):  # the window that failed is gone whole, with the rows of its first microbatches
            good = int(closed[-1]) + 1 if len(closed) else 0
        if len(closed):
            self._counters = np.array([rows.ints[name][closed[-1]] for name in COUNTERS], np.int32)
        sums = _columns(rows, [m.name for m in self.metrics])
        return Records(
            batch=rows.batch[:good],
            step=rows.step[:good],
            loss=rows.loss[:good],
            rate=rows.rate[:good].astype(np.float64),
            grad_norm=rows.grad_norm[:good].astype(np.float64),
            closed=rows.closed[:good],
            committed=rows.committed[:good],
            sums={name: column[:good] for name, column in sums.items()},
            veto=None if self.hooks is None else rows.ints["veto"][:good],
        )


def _specs(signature: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(column.shape, column.dtype) for name, column in signature.items()}


def _columns(rows: step_records.Records, metrics: Sequence[str]) -> dict[str, np.ndarray]:
    """Sums by name, float64 [n, size]: "loss" holds every term's numerator, then every denominator."""
    terms = [*rows.num.values(), *rows.den.values()]
    columns = {"loss": np.stack(terms, axis=1).astype(np.float64)}
    return columns | {name: rows.metrics[name].astype(np.float64) for name in metrics}
