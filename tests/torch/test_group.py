"""Several real gloo processes train one model through the public API: parity, who does what, refusals, resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import results
from tests.torch import group_runs

pytestmark = pytest.mark.slow

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
"""Adam over a few updates: the order of a float32 sum differs, and Adam divides by its square root."""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    made, run = group_runs.train(folder / "runs")
    return {**group_runs.facts(made, run), "folder": folder, "net": type(made.net).__name__}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("lives")
    found = results("tests.torch.group_runs:lifecycle", 2, args={"folder": str(folder)}, timeout=200, framework="torch")
    return found, folder


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("refusals")
    found = results("tests.torch.group_runs:refused", 2, args={"folder": str(folder)}, timeout=200, framework="torch")
    return found, folder


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
    """nnx:B202, nnx:S57, nnx:S58, nnx:S59, nnx:S61, nnx:S63

    Windows of two microbatches, clipped: same id and records on all ranks exactly, the numbers of one process on the
    union of the batches to the rounding of a sum in another order.
    """
    (first, second), _ = lives
    assert first["who"]["id"] == second["who"]["id"] == one["id"]
    assert first["who"]["records"] == second["who"]["records"]
    assert first["who"]["weights"] == second["who"]["weights"]
    same(first["who"], one)
    assert {row["step"] for row in one["records"]} >= {3, 6}


def test_data_of_a_configuration_is_cut(lives: Any, tmp_path: Path) -> None:
    """Batches of 5 of 21 rows: 2 and 3 rows on each process, and in the last one none on the first."""
    data = group_runs.NNDataParams(
        train=group_runs._dataset(), val=group_runs._dataset(group_runs.VAL, 9), batch_size=5, tail="pad"
    )
    made, run = group_runs.train(tmp_path, call={"data": data}, train_loader=None, val_loader=None)
    wanted = group_runs.facts(made, run)
    (first, second), _ = lives
    assert first["data"] == second["data"]
    assert first["data"]["id"] == wanted["id"]
    same(first["data"], wanted)


def test_jax_is_not_started(lives: Any) -> None:
    """Its devices, with their threads and memory, are nobody's business here."""
    assert [life["jax"] for life in lives[0]] == [False, False]


def test_only_the_writer_writes(lives: Any) -> None:
    """nnx:B213, nnx:S65, nnx:S66, nnx:S78: one run directory, opened for writing by one process."""
    (first, second), folder = lives
    assert (first["who"]["stores"][0], second["who"]["stores"][0]) == (True, False)
    assert all(one != other for one, other in zip(first["who"]["stores"], second["who"]["stores"], strict=True))
    names = [path.name for path in (folder / "who").iterdir() if len(path.name) == 16]
    assert names == [first["who"]["id"]]


def test_what_a_checkpoint_holds(lives: Any, one: dict[str, Any]) -> None:
    """nnx:B223, nnx:S68, nnx:S69, nnx:S70: the module's own keys, the world's size, partitions, each rank's streams."""
    for each in (life["who"] for life in lives[0]):
        assert each["net"] == one["net"]  # nothing is wrapped around the network
        params = {name.removeprefix("params/") for name in each["stored"] if name.startswith("params/")}
        assert params == set(one["weights"])
        streams = {name.split("/")[1] for name in each["stored"] if name.startswith("rng/")}
        assert streams == {"0", "1"}
        assert {"rng/0/torch", "rng/1/torch", "rng/1/python/words", "rng/1/numpy/words"} <= set(each["stored"])
        assert each["host"]["geometry"]["processes"] == 2
        partition = each["host"]["topology"]["data"]["partition"]
        assert (partition["world"], partition["rows"], partition["policy"], partition["seed"]) == (2, 22, "pad", 0)


def test_callbacks_run_where_they_say(lives: Any) -> None:
    """nnx:B222, nnx:S80, nnx:S81: a plain function and "writer" callbacks on the writer alone, "all" everywhere."""
    (first, second), _ = lives
    assert first["who"]["rates"] == second["who"]["rates"] != []
    assert first["who"]["everywhere"] == second["who"]["everywhere"] != []
    assert [call for call in first["who"]["writer"] if call.startswith("function")] != []
    assert "on_epoch_end" in first["who"]["writer"]
    assert second["who"]["writer"] == []


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
    """nnx:B224, nnx:S70, nnx:S71, case:E06

    Two epochs and a resume are three: weights, records and each rank's own streams, with dropout.
    """
    for life in lives[0]:
        assert life["resumed"]["weights"] == life["whole"]["weights"]
        tail = [row for row in life["whole"]["records"] if row["epoch"] == 2]
        assert [row for row in life["resumed"]["records"] if row["epoch"] == 2] == tail != []
        assert life["resumed"]["drawn"] == life["whole"]["drawn"]
    assert lives[0][0]["whole"]["drawn"] != lives[0][1]["whole"]["drawn"]


def test_a_resume_with_other_rows_is_refused(lives: Any) -> None:
    """nnx:B225, nnx:S71: another seed of the partition is a ValueError on every rank."""
    for life in lives[0]:
        assert "ValueError" in life["another seed"]["kinds"], life["another seed"]
        assert "seed" in life["another seed"]["text"]


REFUSALS = {
    "without DDP": ("ProcessGroupError", "distributed=DDP()"),
    "plan": ("ProcessGroupError", "one of 2"),
    "search": ("ProcessGroupError", "one of 2"),
    "undeclared": ("ConfigError", "Undeclared does not say where it runs"),
    "writes when made": ("ConfigError", "writer_only"),
    "state on the writer": ("ConfigError", "StatefulOnWriter runs on the writer alone and has state"),
    "another seed": ("ConfigError", "rank 1 has"),
    "other rows": ("ConfigError", "rank 1 has"),
    "other batches": ("ConfigError", "rank 1 has"),
    "more epochs": ("ConfigError", "n_epochs: rank 0 has 2, rank 1 has 3"),
    "plain list": ("DataError", "train_loader"),
    "batch norm": ("ConfigError", "layer 'norm' is a BatchNorm"),
    "journal": ("ConfigError", "a history journal"),
    "own step": ("ConfigError", "train_step_fn"),
    "own validation": ("ConfigError", "eval_step_fn"),
    "objective": ("ConfigError", "objective"),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_refused_on_every_process(refusals: Any, case: str) -> None:
    """nnx:B199, nnx:B200, nnx:B219, nnx:B220, nnx:B229, nnx:B230, nnx:S51, nnx:S83, nnx:S85, nnx:S87, nnx:S88

    The same class on both, in time, and nothing is written.
    """
    kind, words = REFUSALS[case]
    for told in refusals[0]:
        assert told[case]["type"] == kind, told[case]
        assert words in told[case]["text"]
        assert told[case]["seconds"] < 30
        assert told["made"] == []  # no factory was called
        assert told["nothing written"]


@pytest.mark.parametrize("at", ["on_train_begin", "on_epoch_begin", "on_epoch_end"])
def test_a_failing_callback_fails_everywhere(refusals: Any, at: str) -> None:
    """nnx:B218, nnx:S76: rank 1 raises its own error, rank 0 a DistributedFailure that says which, where and why."""
    first, second = (told[f"rank 1 fails {at}"] for told in refusals[0])
    assert second["type"] == "OSError"
    assert first["type"] == "DistributedFailure"
    for word in ("rank 1", "callbacks", "OSError", "no space on rank 1"):
        assert word in first["text"]
    assert max(first["seconds"], second["seconds"]) < 30


def test_a_failing_callback_of_the_writer(refusals: Any) -> None:
    """nnx:B217"""
    first, second = (told["writer fails"] for told in refusals[0])
    assert (first["type"], second["type"]) == ("OSError", "DistributedFailure")
    assert "rank 0" in second["text"]
    assert max(first["seconds"], second["seconds"]) < 30


def test_what_is_not_finite_on_one_process(refusals: Any) -> None:
    """nnx:B207, nnx:S54: a NaN row that one rank has is a FloatingPointError on both, before any update."""
    for told in refusals[0]:
        assert "FloatingPointError" in told["not a number"]["kinds"], told["not a number"]
        assert "the state is as before that update" in told["not a number"]["text"]
        assert told["not a number"]["seconds"] < 30


def test_an_impossible_label_on_one_process(refusals: Any) -> None:
    """nnx:B208, nnx:S76: both raise at once, with the reason."""
    for told in refusals[0]:
        assert "ValueError" in told["wrong label"]["kinds"], told["wrong label"]
        assert "label" in told["wrong label"]["text"]
        assert told["wrong label"]["seconds"] < 30


def test_a_finished_run_is_left_alone(refusals: Any) -> None:
    """nnx:B215: the writer finds the run finished; the others learn it from it."""
    first, second = (told["exists"] for told in refusals[0])
    assert "FileExistsError" in first["kinds"]
    assert "finished" in second["text"]


def test_a_name_that_is_no_run(refusals: Any) -> None:
    """nnx:B228: the same ValueError on every rank."""
    first, second = (told["no run of this name"] for told in refusals[0])
    assert "ValueError" in first["kinds"], first
    assert (first["type"], first["text"]) == (second["type"], second["text"])


def test_a_run_after_refusals_works(refusals: Any, one: dict[str, Any]) -> None:
    """A refusal leaves the group as it was."""
    same(refusals[0][0]["works"], one)


def test_another_number_of_processes_is_refused(lives: Any, one: dict[str, Any]) -> None:
    """nnx:B226, nnx:S72, case:E06: neither way is a stateful resume taken, both ways the weights are."""
    source, runs = lives[0][0]["who"]["id"], lives[1] / "who"
    here = group_runs.resumes(str(runs), source)
    there = results(
        "tests.torch.group_runs:resumes", 2, args={"folder": str(one["folder"] / "runs"), "source": one["id"]},
        framework="torch",
    )  # fmt: skip
    for each in (here, *there):
        assert "ValueError" in each["stateful"]["kinds"], each["stateful"]
        assert "weights_only" in each["stateful"]["text"]
        assert each["untouched"]
        assert each["weights"]["status"] == "finished"


def test_a_corrupted_point_is_refused_alike(lives: Any, tmp_path: Path) -> None:
    """nnx:B227, nnx:S73, nnx:S74, nnx:S75: every rank raises the same ResumePointError."""
    source = lives[0][0]["who"]["id"]
    shutil.copytree(lives[1] / "who" / source, tmp_path / source)
    [*_, newest] = sorted((tmp_path / source).rglob("state.safetensors"))
    raw = bytearray(newest.read_bytes())
    raw[-1] ^= 1
    newest.write_bytes(bytes(raw))
    given = {"folder": str(tmp_path), "source": source}
    first, second = results("tests.torch.group_runs:corrupted", 2, args=given, framework="torch")
    assert first["error"]["type"] == second["error"]["type"] == "ResumePointError"
    assert first["error"]["text"] == second["error"]["text"]
    assert "SHA-256 differs" in first["error"]["text"]
    assert first["hashed"] > 0
    assert second["hashed"] == 0
