"""What only a GPU can show, in under eight minutes on one CUDA machine without network: both engines, side by side.

    python tools/gpu_check.py [--json] [--only CHECK] [--cpu]

Without a GPU it says so and runs nothing. `--cpu` is a rehearsal: the same checks, small, on the CPU.

- train: the JAX and the torch engine in float32, bfloat16 and float16 (with a loss scale); losses are finite and fall,
  and 16 bits end near float32
- parity: from equal weights and batches, 100 updates by SGD and by AdamW: JAX here, torch here, torch on the CPU
- resume: two epochs, and one epoch that is continued, with dropout: equal to the last bit
- memory: peak of a trainer's process beside the bare loop's
- bench: time beside the bare loops of bench.py and bench_torch.py, every precision; told, not judged

Each check is a process of its own with a bound. Exit code: 0 if all are well or there is no GPU, 1 if one failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

BUDGET_SECONDS, CHECK_SECONDS = 450, 150
PRECISIONS = ("float32", "bfloat16", "float16")
ENGINES = ("jax", "torch")
PARITY = 1e-4
"""Of a loss, after 100 updates whose float32 sums are added in another order; a step that is wrong is far outside."""
NEAR = 0.15, 0.05
"""How near 16 bits end to float32: share of the loss, and what is added to it."""
EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
"""float32 products in float32, which GPUs are else asked to shorten."""
Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the checks run, and how large they are.

    Attributes:
        device: torch's name of it.
        width, batch, updates, rate: of the network and the training that is checked.
        rows, rounds: of the bench; None for its own.
    """

    device: str
    width: int
    batch: int
    updates: int
    rate: float
    rows: int | None
    rounds: int


PLACES = {"gpu": Place("cuda", 1024, 1024, 100, 1e-3, None, 3), "cpu": Place("cpu", 32, 64, 40, 1e-2, 1536, 1)}


# In the process of one check ----------------------------------------------------------------------------------------


def look() -> Line:
    """What there is: the name of the GPU as each framework has it, None where it has none."""
    found: Line = {"jax": None, "torch": None}
    try:
        import jax

        device = jax.devices()[0]
        found["jax"] = device.device_kind if device.platform == "gpu" else None
    except RuntimeError as error:
        found["jax_said"] = str(error)
    try:
        import torch  # pyright: ignore[reportMissingImports]

        found["torch"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    except ImportError as error:
        found["torch_said"] = str(error)
    return found


def _columns(rows: int) -> dict[str, Any]:
    """Rows of ten classes that a network can tell apart, in the bench's shape."""
    import numpy as np

    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, rows).astype(np.int32)
    x = rng.standard_normal((rows, 64)).astype(np.float32)
    x[:, :10] += 2 * np.eye(10, dtype=np.float32)[y]
    return {"x": x, "y": y}


def _model(engine: str, place: Place, precision: str = "float32", **net: Any) -> Any:
    """A network of two hidden layers; float16 is a hook's matter."""
    from nnx_jax import FeedForwardParams, NNModelParams

    shape = FeedForwardParams(input_dim=64, output_dim=10, hidden_dims=(place.width, place.width), **net)
    params = NNModelParams.from_state({"precision": "float32" if precision == "float16" else precision})
    if engine == "jax":
        from nnx_jax import NNModel

        return NNModel(shape, params)
    from nnx_jax.torch import NNModel as TorchModel

    return TorchModel(shape, params, device=place.device)


def _trained(model: Any, place: Place, folder: Any, precision: str = "float32", **params: Any) -> Any:
    """Train on four batches an epoch; return the run."""
    from nnx_jax import ArrayDataset, NNDataParams, NNTrainParams
    from nnx_jax.hooks import MixedPrecisionHook

    data = NNDataParams(train=ArrayDataset(_columns(4 * place.batch)), batch_size=place.batch)
    hooks = [MixedPrecisionHook(precision)] if precision == "float16" else []
    given = {"max_steps": place.updates, **params}
    return model.train(NNTrainParams(**given), data=data, hooks=hooks, runs_dir=folder, quiet=True)


def _losses(run: Any) -> Any:
    import numpy as np

    return np.array([row["train_loss"] for row in run.records if row["kind"] == "update"])


def check_train(engine: str, place: Place) -> Iterator[Line]:
    """Every precision trains."""
    import numpy as np

    from nnx_jax import NNOptimParams

    plain = None
    for precision in PRECISIONS:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            optim = NNOptimParams(kind="adam", max_lr=place.rate)
            losses = _losses(_trained(_model(engine, place, precision), place, folder, precision, optim=optim))
            seconds = time.perf_counter() - start
        first, last = losses[:4].mean(), losses[-4:].mean()
        plain = last if plain is None else plain
        near = abs(last - plain) <= NEAR[0] * plain + NEAR[1]
        yield {
            "precision": precision,
            "ok": bool(np.isfinite(losses).all() and last < 0.5 * first and near),
            "first_loss": round(float(first), 4),
            "last_loss": round(float(last), 4),
            "seconds": round(seconds, 2),
        }


def check_parity(_: str, place: Place) -> Iterator[Line]:
    """Equal weights, batches and rates: equal losses, here in both engines and by torch on the CPU."""
    import numpy as np

    from nnx_jax import NNOptimParams
    from nnx_jax.torch.convert import torch_to_flax

    for optim in (
        NNOptimParams(kind="sgd", max_lr=0.05, momentum=0.9),
        NNOptimParams(kind="adamw", max_lr=1e-3, grad_clip_norm=1.0),
    ):
        models = {"jax": _model("jax", place), "torch": _model("torch", place)}
        models["torch on the CPU"] = _model("torch", dataclasses.replace(place, device="cpu"))
        weights = {name: value.detach().cpu() for name, value in models["torch"].net.state_dict().items()}
        models["torch on the CPU"].net.load_state_dict(weights)
        module, given = models["jax"].net, torch_to_flax(models["jax"].params.net, weights)
        for name, layer in (
            *((f"layers.{at}", layer) for at, layer in enumerate(module.layers)),
            ("head", module.head),
        ):
            layer.kernel[...], layer.bias[...] = given[f"{name}.kernel"], given[f"{name}.bias"]
        found = {}
        for name, model in models.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name] = _losses(_trained(model, place, folder, optim=optim))
        gaps = {name: float(np.max(np.abs(found[name] / found["jax"] - 1))) for name in found if name != "jax"}
        yield {
            "optimizer": optim.kind,
            "ok": max(gaps.values()) <= PARITY and len(found["jax"]) == place.updates,
            "largest_difference": {name: float(f"{gap:.2g}") for name, gap in gaps.items()},
            "allowed": PARITY,
        }


def check_resume(engine: str, place: Place) -> Iterator[Line]:
    """Two epochs, and one that is continued by another model: equal records."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _trained(_model(engine, place, dropout_prob=0.2), place, folder, n_epochs=2, max_steps=None)
        half = _trained(_model(engine, place, dropout_prob=0.2), place, folder, n_epochs=1, max_steps=None)
        again = _trained(
            _model(engine, place, dropout_prob=0.2), place, folder,
            n_epochs=1, max_steps=None, resume_from_run_id=half.id,
        )  # fmt: skip
        wanted, found = (_losses(run)[-4:].tolist() for run in (whole, again))
    yield {"ok": found == wanted, "losses": found, "wanted": wanted}


def check_memory(engine: str, place: Place) -> Iterator[Line]:
    """Peaks of processes of their own: the trainer's and the bare loop's."""
    name = next(name for name, found in PLACES.items() if found == place)
    found: Line = {"ok": True}
    for side in ("trainer", "bare"):
        line = _child("peak", engine, name, side, CHECK_SECONDS / 2)[-1]
        found |= {f"{side}_peak_mb": round(line["peak_mb"], 1)} if "peak_mb" in line else line
    yield found


def check_peak(engine: str, place: Place, side: str) -> Iterator[Line]:
    """The process that `check_memory` starts: two epochs of the bench's `mlp` by one side."""
    import bench

    _small(place)
    job: Any
    if engine == "jax":
        job = bench.Job(bench.CASES["mlp"], 2)
    else:
        import bench_torch

        job = bench_torch.Job(bench.CASES["mlp"], 2, place.device)
    with tempfile.TemporaryDirectory() as folder:
        if side == "bare":
            bare = job.bare()
            _ = [bare.epoch(number) for number in range(2)]
        else:
            job.run([], folder)
    yield {"peak_mb": _peak_bytes(engine, place) / 2**20}


def _peak_bytes(engine: str, place: Place) -> float:
    """Of the device; of the whole process on a CPU."""
    if place.device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if engine == "jax":
        import jax

        return (jax.devices()[0].memory_stats() or {})["peak_bytes_in_use"]
    import torch  # pyright: ignore[reportMissingImports]

    return torch.cuda.max_memory_allocated()


def check_bench(engine: str, place: Place) -> Iterator[Line]:
    """Trainer and bare loop, interleaved."""
    import bench

    _small(place)
    if engine == "jax":
        for case in ("mlp", "digits", "hooks"):
            yield {"ok": True, **bench.time_case(case, place.rounds)}
        return
    import bench_torch

    for case in ("mlp", "digits"):
        for precision in PRECISIONS:
            with tempfile.TemporaryDirectory() as folder:
                line = bench_torch.train(case, place.rounds, folder, device=place.device, precision=precision)
            yield {"ok": True, **line}


def _small(place: Place) -> None:
    """Cut the bench's data to the place's rows."""
    import bench

    if place.rows is not None:
        for name, case in bench.CASES.items():
            made = {column: values[: place.rows] for column, values in case.data().items()}
            bench.CASES[name] = dataclasses.replace(case, data=lambda made=made: made)


CHECKS: dict[str, Callable[..., Iterator[Line]]] = {
    "train": check_train,
    "parity": check_parity,
    "resume": check_resume,
    "memory": check_memory,
    "bench": check_bench,
}


# In the process that starts them --------------------------------------------------------------------------------------


def _child(check: str, engine: str, place: str, side: str = "", timeout: float = CHECK_SECONDS) -> list[Line]:
    """Lines of one check; the last one says what went wrong, if it failed or took too long."""
    root, here = Path(__file__).resolve().parents[1], Path(__file__).resolve().parent
    paths = [str(root), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment: Mapping[str, str] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **({"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"} if place == "cpu" else {}),
        **(EXACT if check == "parity" else {}),
    }
    command = [sys.executable, __file__, "--child", check, engine, place, side]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            code = subprocess.run(
                command, env=environment, stdout=out, stderr=err, timeout=timeout, check=False
            ).returncode
            told = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            told = f"took longer than {timeout:.0f} s"
        out.seek(0)
        err.seek(0)
        lines = [json.loads(line) for line in out if line.startswith("{") and line.endswith("\n")]
        return [*lines, {"ok": False, "error": f"{told}: {err.read().strip()[-1500:]}"}] if told else lines


def run_child(check: str, engine: str, place: str, side: str) -> None:
    """The process of one check."""
    if check == "look":
        print(json.dumps(look()))
        return
    lines = check_peak(engine, PLACES[place], side) if check == "peak" else CHECKS[check](engine, PLACES[place])
    for line in lines:
        print(json.dumps(line), flush=True)


def run(place: str, names: list[str], engines: list[str], say: Callable[[Line], None]) -> bool:
    """Run checks one after another within the budget; whether all are well."""
    begun, well = time.monotonic(), True
    patience = 4 if place == "cpu" else 1  # a rehearsal may share its machine
    for check in names:
        for engine in ["both"] if check == "parity" else engines:
            left = BUDGET_SECONDS * patience - (time.monotonic() - begun)
            lines: list[Line] = [{"ok": False, "error": f"not run: {BUDGET_SECONDS * patience} s are over"}]
            if left >= 10:
                lines = _child(check, engine, place, timeout=min(left, CHECK_SECONDS * patience))
            for line in lines:
                say({"check": check, "engine": engine, **line})
                well = well and line["ok"]
    return well


def describe(line: Line) -> str:
    """One line for a person."""
    rest = {name: value for name, value in line.items() if name not in ("check", "engine", "ok")}
    told = "  ".join(f"{name} {value}" for name, value in rest.items())
    return f"{'ok' if line['ok'] else 'FAILED':6} {line['check']:6} {line['engine']:5}  {told}"


def main() -> int:
    """Run what was asked for; see above for the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON line a result")
    parser.add_argument("--only", action="append", choices=tuple(CHECKS), help="default: all; repeatable")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal: the same checks, small, on the CPU")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(*args.child)
        return 0
    begun, names = time.monotonic(), args.only or list(CHECKS)
    found = _child("look", "", "gpu")[-1] if not args.cpu else {"jax": "CPU", "torch": "CPU"}
    if "error" in found:
        print(f"gpu_check: cannot look for a GPU: {found['error']}", file=sys.stderr)
        return 1
    engines = [engine for engine in ENGINES if found[engine]]
    if not engines:
        print("gpu_check: no GPU here (neither JAX nor torch sees one); nothing was run. --cpu rehearses on the CPU")
        return 0
    if len(engines) == 1:
        missing = next(engine for engine in ENGINES if not found[engine])
        print(f"gpu_check: {missing} sees no GPU here, so its checks and parity are left out", file=sys.stderr)
        names = [name for name in names if name != "parity"]
    say: Callable[[Line], None] = lambda line: print((json.dumps if args.json else describe)(line), flush=True)  # noqa: E731
    well = run("cpu" if args.cpu else "gpu", names, engines, say)
    where = found[engines[0]]
    print(
        f"gpu_check: {'all well' if well else 'FAILED'} on {where}, {time.monotonic() - begun:.0f} s", file=sys.stderr
    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
