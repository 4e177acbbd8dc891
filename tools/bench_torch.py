"""Time the torch engine: against the loop you would have written by hand in torch, and against thekaveh-nnx 0.4.1.

    python tools/bench_torch.py [--case NAME] [--processes N] [--json] [--rounds N] [--threads N]

`digits` and `mlp` are the jobs of tools/bench.py: they train through `nnx_jax.torch.NNModel.train`, with a record of
every update, progress and one commit an epoch. After each epoch a callback runs an epoch of the bare loop of
tools/bare_torch.py in the same process. Both start from equal weights, see the same batches, and must agree on the
first loss. Everything between two epochs counts as the trainer's time; the first epoch of both does not.

`peer` is the job of `tools/bench.py --peer nnx` with the torch engine on this side; see bench_peer.py.

With two processes (gloo, every process half of each batch) the bare loop is DistributedDataParallel by hand, in the
processes of the trainer, and the other library's is its own recipe for torchrun. Every case runs in processes of its
own, with a fixed number of threads: as many as there are processors, divided by the processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bare_loops import RATE
from bench import CASES, Case, per_step, quartiles
from bench_peer import describe_peer, group_environment, time_peer

BAR, PEER_BAR = 1.05, 8.0
NAMES = ("digits", "mlp", "peer")
_LANDING_SECONDS = 120


def time_case(name: str, processes: int, rounds: int | None, threads: int | None) -> dict[str, Any]:
    """Run one case in processes of its own; return its line.

    Raises:
        RuntimeError: a process failed, or the sides do not train alike.
    """
    threads = threads or max(1, len(os.sched_getaffinity(0)) // processes)
    if name == "peer":
        return time_peer("nnx", rounds, engine="torch", processes=processes, threads=threads, bar=PEER_BAR)
    rounds = rounds or CASES[name].rounds
    environments = group_environment(processes, threads)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", name, str(rounds), folder]
        running = []
        for rank, environment in enumerate(environments):
            with Path(folder, f"{rank}.err").open("w") as errors:
                pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
                running.append(subprocess.Popen(command, env=environment, **pipes))
        try:
            said = [process.communicate()[0] for process in running]
        finally:
            for process in running:
                process.kill()
        if any(process.returncode for process in running):
            told = [Path(folder, f"{rank}.err").read_text()[-2000:] for rank in range(processes)]
            raise RuntimeError(f"{name}: a process failed:\n" + "\n".join(told))
    return {**json.loads(said[0].splitlines()[-1]), "threads": threads}


def run_child(name: str, rounds: int, folder: str) -> None:
    """One process of a case; the first one says the line."""
    import torch  # pyright: ignore[reportMissingImports]

    from nnx_jax.torch import distributed

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank, world = distributed.init_process_group()
    line = train(name, rounds, folder, rank, world)
    if rank == 0:
        print(json.dumps(line), flush=True)
    distributed.shutdown()


class Job:
    """The same job for both sides, on one device, in every process of the group there may be.

    Args:
        case: see bench.py.
        device, precision: of both sides; float16 with a loss scale.
    """

    def __init__(self, case: Case, epochs: int, device: str = "cpu", precision: str = "float32") -> None:
        from nnx_jax import ArrayDataset, NNDataParams, NNModelParams, NNOptimParams, NNParams, NNTrainParams
        from nnx_jax.data import Feed
        from nnx_jax.hooks import MixedPrecisionHook
        from nnx_jax.torch import NNModel

        self.columns, self.device, self.precision = case.data(), device, precision
        dataset, scaled = ArrayDataset(self.columns), precision == "float16"
        self.data = NNDataParams(train=dataset, batch_size=case.batch, tail="drop")
        self.params = NNTrainParams(n_epochs=epochs, optim=NNOptimParams(kind="adam", max_lr=RATE))
        self.hooks = [MixedPrecisionHook(precision)] if scaled else []
        shape = NNParams.from_state({**case.net, "input_dim": self.columns["x"].shape[1], "output_dim": 10})
        kept = NNModelParams.from_state({"precision": "float32" if scaled else precision})
        self.model = NNModel(shape, kept, device=device)
        self.feed = Feed(dataset, batch_size=case.batch, tail="drop", shuffle=True, seed=0)

    def bare(self) -> Any:
        """The loop by hand, from the model's first weights."""
        import torch  # pyright: ignore[reportMissingImports]
        from bare_torch import BareTorch

        net: Any = self.model.net
        weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.precision)
        return BareTorch(weights, self.columns, self.feed.order, RATE, self.device, dtype)

    def run(self, callbacks: list[Any], folder: str, world: int = 1) -> Any:
        """Train through the public face, with history, a progress line an epoch, and a commit an epoch."""
        from nnx_jax.loop.progress import PlainProgress
        from nnx_jax.torch import distributed

        common: dict[str, Any] = {"data": self.data, "runs_dir": folder, "progress": PlainProgress(io.StringIO())}
        group = distributed.DDP() if world > 1 else None
        return self.model.train(self.params, callbacks, hooks=self.hooks, distributed=group, **common)


def train(
    name: str,
    rounds: int,
    folder: str,
    rank: int = 0,
    world: int = 1,
    *,
    device: str = "cpu",
    precision: str = "float32",
) -> dict[str, Any]:
    """Train and time one case here, in one of `world` processes; return its line. The run is kept in `folder`."""
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]

    from nnx_jax import Callback

    job = Job(CASES[name], rounds + 1, device, precision)
    bare, steps = job.bare(), job.feed.n_batches

    def together() -> None:
        if world > 1:
            dist.barrier()

    class Interleave(Callback):
        """After each epoch of the trainer: wait for the commit in flight, then run the bare loop's epoch."""

        distributed = "all"

        def __init__(self, folder: str) -> None:
            self.folder, self.since = Path(folder), time.perf_counter()
            self.times: dict[str, list[float]] = {"trainer": [], "bare": [], "wait": []}
            self.losses: list[float] = []

        def on_epoch_end(self, ctx: Any) -> None:
            now = time.perf_counter()
            if ctx.epoch and rank == 0:
                self._landed(ctx.run_id, ctx.epoch - 1)
            together()
            waited = time.perf_counter()
            seconds, *theirs = bare.epoch(ctx.epoch)
            if ctx.epoch:
                for side, value in (("trainer", waited - self.since), ("bare", seconds), ("wait", waited - now)):
                    self.times[side].append(value)
            else:
                losses = [row["train_loss"] for row in ctx.records if row["kind"] == "update"]
                self.losses = [losses[0], losses[-1], *theirs]
            together()
            self.since = time.perf_counter()

        def _landed(self, run_id: str, epoch: int) -> None:
            last, until = self.folder / run_id / "checkpoints" / "LAST", time.monotonic() + _LANDING_SECONDS
            while not last.exists() or json.loads(last.read_bytes())["epoch"] < epoch:
                if time.monotonic() > until:
                    raise TimeoutError(f"{last}: the commit of epoch {epoch} did not land")
                time.sleep(0.0005)

    watch = Interleave(folder)
    run = job.run([watch], folder, world)
    updates = len([row for row in run.records if row["kind"] == "update"])
    if updates != steps * (rounds + 1):
        raise RuntimeError(f"{name}: {updates} history rows for {steps * (rounds + 1)} updates")
    first, last, their_first, their_last = watch.losses
    near = 1e-4 if precision == "float32" else 2e-2
    if abs(first - their_first) > near * their_first or abs(last - their_last) > 0.25 * their_last + 0.05:
        raise RuntimeError(f"{name}: the two sides do not train alike: {watch.losses}")
    ratios = [ours / theirs for ours, theirs in zip(watch.times["trainer"], watch.times["bare"], strict=True)]
    ratio = statistics.median(ratios)
    return {
        "case": f"torch_{name}",
        "processes": world,
        "device": device,
        "precision": precision,
        "ratio_to_bare": round(ratio, 4),
        "ratio_quartiles": [round(value, 4) for value in quartiles(ratios)],
        "trainer_ms_per_step": per_step(watch.times["trainer"], steps),
        "bare_ms_per_step": per_step(watch.times["bare"], steps),
        "steps_per_round": steps,
        "rounds": rounds,
        "commit_wait_ms_per_round": round(1e3 * statistics.median(watch.times["wait"]), 2),
        "first_loss": [round(first, 5), round(their_first, 5)],
        "torch": str(torch.__version__),
        "bar": f"ratio_to_bare <= {BAR}",
        "met": ratio <= BAR,
    }


def describe(line: dict[str, Any]) -> str:
    """One line for a person."""
    if line["case"].startswith("peer"):
        return f"{describe_peer(line)}  {line['processes']} processes of {line['threads']} threads"
    ours, theirs = line["trainer_ms_per_step"]["median"], line["bare_ms_per_step"]["median"]
    return (
        f"{line['case']:13} {line['processes']} processes of {line['threads']} threads  trainer {ours:.4f} ms  bare "
        f"{theirs:.4f} ms  ratio {line['ratio_to_bare']:.3f} {line['ratio_quartiles']}  "
        f"[{line['bar']}: {'met' if line['met'] else 'MISSED'}]"
    )


def main() -> int:
    """Run the cases asked for; exit 0 whatever the numbers are, 1 without torch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--case", action="append", choices=NAMES, help="default: all; repeatable")
    parser.add_argument("--processes", type=int, choices=(1, 2), action="append", help="default: both; repeatable")
    parser.add_argument("--rounds", type=int, help="measured rounds of each side (default: per case)")
    parser.add_argument("--threads", type=int, help="of torch in every process (default: processors / processes)")
    parser.add_argument("--json", action="store_true", help="one JSON line a case")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args.child[0], int(args.child[1]), args.child[2])
        return 0
    if importlib.util.find_spec("torch") is None:
        print("bench_torch: torch is not installed; try: pip install 'nnx_jax[torch]'", file=sys.stderr)
        return 1
    for name in args.case or NAMES:
        for processes in args.processes or (1, 2):
            line = time_case(name, processes, args.rounds, args.threads)
            print(json.dumps(line) if args.json else describe(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
