"""What a DDP allows: by two gloo processes it is what one process makes of the union of their batches."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nnx_jax.core.errors import ConfigError
from nnx_jax.params.model import NNModelParams
from nnx_jax.torch import NNModel
from nnx_jax.torch.distributed import DDP
from tests.e2e.command import environment
from tests.processes import results
from tests.torch import ddp_beyond
from tests.torch.ddp_beyond import same
from tests.torch.test_examples import DIGITS, TORCHRUN, command

BEYOND = "tests.torch.ddp_beyond"
TOLERANCE: dict[str, Any] = {"rtol": 2e-5, "atol": 5e-6}
"""Of float32 sums in another order through two batch norms: each divides by a deviation, here 0.1 at least, so their
relative rounding of about 30 * 2**-24 = 2e-6 grows tenfold at most; the rate takes 2**-4 of that."""
OF_ONE_ROW: dict[str, Any] = {"rtol": 6e-4, "atol": 1.5e-4}
"""Where the last batch is one row among all processes: its deviation is sqrt(eps) = 0.003, thirty times smaller, and
the gradient through it is what is left of terms that cancel."""


def both(tmp_path_factory: pytest.TempPathFactory, function: str) -> tuple[list[Any], Any]:
    """(what each of two processes made, what one made of the union)."""
    folder = tmp_path_factory.mktemp(function)
    found = results(
        f"{BEYOND}:{function}", 2, args={"folder": str(folder / "group"), "world": 2}, timeout=200, framework="torch"
    )
    return found, getattr(ddp_beyond, function)(str(folder / "one"), 2)


def equal(seen: Any, case: str, tolerance: dict[str, Any] = TOLERANCE) -> None:
    """Both processes have the same bits, and the numbers of one process."""
    (first, second), one = seen
    for name in ("weights", "records", "skipped"):
        assert first[case][name] == second[case][name]
    assert first[case]["skipped"] == one[case]["skipped"]
    same(first[case], one[case], tolerance)


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_checked() -> None:
    assert DDP(allow=["journal", "autocast", "journal"]).allow == ("autocast", "journal")
    assert dataclasses.asdict(DDP()) == {
        "writer_rank": 0, "find_unused_parameters": False, "allow": (), "batch_norm": "refuse",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="DDP.allow: got 'journals'.*did you mean 'journal'"):
        DDP(allow=["journals"])
    with pytest.raises(TypeError, match="list of names"):
        DDP(allow="journal")
    with pytest.raises(ConfigError, match="refuse, sync"):
        DDP(batch_norm="local")


def test_settings_of_the_command(tmp_path: Path) -> None:
    """What --allow may name is said before a group is looked for, in one line."""
    (tmp_path / "cfg.yaml").write_text(DIGITS.read_text(), encoding="utf-8")
    words = ["--config", "cfg.yaml", "--set", "backend=torch", "--distributed", "--allow", "all"]
    done = subprocess.run([sys.executable, "-m", "nnx_jax.train", *words], cwd=tmp_path, env=environment(),
                          timeout=100, check=False, capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "DDP.allow: got 'all'; it may name" in done.stderr
    assert not (tmp_path / "runs").exists()


# -- batch norms -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def norms(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return both(tmp_path_factory, "norms")


NORMS = [
    *(f"{whose}, {rows}" for whose in ("built in", "own") for rows in ("even", "odd", "none")),
    "window", "SyncBatchNorm", "parts", "scored",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", NORMS)
def test_batch_norms_of_all_rows(norms: Any, case: str) -> None:
    """Running statistics too: biased in a built-in network, unbiased in torch's layers, cumulative without a momentum.

    Ranks with as many rows, with ignored labels and padding, and without a row; windows and a clip; a parameter that
    only some microbatches use; and the scores of a validation.
    """
    equal(norms, case, OF_ONE_ROW if case.endswith("none") else TOLERANCE)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("refusals")
    return results(f"{BEYOND}:refusals", 2, args={"folder": str(folder)}, timeout=100, framework="torch")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, words",
    [
        ("no statistics", "keeps no running statistics"),
        ("own class", "of a class of your own, Own"),
        ("compile", "a forward pass that torch compiles (aot_eager)"),
        ("autocast", "mixed precision (bfloat16) is for one process of the engine 'torch' unless it is allowed"),
        ("autocast by a hook", "write DDP(allow=['autocast'])"),
        ("unlike", "DDP.batch_norm: the processes were not given the same: rank 0 has 'sync', rank 1 has 'refuse'"),
    ],
)
def test_what_stays_refused(refusals: Any, case: str, words: str) -> None:
    """nnx:B219, nnx:S87: compile and mixed precision that nobody allowed; batch norms that cannot be those of all rows;
    and settings that differ. On both processes, and nothing is written."""
    for told in refusals:
        assert told[case]["type"] == "ConfigError", told[case]
        assert words in told[case]["text"]
        assert told["nothing written"]


@pytest.mark.slow
def test_the_command_allows_by_options(tmp_path: Path) -> None:
    """A configuration with batch norms and a journal, by torchrun."""
    words = ["-m", "nnx_jax.train", "--config", DIGITS, "--set", "model.net.norm=batch", "--set", "train.n_epochs=1"]
    words += ["--set", "model.net.dropout_prob=0", "--set", "history.retention=4", "--json", "--quiet"]
    group = [*TORCHRUN, "--nproc_per_node=2", *words, "--distributed", "--batch-norm", "sync", "--allow", "journal"]
    two = json.loads(command(group, tmp_path).splitlines()[-1])
    one = json.loads(command([sys.executable, *words, "--runs-dir", "one"], tmp_path).splitlines()[-1])
    assert (two["run_id"], two["step"]) == (one["run_id"], one["step"])
    assert two["val"] == pytest.approx(one["val"], rel=1e-3)


# -- objectives ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objectives(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return both(tmp_path_factory, "objectives")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["supervised", "twice", "norms", "teacher", "Trainer"])
def test_objectives_by_their_sums(objectives: Any, case: str) -> None:
    """The model called several times, and a part of it; records; batch norms and a process without a row."""
    equal(objectives, case)


@pytest.mark.slow
def test_the_built_in_loss_as_an_objective_is_the_built_in_loss(objectives: Any) -> None:
    found = objectives[0][0]
    same({**found["supervised"], "id": None}, {**found["loss"], "id": None}, TOLERANCE)


# -- journals --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return both(tmp_path_factory, "journals")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["whole", "resumed"])
def test_a_journal_of_a_group(journals: Any, case: str) -> None:
    """Its newest records on every process, all of them on the disk; one process writes them."""
    equal(journals, case)
    (first, second), one = journals
    assert len(first[case]["records"]) == 4 < len(first[case]["all"])
    assert first[case]["all"] == second[case]["all"]
    same({**first[case], "records": first[case]["all"]}, {**one[case], "records": one[case]["all"]}, TOLERANCE)
    assert first["writers"] != []
    assert second["writers"] == []


@pytest.mark.slow
def test_a_run_with_a_journal_goes_on(journals: Any) -> None:
    """Two epochs and two more are four, bit for bit."""
    for found in journals[0]:
        assert found["resumed"]["weights"] == found["whole"]["weights"]
        tail = [row for row in found["whole"]["all"] if row["epoch"] >= 2]
        assert [row for row in found["resumed"]["all"] if row["epoch"] >= 2] == tail


# -- 16 bits ---------------------------------------------------------------------------------------------------------

EIGHT_BITS: dict[str, Any] = {"rtol": 2.0**-7, "atol": 2.0**-7}
"""A weight and a gradient are rounded to 8 bits, 2**-9 of them, once in every process; gradients are of the order of 4,
the rate takes 2**-4 of them, and there are fewer than 8 updates."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return both(tmp_path_factory, "narrow")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["exact", "bfloat16", "float16", "float16, window"])
def test_sixteen_bits(narrow: Any, case: str) -> None:
    """By the configuration, and by a hook; bit for bit where 8 bits hold every number."""
    equal(narrow, case, {"rtol": 0, "atol": 0} if case == "exact" else EIGHT_BITS)
    wanted = "torch.float16" if case.startswith("float16") else "torch.bfloat16"
    for found in (*narrow[0], narrow[1]):
        if case in ("exact", "float16"):
            assert wanted in found[case]["seen"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float16", "float16, window"])
def test_a_gradient_that_overflows_on_one_process_lowers_the_scale_of_all(narrow: Any, case: str) -> None:
    (first, second), one = narrow
    assert first[case]["scale"] == second[case]["scale"] == one[case]["scale"] < 2.0**10
    assert max(one[case]["skipped"]) >= 1
    assert one[case]["skipped"][-1] < len(one[case]["skipped"])


# -- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return both(tmp_path_factory, "compiles")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "norms", "objective"])
def test_compiled_forward_passes(compiles: Any, case: str) -> None:
    """The numbers of one process that compiles nothing; one program for training and one for scoring."""
    equal(compiles, case)
    for found in compiles[0]:
        assert found["plain"]["programs"] == 2
        assert found[case]["programs"] > 0
    assert compiles[1][case]["programs"] == 0


def test_what_compiles_is_checked() -> None:
    with pytest.raises(ConfigError, match="got 'inducto'; torch has .*did you mean 'inductor'"):
        NNModel(module=torch.nn.Linear(2, 1), loss="mse", compile="inducto")
    with pytest.raises(TypeError, match="True, False or the name of a backend"):
        NNModel(module=torch.nn.Linear(2, 1), compile=3)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's own backend needs a C++ compiler on a CPU")
def test_torch_s_own_compiler_in_one_process(tmp_path: Path) -> None:
    """Three updates of a classifier, and its scores."""
    made = {}
    for name, compile in (("eager", False), ("compiled", True)):
        model = NNModel(
            params=NNModelParams(loss="cross_entropy"), module=ddp_beyond.seeded(ddp_beyond.Named), compile=compile
        )
        made[name] = ddp_beyond.trained(tmp_path / name, ddp_beyond.labelled(12), 2, 2, model=model, epochs=1)
    same(made["compiled"], made["eager"], TOLERANCE)
