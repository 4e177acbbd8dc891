"""Model registries: addressed by content, weights in it, whole or not there, and nothing that is run."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import CheckpointError, UnregisteredError
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.core.registry import register, unregister
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.loop.context import TrainContext
from nnx_jax.loop.step_builtin import Checkpoint, StepCallback
from nnx_jax.loop.step_callbacks import StepState
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.runs import registry as module
from nnx_jax.runs.registry import LocalModelRegistry, ModelRegistry, RemoteModelRegistry

NET = FeedForwardParams(input_dim=2, output_dim=1, hidden_dims=(3,))


class Line(nnx.Module):
    """A model of a user's own."""

    def __init__(self, w: float) -> None:
        self.w = nnx.Param(jnp.float32(w))

    def __call__(self, x: Any) -> Any:
        return self.w[...] * x


@register("registry_scale")
class Scale(Operator):
    """An operator without weights."""

    factor: float = 1.0

    def _apply(self, x: Any) -> Any:
        return x * self.factor


@pytest.fixture(name="models")
def _models(tmp_path: Path) -> LocalModelRegistry:
    return LocalModelRegistry(tmp_path / "models")


def model(seed: int = 0) -> NNXModelOp:
    """A built-in network with weights of its own, as after a training."""
    op = NNXModelOp(net=NET, seed=seed)
    return op.with_arrays({name: value + 1.0 for name, value in op.arrays().items()})


def test_a_model_is_found_by_its_content_and_answers_as_before(models: LocalModelRegistry) -> None:
    """(pipekit:I4)"""
    trained = model()
    digest = models.store(trained)
    folder = Path(models.root, digest)
    assert sorted(each.name for each in folder.iterdir()) == ["metadata.json", "operator.json", "weights.bin"]
    assert models.store(model()) == digest == models.digest(trained)
    assert models.store(model(seed=1)) != digest
    x = np.ones((4, 2), np.float32)
    loaded = models.load(digest)
    assert np.array_equal(loaded(x), trained(x))
    assert loaded == trained
    assert loaded.content_hash() == trained.content_hash()
    assert models.load_weights(digest) == trained.serialize_weights()


def test_a_model_with_the_same_settings_and_other_weights_is_another(models: LocalModelRegistry) -> None:
    """(pipekit:I4)"""
    one, two = NNXModelOp(Line(1.0)), NNXModelOp(Line(2.0))
    assert models.store(one) != models.store(two)
    assert models.store(Scale(), weights=b"a") != models.store(Scale(), weights=b"b")


def test_a_module_of_the_users_own_comes_back_in_a_template(models: LocalModelRegistry) -> None:
    digest = models.store(NNXModelOp(Line(3.0)), name="line")
    template = NNXModelOp(Line(0.0))
    found = models.load("line", template=template)
    assert float(found(np.array([2.0], np.float32))[0]) == 6.0
    assert float(template(np.array([2.0], np.float32))[0]) == 0.0
    bare = models.store(NNXModelOp(Line(3.0)), weights=b"")
    assert bare != digest
    with pytest.raises(ValueError, match="no weights blob"):
        models.load(bare, template=template)


def test_the_hash_is_that_of_the_files(models: LocalModelRegistry) -> None:
    digest = models.store(Scale(factor=2.0), weights=b"w")
    config = Path(models.root, digest, "operator.json").read_bytes().rstrip(b"\n")
    assert config == b'{"class":"registry_scale","state":{"factor":2.0,"kind":"registry_scale"}}'
    assert hashlib.sha256(config + b"\0" + b"w").hexdigest() == digest


def test_names_and_tags(models: LocalModelRegistry) -> None:
    """(pipekit:I9)"""
    one = models.store(Scale(factor=1.5), name="first", tags={"stage": "test"})
    two = models.store(Scale(factor=2.5), tags=["good"])
    assert models.store(Scale(factor=1.5), tags=["good"]) == one
    assert models.metadata("first")["tags"] == {"stage": "test", "good": ""}
    assert models.list() == (one, two)
    assert models.list(tags=["good"]) == (one, two)
    assert models.list(tags={"stage": "test"}) == (one,)
    assert models.list(tags={"stage": "other"}) == models.list(tags=["bad"]) == ()
    assert models.load("first") == models.load(f"registry://{one}") == Scale(factor=1.5)
    assert models.resolve_tag("first") == one
    models.tag(one, "first")  # again, the same
    with pytest.raises(FileExistsError, match="first"):
        models.tag(two, "first")
    with pytest.raises(FileExistsError, match="first"):
        models.store(Scale(factor=7.0), name="first")
    assert len(models.list()) == 2  # it was refused before anything was written
    models.tag(two, "first", force=True)
    assert models.resolve("first") == two


def test_what_is_not_there_is_a_key_error(models: LocalModelRegistry) -> None:
    """(pipekit:I9)"""
    for ask in (models.load, models.load_weights, models.metadata, models.resolve, models.resolve_tag):
        with pytest.raises(KeyError):
            ask("nothing")
    with pytest.raises(KeyError):
        models.tag("0" * 64, "name")
    assert models.list() == ()


@pytest.mark.parametrize("ref", ["", "/", "\\", ".", "..", "../x", "_tags", "a/b", "a\0", None, 3])
def test_a_reference_is_one_plain_name(models: LocalModelRegistry, ref: Any) -> None:
    """(pipekit:I9)"""
    digest = models.store(Scale())
    for ask in (models.load, models.resolve_tag, lambda name: models.tag(digest, name)):
        with pytest.raises(ValueError, match="name|reference"):
            ask(ref)


def test_no_weights_are_empty_weights(models: LocalModelRegistry) -> None:
    """(pipekit:I9)"""
    digest = models.store(Scale(factor=2.0))
    assert models.store(Scale(factor=2.0), weights=b"") == digest
    assert not Path(models.root, digest, "weights.bin").exists()
    assert models.load_weights(digest) is None


def test_only_operators_and_bytes_are_kept(models: LocalModelRegistry) -> None:
    """(pipekit:I9)"""
    with pytest.raises(TypeError, match="operators"):
        models.store(3)
    for wrong in ("text", 3):
        with pytest.raises(TypeError, match="bytes"):
            models.store(Scale(), weights=wrong)  # type: ignore[arg-type]
    for wrong in ("text", [1], {"a": 1}):
        with pytest.raises(TypeError, match="tags"):
            models.store(Scale(), tags=wrong)  # type: ignore[arg-type]


def test_nothing_is_pickled(models: LocalModelRegistry) -> None:
    """The weights are a safetensors file: a length, a JSON header, plain numbers. (pipekit:I8)"""
    blob = Path(models.root, models.store(model()), "weights.bin").read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"F32"}
    assert len(blob) == 8 + size + 4 * (2 * 3 + 3 + 3 + 1)


@pytest.mark.parametrize("file", ["operator.json", "weights.bin"])
def test_damage_is_seen(models: LocalModelRegistry, file: str) -> None:
    digest = models.store(model())
    path = Path(models.root, digest, file)
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(CheckpointError, match="damaged"):
        models.load(digest)


def test_a_failed_store_leaves_nothing(models: LocalModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    models.store(Scale(factor=1.5))

    def full(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(module.fsio, "sync_tree", full)
    with pytest.raises(OSError, match="full"):
        models.store(Scale(factor=2.5))
    assert {each.name for each in Path(models.root).iterdir()} == {".lock", *models.list()}
    assert len(models.list()) == 1


def test_a_class_that_is_not_registered_is_not_imported(models: LocalModelRegistry) -> None:
    @register("registry_gone")
    class Gone(Operator):
        pass

    digest = models.store(Gone())
    unregister(Gone)
    with pytest.raises(UnregisteredError, match="registry_gone"):
        models.load(digest)


def test_a_callback_stores_the_trained_model(models: LocalModelRegistry) -> None:
    """(pipekit:I3)"""
    trained = model()
    keep = Checkpoint(registry=models)
    state = StepState(lambda ctx: trained)
    state.move(TrainContext("0" * 16), 1)
    keep.on_train_end(None, state)
    assert keep.last_uri == f"registry://{keep.last_hash}"
    assert Path(models.root, str(keep.last_hash), "operator.json").exists()
    assert models.load(str(keep.last_uri)) == trained
    assert StepCallback.from_state(keep.state()) == keep


def test_a_registry_is_a_setting(models: LocalModelRegistry) -> None:
    assert LocalModelRegistry.from_state(models.state()) == models
    assert isinstance(models, ModelRegistry)
    for wrong in ("", 3):
        with pytest.raises(ValueError, match="directory"):
            LocalModelRegistry(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="store"):
        Sequential([models])


# -- elsewhere -------------------------------------------------------------------------------------------------


def test_without_fsspec_the_first_use_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    models = RemoteModelRegistry("s3://bucket/models")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"nnx_jax\[s3\]"):
        models.list()


def test_a_half_copied_model_is_replaced(models: LocalModelRegistry) -> None:
    """A folder without metadata, as an interrupted copy leaves it, does not stand in the way."""
    trained = model()
    digest = models.digest(trained)
    half = Path(models.root, digest)
    half.mkdir(parents=True)
    (half / "weights.bin").write_bytes(b"half")
    assert models.store(trained, tags=["good"]) == digest
    assert models.list(tags=["good"]) == (digest,)
    np.testing.assert_array_equal(models.load(digest)(np.ones((1, 2), np.float32)), trained(np.ones((1, 2))))


def test_tags_of_two_writers_are_both_kept(models: LocalModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """One writer reads the tags, another one wants to add its own before the first has written."""
    digest = models.store(Scale())
    replace, others = LocalModelRegistry._replace, []

    def slow(self: LocalModelRegistry, folder: str, file: str, data: bytes) -> None:
        if not others:
            others.append(
                threading.Thread(target=lambda: LocalModelRegistry(self.root).store(Scale(), tags={"b": "2"}))
            )
            others[0].start()
            others[0].join(0.2)
        replace(self, folder, file, data)

    monkeypatch.setattr(LocalModelRegistry, "_replace", slow)
    models.store(Scale(), tags={"a": "1"})
    others[0].join()
    assert models.metadata(digest)["tags"] == {"a": "1", "b": "2"}
