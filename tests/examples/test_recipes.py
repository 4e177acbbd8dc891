"""The recipes for schedulers run as they are: each is rehearsed on this machine by the very commands that it holds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.core.codec import parse_yaml
from nnx_jax.runs.audit import verify
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun

LAUNCH = Path(__file__).resolve().parents[2] / "examples" / "launch"
PATIENCE = 300
SMALLEST = [
    word
    for override in ("train.n_epochs=1", "data.batch_size=256", "model.net.hidden_dims=[4]")
    for word in ("--set", override)
]
UPDATES = 6  # 1444 rows in batches of 256


def environment(**more: str) -> dict[str, str]:
    """One device in each process, and nothing of a group that the tests may run in."""
    others = ("NNX_JAX_", "SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JOB_COMPLETION")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return kept | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(LAUNCH.parents[1])} | more


def rehearse(folder: Path, *words: str) -> dict[str, Any]:
    """Run a rehearsal in a folder; the result that the command printed."""
    command = [sys.executable, LAUNCH / "rehearse.py", *words, *SMALLEST, "--json", "--quiet"]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]  # of the process that writes
    return json.loads(line)


@pytest.fixture(scope="module")
def under_slurm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run of slurm.sbatch as two tasks, with the configuration that jobset.yaml holds."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "cfg.yaml").write_text(_item("ConfigMap")["data"]["cfg.yaml"])
    return folder, rehearse(folder, "slurm", "cfg.yaml")


def test_slurm(under_slurm: tuple[Path, dict[str, Any]]) -> None:
    """Two tasks with srun's variables make one run, which is whole."""
    folder, result = under_slurm
    assert (result["status"], result["step"]) == ("finished", UPDATES)
    assert [path.name for path in (folder / "runs").iterdir() if len(path.name) == 16] == [result["run_id"]]
    assert verify(folder / "runs", result["run_id"]) == []
    host = read_point(RunPaths(folder / "runs", result["run_id"])).host
    assert host["geometry"] == {"processes": 2, "mesh": {"data": 2}, "sharding": []}


@pytest.mark.slow
def test_jobset(under_slurm: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Two pods' commands and environments make the run that SLURM's two tasks make of the same configuration."""
    result = rehearse(tmp_path, "jobset")
    assert result == under_slurm[1]
    assert verify(tmp_path / "runs", result["run_id"]) == []


@pytest.mark.slow
def test_ray(tmp_path: Path) -> None:
    """What an actor calls, in two processes that Ray has not started: both return the run that rank 0 wrote."""
    command = [sys.executable, LAUNCH / "ray_train.py", "--local", "2", "--epochs", "1", "--width", "4"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert [rank for rank, _ in said] == ["rank 0", "rank 1"]
    assert len({told for _, told in said}) == 1
    [run_id] = [path.name for path in (tmp_path / "runs").iterdir() if len(path.name) == 16]
    run = NNRun.load(run_id, tmp_path / "runs")
    assert run.last is not None
    assert said[0][1] == f"run {run_id}, val_accuracy {run.records[-1]['val_accuracy']:.4f}"


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, LAUNCH / "ray_train.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["ray_train: Ray is not installed: pip install ray; or try --local 2"]


@pytest.mark.parametrize(
    ("code", "again"),
    [(0, False), (2, False), pytest.param(130, True, id="time is over"), pytest.param(143, False, id="scancel")],
)
def test_what_slurm_starts_again(code: int, again: bool, tmp_path: Path) -> None:
    """A job whose time is over; not one that failed, that is wrong, or that somebody cancelled."""
    for name, text in (("srun", f'echo "$@"; exit {code}'), ("scontrol", 'echo "scontrol $@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    env = environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", SLURM_JOB_ID="77")
    command = ["bash", LAUNCH / "slurm.sbatch", "my cfg.yaml", "--quiet"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == code
    started, *more = done.stdout.splitlines()
    assert started.endswith("python -m nnx_jax.train --distributed --config my cfg.yaml --quiet")
    assert more == (["scontrol requeue 77"] if again else [])


def test_what_kubernetes_starts_again() -> None:
    """All pods together after a failure; none after exit code 2, a wrong configuration. The numbers of pods agree."""
    jobset = _item("JobSet")
    [workers] = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert job["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"containerName": container["name"], "operator": "In", "values": [2]}}
    ]
    assert jobset["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    claim = job["template"]["spec"]["volumes"][1]["persistentVolumeClaim"]["claimName"]
    assert claim == _item("PersistentVolumeClaim")["metadata"]["name"]


@pytest.mark.parametrize("name, value", [("JAX_NUM_PROCESSES", "4"), ("JAX_COORDINATOR_ADDRESS", "nnx-jax-0:8476")])
def test_a_manifest_that_contradicts_itself(name: str, value: str) -> None:
    """The number of pods, and the name of pod 0, stand in several places; a rehearsal says when they differ."""
    spec = importlib.util.spec_from_file_location("rehearse", LAUNCH / "rehearse.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    jobset = _item("JobSet")
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    env = {each["name"]: each["value"] for each in job["template"]["spec"]["containers"][0]["env"]}
    recipe.check_numbers(jobset, job, env)
    with pytest.raises(SystemExit, match=name):
        recipe.check_numbers(jobset, job, env | {name: value})


def _item(kind: str) -> Any:
    [found] = [item for item in parse_yaml((LAUNCH / "jobset.yaml").read_text())["items"] if item["kind"] == kind]
    return found
