"""What a step of the user's own sees under torch: the model, a batch, torch's optimizers, and reports of updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from nnx_jax.core.errors import ConfigError, StepError, nearest
from nnx_jax.torch import foreach
from nnx_jax.torch.optim import Part
from nnx_jax.torch.streams import OBJECTIVE
from nnx_jax.torch.targets import item_weight, weighted_sum, widened

if TYPE_CHECKING:
    from nnx_jax.torch.own_step import OwnStep


class TrainStepContext:
    """One microbatch, for a `train_step_fn`.

    Gradients are cleared before every microbatch, and the rate is set in the optimizer's groups. Where a loss or a
    gradient is not finite, all that the microbatch did to trained parameters, statistics and optimizers is undone.

    Attributes:
        model: the module, in training mode.
        batch: tensors by name, each [n, ...], of real rows only; "mask" float32 [n].
        optimizer: torch's optimizer; a Trainer's alphabetically first.
        epoch_idx, batch_idx: 0-based; batch_idx counts within the epoch.
        is_last_batch: the last microbatch of an epoch.
        grad_clip_norm: largest global gradient norm of the configuration, None for no clipping.
        accumulate_grad_batches: microbatches the configuration wants in an update.
        extra_metrics: functions (outputs, batch) -> value of the configuration.
        precision: name of the number format; run the model inside `autocast()` for it to count.
    """

    def __init__(self, step: OwnStep, batch: Mapping[str, Any], counters: Mapping[str, int], default: Any) -> None:
        self._step, self._default = step, default
        self.model: Any = step.net.call
        self.batch = dict(batch)
        self.epoch_idx, self.batch_idx = counters["epoch"], counters["epoch_batch"]
        self.is_last_batch = counters["epoch_batch"] == step.n_batches - 1
        self.grad_clip_norm, self.accumulate_grad_batches = step.clip_norm, step.accumulate
        self.extra_metrics, self.precision = step.extra_metrics, step.precision
        self._count = counters["batch"]
        self._rng: torch.Generator | None = None
        self.delegated: Any = None
        self.reports: dict[str, int] = dict.fromkeys(step.parts, 0)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer; of several the alphabetically first."""
        return next(iter(self._step.parts.values())).torch

    @property
    def rng(self) -> torch.Generator:
        """A generator of this microbatch, on the model's device, for noise of your own."""
        if self._rng is None:
            self._rng = self._step.streams.generator(OBJECTIVE, self._count)
        return self._rng

    @property
    def mask(self) -> torch.Tensor:
        """float32 [n], 1 for a real row."""
        return self.batch["mask"]

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        return self._step.parts[self._named(None)].rate

    def autocast(self) -> Any:
        """What the model computes in, as a context manager."""
        return self._step.net.autocast()

    def mean(self, per_row: Any) -> torch.Tensor:
        """The mean of `per_row`, [n] or [n, ...], over rows: each counts with its "weight", where there is one.

        Among several processes it is this one's part of the mean over all rows, times their number, since they are
        averaged; see `nnx_jax.torch.together`.
        """
        values = widened(torch.as_tensor(per_row))
        rows = item_weight(self.batch, values)
        count, together = rows.sum(), self._step.together
        if together is not None:
            count = together.count(count) / together.size
        return weighted_sum(values, rows) / torch.where(count > 0, count, 1.0)

    # -- gradients and updates ---------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward()`, once the loss is looked at; `options` are torch's.

        Raises:
            StepError: the loss is not one number.
        """
        if loss.shape != ():
            raise StepError(f"{self._step.called}: the loss has shape {list(loss.shape)}; give one number")
        if not math.isfinite(loss.item()):
            self._step.broken = True
        loss.backward(**options)

    def value_and_grad(
        self, loss_fn: Callable[[Any], Any], *, optimizer: str | None = None, has_aux: bool = False
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return (loss, gradients by parameter name) of `loss_fn(model)`, as the context of the JAX engine does.

        Raises:
            StepError: the loss is not one number.
        """
        out = loss_fn(self.model)
        loss, aux = out if has_aux else (out, None)
        if getattr(loss, "shape", None) != ():
            raise StepError(f"{self._step.called}: the loss is {type(loss).__name__}; return one number as a tensor")
        own = self._step.owned(None if optimizer is None else self._named(optimizer))
        grads = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        found = {
            name: torch.zeros_like(value) if grad is None else grad
            for (name, value), grad in zip(own.items(), grads, strict=True)
        }
        loss = loss.detach()
        return ((loss, aux) if has_aux else loss), found

    def update(
        self, grads: Mapping[str, torch.Tensor] | None = None, *, optimizer: str | None = None, when: bool = True
    ) -> None:
        """Clip the gradients and let the optimizer step, as the configuration says.

        It reports nothing: call `report_update` for the update to count and move a schedule.

        Args:
            grads: by parameter name; by default those that `backward` left in the parameters.
            optimizer: whose parameters are moved; may be left out where there is one.
            when: False leaves everything as it is.

        Raises:
            StepError: gradients are missing.
        """
        self._refuse_after_default("update")
        name = self._named(optimizer)
        if not _flag(when):
            return
        part = self._step.parts[name]
        missing = [] if grads is None else sorted(set(part.params) - set(grads))
        if missing:
            raise StepError(f"{self._step.called}: no gradient is given for {missing[0]}; pass those of value_and_grad")
        for path, value in part.params.items():
            grad = value.grad if grads is None else grads[path]
            value.grad = torch.zeros_like(value) if grad is None else grad.to(value.dtype)
        self._step.average(name)
        given: list[torch.Tensor] = [value.grad for value in part.params.values() if value.grad is not None]
        norm, limit = foreach.length(given).item(), part.optim.grad_clip_norm
        self._step.norms[name] = norm
        if limit is not None and norm > limit and math.isfinite(norm):
            foreach.mul_(given, limit / norm)
        part.torch.step()
        part.torch.zero_grad()

    def report_update(self, *, when: bool = True) -> None:
        """Say that an update was made: it counts, and an update-clock schedule moves at once."""
        self._report(self._named(None), when)

    def _report(self, name: str, when: bool) -> None:
        self._refuse_after_default("report_update")
        if _flag(when):
            self.reports[name] += 1
            part = self._step.parts[name]
            part.count += 1
            part.prepare()

    def default_step(self) -> dict[str, Any]:
        """See `nnx_jax.default_train_step`."""
        if self._default is None:
            raise TypeError("a Trainer has no default step; use ctx.backward, ctx.update and ctx.report_update")
        if self.delegated is not None:
            raise StepError(f"{self._step.called} calls default_train_step twice; one microbatch makes one")
        if any(self.reports.values()) or self._step.moved:
            raise StepError(f"{self._step.called}: default_train_step makes the update itself; do not update before it")
        self.delegated = self._default()
        return self.delegated

    def _named(self, optimizer: str | None) -> str:
        names = tuple(self._step.parts)
        if not self._step.several:
            if optimizer is not None:
                raise ConfigError(f"{self._step.called}: there is one optimizer, which has no name; got {optimizer!r}")
            return names[0]
        if optimizer is None and len(names) == 1:
            return names[0]
        if optimizer not in names:
            told = "name the optimizer" if optimizer is None else f"there is no optimizer {optimizer!r}"
            raise ConfigError(f"{self._step.called}: {told}{nearest(optimizer or '', names)}")
        return optimizer

    def _refuse_after_default(self, what: str) -> None:
        if self.delegated is not None:
            raise StepError(f"{self._step.called} calls {what} after default_train_step, which has done it; drop one")


class NamedOptimizer:
    """One optimizer of a Trainer, inside its step.

    Attributes:
        torch: torch's own optimizer.
    """

    def __init__(self, ctx: TrainerStepContext, name: str, part: Part) -> None:
        self._ctx, self.name, self._part = ctx, name, part
        self.torch = part.torch

    @property
    def lr(self) -> float:
        """The rate of its next update."""
        return self._part.rate

    def update(self, grads: Mapping[str, torch.Tensor] | None = None, *, when: bool = True) -> None:
        """See `TrainStepContext.update`."""
        self._ctx.update(grads, optimizer=self.name, when=when)

    def value_and_grad(self, loss_fn: Callable[[Any], Any], *, has_aux: bool = False) -> tuple[Any, Any]:
        """See `TrainStepContext.value_and_grad`; by this optimizer's parameters."""
        return self._ctx.value_and_grad(loss_fn, optimizer=self.name, has_aux=has_aux)

    def step(self) -> None:
        """torch's own step, with the gradients as they are."""
        self.torch.step()

    def zero_grad(self) -> None:
        """Clear the gradients of its parameters."""
        self.torch.zero_grad()


class TrainerStepContext(TrainStepContext):
    """One microbatch, for a `trainer_step_fn`.

    Attributes:
        optimizers: the named optimizers; each has `value_and_grad`, `update`, `step`, `zero_grad` and `lr`.
    """

    def __init__(self, step: OwnStep, batch: Mapping[str, Any], counters: Mapping[str, int], default: Any) -> None:
        super().__init__(step, batch, counters, None)
        self.optimizers = {name: NamedOptimizer(self, name, part) for name, part in step.parts.items()}

    @property
    def schedulers(self) -> dict[str, float]:
        """The rate of every optimizer's next update."""
        return {name: optimizer.lr for name, optimizer in self.optimizers.items()}

    def report_update(self, optimizer: str | None = None, *, when: bool = True) -> None:  # type: ignore[override]
        """Say that an optimizer made an update: it counts, and that optimizer's schedule moves at once.

        Raises:
            ConfigError: (a ValueError) there is no optimizer of that name; with the names there are.
        """
        self._report(self._named(optimizer), when)


def finalize_step(
    loss: Any, ctx: TrainStepContext, *, paradigm: str = "step", optimizer: str | None = None
) -> dict[str, Any]:
    """The tail of a step: finite check -> backward -> clip -> update -> report; returns {"loss"}.

    Args:
        loss: one number as a tensor with a gradient, or a function of the model that gives it.

    Raises:
        ConfigError: (a ValueError) the configuration accumulates microbatches, which this does not.
        NonFiniteError: (a FloatingPointError) from the run, where the loss or gradient is not finite.
    """
    if ctx.accumulate_grad_batches > 1:
        raise ConfigError(
            f"{paradigm}: finalize_step makes an update of every microbatch, but accumulate_grad_batches is "
            f"{ctx.accumulate_grad_batches}; set it to 1, or use an objective, which accumulates"
        )
    value: Any = loss(ctx.model) if callable(loss) and not isinstance(loss, torch.Tensor) else loss
    ctx.backward(value)
    ctx.update(optimizer=optimizer)
    if isinstance(ctx, TrainerStepContext):
        ctx.report_update(optimizer)
    else:
        ctx.report_update()
    return {"loss": value.detach()}


def _flag(value: Any) -> bool:
    """A bool, or a tensor that holds one.

    Raises:
        TypeError: something else, such as 1.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.shape == ():
        return bool(value.item())
    raise TypeError(f"when must be a bool, got {type(value).__name__}; write when=(x > 0)")
