"""Several real processes train one model through the public API: parity, who does what, refusals, failures, resume.

The processes are on one machine, with one or two virtual CPU devices each; they stand in for hosts.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e import group_runs
from tests.processes import results

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
"""Adam over a few updates: the order of a float32 sum differs, and Adam divides by its square root."""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    made, run = group_runs.train(folder / "runs", call={"mesh": {"data": 1}})
    return {**group_runs.facts(made, run), "folder": folder, "net": type(made.net).__name__}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("lives")
    return results("tests.e2e.group_runs:lifecycle", 2, args={"folder": str(folder)}, timeout=300), folder


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("refusals")
    return results("tests.e2e.group_runs:refused", 2, args={"folder": str(folder)}, timeout=300), folder


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted["weights"].items():
        np.testing.assert_allclose(found["weights"][name], value, err_msg=name, **TOLERANCE)
    assert len(found["records"]) == len(wanted["records"])
    for row, want in zip(found["records"], wanted["records"], strict=True):
        for name, value in want.items():
            if isinstance(value, float):
                np.testing.assert_allclose(row[name], value, err_msg=name, **TOLERANCE)
            else:
                assert row[name] == value, name


def test_two_processes_make_the_run_of_one(lives: Any, one: dict[str, Any]) -> None:
    """nnx:B202, nnx:B213, nnx:S57, nnx:S58, nnx:S59, nnx:S61, nnx:S63, nnx:S69

    Windows of two microbatches, clipped. Same id, same records on all ranks exactly, the numbers of one process to the
    rounding of a sum in another order,
    and one run directory.
    """
    (first, second), folder = lives
    assert first["who"]["id"] == second["who"]["id"] == one["id"]
    assert first["who"]["records"] == second["who"]["records"]
    assert first["who"]["weights"] == second["who"]["weights"]
    same(first["who"], one)
    assert first["who"]["net"] == second["who"]["net"] == one["net"]  # nothing is wrapped around the network
    made = [path.name for path in (folder / "who").iterdir() if len(path.name) == 16]
    assert made == [one["id"]]


def test_callbacks_run_where_they_say(lives: Any) -> None:
    """nnx:B222, nnx:S80: a plain function runs on the writer alone, as "writer" callbacks do; "all" runs everywhere."""
    assert lives[0][0]["who"]["rates"] == lives[0][1]["who"]["rates"] != []
    (first, second), _ = lives
    assert first["who"]["everywhere"] == second["who"]["everywhere"] != []
    assert [call for call in first["who"]["writer"] if call.startswith("function")] != []
    assert "on_epoch_end" in first["who"]["writer"]
    assert second["who"]["writer"] == []


def test_updates_are_watched_on_the_writer_alone(lives: Any) -> None:
    """A callback that only the writer makes sees each update, and the others go step by step with it."""
    first, second = (life["each"] for life in lives[0])
    assert first["updates"] == [list(range(1, first["steps"] + 1))] != [[]]
    assert second["updates"] == []


def test_hooks_know_their_process(lives: Any) -> None:
    """Whatever a hook asks for on one process all do; each has a file of its own, whoever writes the run."""
    for process, life in enumerate(lives[0]):
        hooks = life["hooks"]
        assert set(hooks["ranks"]) == {process}
        assert hooks["files"] == ["times.csv", "times.rank_1.csv"]
        assert hooks["checkpoints"] == ["step_2"]
        assert {"LAST", "step_2", "third"} <= set(hooks["pointers"])


def test_one_process_stops_all(lives: Any) -> None:
    """nnx:B210: `should_stop` on rank 1 ends the run everywhere, after that epoch."""
    for life in lives[0]:
        assert life["stop"]["epochs"] == 1
        assert life["stop"]["calls"].count("on_epoch_end") == 1


def test_monitor_plateau_and_patience_agree(lives: Any) -> None:
    """nnx:B209, nnx:S62: rates, the epoch it stops at and BEST."""
    first, second = (life["patience"] for life in lives[0])
    assert first == second
    assert len(first["rates"]) >= 2


def test_another_rank_may_write(lives: Any) -> None:
    """nnx:B214, nnx:B221: rank 1 writes, what only the writer makes is made there once, both return the same run."""
    first, second = (life["writer1"] for life in lives[0])
    assert (first["built"], second["built"]) == ([], [1])
    assert (first["id"], first["records"], first["status"]) == (second["id"], second["records"], "finished")


def test_a_resume_continues_bit_for_bit(lives: Any) -> None:
    """nnx:B224: two epochs and a resume are three epochs: weights and records, on every rank."""
    for life in lives[0]:
        assert life["resumed"]["weights"] == life["whole"]["weights"]
        tail = [row for row in life["whole"]["records"] if row["epoch"] == 2]
        assert [row for row in life["resumed"]["records"] if row["epoch"] == 2] == tail != []


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("beyond")
    found = results("tests.e2e.group_runs:beyond", 2, args={"folder": str(folder / "two")}, timeout=300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return found, group_runs.beyond(str(folder / "one"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["batch norm, dropout", "objective", "own step and validation", "journal", "two optimizers"]
)
def test_what_others_refuse_works(beyond: Any, case: str) -> None:
    """BatchNorm and dropout draw on the whole batch; objectives, own steps, journals and several optimizers work."""
    (first, second), one = beyond
    assert first[case] == second[case]
    assert first[case]["id"] == one[case]["id"]
    same(first[case], one[case])
    assert first[case]["status"] == "finished"


REFUSALS = {
    "without DDP": ("ProcessGroupError", "distributed=DDP()"),
    "Trainer without DDP": ("ProcessGroupError", "Trainer.train"),
    "plan": ("ProcessGroupError", "one of 2"),
    "search": ("ProcessGroupError", "one of 2"),
    "undeclared": ("ConfigError", "Undeclared does not say where it runs"),
    "writes when made": ("ConfigError", "writer_only"),
    "state on the writer": ("ConfigError", "StatefulOnWriter runs on the writer alone and has state"),
    "another net on the writer": ("ConfigError", "runs on the writer alone and changes the network"),
    "another seed": ("ConfigError", "rank 1 has"),
    "more epochs": ("ConfigError", "n_epochs: rank 0 has 2, rank 1 has 3"),
    "plain list": ("DataError", "train_loader"),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_refused_on_every_process(refusals: Any, case: str) -> None:
    """nnx:B200, nnx:B219, nnx:B220, nnx:B229, nnx:B230, nnx:S83, nnx:S88

    The same class on both, in time, and nothing is written.
    """
    kind, words = REFUSALS[case]
    for told in refusals[0]:
        assert told[case]["type"] == kind, told[case]
        assert words in told[case]["text"]
        assert told[case]["seconds"] < 30
    assert all(told["made"] == [] for told in refusals[0])  # no factory was called
    assert all(told["nothing written"] for told in refusals[0])


@pytest.mark.parametrize("at", ["on_train_begin", "on_epoch_begin", "on_validation", "on_epoch_end", "on_train_end"])
def test_a_failing_callback_fails_everywhere(refusals: Any, at: str) -> None:
    """nnx:B218, nnx:S76

    Rank 1 raises its own error, rank 0 a DistributedFailure that names rank, stage, class and text.
    """
    first, second = (told[f"rank 1 fails {at}"] for told in refusals[0])
    assert second["type"] == "OSError"
    assert first["type"] == "DistributedFailure"
    for word in ("rank 1", "callbacks", "OSError", "no space on rank 1"):
        assert word in first["text"]
    assert max(first["seconds"], second["seconds"]) < 30


@pytest.mark.parametrize("at", ["enter", "call"])
def test_a_failing_hook_fails_everywhere(refusals: Any, at: str) -> None:
    """Entered before the run begins or called inside an epoch: nobody waits for the process that failed."""
    first, second = (told[f"hook fails: {at}"] for told in refusals[0])
    assert (first["type"], second["type"]) == ("DistributedFailure", "OSError")
    assert "rank 1" in first["text"]
    assert "no space on rank 1" in first["text"]
    assert max(first["seconds"], second["seconds"]) < 30


def test_parts_of_a_split_model_are_asked_for_by_all(refusals: Any) -> None:
    """A callback of the writer alone would wait for them in vain, so it is told; where it has all, it may ask."""
    first, second = (told["writer reads a split model"] for told in refusals[0])
    assert first["type"] == second["type"] == "DistributedFailure"
    assert "ctx.sync(), which every process must call" in second["text"] + first["text"]
    assert max(first["seconds"], second["seconds"]) < 30
    (everywhere, writer), (there, nothing) = (told["read"] for told in refusals[0])
    assert everywhere == there == pytest.approx(writer, rel=1e-4)
    assert len(everywhere) == 1
    assert nothing == []


def test_a_failing_callback_of_the_writer(refusals: Any) -> None:
    """nnx:B217"""
    first, second = (told["writer fails"] for told in refusals[0])
    assert (first["type"], second["type"]) == ("OSError", "DistributedFailure")
    assert "rank 0" in second["text"]


def test_a_finished_run_is_left_alone(refusals: Any) -> None:
    """nnx:B215: the writer finds the run finished; the others learn it from it."""
    first, second = (told["exists"] for told in refusals[0])
    assert "FileExistsError" in first["kinds"]
    assert "finished" in second["text"]


def test_a_run_after_refusals_works(refusals: Any, one: dict[str, Any]) -> None:
    """A refusal leaves the group as it was."""
    same(refusals[0][0]["works"], one)


def test_another_number_of_processes_is_refused(lives: Any, one: dict[str, Any]) -> None:
    """nnx:B226, nnx:B225: neither way is a stateful resume taken, both ways the weights are."""
    folder = lives[1] / "who"
    source = lives[0][0]["who"]["id"]
    told = group_runs.error(
        lambda: group_runs.train(folder, epochs=3, resume_from_run_id=source, call={"mesh": {"data": 1}})
    )
    assert "ValueError" in told["kinds"]
    assert "weights_only" in told["text"]
    found = results(
        "tests.e2e.group_runs:resumes", 2, args={"folder": str(one["folder"] / "runs"), "source": one["id"]}
    )
    for each in found:
        assert "ValueError" in each["stateful"]["kinds"]
        assert each["weights"]["status"] == "finished"
