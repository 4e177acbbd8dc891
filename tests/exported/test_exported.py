"""Exported operators: equal bits without the model's code, one file, and a signature that is kept to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from nnx_jax.core.errors import DataError, ModelError
from nnx_jax.core.operator import Operator, Sequential
from nnx_jax.core.registry import register
from nnx_jax.engines.blobs import read_blob, write_blob
from nnx_jax.engines.exported import PROGRAM, ExportedOp, export_operator, load_exported
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.runs.registry import LocalModelRegistry

ROOT = Path(__file__).resolve().parents[2]
X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(8, 3)


class Own(nnx.Module):
    """A class that a fresh process does not know, with statistics and outputs of several kinds."""

    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.first, self.norm, self.last = (
            nnx.Linear(3, 4, rngs=rngs),
            nnx.BatchNorm(4, rngs=rngs),
            nnx.Linear(4, 2, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> dict[str, Any]:
        hidden = nnx.relu(self.norm(self.first(x)))
        return {"mean": self.last(hidden), "parts": [hidden, jnp.argmax(hidden, axis=-1)]}


class Fixed(nnx.Module):
    """A module that looks at the number of rows."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...] * float(len(x))


@register("scene_whitened")
class Whitened(Operator):
    """Subtracts and divides."""

    mean: float = 0.25
    scale: float = 2.0

    def _apply(self, carrier: Any) -> Any:
        return (carrier - np.float32(self.mean)) / np.float32(self.scale)


@pytest.fixture(scope="module")
def op() -> NNXModelOp:
    return NNXModelOp(Own(), input_shape=(3,))


@pytest.fixture(scope="module")
def blob(op: NNXModelOp) -> bytes:
    return export_operator(op, X)


@pytest.fixture(scope="module")
def found(blob: bytes) -> ExportedOp:
    return load_exported(blob)


def equal(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_any_number_of_rows_gives_the_same_bits(op: NNXModelOp, found: ExportedOp, rows: int) -> None:
    """The row axis is open, the structure of the outputs is kept, and every bit is the operator's."""
    assert found.signature["input"] == {"shape": ("batch", 3), "dtype": "float32"}
    outputs = found(X[:rows])
    assert set(outputs) == {"mean", "parts"}
    assert equal(outputs, op(X[:rows]))


def test_one_sample(op: NNXModelOp, found: ExportedOp) -> None:
    """A row without its axis is a sample, as for the operator itself."""
    assert equal(found(X[2]), op(X[2]))
    assert found(X[2])["mean"].shape == (2,)


@pytest.mark.parametrize(
    "x", [X.astype(np.float64), X[:, :2], X[:0], np.float32(1), X[None], [[1.0, 2.0, 3.0]], X.astype(np.int32)]
)
def test_other_shapes_and_dtypes_are_refused_with_the_signature(found: ExportedOp, x: Any) -> None:
    """Nothing is converted or broadcast in silence."""
    with pytest.raises(ModelError, match=r"takes x float32\[batch, 3\]"):
        found(x)


def test_a_process_that_does_not_know_the_class(op: NNXModelOp, tmp_path: Path) -> None:
    """The file alone gives the bits: no class of the model, no Flax, no pickle."""
    path = tmp_path / "model.safetensors"
    export_operator(Sequential([Whitened(), op]), X, path)
    np.save(tmp_path / "x.npy", X)
    code = """
import sys
import numpy as np
from nnx_jax.engines.exported import load_exported
outputs = load_exported(sys.argv[1])(np.load(sys.argv[2]))
assert not {"flax", "tests"} & set(sys.modules), "the model's code was imported"
np.save(sys.argv[3], outputs["mean"])
"""
    names = [str(tmp_path / name) for name in ("model.safetensors", "x.npy", "y.npy")]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(tmp_path / "y.npy"), op((X - np.float32(0.25)) / np.float32(2.0))["mean"])
    assert PROGRAM in load_file(path)  # any reader of the format opens it


def test_the_weights_are_tensors_of_the_file(op: NNXModelOp, blob: bytes) -> None:
    """They are stored as what they are, once, and not as text inside the program."""
    tensors = read_blob(blob)
    stored = [array for name, array in tensors.items() if name != PROGRAM]
    for name, array in op.arrays().items():
        assert any(np.array_equal(array, each) for each in stored if each.shape == array.shape), name
    assert tensors[PROGRAM].dtype == np.uint8


def test_a_module_that_looks_at_its_rows_is_exported_for_so_many() -> None:
    """Where the row axis cannot stay open it is that of the example."""
    op = NNXModelOp(Fixed())
    found = load_exported(export_operator(op, X))
    assert found.signature["input"]["shape"] == (8, 3)
    assert equal(found(X), op(X))
    with pytest.raises(ModelError, match=r"float32\[8, 3\]"):
        found(X[:4])


def test_bfloat16_weights_and_precision(tmp_path: Path) -> None:
    """A model that computes in bfloat16 does so after the export."""
    op = NNXModelOp(nnx.Linear(3, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), precision="bfloat16")
    found = load_exported(export_operator(op, X, tmp_path / "half"))
    assert equal(found(X), op(X))


def test_an_export_is_an_operator(op: NNXModelOp, blob: bytes, found: ExportedOp, tmp_path: Path) -> None:
    """It stands in a pipeline, its hash follows the weights, its state names the file, a registry keeps it whole."""
    assert equal(Sequential([Whitened(), found])(X), op((X - np.float32(0.25)) / np.float32(2.0)))
    assert found == load_exported(blob)
    assert found.content_hash() != load_exported(export_operator(NNXModelOp(Own(1)), X)).content_hash()
    bare = ExportedOp.from_state(json.loads(json.dumps(found.state())))
    assert bare == found
    with pytest.raises(ModelError, match="is not here"):
        bare(X)
    registry = LocalModelRegistry(tmp_path)
    assert equal(registry.load(registry.store(found))(X), op(X))
    with pytest.raises(ModelError, match="the operator's is"):
        bare.with_weights(export_operator(NNXModelOp(Own(1)), X))


def test_what_cannot_be_exported() -> None:
    """An operator on the host, and an example without rows, are refused."""

    @register("scene_host")
    class Host(Operator):
        def _apply(self, carrier: Any) -> Any:
            return np.sort(np.asarray(carrier))

    with pytest.raises(ModelError, match="cannot be traced"):
        export_operator(Host(), X)
    with pytest.raises(DataError, match="batch"):
        export_operator(NNXModelOp(Own()), np.float32(1))


def test_damage_and_other_files_are_told_apart(op: NNXModelOp, blob: bytes, tmp_path: Path) -> None:
    """A flipped bit, a bare weight file, text and nothing: each is said, and no program is run."""
    flipped = bytearray(blob)
    flipped[-3] ^= 1
    with pytest.raises(ModelError, match="damaged"):
        load_exported(bytes(flipped))
    with pytest.raises(ModelError, match="bare tensors"):
        load_exported(op.serialize_weights())
    with pytest.raises(ModelError, match="safetensors"):
        load_exported(b"text")
    with pytest.raises(TypeError, match="bytes"):
        load_exported(3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        load_exported(tmp_path / "none")
    with pytest.raises(ModelError, match="holds no exported operator"):
        load_exported(write_blob({"a": X}, {"format": "another/1"}))


def test_another_platform_is_refused() -> None:
    """A program for one platform only says so where it is loaded on another."""
    made = export_operator(NNXModelOp(nnx.Linear(3, 2, rngs=nnx.Rngs(0))), X, platforms=("cuda",))
    with pytest.raises(ModelError, match=r"made for cuda.*computes on cpu"):
        load_exported(made)
    both = export_operator(NNXModelOp(nnx.Linear(3, 2, rngs=nnx.Rngs(0))), X, platforms=("cpu", "cuda"))
    assert load_exported(both).signature["platforms"] == ("cpu", "cuda")


def test_without_the_extra_its_name_is_told(op: NNXModelOp, blob: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module imports; its first use says what to install."""
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for use in (lambda: export_operator(op, X), lambda: load_exported(blob)):
        with pytest.raises(ImportError, match=r"nnx_jax\[export\]"):
            use()
