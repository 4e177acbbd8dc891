"""The sums that metrics keep of one batch, in torch: what `objectives.sums` gives, function by function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nnx_jax.core.errors import ConfigError
from nnx_jax.objectives.losses import Task
from nnx_jax.objectives.targets import Batch
from nnx_jax.torch.losses import pick
from nnx_jax.torch.targets import Items, bernoulli_items, class_items, kept, value_items, weighted_sum, widened


def reader(task: Task, ignore_index: int | None) -> Callable[[Any, Batch], Items]:
    """(outputs, batch) -> items, as a loss of this task reads them."""
    if task == "classes":
        return lambda outputs, batch: class_items(outputs, batch, ignore_index)
    return bernoulli_items if task == "bernoulli" else value_items


def rows(name: str, fn: Callable[[Any, Batch], Any], outputs: Any, batch: Batch) -> Tensor:
    """Sum and count of a function of the user's that gives one value a row.

    Raises:
        ConfigError: for a result without one value a row.
    """
    values = widened(torch.as_tensor(fn(outputs, batch)))
    weight = (batch["mask"] > 0).to(values.dtype)
    if values.shape != weight.shape:
        want, has = tuple(weight.shape), tuple(values.shape)
        raise ConfigError(f"metric '{name}' must give one value a row, shape {want}, got {has}")
    return torch.stack([weighted_sum(values, weight), weight.sum()])


def registered(made: Any, kind: str, task: Task, items: Items) -> Tensor:
    """The sums of a registered metric, which is given the outputs as it asked for them, the targets and weights.

    Its `update` gets torch tensors here: classes as int64, everything else in the outputs' float type.
    """
    if kind == "labels":
        compared = predicted(task, items), true(task, items)
    elif kind == "continuous":
        compared = items.outputs, items.targets
    else:
        probability = F.softmax(items.outputs, dim=-1) if task == "classes" else torch.sigmoid(items.outputs)
        compared = probability, true(task, items)
    return widened(torch.as_tensor(made.update(*compared, items.weights())))


def sum_and_count(values: Tensor, items: Items) -> Tensor:
    """[2]: the sum over items that count, and how many they are."""
    if items.weight is None:
        return torch.stack([values.sum(), items.total()])
    used = items.weight > 0
    return torch.stack([kept(values, used).sum(), used.sum(dtype=values.dtype)])


def predicted(task: Task, items: Items) -> Tensor:
    """The most likely class (the first of several), or yes (1) from a logit of 0; int64."""
    if task != "classes":
        return (items.outputs >= 0).to(torch.int64)
    if items.held is None:
        return items.outputs.argmax(-1)
    if "predicted" not in items.held:
        items.held["predicted"] = items.outputs.argmax(-1)
    return items.held["predicted"]


def true(task: Task, items: Items) -> Tensor:
    """The class, or yes (1) from a target of 0.5; int64."""
    return items.targets if task == "classes" else (items.targets >= 0.5).to(torch.int64)


def hits(task: Task, items: Items) -> Tensor:
    """Right decisions."""
    if items.weight is None:
        guess, truth = predicted(task, items), true(task, items)
        if guess.is_cpu:
            right = np.count_nonzero(guess.numpy() == truth.numpy())
            return _counts(np.array([right, truth.numel()]), items.outputs.dtype)
        return torch.stack([(guess == truth).sum(dtype=items.outputs.dtype), items.total()])
    return sum_and_count((predicted(task, items) == true(task, items)).to(items.outputs.dtype), items)


def error(kind: str, items: Items) -> Tensor:
    """Squared ("mse") or absolute errors."""
    apart = items.outputs - items.targets
    return sum_and_count(apart.square() if kind == "mse" else apart.abs(), items)


def top_k(k: int, items: Items) -> Tensor:
    """Labels among the k highest scores; ties and NaN as in `objectives.sums.top_k`."""
    own = items.outputs.gather(-1, items.targets[..., None])
    index = torch.arange(items.outputs.shape[-1], device=items.outputs.device)
    ahead = ~(items.outputs <= own) | ((items.outputs == own) & (index > items.targets[..., None]))
    return sum_and_count((ahead.sum(-1) < k).to(items.outputs.dtype), items)


def nll(task: Task, items: Items, floor: float) -> Tensor:
    """Negative log-likelihoods, each log-probability from `floor` up."""
    if task == "classes":
        return sum_and_count(-pick(F.log_softmax(items.outputs, dim=-1), items.targets).clamp(min=floor), items)
    yes, no = F.logsigmoid(items.outputs).clamp(min=floor), F.logsigmoid(-items.outputs).clamp(min=floor)
    return sum_and_count(-(items.targets * yes + (1.0 - items.targets) * no), items)


def brier(task: Task, items: Items) -> Tensor:
    """Squared distances between probabilities and the truth."""
    if task == "bernoulli":
        return sum_and_count((torch.sigmoid(items.outputs) - items.targets).square(), items)
    probability = F.softmax(items.outputs, dim=-1)
    truth = torch.zeros_like(probability).scatter(-1, items.targets[..., None], 1.0)
    return sum_and_count((probability - truth).square().sum(-1), items)


def confusion(task: Task, items: Items, n_labels: int, multilabel: bool) -> Tensor:
    """True positives, false positives and false negatives of each label: [3 * n_labels]."""
    if items.held is not None and not multilabel and items.outputs.is_cpu:
        if n_labels not in items.held:
            items.held[n_labels] = _counted(predicted(task, items), true(task, items), n_labels, items.outputs.dtype)
        return items.held[n_labels]
    used = items.weights() > 0
    guess, truth = predicted(task, items), true(task, items)
    if multilabel:
        said, is_so = (guess == 1) & used, (truth == 1) & used
    else:
        labels = torch.arange(n_labels, device=guess.device)
        said = (guess[..., None] == labels) & used[..., None]
        is_so = (truth[..., None] == labels) & used[..., None]
    parts = (said & is_so, said & ~is_so, ~said & is_so)
    return torch.cat([part.reshape(-1, n_labels).sum(0, dtype=items.outputs.dtype) for part in parts])


def _counted(guess: Tensor, truth: Tensor, n_labels: int, dtype: torch.dtype) -> Tensor:
    """`confusion` of items that all count; on the CPU, where nothing waits, and counted by numpy, which is quicker."""
    said, is_so = guess.reshape(-1).numpy(), truth.reshape(-1).numpy()
    hit, all_said, all_so = (np.bincount(each, minlength=n_labels) for each in (said[said == is_so], said, is_so))
    return _counts(np.concatenate([hit, all_said - hit, all_so - hit]), dtype)


def _counts(found: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Counts as sums are: float32, or float64 where the outputs are."""
    return torch.from_numpy(found.astype(np.float64 if dtype == torch.float64 else np.float32))
