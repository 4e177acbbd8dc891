"""Updates by any number of torch processes; `test_ddp_law.py` compares them with one process on the union."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nnx_jax.hooks import EMAHook, GradientAccumulationHook, GradientClipHook
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.torch import NNModel
from tests.torch.group_runs import ddp, error, facts, rank, size, train_rows

WIDTH, CLASSES = 4, 3
PAIRS = [(window, policy) for window in (1, 2) for policy in ("pad", "drop")]


class Counted(torch.nn.Module):
    """A linear layer whose weights are small whole numbers; counts its forward passes."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(outputs * WIDTH, dtype=torch.float32).reshape(outputs, WIDTH) % 3)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + 0.0 * self.unused.sum()


def dyadic(rows: int) -> dict[str, np.ndarray]:
    """Small whole numbers: every sum of them is exact in float32."""
    draw = np.random.default_rng(1)
    x = draw.integers(-2, 3, (rows, WIDTH)).astype(np.float32)
    return {"x": x, "y": draw.integers(-2, 3, (rows, 2)).astype(np.float32)}


def labelled(rows: int, ignored: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(2)
    y = draw.integers(0, CLASSES, rows).astype(np.int32)
    y[list(ignored)] = -100
    return {"x": draw.normal(size=(rows, WIDTH)).astype(np.float32), "y": y}


def squares(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[B]: one value a row."""
    return (outputs - batch["y"]).square().sum(-1)


def additive(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[LossTerm, ...]:
    return (LossTerm("sum", squares(outputs, batch).sum(), reduction="sum"),)


def two_means(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[LossTerm, ...]:
    """Divided by different numbers, so that they share no gradient buffer."""
    kept = (batch["y"][:, 0] > 0).float()
    return (
        LossTerm("all", squares(outputs, batch).sum(), outputs.new_tensor(float(len(outputs)))),
        LossTerm("some", (outputs.square().sum(-1) * kept).sum(), kept.sum(), weight=0.5),
    )


def own_mean(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[LossTerm, ...]:
    """A mean over labels that count, taken by the loss itself: 0/0 where none does."""
    kept = batch["y"] >= 0
    value = outputs.sum(-1)[kept].sum() / kept.sum()
    return (LossTerm("own", value, reduction="sum"),)


def update(folder: Path, name: str, rows: Any, batch_size: int, world: int, **more: Any) -> dict[str, Any]:
    """One run by as many processes as there are; one process alone stands for `world`."""
    net = more.pop("net", None) or Counted()
    loss = more.pop("loss", squares)
    window, policy = more.pop("window", 1), more.pop("policy", "pad")
    optim = NNOptimParams(kind="sgd", max_lr=2.0**-6, accumulate_grad_batches=window, **more.pop("optim", {}))
    loader = train_rows(rows, batch_size, world, policy=policy, seed=3)
    made = NNModel(module=net, loss=loss) if callable(loss) else NNModel(params=NNModelParams(loss=loss), module=net)
    hooks = more.pop("hooks", ())
    params = NNTrainParams(n_epochs=more.pop("epochs", 1), optim=optim, train_loader=loader, **more)
    given = {"find_unused_parameters": True} if name == "unused" else {}
    run = made.train(params, hooks=hooks, runs_dir=folder / name, quiet=True, **ddp(**given))
    skipped = [row["skipped"] for row in run.records if row["kind"] == "update"]
    return {**facts(made, run), "skipped": skipped, "rank": rank()}


class Sometimes(Counted):
    """Uses `unused` in rows whose first number is 2, which not every microbatch has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, some = x @ self.weight.T, x[:, :1] > 1
        return found + some * self.unused if bool(some.any()) else found


class Dropped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 2)
        self.kept: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.nn.functional.dropout(torch.ones(16), 0.5, self.training)
        if self.training:
            self.kept += kept.tolist()
        return self.linear(x)


def laws(folder: str, world: int) -> dict[str, Any]:
    """Every case; `world` is what one process alone stands for."""
    root, out = Path(folder), {}
    rows = dyadic(8 * world)
    for window, policy in PAIRS:
        out[f"exact {window} {policy}"] = update(
            root, f"e{window}{policy}", rows, 4, world, window=window, policy=policy
        )
        odd = labelled(8 * world + 3, ignored=(0, 3, 4))
        given = {"window": window, "policy": policy, "loss": "cross_entropy", "optim": {"grad_clip_norm": 0.1}}
        net = _classes()
        out[f"ignored {window} {policy}"] = update(
            root, f"i{window}{policy}", odd, 2, world, net=net, epochs=2, **given
        )
    out["additive"] = update(root, "additive", rows, 4, world, loss=additive, window=2)
    out["two means"] = update(root, "means", rows, 4, world, loss=two_means, window=2)
    out["fewer rows than a batch"] = update(root, "few", dyadic(world + 1), 4, world, window=1)
    out["unused"] = update(root, "unused", rows, 2, world, net=Sometimes(), window=1)
    hooks = [GradientAccumulationHook(2), GradientClipHook(max_norm=0.5), EMAHook(decay=0.5)]
    out["hooks"] = update(root, "hooks", rows, 4, world, hooks=hooks, epochs=2)
    order = list(train_order(8 * world, 3))
    mine = [row for place, row in enumerate(order) if place % world == world - 1]
    shard = labelled(8 * world, ignored=tuple(mine))
    out["a shard ignored"] = update(root, "shard", shard, 4, world, net=_classes(), loss="cross_entropy", window=2)
    nothing = labelled(8 * world, ignored=tuple(order[: 4 * world]))
    out["a window ignored"] = update(root, "window", nothing, 4, world, net=_classes(), loss="cross_entropy")
    out["0/0"] = error(lambda: update(root, "own", nothing, 4, world, net=_classes(), loss=own_mean))
    dropped = Dropped()
    noise = update(root, "dropout", rows, 4, world, net=dropped)
    out["dropout"] = {"status": noise["status"], "kept": dropped.kept}
    if world == 2:
        out["A10"] = heads(root, "A10", [(1, 0), (2, 0), (3, 0), (5, 0), (7, 0), (11, 0)])
        out["A11"] = heads(root, "A11", [(1, 0), (2, 0), (3, 1), (5, 1), (7, 0), (11, 0), (1, 0), (1, 0)])
    out["reductions"] = _reductions(root, rows, world) if size() > 1 else {}
    return out


def placed(wanted: list[Any]) -> list[Any]:
    """Items that the permutation of seed 3 puts in this order: number i is of rank `i % world`, its `i // world`-th."""
    found: list[Any] = [None] * len(wanted)
    for place, row in enumerate(train_order(len(wanted), 3)):
        found[row] = wanted[place]
    return found


class Heads(torch.nn.Module):
    """Two numbers of which a microbatch uses one: x [B, 2] holds the factor and which."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * (self.b if bool(x[0, 1]) else self.a)


def summed(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[LossTerm, ...]:
    return (LossTerm("sum", outputs.sum(), reduction="sum"),)


def heads(folder: Path, name: str, factors: list[tuple[float, int]]) -> dict[str, Any]:
    """Windows of two microbatches of one row on each of two processes, at rate 1."""
    x = np.array(placed(factors), np.float32)
    loader = train_rows({"x": x, "y": x[:, 0]}, 1, 2, seed=3)
    optim = NNOptimParams(kind="sgd", max_lr=1.0, momentum=0.0, accumulate_grad_batches=2)
    model = NNModel(module=Heads(), loss=summed)
    given = ddp(find_unused_parameters=True)
    params = NNTrainParams(n_epochs=1, optim=optim, train_loader=loader)
    run = model.train(params, runs_dir=folder / name, quiet=True, **given)
    return facts(model, run)


def train_order(rows: int, seed: int) -> list[int]:
    from nnx_jax.data.partition import epoch_order

    return [int(row) for row in epoch_order(rows, seed, 0)]


def _classes() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Linear(WIDTH, CLASSES)


def _reductions(root: Path, rows: Any, world: int) -> dict[str, Any]:
    """How often gradients are exchanged in two windows of two microbatches: through sockets, and as torch logs it of
    gloo, which the processes use where they do not share a machine."""
    from torch.profiler import ProfilerActivity, profile

    from nnx_jax.torch import ddp
    from nnx_jax.torch.neighbours import Neighbours

    sums = []
    real, connect = Neighbours.add_up, ddp.connect
    Neighbours.add_up = lambda self, vector: sums.append(vector.numel()) or real(self, vector)
    try:
        near = update(root, "near", rows, 2, world, window=2)
        through_sockets = len(sums)
        ddp.connect = lambda world: None
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            far = update(root, "far", rows, 2, world, window=2)
    finally:
        Neighbours.add_up, ddp.connect = real, connect
    names = [event.name for event in seen.events() or []]
    return {
        "updates": [found["records"][-1]["step"] for found in (near, far)],
        "sockets": [through_sockets, len(sums) - through_sockets],
        "all_reduce": sum(name == "gloo:all_reduce" for name in names),
        "names": sorted({n for n in names if "gloo" in n}),
        "equal": near["weights"] == far["weights"],
    }


def broken_by_a_dataset(folder: str, failing: int) -> None:
    """A dataset that cannot give a row on one process, in the middle of an epoch."""

    class Torn:
        def __init__(self, rows: dict[str, np.ndarray]) -> None:
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows["x"])

        def __getitem__(self, row: int) -> Any:
            if rank() == failing and row == 17:
                raise OSError("disk of row 17")
            return {name: column[row] for name, column in self.rows.items()}

    print("going", flush=True)
    update(Path(folder), "torn", Torn(dyadic(32)), 2, dist.get_world_size(), epochs=3)


def trains_for_long(folder: str) -> None:
    """Trains until something happens."""
    from nnx_jax.loop.callbacks import Callback

    class Says(Callback):
        distributed = "all"

        def on_epoch_end(self, ctx: Any) -> None:
            if ctx.epoch == 1:
                print("going", flush=True)

    loader = train_rows(dyadic(32), 2, 2, seed=3)
    params = NNTrainParams(n_epochs=100_000, optim=NNOptimParams(kind="sgd", max_lr=2.0**-10), train_loader=loader)
    NNModel(module=Counted(), loss=squares).train(params, [Says()], runs_dir=folder, quiet=True, **ddp())


def last_cannot_be_written(folder: str) -> dict[str, Any]:
    """nnx:B216: LAST fails on the writer."""
    from nnx_jax.runs import pointers

    before = pointers.write_pointer

    def write_pointer(*args: Any, **more: Any) -> Any:
        raise OSError("no space left for LAST")

    if rank() == 0:
        pointers.write_pointer = write_pointer  # type: ignore[assignment]
    try:
        return error(lambda: update(Path(folder), "last", dyadic(16), 4, 2, epochs=2))
    finally:
        pointers.write_pointer = before
