"""Runs on streams: what a stopped run goes on with, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import NnxError
from nnx_jax.data import IterableDataset, StreamDataset
from nnx_jax.params.train import CheckpointParams
from tests.e2e.helpers import data_params, dataset, fit, stored
from tests.e2e.toys import KillAt, Killed

ROWS = dataset(23)


class DieAtEpoch(KillAt):
    """Dies when an epoch begins."""


def source(start: int) -> Iterator[Any]:
    return iter(list(ROWS)[start:])


def stream(rows: int | None = 23) -> StreamDataset:
    return StreamDataset(source_fn=source, data_id="23 rows", rows=rows, shuffle_buffer=7)


def trained(runs: Path, make: Any, *, dies: bool = False, **more: Any) -> Any:
    """Eleven updates of 4 rows, 3 an epoch, committed every 2; with `dies`, killed before the third epoch."""
    return fit(
        runs,
        data=data_params(train=make(), val=None, **more),
        checkpoint=CheckpointParams(every_n_steps=2, every_n_epochs=None),
        callbacks=[DieAtEpoch("on_epoch_begin", 3)] if dies else (),
        max_steps=11,
        steps_per_epoch=3,
        net={"norm": None, "output_dim": 3},
        scheduler={"kind": "constant"},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The arrays of a run that nobody stopped."""
    return stored(trained(tmp_path_factory.mktemp("whole"), stream))


@pytest.mark.parametrize("rows", [23, pytest.param(None, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_with_the_rows_that_are_due(
    tmp_path: Path, whole: dict[str, np.ndarray], rows: int | None
) -> None:
    """Weights and optimizer are those of the run that nobody stopped, bit for bit (pipekit:H18, pipekit:N16)."""
    with pytest.raises(Killed):
        trained(tmp_path, lambda: stream(rows), dies=True)
    again = stored(trained(tmp_path, lambda: stream(rows)))
    assert set(again) == set(whole)
    if rows is None:  # another data set to the hash, of the same rows
        assert all(again[name].shape == whole[name].shape for name in whole)
    for name in whole:
        assert again[name].tobytes() == whole[name].tobytes(), name


def test_a_stopped_run_does_not_begin_an_iterator_at_its_head(tmp_path: Path) -> None:
    """(pipekit:H18) one that has moved on, in the same process, is refused with what to do; no row is trained twice."""
    one = IterableDataset(source=iter(list(ROWS) * 4), data_id="one pass")
    with pytest.raises(Killed):
        trained(tmp_path, lambda: one, dies=True)
    with pytest.raises(NnxError, match="which was read before, and what was read is gone"):
        trained(tmp_path, lambda: one)


def test_a_stream_that_is_used_up_ends_the_run(tmp_path: Path) -> None:
    """(pipekit:G9) after 5 full batches of 23 rows, with the reason."""
    with pytest.raises(NnxError, match="is used up after 23 rows, and it can be read once only"):
        trained(tmp_path, lambda: IterableDataset(source=iter(ROWS), data_id="one pass"))


def test_an_epoch_of_a_stream_needs_a_length(tmp_path: Path) -> None:
    with pytest.raises(NnxError, match="steps_per_epoch"):
        fit(tmp_path, data=data_params(train=stream(), val=None), max_steps=3)
