"""What a step of the user's own sees: the model, a batch, gradients, named updates and their reports, all traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from nnx_jax.core.errors import ConfigError, StepError, nearest
from nnx_jax.core.precision import full_precision, sum_dtype
from nnx_jax.objectives.targets import item_weight, weighted_sum
from nnx_jax.optim.clip import clip_scale, square_sums
from nnx_jax.step import gates, rng, state
from nnx_jax.step.state import TrainState
from nnx_jax.step.window import first_bad

SINGLE = ""
"""The name of the only optimizer where it has none."""


@dataclass(frozen=True)
class OwnStep:
    """A step of the user's own and what it works with.

    Attributes:
        function: (context) -> record: a mapping with "loss", or the loss alone.
        open: (parameters, model_state, key) -> module for one trace.
        variables: (module) -> its variables by name, parameters and model_state alike.
        masked: (module, mask) -> context manager in which its BatchNorms leave masked rows out.
        narrowed: (batch) -> the batch in the type the model computes in.
        optimizer: `init` and `update`; with `update_one` and `owned` where `names` are given.
        schedules: rate from an optimizer's own count, by name; those without one hold their rate in their state.
        names: names of the optimizers; empty for the only one.
        accumulate: microbatches that the configuration wants in an update.
        clip_norm: largest global norm of a gradient of the only optimizer.
        n_batches: microbatches of an epoch.
    """

    function: Callable[[Any], Any]
    open: Callable[[Any, Any, Any], Any]
    variables: Callable[[Any], Mapping[str, Any]]
    masked: Callable[[Any, Any], Any]
    narrowed: Callable[[Any], Any]
    optimizer: Any
    schedules: Mapping[str, Callable[[Any], Any]]
    names: tuple[str, ...] = ()
    accumulate: int = 1
    clip_norm: float | None = None
    n_batches: int = 1
    precision: str = "float32"
    extra_metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def called(self) -> str:
        """What the function is called."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the optimizers, `SINGLE` for the only one."""
        return self.names or (SINGLE,)

    def moved(self, opt_state: Any, name: str, **changes: Any) -> Any:
        """The state with fields of one optimizer's own state changed."""
        if name == SINGLE:
            return opt_state._replace(**changes)
        inner = {**opt_state.inner, name: opt_state.inner[name]._replace(**changes)}
        return opt_state._replace(inner=inner)

    def state_of(self, opt_state: Any, name: str) -> Any:
        """One optimizer's own state."""
        return opt_state if name == SINGLE else opt_state.inner[name]

    def rate(self, opt_state: Any, name: str) -> jax.Array:
        """The rate of one optimizer's next update, a scalar."""
        own, schedule = self.state_of(opt_state, name), self.schedules.get(name)
        return own.rate if schedule is None else jnp.asarray(schedule(own.count), own.rate.dtype)


class TrainStepContext:
    """One microbatch, for a `train_step_fn`; it exists only while the step is traced, so its arrays are tracers.

    Attributes:
        batch: columns by name, each [B, ...]; "mask" float32 [B] is 0 on padded rows.
        rng: key of this microbatch, for noise of your own.
        epoch_idx, batch_idx: int32 scalars, 0-based; batch_idx counts within the epoch.
        is_last_batch: bool scalar, the last microbatch of an epoch.
        grad_clip_norm: largest global gradient norm of the configuration, None for no clipping.
        accumulate_grad_batches: microbatches the configuration wants in an update.
        extra_metrics: functions (outputs, batch) -> value of the configuration.
        precision: name of the number format the model computes in.
    """

    def __init__(self, step: OwnStep, train: TrainState, batch: Mapping[str, Any], default: Any = None) -> None:
        self._step, self._train, self._default = step, train, default
        at = train.counters
        self.batch = step.narrowed(batch)
        self.rng = rng.stream_key(train.rng, rng.OWN_STEP, at[state.BATCH])
        self.epoch_idx, self.batch_idx = at[state.EPOCH], at[state.EPOCH_BATCH]
        self.is_last_batch = at[state.EPOCH_BATCH] == step.n_batches - 1
        self.grad_clip_norm, self.accumulate_grad_batches = step.clip_norm, step.accumulate
        self.extra_metrics, self.precision = step.extra_metrics, step.precision
        self._noise, self._draws = rng.stream_key(train.rng, rng.DROPOUT, at[state.BATCH]), 0
        self.model: Any = step.open({**train.frozen, **train.params}, train.model_state, self._noise)
        """The module with its weights of now; what is written into it is kept."""
        self._variables = step.variables(self.model)
        self._held = self._raw(self._variables)
        self._opt_state = train.opt_state
        self._reports: dict[str, Any] = {}
        self._rates: dict[str, jax.Array] = {}
        self._dtype = sum_dtype(*(value.dtype for value in train.params.values()))
        self._norm: Any = jnp.asarray(0, self._dtype)
        self._bad: Any = jnp.bool_(False)
        self._leaf: Any = jnp.int32(-1)
        self._delegated: Any = None
        self._loss: Any = None
        self._before: set[str] = set()

    @property
    def mask(self) -> jax.Array:
        """float32 [B], 1 for a real row and 0 for one that fills the batch up."""
        return self.batch["mask"]

    def mean(self, per_row: Any) -> jax.Array:
        """The mean of `per_row`, [B] or [B, ...], over real rows: a scalar, 0 where there is none.

        Each row counts with its "weight", where the batch has that column, as in the built-in losses.
        """
        per_row = jnp.asarray(per_row, self._dtype)
        rows = item_weight(self.batch, per_row.shape, per_row.dtype)
        count = jnp.sum(rows)
        return weighted_sum(per_row, rows) / jnp.where(count > 0, count, 1.0)

    # -- gradients and updates -----------------------------------------------------------------------------------

    def value_and_grad(
        self, loss_fn: Callable[[Any], Any], *, optimizer: str | None = None, has_aux: bool = False
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Return (loss, gradients by parameter name) of `loss_fn(model)`, float32; float64 where parameters are.

        What the forward pass changes in the model (BatchNorm statistics) is kept.

        Args:
            loss_fn: (module) -> scalar loss; with `has_aux`, -> (loss, aux), and (loss, aux) is returned as the value.
            optimizer: differentiate by the parameters of this optimizer alone; by default by all.

        Raises:
            StepError: the loss is not one number.
        """
        params, model_state = self._values()
        own = self._owned(optimizer)
        key = self._noise if self._draws == 0 else jax.random.fold_in(self._noise, self._draws)
        self._draws += 1

        def pure(moving: dict[str, Any]) -> tuple[jax.Array, Any]:
            module = self._step.open({**self._train.frozen, **params, **moving}, model_state, key)
            with self._step.masked(module, self.batch.get("mask")), jax.named_scope("FORWARD"):
                out = loss_fn(module)
            loss, aux = out if has_aux else (out, None)
            if jnp.shape(loss) != ():
                message = f"{self._step.called}: the loss has shape {list(jnp.shape(loss))}; return one number"
                raise StepError(message)
            return jnp.asarray(loss, self._dtype), (aux, _read(self._step.variables(module), model_state))

        moving = {name: params[name] for name in own}
        (loss, (aux, after)), grads = jax.value_and_grad(pure, has_aux=True)(moving)
        self._write(after)
        wide = {name: grad.astype(self._dtype) for name, grad in grads.items()}
        return ((loss, aux) if has_aux else loss), wide

    def update(self, grads: Mapping[str, Any], *, optimizer: str | None = None, when: Any = True) -> None:
        """Clip the gradients, let the optimizer step, and write the new weights into `model`.

        It reports nothing: call `report_update` for the update to count and move a schedule. A gradient that is not
        finite undoes the whole microbatch and is then treated as `nonfinite` says.

        Args:
            grads: from `value_and_grad`; arrays of the parameters' shapes by name.
            optimizer: whose parameters are moved; may be left out where there is one.
            when: bool or traced bool: False leaves everything as it is.
        """
        self._refuse_after_default("update")
        name, allowed = self._named(optimizer), _flag(when, "when")
        params, _ = self._values()
        own = self._owned(name or None)
        missing = sorted(set(own) - set(grads))
        if missing:
            raise StepError(f"{self._step.called}: no gradient is given for {missing[0]}; pass those of value_and_grad")
        wide = {path: jnp.asarray(grads[path], self._dtype) for path in own}
        squares = square_sums(wide)
        norm = jnp.sqrt(jnp.sum(squares))
        self._note_bad(jnp.asarray(gates.and_(allowed, ~jnp.isfinite(norm))), squares, own)
        self._norm = jnp.where(jnp.asarray(allowed), norm, self._norm)
        with jax.named_scope("OPTIMIZER_STEP"):
            new, opt_state = self._moved(name, wide, norm, params)
        count = self._step.state_of(self._opt_state, name).count
        rate = self._step.state_of(opt_state, name).rate
        opt_state = self._step.moved(opt_state, name, count=count)._replace(count=self._opt_state.count)
        self._opt_state = gates.pick(allowed, opt_state, self._opt_state)
        self._write({path: gates.pick(allowed, new[path], params[path]) for path in wide})
        before = self._rates.get(name, jnp.asarray(0, self._dtype))
        self._rates[name] = gates.pick(allowed, rate, before)

    def _note_bad(self, bad: Any, squares: Any, own: tuple[str, ...]) -> None:
        """Keep whether a gradient was not finite, and the number of the first such parameter among all."""
        places, first = {name: place for place, name in enumerate(sorted(self._train.params))}, first_bad(squares)
        leaf = jnp.where(first >= 0, jnp.asarray([places[name] for name in sorted(own)], jnp.int32)[first], -1)
        self._leaf = jnp.where(bad & ~self._bad, leaf, self._leaf)
        self._bad = self._bad | bad

    def _moved(self, name: str, grads: Any, norm: Any, params: Any) -> tuple[Any, Any]:
        step = self._step
        if name != SINGLE:
            return step.optimizer.update_one(name, grads, self._opt_state, params)
        scale = clip_scale(norm, step.clip_norm)
        clipped = grads if scale is None else jax.tree.map(lambda grad: grad * scale, grads)
        return step.optimizer.update(clipped, self._opt_state, params)

    def report_update(self, *, when: Any = True) -> None:
        """Say that an update was made: it counts, and an update-clock schedule moves at once.

        Args:
            when: bool or traced bool: whether there was one.
        """
        self._report(SINGLE, when)

    def _report(self, name: str, when: Any) -> None:
        self._refuse_after_default("report_update")
        made = jnp.asarray(_flag(when, "when"))
        self._reports[name] = self._reports.get(name, jnp.int32(0)) + made
        count = self._step.state_of(self._opt_state, name).count + made
        self._opt_state = self._step.moved(self._opt_state, name, count=count)

    @property
    def lr(self) -> jax.Array:
        """A scalar, the rate of the next update."""
        return self._step.rate(self._opt_state, self._named(None))

    def default_step(self) -> dict[str, Any]:
        """See `default_train_step`."""
        if self._default is None:
            raise TypeError("a Trainer has no default step; use ctx.value_and_grad, ctx.update and ctx.report_update")
        if self._delegated is not None:
            raise StepError(f"{self._step.called} calls default_train_step twice; one microbatch makes one")
        if self._reports or self._rates:
            raise StepError(f"{self._step.called}: default_train_step makes the update itself; do not update before it")
        self._delegated, record = self._default(self._kept())
        train, self._loss = self._delegated[0], record["loss"]
        self._before = self.written()
        self._write({**train.params, **train.model_state})
        self._held = self._raw(self._variables)
        self._opt_state = train.opt_state
        return record

    # -- within --------------------------------------------------------------------------------------------------

    def _values(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(trainable parameters, model_state) as the module holds them now."""
        train = self._train
        for name in self.written().intersection(train.frozen):
            raise StepError(f"{self._step.called} changes parameter {name!r}, which is frozen; unfreeze it")
        return _read(self._variables, train.params), _read(self._variables, train.model_state)

    def written(self) -> set[str]:
        """Names of the variables that hold another array than they were given, by this microbatch or its default."""
        return {name for name, value in self._raw(self._held).items() if value is not self._held[name]} | self._before

    def _raw(self, names: Iterable[str]) -> dict[str, Any]:
        """The very arrays that variables hold."""
        with full_precision():
            return {name: self._variables[name].get_value() for name in names}

    def _write(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._variables[name].set_value(value)

    def _kept(self) -> TrainState:
        """The training state with what the module holds now."""
        params, model_state = self._values()
        train = {name: getattr(self._train, name) for name in TrainState.__dataclass_fields__}
        return TrainState(**{**train, "params": params, "model_state": model_state, "opt_state": self._opt_state})

    def _owned(self, optimizer: str | None) -> tuple[str, ...]:
        if optimizer is None:
            return tuple(self._train.params)
        return self._step.optimizer.owned[self._named(optimizer)]

    def _named(self, optimizer: str | None) -> str:
        names = self._step.keys
        if optimizer is None and len(names) == 1:
            return names[0]
        if optimizer not in names or optimizer == SINGLE:
            legal = self._step.names
            told = "name the optimizer" if optimizer is None else f"there is no optimizer {optimizer!r}"
            raise ConfigError(f"{self._step.called}: {told}{nearest(optimizer or '', legal)}")
        return optimizer

    def _refuse_after_default(self, what: str) -> None:
        if self._delegated is not None:
            raise StepError(f"{self._step.called} calls {what} after default_train_step, which has done it; drop one")


class NamedOptimizer:
    """One optimizer of a Trainer, inside its step."""

    def __init__(self, ctx: TrainerStepContext, name: str) -> None:
        self._ctx, self.name = ctx, name

    @property
    def lr(self) -> jax.Array:
        """A scalar, the rate of its next update."""
        return self._ctx._step.rate(self._ctx._opt_state, self.name)

    def update(self, grads: Mapping[str, Any], *, when: Any = True) -> None:
        """See `TrainStepContext.update`."""
        self._ctx.update(grads, optimizer=self.name, when=when)

    def value_and_grad(self, loss_fn: Callable[[Any], Any], *, has_aux: bool = False) -> tuple[Any, Any]:
        """See `TrainStepContext.value_and_grad`; by this optimizer's parameters."""
        return self._ctx.value_and_grad(loss_fn, optimizer=self.name, has_aux=has_aux)


class TrainerStepContext(TrainStepContext):
    """One microbatch, for a `trainer_step_fn`.

    Attributes:
        optimizers: the named optimizers; each has `value_and_grad`, `update` and `lr`.
    """

    def __init__(self, step: OwnStep, train: TrainState, batch: Mapping[str, Any], default: Any = None) -> None:
        super().__init__(step, train, batch, default)
        self.optimizers = {name: NamedOptimizer(self, name) for name in step.names}

    @property
    def schedulers(self) -> dict[str, jax.Array]:
        """The rate of every optimizer's next update."""
        return {name: optimizer.lr for name, optimizer in self.optimizers.items()}

    def report_update(self, optimizer: str | None = None, *, when: Any = True) -> None:  # type: ignore[override]
        """Say that an optimizer made an update: it counts, and that optimizer's schedule moves at once.

        Raises:
            ConfigError: (a ValueError) there is no optimizer of that name; with the names there are.
        """
        self._report(self._named(optimizer), when)


def default_train_step(ctx: TrainStepContext) -> dict[str, Any]:
    """Do what the built-in step does with this microbatch, window and all, and return its record.

    A `train_step_fn` that returns this trains bit for bit like none.
    """
    return ctx.default_step()


def finalize_step(
    loss_fn: Callable[[Any], Any], ctx: TrainStepContext, *, paradigm: str = "step", optimizer: str | None = None
) -> dict[str, Any]:
    """The tail of a step: gradient of `loss_fn(model)` -> finite check -> clip -> update -> report; returns {"loss"}.

    `loss_fn` is a function and not a number, because JAX differentiates functions.

    Raises:
        ConfigError: (a ValueError) the configuration accumulates microbatches, which this does not.
        TypeError: a number in place of the function.
        NonFiniteError: (a FloatingPointError) from the run, where the loss or gradient is not finite.
    """
    if not callable(loss_fn):
        raise TypeError(f"{paradigm}: finalize_step takes the loss as a function of the model, not as a number")
    if ctx.accumulate_grad_batches > 1:
        raise ConfigError(
            f"{paradigm}: finalize_step makes an update of every microbatch, but accumulate_grad_batches is "
            f"{ctx.accumulate_grad_batches}; set it to 1, or use an objective, which accumulates"
        )
    loss, grads = ctx.value_and_grad(loss_fn, optimizer=optimizer)
    ctx.update(grads, optimizer=optimizer)
    if isinstance(ctx, TrainerStepContext):
        ctx.report_update(optimizer)
    else:
        ctx.report_update()
    return {"loss": loss}


def _read(variables: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """What variables hold, in the dtypes of `like`: their own values, whatever a layer would read them as."""
    with full_precision():
        return {name: variables[name][...].astype(old.dtype) for name, old in like.items()}


def _flag(value: Any, what: str) -> Any:
    """A Python bool or a bool scalar.

    Raises:
        TypeError: something else, such as 1.
    """
    if isinstance(value, bool):
        return value
    if getattr(value, "dtype", None) == jnp.bool_ and jnp.shape(value) == ():
        return value
    raise TypeError(f"{what} must be a bool or a traced bool, got {type(value).__name__}; write {what}=(x > 0)")
