"""Trained models as operators: hashes, blobs, registries, pipelines, and what an artifact tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load

from nnx_jax.core.errors import ModelError
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.core.registry import register
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.engines.blobs import read_blob, write_blob
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.loop.step_builtin import Checkpoint
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.runs.artifact import TrainingArtifact
from nnx_jax.runs.registry import LocalModelRegistry
from nnx_jax.training_loop import rerun
from tests.training_loop.scenes import Line, loop, model, weights
from tests.training_loop.stage_scenes import Net, own, same

X = np.linspace(-2, 2, 8, dtype=np.float32)[:, None]


@register("scene_shift")
class Shift(Operator):
    """Adds a number."""

    by: float = 0.5

    def _apply(self, carrier: Any) -> Any:
        return carrier + np.float32(self.by)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> LocalModelRegistry:
    return LocalModelRegistry(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def ran(registry: LocalModelRegistry) -> tuple[Any, TrainingArtifact]:
    """A run whose model is stored in the registry."""
    return loop(callbacks=[Checkpoint(registry=registry)]).run()


@pytest.fixture(scope="module")
def twice() -> tuple[Any, Any]:
    """The same training, once more, and one whose first weights are others."""
    return loop().run(), loop(model_op=model(1)).run()


# -- what a run returns ------------------------------------------------------------------------------------------


def test_run_returns_the_operator_and_its_artifact(ran: tuple[Any, TrainingArtifact]) -> None:
    """The hash of the rows, the backend's name and what was installed are told (pipekit:I1, pipekit:G3)."""
    operator, artifact = ran
    assert isinstance(operator, Operator)
    assert artifact.dataset_hash == Line().content_hash()
    assert artifact.backend_info["backend"] == "nnx"
    assert artifact.backend_info["final_step"] == 20
    assert isinstance(artifact.deps_lock, str)
    assert "jax==" in artifact.deps_lock


def test_facts_of_the_run_are_json(ran: tuple[Any, TrainingArtifact]) -> None:
    """Samples a second, seconds of compiling and bytes are there, and all is JSON (pipekit:G28)."""
    info = json.loads(json.dumps(ran[1].backend_info, allow_nan=False))
    assert info["samples_per_second"] > 0
    assert 0 < info["compile_seconds"] <= info["total_seconds"]
    assert info["peak_host_bytes"] > 1e6
    assert np.isfinite(info["final_metrics"]["loss"])


def test_hashes_follow_the_weights(ran: tuple[Any, TrainingArtifact], twice: tuple[Any, Any]) -> None:
    """Another start, another hash; the same training, the same one (pipekit:I4, pipekit:G4)."""
    again, other = twice
    assert again[1].trained_model_hash == again[0].content_hash() == ran[0].content_hash()
    assert same(again[0], ran[0])
    assert other[0].content_hash() != ran[0].content_hash()
    assert NNXModelOp(Net(0)).content_hash() != NNXModelOp(Net(1)).content_hash()


def test_an_artifact_can_be_replayed(twice: tuple[Any, Any], tmp_path: Path) -> None:
    """Seed, configuration, versions and commit are recorded; replayed, the hash comes out again (pipekit:I15)."""
    artifact = TrainingArtifact.load(twice[0][1].save(tmp_path / "artifact.json"))
    assert artifact.metadata["seed"] == 0
    assert artifact.backend_info["jax_version"]
    assert {"git", "python"} <= set(artifact.environment)
    assert rerun(artifact)[1].trained_model_hash == artifact.trained_model_hash


# -- weights as bytes --------------------------------------------------------------------------------------------


def test_the_registry_has_model_and_weights(ran: tuple[Any, TrainingArtifact], registry: LocalModelRegistry) -> None:
    """Reloaded by the artifact alone the model predicts the same bits; weights lie beside it

    (pipekit:I4, pipekit:I5, pipekit:D7.2).
    """
    operator, artifact = ran
    assert (Path(registry.root) / str(artifact.trained_model_hash) / "weights.bin").is_file()
    assert np.array_equal(artifact.reload_model(registry)(X), operator(X))


def test_a_template_takes_weights_from_a_registry(
    ran: tuple[Any, TrainingArtifact], registry: LocalModelRegistry
) -> None:
    """The template stays as it was, a new operator has the bits; what gives no weights is refused (pipekit:I6)."""
    template = model(8)
    before = weights(template)
    found = template.from_registry(registry, str(ran[1].trained_model_hash))
    assert found is not template
    assert same(found, ran[0])
    assert np.array_equal(found(X), ran[0](X))
    assert all(np.array_equal(array, template.arrays()[name]) for name, array in before.items())
    bare = registry.store(Shift(by=3.0))
    with pytest.raises(ValueError, match="no weights blob"):
        template.from_registry(registry, bare)
    with pytest.raises(TypeError, match="load_weights"):
        template.from_registry(object(), "x")
    with pytest.raises(TypeError, match="bytes"):
        template.with_weights("weights")  # type: ignore[arg-type]


def test_blobs_say_what_they_hold() -> None:
    """A blob is a plain tensor file; with a leaf too many, too few or another it is refused by name

    (pipekit:I7, pipekit:I8).
    """
    given = own(2, odd=True)
    blob = given.serialize_weights()
    assert set(read_blob(blob)) == set(given.arrays())
    assert set(load(own().serialize_weights())) == set(own().arrays())  # any reader of the format opens it
    assert same(own(5, odd=True).with_weights(blob), given)
    with pytest.raises(ModelError, match=r"has no (scale|table)"):
        own().with_weights(blob)
    with pytest.raises(ModelError, match=r"(scale|table) is missing"):
        given.with_weights(own().serialize_weights())
    halves = {name: array.astype(np.float16) for name, array in own().arrays().items()}
    with pytest.raises(ModelError, match=r"float16.* there, float32.* here"):
        own().with_weights(write_blob(halves))
    with pytest.raises(ModelError, match="safetensors"):
        own().with_weights(b"\x80\x04K\x01.")  # a pickle


# -- serving -----------------------------------------------------------------------------------------------------


def test_a_trained_model_stands_in_a_pipeline(ran: tuple[Any, TrainingArtifact]) -> None:
    """After preprocessing, without any conversion, for a batch and for one sample (pipekit:I13, pipekit:D7.1)."""
    pipeline = Sequential([Shift(by=0.5), ran[0]])
    assert np.array_equal(pipeline(X), ran[0](X + np.float32(0.5)))
    assert np.allclose(pipeline(X[3]), np.asarray(pipeline(X))[3], rtol=1e-6)


class Forward:
    """A forward model in time that an operator makes: it knows one step size, and takes no other."""

    def __init__(self, model_op: Any, dt: float) -> None:
        self.model_op, self.dt = model_op, dt

    def step(self, state: Any, dt: float | None = None) -> Any:
        return self.model_op(state)


def test_an_emulator_makes_steps_in_time() -> None:
    """From training to serving by one swap: ten steps of the trained model stay finite and (2,) (pipekit:I13)."""
    x = np.random.default_rng(0).uniform(-1, 1, (64, 2)).astype(np.float32)
    net = NNXModelOp(net=FeedForwardParams(input_dim=2, hidden_dims=(16,), output_dim=2))
    trained, _ = loop(model_op=net, dataset=ArrayDataset({"x": x, "y": np.float32(0.9) * x}), max_steps=30).run()
    assert trained.input_shape == (2,)
    states = [x[0]]
    forward = Forward(trained, dt=0.1)
    for number in range(10):
        states.append(np.asarray(forward.step(states[-1], dt=0.1 * (number % 2 + 1))))
    assert np.isfinite(states).all()
    assert states[-1].shape == (2,)
    again = Forward(Sequential([trained]), dt=0.1)  # the swap: nothing else changes
    assert np.array_equal(again.step(x[0]), forward.step(x[0]))


def test_serving_is_as_training_was(ran: tuple[Any, TrainingArtifact]) -> None:
    """Precision and the shape of a sample are recorded; a sample, a batch and one row agree (pipekit:I16)."""
    operator = ran[0]
    assert (operator.input_shape, operator.precision) == ((1,), "float32")
    assert np.asarray(operator(X)).shape == (8, 1)
    assert np.array_equal(operator(X[0]), np.asarray(operator(X[:1]))[0])
    half, _ = loop(precision="bfloat16", max_steps=2)(None, None)
    assert half.precision == "bfloat16"
    assert half.state()["precision"] == "bfloat16"
    wide = half.model_copy(update={"precision": "float32"})
    assert not np.array_equal(np.asarray(half(X), np.float32), NNXModelOp(wide.module)(X))


NET = FeedForwardParams(input_dim=1, output_dim=1, hidden_dims=(3,))


def test_first_use_under_a_trace() -> None:
    """An operator that is first called under jit holds arrays afterwards, not tracers, and gives the same outputs."""
    op, plain = NNXModelOp(net=NET), NNXModelOp(net=NET)
    traced = jax.jit(op)(X)
    np.testing.assert_array_equal(op(X), plain(X))
    np.testing.assert_allclose(traced, plain(X), rtol=1e-6)
    assert same(op, plain)


def test_first_use_in_an_export() -> None:
    """What an export takes for the weights, the arrays that a traced call holds, are they."""
    op = NNXModelOp(net=NET, seed=1)
    held = jax.make_jaxpr(op)(X).consts
    wanted = NNXModelOp(net=NET, seed=1).arrays().values()
    assert sorted(np.asarray(each).tobytes() for each in held) == sorted(each.tobytes() for each in wanted)
