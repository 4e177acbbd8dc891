"""One model on the machines of a Ray cluster: Ray starts the processes, jax.distributed joins them.

    python examples/launch/ray_train.py --workers 4 --gpus-per-worker 1 --runs-dir /shared/runs
    python examples/launch/ray_train.py --local 2     # two processes on this machine, without Ray

Every actor calls `train`, the function to change. A lost actor ends the attempt; the next one starts all of them again
and continues from the last commit, bit for bit. The run directory has to be on a file system that all machines see.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def train(coordinator: str, world: int, rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Join the group, train, leave; the same lines in every process."""
    from nnx_jax import (
        DigitsDataset,
        FeedForwardParams,
        NNDataParams,
        NNModel,
        NNModelParams,
        NNOptimParams,
        NNRun,
        NNTrainParams,
        RunExistsError,
        distributed,
    )

    distributed.init_process_group(coordinator=coordinator, num_processes=world, process_id=rank)
    net = FeedForwardParams(hidden_dims=[options["width"]], output_dim=10)
    model = NNModel(net, NNModelParams(loss="cross_entropy", metrics=["accuracy"]))
    params = NNTrainParams(n_epochs=options["epochs"], optim=NNOptimParams(kind="adamw", max_lr=3e-3))
    data = NNDataParams(train=DigitsDataset(split="train"), val=DigitsDataset(split="val"), batch_size=64)
    runs_dir = options["runs_dir"]
    try:
        run = model.train(params, data=data, runs_dir=runs_dir, quiet=rank > 0, distributed=distributed.DDP())
    except RunExistsError as finished:  # an attempt before this one was lost after its last commit
        run = NNRun.load(finished.run_id, runs_dir)
    distributed.shutdown()
    return {"rank": rank, "run_id": run.id, "val_accuracy": run.records[-1]["val_accuracy"]}


def free_address(host: str) -> str:
    """An address on this machine at which nobody listens yet."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def on_ray(args: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What `train` returned in each of `args.workers` actors.

    Raises:
        SystemExit: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise SystemExit("ray_train: Ray is not installed: pip install ray; or try --local 2") from error

    @ray.remote(max_restarts=0)
    class Worker:
        """One process of the group."""

        def address(self) -> str:
            return free_address(ray.util.get_node_ip_address())

        def train(self, *given: Any) -> dict[str, Any]:
            return train(*given)

    ray.init(address=args.address)
    needs = {"CPU": args.cpus_per_worker, "GPU": args.gpus_per_worker}
    group = ray.util.placement_group([needs] * args.workers, strategy="SPREAD")
    ray.get(group.ready())  # all of them, or none is started
    where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    for attempt in range(args.attempts):
        workers = [
            Worker.options(
                num_cpus=args.cpus_per_worker, num_gpus=args.gpus_per_worker, scheduling_strategy=where
            ).remote()
            for _ in range(args.workers)
        ]
        try:
            coordinator = ray.get(workers[0].address.remote())
            calls = [w.train.remote(coordinator, args.workers, rank, options) for rank, w in enumerate(workers)]
            return results(calls, ray)
        except ray.exceptions.RayActorError as lost:
            print(f"ray_train: attempt {attempt + 1} of {args.attempts}: {lost}", file=sys.stderr)
        finally:
            for worker in workers:
                ray.kill(worker)
    raise SystemExit(f"ray_train: a worker was lost in each of {args.attempts} attempts")


def results(calls: list[Any], ray: Any) -> list[dict[str, Any]]:
    """What the actors' calls returned.

    A lost actor counts before the errors with which the others end for it: RayActorError asks for another attempt.
    """
    found, errors = [], []
    for call in calls:
        try:
            found.append(ray.get(call))
        except ray.exceptions.RayError as error:
            errors.append(error)
    errors.sort(key=lambda error: not isinstance(error, ray.exceptions.RayActorError))
    if errors:
        raise errors[0]
    return found


def on_this_machine(workers: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What `train` returned in each of so many processes, without Ray."""
    coordinator = free_address("127.0.0.1")
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        calls = [pool.submit(train, coordinator, workers, rank, options) for rank in range(workers)]
        return [call.result() for call in calls]


def main() -> None:
    """Read the options, train, print the result of every process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--workers", type=int, default=2, help="actors, one process of the group each")
    add("--local", type=int, metavar="N", help="N processes on this machine, without Ray")
    add("--address", help="of a Ray cluster (default: RAY_ADDRESS, else one is started here)")
    add("--cpus-per-worker", type=float, default=1)
    add("--gpus-per-worker", type=float, default=0)
    add("--attempts", type=int, default=10, help="starts, when machines are lost")
    add("--runs-dir", type=Path, default=Path("runs"))
    add("--epochs", type=int, default=40)
    add("--width", type=int, default=128)
    args = parser.parse_args()
    options = {"runs_dir": str(args.runs_dir.resolve()), "epochs": args.epochs, "width": args.width}
    found = on_this_machine(args.local, options) if args.local else on_ray(args, options)
    for result in found:
        print(f"rank {result['rank']}: run {result['run_id']}, val_accuracy {result['val_accuracy']:.4f}")


if __name__ == "__main__":
    main()
