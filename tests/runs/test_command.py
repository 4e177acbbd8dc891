"""`python -m nnx_jax.runs`: what it prints, its exit status, and what it must not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnx_jax.runs.__main__ import main
from nnx_jax.runs.layout import RunPaths
from tests.runs import scenario
from tests.runs.scenario import RUN_ID, open_store

Capture = pytest.CaptureFixture[str]


def test_list(root: Path, capsys: Capture) -> None:
    """One line a run, the best marked; a damaged run is listed as such and does not hide the others."""
    scenario.run(root, 1, "other", keep=None)
    RunPaths(root, "other").pointer("LAST").write_text("")
    assert main(["--runs-dir", str(root), "list"]) == 0
    assert capsys.readouterr().out == f"* {RUN_ID}  interrupted  epoch 1  step 10\n  other  damaged    \n"
    assert main(["list", "--runs-dir", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == RUN_ID
    assert found["runs"][0] == {
        "id": RUN_ID,
        "status": "interrupted",
        "run_dir": str(root / RUN_ID),
        "epoch": 1,
        "step": 10,
        "batch": 10,
        "rows": 2,
        "history": "idps.csv",
        "checkpoints": {"LAST": 10, "BEST": 10, "FIRST": 5, "Q2": 10},
    }
    assert found["runs"][1]["status"] == "damaged"


def test_list_of_nothing(tmp_path: Path, capsys: Capture) -> None:
    assert main(["--runs-dir", str(tmp_path / "none"), "list"]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path / 'none'}\n"
    assert not (tmp_path / "none").exists()


def test_show(root: Path, capsys: Capture) -> None:
    assert main(["--runs-dir", str(root), "show", RUN_ID]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{RUN_ID}  interrupted  {root / RUN_ID}"
    assert lines[1] == "  LAST         generation 2  epoch 1  step 10  batch 10"
    assert '    epoch=1  step=10  loss=0.5  note=say "1", twice' in lines
    assert "  train:" in lines
    assert main(["show", RUN_ID, "--runs-dir", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == scenario.SPEC
    assert found["metadata"]["resume"]["mode"] == "fresh"


def test_verify(root: Path, capsys: Capture) -> None:
    """Exit 0 and silence, or exit 1 and a line a fault."""
    command = ["--runs-dir", str(root), "verify", RUN_ID]
    assert main(command) == 0
    assert capsys.readouterr().out == ""
    directory = root / RUN_ID / "checkpoints" / "generations"
    (directory / "1" / "host.json").unlink()
    (directory / "2" / "arrays.json").write_text("{}")
    (root / RUN_ID / "idps.csv").write_text("epoch\n")
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for name in ("host.json: is missing", "arrays.json: has 2 bytes", "idps.csv: LAST covers"):
        assert sum(name in line for line in lines) == 1
    assert main([*command, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 3


@pytest.mark.parametrize("command", ["show", "verify", "rm"])
def test_an_unknown_id_is_said_clearly(root: Path, capsys: Capture, command: str) -> None:
    assert main(["--runs-dir", str(root), command, RUN_ID[:-1]]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"checkpoint: there is no run '{RUN_ID[:-1]}' in {root}; did you mean '{RUN_ID}'?\n"


def test_rm_moves_best_and_refuses_a_live_run(root: Path, capsys: Capture) -> None:
    """nnx:B112 the survivor inherits `runs/best`; a run somebody writes stays."""
    scenario.run(root, 1, "other")
    assert os.readlink(root / "best") == RUN_ID
    with open_store(root):
        assert main(["--runs-dir", str(root), "rm", RUN_ID]) == 1
        assert "is held by process" in capsys.readouterr().err
    assert main(["--runs-dir", str(root), "rm", RUN_ID]) == 0
    assert capsys.readouterr().out == f"removed {RUN_ID}\n"
    assert os.readlink(root / "best") == "other"
    assert not (root / RUN_ID).exists()
    assert main(["--runs-dir", str(root), "rm", "other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": "other"}
    assert not os.path.lexists(root / "best")


def test_an_unsafe_id_is_refused(root: Path, capsys: Capture) -> None:
    assert main(["--runs-dir", str(root), "rm", "../x"]) == 1
    assert "run id '../x'" in capsys.readouterr().err


def test_wrong_usage_exits_two(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["frobnicate"])
    assert "invalid choice" in capsys.readouterr().err


def test_reading_commands_import_no_framework(root: Path) -> None:
    """list, show and verify answer without jax, orbax or flax."""
    code = (
        "import sys\nfrom nnx_jax.runs.__main__ import main\n"
        "root, run = sys.argv[1:]\n"
        "codes = [main(['--runs-dir', root, *c]) for c in (['list'], ['show', run], ['verify', run])]\n"
        "assert codes == [0, 0, 0], codes\n"
        "print(sorted({'jax', 'orbax', 'flax', 'torch', 'tensorstore'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root), RUN_ID], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.splitlines()[-1] == "[]"
