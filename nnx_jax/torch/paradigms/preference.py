"""DPO over torch modules: the preferred text is to gain probability against a reference; see `objectives.paradigms`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nnx_jax.core.errors import DataError, ModelError
from nnx_jax.objectives.objective import Objective, ObjectiveResult
from nnx_jax.objectives.paradigms.preference import PAIR
from nnx_jax.objectives.paradigms.rows import column, positive
from nnx_jax.torch.losses import pick
from nnx_jax.torch.objectives import Frozen
from nnx_jax.torch.targets import item_weight, kept, weighted_sum, widened


def dpo_objective(reference: Any = None, beta: float = 0.1, *, nonfinite: str = "fail") -> Objective:
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) of a language model.

    Columns, loss and records are those of `objectives.paradigms.preference.dpo_objective`.

    Args:
        reference: an NNModel or module called like the model, with its weights of now. None: the batch has
            `chosen_reference` and `rejected_reference`, see `reference_columns`.
        beta: how dear it is to leave the reference, above 0.

    Raises:
        ConfigError: (a ValueError) beta out of range.
    """
    return _Preference(reference, beta, nonfinite)


class _Preference(Objective):
    def __init__(self, reference: Any, beta: float, nonfinite: str) -> None:
        super().__init__(nonfinite=nonfinite)
        self.beta = positive(beta, "beta", "dpo_objective")
        self.reference = None if reference is None else Frozen(reference, "the reference of dpo_objective")

    def __call__(self, ctx: Any) -> ObjectiveResult:
        chosen, rejected = (self.beta * self._gain(ctx, which) for which in PAIR)
        margin = chosen - rejected
        weight = item_weight(ctx.batch, margin)
        parts = {
            "reward_margin": margin,
            "preference_accuracy": (margin > 0).to(margin.dtype),
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        record = {name: (weighted_sum(values, weight), weight.sum()) for name, values in parts.items()}
        return ObjectiveResult(ctx.mean("dpo", F.softplus(-margin)), record=record)

    def _gain(self, ctx: Any, which: str) -> Tensor:
        """log p - log p_reference of one text of every pair, [B]."""
        ids, mask = _text(ctx.batch, which)
        own = text_log_probs(ctx.model, ids, mask)
        if self.reference is None:
            return own - column(ctx.batch, f"{which}_reference", "dpo_objective() without a reference")  # type: ignore[operator]
        return own - text_log_probs(self.reference, ids, mask)


def sequence_log_probs(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the log-probability of the tokens that count, summed: float32 [B].

    Args:
        logits: [B, T - 1 or more, vocabulary]; those at position t are about the token at t + 1.
        ids: integers [B, T].
        mask: [B, T], 0 or 1; the first token is never counted, for nothing predicts it.
    """
    about = F.log_softmax(widened(logits[:, : ids.shape[1] - 1]), dim=-1)
    counted = mask[:, 1:].to(about.dtype)
    return kept(pick(about, ids[:, 1:].to(torch.int64)) * counted, counted != 0).sum(-1)


def text_log_probs(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """`sequence_log_probs` of texts [B, T] under a model called as `model(ids[:, :-1])`.

    Raises:
        ModelError: its outputs are no logits of these tokens.
    """
    logits = model(ids[:, :-1])
    if getattr(logits, "ndim", 0) != 3 or tuple(logits.shape[:2]) != (ids.shape[0], ids.shape[1] - 1):
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(
            f"a language model returns logits [B, T, vocabulary]; for ids {[ids.shape[0], ids.shape[1] - 1]} it gave "
            f"{found}"
        )
    return sequence_log_probs(logits, ids, mask)


def reference_columns(reference: Any, columns: Mapping[str, Any], *, batch_size: int = 64) -> dict[str, np.ndarray]:
    """Return `columns` with `chosen_reference` and `rejected_reference`, float32 [N]: what `dpo_objective()` needs.

    Args:
        reference: see `dpo_objective`.
        columns: the rows, with the four columns of `dpo_objective`, as arrays.
        batch_size: rows asked at once, on the device of the reference.
    """
    asked = Frozen(reference, "the reference of reference_columns")
    weights = next(iter(asked.net.parameters()), None) if isinstance(asked.net, torch.nn.Module) else None
    device = torch.device("cpu") if weights is None else weights.device
    tensors = {name: torch.as_tensor(np.asarray(values)) for name, values in columns.items()}
    found = {}
    for which in PAIR:
        ids, mask = _text(tensors, which)
        pairs = zip(ids.split(batch_size), mask.split(batch_size), strict=True)
        parts = [text_log_probs(asked, some.to(device), shown.to(device)).cpu() for some, shown in pairs]
        found[f"{which}_reference"] = torch.cat(parts).numpy()
    return {**{name: np.asarray(values) for name, values in columns.items()}, **found}


def _text(batch: Mapping[str, Any], which: str) -> tuple[Tensor, Tensor]:
    ids: Any = column(batch, which, "dpo_objective")
    mask: Any = column(batch, f"{which}_mask", "dpo_objective")
    whole = not (ids.is_floating_point() or ids.dtype == torch.bool)
    if ids.ndim != 2 or ids.shape[1] < 2 or not whole or mask.shape != ids.shape:
        raise DataError(
            f"column '{which}' holds token ids [B, T], integers, 2 or more, and '{which}_mask' is of its shape; got "
            f"{str(ids.dtype).removeprefix('torch.')}{list(ids.shape)} and {list(mask.shape)}"
        )
    return ids.to(torch.int64), mask
