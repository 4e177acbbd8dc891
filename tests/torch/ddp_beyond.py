"""What a DDP allows, done by any number of torch processes; `test_ddp_beyond.py` compares them with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from nnx_jax.hooks import MixedPrecisionHook
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
from nnx_jax.params.train import NNTrainParams
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.runs.journal import JournalWriter
from nnx_jax.runs.resume import find_point
from nnx_jax.runs.run import NNRun
from nnx_jax.torch import LossTerm, NNModel, ObjectiveResult, Trainer, kd_objective, supervised_objective
from tests.torch.ddp_law import CLASSES, WIDTH, Counted, labelled, squares, train_order
from tests.torch.group_runs import ddp, error, facts, rank, size, train_rows, validation_rows


def seeded(make: Any) -> torch.nn.Module:
    torch.manual_seed(5)
    return make()


def trained(folder: Path, rows: Any, batch_size: int, world: int, **more: Any) -> dict[str, Any]:
    """One run by as many processes as there are; one process alone stands for `world`."""
    made = more.pop("model")
    settings, call = more.pop("settings", {}), more.pop("call", {})
    optim = NNOptimParams(
        kind="sgd", max_lr=2.0**-4, accumulate_grad_batches=more.pop("window", 1), **more.pop("optim", {})
    )
    loader = train_rows(rows, batch_size, world, policy=more.pop("policy", "pad"), seed=3)
    params = NNTrainParams(n_epochs=more.pop("epochs", 2), optim=optim, train_loader=loader, **more)
    run = made.train(params, runs_dir=folder, quiet=True, **ddp(**settings), **call)
    skipped = [row["skipped"] for row in run.records if row["kind"] == "update"]
    return {**facts(made, run), "skipped": skipped, "rank": rank()}


def same(found: dict[str, Any], wanted: dict[str, Any], tolerance: dict[str, Any]) -> None:
    """A run by several processes has the id, the weights and the records of one by one process."""
    assert found["id"] == wanted["id"]
    for name, value in wanted["weights"].items():
        np.testing.assert_allclose(found["weights"][name], value, err_msg=name, **tolerance)
    assert len(found["records"]) == len(wanted["records"])
    for row, want in zip(found["records"], wanted["records"], strict=True):
        for name, value in want.items():
            if isinstance(value, float):
                np.testing.assert_allclose(row[name], value, err_msg=name, **tolerance)
            else:
                assert row[name] == value, name


# -- batch norms -----------------------------------------------------------------------------------------------------


class Pictures(torch.nn.Module):
    """Batch norms of feature maps and of rows; a row becomes a picture of 2 x 2."""

    def __init__(self, norm: Any = torch.nn.BatchNorm2d, **options: Any) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 3, 2, padding=1)
        self.norm = norm(3, **options)
        self.head = torch.nn.Linear(27, CLASSES)
        self.last = torch.nn.BatchNorm1d(CLASSES, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.conv(x.reshape(-1, 1, 2, 2))).relu()
        return self.last(self.head(found.flatten(1)))


class Parts(Pictures):
    """Uses its head for some rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.some = torch.nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, some = super().forward(x), x[:, :1] > 1
        return found + some * self.some if bool(some.any()) else found


class Own(torch.nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def built_in(norm: str = "batch") -> NNModel:
    shape = NNParams(kind="feed_forward", input_dim=WIDTH, output_dim=CLASSES, hidden_dims=[6, 5], norm=norm)
    return NNModel(params=NNModelParams(net=shape, loss="cross_entropy"), seed=4)


def own(make: Any) -> NNModel:
    return NNModel(params=NNModelParams(loss="cross_entropy"), module=seeded(make))


def norms(folder: str, world: int) -> dict[str, Any]:
    """Batch norms of the built-in networks and of torch; ranks with as many rows, with fewer, and with none."""
    root, out = Path(folder), {}
    sync: dict[str, Any] = {"settings": {"batch_norm": "sync"}}
    even, odd = labelled(8 * world), labelled(8 * world + 3, ignored=(0, 3, 4))
    none = labelled(4 * world + 1)  # of the last batch the last rank has no row
    for name, rows, size_of in (("even", even, 4), ("odd", odd, 2), ("none", none, 4)):
        out[f"built in, {name}"] = trained(root / f"b{name}", rows, size_of, world, model=built_in(), **sync)
        out[f"own, {name}"] = trained(root / f"o{name}", rows, size_of, world, model=own(Pictures), **sync)
    window = {"window": 2, "optim": {"grad_clip_norm": 0.1}, **sync}
    out["window"] = trained(root / "window", none, 2, world, model=built_in(), **window)
    made = own(lambda: Pictures(torch.nn.SyncBatchNorm, momentum=None))
    out["SyncBatchNorm"] = trained(root / "sync", even, 4, world, model=made, **sync)
    out["SyncBatchNorm"]["class"] = type(made.net.norm).__name__
    parts = {"settings": {"batch_norm": "sync", "find_unused_parameters": True}}
    out["parts"] = trained(root / "parts", even, 4, world, model=own(Parts), **parts)
    vals = {"val_loader": validation_rows({n: v[:5] for n, v in labelled(9).items()})}
    out["scored"] = trained(root / "scored", even, 4, world, model=built_in(), **vals, **sync)
    return out


def refusals(folder: str) -> dict[str, Any]:
    """What stays refused although something is allowed."""
    root, out = Path(folder) / "refused", {}
    rows, sync = labelled(16), {"settings": {"batch_norm": "sync"}}
    still = lambda: Pictures(track_running_stats=False)  # noqa: E731
    out["no statistics"] = error(lambda: trained(root, rows, 4, 2, model=own(still), **sync))
    mine = lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, CLASSES), Own(CLASSES))  # noqa: E731
    out["own class"] = error(lambda: trained(root, rows, 4, 2, model=own(mine), **sync))
    other = {"settings": {"batch_norm": ("sync", "refuse")[rank()]}}
    programs = NNModel(params=NNModelParams(loss="cross_entropy"), module=seeded(Named), compile="aot_eager")
    out["compile"] = error(lambda: trained(root, rows, 4, 2, model=programs))
    out["autocast"] = error(lambda: trained(root, rows, 4, 2, model=own(Named), precision="bfloat16"))
    half = {"call": {"hooks": [MixedPrecisionHook("bf16")]}}
    out["autocast by a hook"] = error(lambda: trained(root, rows, 4, 2, model=own(Named), **half))
    out["unlike"] = error(lambda: trained(root, rows, 4, 2, model=built_in(), **other))
    out["nothing written"] = not root.exists() or not [path for path in root.iterdir() if path.name[0] != "."]
    assert size() == 2
    return out


# -- objectives, journals, 16 bits -----------------------------------------------------------------------------------


class Named(torch.nn.Module):
    """Two layers, of which an objective may call one."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, 6)
        self.norm = torch.nn.BatchNorm1d(6) if norm else torch.nn.Identity()
        self.head = torch.nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)).tanh())


def twice(ctx: Any) -> ObjectiveResult:
    """Calls the model twice and a part of it, and records a sum with its count."""
    one, other = ctx.apply(), ctx.apply(0.5 * ctx.batch["x"])
    body = ctx.model.body(ctx.batch["x"])
    terms = [
        ctx.mean("apart", (one - other).square().sum(-1)),
        ctx.mean("body", body.square().sum(-1), weight=0.25),
        LossTerm("whole", 0.01 * one.square().sum(), reduction="sum"),
    ]
    largest = one.detach().square().sum(-1)
    return ObjectiveResult(terms, {"square": (largest.sum(), ctx.mask.sum())}, one)


def objectives(folder: str, world: int) -> dict[str, Any]:
    """Objectives: the built-in loss as one, one of the user's own, a teacher's, and that of a Trainer."""
    root, out = Path(folder), {}
    allow: dict[str, Any] = {"settings": {"allow": ["objective"]}}
    odd, none = labelled(8 * world + 3, ignored=(0, 3, 4)), labelled(4 * world + 1)
    window: dict[str, Any] = {"window": 2, "optim": {"grad_clip_norm": 0.1}}
    given = {"call": {"objective": supervised_objective()}, **allow, **window}
    out["supervised"] = trained(root / "supervised", odd, 2, world, model=own(Named), **given)
    out["loss"] = trained(root / "loss", odd, 2, world, model=own(Named), **window)
    given = {"call": {"objective": twice}, **allow}
    out["twice"] = trained(root / "twice", none, 4, world, model=own(Named), **given)
    given["settings"] = {"allow": ["objective"], "batch_norm": "sync"}
    out["norms"] = trained(root / "norms", none, 4, world, model=own(lambda: Named(norm=True)), **given)
    teacher = NNModel(module=torch.nn.Linear(WIDTH, CLASSES))
    with torch.no_grad():
        for value in teacher.net.parameters():
            value.copy_(torch.arange(value.numel()).reshape(value.shape) / 8)
    given = {"call": {"objective": kd_objective(teacher)}, **allow}
    out["teacher"] = trained(root / "teacher", odd, 2, world, model=own(Named), **given)
    out["Trainer"] = by_trainer(root / "trainer", odd, world, objective=supervised_objective())
    return out


def by_trainer(folder: Path, rows: Any, world: int, **call: Any) -> dict[str, Any]:
    """Two optimizers, of one layer each."""
    optims = {
        "a": NNOptimParams(
            kind="sgd", max_lr=0.05, param_groups=(NNParamGroupSpec(patterns=("body.*",)),), grad_clip_norm=0.1
        ),
        "b": NNOptimParams(kind="sgd", max_lr=0.01, param_groups=(NNParamGroupSpec(patterns=("head.*",)),)),
    }
    made, loader = own(Named), train_rows(rows, 2, world, seed=3)
    allow = ddp(allow=["objective", "step"])
    params = NNTrainerParams(n_epochs=2, optims=optims, train_loader=loader)
    run = Trainer(made).train(params, runs_dir=folder, quiet=True, **allow, **call)
    skipped = [row["skipped"] for row in run.records if row["kind"] == "update"]
    return {**facts(made, run), "skipped": skipped}


def journals(folder: str, world: int) -> dict[str, Any]:
    """A journal, of which few records stay in memory, and a run that goes on with it."""
    root, out, rows = Path(folder), dict[str, Any](), labelled(8 * world)
    made, before = list[str](), JournalWriter.append

    def append(self: Any, *args: Any) -> Any:
        made.append(type(self).__name__)
        return before(self, *args)

    JournalWriter.append = append  # type: ignore[method-assign]
    history = HistoryJournal(retention=4, chunk_size=2)
    given: dict[str, Any] = {"settings": {"allow": ["journal"]}, "call": {"history": history}}
    out["whole"] = trained(root / "whole", rows, 4, world, model=own(Named), epochs=4, **given)
    first = trained(root / "cut", rows, 4, world, model=own(Named), epochs=2, **given)
    again = {"resume_from_run_id": first["id"]}
    out["resumed"] = trained(root / "cut", rows, 4, world, model=own(Named), epochs=2, **given, **again)
    for name, of in (("whole", "whole"), ("resumed", "cut")):
        out[name]["all"] = list(NNRun.load(out[name]["id"], root / of).rows())
    out["writers"] = made
    return out


class Noted(Counted):
    """Notes what its product is computed in."""

    seen: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.linear(x, self.weight)
        self.seen.add(str(found.dtype))
        return found + 0.0 * self.unused.sum()


def small(rows: int, large: int | None = None) -> dict[str, np.ndarray]:
    """Numbers so small that 8 bits hold every product and sum of them; one target may be large."""
    draw = np.random.default_rng(3)
    x = draw.integers(-1, 2, (rows, WIDTH)).astype(np.float32)
    y = draw.integers(-1, 2, (rows, 1)).astype(np.float32)
    if large is not None:
        x[large], y[large] = 1, -200
    return {"x": x, "y": y}


def narrow(folder: str, world: int) -> dict[str, Any]:
    """16 bits, by the configuration and by a hook whose scale falls where one process's gradient overflows."""
    root, out = Path(folder), {}
    allow: dict[str, Any] = {"settings": {"allow": ["autocast"]}}

    def model() -> NNModel:
        Noted.seen = set()
        return NNModel(module=Noted(1), loss=squares)

    one = {"epochs": 1, "precision": "bfloat16", **allow}
    out["exact"] = trained(root / "exact", small(4 * world), 4, world, model=model(), **one)
    out["exact"]["seen"] = sorted(Noted.seen)
    more: dict[str, Any] = {**one, "epochs": 3, "window": 2}
    out["bfloat16"] = trained(root / "more", small(8 * world + 3), 2, world, model=model(), **more)
    [large] = [row for place, row in enumerate(train_order(4 * world, 3)) if place == world - 1]  # of the last process
    for name, policy in (("float16", {}), ("float16, window", {"window": 2})):
        hooks = [MixedPrecisionHook("fp16", init_scale=2.0**10, growth_interval=100)]
        given = {**allow, "epochs": 3, "call": {"hooks": hooks}, **policy}
        folder_of = root / name.replace(", ", "-")
        out[name] = trained(folder_of, small(4 * world, large), 2, world, model=model(), **given)
        out[name]["seen"] = sorted(Noted.seen)
        leaves = find_point(folder_of, f"{out[name]['id']}@LAST").leaves
        [scale] = [leaf for leaf in leaves if leaf.endswith("MixedPrecisionHook/scale")]
        out[name]["scale"] = float(load_arrays(folder_of, out[name]["id"])[scale])
    return out


def load_arrays(folder: Path, run: str) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(sorted((folder / run).rglob("state.safetensors"))[-1])


# -- torch.compile ---------------------------------------------------------------------------------------------------


def compiles(folder: str, world: int) -> dict[str, Any]:
    """Forward passes that torch compiles: of a plain network, of one with batch norms, and for an objective."""
    root, out = Path(folder), {}
    rows_of = labelled(4 * world)
    scored = validation_rows(rows_of) if size() > 1 else [rows_of]

    def run(name: str, net: Any, rows: Any, **more: Any) -> None:
        model = NNModel(
            params=NNModelParams(loss="cross_entropy"), module=seeded(net), compile="aot_eager" if size() > 1 else False
        )
        settings = {"allow": ["compile", "objective"], **more.pop("settings", {})}
        torch._dynamo.reset()
        counters.clear()
        out[name] = trained(
            root / name, rows, 4, world, model=model, settings=settings, window=2, val_loader=scored, **more
        )
        out[name]["programs"] = counters["stats"]["unique_graphs"]

    run("plain", Named, labelled(6 * world))  # batches of four rows and of two
    run("norms", Pictures, labelled(4 * world + 1), settings={"batch_norm": "sync"})
    run("objective", Named, labelled(4 * world + 3), call={"objective": twice})
    return out
