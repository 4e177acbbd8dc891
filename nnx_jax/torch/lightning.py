"""A TrainingLoop that Lightning's Trainer runs: the same batches, loss and optimizer, in its loop.

The key that a task's functions get is a number: the count of updates so far in `loss_fn`, `EVALUATION_KEY` in an
evaluation, whenever it is.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carry import TrainerCarryState
from nnx_jax.backends.optimizers import read_optimizer
from nnx_jax.backends.outside import Outside, check_fields, counted, endless, scored, weighs_rows
from nnx_jax.backends.tasks import as_pair
from nnx_jax.core.errors import ConfigError
from nnx_jax.objectives.operators import MSE, LossOperator
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.params.losses import LossParams
from nnx_jax.torch.batches import real_rows
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.operators import TorchModelOp
from nnx_jax.torch.optim import Part

_PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed"}
_CPU = torch.device("cpu")
EVALUATION_KEY = 0x0E7A1
"""What a task gets as its key in an evaluation, so that every evaluation is of the same draws."""


def run(loop: Any, state: TrainerCarryState | None) -> Trained:
    """Train the operator's torch module through `lightning.Trainer`, on the CPU or the one accelerator it finds.

    Raises:
        TypeError: `model_op` is no TorchModelOp.
        ConfigError: (a ValueError) a field that does not apply, or a loss of JAX arrays.
    """
    import lightning

    check_fields(loop, takes=("precision",))
    op = loop.model_op if state is None or state.model is None else state.model
    if not isinstance(op, TorchModelOp):
        raise TypeError(f"model_op is {type(op).__name__}; the backend 'lightning' trains a TorchModelOp(module)")
    optim, schedule, given = read_optimizer(loop.optimizer_config, loop.accumulate)
    if given is not None:
        told = "an optax transformation updates JAX arrays; write {'name': 'adam', 'lr': ...}"
        raise ConfigError(told, path="TrainingLoop.optimizer_config")
    module = copy.deepcopy(op.module)
    shape = loop.dataset.info.get("input_shape")
    show = lambda: op.of(copy.deepcopy(module), input_shape=None if shape is None else tuple(shape))  # noqa: E731
    outside = Outside(loop, show, state)
    lit = _lightning_module(lightning, loop, module, Part(optim, schedule, dict(module.named_parameters())), outside)
    if loop.precision not in _PRECISIONS:
        raise ConfigError(f"got {loop.precision!r}; Lightning trains in {', '.join(_PRECISIONS)}", path="precision")
    lightning.seed_everything(loop.seed, verbose=False)
    with warnings.catch_warnings(), _quiet_logs():
        warnings.simplefilter("ignore")  # of workers, of a logger that is not there: nothing a loop can change
        trainer: Any = lightning.Trainer(
            max_steps=loop.max_steps,
            max_epochs=-1,
            accumulate_grad_batches=loop.accumulate,
            gradient_clip_val=optim.grad_clip_norm,
            precision=_PRECISIONS[loop.precision],  # type: ignore[arg-type]
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=not loop.quiet,
            callbacks=[_teller(lightning, outside)],
        )
        error: BaseException | None = None
        try:
            trainer.fit(lit, train_dataloaders=torch.utils.data.DataLoader(_Rows(loop), batch_size=None))
        except BaseException as failure:
            error = failure
            raise
        finally:
            outside.end(error)
    return outside.trained(outside.steps.state.model or show(), ("torch", "lightning"))


def loss_of(loop: Any) -> Any:
    """The loss of a loop as a function of torch's (outputs, batch) -> scalar, the mean over a batch by its weights.

    A mean over no weight is 0. A window is the mean of its microbatches, each divided by its own weights.

    Raises:
        ConfigError: (a ValueError) it computes with JAX arrays; or the rows have weights, and it is a function that
            knows none.
    """
    if loop.task is not None:
        return None
    given = loop.loss
    if isinstance(given, MSE) and given.reduction == "mean":
        given = "mse"
    if isinstance(given, LossOperator):
        told = f"{type(given).__name__} computes with JAX arrays; give the kind of a built-in loss ('mse', "
        raise ConfigError(f"{told}'cross_entropy', ...) or a function of torch tensors", path="TrainingLoop.loss")
    if not isinstance(given, str | LossParams):
        if weighs_rows(loop):
            told = "a function (outputs, targets) says nothing of the column 'weight'; give the kind of a built-in loss"
            raise ConfigError(f"{told}, or a task, whose batch has it", path="TrainingLoop.loss")
        return lambda outputs, batch: _scalar(given(outputs, batch["y"]))
    built = build_loss(given)

    def value(outputs: Any, batch: Any) -> torch.Tensor:
        parts = [_mean(term) * term.weight for term in built(outputs, batch)]
        total: Any = sum(parts[1:], start=parts[0])
        return total

    return value


def _mean(term: LossTerm) -> Any:
    """The value of a term: a sum as it is, a mean over no weight is 0."""
    if term.denominator is None:
        return term.scaled
    return term.scaled / torch.where(torch.as_tensor(term.denominator) > 0, term.denominator, 1.0)


def _scalar(result: Any) -> torch.Tensor:
    return (result[0] if isinstance(result, tuple) else result).mean()


class _Rows(torch.utils.data.IterableDataset):
    """The loop's batches, for ever."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop

    def __iter__(self) -> Iterator[Any]:
        for batch in endless(self.loop):
            yield dict(real_rows(batch, _CPU))


def _lightning_module(lightning: Any, loop: Any, module: torch.nn.Module, part: Part, outside: Outside) -> Any:
    """The LightningModule of a loop."""
    loss = loss_of(loop)

    class LoopModule(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.losses: list[torch.Tensor] = []  # of the window's microbatches, before Lightning divides them

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if loss is None:
                found = loop.task.loss_fn(self.module, as_pair(batch), outside.step)
                value = found[0] if isinstance(found, tuple) else found
            else:
                value = loss(self.module(batch["x"]), batch)
            self.losses.append(value.detach())
            return value

        def measured(self, batch: Any) -> Mapping[str, Any]:
            """The values of one batch of the validation set."""
            if loss is not None:
                return {"loss": loss(self.module(batch["x"]), batch)}
            if (function := getattr(loop.task, "eval_fn", None)) is not None:
                return function(self.module, as_pair(batch), EVALUATION_KEY)
            found = loop.task.loss_fn(self.module, as_pair(batch), EVALUATION_KEY)
            value, more = found if isinstance(found, tuple) else (found, {})
            return {**more, "loss": value}

        def configure_optimizers(self) -> Any:
            return part.torch

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            part.used = part.rate
            part.prepare()
            part.count += 1

        def evaluate(self) -> dict[str, float]:
            """The values over the validation set: a task's are means over rows, a loss is one by their weights."""
            totals: dict[str, float] = {}
            rows = 0.0
            self.module.eval()
            try:
                with torch.no_grad():
                    for batch in scored(loop):
                        count = float(len(batch["mask"])) if loss is None else counted(batch)
                        for name, value in self.measured(dict(real_rows(batch, self.device))).items():
                            mean = float(torch.as_tensor(value, dtype=torch.float64).mean())
                            totals[name] = totals.get(name, 0.0) + mean * count
                        rows += count
            finally:
                self.module.train()
            return {name: value / rows if rows else float("nan") for name, value in totals.items()}

    found = LoopModule()
    found.rate_used = lambda: part.used  # type: ignore[attr-defined]
    return found


def _teller(lightning: Any, outside: Outside) -> Any:
    """The Lightning callback that tells the loop's own ones."""

    class Teller(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            outside.begin()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if trainer.global_step == outside.step:
                return  # the window is still open
            losses, module.losses = module.losses, []
            outside.updated(float(torch.stack(losses).mean()), module.rate_used())
            if outside.evaluates:
                outside.validated(module.evaluate())
            trainer.should_stop = trainer.should_stop or outside.stops

    return Teller()


class _quiet_logs:
    """Lightning's lines on devices and tips are left out; its warnings and errors are not."""

    names = ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")

    def __enter__(self) -> None:
        self.before = {name: logging.getLogger(name).level for name in self.names}
        for name in self.names:
            logging.getLogger(name).setLevel(logging.WARNING)

    def __exit__(self, *_: object) -> None:
        for name, level in self.before.items():
            logging.getLogger(name).setLevel(level)
