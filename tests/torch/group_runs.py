"""What torch processes do in `test_group.py`: every function runs in each of them and returns JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nnx_jax.core import fsio
from nnx_jax.data.deal import dealt_loader
from nnx_jax.loop.builtin import EarlyStopping, LRMonitor
from nnx_jax.loop.callbacks import Callback
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import MonitorSpec, NNTrainParams
from nnx_jax.runs.resume import find_point
from nnx_jax.runs.run import NNRun
from nnx_jax.runs.store import RunStore
from nnx_jax.torch import NNModel, distributed

ROWS, VAL, BATCH = 22, 5, 2


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def arrays(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0.5)}


class Union:
    """The batches that `world` processes would have, put together in the order of their ranks."""

    def __init__(self, dataset: Any, batch_size: int, world: int, **more: Any) -> None:
        self.parts = [dealt_loader(dataset, batch_size, rank=rank, world=world, **more) for rank in range(world)]

    def __len__(self) -> int:
        return len(self.parts[0])

    def set_epoch(self, epoch: int) -> None:
        for part in self.parts:
            part.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for batches in zip(*self.parts, strict=True):
            yield {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def train_rows(dataset: Any, batch_size: int = BATCH, world: int = 2, **more: Any) -> Any:
    """This process's batches in a group; all of them together in one process that stands for `world`."""
    if size() > 1:
        return distributed.train_loader(dataset, batch_size, **more)
    return Union(dataset, batch_size, world, **more)


def validation_rows(dataset: Any, batch_size: int = BATCH) -> Any:
    if size() > 1:
        return distributed.validation_loader(dataset, batch_size)
    return [{name: column[place : place + 3] for name, column in dataset.items()} for place in range(0, VAL, 3)]


def model(**net: Any) -> NNModel:
    shape = NNParams(kind="feed_forward", input_dim=4, output_dim=3, hidden_dims=[8], **net)
    return NNModel(params=NNModelParams(net=shape, loss="cross_entropy", metrics=["accuracy"]))


def params(epochs: int = 2, **more: Any) -> NNTrainParams:
    optim = NNOptimParams(kind="adam", max_lr=0.02, accumulate_grad_batches=2, grad_clip_norm=0.5)
    seed, rows = more.pop("rows_seed", 0), more.pop("rows", None) or arrays()
    more = {"monitor": MonitorSpec(metric="loss", split="val"), "optim": optim, **more}
    loaders = {"train_loader": train_rows(rows, seed=seed), "val_loader": validation_rows(arrays(VAL, 9))}
    return NNTrainParams(n_epochs=epochs, **{**loaders, **more})


def ddp(**more: Any) -> dict[str, Any]:
    return {} if size() == 1 else {"distributed": distributed.DDP(**more)}


def train(runs: Path, *callbacks: Any, epochs: int = 2, **more: Any) -> tuple[NNModel, NNRun]:
    made = more.pop("model", None) or model()
    writer = more.pop("writer_rank", 0)
    call = {"runs_dir": runs, "quiet": True, **ddp(writer_rank=writer), **more.pop("call", {})}
    run = made.train(more.pop("params", None) or params(epochs, **more), callbacks, **call)
    return made, run


def weights(made: NNModel) -> dict[str, Any]:
    return {name: value.detach().tolist() for name, value in made.net.state_dict().items()}


def facts(made: NNModel, run: NNRun) -> dict[str, Any]:
    return {"id": run.id, "weights": weights(made), "records": run.records, "status": run.status}


def error(work: Callable[[], Any]) -> dict[str, Any]:
    """What `work` raised, and after how many seconds."""
    begun = time.monotonic()
    try:
        work()
    except Exception as failure:
        kinds = [kind.__name__ for kind in type(failure).__mro__]
        return {
            "type": kinds[0], "kinds": kinds, "text": str(failure), "seconds": time.monotonic() - begun,
        }  # fmt: skip
    return {"type": None, "kinds": [], "text": "", "seconds": time.monotonic() - begun}


class Everywhere(Callback):
    """Counts its calls on every process; may stop the run, or fail, on one."""

    distributed = "all"

    def __init__(self, stop: int | None = None, fail: int | None = None, at: str = "on_epoch_end") -> None:
        self.calls: list[str] = []
        self.stop, self.fail, self.at = stop, fail, at

    def _called(self, where: str, ctx: Any) -> None:
        self.calls.append(where)
        if where == self.at:
            if self.fail == rank():
                raise OSError(f"no space on rank {rank()}")
            if self.stop == rank():
                ctx.should_stop = True

    def on_train_begin(self, ctx: Any) -> None:
        self._called("on_train_begin", ctx)

    def on_epoch_begin(self, ctx: Any) -> None:
        self._called("on_epoch_begin", ctx)

    def on_epoch_end(self, ctx: Any) -> None:
        self._called("on_epoch_end", ctx)


class OnWriter(Everywhere):
    distributed = "writer"


class StatefulOnWriter(Callback):
    distributed = "writer"
    component_name = "counts"


class Undeclared(Callback):
    pass


class WritesWhenMade(Callback):
    distributed = "unsupported"


class Draws(Callback):
    """Draws from the global streams at the end of an epoch: each process has its own, since it seeds them so."""

    distributed = "all"

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_train_begin(self, ctx: Any) -> None:
        if not ctx.epoch:
            torch.manual_seed(100 + rank())
            np.random.seed(100 + rank())

    def on_epoch_end(self, ctx: Any) -> None:
        self.drawn += [float(torch.rand(())), float(np.random.rand())]


def lifecycle(folder: str) -> dict[str, Any]:
    """Runs that end well: who is called, who stops, who writes, and a resume."""
    root, out = Path(folder), {}
    seen, rates = (Everywhere(), OnWriter()), LRMonitor()
    opened = _count_stores()
    made, run = train(root / "who", *seen, rates, lambda rows: seen[1].calls.append(f"function {len(rows)}"))
    called = {"everywhere": seen[0].calls, "writer": seen[1].calls, "rates": rates.history, "stores": opened}
    out["who"] = {**called, **facts(made, run), "net": type(made.net).__name__, "best": run.best and run.best.epoch}
    point = find_point(root / "who", f"{run.id}@LAST")
    out["who"]["stored"] = sorted(point.leaves)
    out["who"]["host"] = {name: point.host[name] for name in ("geometry", "topology")}

    stopping = Everywhere(stop=1)
    _, run = train(root / "stop", stopping, epochs=5)
    out["stop"] = {"epochs": len(run.epochs), "calls": stopping.calls}

    patient = EarlyStopping(patience=1)
    plateau = NNSchedulerParams(kind="reduce_on_plateau", patience=0, factor=0.5)
    _, run = train(root / "patience", patient, epochs=6, scheduler=plateau)
    out["patience"] = {
        "stopped": patient.stopped_epoch, "rates": [row["lr"] for row in run.epochs],
        "best": run.best and run.best.epoch,
    }  # fmt: skip

    built: list[int] = []

    def factory() -> Callback:
        built.append(rank())
        return OnWriter()

    made, run = train(root / "writer1", distributed.writer_only(factory), writer_rank=1)
    out["writer1"] = {"built": built, **facts(made, run)}

    drawn = [Draws(), Draws(), Draws()]
    whole, run = train(root / "whole", drawn[0], epochs=3, model=model(dropout_prob=0.25))
    out["whole"] = {**facts(whole, run), "drawn": drawn[0].drawn}
    _, first = train(root / "first", drawn[1], epochs=2, model=model(dropout_prob=0.25))
    torch.manual_seed(0)
    again = {"resume_from_run_id": first.id}
    made, run = train(root / "first", drawn[2], epochs=1, model=model(dropout_prob=0.25), **again)
    out["resumed"] = {**facts(made, run), "drawn": drawn[1].drawn + drawn[2].drawn, "source": first.id}
    other = {"model": model(dropout_prob=0.25), "rows_seed": 5, "salt": "s", **again}
    out["another seed"] = error(lambda: train(root / "first", epochs=1, **other))

    data = NNDataParams(train=_dataset(), val=_dataset(VAL, 9), batch_size=5, tail="pad")
    loaders = {"train_loader": None, "val_loader": None}
    made, run = train(root / "data", call={"data": data}, **loaders)
    out["data"] = facts(made, run)
    from jax._src import xla_bridge

    out["jax"] = xla_bridge.backends_are_initialized()
    return out


def _dataset(rows: int = 21, seed: int = 0) -> Any:
    from nnx_jax.data import ArrayDataset

    return ArrayDataset(**arrays(rows, seed))


def _count_stores() -> list[bool]:
    """Notes for every run opened in this process whether it is written here."""
    opened: list[bool] = []
    before = RunStore.open.__func__  # type: ignore[attr-defined]

    def open_store(cls: Any, *args: Any, **more: Any) -> Any:
        opened.append(more["world"].writes)
        return before(cls, *args, **more)

    RunStore.open = classmethod(open_store)  # type: ignore[method-assign,assignment]
    return opened


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


def refused(folder: str) -> dict[str, Any]:
    """Calls that are refused, or fail on one process, on every process in time; then a run that works."""
    from nnx_jax.objectives.objective import supervised_objective
    from nnx_jax.plan import ExperimentPlan
    from nnx_jax.search import FloatParam, SearchBudget, SearchSpace, search

    root, out = Path(folder), {}
    runs = root / "refused"
    out["without DDP"] = error(lambda: model().train(params(), runs_dir=runs, quiet=True))
    made: list[str] = []
    plan = ExperimentPlan().with_net(lambda rngs: made.append("net")).with_callback_factories(lambda: made.append("it"))
    out["plan"] = error(lambda: plan.fit())
    space, budget = SearchSpace({"lr": FloatParam(low=0.1, high=0.2)}), SearchBudget(trials=1)
    monitor = MonitorSpec(metric="loss", split="val")
    asked = {"apply": lambda plan, values: plan, "monitor": monitor, "budget": budget, "study_name": "s"}
    out["search"] = error(lambda: search(plan, space, runs_dir=runs, **asked))
    out["made"] = made
    out["undeclared"] = error(lambda: train(runs, Undeclared()))
    out["writes when made"] = error(lambda: train(runs, WritesWhenMade()))
    out["state on the writer"] = error(lambda: train(runs, StatefulOnWriter()))
    out["another seed"] = error(lambda: train(runs, rows_seed=rank()))
    out["other rows"] = error(lambda: train(runs, rows=arrays(ROWS + 2 * rank())))
    out["other batches"] = error(lambda: train(runs, train_loader=train_rows(arrays(), 2 + rank())))
    out["more epochs"] = error(lambda: train(runs, epochs=2 + rank()))
    listed = [(arrays(8)["x"], arrays(8)["y"])]
    out["plain list"] = error(lambda: train(runs, train_loader=listed, val_loader=listed))
    normed = {"model": NNModel(module=Normed(), loss="cross_entropy")}
    out["batch norm"] = error(lambda: train(runs, **normed))
    out["journal"] = error(lambda: train(runs, call={"history": HistoryJournal(retention=4, chunk_size=2)}))
    out["own step"] = error(lambda: train(runs, call={"train_step_fn": lambda ctx: None}))
    out["own validation"] = error(lambda: train(runs, call={"eval_step_fn": lambda ctx: {"loss": 1.0}}))
    out["objective"] = error(lambda: train(runs, call={"objective": supervised_objective()}))
    out["no run of this name"] = error(lambda: train(runs, resume_from_run_id="../x"))
    out["nothing written"] = not runs.exists() or not [path for path in runs.iterdir() if path.name[0] != "."]
    for at in ("on_train_begin", "on_epoch_begin", "on_epoch_end"):
        out[f"rank 1 fails {at}"] = error(lambda at=at: train(root / at, Everywhere(fail=1, at=at)))
    out["writer fails"] = error(lambda: train(root / "writer", OnWriter(fail=0)))
    poisoned = arrays()
    poisoned["x"][7] = np.nan
    out["not a number"] = error(lambda: train(root / "nan", rows=poisoned))
    wrong = arrays()
    wrong["y"][7] = 9
    out["wrong label"] = error(lambda: train(root / "label", rows=wrong))
    train(root / "twice")
    out["exists"] = error(lambda: train(root / "twice"))
    made_model, run = train(root / "works")
    out["works"] = facts(made_model, run)
    return out


def resumes(folder: str, source: str) -> dict[str, Any]:
    """A run of another number of processes as the source."""
    root, out = Path(folder), {}
    made = model()
    before = weights(made)
    out["stateful"] = error(lambda: train(root, epochs=1, model=made, resume_from_run_id=source))
    out["untouched"] = weights(made) == before
    made, run = train(root, epochs=1, resume_from_run_id=source, resume_mode="weights_only", salt="weights")
    out["weights"] = facts(made, run)
    return out


def corrupted(folder: str, source: str) -> dict[str, Any]:
    """A run to go on from, of whose files one byte is another."""
    hashed: list[Any] = []
    before = fsio.digest_file

    def digest_file(*args: Any, **more: Any) -> Any:
        hashed.append(args[0])
        return before(*args, **more)

    fsio.digest_file = digest_file  # type: ignore[assignment]
    return {
        "error": error(lambda: train(Path(folder), epochs=1, resume_from_run_id=source)), "hashed": len(hashed),
    }  # fmt: skip
