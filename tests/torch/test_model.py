"""The face over torch modules: what it is made from, what it gives back, and that its run is the JAX face's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nnx_jax import (
    ArrayDataset,
    ConfigError,
    DigitsDataset,
    FeedForwardParams,
    ModelError,
    NNDataParams,
    NNModelParams,
    NNOptimParams,
    NNTrainParams,
    RunExistsError,
)
from nnx_jax.config import load_config
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.run import NNRun
from nnx_jax.torch import NNModel

DATA = NNDataParams(train=DigitsDataset(split="val"), val=DigitsDataset(split="val"), batch_size=64)
SHORT = NNTrainParams(n_epochs=1, optim=NNOptimParams(kind="sgd", max_lr=0.1))


def trained(tmp_path: Path, model: NNModel, **options: Any) -> NNRun:
    return model.train(SHORT, data=DATA, runs_dir=tmp_path, quiet=True, **options)


def test_a_run_is_asked_stored_and_opened(tmp_path: Path) -> None:
    """Predictions of the stored model are those of the trained one, bit for bit, and no file of the run is a pickle."""
    model = NNModel(FeedForwardParams(hidden_dims=(16,)), NNModelParams(metrics=("accuracy",)))
    run = trained(tmp_path, model)
    x = DigitsDataset(split="test").arrays()["x"][:7]
    asked = model.predict(x)
    opened = NNModel.from_checkpoint(f"{run.id}@LAST", runs_dir=tmp_path)
    assert opened.predict(x).logits.tobytes() == asked.logits.tobytes()
    with torch.no_grad():  # the module itself, called as any torch module is
        direct = model.net.eval()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(asked.logits, direct, rtol=1e-6, atol=1e-6)
    assert (asked.classes == direct.argmax(-1)).all()
    chances = model.predict_proba(x).probabilities
    np.testing.assert_allclose(chances, torch.from_numpy(direct).softmax(-1).numpy(), rtol=1e-5, atol=1e-7)
    scores = model.evaluate(DigitsDataset(split="test"))
    rows = DigitsDataset(split="test").arrays()
    hits = (model.predict(rows["x"]).classes == rows["y"]).mean()
    assert scores["accuracy"] == pytest.approx(hits, abs=1e-12)
    stored = [path for path in Path(run.path).rglob("*") if path.is_file()]
    assert any(path.name == "state.safetensors" for path in stored)
    assert not [path for path in stored if path.suffix in (".pt", ".pth", ".pkl", ".bin", ".ckpt")]
    with pytest.raises(RunExistsError):
        trained(tmp_path, NNModel(FeedForwardParams(hidden_dims=(16,)), NNModelParams(metrics=("accuracy",))))


def test_exported_weights_are_a_state_dict(tmp_path: Path) -> None:
    model = NNModel(FeedForwardParams(input_dim=4, hidden_dims=(3,), output_dim=2, norm="batch"))
    path = model.export_state_dict(tmp_path / "weights.safetensors")
    own = {name: value for name, value in model.net.state_dict().items()}
    found = load_file(path)
    assert set(found) == set(own)
    assert all(torch.equal(found[name], own[name]) for name in own)


def test_a_module_of_ones_own_is_trained_in_place(tmp_path: Path) -> None:
    """Its weights and the text of its class are part of the run's id; frozen parameters stay as they are."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 8), nn.Linear(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x.flatten(1))))

    torch.manual_seed(0)
    module = Own()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = NNModel(module=module)
    model.freeze("a.*")
    first = trained(tmp_path, model)
    assert model.net is module
    assert torch.equal(module.a.weight, before["a.weight"])
    assert not torch.equal(module.b.weight, before["b.weight"])
    torch.manual_seed(0)
    again = NNModel(module=Own())
    again.freeze("a.*")
    with pytest.raises(RunExistsError, match=first.id):
        trained(tmp_path, again)
    torch.manual_seed(1)
    other = NNModel(module=Own())
    other.freeze("a.*")
    assert trained(tmp_path, other).id != first.id
    with pytest.raises(ModelError, match="module of your own"):
        NNModel.from_checkpoint(first.id, runs_dir=tmp_path)
    fresh = NNModel.from_checkpoint(first.id, runs_dir=tmp_path, module=Own())
    assert torch.equal(fresh.net.b.weight, module.b.weight)


def test_what_is_no_torch_network(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="module must be a torch.nn.Module, got Linear"):
        from flax import nnx

        NNModel(module=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give one network"):
        NNModel()
    with pytest.raises(ModelError, match="device is 'cuda:7'|torch sees"):
        NNModel(FeedForwardParams(), device="cuda:7")
    with pytest.raises(ModelError, match="device is 'gpu'"):
        NNModel(FeedForwardParams(), device="gpu")


@pytest.mark.parametrize("options, path", [
    ({"mesh": {"data": 2}}, "mesh"),
    ({"sharding": {"*": ("data",)}}, "sharding"),
])  # fmt: skip
def test_what_only_a_mesh_has_is_refused(options: dict[str, Any], path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{path}: got .* a mesh is of the engine 'flax'"):
        trained(tmp_path, NNModel(FeedForwardParams()), **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field, value", [("dispatch", "span"), ("dispatch", "staged"), ("reduction", "canonical")])
def test_what_only_a_compiled_step_has_is_refused(field: str, value: str, tmp_path: Path) -> None:
    model = NNModel(FeedForwardParams())
    with pytest.raises(ConfigError, match=f"train.{field}: got '{value}'"):
        model.train(SHORT.replace(**{field: value}), data=DATA, runs_dir=tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())


def test_the_backend_is_all_that_differs_in_an_id() -> None:
    """One YAML, two engines: the identities differ by the backend alone, so the ids differ."""
    flax = load_config("examples/digits.yaml")
    torch_ = load_config("examples/digits.yaml", ["backend=torch"])
    one, two = flax.identity(), torch_.identity()
    assert two["model"].pop("backend") == "torch"
    assert one == two
    assert flax.run_id() != torch_.run_id()
    assert RunSpec.from_state(torch_.state(environment=True)).backend == "torch"


def test_rows_of_both_kinds_are_trained_on(tmp_path: Path) -> None:
    """Arrays given from Python, with a ragged tail: every row counts once, as in float64 by hand."""
    draw = np.random.default_rng(0)
    x, w = draw.integers(-4, 5, (10, 3)).astype(np.float32), np.array([[1.0], [2.0], [-1.0]], np.float32)
    y = x @ w
    module = nn.Linear(3, 1)
    with torch.no_grad():
        module.weight.zero_(), module.bias.zero_()
    model = NNModel(module=module, params=NNModelParams(loss="mse"))
    optim = NNOptimParams(kind="sgd", max_lr=0.125, momentum=0.0, accumulate_grad_batches=3)
    data = NNDataParams(train=ArrayDataset(x=x, y=y), batch_size=4, shuffle=False)
    model.train(NNTrainParams(n_epochs=1, optim=optim), data=data, runs_dir=tmp_path, quiet=True)
    expected = 0.125 * 2 * (x.T.astype(float) @ y) / 10
    np.testing.assert_allclose(module.weight.detach().numpy(), expected.T, rtol=1e-6)
    np.testing.assert_allclose(module.bias.detach().numpy(), 0.125 * 2 * y.astype(float).mean(0), rtol=1e-6)
