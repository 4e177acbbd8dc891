"""Objectives over torch modules: the context they see, and the built-in ones; the classes are JAX's own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnx_jax.loop.updates import UpdateEvent
from nnx_jax.objectives import objective as host
from nnx_jax.objectives.objective import Average, Objective, ObjectiveResult, as_objective, check_scalars, listener
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.torch.losses import TorchLoss, build_loss
from nnx_jax.torch.module import map_tensors
from nnx_jax.torch.targets import as_tensor, item_weight, weighted_sum, widened
from nnx_jax.torch.terms import scalar, settled

__all__ = [
    "Frozen",
    "Objective",
    "ObjectiveContext",
    "ObjectiveResult",
    "UpdateEvent",
    "as_objective",
    "check_result",
    "kd_objective",
    "listener",
    "supervised_objective",
]


@dataclass(frozen=True)
class ObjectiveContext(host.ObjectiveContext):
    """What an objective sees of one microbatch.

    Attributes:
        model: the torch module, or what wraps it; call it as often as you like.
        batch: tensors by name on the model's device, each [B, ...]; "mask" float32 [B] is 0 on padded rows.
        rng: torch.Generator of this microbatch on that device, for noise of your own; never the same twice in a run.
        epoch_idx: 0-based.
        batch_idx: microbatches of this epoch before this one.
        train: False when the objective scores a validation split.
        precision: name of the number format the model computes in.
    """

    batch: Mapping[str, Any]
    rng: Any

    @property
    def mask(self) -> Any:
        """float32 [B], 1 for a real row and 0 for padding."""
        return self.batch["mask"]

    def apply(self, x: Any = None) -> Any:
        """Outputs of the model for the batch's "x" (or another x with as many rows), float32 where 16 bits.

        It is called as without an objective: one whose `forward` has a parameter `mask` gets the mask, and one whose
        class says `takes_batch = True` the whole batch.
        """
        kind, given = type(unwrapped(self.model)), self.batch["x"] if x is None else x
        given = {**self.batch, "x": given} if getattr(kind, "takes_batch", False) else given
        called = kind.forward if issubclass(kind, nn.Module) else kind.__call__
        takes_mask = "mask" in inspect.signature(called).parameters
        return map_tensors(wide, self.model(given, mask=self.mask) if takes_mask else self.model(given))

    def mean(self, name: str, per_row: Any, *, weight: float = 1.0) -> LossTerm:
        """The mean over real rows as a loss term: `per_row` is [B] or [B, ...].

        Each row counts with its "weight", where the batch has that column, as in the built-in losses.
        """
        values = widened(as_tensor(per_row, f"the values of '{name}'"))
        rows = item_weight(self.batch, values)
        return LossTerm(name, weighted_sum(values, rows), rows.sum(), weight=weight)


def unwrapped(model: Any) -> Any:
    """The module itself, behind DistributedDataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        inner = getattr(model, "_orig_mod", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def wide(tensor: Tensor) -> Tensor:
    """16 bits become float32; everything else stays."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def check_result(result: Any, who: str) -> tuple[tuple[LossTerm, ...], dict[str, Average], Any]:
    """Return (terms, sums to record by name, outputs) of what an objective returned; see `terms.settled`.

    Raises:
        TypeError: no ObjectiveResult.
        ConfigError: (a ValueError) no terms, a repeated name, or a record that is not made of numbers.
    """
    terms, record, outputs = host.check_result(result, who, average)
    terms = settled(terms)
    device = terms[0].numerator.device
    return terms, {name: (top.to(device), count.to(device)) for name, (top, count) in record.items()}, outputs


def average(value: Any, name: str, who: str) -> Average:
    """(sum, count) of a recorded value: a pair as it is, a scalar with count 1; without a gradient.

    Raises:
        ConfigError: neither a scalar nor a pair of scalars.
    """
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    found = tuple(scalar(part, None).detach() for part in pair)
    check_scalars(found, name, who)
    return found[0], found[1]


class Frozen:
    """A teacher, a reference: called like the module it is made of, with its weights as they were then.

    It is a copy in evaluation mode, in full precision whatever the student computes in, and goes to the device of what
    it is given. What it was made of keeps its mode, its weights and its gradients.

    Args:
        given: an NNModel, a torch module, or a function of tensors.
        who: what takes it, for messages.

    Raises:
        TypeError: something that cannot be called.
    """

    def __init__(self, given: Any, who: str) -> None:
        net = given if isinstance(given, nn.Module) else getattr(given, "net", given)
        if isinstance(net, nn.Module):
            net = copy.deepcopy(unwrapped(net)).eval().requires_grad_(False)
        elif not callable(net):
            kind = type(net).__name__
            raise TypeError(f"{who} is called with tensors: give an NNModel, a module or a function, got {kind}")
        self.net: Any = net
        """The module, which shares no weight with the one that was given, or the function."""

    @torch.no_grad()
    def __call__(self, *inputs: Any) -> Any:
        """Outputs, float32 where 16 bits; no gradient goes through them."""
        device = next((part.device for part in inputs if isinstance(part, Tensor)), torch.device("cpu"))
        if isinstance(self.net, nn.Module):
            self.net.to(device)
        with torch.autocast(device.type, enabled=False):
            return map_tensors(lambda tensor: wide(tensor).detach(), self.net(*inputs))


class _Supervised(host._Supervised):
    def build(self, loss: Any) -> TorchLoss:
        return build_loss(loss)


def supervised_objective(loss: Any = None, *, nonfinite: str = "fail") -> Objective:
    """The model's own loss (or another) as an objective: trains bit for bit as without one."""
    return _Supervised(loss, nonfinite=nonfinite)


class _Distillation(host._Distillation):
    def build(self, loss: Any) -> TorchLoss:
        return build_loss(loss)

    def freeze(self, teacher: Any, who: str) -> Frozen:
        return Frozen(teacher, who)

    def divergence(self, soft: Any, outputs: Any) -> Any:
        teacher, student = F.log_softmax(soft, dim=-1), F.log_softmax(outputs, dim=-1)
        return (teacher.exp() * (teacher - student)).sum(-1)


def kd_objective(teacher: Any, alpha: float = 0.5, temperature: float = 4.0, *, nonfinite: str = "fail") -> Objective:
    """Knowledge distillation for classifiers: see `objectives.objective.kd_objective`.

    Args:
        teacher: an NNModel, or a module called as `teacher(x)` that gives logits [B, C]: see `Frozen`.
        alpha: share of the teacher, 0 to 1.
        temperature: T, above 0.

    Raises:
        ConfigError: (a ValueError) alpha or temperature out of range.
    """
    return _Distillation(teacher, alpha, temperature, nonfinite)
