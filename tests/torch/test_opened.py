"""A run that one engine trained opens in the other: same weights to the bit, same predictions, and it is trained on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from nnx_jax import NNDataParams, NNModelParams, NNTrainParams
from nnx_jax import NNModel as FlaxModel
from nnx_jax.core.errors import ResumePointError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.fit.framework import FLAX
from nnx_jax.nets.opened import described, open_arrays
from nnx_jax.params.net import ConvParams, FeedForwardParams, NNParams, TransformerLMParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.runs.resume import find_point
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.transforms import model_arrays
from nnx_jax.torch import NNModel as TorchModel
from nnx_jax.torch.convert import flax_to_torch, layers_of, torch_to_flax
from nnx_jax.torch.nets import build_net
from tests.e2e.command import Here, write_case

EPS = float(np.finfo(np.float32).eps)
FACES = {"flax": FlaxModel, "torch": TorchModel}
WAYS = [("flax", "torch"), ("torch", "flax")]
NET = FeedForwardParams(input_dim=4, output_dim=2, hidden_dims=(6,), norm="batch")
MSE = NNModelParams.from_state({"loss": "mse"})
STILL = NNOptimParams(kind="sgd", max_lr=0.0)
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
DATA = NNDataParams(train=ArrayDataset(x=X, y=(X[:, :2] * 2).astype(np.float32)), batch_size=8)

norms = st.sampled_from([None, "batch", "layer"])
sizes = st.integers(1, 3)
widths = st.lists(sizes, max_size=2).map(tuple)
NETS = st.one_of(
    st.builds(
        FeedForwardParams,
        input_dim=sizes,
        output_dim=sizes,
        hidden_dims=widths,
        norm=norms,
        dropout_prob=st.sampled_from([0.0, 0.5]),
    ),
    st.builds(
        ConvParams,
        input_shape=st.tuples(sizes, sizes, sizes),
        output_dim=sizes,
        channels=st.lists(sizes, min_size=1, max_size=2).map(tuple),
        kernel_size=sizes,
        hidden_dims=widths,
        norm=norms,
    ),
    st.builds(
        TransformerLMParams,
        vocab_size=sizes,
        context_length=sizes,
        d_model=st.sampled_from([2, 4]),
        n_heads=st.sampled_from([1, 2]),
        n_layers=sizes,
        tie_embeddings=st.booleans(),
    ),
)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Equal names, dtypes, shapes and bytes."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        one, other = np.asarray(found[name]), np.asarray(array)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), name


def made(engine: str, **params: Any) -> Any:
    return FACES[engine](net_params=NET, params=NNModelParams.from_state({"loss": "mse", **params}))


def train(model: Any, root: Path, **options: Any) -> NNRun:
    options = {"n_epochs": 1, "optim": NNOptimParams(kind="sgd", max_lr=0.05), **options}
    return model.train(NNTrainParams(**options), data=DATA, runs_dir=root, quiet=True)


def as_flax(model: Any) -> dict[str, np.ndarray]:
    """The weights of a model of either library under Flax's names."""
    if isinstance(model, TorchModel):
        return torch_to_flax(NET, model.framework.weights(model.net))
    return dict(model.framework.weights(model.net))


# -- the layers of a built-in network, known without torch -------------------------------------------------------------


@given(NETS)
@settings(max_examples=25)
def test_the_layers_are_those_of_the_torch_network(params: NNParams) -> None:
    """As read off the torch module, for every kind; and the shapes are those of its arrays laid out for Flax."""
    net = build_net(params, 0)
    layers, shapes = described(params)
    assert layers == layers_of(net)
    assert {name: array.shape for name, array in torch_to_flax(params, net.state_dict()).items()} == shapes


@pytest.mark.parametrize(
    "params",
    [
        ConvParams(input_shape=(2, 3, 1), output_dim=2, channels=(3,), kernel_size=2, hidden_dims=(4,), norm="batch"),
        TransformerLMParams(vocab_size=5, context_length=3, d_model=4, n_layers=1, n_heads=2, tie_embeddings=False),
    ],
    ids=lambda params: params.kind,
)
def test_arrays_go_there_and_back(params: NNParams) -> None:
    """To the same bits, statistics and parameters that stand alone too; what is not the model's own is left out."""
    net = build_net(params, 0)
    learned = {name for name, _ in net.named_parameters()}
    stored = {f"{'params' if n in learned else 'model_state'}/{n}": v.numpy() for n, v in net.state_dict().items()}
    opened = open_arrays({**stored, "rng/torch": np.ones(3)}, params, "torch", "flax")
    same({name.partition("/")[2]: value for name, value in opened.items()}, torch_to_flax(params, net.state_dict()))
    same(open_arrays(opened, params, "flax", "torch"), stored)


def test_arrays_of_another_size_are_refused() -> None:
    wide = NET.replace(hidden_dims=(7,))
    weights = {f"params/{n}": v.numpy() for n, v in build_net(wide, 0).state_dict().items()}
    with pytest.raises(
        ResumePointError, match=r"R@LAST was written .* another size .*head.kernel has \(7, 2\), this net"
    ):
        FLAX.own_arrays(weights, NET, "torch", "R@LAST")


# -- opening a stored run ----------------------------------------------------------------------------------------------


def outputs_and_bound(weights: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The outputs for X in float64, and how far a float32 computation may be from them.

    A sum of n products comes out as the exact sum of terms each changed by at most n roundings (Higham, section 3.1);
    every other operation is one more. So the error is at most the roundings along a path times what the network gives
    with every term made positive. 16 stands for the normalisation (rsqrt is up to 4 units off), ReLU adds none.
    """
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    scale = w["norms.0.scale"] / np.sqrt(w["norms.0.var"] + 1e-5)
    hidden = X @ w["layers.0.kernel"] + w["layers.0.bias"]
    hidden = np.maximum((hidden - w["norms.0.mean"]) * scale + w["norms.0.bias"], 0)
    size = {name: np.abs(value) for name, value in w.items()}
    most = np.abs(X) @ size["layers.0.kernel"] + size["layers.0.bias"] + size["norms.0.mean"]
    most = (most * np.abs(scale) + size["norms.0.bias"]) @ size["head.kernel"] + size["head.bias"]
    return hidden @ w["head.kernel"] + w["head.bias"], (4 + 1 + 16 + 6 + 1) * EPS * most


@pytest.mark.parametrize("by, other", WAYS)
def test_a_run_opens_in_the_other_library(by: str, other: str, tmp_path: Path) -> None:
    """Weights and statistics to the bit, a frozen layer too; predictions within what float32 may round."""
    model = made(by)
    model.freeze("layers.0")
    run = train(model, tmp_path)
    opened = FACES[other].from_checkpoint(run.id, runs_dir=tmp_path)
    weights = as_flax(model)
    assert not (weights["norms.0.mean"] == 0).all()
    same(as_flax(opened), weights)
    assert opened.framework.backend == other
    exact, bound = outputs_and_bound(weights)
    for each in (model, opened):
        assert (np.abs(each.predict(X).logits - exact) <= bound).all()
    assert bound.max() < 1e-3


@pytest.mark.slow
def test_a_torch_run_opens_where_torch_is_not_imported(tmp_path: Path) -> None:
    model = made("torch")
    run = train(model, tmp_path)
    code = (
        "import sys; import numpy as np; from nnx_jax import NNModel\n"
        f"model = NNModel.from_checkpoint({run.id!r}, runs_dir={str(tmp_path)!r})\n"
        f"np.savez({str(tmp_path / 'w.npz')!r}, **model.framework.weights(model.net))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "w.npz") as found:
        same(dict(found), as_flax(model))


class FlaxOwn(nnx.Module):
    def __init__(self) -> None:
        self.out = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.out(x)


class TorchOwn(torch.nn.Module):
    """A network that holds a statistic without an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 2)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x.to(self.out.weight.dtype)))


@pytest.mark.parametrize("by, other", WAYS)
def test_a_module_of_your_own_is_refused(by: str, other: str, tmp_path: Path) -> None:
    """By name of both engines, before anything of the new run is on the disk."""
    modules: dict[str, Any] = {"flax": FlaxOwn, "torch": TorchOwn}
    own = {name: FACES[name](module=make(), params=MSE) for name, make in modules.items()}
    run = train(own[by], tmp_path)
    told = f"{run.id}(@LAST)? was written by the engine '{by}'; this model's is '{other}'.*nnx_jax.torch.convert"
    with pytest.raises(ResumePointError, match=told):
        FACES[other].from_checkpoint(run.id, runs_dir=tmp_path, module=modules[other]())
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(ResumePointError, match=told):
        train(own[other], tmp_path, resume_from_run_id=run.id, resume_mode="weights_only")
    assert sorted(tmp_path.rglob("*")) == there


# -- training on from it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by, other", WAYS)
def test_the_other_library_trains_on_from_the_weights_alone(by: str, other: str, tmp_path: Path) -> None:
    """A rate of 0 keeps them to the bit. Optimizer state is refused before anything is written or loaded."""
    model = made(by)
    model.freeze("layers.0")
    run = train(model, tmp_path)
    fresh = made(other)
    there, before = sorted(tmp_path.rglob("*")), as_flax(FACES[other](net_params=NET))
    told = f"LAST of run {run.id} holds the training state of the engine '{by}'; this run's is '{other}'.*weights_only"
    with pytest.raises(ResumePointError, match=told):
        train(fresh, tmp_path, resume_from_run_id=run.id)
    assert sorted(tmp_path.rglob("*")) == there
    same(as_flax(fresh), before)
    fresh.freeze("norms.0", "head")
    more = train(fresh, tmp_path, resume_from_run_id=run.id, resume_mode="weights_only", optim=STILL)
    assert more.resume_status.mode == "weights_only"
    assert [row["epoch"] for row in more.records if row["kind"] == "epoch"] == [1]
    kept = {name: value for name, value in as_flax(model).items() if not name.endswith(("mean", "var"))}
    same({name: as_flax(fresh)[name] for name in kept}, kept)


@pytest.mark.parametrize("engine", [pytest.param("flax", marks=pytest.mark.slow), "torch"])
def test_weights_alone_may_be_frozen_otherwise_than_they_were(engine: str, tmp_path: Path) -> None:
    """What `freeze` in a training says to do: end it, and continue with weights_only and other parameters at rest."""
    model = made(engine)
    model.freeze("layers.0")
    run = train(model, tmp_path)
    weights = as_flax(model)
    other = made(engine)
    other.freeze("head")
    train(other, tmp_path, resume_from_run_id=run.id, resume_mode="weights_only")
    found = as_flax(other)
    same(
        {name: found[name] for name in ("head.kernel", "head.bias")},
        {n: weights[n] for n in ("head.kernel", "head.bias")},
    )
    assert (found["layers.0.kernel"] != weights["layers.0.kernel"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("by, other", WAYS)
def test_the_command_goes_on_from_a_run_of_the_other_engine(
    by: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--set backend=... --from RUN --resume weights_only`; without it, code 1 and both engines by name."""
    here = Here(write_case(tmp_path), capsys, monkeypatch)
    first = here("--set", f"backend={by}", "--json")
    assert first.code == 0, first.err
    run_id = first.result["run_id"]
    still = ["--set", "train.optim.max_lr=0", "--set", "train.optim.weight_decay=0", "--set", "train.n_epochs=1"]
    refused = here("--set", f"backend={other}", "--from", run_id, *still)
    assert refused.code == 1
    assert f"engine '{by}'; this run's is '{other}'" in refused.err
    done = here("--set", f"backend={other}", "--from", run_id, "--resume", "weights_only", *still, "--json")
    assert done.code == 0, done.err
    points = [find_point(tmp_path / "runs", each) for each in (run_id, done.result["run_id"])]
    assert [point.host["topology"]["engine"] for point in points] == [by, other]
    net = NNParams.from_state(points[0].host["topology"]["net"])
    stored = model_arrays(points[0])
    weights = {n.partition("/")[2]: v for n, v in stored.items() if n.startswith(("params/", "model_state/"))}
    wanted = (flax_to_torch if other == "torch" else torch_to_flax)(net, weights)
    found = {n.removeprefix("params/"): v for n, v in model_arrays(points[1]).items() if n.startswith("params/")}
    same(found, {name: wanted[name] for name in found})
    assert len(found) == 6


# -- number formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_as", [torch.bfloat16, torch.float32])
def test_a_bfloat16_module_opens_with_its_bits(given_as: torch.dtype, tmp_path: Path) -> None:
    """Stored, opened and exported as bfloat16, also into a module that is handed over in float32."""
    model = TorchModel(module=TorchOwn().bfloat16(), params=MSE)
    run = train(model, tmp_path)
    weights = dict(model.framework.weights(model.net))
    assert {str(value.dtype) for value in weights.values()} == {"bfloat16", "int64"}
    opened = TorchModel.from_checkpoint(run.id, runs_dir=tmp_path, module=TorchOwn().to(given_as))
    same(dict(opened.framework.weights(opened.net)), weights)
    np.testing.assert_array_equal(opened.predict(X).logits, model.predict(X).logits)
    exported = load_file(model.export_state_dict(tmp_path / "net.safetensors"))
    net: Any = model.net
    held = net.state_dict()
    assert {n: (v.dtype, v.shape) for n, v in exported.items()} == {n: (v.dtype, v.shape) for n, v in held.items()}
    assert all(torch.equal(exported[name], value) for name, value in held.items())


def test_a_float64_run_opens_with_its_bits(tmp_path: Path) -> None:
    model = made("torch", precision="float64")
    run = train(model, tmp_path)
    opened = TorchModel.from_checkpoint(run.id, runs_dir=tmp_path)
    assert opened.framework.weights(opened.net)["head.weight"].dtype == np.float64
    same(dict(opened.framework.weights(opened.net)), dict(model.framework.weights(model.net)))
