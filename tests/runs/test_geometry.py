"""Whether a checkpoint may be restored on these processes and devices: pure cases, with the words of the refusal."""

from __future__ import annotations

from typing import Any

import pytest

from nnx_jax.core.errors import ResumePointError
from nnx_jax.runs.geometry import check_geometry

TWO = {"processes": 2, "mesh": {"data": 4}}
ROWS = {"seed": 0, "batch_size": 8}
RULES = [["*.kernel", [None, "tensor"]], ["*", [["data", "fsdp"]]]]


@pytest.mark.parametrize(
    "stored, now",
    [
        (None, None),
        (TWO, {"processes": 2, "mesh": {"data": 4, "fsdp": 1}}),  # an axis of one device splits nothing
        ({**TWO, "partition": ROWS}, {**TWO, "partition": dict(ROWS)}),
        ({**TWO, "partition": ROWS}, TWO),  # nobody describes it now
        ({**TWO, "sharding": RULES}, {**TWO, "sharding": list(RULES)}),
        (TWO, {**TWO, "sharding": RULES}),  # an older one, which did not note them
    ],
)
def test_the_same(stored: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """The same processes and mesh."""
    check_geometry(stored, now)


REFUSED = [
    (TWO, None, ["2 processes, mesh {data: 4}", "1 process, mesh {}", "start 2 processes", "elastic: true"]),
    (None, TWO, ["made on 1 process, mesh {}", "start 1 process;"]),
    (TWO, {"processes": 2, "mesh": {"data": 2}}, ["use mesh {data: 4}", "elastic: true"]),
    (TWO, {"processes": 3, "mesh": {"data": 3}}, ["3 processes, mesh {data: 3}"]),
    (TWO, {"processes": 2, "mesh": {"fsdp": 4}}, ["mesh {fsdp: 4}"]),
    (None, {"processes": 1, "mesh": {"data": 4}}, ["1 process, mesh {}", "mesh {data: 4}"]),
    ({"processes": 1, "mesh": {"data": 4}}, {"processes": 1, "mesh": {"data": 2}}, ["use mesh {data: 4}"]),
    (
        {**TWO, "sharding": RULES},
        {**TWO, "sharding": [["*.kernel", ["tensor"]]]},
        ["use sharding {'*.kernel': [null, tensor], '*': [[data, fsdp]]}", "data: 4}, sharding {'*.kernel': [tensor]}"],
    ),
    ({**TWO, "sharding": RULES}, {**TWO, "sharding": RULES[::-1]}, ["use sharding", "elastic: true"]),
    ({**TWO, "sharding": []}, {**TWO, "sharding": RULES}, ["use sharding {};"]),
]


@pytest.mark.parametrize("stored, now, words", REFUSED)
def test_another_geometry_is_refused(stored: Any, now: Any, words: list[str]) -> None:
    """Another number of processes, or another mesh of several, with both geometries and the ways on."""
    with pytest.raises(ResumePointError, match="Nothing was restored") as caught:
        check_geometry(stored, now, what="LAST of run 'a'")
    assert isinstance(caught.value, ValueError)
    for word in [*words, "LAST of run 'a' was made on", "resume_mode: weights_only"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("stored, now, words", REFUSED)
def test_an_elastic_run_goes_on_anywhere(stored: Any, now: Any, words: list[str]) -> None:
    """What is asked for with elastic: true."""
    check_geometry(stored, now, elastic=True)


@pytest.mark.parametrize("elastic", [False, True])
def test_rows_dealt_otherwise(elastic: bool) -> None:
    """Other rows are another run, elastic or not; the message names what differs and offers no elastic."""
    then, now = {**TWO, "partition": ROWS}, {**TWO, "partition": {**ROWS, "seed": 1}}
    with pytest.raises(ResumePointError, match=r"deal the rows as before \(seed: 0, not 1\)") as caught:
        check_geometry(then, now, elastic=elastic)
    assert "elastic" not in str(caught.value)
