"""DPO: of two texts the preferred one is to gain more probability, measured against a reference that stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_jax.core.errors import DataError, ModelError
from nnx_jax.core.precision import widened
from nnx_jax.objectives.frozen import Frozen
from nnx_jax.objectives.losses import pick
from nnx_jax.objectives.objective import Objective, ObjectiveContext, ObjectiveResult
from nnx_jax.objectives.paradigms.rows import column, positive
from nnx_jax.objectives.targets import item_weight, weighted_sum

PAIR = ("chosen", "rejected")


def dpo_objective(reference: Any = None, beta: float = 0.1, *, nonfinite: str = "fail") -> Objective:
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) of a language model.

    The batch has token ids `chosen` and `rejected` (integers, each [B, T], prompt and completion) and `chosen_mask`,
    `rejected_mask` (same shapes, 1 on the tokens of the completion, 0 on prompt and filling). With `r(y) = beta (log
    p(y) - log p_reference(y))`, sums over the tokens that count, the loss is the mean over real rows (each with its
    "weight", where the batch has that column) of `-log sigmoid(r(chosen) - r(rejected))`.

    It records `reward_margin`, the mean of r(chosen) - r(rejected); `preference_accuracy`, the share of rows where that
    is above 0; `chosen_reward` and `rejected_reward`. Every row stands for itself: padded rows are left out, and a
    window of two microbatches is one of twice the rows. Validation scores the same.

    Args:
        reference: an NNModel or module called like the model, with its weights of now; most often the model itself
            before training. None: the batch has `chosen_reference` and `rejected_reference`, see `reference_columns`,
            which asks the reference once and not in every epoch, and keeps its weights out of the compiled step.
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

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        chosen, rejected = (self.beta * self._gain(ctx, which) for which in PAIR)
        margin = chosen - rejected
        weight = item_weight(ctx.batch, margin.shape, margin.dtype)
        mean = lambda values: (weighted_sum(values, weight), jnp.sum(weight))  # noqa: E731
        record = {
            "reward_margin": mean(margin),
            "preference_accuracy": mean((margin > 0).astype(jnp.float32)),
            "chosen_reward": mean(chosen),
            "rejected_reward": mean(rejected),
        }
        return ObjectiveResult(ctx.mean("dpo", jax.nn.softplus(-margin)), record=record)

    def _gain(self, ctx: ObjectiveContext, which: str) -> jax.Array:
        """log p - log p_reference of one text of every pair, float32 [B]."""
        ids, mask = _text(ctx.batch, which)
        own = text_log_probs(ctx.model, ids, mask)
        if self.reference is None:
            return own - column(ctx.batch, f"{which}_reference", "dpo_objective() without a reference")
        return own - text_log_probs(self.reference, ids, mask)


def sequence_log_probs(logits: Any, ids: Any, mask: Any) -> jax.Array:
    """Return the log-probability of the tokens that count, summed: float32 [B].

    Args:
        logits: [B, T - 1 or more, vocabulary]; those at position t are about the token at t + 1.
        ids: integers [B, T].
        mask: [B, T], 0 or 1; the first token is never counted, for nothing predicts it.
    """
    about = widened(jnp.asarray(logits)[:, : jnp.shape(ids)[1] - 1])
    found = pick(jax.nn.log_softmax(about), jnp.asarray(ids)[:, 1:].astype(jnp.int32))
    counted = jnp.asarray(mask, jnp.float32)[:, 1:]
    return jnp.sum(jnp.where(counted != 0, found * counted, 0.0), axis=-1)


def text_log_probs(model: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """`sequence_log_probs` of texts [B, T] under a model called as `model(ids[:, :-1])`.

    Raises:
        ModelError: its outputs are no logits of these tokens.
    """
    logits = model(ids[:, :-1])
    if jnp.ndim(logits) != 3 or jnp.shape(logits)[:2] != (ids.shape[0], ids.shape[1] - 1):
        raise ModelError(
            f"a language model returns logits [B, T, vocabulary]; for ids {[ids.shape[0], ids.shape[1] - 1]} it gave "
            f"{list(jnp.shape(logits))}"
        )
    return sequence_log_probs(logits, ids, mask)


def reference_columns(reference: Any, columns: Mapping[str, Any], *, batch_size: int = 64) -> dict[str, np.ndarray]:
    """Return `columns` with `chosen_reference` and `rejected_reference`, float32 [N]: what `dpo_objective()` needs.

    Args:
        reference: see `dpo_objective`.
        columns: the rows, with the four columns of `dpo_objective`.
        batch_size: rows asked at once.
    """
    kind, state = Frozen(reference, "the reference of reference_columns").parts()
    asked = jax.jit(lambda state, ids, mask: text_log_probs(lambda x: Frozen.ask(kind, state, x), ids, mask))
    found = {}
    for which in PAIR:
        ids, mask = (np.asarray(part) for part in _text(columns, which))
        parts = [asked(state, *cut) for cut in _cuts(ids, mask, batch_size)]
        found[f"{which}_reference"] = np.concatenate([np.asarray(part) for part in parts])[: len(ids)]
    return {**{name: np.asarray(values) for name, values in columns.items()}, **found}


def _cuts(ids: np.ndarray, mask: np.ndarray, size: int) -> Any:
    """Pieces of `size` rows, the last one filled up with its first row, so that one program serves all."""
    for start in range(0, len(ids), size):
        rows = np.arange(start, start + size)
        rows[rows >= len(ids)] = start
        yield ids[rows], mask[rows]


def _text(batch: Mapping[str, Any], which: str) -> tuple[Any, Any]:
    ids, mask = (column(batch, name, "dpo_objective") for name in (which, f"{which}_mask"))
    shape = jnp.shape(ids)
    if len(shape) != 2 or shape[1] < 2 or not jnp.issubdtype(ids.dtype, jnp.integer) or jnp.shape(mask) != shape:
        raise DataError(
            f"column '{which}' holds token ids [B, T], integers, 2 or more, and '{which}_mask' is of its shape; got "
            f"{ids.dtype}{list(shape)} and {list(jnp.shape(mask))}"
        )
    return ids, mask
