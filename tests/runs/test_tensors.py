"""Arrays of a generation as one safetensors file: what comes back is what went in, and damage has a name."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from nnx_jax.core.errors import CheckpointError, ResumePointError
from nnx_jax.runs import arrays
from nnx_jax.runs.leaves import INDEX
from nnx_jax.runs.tensors import FILE, TensorWriter
from nnx_jax.spmd.world import World
from tests.runs.scenario import commit_epoch, open_store

VALUES = {
    "params/layers.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "params/turned": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
    "params/half": np.array([1.5, -2.0], np.float16),
    "params/brain": np.array([1.5, -2.0, np.nan], ml_dtypes.bfloat16),
    "counters/step": np.array(7, np.int64),
    "rng/torch": np.arange(256, dtype=np.uint8),
    "window/closed": np.array([True, False]),
    "model_state/empty": np.zeros((0, 3), np.int32),
}


def saved(directory: Path) -> Path:
    directory.mkdir()
    handle = TensorWriter().save(directory, VALUES)
    handle.wait()
    return directory


def test_arrays_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Names, shapes, dtypes and bits, scalars and empty arrays too; another reader of the format finds the names."""
    directory = saved(tmp_path / "one")
    back = arrays.restore(directory, VALUES)
    assert list(back) == list(VALUES)
    for name, value in VALUES.items():
        assert (back[name].dtype, back[name].shape) == (value.dtype, value.shape), name
        assert back[name].tobytes() == value.tobytes(), name
    assert sorted(load_file(directory / FILE)) == sorted(VALUES)


def test_arrays_may_change_once_save_returns(tmp_path: Path) -> None:
    value = np.zeros(3, np.float32)
    handle = TensorWriter().save(tmp_path, {"a": value})
    value += 1
    handle.wait()
    assert arrays.restore(tmp_path, {"a": value})["a"].tolist() == [0, 0, 0]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Another name, shape or dtype than stored, a cut file, a file of another content: each a ResumePointError."""
    directory = saved(tmp_path / "one")
    wanted = dict(VALUES)
    for other in (
        {"more": np.zeros(1)},
        {"params/half": np.zeros(2, np.float32)},
        {"rng/torch": np.zeros(3, np.uint8)},
    ):
        with pytest.raises(ResumePointError, match=f"leaf '{next(iter(other))}'"):
            arrays.restore(directory, {**wanted, **other})
    whole = (directory / FILE).read_bytes()
    for damaged in (whole[:-1], whole[:7], b"", b"\xff" * 64):
        (directory / FILE).write_bytes(damaged)
        with pytest.raises(ResumePointError, match="cannot be read"):
            arrays.restore(directory, wanted)
    other = tmp_path / "other"
    other.mkdir()
    TensorWriter().save(other, {"a": np.zeros(1)}).wait()
    shutil.copy(other / FILE, directory / FILE)
    with pytest.raises(ResumePointError, match="leaf 'a': stored float64"):
        arrays.restore(directory, wanted)


def test_objects_are_never_stored(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="objects are never stored"):
        TensorWriter().save(tmp_path, {"a": np.array([None])})


class _Elsewhere(World):
    """The process of rank 1 of 2, whose writer is rank 0."""

    rank = property(lambda self: 1)  # type: ignore[assignment]
    size = property(lambda self: 2)  # type: ignore[assignment]


def test_a_process_that_does_not_write_writes_nothing(tmp_path: Path) -> None:
    TensorWriter(world=_Elsewhere()).save(tmp_path, VALUES).wait()
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_generations_are_tensors(tmp_path: Path) -> None:
    """The commit protocol is the same: manifest with digests, verified before it is read, either way of storing."""
    with open_store(tmp_path, make_writer=TensorWriter) as store:
        commit_epoch(store, 1)
        store.committer.drain()
        found = store.committer.last
    assert found is not None
    with open_store(tmp_path, make_writer=TensorWriter) as store:
        assert store.point is not None
        names = set(store.point.manifest.files)
        assert {FILE, INDEX} <= names
        assert store.point.load_all().keys() == store.point.leaves.keys()
