"""Scores and predictions of torch modules: every row once, modes and streams as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nnx_jax.core.errors import DataError, ModelError, StepError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.data.loader import LoaderFeed
from nnx_jax.data.pipeline import Feed
from nnx_jax.params.metrics import AccuracyParams, F1Params
from nnx_jax.params.model import NNModelParams
from nnx_jax.torch.inference import Inference, weights_of
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.scoring import ModelScorer
from tests.torch.engines import advance, columns, engine_of, mlp, spec_of, weights


class Chatty(torch.nn.Module):
    """Dropout and BatchNorm, with a layer that was put into evaluation mode by hand."""

    def __init__(self, features: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.norm, self.drop = torch.nn.BatchNorm1d(features), torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(features, classes)
        self.drop.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(x)))


def modes(module: torch.nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


@pytest.mark.parametrize("batch_size", [1, 4, 37])
@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_scores_are_those_of_all_rows_at_once(batch_size: int, kind: str) -> None:
    data = columns(37, classes=4)
    module = Chatty()
    before, held = modes(module), weights(module)
    params = NNModelParams(metrics=(AccuracyParams(), F1Params()))
    parts = [(data["x"][i : i + batch_size], data["y"][i : i + batch_size]) for i in range(0, 37, batch_size)]
    dataset = ArrayDataset(**data)
    feed = Feed.evaluation(dataset, batch_size=batch_size) if kind == "dataset" else LoaderFeed(parts)
    torch.manual_seed(3)
    found = ModelScorer(module, build_loss("cross_entropy"), params).score(feed)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert modes(module) == before
    assert all(np.array_equal(held[name], value) for name, value in weights(module).items())
    module.eval()
    logits = module(torch.from_numpy(data["x"])).detach()
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, torch.from_numpy(data["y"])).item(), rel=1e-6)
    assert found["accuracy"] == (logits.argmax(-1).numpy() == data["y"]).mean()
    assert set(found) == {"loss", "accuracy", "f1"}


def test_thousands_of_small_batches_are_added_in_float64() -> None:
    """Numerators of 1 + 2^-20 would lose their last bits in float32 once the sum is beyond 2^4."""
    x = np.full((3000, 1), np.sqrt(1 + 2.0**-20), np.float32)
    module = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    feed = Feed.evaluation(ArrayDataset(x=x, y=np.zeros_like(x)), batch_size=1)
    found = ModelScorer(module, build_loss("mse"), NNModelParams()).score(feed)
    assert found["loss"] == float(np.square(x[0, 0]))


def test_a_loader_without_a_length_is_scored_to_its_end() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter([{"x": np.ones((2, 3), np.float32), "y": np.ones((2, 1), np.float32)}] * 3)

    module = mlp()
    found = ModelScorer(module, build_loss("mse"), NNModelParams()).score(LoaderFeed(Endless()))
    wanted = (module.eval()(torch.ones(1, 3)) - 1).square().item()
    assert found["loss"] == pytest.approx(wanted, rel=1e-6)


def test_what_cannot_be_scored_is_said() -> None:
    data = columns(6, classes=3)
    scorer = ModelScorer(mlp(outputs=3), build_loss("cross_entropy"), NNModelParams())
    with pytest.raises(DataError, match="1 labels of the evaluated rows are no class"):
        scorer.score(LoaderFeed([(data["x"], np.array([0, 1, 2, 3, 0, 1]))]))
    with pytest.raises(DataError, match="no rows to evaluate"):
        scorer.score(LoaderFeed([{"x": data["x"], "y": data["y"], "mask": np.zeros(6)}]))
    with pytest.raises(ModelError, match="does not take a batch x of"):
        scorer.score(LoaderFeed([(data["x"][:, :2], data["y"])]))


@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_outputs_are_those_of_evaluation_mode(batch_size: int) -> None:
    rows = columns(12)["x"]
    module = Chatty()
    before = modes(module)
    found = Inference(module).outputs(rows, batch_size)
    assert modes(module) == before
    module.eval()
    np.testing.assert_allclose(found, module(torch.from_numpy(rows)).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert found.dtype == np.float32
    torch_rows: Any = torch.from_numpy(rows)
    np.testing.assert_array_equal(Inference(module).outputs(torch_rows, batch_size), found)


def test_what_cannot_be_predicted_is_said() -> None:
    asked = Inference(mlp())
    with pytest.raises(DataError, match="at least one row"):
        asked.outputs(np.zeros((0, 3)), 4)
    with pytest.raises(DataError, match="batch_size must be 1 or more"):
        asked.outputs(np.zeros((1, 3)), 0)
    with pytest.raises(ModelError, match=r"does not take rows of float32\[5\]"):
        asked.outputs(np.zeros((2, 5)), 4)

    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    with pytest.raises(ModelError, match="gives a tuple"):
        Inference(Two()).outputs(np.zeros((2, 5)), 4)


def test_weights_are_copies_by_name() -> None:
    module = Chatty()
    held = weights_of(module)
    assert set(held) == set(module.state_dict())
    before = held["head.weight"].copy()
    with torch.no_grad():
        module.head.weight.zero_()
    np.testing.assert_array_equal(held["head.weight"], before)


def test_a_validation_of_the_users_own_sees_a_copy_in_evaluation_mode() -> None:
    data = columns(10)
    seen: list[Any] = []

    def validate(ctx: Any) -> dict[str, Any]:
        seen.append((ctx.model.training, torch.is_grad_enabled(), sum(len(b["x"]) for b in ctx.val_loader)))
        with torch.no_grad():
            ctx.model[3].weight.zero_()
        errors = [(ctx.model(b["x"]) - b["y"]).square().mean() for b in ctx.val_loader]
        return {"loss": errors[0], "again": ctx.evaluate()["loss"], "extra": {"missing": None}}

    module = mlp()
    engine = engine_of(spec_of(data, val=data), module, eval_step=validate)
    state = engine.start()
    advance(engine, state, 1)
    before = weights(module)
    found = engine.evaluate(state, "val")
    assert found is not None
    assert seen == [(False, False, 10)]
    assert all(np.array_equal(before[name], value) for name, value in weights(module).items())
    rows = torch.from_numpy(data["x"])
    wanted = (module.eval()(rows) - torch.from_numpy(data["y"])).square().mean().item()
    assert found.values["again"] == pytest.approx(wanted, rel=1e-6)
    assert set(found.values) == {"loss", "again"}
    assert engine.evaluate(state, "test") is None
    engine.eval_step = lambda ctx: 3
    with pytest.raises(StepError, match="returned int"):
        engine.evaluate(state, "val")
