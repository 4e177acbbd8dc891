"""DPO: sums of log-probabilities, the paper's loss, and a reference that stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError, DataError, ModelError, RunExistsError
from nnx_jax.model import NNModel
from nnx_jax.objectives import dpo_objective, reference_columns, sequence_log_probs
from tests.objectives.paradigm_toys import (
    assert_close,
    context,
    fit,
    loss_of,
    masked,
    numeric,
    padded,
    terms_of,
    value_and_grads,
    weights,
)

VOCABULARY, ROWS, LENGTH = 7, 6, 5
DRAW = np.random.default_rng(8)


def texts() -> dict[str, np.ndarray]:
    """Pairs of texts with the same two tokens of prompt; rejected ones are shorter here and there."""
    ids = DRAW.integers(0, VOCABULARY, (2, ROWS, LENGTH)).astype(np.int32)
    ids[1, :, :2] = ids[0, :, :2]
    counted = np.tile(np.array([0, 0, 1, 1, 1], np.int32), (2, ROWS, 1))
    counted[1, ::2, 4] = 0
    return {"chosen": ids[0], "rejected": ids[1], "chosen_mask": counted[0], "rejected_mask": counted[1]}


BATCH = texts()


class Bigram(nnx.Module):
    """Logits of the next token by the one before."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        self.table = nnx.Param(jax.random.normal(jax.random.key(seed), (VOCABULARY, VOCABULARY)))
        self.dropout = nnx.Dropout(dropout, rngs=nnx.Rngs(seed))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.dropout(self.table[...][ids])


def log_prob(table: np.ndarray, ids: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Row by row and token by token, in float64."""
    table = np.asarray(table, np.float64)
    logs = table - np.log(np.exp(table).sum(-1, keepdims=True))
    out = np.zeros(len(ids))
    for row, (tokens, counts) in enumerate(zip(ids, counted, strict=True)):
        out[row] = sum(logs[tokens[at - 1], tokens[at]] for at in range(1, len(tokens)) if counts[at])
    return out


def margins(table: np.ndarray, reference: np.ndarray, beta: float) -> np.ndarray:
    gains = []
    for which in ("chosen", "rejected"):
        own, other = (log_prob(of, BATCH[which], BATCH[f"{which}_mask"]) for of in (table, reference))
        gains.append(own - other)
    return beta * (gains[0] - gains[1])


def by_hand(table: np.ndarray, reference: np.ndarray, beta: float) -> float:
    return float(np.mean(np.log1p(np.exp(-margins(table, reference, beta)))))


def table_of(module: Bigram) -> np.ndarray:
    return np.asarray(module.table[...], np.float64)


def test_log_probabilities_are_summed_over_tokens_that_count() -> None:
    model, ids, counted = Bigram(), BATCH["rejected"], BATCH["rejected_mask"]
    found = sequence_log_probs(model(jnp.asarray(ids)), ids, counted)
    np.testing.assert_allclose(found, log_prob(table_of(model), ids, counted), rtol=1e-5)
    assert found.dtype == jnp.float32


def test_the_first_token_and_what_does_not_count_say_nothing() -> None:
    logits = np.zeros((1, 3, 4), np.float32)
    logits[0, 0, 1] = -np.inf  # the second token, impossible, does not count
    ids = np.array([[3, 1, 2]], np.int32)
    found = [float(sequence_log_probs(logits, ids, np.array([mask]))[0]) for mask in ([1, 0, 1], [0, 0, 1], [1, 0, 0])]
    assert found == pytest.approx([-np.log(4), -np.log(4), 0.0])


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_the_loss_and_its_gradient_are_the_papers(beta: float) -> None:
    model, reference = Bigram(1), Bigram(2)
    value, grads = value_and_grads(dpo_objective(reference, beta), model, BATCH)
    assert value == pytest.approx(by_hand(table_of(model), table_of(reference), beta), rel=1e-5)
    expected = numeric(lambda table: by_hand(table, table_of(reference), beta), table_of(model))
    np.testing.assert_allclose(grads["table"], expected, atol=1e-5)


def test_the_reference_itself_has_the_loss_of_a_coin() -> None:
    model = Bigram()
    result = dpo_objective(model)(context(model, BATCH))
    (term,) = terms_of(result)
    assert float(term.numerator / term.denominator) == pytest.approx(np.log(2), rel=1e-6)
    assert {name: float(top / count) for name, (top, count) in result.record.items()} == {
        "reward_margin": 0.0, "preference_accuracy": 0.0, "chosen_reward": 0.0, "rejected_reward": 0.0,
    }  # fmt: skip


def test_margins_and_accuracy_are_recorded() -> None:
    model, reference = Bigram(1), Bigram(2)
    expected = margins(table_of(model), table_of(reference), 0.1)
    record = dpo_objective(reference)(context(model, BATCH)).record
    found = {name: float(top / count) for name, (top, count) in record.items()}
    assert found["reward_margin"] == pytest.approx(expected.mean(), rel=1e-4)
    assert found["preference_accuracy"] == pytest.approx((expected > 0).mean())
    assert found["chosen_reward"] - found["rejected_reward"] == pytest.approx(found["reward_margin"], rel=1e-4)
    assert 0 < found["preference_accuracy"] < 1


def test_a_padded_batch_counts_like_the_batch() -> None:
    objective, batch = dpo_objective(Bigram(2)), padded(BATCH, 3, 1)
    plain, full = value_and_grads(objective, Bigram(1), BATCH), value_and_grads(objective, Bigram(1), batch)
    assert plain[0] == pytest.approx(full[0], rel=1e-6)
    assert_close(plain[1], full[1])


def test_one_row_and_no_row() -> None:
    reference, model = Bigram(2), Bigram(1)
    one = {name: part[:1] for name, part in BATCH.items()}
    margin = margins(table_of(model), table_of(reference), 0.1)[0]
    assert loss_of(dpo_objective(reference), model, one) == pytest.approx(np.log1p(np.exp(-margin)), rel=1e-5)
    result = dpo_objective(reference)(context(model, masked(BATCH)))
    assert [float(part) for part in (terms_of(result)[0].numerator, terms_of(result)[0].denominator)] == [0.0, 0.0]
    assert all(float(count) == 0.0 for _, count in result.record.values())


def test_the_reference_is_asked_in_evaluation_mode_and_keeps_its_weights() -> None:
    model, reference = Bigram(1), Bigram(2, dropout=0.5)
    objective = dpo_objective(NNModel(module=reference))
    expected = by_hand(table_of(model), table_of(reference), 0.1)
    reference.table.set_value(jnp.zeros((VOCABULARY, VOCABULARY)))
    assert loss_of(objective, model, BATCH) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_columns_of_the_reference_stand_for_it(batch_size: int) -> None:
    reference = Bigram(2)
    columns = reference_columns(reference, BATCH, batch_size=batch_size)
    assert set(columns) == {*BATCH, "chosen_reference", "rejected_reference"}
    expected = log_prob(table_of(reference), BATCH["rejected"], BATCH["rejected_mask"])
    np.testing.assert_allclose(columns["rejected_reference"], expected, rtol=1e-5)
    asked, stored = (
        value_and_grads(objective, Bigram(1), columns) for objective in (dpo_objective(reference), dpo_objective())
    )
    assert asked[0] == pytest.approx(stored[0], rel=1e-6)
    assert_close(asked[1], stored[1])


@pytest.mark.parametrize("beta", [0.0, -0.1, float("nan"), float("inf"), True])
def test_a_beta_out_of_range_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match="dpo_objective: beta is .*; give a number above 0"):
        dpo_objective(Bigram(), beta)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"chosen_mask": None},
            "dpo_objective needs column 'chosen_mask'; the batch has chosen, mask, re",
        ),
        ({"chosen": BATCH["chosen"].astype(np.float32)}, r"column 'chosen' holds token ids .* got float32\[6, 5\]"),
        ({"rejected_mask": BATCH["rejected_mask"][:, 1:]}, r"'rejected_mask' is of its shape; got .*\[6, 4\]"),
        ({"chosen": BATCH["chosen"][:, :1], "chosen_mask": BATCH["chosen_mask"][:, :1]}, "2 or more"),
    ],
)
def test_texts_that_are_none_are_refused(changes: dict[str, Any], message: str) -> None:
    batch = {name: part for name, part in {**BATCH, **changes}.items() if part is not None}
    with pytest.raises(DataError, match=message):
        dpo_objective(Bigram())(context(Bigram(), batch))


def test_without_a_reference_its_columns_are_needed() -> None:
    with pytest.raises(DataError, match=r"dpo_objective\(\) without a reference needs column 'chosen_reference'"):
        dpo_objective()(context(Bigram(), BATCH))


def test_outputs_that_are_no_logits_are_refused() -> None:
    with pytest.raises(ModelError, match=r"logits \[B, T, vocabulary\]; for ids \[6, 4\] it gave \[6, 7\]"):
        dpo_objective(Bigram())(context(lambda ids: jnp.zeros((6, 7)), BATCH))


@pytest.mark.slow
def test_runs_in_windows_of_two_are_runs_of_twice_the_rows(tmp_path: Path) -> None:
    """Whole batches against halves with a padded last one, the reference asked or its columns read."""
    models = [NNModel(module=Bigram(1)) for _ in range(3)]
    objective, columns = dpo_objective(Bigram(2)), reference_columns(Bigram(2), BATCH)
    whole = fit(tmp_path, models[0], objective, BATCH, batch=6, val=True, n_epochs=2)
    fit(tmp_path, models[1], objective, BATCH, batch=4, window=2, n_epochs=2)
    fit(tmp_path, models[2], dpo_objective(), columns, batch=4, window=2, n_epochs=2)
    assert_close(weights(models[0]), weights(models[1]))
    assert_close(weights(models[0]), weights(models[2]))
    first, last = whole.epochs
    assert last["val_loss"] < first["val_loss"]
    assert last["val_reward_margin"] > first["val_reward_margin"]
    assert 0 <= last["val_preference_accuracy"] <= 1


def test_another_reference_is_another_run(tmp_path: Path) -> None:
    ids = []
    for seed in (2, 3):
        objective = dpo_objective(Bigram(seed))
        ids.append(fit(tmp_path, NNModel(module=Bigram(1)), objective, BATCH, batch=6).id)
    assert ids[0] != ids[1]
    with pytest.raises(RunExistsError):
        fit(tmp_path, NNModel(module=Bigram(1)), dpo_objective(Bigram(2)), BATCH, batch=6)
