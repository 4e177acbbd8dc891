"""Arrays: exact round trips, donation, shardings, and every mismatch found before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnx_jax.core.errors import CheckpointError, ResumePointError
from nnx_jax.runs import arrays
from nnx_jax.runs.arrays import Leaf


def save(directory: Path, values: dict[str, Any]) -> Path:
    directory.mkdir()
    writer = arrays.ArrayWriter(60)
    try:
        writer.save(directory, values).wait()
    finally:
        writer.close()
    return directory


def like(values: dict[str, Any]) -> dict[str, Any]:
    return {name: (value.shape, value.dtype) for name, value in values.items()}


def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Dtypes, scalars, empty arrays, NaN payloads, and names no file system would take."""
    values: dict[str, Any] = {
        "a/b.c": np.asarray([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "../../etc/passwd": np.arange(4, dtype=np.int64),
        "": np.asarray(2**53 + 1, np.int64),
        "ключ\0": np.asarray([True, False]),
        "bf16": jnp.asarray([[1.001, 2.0]], jnp.bfloat16),
        "f64": np.asarray([0.1], np.float64),
        "u32": jnp.asarray([2**32 - 1], jnp.uint32),
        "empty": jnp.zeros((0, 3), jnp.float16),
        "scalar": np.float32(3.5),
        "i8": np.asarray([-128], np.int8),
    }
    found = arrays.restore(save(tmp_path / "g", values), like(values))
    assert list(found) == list(values)
    for name, value in values.items():
        expected = np.asarray(value)
        assert isinstance(found[name], np.ndarray)
        assert (found[name].shape, found[name].dtype) == (expected.shape, expected.dtype), name
        assert found[name].tobytes() == expected.tobytes(), name
    assert sorted(path.name for path in (tmp_path / "g").iterdir()) == ["arrays.json", "state"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g"]


def test_nothing_but_empty_arrays(tmp_path: Path) -> None:
    values = {"e": np.zeros((2, 0), np.float32)}
    assert arrays.restore(save(tmp_path / "g", values), like(values))["e"].shape == (2, 0)


def test_donated_buffers_do_not_reach_the_file(tmp_path: Path) -> None:
    """case:I07 16 MB of zeros saved while a donated step adds one twenty times: the file holds zeros."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jnp.zeros(4 * 2**20, jnp.float32)
    state = step(step(state) - 2)
    assert float(state[0]) == 0.0
    host = np.zeros(1000)
    (tmp_path / "g").mkdir()
    writer = arrays.ArrayWriter(60)
    handle = writer.save(tmp_path / "g", {"device": state, "host": host})
    for _ in range(20):
        state = step(state)
    host += 5
    handle.wait()
    writer.close()
    found = arrays.restore(tmp_path / "g", {"device": (state.shape, state.dtype), "host": ((1000,), "float64")})
    assert not found["device"].any()
    assert not found["host"].any()
    assert float(state[0]) == 20.0


@pytest.mark.parametrize(("devices", "target"), [(4, 1), (1, 4), (4, 0), (2, 4)])
def test_any_number_of_devices(tmp_path: Path, devices: int, target: int) -> None:
    """case:I08 nvalchemi:125 saved over `devices`, loaded on another number, or as numpy (0): the same values."""

    def sharding(count: int) -> NamedSharding:
        return NamedSharding(Mesh(np.asarray(jax.devices()[:count]), ("x",)), PartitionSpec("x"))

    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    directory = save(tmp_path / "g", {"w": jax.device_put(value, sharding(devices))})
    wanted = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding(target) if target else None)
    found = arrays.restore(directory, {"w": wanted})["w"]
    np.testing.assert_array_equal(np.asarray(found), value)
    if target:
        assert found.sharding == wanted.sharding


CASTS = [
    ("int32", np.asarray(16777217, np.int32), ((), "float32")),
    ("float32", np.asarray(1.001, np.float32), ((), ml_dtypes.bfloat16)),
    ("float32", np.zeros((3,), np.float32), ((4,), np.float32)),
    ("float32", np.zeros((3, 1), np.float32), ((3,), np.float32)),
]


@pytest.mark.parametrize(("stored", "value", "wanted"), CASTS)
def test_nothing_is_cast_or_reshaped(tmp_path: Path, stored: str, value: np.ndarray, wanted: Any) -> None:
    """case:I09 an error that names the leaf, the stored and the wanted type; no 16777216.0, no 1.0."""
    directory = save(tmp_path / "g", {"opt/count": value})
    message = rf"leaf 'opt/count': stored {stored}\[.*, this run needs .*nothing is cast"
    with pytest.raises(ResumePointError, match=message):
        arrays.restore(directory, {"opt/count": wanted})


def test_the_first_differing_leaf_is_named_with_both_sides(tmp_path: Path) -> None:
    """nnx:B129 case:I10 a renamed layer and a missing moment: first path in order, both sides, and how many more."""
    directory = save(tmp_path / "g", {"a": np.zeros(2), "old.kernel": np.zeros(3)})
    message = r"'new\.kernel': stored nothing, this run needs float64\[3\] \(and 1 more\)"
    with pytest.raises(ResumePointError, match=message):
        arrays.restore(directory, {"a": ((2,), "float64"), "new.kernel": ((3,), "float64")})


def test_an_index_that_lies_is_caught_before_allocation(tmp_path: Path) -> None:
    """H6: arrays.json promises what the caller expects, the array files hold something else."""
    directory = save(tmp_path / "g", {"w": np.zeros((3,), np.float32)})
    index = directory / "arrays.json"
    index.write_bytes(index.read_bytes().replace(b"[3]", b"[1000000000000000]"))
    assert arrays.read_index(directory) == {"w": Leaf((10**15,), "float32")}
    message = r"state: leaf 'a0': stored float32\[3\], this run needs float32\[10{15}\]"
    with pytest.raises(ResumePointError, match=message):
        arrays.restore(directory, {"w": ((10**15,), "float32")})


@pytest.mark.parametrize("value", [3.0, "text", None, np.asarray([object()]), [1, 2]])
def test_only_plain_arrays_are_stored(tmp_path: Path, value: Any) -> None:
    """Objects would need pickle; Python numbers have no dtype."""
    with pytest.raises(CheckpointError, match="leaf 'x' cannot be stored"):
        save(tmp_path / "g", {"x": value})


def test_typed_keys_are_refused_by_name(tmp_path: Path) -> None:
    """A jax.random.key array is stored as its words (`key_data`), which is what a restore can check."""
    with pytest.raises(CheckpointError, match="leaf 'rng' cannot be stored.*key<fry>"):
        save(tmp_path / "g", {"rng": jax.random.key(0)})


def test_bytes_of_a_leaf() -> None:
    assert Leaf((3, 4), "bfloat16").nbytes == 24
    assert str(Leaf((3, 4), "bfloat16")) == "bfloat16[3,4]"
