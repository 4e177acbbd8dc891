"""Time `thekaveh-nnx` 0.4.1 (PyTorch, CPU) and this trainer on one job: equal weights, batches, records; interleaved.

    python tools/bench.py --peer nnx [--json] [--rounds N]
    python tools/bench_torch.py --case peer    # this trainer's torch engine; one process each, and two

Both train a 64-32-10 network on the digits by Adam, in batches of 32, with a record of loss, accuracy, F1, precision
and recall for every batch, a validation and a commit for every epoch, and their own progress display. Each is a process
of its own that stops after every epoch until it is told to go on, so one is at work at a time; both use as many threads
as there are processors. Everything between the ends of two epochs counts, the commit of the first of them included,
which must have landed by then. The first epoch of both, in which one of them compiles, does not count.

Two processes are a gloo group that each side joins as its own recipe for torchrun says, every one with half of a batch.
The two libraries then deal the rows in other orders, so only the loss of the first epoch is compared.

The other library is installed, without its dependencies, into a folder that is removed afterwards; torch must be there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PEERS = {"nnx": ("thekaveh-nnx==0.4.1", "pandas", "prettytable", "wcwidth", "tqdm", "python-dateutil", "six")}
"""What is installed for each; everything else it needs is what this project's own environment has, and torch."""
BAR = 20.0
BATCH, RATE, HIDDEN = 32, 1e-3, 32
METRICS: Any = ("accuracy", "f1", "precision", "recall")
_ROOT = Path(__file__).resolve().parent.parent
_PATIENCE_SECONDS = 300


def time_peer(
    name: str,
    rounds: int | None,
    *,
    engine: str = "jax",
    processes: int = 1,
    threads: int | None = None,
    bar: float = BAR,
) -> dict[str, Any]:
    """Run both sides; return the line.

    Args:
        engine: of this side, "jax" or "torch".
        processes: of each side; more than one for torch alone.
        threads: of torch in each process; as many as there are processors, unless it is given.

    Raises:
        RuntimeError: torch is missing, a side failed, or the two did not train alike.
    """
    if importlib.util.find_spec("torch") is None:
        raise RuntimeError(f"{PEERS[name][0]} needs torch, which is not installed; try: pip install torch")
    rounds, threads = rounds or 9, threads or len(os.sched_getaffinity(0))
    ours = "ours" if engine == "jax" else "ours_torch"
    with tempfile.TemporaryDirectory() as folder, _installed(name) as site:
        _write_job(Path(folder, "job.npz"))
        sides: dict[str, Any] = {}
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
        try:
            for side, kind, path in (("ours", ours, str(_ROOT)), ("theirs", "theirs", site)):
                sides[side] = Group(kind, folder, rounds + 1, path, group_environment(processes, threads))
            for _ in range(rounds + 1):
                for side, process in sides.items():
                    found[side].append(process.ask())
            ends = {side: process.ask() for side, process in sides.items()}
        finally:
            for process in sides.values():
                process.kill()
    more = {} if engine == "jax" else {"engine": engine, "processes": processes}
    return {**_line(name, rounds, found, ends, processes, bar), **more, "threads": threads}


def group_environment(processes: int, threads: int) -> list[dict[str, str]]:
    """The environment of every process of a gloo group on this machine, as torchrun makes it."""
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(_ROOT), str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": str(threads)}
    common = {**os.environ, **place, **size, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _line(
    name: str,
    rounds: int,
    found: dict[str, list[dict[str, Any]]],
    ends: dict[str, dict[str, Any]],
    processes: int,
    bar: float,
) -> dict[str, Any]:
    records = {side: end["records"] for side, end in ends.items()}
    if processes == 1:
        gap, largest = _largest_gap(*records.values()), 1e-3
    else:  # the rows are dealt in another order
        means = [statistics.mean(row[0] for row in rows) for rows in records.values()]
        gap, largest = abs(means[0] - means[1]), 0.1
    if gap > largest or len(records["ours"]) != len(records["theirs"]):
        raise RuntimeError(f"the two sides do not train alike: a record of the first epoch differs by {gap:.2g}")
    updates = len(records["ours"])
    rates = {side: [updates / epoch["seconds"] for epoch in epochs[1:]] for side, epochs in found.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates["theirs"], strict=True)]
    ratio = statistics.median(ratios)
    return {
        "case": f"peer_{name}",
        "ours_updates_per_second": round(statistics.median(rates["ours"]), 1),
        "theirs_updates_per_second": round(statistics.median(rates["theirs"]), 1),
        "ratio": round(ratio, 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "rounds": rounds,
        "updates_per_round": updates,
        "largest_difference_of_records": float(f"{gap:.2g}"),
        "final_val_loss": {side: round(end["val_loss"], 5) for side, end in ends.items()},
        "bar": f"ratio >= {bar:g}",
        "met": ratio >= bar,
    }


def _largest_gap(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """The largest difference of any value recorded for a batch of the first epoch."""
    if len(ours) != len(theirs):
        raise RuntimeError(f"{len(ours)} records on one side, {len(theirs)} on the other")
    return max(abs(a - b) for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True))


def describe_peer(line: dict[str, Any]) -> str:
    """One line for a person."""
    return (
        f"{line['case']:8} ours {line['ours_updates_per_second']:.0f} updates/s  theirs "
        f"{line['theirs_updates_per_second']:.0f}  x{line['ratio']} {line['ratio_range']}  "
        f"[{line['bar']}: {'met' if line['met'] else 'MISSED'}]"
    )


@contextmanager
def _installed(name: str) -> Iterator[str]:
    """A folder with the peer in it."""
    with tempfile.TemporaryDirectory() as site:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, *PEERS[name]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{PEERS[name][0]} cannot be installed: {done.stderr.strip()}")
        yield site


def _write_job(path: Path) -> None:
    """The rows and the first weights that both sides use."""
    import numpy as np

    sys.path.insert(0, str(_ROOT))
    from nnx_jax import DigitsDataset

    rng, arrays = np.random.default_rng(0), {}
    for split in ("train", "val"):
        rows = DigitsDataset(split=split).arrays()
        arrays |= {f"{split}_{column}": rows[column] for column in ("x", "y")}
    for layer, (wide, narrow) in enumerate(((64, HIDDEN), (HIDDEN, 10))):
        bound = wide**-0.5
        arrays[f"kernel{layer}"] = rng.uniform(-bound, bound, (wide, narrow)).astype(np.float32)
        arrays[f"bias{layer}"] = np.zeros(narrow, np.float32)
    np.savez(path, **arrays)


class Group:
    """One side in processes of its own, an epoch at a time.

    Args:
        kind: see `main`.
        path: where the side's own library is.
        environments: one for each process.
    """

    def __init__(
        self, kind: str, folder: str, epochs: int, path: str, environments: Sequence[Mapping[str, str]]
    ) -> None:
        here = str(Path(__file__).resolve().parent)
        command = [sys.executable, __file__, kind, folder, str(epochs)]
        self._name, self._errors = kind, [Path(folder, f"{kind}.{rank}.err") for rank in range(len(environments))]
        self._processes: list[Any] = []
        for errors, environment in zip(self._errors, environments, strict=True):
            environment = {**environment, "PYTHONPATH": os.pathsep.join([path, here])}
            with errors.open("w") as file:
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file}
                self._processes.append(subprocess.Popen(command, text=True, env=environment, **pipes))

    def ask(self) -> dict[str, Any]:
        """Let it go on to the end of its next epoch, or of the training; what its first process says then."""
        answers = []
        with contextlib.suppress(BrokenPipeError):
            for process in self._processes:
                process.stdin.write("go\n")
                process.stdin.flush()
            answers = [process.stdout.readline() for process in self._processes]
        if not answers or not all(answers):
            told = "\n".join(errors.read_text()[-4000:] for errors in self._errors)
            raise RuntimeError(f"the side '{self._name}' failed:\n{told}")
        return json.loads(answers[0])

    def kill(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.wait()


# In the process of one side ------------------------------------------------------------------------------------------


class Turn:
    """Waits until it is this side's turn, and says how long the turn took."""

    def __init__(self) -> None:
        self._out = sys.stdout
        sys.stdout = io.StringIO()  # what a trainer prints is part of its work and not of the answer
        self.since = 0.0

    def wait(self) -> None:
        """Begin when told."""
        sys.stdin.readline()
        self.since = time.perf_counter()

    def say(self, **answer: Any) -> None:
        """End the turn."""
        print(json.dumps(answer), file=self._out, flush=True)

    def epoch_ends(self, landed: Callable[[], None]) -> None:
        """Say how long this epoch took, once the commit of the one before has landed, and wait."""
        landed()
        self.say(seconds=time.perf_counter() - self.since)
        self.wait()


def run_ours(folder: Path, epochs: int, turn: Turn) -> None:
    """Train here, by the JAX engine."""
    import jax.numpy as jnp

    from nnx_jax import NNModel, distributed

    job = _read_job(folder)
    model = _model(NNModel)
    module: Any = model.net
    for number, layer in enumerate([*module.layers, module.head]):
        layer.kernel[...], layer.bias[...] = jnp.asarray(job[f"kernel{number}"]), jnp.asarray(job[f"bias{number}"])
    _train_ours(model, distributed, job, folder, epochs, turn)


def run_ours_torch(folder: Path, epochs: int, turn: Turn) -> None:
    """Train here, by the torch engine."""
    import torch  # pyright: ignore[reportMissingImports]

    from nnx_jax.torch import NNModel, distributed

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if _world() > 1:
        distributed.init_process_group()
    job = _read_job(folder)
    model = _model(NNModel)
    _put(job, model.net)
    _train_ours(model, distributed, job, folder, epochs, turn)
    distributed.shutdown()


def _model(face: Any) -> Any:
    from nnx_jax import FeedForwardParams, NNModelParams

    return face(FeedForwardParams(input_dim=64, output_dim=10, hidden_dims=(HIDDEN,)), NNModelParams(metrics=METRICS))


def _train_ours(model: Any, group: Any, job: dict[str, Any], folder: Path, epochs: int, turn: Turn) -> None:
    from nnx_jax import ArrayDataset, Callback, NNDataParams, NNOptimParams, NNTrainParams
    from nnx_jax.loop.progress import PlainProgress

    runs, world, rank = folder / "ours", _world(), int(os.environ["RANK"])

    class Interleave(Callback):
        distributed = "all"

        def on_epoch_end(self, ctx: Any) -> None:
            turn.epoch_ends(lambda: self._landed(ctx.run_id, ctx.epoch - 1))

        def _landed(self, run_id: str, epoch: int) -> None:
            last, until = runs / run_id / "checkpoints" / "LAST", time.monotonic() + _PATIENCE_SECONDS
            while epoch >= 0 and (not last.exists() or json.loads(last.read_bytes())["epoch"] < epoch):
                if time.monotonic() > until:
                    raise TimeoutError(f"{last}: the commit of epoch {epoch} did not land")
                time.sleep(0.0005)

    rows = {split: {column: job[f"{split}_{column}"] for column in ("x", "y")} for split in ("train", "val")}
    given: dict[str, Any] = {"n_epochs": epochs, "record_every": "batch"}
    call: dict[str, Any] = {"runs_dir": runs, "progress": PlainProgress(io.StringIO())}
    if world > 1:
        given["train_loader"] = group.train_loader(rows["train"], BATCH // world, seed=0)
        given["val_loader"] = group.validation_loader(rows["val"], BATCH)
        call["distributed"] = group.DDP()
    else:
        train, val = (ArrayDataset(rows[split]) for split in ("train", "val"))
        call["data"] = NNDataParams(train=train, val=val, batch_size=BATCH, shuffle=False)
    turn.wait()
    adam = NNOptimParams(kind="adam", max_lr=RATE)
    run = model.train(NNTrainParams(optim=adam, **given), [Interleave()], quiet=rank > 0, **call)
    first = [row for row in run.records if row["kind"] == "batch" and row["epoch"] == 0]
    names = [f"train_{name}" for name in ("loss", *METRICS)]
    records = [[row[name] for name in names] for row in first]
    turn.say(records=records, val_loss=run.epochs[-1]["val_loss"])


def run_theirs(folder: Path, epochs: int, turn: Turn) -> None:
    """Train by the other library."""
    import torch  # pyright: ignore[reportMissingImports]
    from nnx import (  # pyright: ignore[reportMissingImports]
        Activations,
        Callback,
        Devices,
        Losses,
        Nets,
        NNModel,
        NNModelParams,
        NNOptimParams,
        NNParams,
        NNTrainParams,
        Optims,
        distributed,
    )
    from torch.utils.data import DataLoader, TensorDataset  # pyright: ignore[reportMissingImports]

    os.chdir(folder)  # its runs are below the working directory
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    world = _world()
    if world > 1:
        distributed.init_process_group()
    job = _read_job(folder)
    net = NNParams(input_dim=64, output_dim=10, hidden_dims=[HIDDEN], dropout_prob=0.0, activation=Activations.RELU)
    model = NNModel(net, NNModelParams(net=Nets.FEED_FWD, device=Devices.CPU, loss=Losses.CROSS_ENTROPY))
    _put(job, model.net)

    def loader(split: str) -> Any:
        rows = TensorDataset(torch.from_numpy(job[f"{split}_x"]), torch.from_numpy(job[f"{split}_y"]).long())
        if world == 1:
            return DataLoader(rows, batch_size=BATCH)
        if split == "train":
            return distributed.train_loader(rows, batch_size=BATCH // world, seed=0)
        return distributed.validation_loader(rows, batch_size=BATCH)

    class Interleave(Callback):
        distributed = "all"

        def on_epoch_end(self, ctx: Any) -> None:
            turn.epoch_ends(lambda: None)  # it commits before it goes on

    call = {} if world == 1 else {"distributed": distributed.DDP()}
    adam = NNOptimParams(name=Optims.ADAM, max_lr=RATE, weight_decay=0.0, momentum=(0.9, 0.999))
    turn.wait()
    run = model.train(
        NNTrainParams(n_epochs=epochs, train_loader=loader("train"), val_loader=loader("val"), optim=adam, seed=0),
        [Interleave()],
        **call,
    )
    first = [point.train_edp for point in run.idps if point.epoch_idx == 0]
    records = [[getattr(found, name) for name in ("loss", *METRICS)] for found in first]
    turn.say(records=records, val_loss=run.idps[-1].val_edp.loss)
    distributed.shutdown()


def _put(job: Mapping[str, Any], module: Any) -> None:
    """Give a torch module's linear layers the job's first weights."""
    import torch  # pyright: ignore[reportMissingImports]

    dense = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        for number, layer in enumerate(dense):
            layer.weight.copy_(torch.from_numpy(job[f"kernel{number}"].T.copy()))
            layer.bias.copy_(torch.from_numpy(job[f"bias{number}"]))


def _read_job(folder: Path) -> dict[str, Any]:
    import numpy as np

    return dict(np.load(folder / "job.npz"))


def _world() -> int:
    """Processes of this side."""
    return int(os.environ["WORLD_SIZE"])


_SIDES = {"ours": run_ours, "ours_torch": run_ours_torch, "theirs": run_theirs}


def main() -> int:
    """A process of one side."""
    parser = argparse.ArgumentParser(description="one side of a comparison; started by tools/bench.py")
    parser.add_argument("side", choices=tuple(_SIDES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("epochs", type=int)
    args = parser.parse_args()
    _SIDES[args.side](args.folder, args.epochs, Turn())
    return 0


if __name__ == "__main__":
    sys.exit(main())
