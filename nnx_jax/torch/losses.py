"""The built-in losses and the user's own in torch, each as sums: (outputs, batch) -> loss terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nnx_jax.core.errors import ConfigError
from nnx_jax.objectives import losses as host
from nnx_jax.objectives.losses import Loss, Task
from nnx_jax.objectives.targets import Batch
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.torch.module import width
from nnx_jax.torch.rows import UNKNOWN, span_of
from nnx_jax.torch.targets import (
    Items,
    all_classes,
    bernoulli_items,
    class_items,
    item_weight,
    value_items,
    weighted_sum,
    widened,
)
from nnx_jax.torch.terms import Whole, known_term, settled


@dataclass(frozen=True)
class TorchLoss(Loss):
    """A loss of torch tensors: `objectives.losses.Loss` in everything but the arrays it computes with.

    Its terms are scalars on the outputs' device, float32, or float64 where the outputs are; numerators have a gradient.
    """

    whole: Callable[[Any, Batch], Whole | None] = lambda outputs, batch: None
    """(outputs, batch) -> what the only term adds up to, where it is known that every item counts once."""

    def invalid_labels(self, outputs: Any, batch: Batch) -> Tensor:
        """How many weighted items have an illegal label: int32 scalar on the batch's device."""
        found = self.count_invalid(outputs, batch)
        device = next((column.device for column in batch.values() if isinstance(column, Tensor)), None)
        return torch.as_tensor(found, dtype=torch.int32, device=device)


def cross_entropy(
    *,
    ignore_index: int | None = -100,
    class_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
) -> TorchLoss:
    """Softmax cross entropy for integer labels; outputs [..., C] (classes last, unlike torch's), labels [...].

    The value of its term is that of torch.nn.CrossEntropyLoss, class weights and label smoothing included.
    """
    weights = host.checked_weights(class_weights, label_smoothing)
    held: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def per_class(like: Tensor) -> Tensor:
        key = like.dtype, like.device  # copied to the device once, not at every microbatch
        if key not in held:
            with torch.inference_mode(False):  # else the first use in an evaluation would keep it from training
                held[key] = torch.tensor(weights, dtype=like.dtype, device=like.device)
        return held[key]

    def whole(outputs: Any, batch: Batch) -> Whole | None:
        if weights is not None or label_smoothing or not all_classes(batch, width(outputs), ignore_index):
            return None
        items = class_items(outputs, batch, ignore_index)
        rows, labels = items.outputs, items.targets
        if rows.ndim != 2:
            rows, labels = rows.reshape(-1, rows.shape[-1]), labels.reshape(-1)
        return Whole(F.cross_entropy(rows, labels, reduction="sum"), labels.shape[0])

    def terms(outputs: Any, batch: Batch) -> tuple[LossTerm, ...]:
        if (found := whole(outputs, batch)) is not None:
            return (found.term("cross_entropy"),)
        items = class_items(outputs, batch, ignore_index)
        n_classes = items.outputs.shape[-1]
        host.check_classes(weights, n_classes)
        log_p = F.log_softmax(items.outputs, dim=-1)
        loss = -pick(log_p, items.targets)
        weight = own = items.weights()
        if weights is not None:
            weight = weight * per_class(log_p)[items.targets]
        numerator = weighted_sum(loss, weight) * (1.0 - label_smoothing)
        if label_smoothing:
            spread = -(log_p if weights is None else log_p * per_class(log_p)).sum(-1)
            numerator = numerator + weighted_sum(spread, own) * (label_smoothing / n_classes)
        return (known_term("cross_entropy", numerator, weight.sum()),)

    count = lambda outputs, batch: _count(class_items(outputs, batch, ignore_index))  # noqa: E731
    return TorchLoss("cross_entropy", "classes", terms, count, ignore_index, whole)


def pick(values: Tensor, labels: Tensor) -> Tensor:
    """`values[..., labels]`; the labels must be legal (see `class_items`), they are not checked again.

    By nll_loss over rows, whose backward pass is the same every time on every device; that of a gather is not.
    """
    rows = values.reshape(-1, values.shape[-1])
    return -F.nll_loss(rows, labels.reshape(-1), reduction="none", ignore_index=-1).reshape(labels.shape)


def binary_cross_entropy() -> TorchLoss:
    """Sigmoid cross entropy from logits, a mean over all outputs; targets in [0, 1] of the outputs' shape."""

    def per_item(logits: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")

    return _elementwise("binary_cross_entropy", "bernoulli", bernoulli_items, per_item)


def mse() -> TorchLoss:
    """Squared error, a mean over all outputs."""
    return _elementwise("mse", "values", value_items, lambda outputs, targets: (outputs - targets).square())


def mae() -> TorchLoss:
    """Absolute error, a mean over all outputs."""
    return _elementwise("mae", "values", value_items, lambda outputs, targets: (outputs - targets).abs())


def huber(*, delta: float = 1.0) -> TorchLoss:
    """torch.nn.HuberLoss, a mean over all outputs."""
    host.check_delta(delta)

    def per_item(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.huber_loss(outputs, targets, reduction="none", delta=delta)

    return _elementwise("huber", "values", value_items, per_item)


def _elementwise(
    name: str,
    task: Task,
    read: Callable[[Any, Batch], Items],
    per_item: Callable[[Tensor, Tensor], Tensor],
) -> TorchLoss:
    def whole(outputs: Any, batch: Batch) -> Whole | None:
        if span_of(batch) is UNKNOWN:
            return None
        items = read(outputs, batch)
        if items.weight is not None:
            return None
        return Whole(per_item(items.outputs, items.targets).sum(), items.targets.numel())

    def terms(outputs: Any, batch: Batch) -> tuple[LossTerm, ...]:
        if (found := whole(outputs, batch)) is not None:
            return (found.term(name),)
        items = read(outputs, batch)
        weight = items.weights()
        return (known_term(name, weighted_sum(per_item(items.outputs, items.targets), weight), weight.sum()),)

    return TorchLoss(name, task, terms, lambda outputs, batch: _count(read(outputs, batch)), whole=whole)


def _count(items: Items) -> Tensor:
    if items.illegal is None:
        return torch.zeros((), dtype=torch.int32, device=items.outputs.device)
    return items.illegal.sum(dtype=torch.int32)


def wrap_user_loss(fn: Callable[..., Any], name: str | None = None) -> TorchLoss:
    """Make a loss of the user's function of torch tensors: see `objectives.losses.wrap_user_loss`.

    Raises:
        ConfigError: for something not callable, one that takes the targets first, or a function that returns an already
            averaged number.
    """
    label, call = host.user_function(fn, name)

    def terms(outputs: Any, batch: Batch) -> tuple[LossTerm, ...]:
        result = call(outputs, batch)
        if host.are_terms(result):
            return settled(result)
        values, own_mask = host.masked_values(result)
        values = widened(torch.as_tensor(values))
        host.check_each(label, values.ndim)
        weight = item_weight(batch, values)
        if own_mask is not None:
            weight = weight * item_weight({"mask": own_mask}, values)
        return (LossTerm(label, weighted_sum(values, weight), weight.sum()),)

    return TorchLoss(label, "own", terms, host.counter(fn))


LOSSES: dict[str, Callable[..., TorchLoss]] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "mse": mse,
    "mae": mae,
    "huber": huber,
}


def build_loss(spec: Any) -> TorchLoss:
    """Build the loss of a LossParams spec (a user's own defines `__call__`), a kind's name, a function, or a TorchLoss.

    Raises:
        ConfigError: for an unknown kind, or a loss of JAX arrays.
    """
    if isinstance(spec, TorchLoss):
        return spec
    if isinstance(spec, Loss):
        raise ConfigError(f"loss '{spec.name}' is built for JAX; build it with nnx_jax.torch.losses, or give its name")
    return host.made_loss(spec, LOSSES, wrap_user_loss)
