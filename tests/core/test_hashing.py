"""Equal content, equal hash; anything that changes a number changes the hash."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nnx_jax.core.errors import ConfigError, DataError
from nnx_jax.core.hashing import content_hash, hash_array, hash_arrays


def test_content_hash_is_sha256_of_canonical_json() -> None:
    """Golden value: moving it would rename every run on every disk."""
    assert content_hash({"b": 1.0, "a": [1, None]}) == hashlib.sha256(b'{"a":[1,null],"b":1.0}').hexdigest()
    assert content_hash({"b": 1.0, "a": [1, None]}) == content_hash({"a": (1, None), "b": 1.0})
    assert content_hash({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize(
    "pair", [(1, 1.0), (1, True), ("1", 1), (None, "null"), ([], {}), ("a", ["a"]), ({"a": None}, {})]
)
def test_different_values_differ(pair: tuple[object, object]) -> None:
    assert content_hash(pair[0]) != content_hash(pair[1])


def test_content_hash_refuses_non_finite() -> None:
    with pytest.raises(ConfigError, match="numbers must be finite"):
        content_hash({"lr": float("nan")})


def test_hash_array_by_hand() -> None:
    """Eight bytes of head length, the head, then the little-endian bytes."""
    head = b'["float32",[2,1]]'
    data = (17).to_bytes(8, "little") + head + np.array([1.5, -2.0], "<f4").tobytes()
    assert hash_array(np.array([[1.5], [-2.0]], np.float32)) == hashlib.sha256(data).hexdigest()


def test_layout_does_not_count_but_content_does() -> None:
    a = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert hash_array(a.T) == hash_array(a.T.copy()) != hash_array(a)
    assert hash_array(a[:, ::-1]) == hash_array(a[:, ::-1].copy())
    assert hash_array(a.astype(">i4")) == hash_array(a)
    assert (
        len({hash_array(x) for x in (a, a.reshape(3, 2), a.astype(np.int64), a.astype(np.float32), a.view(np.uint32))})
        == 5
    )


def test_edge_shapes() -> None:
    """Empty arrays of different shapes differ, and a scalar is not a vector of one."""
    hashes = [hash_array(np.zeros(shape)) for shape in ((), (1,), (0,), (0, 3), (3, 0))]
    assert len(set(hashes)) == 5
    assert hash_array(np.float32(2)) == hash_array(np.array(2, np.float32))  # type: ignore[arg-type]


def test_text_and_bool_arrays() -> None:
    assert hash_array(np.array(["a", "bc"])) != hash_array(np.array(["a", "bd"]))
    assert hash_array(np.array([True])) != hash_array(np.array([1], np.uint8))


def test_object_and_structured_arrays_are_refused() -> None:
    with pytest.raises(DataError, match="dtype object"):
        hash_array(np.array([None]))
    with pytest.raises(DataError, match="cannot hash an array"):
        hash_array(np.zeros(2, [("a", "i4")]))


def test_hash_arrays_ignores_order_but_not_names() -> None:
    x, y = np.zeros(2), np.ones(2)
    assert hash_arrays({"x": x, "y": y}) == hash_arrays({"y": y, "x": x})
    assert hash_arrays({"x": x, "y": y}) != hash_arrays({"x": y, "y": x})


@given(
    hnp.arrays(hnp.integer_dtypes() | hnp.floating_dtypes(), hnp.array_shapes(min_dims=1, max_dims=3, max_side=4)),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_one_changed_bit_changes_the_hash(array: np.ndarray, data: st.DataObject) -> None:
    raw = bytearray(array.tobytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changed = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
    assert hash_array(changed) != hash_array(array)
