"""Values without a column of their own: put into one as text, and taken out again."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nnx_jax.runs.extra import EXTRA, pack, unpack

COLUMNS = ("kind", "val_loss", EXTRA)


@pytest.mark.parametrize(
    "more",
    [{}, {"val_a": 1.5}, {"val_b": -math.inf, "val_a": 2.0}, {"val_extra": 3.0}, {"val_extra": 1.0, "val_ü": 0.0}],
)
def test_values_come_back_whatever_their_names(more: dict[str, Any]) -> None:
    """A value that is named like the column itself, too."""
    row = {"kind": "epoch", "val_loss": 0.5, **more}
    stored = pack(row, COLUMNS)
    assert set(stored) <= set(COLUMNS)
    assert unpack({name: stored.get(name) for name in COLUMNS}) == row


def test_rows_without_the_column_are_as_they_are() -> None:
    row = {"kind": "epoch", "val_loss": 0.5}
    assert pack(row, ("kind", "val_loss")) == unpack(row) == row
