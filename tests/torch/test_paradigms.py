"""Objectives of known papers over torch modules, beside JAX's where nothing is drawn, else by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.objectives.objective import check_result as jax_result
from nnx_jax.objectives.paradigms import preference as jax_preference
from nnx_jax.objectives.paradigms import simclr as jax_simclr
from nnx_jax.objectives.terms import total_value as jax_total
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.objectives import ObjectiveContext, check_result
from nnx_jax.torch.paradigms.diffusion import ddpm_objective, ddpm_sample, noise_schedule
from nnx_jax.torch.paradigms.mixup import mixed, mixup_objective, partners
from nnx_jax.torch.paradigms.preference import dpo_objective, reference_columns, sequence_log_probs
from nnx_jax.torch.paradigms.simclr import nt_xent, simclr_objective
from nnx_jax.torch.terms import total_value
from tests.objectives.paradigm_toys import context as jax_context

DRAW = np.random.default_rng(3)


def context(model: Any, batch: Mapping[str, Any], *, seed: int = 0, train: bool = True) -> ObjectiveContext:
    columns = {name: torch.as_tensor(values) for name, values in batch.items()}
    columns = {"mask": torch.ones(len(next(iter(columns.values())))), **columns}
    return ObjectiveContext(model, columns, torch.Generator().manual_seed(seed), 0, 0, train, "float32")


def asked(objective: Any, *args: Any, **more: Any) -> tuple[torch.Tensor, dict[str, float], Any]:
    """The loss, the recorded means and the outputs of one microbatch."""
    terms, record, outputs = check_result(objective(context(*args, **more)), "it")
    return total_value(terms), {name: (a / b).item() for name, (a, b) in record.items()}, outputs


# -- mixup ---------------------------------------------------------------------------------------------------------


def test_mixup_is_the_loss_of_mixed_targets() -> None:
    """Of every row with its partner, at the recorded share, which is the larger; padded rows take no part."""
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 99])
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    x[4] = torch.nan
    loss, record, outputs = asked(mixup_objective(1.0, "cross_entropy"), lambda x: x, {"x": x, "y": y, "mask": mask})
    share = record["mixup_share"]
    partner = partners(torch.Generator().manual_seed(0), mask > 0)
    assert 0.5 <= share <= 1.0
    assert sorted(partner.tolist()) == [0, 1, 2, 3, 4]
    assert partner[4] == 4
    both = share * x[:4] + (1 - share) * x[partner[:4]]
    torch.testing.assert_close(outputs[:4], both)
    soft = share * nn.functional.one_hot(y[:4], 3) + (1 - share) * nn.functional.one_hot(y[partner[:4]], 3)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(both, soft))


def test_mixups_draws_follow_the_microbatch() -> None:
    objective, batch = mixup_objective(0.2, "mse"), {"x": torch.randn(8, 1), "y": torch.zeros(8, 1)}
    first, again, other = (asked(objective, lambda x: x, batch, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert first[1] != other[1]
    shares = [asked(objective, lambda x: x, batch, seed=seed)[1]["mixup_share"] for seed in range(200)]
    # The larger of s and 1 - s under Beta(0.2, 0.2): SciPy has its mean at 0.8988 and its deviation at 0.1397.
    assert np.mean(shares) == pytest.approx(0.8988, abs=4 * 0.1397 / 200**0.5)


def test_mixup_validates_on_rows_as_they_are_and_binds_the_models_loss() -> None:
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    loss, record, _ = asked(
        mixup_objective().bind(build_loss("cross_entropy")), lambda x: x, {"x": x, "y": y}, train=False
    )
    torch.testing.assert_close(loss, nn.functional.cross_entropy(x, y))
    assert record == {}
    with pytest.raises(ConfigError, match="takes the model's loss"):
        mixup_objective()(context(lambda x: x, {"x": x}))
    with pytest.raises(ConfigError, match="mixup_objective: alpha is 0"):
        mixup_objective(0)
    one, other = torch.tensor([10, 0], dtype=torch.uint8), torch.tensor([13, 255], dtype=torch.uint8)
    assert mixed(one, other, 0.5).tolist() == [12, 128]  # 11.5 and 127.5, rounded to even
    with pytest.raises(DataError, match="mixes real numbers or bytes, but column 'x' is int64"):
        mixed(torch.tensor([1]), torch.tensor([2]), 0.5)


# -- simclr --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("real", [[1, 0, 1, 1], [0, 0, 1, 0]])
def test_nt_xent_and_its_gradient_are_jaxs(real: list[int]) -> None:
    """Also with rows that do not count, which may be anything, and with a row that has no negatives."""
    views = DRAW.normal(size=(2, 4, 3)).astype(np.float32)
    kept = np.array(real, bool)
    views[:, ~kept] = np.nan

    def theirs(pair: Any) -> Any:
        losses, found = jax_simclr.nt_xent(pair[0], pair[1], jnp.asarray(kept), 0.3)
        return jnp.sum(jnp.where(np.tile(kept, 2), losses, 0.0)), found

    (value, found), grad = jax.value_and_grad(theirs, has_aux=True)(jnp.asarray(views))
    pair = torch.from_numpy(views).requires_grad_()
    losses, mine = nt_xent(pair[0], pair[1], torch.from_numpy(kept), 0.3)
    total = torch.where(torch.from_numpy(np.tile(kept, 2)), losses, 0.0).sum()
    total.backward()
    assert total.item() == pytest.approx(float(value), abs=1e-5)
    assert mine.tolist() == np.asarray(found).tolist()
    assert pair.grad is not None
    np.testing.assert_allclose(pair.grad.numpy(), grad, atol=1e-5)


def test_simclr_asks_for_two_views_of_every_row() -> None:
    seen: list[torch.Tensor] = []

    def augment(rng: torch.Generator, rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows + 0.01 * torch.randn(rows.shape, generator=rng))
        return seen[-1]

    x = torch.eye(3)
    loss, record, _ = asked(simclr_objective(augment), lambda x: x, {"x": x})
    first, second = seen
    losses, _ = nt_xent(first, second, torch.ones(3, dtype=torch.bool), 0.5)
    assert not torch.equal(first, second)
    torch.testing.assert_close(loss, losses.mean())
    assert record == {"pair_accuracy": 1.0}
    weighted = asked(simclr_objective(lambda rng, rows: rows), lambda x: x, {"x": x, "weight": torch.tensor([1, 1, 0])})
    pair = nt_xent(x[:2], x[:2], torch.ones(2, dtype=torch.bool), 0.5)[0].mean()
    torch.testing.assert_close(weighted[0], pair)
    with pytest.raises(ModelError, match=r"needs outputs \[B, D\] for x \[3, 3\], the model gave \(3,\)"):
        simclr_objective(augment)(context(lambda x: x[:, 0], {"x": x}))
    with pytest.raises(TypeError, match="augment is a function"):
        simclr_objective(3)  # type: ignore[arg-type]


# -- preference ----------------------------------------------------------------------------------------------------

TEXTS = {
    "chosen": DRAW.integers(0, 5, (3, 4)).astype(np.int32),
    "rejected": DRAW.integers(0, 5, (3, 4)).astype(np.int32),
    "chosen_mask": np.array([[0, 1, 1, 1], [0, 0, 1, 0], [0, 1, 1, 0]], np.float32),
    "rejected_mask": np.array([[0, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]], np.float32),
    "mask": np.array([1, 1, 0], np.float32),
}
TABLES = {name: DRAW.normal(size=(5, 5)).astype(np.float32) for name in ("model", "reference")}


def bigrams(name: str) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.from_numpy(TABLES[name].copy()), freeze=False)


@pytest.mark.parametrize("kept", [True, False])
def test_dpo_its_records_and_its_gradient_are_jaxs(kept: bool) -> None:
    """With the reference at hand, and with what it said as columns."""
    model, other = bigrams("model"), bigrams("reference")
    batch = reference_columns(other, TEXTS, batch_size=2) if kept else TEXTS
    in_jax = lambda ids: jnp.asarray(TABLES["reference"])[ids]  # noqa: E731
    objective = jax_preference.dpo_objective(in_jax, beta=0.5)

    def theirs(table: Any) -> Any:
        terms, record, _ = jax_result(objective(jax_context(lambda ids: table[ids], TEXTS)), "it")
        return jax_total(terms), {name: a / b for name, (a, b) in record.items()}

    (value, wanted), grad = jax.value_and_grad(theirs, has_aux=True)(jnp.asarray(TABLES["model"]))
    loss, record, _ = asked(dpo_objective(None if kept else other, beta=0.5), model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(float(value), rel=1e-5)
    assert record == pytest.approx({name: float(part) for name, part in wanted.items()}, rel=1e-5, abs=1e-6)
    assert model.weight.grad is not None
    np.testing.assert_allclose(model.weight.grad.numpy(), grad, atol=1e-6)
    assert other.weight.grad is None


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(DataError, match="needs column 'rejected'"):
        dpo_objective(bigrams("model"))(context(bigrams("model"), {n: TEXTS[n] for n in ("chosen", "chosen_mask")}))
    with pytest.raises(DataError, match=r"holds token ids \[B, T\]"):
        dpo_objective()(context(bigrams("model"), {**TEXTS, "chosen": TEXTS["chosen"].astype(np.float32)}))
    with pytest.raises(ModelError, match=r"for ids \[3, 3\] it gave \[3, 3\]"):
        dpo_objective(bigrams("model"))(context(lambda ids: ids.float(), TEXTS))
    logits, ids = torch.zeros(1, 2, 4), torch.tensor([[0, 1, 2]])
    assert sequence_log_probs(logits, ids, torch.ones(1, 3)).item() == pytest.approx(2 * np.log(0.25))


# -- diffusion -----------------------------------------------------------------------------------------------------


def test_diffusion_shows_noisy_rows_and_asks_for_the_noise() -> None:
    """A model that finds the noise of known rows has no loss; one that says 0 has the noise's mean square."""
    x, kept = torch.randn(64, 2, 3), np.cumprod(1.0 - noise_schedule(50))
    seen: list[torch.Tensor] = []

    def knows(noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        a = torch.from_numpy(kept)[t].float()[:, None, None]
        return (noisy - a.sqrt() * x) / (1 - a).sqrt()

    loss, _, _ = asked(ddpm_objective(50), knows, {"x": x})
    assert loss.item() < 1e-6
    assert seen[0].dtype == torch.int64
    assert seen[0].min() >= 0
    assert 40 <= seen[0].max() < 50
    mask = torch.cat([torch.ones(32), torch.zeros(32)])
    loss, _, _ = asked(ddpm_objective(50), lambda noisy, t: 0 * noisy, {"x": x, "mask": mask})
    assert loss.item() == pytest.approx(1.0, abs=4 * (2 / (32 * 6)) ** 0.5)
    with pytest.raises(DataError, match="but column 'x' is uint8; scale it to floats first"):
        ddpm_objective()(context(knows, {"x": torch.zeros(2, dtype=torch.uint8)}))
    with pytest.raises(ModelError, match="it predicts the noise, which has the shape of x_t"):
        ddpm_objective()(context(lambda noisy, t: noisy[:1], {"x": x}))


def test_sampling_ends_where_the_model_says() -> None:
    """All rows of the data are 1.5: then the noise is known at every step, and so is every new row."""
    kept = torch.from_numpy(np.cumprod(1.0 - noise_schedule(20))).float()

    class Knows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.level, self.dropout = nn.Parameter(torch.tensor(1.5)), nn.Dropout(0.5)

        def forward(self, noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            a = kept[t][:, None]
            return self.dropout((noisy - a.sqrt() * self.level) / (1 - a).sqrt())

    model = Knows()
    rows = ddpm_sample(model, (3, 2), 0, n_steps=20)
    torch.testing.assert_close(rows, torch.full((3, 2), 1.5), atol=1e-4, rtol=0)
    assert not rows.requires_grad
    assert model.training
    bounded = ddpm_sample(model, (3, 2), torch.Generator().manual_seed(0), n_steps=20, clip=1.0)
    torch.testing.assert_close(bounded, torch.full((3, 2), 1.0))
    guess = lambda noisy, t: 0 * noisy  # noqa: E731
    assert torch.equal(ddpm_sample(guess, (3, 2), 7, n_steps=5), ddpm_sample(guess, (3, 2), 7, n_steps=5))
    with pytest.raises(ConfigError, match="clip"):
        ddpm_sample(model, (3, 2), 0, clip=0.0)
