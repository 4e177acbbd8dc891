"""Which process of how many this is, as whatever started it says in the environment.

The order is: what the caller gives; the variables of `nnx_jax.launch`; those that JAX's own users set; Open MPI; SLURM;
Kubernetes. JAX's variables may be given in part: a scheduler then says the rest, and where both speak they must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnx_jax.core.errors import ProcessGroupError

COORDINATOR, PROCESSES, PROCESS = "NNX_JAX_COORDINATOR", "NNX_JAX_PROCESSES", "NNX_JAX_PROCESS"
"""Variables of our own launcher: "host:port" of process 0, how many processes there are, and which one this is."""

_JAX_ADDRESS, _JAX_COUNT, _JAX_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_HOW = (
    "start the processes with `python -m nnx_jax.launch --processes 2 -- --config cfg.yaml`, with srun or mpirun, or "
    "give --coordinator HOST:PORT, --num-processes N and --process-id I (coordinator=, num_processes=, process_id= of "
    "init_process_group)"
)


@dataclass(frozen=True)
class Launched:
    """What is known of a process; a field is None where nobody said it.

    Attributes:
        source: who said it, for a person; empty when nobody said anything.
        coordinator: "host:port" at which process 0 is reached.
        size: number of processes.
        rank: number of this one, from 0.
        local_rank: number of this one on its machine, where the scheduler gives each process one accelerator.
        cluster: JAX's name of the scheduler, whose address it can work out.
        names: the variables that say coordinator, size and rank.
    """

    source: str = ""
    coordinator: str | None = None
    size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    cluster: str | None = None
    names: tuple[str, str, str] = (COORDINATOR, PROCESSES, PROCESS)


def launched(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Launched:
    """Return what is known of this process.

    Args:
        environ: the environment.
        coordinator, num_processes, process_id: what the caller knows; it goes before the environment.

    Returns:
        size and rank are set; the coordinator is None where it has to be asked of JAX, or where there is one process.

    Raises:
        ProcessGroupError: (a RuntimeError) nobody says how many processes there are, which one this is or where they
            meet, or two say different things.
    """
    given = Launched("arguments", coordinator, num_processes, process_id)
    if None in (coordinator, num_processes, process_id):
        given = _over(given, _environment(environ))
    return _checked(given)


def is_silent(environ: Mapping[str, str]) -> bool:
    """No variable says anything of a group."""
    return _environment(environ) == Launched()


def _environment(environ: Mapping[str, str]) -> Launched:
    """What the environment alone says."""
    if (ours := from_launch(environ)) is not None:
        return ours
    own = from_jax(environ)
    for read in (from_open_mpi, from_slurm, from_kubernetes):
        if (scheduler := read(environ)) is not None:
            return scheduler if own is None else _agreeing(own, scheduler)
    return own or Launched()


def from_launch(environ: Mapping[str, str]) -> Launched | None:
    """Our launcher's variables; all of them or none."""
    return _read(environ, "nnx_jax.launch", (COORDINATOR, PROCESSES, PROCESS))


def from_jax(environ: Mapping[str, str]) -> Launched | None:
    """What JAX's users set by hand, or a script of theirs does."""
    return _read(environ, "JAX's variables", (_JAX_ADDRESS, _JAX_COUNT, _JAX_ID))


def from_open_mpi(environ: Mapping[str, str]) -> Launched | None:
    """Open MPI's mpirun; the address comes from JAX, which reads mpirun's own."""
    names = ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    return _scheduled(environ, "Open MPI", "ompi", names, "OMPI_COMM_WORLD_LOCAL_RANK")


def from_slurm(environ: Mapping[str, str]) -> Launched | None:
    """SLURM's srun; the address comes from JAX: the step's first node, and a port made of the job's number."""
    names = ("SLURM_STEP_NODELIST SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID")
    return _scheduled(environ, "SLURM", "slurm", names, "SLURM_LOCALID")


def from_kubernetes(environ: Mapping[str, str]) -> Launched | None:
    """An indexed job, or a JobSet's; it knows its index, the manifest sets the address and the number of pods."""
    names = (_JAX_ADDRESS, _JAX_COUNT, "JOB_COMPLETION_INDEX")
    if not environ.get(names[2]):
        return None
    return Launched("Kubernetes", rank=_number(environ, names[2]), names=names)


def _read(environ: Mapping[str, str], source: str, names: tuple[str, str, str]) -> Launched | None:
    """What three variables say; None where not one of them is set."""
    address, count, rank = names
    if not any(environ.get(name) for name in names):
        return None
    return Launched(source, environ.get(address) or None, _number(environ, count), _number(environ, rank), names=names)


def _scheduled(
    environ: Mapping[str, str], source: str, cluster: str, names: tuple[str, str, str], local: str
) -> Launched | None:
    """What a scheduler says; its address, in one or more variables, is for JAX to read."""
    address, count, rank = names
    if not (environ.get(count) or environ.get(rank)):
        return None
    known = all(environ.get(name) for name in address.split())
    numbers = (_number(environ, count), _number(environ, rank), _number(environ, local))
    return Launched(source, None, *numbers, cluster if known else None, names)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ProcessGroupError(f"{name} is {text!r}; it must be a whole number, 0 or more")
    return int(text)


def _agreeing(own: Launched, scheduler: Launched) -> Launched:
    """JAX's variables, and a scheduler's where they say nothing."""
    both = ((_JAX_COUNT, own.size, scheduler.size, 1), (_JAX_ID, own.rank, scheduler.rank, 2))
    for name, one, two, place in both:
        if None not in (one, two) and one != two:
            raise ProcessGroupError(
                f"{name} is {one}, but {scheduler.names[place]} is {two}; unset {name}, or start the processes without "
                f"{scheduler.source}"
            )
    return _over(own, scheduler)


def _over(first: Launched, second: Launched) -> Launched:
    """`first`, and `second` where it says nothing."""
    given = [each for each in (first, second) if (each.coordinator, each.size, each.rank) != (None, None, None)]
    return Launched(
        " and ".join(each.source for each in given),
        first.coordinator or second.coordinator,
        second.size if first.size is None else first.size,
        second.rank if first.rank is None else first.rank,
        second.local_rank,
        first.cluster or second.cluster,
        second.names,
    )


def _checked(found: Launched) -> Launched:
    """All that is needed is there, and possible."""
    unknown = [name for name, value in zip(found.names[1:], (found.size, found.rank), strict=True) if value is None]
    if found.size != 1 and found.coordinator is None and found.cluster is None:
        unknown[:0] = found.names[0].split()
    if unknown or found.size is None or found.rank is None:
        who = (
            f"this process was started by {found.source}, but" if found.source else "no launcher started this process:"
        )
        raise ProcessGroupError(f"{who} {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not set; {_HOW}")
    if not 0 <= found.rank < found.size:
        counted = f"processes are numbered from 0 to {found.size - 1}" if found.size > 0 else "there is at least one"
        raise ProcessGroupError(f"{found.source}: this is process {found.rank} of {found.size}; {counted}")
    if found.coordinator is not None:
        split_address(found.coordinator)
    return found


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port"; an IPv6 host may stand in brackets.

    Raises:
        ProcessGroupError: it is not such a text.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ProcessGroupError(
            f"the coordinator is {address!r}; it must be HOST:PORT of process 0, such as node1:1234 (every process is "
            "given the same)"
        )
    return host, int(port)
