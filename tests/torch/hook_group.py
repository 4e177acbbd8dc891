"""What torch processes with hooks do in `test_hook_group.py`: runs in each of them and returns JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from nnx_jax.core.hooks import TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.hooks import (
    DDPHook,
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    SkipNonFinite,
    SpikeSkipHook,
    TorchProfilerHook,
)
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.torch.hooks.samplers import with_samplers
from tests.torch.group_runs import arrays, ddp, facts, model, rank, size


class Says(TrainingUpdateHook):
    """Vetoes one update on one process alone, and notes what it sees."""

    def __init__(self, at: int, who: int) -> None:
        self.at, self.who, self.losses, self.skips = at, who, [], []

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        if stage is Stage.AFTER_OPTIMIZER_STEP:
            self.losses.append(float(ctx.loss))
            self.skips.append(bool(will_skip))
        return not (stage is Stage.DO_OPTIMIZER_STEP and ctx.batch_count == self.at and rank() == self.who), ctx.loss


def fit(runs: Path, hooks: list[Any], *, spikes: bool = False, **more: Any) -> tuple[Any, Any]:
    """Train on 22 rows in batches of 4, which two processes cut into two and two (one and one in the last)."""
    rows = arrays()
    if spikes:
        rows["x"][5] *= 40.0  # one row that one process has
    data = NNDataParams(train={"kind": "arrays", **rows}, batch_size=4, shuffle=False)  # type: ignore[arg-type]
    made = model()
    options = {"runs_dir": runs, "quiet": True, "hooks": hooks, **ddp(**more.pop("ddp", {}))}
    optim = NNOptimParams(kind="adam", max_lr=0.02)
    run = made.train(NNTrainParams(n_epochs=2, optim=optim, **more), data=data, **options)
    return made, run


def lists(folder: Path) -> dict[str, Any]:
    """The same list of hooks in every number of processes."""
    found: dict[str, Any] = {}
    hooks = [
        GradientAccumulationHook(2), SkipNonFinite(), GradientClipHook(0.5), EMAHook(decay=0.5),
        SpikeSkipHook(factor=1.5, decay=0.5, warmup=1, max_consecutive=None),
    ]  # fmt: skip
    made, run = fit(folder / "list", hooks, spikes=True)
    stored = read_point(RunPaths(run.root, run.id), "LAST").load_all()
    slots = {name: np.asarray(value).tolist() for name, value in stored.items() if name.startswith("slots/")}
    found["list"] = {**facts(made, run), "slots": slots}
    by_loss = [SpikeSkipHook(factor=1.2, decay=0.5, warmup=1, metric="loss", max_consecutive=None)]
    made, run = fit(folder / "loss", by_loss, spikes=True)
    found["loss"] = facts(made, run)
    says = Says(at=3, who=size() - 1)
    made, run = fit(folder / "says", [says])
    found["says"] = {**facts(made, run), "losses": says.losses, "skips": says.skips}
    mixed = MixedPrecisionHook("bf16")
    allowed: dict[str, Any] = {"ddp": {"allow": ["autocast"]}} if size() > 1 else {}
    profiler = TorchProfilerHook(str(folder / "profiles"))
    made, run = fit(folder / "mixed", [mixed, profiler, DDPHook(find_unused_parameters=True)], **allowed)
    found["mixed"] = facts(made, run)
    found["traces"] = sorted(str(path.relative_to(folder)) for path in (folder / "profiles").rglob("*.json"))
    return found


def samplers(folder: Path) -> dict[str, Any]:
    """A plain DataLoader becomes one of this process's rows; one with a distributed sampler stays as it is."""
    from nnx_jax.distributed.group import DDP
    from nnx_jax.params.run import RunSpec
    from nnx_jax.torch.distributed import open_world

    rows = arrays()
    dataset = TensorDataset(torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"]))
    plain = DataLoader(dataset, batch_size=2)
    world = open_world(DDP())
    spec = RunSpec(train=NNTrainParams(n_epochs=1, train_loader=plain))
    hook = DDPHook(sampler_kwargs={"seed": 3})
    feed = with_samplers({}, spec, hook, world)["train"]
    own = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, shuffle=True))
    spec = RunSpec(train=NNTrainParams(n_epochs=1, train_loader=own))
    kept = with_samplers({}, spec, hook, world)["train"]
    orders = [list(_seen(kept, epoch)) for epoch in (0, 1, 0)]
    made = model()
    params = NNTrainParams(n_epochs=2, train_loader=plain, data_id="rows", optim=NNOptimParams(kind="sgd", max_lr=0.1))
    run = made.train(params, runs_dir=folder / "sampled", quiet=True, hooks=[DDPHook()], **ddp())
    return {
        "rows": list(_seen(feed, 0)),
        "seed": feed._loader._sampler.seed,
        "kept": kept._loader._loader is own,
        "orders": orders,
        **facts(made, run),
    }


def _seen(feed: Any, epoch: int) -> Any:
    for batch in feed.batches(epoch):
        yield from batch["x"][batch["mask"] > 0, 0].tolist()


def life(folder: str) -> dict[str, Any]:
    return {**lists(Path(folder)), "samplers": samplers(Path(folder))}
