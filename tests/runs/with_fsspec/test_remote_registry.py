"""A registry at a URI keeps what one in a directory keeps, without a rename to rely on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from nnx_jax.core.operator import Operator
from nnx_jax.core.registry import register
from nnx_jax.runs.registry import RemoteModelRegistry


@register("remote_shifted")
class Shifted(Operator):
    """An operator with a weight blob."""

    by: float = 0.0

    def _apply(self, x: Any) -> Any:
        return x + self.by

    def serialize_weights(self) -> bytes:
        return b"weights"

    def with_weights(self, blob: bytes) -> Shifted:
        assert blob == b"weights"
        return self


@pytest.fixture(name="remote")
def _remote() -> Iterator[RemoteModelRegistry]:
    yield RemoteModelRegistry("memory://nnx_jax_models")
    system = fsspec.filesystem("memory")
    if system.exists("/nnx_jax_models"):
        system.rm("/nnx_jax_models", recursive=True)


def test_a_remote_registry_does_the_same(remote: RemoteModelRegistry) -> None:
    assert remote.list() == ()
    trained = Shifted(by=2.0)
    digest = remote.store(trained, name="best", tags=["good"])
    assert remote.store(trained, tags={"n": "1"}) == digest
    assert remote.list(tags=["good", "n"]) == (digest,)
    assert remote.load("best")(1.0) == 3.0
    assert remote.load_weights("best") == b"weights"
    with pytest.raises(KeyError):
        remote.load("worst")
    with pytest.raises(FileExistsError):
        remote.store(Shifted(), name="best")


def test_a_remote_model_without_metadata_is_none(remote: RemoteModelRegistry) -> None:
    digest = remote.store(Shifted(by=5.0))
    system, path = remote._place(digest, "metadata.json")
    system.rm(path)
    assert remote.list() == ()
    with pytest.raises(KeyError):
        remote.load(digest)
    assert remote.store(Shifted(by=5.0)) == digest
    assert remote.load(digest) == Shifted(by=5.0)
