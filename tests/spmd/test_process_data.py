"""Data in several processes: each hands over its own rows, the union is one process's, and a failure halts them all."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from nnx_jax.data import ArrayDataset
from nnx_jax.spmd.world import ALONE
from tests.processes import results
from tests.spmd import process_data as work
from tests.spmd.toy import by_hand, columns

TIMEOUT = 60
"""Bound of every wait in the group, seconds."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes of two devices each saw."""
    given = {"runs": str(tmp_path_factory.mktemp("runs"))}
    function = "tests.spmd.process_data:everything"
    return results(function, 2, devices=2, args=given, timeout=280, timeout_seconds=TIMEOUT)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same runs on one device."""
    return work.configured(ALONE, {})


@pytest.mark.parametrize("run", ["step pad 1", "span drop 4", "step keep 4", "not in memory"])
def test_a_configuration_in_two_processes(seen: Any, alone: Any, run: str) -> None:
    """Weights, every record and the validation of its 13 rows are those of one process on one device, bit for bit."""
    assert seen[0]["configured"][run] == seen[1]["configured"][run] == alone[run]
    if run == "step pad 1":
        assert alone[run]["w"] == by_hand(1).astype(np.float32).tolist()


def test_every_device_holds_its_rows(seen: Any) -> None:
    """On any order of the devices, filled up, one batch or several."""
    for each in seen:
        assert len(each["places"]) == 2 * 4 * 6
        assert all(each["places"])


def test_processes_with_loaders_of_their_own(seen: Any) -> None:
    """Batches of both, in rank order, train like one process on the union; the validation scores each row once."""
    rows = ArrayDataset(columns())
    whole = work.union(rows, 4, 2)
    val = [{name: column[at : at + 6] for name, column in columns().items()} for at in range(0, 36, 6)]
    one = work.passed(work.engine_of(ALONE, train=whole, val=val, mesh={}))
    for each in seen:
        assert each["dealt"]["count"] == 36
        np.testing.assert_allclose(each["dealt"]["w"], one["w"], rtol=1e-6)
        np.testing.assert_allclose(each["dealt"]["loss"], one["loss"], rtol=1e-6)
        np.testing.assert_allclose(each["dealt"]["val"]["loss"], one["val"]["loss"], rtol=1e-6)
    assert seen[0]["dealt"] == seen[1]["dealt"]


def test_targets_that_do_not_count(seen: Any) -> None:
    """nnx:B201 nnx:B204 Eleven rows, three ignored, batches of two, windows of two: the union's weights and records.

    The targets of the second process's second batch are all ignored, while the first process's are not.
    """
    whole = work.union(work.eleven(), 2, 2, seed=18)
    valid = [(batch["y"] >= 0) & (batch["mask"] > 0) for batch in whole]
    assert valid[1].tolist() == [True, True, False, False]
    one = work.ignoring(ALONE, whole, {})
    for each in seen:
        np.testing.assert_allclose(each["ignored"]["w"], one["w"], rtol=1e-6)
        np.testing.assert_allclose(each["ignored"]["loss"], one["loss"], rtol=1e-6)
        assert len(one["loss"]) == 2


def test_a_loss_that_is_a_sum(seen: Any) -> None:
    """nnx:B206 nnx:S56 An update is made of the sum over all processes' rows, as one process would add them up."""
    whole = work.union(ArrayDataset(columns()), 4, 2)
    one = work.passed(work.engine_of(ALONE, train=whole, loss=work.summed, rate=0.0625, window=2, mesh={}))
    for each in seen:
        np.testing.assert_allclose(each["summed"]["w"], one["w"], rtol=1e-6)
        np.testing.assert_allclose(each["summed"]["loss"], one["loss"], rtol=1e-6)


def test_windows_in_which_nothing_counts(seen: Any) -> None:
    """nnx:B205 nnx:S55 A loss that knows what counts skips them everywhere; a mean of one's own, 0/0, ends both."""
    for each in seen:
        known, own = each["nothing counts"]["known"], each["nothing counts"]["own mean"]
        assert known["w"] == [[0.0, 0.0]] * 3
        assert all(np.isnan(known["loss"]))
        assert "FloatingPointError" in own["families"]
        assert own["updates"] == 0


@pytest.mark.parametrize("kind", work.KINDS)
def test_a_row_that_one_process_cannot_read(seen: Any, kind: str) -> None:
    """nnx:B232 In every kind of step the process that failed has its own error, and the other halts at that update."""
    failing = 0 if kind.startswith("the first") else 1
    own, other = (seen[rank]["lost"][kind] for rank in (failing, 1 - failing))
    assert own["told"].startswith("disk error at row")
    assert "OSError" in own["families"]
    assert other["halted"]
    assert "one of the processes could not read its rows of microbatch" in other["told"]
    before = {"windows": 0, "a short batch that is not cut": 4}.get(kind, 1)
    assert own["updates"] == other["updates"] == before
    assert max(own["seconds"], other["seconds"]) < TIMEOUT


def test_a_run_with_such_a_row(seen: Any) -> None:
    """nnx:B232 The call ends on both, with the update before committed; with the row mended the run goes on."""
    own, other = (seen[rank]["runs"][0] for rank in (1, 0))
    assert own["told"] == "disk error at row 13"
    assert "DistributedFailure" in other["families"]
    assert "rank 1 failed at 'records (epoch 0, update 1)': OSError: disk error at row 13" in other["told"]
    assert (own["last"], other["last"]) == (1, 1)
    for each in seen:
        assert each["runs"][1] == {"w": by_hand(1).astype(np.float32).tolist(), "steps": 5}


def test_validation_rows_that_one_process_cannot_read(seen: Any) -> None:
    """nnx:B232 No value comes out on any of them."""
    assert "disk error at row 13" in seen[1]["lost validation"]["told"]
    assert seen[0]["lost validation"]["halted"]
    assert not any("val" in each["lost validation"] for each in seen)


def test_a_batch_of_another_shape(seen: Any) -> None:
    """It would make one process compute something else than the others wait for; it is told by what it has."""
    assert "batch 1 of epoch 0 has" in seen[1]["odd shape"]["told"]
    assert "x float32[4, 2]" in seen[1]["odd shape"]["told"]
    assert seen[0]["odd shape"]["halted"]


def test_a_row_that_is_not_a_number(seen: Any) -> None:
    """nnx:B207 nnx:S54 Both raise FloatingPointError before any update, though only one has the row."""
    for each in seen:
        assert "FloatingPointError" in each["nan"]["families"]
        assert each["nan"]["updates"] == 0


def test_a_label_that_is_no_class(seen: Any) -> None:
    """nnx:B208 Both raise promptly, with the reason."""
    for each in seen:
        assert "microbatch 0 has 1 labels that no class has" in each["label"]["told"]
        assert "ValueError" in each["label"]["families"]
        assert each["label"]["seconds"] < TIMEOUT / 2


def test_each_validation_row_counts_once(seen: Any) -> None:
    """case:G02 Five rows, of which one is right, in two processes: 0.2 of five, whatever fills the batches up."""
    for each in seen:
        assert each["five rows"]["val"]["accuracy"] == pytest.approx(0.2)
        assert each["five rows"]["count"] == 5


def test_a_process_without_a_validation_row(seen: Any) -> None:
    """nnx:B192 One row: both processes have its score, so both decide alike."""
    assert seen[0]["one row"] == seen[1]["one row"]
    assert (seen[0]["one row"]["val"]["accuracy"], seen[0]["one row"]["count"]) == (1.0, 1)


def test_the_number_of_processes_moves_no_schedule(seen: Any) -> None:
    """case:B02 Thirty updates at rate 1, a tenth of it after twenty: the weight is 21 in two processes."""
    for each in seen:
        assert each["rising"]["w"] == pytest.approx(21.0, rel=1e-6)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("plain", r"train_loader gives each of the 2 processes all its batches; .*distributed\.train_loader"),
        ("plain validation", r"val_loader gives each .*distributed\.validation_loader"),
        ("validation to train on", "train_loader was made by validation_loader"),
        ("training to validate on", "val_loader was made by train_loader, which repeats"),
        ("of another group", r"train_loader was dealt to process \d of 3; this is process \d of 2"),
        ("equal rows", r"rows are split into 1 parts .* loaders of every process's own rows need as many parts"),
        ("alone", r"train_loader was dealt to process \d of 2; this is process 0 of 1"),
    ],
)
def test_loaders_that_are_not_dealt_to_this_group(seen: Any, what: str, told: str) -> None:
    """Each is a ValueError in every process, before anything is compiled."""
    for each in seen:
        assert "ValueError" in each["refused"][what]["families"]
        assert re.search(told, each["refused"][what]["told"])


def test_unequal_numbers_of_batches(seen: Any) -> None:
    """nnx:B199 nnx:S51 case:G01 Both raise DistributedFailure before the epoch, with the numbers."""
    for each in seen:
        assert "DistributedFailure" in each["unequal"]["families"]
        assert "rank 0 has 5, rank 1 has 4" in each["unequal"]["told"]


def test_batches_that_do_not_split_over_the_devices_of_a_process(seen: Any) -> None:
    """Three rows on two devices are computed as four, with a word about it; four rows are as good as any."""
    for each in seen:
        ((told,), nothing) = each["said"]
        assert "batches of 3 rows are computed as 4 on 2 devices of each process, 1 of them of weight 0" in told
        assert nothing == []
