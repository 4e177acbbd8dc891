"""Outputs and targets made comparable, in torch: shapes checked, one weight an item, illegal labels marked."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nnx_jax.core.errors import DataError, ModelError
from nnx_jax.objectives.targets import Batch
from nnx_jax.torch.rows import UNKNOWN, Rows, span_of


class Items(NamedTuple):
    """What a loss or a metric is summed over.

    Attributes:
        outputs: float32, or float64 where the model's are; [..., C] logits for classes, else the shape of `targets`.
        targets: int64 class numbers (illegal and ignored ones replaced by 0), or values of the outputs' type.
        weight: of the outputs' type, shape of `targets`; 0 for padding, for ignored and for illegal labels. None where
            every item counts once, which is known of batches that were looked at before (`rows.Rows`).
        illegal: bool, shape of `targets`: a weighted item whose label is not a label. None with `weight`.
        held: what several metrics need of them, made by the first; None where each makes its own.
    """

    outputs: Tensor
    targets: Tensor
    weight: Tensor | None
    illegal: Tensor | None
    held: dict[Any, Tensor] | None = None

    def weights(self) -> Tensor:
        """`weight`, made where it is None."""
        if self.weight is not None:
            return self.weight
        return torch.ones(self.targets.shape, dtype=self.outputs.dtype, device=self.outputs.device)

    def total(self) -> Tensor:
        """Sum of the weights: a scalar of the outputs' type."""
        if self.weight is not None:
            return self.weight.sum()
        return constant(float(self.targets.numel()), self.outputs)

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` times the weights; a value without a weight never counts, not even NaN."""
        return values.sum() if self.weight is None else weighted_sum(values, self.weight)


@lru_cache(maxsize=64)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # else the first use in an evaluation would keep it from training
        return torch.full((), value, dtype=dtype, device=device)


def constant(value: float, like: Tensor) -> Tensor:
    """A scalar of the type of another tensor and beside it, that is made once."""
    found = _constant(value, like.dtype, like.device)
    if found._version:  # somebody wrote into it
        _constant.cache_clear()
        found = _constant(value, like.dtype, like.device)
    return found


def widened(tensor: Tensor) -> Tensor:
    """A tensor as what sums are made of: float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def as_tensor(value: Any, what: str) -> Tensor:
    """`value` as a tensor.

    Raises:
        ModelError: what is none, such as a mapping.
    """
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{what} are {type(value).__name__}; a tensor is needed: {error}") from None


def item_weight(batch: Batch, like: Tensor) -> Tensor:
    """The weight of every item of `like`, in its type: `mask` times `weight`, each [B] or a leading part of its shape.

    Raises:
        DataError: when one of the two has another shape.
    """
    shape = tuple(like.shape)
    total = torch.ones_like(like, requires_grad=False)
    for name in ("mask", "weight"):
        column = batch.get(name)
        if column is None:
            continue
        column = as_tensor(column, f"column '{name}'").to(total.dtype)
        if tuple(column.shape) != shape[: column.ndim]:
            has = tuple(column.shape)
            raise DataError(f"column '{name}' has shape {has}, not a leading part of the targets' {shape}")
        total = total * column.reshape(_behind(column, len(shape)))
    return total


def _behind(column: Tensor, ndim: int) -> tuple[int, ...]:
    """The shape of a column with axes of 1 behind it, up to `ndim`."""
    return (*column.shape, *(1,) * (ndim - column.ndim))


def class_items(outputs: Any, batch: Batch, ignore_index: int | None = None) -> Items:
    """Logits [..., C] and integer labels [...] (or [B, 1] beside [B, C]).

    Raises:
        DataError: for labels that are not integers.
        ModelError: for shapes that do not fit, or a single class.
    """
    if (seen := getattr(batch, "read_as", None)) is not None and span_of(batch) is not UNKNOWN:
        given, version, ignored, items = seen
        if given is outputs and given._version == version and ignored == ignore_index:
            return items
    given = outputs
    outputs, labels = as_tensor(outputs, "outputs"), as_tensor(batch["y"], "labels")
    if labels.is_floating_point() or labels.is_complex():
        kind = str(labels.dtype).removeprefix("torch.")
        raise DataError(f"class labels are {kind}; give integers 0..C-1 (column 'y')")
    if labels.ndim == outputs.ndim > 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if outputs.ndim < 1 or labels.shape != outputs.shape[:-1]:
        shapes = f"outputs have shape {tuple(outputs.shape)} and labels {tuple(labels.shape)}"
        raise ModelError(f"{shapes}; one label for each row of logits is needed")
    n_classes = outputs.shape[-1]
    if n_classes < 2:
        raise ModelError(f"the model has {n_classes} output for class labels; use 2 or more, or binary_cross_entropy")
    outputs = widened(outputs)
    if labels.dtype != torch.int64:
        labels = labels.to(torch.int64)
    if all_classes(batch, n_classes, ignore_index):
        assert isinstance(batch, Rows)
        if outputs.requires_grad:  # of a loss, which asks once, and whose derivatives are not to be kept
            return Items(outputs, labels, None, None)
        if not isinstance(given, Tensor) or given.is_inference():  # whose changes nobody counts
            return Items(outputs, labels, None, None)
        items = Items(outputs, labels, None, None, {})
        batch.read_as = given, given._version, ignore_index, items
        return items
    weight = item_weight(batch, outputs[..., 0])
    legal = (labels >= 0) & (labels < n_classes)
    ignored = torch.zeros_like(legal) if ignore_index is None else labels == ignore_index
    usable = legal & ~ignored
    return Items(outputs, torch.where(usable, labels, 0), kept(weight, usable), ~legal & ~ignored & (weight > 0))


def all_classes(batch: Batch, n_classes: int, ignore_index: int | None) -> bool:
    """It is known that every row counts once and that its labels are classes, none of them ignored."""
    low, high = span_of(batch)
    return 0 <= low <= high < n_classes and (ignore_index is None or not low <= ignore_index <= high)


def kept(values: Tensor, where: Tensor) -> Tensor:
    """`values` there, 0 elsewhere."""
    return torch.where(where, values, 0.0)


def value_items(outputs: Any, batch: Batch) -> Items:
    """Values and their predictions, of one shape ([B] beside [B, 1] is allowed, any other broadcast is refused).

    A NaN target stays NaN: the loss is then not finite and the step refuses it.

    Raises:
        ModelError: for shapes that differ.
    """
    outputs, targets = as_tensor(outputs, "outputs"), as_tensor(batch["y"], "targets")
    if outputs.shape == (*targets.shape, 1):
        outputs = outputs[..., 0]
    elif targets.shape == (*outputs.shape, 1):
        targets = targets[..., 0]
    if outputs.shape != targets.shape:
        shapes = f"outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        raise ModelError(f"{shapes}; they must be equal")
    outputs = widened(outputs)
    low, high = span_of(batch)
    if low <= high:
        return Items(outputs, targets.to(outputs.dtype), None, None)
    none = torch.zeros(targets.shape, dtype=torch.bool, device=targets.device)
    return Items(outputs, targets.to(outputs.dtype), item_weight(batch, outputs), none)


def bernoulli_items(outputs: Any, batch: Batch) -> Items:
    """Logits and targets in [0, 1] (bool, integer or float) of one shape; anything else is marked illegal."""
    items = value_items(outputs, batch)
    if items.weight is None:
        low, high = span_of(batch)
        if 0 <= low <= high <= 1:
            return items
        items = items._replace(weight=items.weights())
    assert items.weight is not None
    legal = (items.targets >= 0) & (items.targets <= 1)  # false for NaN too
    return Items(items.outputs, kept(items.targets, legal), kept(items.weight, legal), ~legal & (items.weight > 0))


def weighted_sum(values: Tensor, weight: Tensor) -> Tensor:
    """Sum of `weight * values` where the weight is not 0: a value of an unused item never counts, not even NaN."""
    return kept(values * weight, weight != 0).sum()
