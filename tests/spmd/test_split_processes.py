"""Two real processes of two devices each train models split over all four: the bits of one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import results
from tests.spmd.process_split import RUNS, trained


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process told."""
    folder = tmp_path_factory.mktemp("both")
    return results("tests.spmd.process_split:everything", 2, devices=2, args={"folder": str(folder)}, timeout=280)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run on one device of this process."""
    return trained(tmp_path_factory.mktemp("alone"), None)


@pytest.mark.parametrize("mesh", RUNS)
def test_the_run_of_one_device(both: Any, alone: dict[str, Any], mesh: str) -> None:
    """pipekit:J12: stored arrays bit for bit, losses of training and validation, the model and its averages at home."""
    first, second = (each[mesh] for each in both)
    assert first["stored"] == second["stored"] == alone["stored"]
    assert first["home"] == second["home"] == alone["home"]
    assert first["records"] == second["records"]
    for row, other in zip(first["records"], alone["records"], strict=True):
        assert row["train_loss"] == other["train_loss"]
        assert row["val_loss"] == (other["val_loss"] and pytest.approx(other["val_loss"], rel=1e-6))


def test_weights_are_on_each_processs_own_device(both: Any) -> None:
    for each in both:
        for mesh in RUNS:
            assert each[mesh]["devices"] == [each["local"]] * 3


def test_values_come_to_their_places_and_back(both: Any) -> None:
    """pipekit:J11: host values and local arrays without an exchange; each process has the parts of its devices."""
    first, second = (each["places"] for each in both)
    assert first["parts"] == second["parts"] == [2, 2]
    assert (first["rows"], second["rows"]) == ([0, 6], [12, 18])
    for each in (first, second):
        assert each["kept"]
        assert each["back"] == [True, True, True]
        assert each["scalar"] == 7
