"""What the processes of a group do in `test_group.py`: every function runs in each of them and returns JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_jax import default_train_step, distributed
from nnx_jax.core.stages import TrainingStage
from nnx_jax.data import ArrayDataset
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.hooks.checkpoint import CheckpointHook
from nnx_jax.hooks.timing import StageTimingHook
from nnx_jax.loop.builtin import EarlyStopping, LRMonitor
from nnx_jax.loop.callbacks import Callback
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.objectives.losses import build_loss
from nnx_jax.objectives.objective import supervised_objective
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.history import HistoryJournal
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import CheckpointParams, MonitorSpec, NNTrainParams
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.plan import ExperimentPlan
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.pointers import list_pointers
from nnx_jax.runs.run import NNRun
from nnx_jax.search import FloatParam, SearchBudget, SearchSpace, search
from nnx_jax.trainer import Trainer

ROWS, VAL = 22, 5


def arrays(rows: int = ROWS, seed: int = 0) -> ArrayDataset:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 4)).astype(np.float32)
    return ArrayDataset(x=x, y=(x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0.5))


def model() -> NNModel:
    net = NNParams(kind="feed_forward", input_dim=4, output_dim=3, hidden_dims=[8])
    return NNModel(params=NNModelParams(net=net, loss="cross_entropy", metrics=["accuracy"]))


def params(epochs: int = 2, **more: Any) -> NNTrainParams:
    optim = NNOptimParams(kind="adam", max_lr=0.02, accumulate_grad_batches=2, grad_clip_norm=0.5)
    more = {"monitor": MonitorSpec(metric="loss", split="val"), **more}
    return NNTrainParams(n_epochs=epochs, optim=optim, **more)


def data(seed: int = 0) -> NNDataParams:
    return NNDataParams(train=arrays(seed=seed), val=arrays(VAL, 9), batch_size=4, tail="pad")


def train(runs: Path, *callbacks: Any, epochs: int = 2, seed: int = 0, **more: Any) -> tuple[NNModel, NNRun]:
    made = model()
    writer = more.pop("writer_rank", 0)
    ddp = {} if jax.process_count() == 1 else {"distributed": distributed.DDP(writer_rank=writer)}
    call = {"data": data(seed), "runs_dir": runs, "progress": QuietProgress(), **ddp, **more.pop("call", {})}
    run = made.train(more.pop("params", None) or params(epochs, **more), callbacks, **call)
    return made, run


def facts(made: NNModel, run: NNRun) -> dict[str, Any]:
    weights = {name: np.asarray(value).tolist() for name, value in PureModule(made.net).params.items()}
    return {"id": run.id, "weights": weights, "records": run.records, "status": run.status}


def error(work: Callable[[], Any]) -> dict[str, Any]:
    """What `work` raised, and after how many seconds."""
    begun = time.monotonic()
    try:
        work()
    except Exception as failure:
        return {
            "type": type(failure).__name__, "kinds": [kind.__name__ for kind in type(failure).__mro__],
            "text": str(failure), "seconds": time.monotonic() - begun,
        }  # fmt: skip
    return {"type": None, "kinds": [], "text": "", "seconds": time.monotonic() - begun}


def rank() -> int:
    return jax.process_index()


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

    def on_validation(self, ctx: Any) -> None:
        self._called("on_validation", ctx)

    def on_epoch_end(self, ctx: Any) -> None:
        self._called("on_epoch_end", ctx)

    def on_train_end(self, ctx: Any) -> None:
        self._called("on_train_end", ctx)


class OnWriter(Everywhere):
    distributed = "writer"


class StatefulOnWriter(Callback):
    distributed = "writer"
    component_name = "counts"


class EveryUpdate(Callback):
    """Acts on every single update."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    def on_optimizer_update(self, ctx: Any, event: Any) -> None:
        self.updates.append(event.update_idx)


class ReadsWeights(Callback):
    """Reads the weights at the end of an epoch."""

    def __init__(self, where: str) -> None:
        self.distributed = where  # type: ignore[misc,assignment]
        self.read: list[float] = []

    def on_epoch_end(self, ctx: Any) -> None:
        weights = PureModule(ctx.sync()).params.values()
        self.read.append(sum(float(np.abs(value).sum()) for value in weights))


class Watches:
    """A hook of no configuration; may fail on one process, where it is entered or where it is called."""

    stage, frequency = TrainingStage.AFTER_BATCH, 1

    def __init__(self, fail: int | None = None, at: str = "") -> None:
        self.fail, self.at = fail, at
        self.ranks: list[int] = []

    def _called(self, where: str) -> None:
        if where == self.at and self.fail == rank():
            raise OSError(f"no space on rank {rank()}")

    def __enter__(self) -> Watches:
        self._called("enter")
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.ranks.append(ctx.global_rank)
        if ctx.global_rank == 0 and len(self.ranks) == 3:
            ctx.request_commit("third")
        self._called("call")


class ChangesOnWriter(Callback):
    distributed = "writer"

    def checkpoint_transforms(self) -> Any:
        return ()


class Undeclared(Callback):
    pass


class WritesWhenMade(Callback):
    distributed = "unsupported"


def parity(folder: str) -> dict[str, Any]:
    """One run of configured data, by as many processes as there are."""
    made, run = train(Path(folder) / "runs")
    return {**facts(made, run), "process": rank()}


def lifecycle(folder: str) -> dict[str, Any]:
    """Runs that end well: who is called, who stops, who writes, and a resume."""
    root, out = Path(folder), {}
    seen, rates = (Everywhere(), OnWriter()), LRMonitor()
    made, run = train(root / "who", *seen, rates, lambda rows: seen[1].calls.append(f"function {len(rows)}"))
    called = {"everywhere": seen[0].calls, "writer": seen[1].calls, "rates": rates.history}
    out["who"] = {**called, **facts(made, run), "net": type(made.net).__name__, "best": run.best and run.best.epoch}

    stopping = Everywhere(stop=1)
    _, run = train(root / "stop", stopping, epochs=5)
    out["stop"] = {"epochs": len(run.epochs), "calls": stopping.calls}

    patient = EarlyStopping(patience=1)
    plateau = NNSchedulerParams(kind="reduce_on_plateau", patience=0, factor=0.5)
    _, run = train(root / "patience", patient, epochs=6, params=params(6, scheduler=plateau))
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

    each: list[EveryUpdate] = []

    def watcher() -> Callback:
        each.append(EveryUpdate())
        return each[0]

    _, run = train(root / "each", distributed.writer_only(watcher))
    out["each"] = {"updates": [made.updates for made in each], "steps": run.records[-1]["step"]}
    hooks = [Watches(), StageTimingHook(log_path=root / "times.csv"), CheckpointHook(step_interval=2)]
    _, run = train(
        root / "hooks", epochs=1, writer_rank=1, call={"hooks": hooks, "checkpoint": CheckpointParams(keep=9)}
    )
    out["hooks"] = {
        "ranks": hooks[0].ranks, "files": sorted(path.name for path in root.glob("times*")),
        "checkpoints": hooks[2].checkpoints, "pointers": sorted(list_pointers(RunPaths(root / "hooks", run.id))),
    }  # fmt: skip

    whole, run = train(root / "whole", epochs=3)
    out["whole"] = facts(whole, run)
    _, first = train(root / "first", epochs=2)
    made, run = train(root / "first", epochs=1, resume_from_run_id=first.id)
    out["resumed"] = {**facts(made, run), "source": first.id}
    return out


class Normed(nnx.Module):
    """A BatchNorm whose statistics are those of the whole batch, wherever its rows are.

    Nothing is added before it: the gradient of such a bias is 0 but for rounding, which Adam would blow up.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm = nnx.Linear(4, 6, use_bias=False, rngs=rngs), nnx.BatchNorm(6, rngs=rngs)
        self.dropout, self.head = nnx.Dropout(0.25, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.norm(self.first(x)))))


def own_eval(ctx: Any) -> dict[str, float]:
    batches = [(batch["x"], batch["y"], batch["mask"]) for batch in ctx.val_loader]
    right = sum(float(((ctx.model(x).argmax(-1) == y) * mask).sum()) for x, y, mask in batches)
    return {"loss": 1.0 - right / sum(float(mask.sum()) for *_, mask in batches)}


def beyond(folder: str) -> dict[str, Any]:
    """What the library of the founding document refuses among several processes, one run of each."""
    root, out = Path(folder), {}
    ddp = {} if jax.process_count() == 1 else {"distributed": distributed.DDP()}
    call = {"runs_dir": root, "progress": QuietProgress(), **ddp}

    normed = NNModel(module=Normed(nnx.Rngs(0)), loss=build_loss("cross_entropy"))
    out["batch norm, dropout"] = facts(normed, normed.train(params(1), data=data(), **call))
    made = model()
    out["objective"] = facts(made, made.train(params(1), objective=supervised_objective(), data=data(), **call))
    made = model()
    step = {"train_step_fn": default_train_step, "eval_step_fn": own_eval}
    out["own step and validation"] = facts(made, made.train(params(1), data=data(), **step, **call))
    made = model()
    journal = HistoryJournal(retention=4, chunk_size=2)
    run = made.train(params(2), data=data(), history=journal, salt="journal", **call)
    out["journal"] = facts(made, run) | {"rows": len(list(run.rows()))}
    made = model()
    several = NNTrainerParams(
        optims={
            "body": NNOptimParams(kind="adam", max_lr=0.01, param_groups=[{"patterns": ["layers.*"]}]),
            "head": NNOptimParams(kind="sgd", max_lr=0.1, param_groups=[{"patterns": ["head.*"]}]),
        },
        n_epochs=1,
    )  # fmt: skip
    run = Trainer(made).train(several, objective=supervised_objective(), data=data(), **call)
    out["two optimizers"] = facts(made, run)
    return out


def refused(folder: str) -> dict[str, Any]:
    """Calls that are refused, or fail on one process, on every process in time; then a run that works."""
    root, out = Path(folder), {}
    runs = root / "refused"
    alone = lambda: model().train(params(), data=data(), runs_dir=runs, progress=QuietProgress())  # noqa: E731
    out["without DDP"] = error(alone)
    trainer = NNTrainerParams(optims={"main": NNOptimParams()}, n_epochs=1)
    out["Trainer without DDP"] = error(
        lambda: Trainer(model()).train(trainer, objective=supervised_objective(), data=data(), runs_dir=runs)
    )
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
    out["another net on the writer"] = error(lambda: train(runs, ChangesOnWriter()))
    out["another seed"] = error(lambda: train(runs, seed=rank()))
    out["more epochs"] = error(lambda: train(runs, epochs=2 + rank()))
    loader = [(arrays(8).arrays()["x"], arrays(8).arrays()["y"])]
    listed = params().replace(train_loader=loader, val_loader=loader)
    out["plain list"] = error(lambda: train(runs, params=listed, call={"data": None}))
    out["nothing written"] = not runs.exists() or not [path for path in runs.iterdir() if path.name[0] != "."]
    for at in ("on_train_begin", "on_epoch_begin", "on_validation", "on_epoch_end", "on_train_end"):
        out[f"rank 1 fails {at}"] = error(lambda at=at: train(root / at, Everywhere(fail=1, at=at)))
    out["writer fails"] = error(lambda: train(root / "writer", OnWriter(fail=0)))
    for at in ("enter", "call"):
        out[f"hook fails: {at}"] = error(lambda at=at: train(root / at, call={"hooks": [Watches(1, at)]}))
    split = {"epochs": 1, "call": {"mesh": {"fsdp": 2}}}
    out["writer reads a split model"] = error(lambda: train(root / "split", ReadsWeights("writer"), **split))
    readers = [ReadsWeights("all"), ReadsWeights("writer")]
    train(root / "split all", readers[0], **split)
    train(root / "whole", readers[1], epochs=1)
    out["read"] = [reader.read for reader in readers]
    train(root / "twice")
    out["exists"] = error(lambda: train(root / "twice"))
    made, run = train(root / "works")
    out["works"] = facts(made, run)
    return out


def resumes(folder: str, source: str) -> dict[str, Any]:
    """A run of another number of processes as the source."""
    root, out = Path(folder), {}
    out["stateful"] = error(lambda: train(root, epochs=3, resume_from_run_id=source))
    made, run = train(root, epochs=1, resume_from_run_id=source, resume_mode="weights_only", salt="weights")
    out["weights"] = facts(made, run)
    return out
