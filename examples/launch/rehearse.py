"""Rehearse the recipes of this folder on one machine: the very commands, started as a scheduler would start them.

    python examples/launch/rehearse.py slurm [--tasks 2] [cfg.yaml [options of nnx_jax.train]]
    python examples/launch/rehearse.py jobset [options of nnx_jax.train]

`slurm` runs slurm.sbatch with an `srun` of its own, which starts each task with SLURM's variables on this machine.
`jobset` starts the container's command of jobset.yaml once for each pod, with its environment and its index; paths of
its ConfigMap and its volume are replaced by folders here, and the name of pod 0 by this machine.
Runs are made in the working directory. For Ray: python examples/launch/ray_train.py --local 2
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnx_jax.core.codec import parse_yaml

HERE = Path(__file__).resolve().parent
OTHERS = ("NNX_JAX_", "SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Beginnings of variables of another group that this machine may be part of."""


def together(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> int:
    """Run commands at once, each with its environment; the largest exit code. When one fails the others are ended."""
    running = [subprocess.Popen(command, env=dict(env), process_group=0) for command, env in commands]

    def pass_on(number: int, frame: Any) -> None:
        for process in running:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    end = float("inf")
    while any(process.poll() is None for process in running):
        if any(process.returncode for process in running):
            end = min(end, time.monotonic() + 15)
        if time.monotonic() > end:
            pass_on(signal.SIGKILL, None)
        time.sleep(0.05)
    codes = [process.wait() for process in running]
    return max(128 - code if code < 0 else code for code in codes)


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without another group's variables."""
    return {name: value for name, value in environ.items() if not name.startswith(OTHERS)}


def free_port(fits: Callable[[int], bool] = lambda port: True) -> int:
    """A port at which nobody listens."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if fits(port):
            return port


# -- SLURM ------------------------------------------------------------------------------------------------------------


def slurm(tasks: int, words: Sequence[str]) -> int:
    """Run slurm.sbatch with commands srun and scontrol that work on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        this = f"{shlex.quote(sys.executable)} {shlex.quote(str(HERE / 'rehearse.py'))}"
        scripts = {
            "srun": f'exec {this} srun --tasks {tasks} -- "$@"',
            "scontrol": 'echo "rehearse: scontrol $*"',
            "python": f'exec {shlex.quote(sys.executable)} "$@"',
        }
        for name, text in scripts.items():
            path = Path(folder, name)
            path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
            path.chmod(0o700)
        env = clean(os.environ) | {"SLURM_JOB_ID": str(job_number()), "SLURM_NTASKS": str(tasks)}
        env["PATH"] = f"{folder}{os.pathsep}{env.get('PATH', '')}"
        return together([(["bash", str(HERE / "slurm.sbatch"), *words], env)])


def job_number() -> int:
    """A job's number from which JAX makes a port at which nobody listens: 61440 and the number modulo 4096."""
    lowest, many = 61440, 4096
    for number in range(os.getpid() % many, os.getpid() % many + many):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", lowest + number % many)) != 0:
                return number + 1 if number % many == 0 else number
    raise SystemExit("rehearse: every port that SLURM's jobs use is taken")


def srun(tasks: int, words: Sequence[str]) -> int:
    """What `srun --options command` does, on this machine: each task with its variables."""
    command = list(words)
    while command and command[0].startswith("--"):
        command.pop(0)  # srun's own options, which slurm.sbatch writes with =
    common = {"SLURM_NTASKS": str(tasks), "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}
    return together([
        (command, {**os.environ, **common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        for rank in range(tasks)
    ])  # fmt: skip


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def jobset(words: Sequence[str]) -> int:
    """Start the pods of jobset.yaml as processes; `words` are added to the container's arguments."""
    items = parse_yaml((HERE / "jobset.yaml").read_text(encoding="utf-8"))["items"]
    kinds = {item["kind"]: item for item in items}
    job = kinds["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    world = job["completions"]
    check_numbers(kinds["JobSet"], job, env)
    env["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        for name, text in kinds["ConfigMap"]["data"].items():
            Path(folder, name).write_text(text, encoding="utf-8")
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        there = {mounts["config"]: folder, mounts["runs"]: str(Path("runs").resolve())}
        command = [moved(word, there) for word in (*container["command"], *container["args"])] + list(words)
        command[0] = sys.executable if command[0] == "python" else command[0]
        indexes = [{"JOB_COMPLETION_INDEX": str(index)} for index in range(world)]
        return together([(command, {**clean(os.environ), **env, **index}) for index in indexes])


def check_numbers(jobset: Mapping[str, Any], job: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Check what the manifest says in several places.

    Raises:
        SystemExit: the places differ.
    """
    name, workers = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    first = f"{name}-{workers}-0-0.{name}:{job['template']['spec']['containers'][0]['ports'][0]['containerPort']}"
    if env["JAX_COORDINATOR_ADDRESS"] != first:
        raise SystemExit(f"rehearse: pod 0 is at {first}, JAX_COORDINATOR_ADDRESS is {env['JAX_COORDINATOR_ADDRESS']}")
    if not str(job["completions"]) == str(job["parallelism"]) == env["JAX_NUM_PROCESSES"]:
        raise SystemExit("rehearse: completions, parallelism and JAX_NUM_PROCESSES must be equal")


def moved(word: str, there: Mapping[str, str]) -> str:
    """A path in a volume where the volume is here."""
    for mount, place in there.items():
        if word == mount or word.startswith(mount + "/"):
            return place + word[len(mount) :]
    return word


def main() -> int:
    """Rehearse one recipe; return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", choices=["slurm", "jobset", "srun"], help="(srun: what slurm.sbatch calls)")
    parser.add_argument("--tasks", type=int, default=2)
    args, words = parser.parse_known_args()
    words = [word for word in words if word != "--"]
    if args.recipe == "srun":
        return srun(args.tasks, words)
    if args.recipe == "jobset":
        return jobset(words)
    return slurm(args.tasks, words or [str(HERE.parent / "digits.yaml")])


if __name__ == "__main__":
    sys.exit(main())
