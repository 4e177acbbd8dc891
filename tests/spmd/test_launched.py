"""Which process this is: every environment that is understood, in its order, and every contradiction named."""

from __future__ import annotations

from typing import Any

import pytest
from jax._src.clusters import ClusterEnv

from nnx_jax.core.errors import ProcessGroupError
from nnx_jax.spmd.launched import (
    Launched,
    from_jax,
    from_kubernetes,
    from_launch,
    from_open_mpi,
    from_slurm,
    launched,
    split_address,
)
from nnx_jax.spmd.processes import find_place

LAUNCH = {"NNX_JAX_COORDINATOR": "127.0.0.1:4000", "NNX_JAX_PROCESSES": "3", "NNX_JAX_PROCESS": "2"}
JAX = {"JAX_COORDINATOR_ADDRESS": "node0:5000", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}
OMPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-009],other",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "3"}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the environment to what launchers say, and nothing of the machine's own."""

    def say(**names: str) -> None:
        for name in (*LAUNCH, *JAX, *OMPI, *SLURM, *KUBERNETES, "JAX_COORDINATOR_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in names.items():
            monkeypatch.setenv(name, value)

    return say


def test_each_launcher_is_understood() -> None:
    """The fields of each, read by its own parser; one that says nothing is none."""
    assert from_launch(LAUNCH) == Launched("nnx_jax.launch", "127.0.0.1:4000", 3, 2)
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    assert from_jax(JAX) == Launched("JAX's variables", "node0:5000", 4, 1, names=names)
    mpi, slurm, pod = from_open_mpi(OMPI), from_slurm(SLURM), from_kubernetes(KUBERNETES)
    assert mpi is not None
    assert (mpi.size, mpi.rank, mpi.local_rank, mpi.cluster) == (2, 1, 0, "ompi")
    assert slurm is not None
    assert (slurm.size, slurm.rank, slurm.local_rank, slurm.cluster) == (6, 5, 1, "slurm")
    assert pod is not None
    assert (pod.coordinator, pod.size, pod.rank) == (None, None, 3)
    for read in (from_launch, from_jax, from_open_mpi, from_slurm, from_kubernetes):
        assert read({"PATH": "/bin", "HOSTNAME": "x"}) is None


def test_order() -> None:
    """Arguments, then our launcher, JAX's variables, Open MPI (also inside a SLURM job), SLURM, Kubernetes."""
    everything = {**KUBERNETES, **SLURM, **OMPI, **JAX, **LAUNCH}
    found = launched(everything, coordinator="a:1", num_processes=9, process_id=8)
    assert (found.coordinator, found.size, found.rank) == ("a:1", 9, 8)
    assert launched(everything).source == "nnx_jax.launch"
    assert launched({**KUBERNETES, **SLURM, **OMPI}).source == "Open MPI"
    assert launched({**KUBERNETES, **SLURM}).source == "SLURM"
    own = {**JAX, "JAX_NUM_PROCESSES": "6", "JAX_PROCESS_ID": "5"}
    assert launched({**SLURM, **own}).coordinator == "node0:5000"


def test_an_argument_goes_before_its_variable() -> None:
    """What is not given comes from the environment."""
    found = launched(LAUNCH, process_id=0)
    assert (found.coordinator, found.size, found.rank) == ("127.0.0.1:4000", 3, 0)
    assert found.source == "arguments and nnx_jax.launch"


def test_a_pod_is_told_the_rest() -> None:
    """Kubernetes: the index is the pod's, address and number of pods are set by the manifest."""
    found = launched({**KUBERNETES, "JAX_COORDINATOR_ADDRESS": "job-0.svc:1234", "JAX_NUM_PROCESSES": "4"})
    assert (found.coordinator, found.size, found.rank) == ("job-0.svc:1234", 4, 3)


def test_a_scheduler_with_an_address_of_ones_own() -> None:
    """JAX_COORDINATOR_ADDRESS alone changes where they meet, and nothing else."""
    found = launched({**SLURM, "JAX_COORDINATOR_ADDRESS": "elsewhere:99"})
    assert (found.coordinator, found.size, found.rank, found.local_rank) == ("elsewhere:99", 6, 5, 1)


def test_addresses_of_schedulers_are_those_of_jax(environ: Any) -> None:
    """SLURM: the step's first node, and 61440 + job id mod 4096; Open MPI: mpirun's own address, and its job's port."""
    environ(**SLURM)
    assert find_place(None, None, None).coordinator == "node007:61441"
    environ(**SLURM, JAX_COORDINATOR_PORT="777")
    assert find_place(None, None, None).coordinator == "node007:777"
    environ(**OMPI)
    assert find_place(None, None, None).coordinator == f"10.96.0.1:{1531576320 // 4096 % 4096 + 61440}"


def test_one_process_needs_no_address(environ: Any) -> None:
    """A scheduler that started a single process: a group of one."""
    environ(SLURM_NTASKS="1", SLURM_PROCID="0")
    found = find_place(None, None, None)
    assert (found.size, found.rank, found.coordinator) == (1, 0, None)


MISSING = [
    ({}, ("NNX_JAX_COORDINATOR", "NNX_JAX_PROCESSES", "NNX_JAX_PROCESS", "nnx_jax.launch --processes 2")),
    ({"NNX_JAX_PROCESS": "1"}, ("by nnx_jax.launch", "NNX_JAX_COORDINATOR, NNX_JAX_PROCESSES are not set")),
    ({"JAX_NUM_PROCESSES": "2"}, ("JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID are not set",)),
    ({"JAX_COORDINATOR_ADDRESS": "a:1"}, ("JAX_NUM_PROCESSES, JAX_PROCESS_ID are not set",)),
    ({"SLURM_NTASKS": "4"}, ("SLURM", "SLURM_STEP_NODELIST, SLURM_JOB_ID, SLURM_PROCID are not set")),
    ({**SLURM, "SLURM_JOB_ID": ""}, ("SLURM_STEP_NODELIST, SLURM_JOB_ID are not set",)),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, ("OMPI_MCA_orte_hnp_uri is not set",)),
    (KUBERNETES, ("Kubernetes", "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES are not set")),
]


@pytest.mark.parametrize("env, expected", MISSING, ids=[" ".join(env) or "nothing" for env, _ in MISSING])
def test_what_is_not_set_is_named(env: dict[str, str], expected: tuple[str, ...]) -> None:
    """nnx:B194: a RuntimeError with the names of the missing variables, and what starts processes."""
    with pytest.raises(RuntimeError) as caught:
        launched(env)
    assert all(text in str(caught.value) for text in expected), str(caught.value)


WRONG = [
    ({**LAUNCH, "NNX_JAX_PROCESS": "3"}, "process 3 of 3; processes are numbered from 0 to 2"),
    ({**LAUNCH, "NNX_JAX_PROCESSES": "0", "NNX_JAX_PROCESS": "0"}, "process 0 of 0; there is at least one"),
    ({**LAUNCH, "NNX_JAX_PROCESS": "-1"}, "NNX_JAX_PROCESS is '-1'; it must be a whole number"),
    ({**LAUNCH, "NNX_JAX_PROCESSES": "two"}, "NNX_JAX_PROCESSES is 'two'"),
    ({**LAUNCH, "NNX_JAX_COORDINATOR": "127.0.0.1"}, "the coordinator is '127.0.0.1'; it must be HOST:PORT"),
    ({**SLURM, **JAX}, "JAX_NUM_PROCESSES is 4, but SLURM_NTASKS is 6; unset JAX_NUM_PROCESSES"),
    ({**OMPI, "JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID is 0, but OMPI_COMM_WORLD_RANK is 1"),
]


@pytest.mark.parametrize("env, expected", WRONG, ids=[expected[:30] for _, expected in WRONG])
def test_what_cannot_be_is_refused(env: dict[str, str], expected: str) -> None:
    """nnx:B194: contradictions and values that are none, each with the variable and its value."""
    with pytest.raises(ProcessGroupError) as caught:
        launched(env)
    assert expected in str(caught.value)


def test_addresses() -> None:
    """Host and port; IPv6 in brackets or bare; anything else is refused."""
    assert split_address("node1:80") == ("node1", 80)
    assert split_address("[::1]:80") == ("::1", 80)
    for text in ("node1", "node1:", ":80", "node1:0", "node1:65536", "node1:x", "", "node1:８０"):
        with pytest.raises(ProcessGroupError, match="HOST:PORT"):
            split_address(text)


def test_what_jax_detects(environ: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no variable says anything, a cluster that JAX knows, such as a TPU pod; arguments alone do not ask it."""
    monkeypatch.setattr(ClusterEnv, "_cluster_types", list(ClusterEnv._cluster_types))  # a class of it adds itself

    class Pod(ClusterEnv):
        name = "pod"

        @classmethod
        def is_env_present(cls) -> bool:
            return True

        @classmethod
        def get_coordinator_address(cls, timeout_secs: int | None, override_coordinator_port: str | None) -> str:
            return f"pod-0:{override_coordinator_port or 8476}"

        @classmethod
        def get_process_count(cls) -> int:
            return 4

        @classmethod
        def get_process_id(cls) -> int:
            return 3

    environ()
    found = find_place(None, None, None)
    assert (found.source, found.coordinator, found.size, found.rank) == ("pod", "pod-0:8476", 4, 3)
    with pytest.raises(ProcessGroupError, match="NNX_JAX_PROCESS is not set"):
        find_place("a:1", 2, None)
    environ(NNX_JAX_PROCESS="1")
    with pytest.raises(ProcessGroupError, match="by nnx_jax.launch, but"):
        find_place(None, None, None)
