"""What each process does in tests/spmd/test_process_data.py: small runs of the toy, and how each of them ended."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from nnx_jax import distributed
from nnx_jax.core.errors import HaltedElsewhere
from nnx_jax.data import ArrayDataset, Feed, LoaderFeed, TrainingDataset, dealt_loader
from nnx_jax.engines.placement import ProcessRows, make_placement
from nnx_jax.fit.call import TrainCall
from nnx_jax.fit.job import prepare
from nnx_jax.loop.engine import Span
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.objectives import LossTerm
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.runs.run import NNRun
from nnx_jax.spmd.mesh import ShardingSpec, make_sharding
from nnx_jax.spmd.world import ALONE, World
from nnx_jax.step.plan import HookPlan
from nnx_jax.step.watch import RecompileWarning
from tests.spmd.toy import BATCH, ROWS, Linear, columns, halves

WHOLE: dict[str, int] = {"data": -1}


class Torn(TrainingDataset):
    """The toy's rows, of which one process cannot read one once it is asked for batches."""

    rank: int
    bad: int = 13
    count: int = ROWS

    def __len__(self) -> int:
        return self.count

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self.bad in np.asarray(indices) and len(indices) <= BATCH and jax.process_index() == self.rank:
            raise OSError(f"disk error at row {self.bad}")
        return {name: column[indices] for name, column in columns().items()}

    def content_hash(self) -> str:
        return "torn"


class Classes(nnx.Module):
    """A classifier of three inputs into two classes, of which the first wins where both are equal."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros((3, 2)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


class Wide(nnx.Module):
    """Three inputs times four columns, added up."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros((3, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ self.w[...], axis=-1)


class Rising(nnx.Module):
    """One weight, handed out for every row."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(self.w[...], x.shape[:1])


def falling(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    """-w, so that the weight becomes the sum of the rates that were applied."""
    return (LossTerm("fall", -jnp.sum(outputs * batch["mask"]), jnp.sum(batch["mask"])),)


def summed(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    """Half squared error, added up over all rows and divided by nothing."""
    (term,) = halves(outputs, batch)
    return (LossTerm("sum", term.numerator, reduction="sum"),)


def own_mean(outputs: Any, batch: Any) -> tuple[LossTerm, ...]:
    """A mean that the user divides: not a number where no target counts."""
    valid = batch["mask"] * batch["weight"]
    mean = jnp.sum(valid * (outputs - batch["y"]) ** 2) / jnp.sum(valid)
    return (LossTerm("mean", mean, reduction="sum"),)


def own_step(ctx: Any) -> Any:
    """A step of the user's own."""
    loss, grads = ctx.value_and_grad(lambda model: ctx.mean((model(ctx.batch["x"]) - ctx.batch["y"]) ** 2))
    ctx.update(grads)
    ctx.report_update()
    return {"loss": loss}


def engine_of(
    world: World,
    *,
    train: Any = None,
    val: Any = None,
    window: int = 1,
    tail: Any = "pad",
    module: Any = None,
    loss: Any = halves,
    model: dict[str, Any] | None = None,
    call: dict[str, Any] | None = None,
    mesh: dict[str, int] = WHOLE,
    rules: dict[str, Any] | None = None,
    rate: float = 0.5,
    schedule: NNSchedulerParams | None = None,
    batch: int = BATCH,
    prefetch: int | None = None,
    **more: Any,
) -> Any:
    """The engine of a run of the toy over all devices of all processes, before it begins."""
    data = None
    if train is None or isinstance(train, TrainingDataset):
        given = ArrayDataset(columns()) if train is None else train
        data = NNDataParams(train=given, val=val, batch_size=batch, shuffle=False, tail=tail, prefetch=prefetch)
    else:
        more |= {"train_loader": train, "val_loader": val}
    more.setdefault("n_epochs", 1)
    optim = NNOptimParams(kind="sgd", max_lr=rate, momentum=0.0, accumulate_grad_batches=window)
    schedule = schedule or NNSchedulerParams(kind="constant", clock="optimizer_update")
    training = NNTrainParams(optim=optim, scheduler=schedule, **more)
    params = None if model is None else NNModelParams.from_state(model)
    spec = RunSpec(data=data, train=training, mesh=mesh, sharding=rules or {}, model=params or NNModelParams())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        net = NNModel(params=params, module=(module or Linear)(), loss=None if params else loss)
        return prepare(net, spec, call=TrainCall(QuietProgress(), **(call or {})), world=world).engine


def passed(engine: Any) -> dict[str, Any]:
    """Train an epoch, read and score: weights and records, or what was raised, when, and after how many updates."""
    began, state, done = time.monotonic(), engine.start(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecompileWarning)  # of a short last batch
        while done < engine.n_batches:
            state, more = engine.run_span(state, Span(0, done, engine.n_batches - done, True), lambda _: False)
            done += more
    records, failure = engine.read_records(state)
    if failure is not None:
        return ended(failure, time.monotonic() - began) | {"updates": sum(int(r.committed.sum()) for r in records)}
    weights = engine.programs.named(state)["params/w"]
    found: dict[str, Any] = {"w": np.asarray(weights).tolist()}
    found["loss"] = [value for each in records for value in each.loss.tolist()]
    return found | (scored(engine, state) if "val" in engine.feeds else {})


def scored(engine: Any, state: Any) -> dict[str, Any]:
    """The values of the validation and its rows, or what was raised."""
    try:
        scores = engine.evaluate(state, "val")
    except Exception as failure:
        return ended(failure, 0.0)
    return {"val": scores.values, "count": scores.count}


def ended(failure: Exception, seconds: float) -> dict[str, Any]:
    """An error as a test compares it."""
    families = [each.__name__ for each in type(failure).__mro__]
    halted = isinstance(failure, HaltedElsewhere)
    return {"told": str(failure), "families": families, "halted": halted, "seconds": seconds}


def refused(work: Any) -> dict[str, Any]:
    """What a piece of work raised."""
    try:
        work()
    except Exception as failure:
        return ended(failure, 0.0)
    return {}


class Around:
    """A loader of the user's own around a dealt one, which is odd in one process.

    Args:
        odd: the second batch has another shape; else the last one is missing.
    """

    def __init__(self, inner: Any, rank: int, *, odd: bool) -> None:
        self.inner, self.rank, self.partition, self.here, self.odd = inner, inner.rank, inner.partition, rank, odd

    def __len__(self) -> int:
        return len(self.inner) - (self.rank == self.here and not self.odd)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in zip(range(len(self)), self.inner, strict=False):
            odd = self.odd and self.rank == self.here and number == 1
            yield {**batch, "x": batch["x"][:, :2]} if odd else batch


KINDS: dict[str, dict[str, Any]] = {
    "one by one": {"train": Torn(rank=1), "dispatch": "step", "prefetch": 2},
    "the first process, skip": {"train": Torn(rank=0, bad=9), "dispatch": "span", "nonfinite": "skip"},
    "windows": {"train": Torn(rank=1), "window": 2, "record_every": "batch"},
    "own step": {"train": Torn(rank=1), "call": {"train_step_fn": own_step}},
    "a short batch that is not cut": {"train": Torn(rank=1, bad=34, count=35), "tail": "keep", "dispatch": "step"},
    "equal rows in both": {
        "train": Torn(rank=1), "module": Wide, "mesh": {"tensor": -1}, "rules": {"w": [None, "tensor"]},
        "dispatch": "step",
    },
}  # fmt: skip
"""Steps that meet a row which one process cannot read."""
CONFIGURED = [("step", "pad", 1), ("span", "drop", 4), ("step", "keep", 4)]
IGNORED = {"loss": {"kind": "cross_entropy", "ignore_index": -1}}


def labelled(rows: int) -> dict[str, np.ndarray]:
    """Rows with labels of two classes."""
    x = np.random.default_rng(5).integers(-1, 2, (rows, 3)).astype(np.float32)
    return {"x": x, "y": (np.arange(rows) % 2).astype(np.int32)}


def eleven() -> dict[str, np.ndarray]:
    """Eleven rows, of which the targets of 0, 3 and 4 do not count."""
    table = labelled(11)
    table["y"][[0, 3, 4]] = -1
    return table


def configured(world: World, mesh: dict[str, int] = WHOLE) -> dict[str, Any]:
    """Runs of a configuration, where each process gathers its rows of every batch; Torn's rows are not in memory."""
    val = ArrayDataset({name: column[:13] for name, column in columns().items()})
    found = {
        f"{dispatch} {tail} {window}": passed(
            engine_of(world, val=val, window=window, tail=tail, dispatch=dispatch, mesh=mesh)
        )
        for dispatch, tail, window in CONFIGURED
    }
    found["not in memory"] = passed(
        engine_of(world, train=Torn(rank=9), val=Torn(rank=9), mesh=mesh, dispatch="step", prefetch=3)
    )
    return found


def union(rows: Any, batch: int, world: int, **options: Any) -> list[dict[str, np.ndarray]]:
    """The batches that all processes make together: each one's, in the order of the ranks."""
    dealt = [dealt_loader(rows, batch, rank=rank, world=world, **options) for rank in range(world)]
    together = zip(*dealt, strict=True)
    return [{n: np.concatenate([part[n] for part in parts]) for n in parts[0]} for parts in together]


def ignoring(world: World, loader: Any, mesh: dict[str, int] = WHOLE) -> dict[str, Any]:
    """A run whose batches have targets that do not count."""
    return passed(engine_of(world, train=loader, window=2, module=Classes, model=IGNORED, mesh=mesh))


def whole_run(runs: str, failing: int) -> dict[str, Any]:
    """The public call on rows of which one process cannot read one; with no such process it continues that run."""
    data = NNDataParams(train=Torn(rank=failing), batch_size=BATCH, shuffle=False)
    optim = NNOptimParams(kind="sgd", max_lr=0.5, momentum=0.0)
    schedule = NNSchedulerParams(kind="constant", clock="optimizer_update")
    train = NNTrainParams(n_epochs=1, optim=optim, scheduler=schedule)
    module = Linear()
    net = NNModel(module=module, loss=halves)
    given: dict[str, Any] = {"runs_dir": runs, "progress": QuietProgress(), "distributed": distributed.DDP()}
    try:
        run = net.train(train, data=data, **given)
    except Exception as failure:
        last = NNRun.all(runs)[0].last
        return ended(failure, 0.0) | {"last": None if last is None else last.step}
    return {"w": np.asarray(module.w[...]).tolist(), "steps": run.records[-1]["step"]}


def everything(runs: str) -> dict[str, Any]:
    """All of it in one start."""
    world = distributed.current_world()
    table, whole = columns(), ArrayDataset(columns())
    found: dict[str, Any] = {"configured": configured(world), "places": places()}
    train, val = distributed.train_loader(whole, 4), distributed.validation_loader(whole, 4)
    found["dealt"] = passed(engine_of(world, train=train, val=val, dispatch="span"))
    found["ignored"] = ignoring(world, distributed.train_loader(eleven(), 2, seed=18))
    found["summed"] = passed(engine_of(world, train=train, loss=summed, rate=0.0625, window=2))
    found["nothing counts"] = nothing_counts(world)
    found["lost"] = {name: passed(engine_of(world, **kind)) for name, kind in KINDS.items()}
    found["lost validation"] = passed(engine_of(world, val=Torn(rank=1)))
    found["odd shape"] = passed(engine_of(world, train=Around(train, 1, odd=True)))
    found["nan"], found["label"] = nan_row(world), wrong_label(world)
    found["five rows"], found["one row"] = (few_rows(world, rows) for rows in (5, 1))
    found["rising"] = passed(
        engine_of(
            world, train=ArrayDataset(np.zeros((60, 1))), module=Rising, loss=falling, rate=1.0, batch=2,
            schedule=NNSchedulerParams(kind="step", step_size=20, factor=0.1, clock="optimizer_update"),
        )
    )  # fmt: skip
    found["refused"] = {
        "plain": refused(lambda: engine_of(world, train=[{n: c[:8] for n, c in table.items()}])),
        "plain validation": refused(lambda: engine_of(world, train=train, val=[(table["x"], table["y"])])),
        "validation to train on": refused(lambda: engine_of(world, train=val)),
        "training to validate on": refused(lambda: engine_of(world, train=train, val=train)),
        "of another group": refused(lambda: engine_of(world, train=dealt_loader(whole, 4, rank=world.rank, world=3))),
        "equal rows": refused(
            lambda: engine_of(world, train=train, module=Wide, mesh={"tensor": -1}, rules={"w": [None, "tensor"]})
        ),
        "alone": refused(lambda: engine_of(ALONE, train=train, mesh={})),
    }
    found["unequal"] = unequal(whole)
    found["runs"] = [whole_run(runs, failing) for failing in (1, 9)]
    found["said"] = [said(3), said(4)]
    return found


def nothing_counts(world: World) -> dict[str, Any]:
    """Batches of which no target counts, under a loss that knows, and under a mean of the user's own."""
    labels = {**labelled(16), "y": np.full(16, -1, np.int32)}
    values = {**columns(), "weight": np.zeros(ROWS, np.float32), "x": np.ones((ROWS, 3), np.float32)}
    known, own = (distributed.train_loader(rows, 4) for rows in (labels, values))
    return {
        "known": passed(engine_of(world, train=known, window=2, module=Classes, model=IGNORED)),
        "own mean": passed(engine_of(world, train=own, loss=own_mean)),
    }


def unequal(whole: Any) -> dict[str, Any]:
    """A public call with a loader that is shorter in one process."""
    with tempfile.TemporaryDirectory() as runs:
        loader = Around(distributed.train_loader(whole, 4), 1, odd=False)
        given = {"train_loader": loader, "data_id": "toy"}
        train = NNTrainParams(n_epochs=1, optim=NNOptimParams(kind="sgd", max_lr=0.5), **given)
        net = NNModel(module=Linear(), loss=halves)
        return refused(lambda: net.train(train, runs_dir=runs, progress=QuietProgress(), distributed=distributed.DDP()))


def places() -> list[bool]:
    """Whether every device holds its rows, on meshes whose devices do not come process by process."""
    own, other = (sorted(d.id for d in jax.devices() if d.process_index == rank) for rank in (0, 1))
    by_id = {device.id: device for device in jax.devices()}
    data = ArrayDataset({"x": np.arange(22, dtype=np.int32)})
    good = []
    for order in ([own[0], other[0], own[1], other[1]], [other[1], own[1], own[0], other[0]]):
        sharding = ShardingSpec(Mesh(np.array([by_id[number] for number in order]), ("data",)), PartitionSpec())
        feed = Feed(data, batch_size=6, shuffle=False)
        place = ProcessRows(sharding)
        for number, batch in enumerate(place.open(feed, 0, 0)):
            rows = place.rows(feed, number)
            whole = np.concatenate([np.where(feed.order(0)[number] >= 0, feed.order(0)[number], 0), [0, 0]])
            one, many = place.batch(batch, rows)["x"], place.block([batch, batch], 3, rows)["x"]
            good += [np.array_equal(shard.data, whole[shard.index]) for shard in one.addressable_shards]
            good += [np.array_equal(shard.data[1], whole[shard.index[1]]) for shard in many.addressable_shards]
            good += [one.shape == (8,), many.shape == (3, 8)]
    return good


def said(batch: int) -> list[str]:
    """What is said of loaders with so many rows a batch in each process."""
    plan, rows = HookPlan(sharding=make_sharding(WHOLE)), ArrayDataset(columns())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_placement(plan, LoaderFeed(distributed.train_loader(rows, batch)))
    return [str(each.message) for each in caught]


def few_rows(world: World, rows: int) -> dict[str, Any]:
    """A validation of few rows before any update, of which the first class is right once."""
    table = {"x": np.ones((rows, 3), np.float32), "y": np.array([0, 1, 1, 1, 1], np.int32)[:rows]}
    train, val = distributed.train_loader(labelled(16), 4), distributed.validation_loader(table, 2)
    model = {"loss": "cross_entropy", "metrics": ["accuracy"]}
    engine = engine_of(world, train=train, val=val, module=Classes, model=model)
    return scored(engine, engine.start())


def nan_row(world: World) -> dict[str, Any]:
    """A row that is not a number, the first of the second process."""
    table = {name: column.copy() for name, column in columns().items()}
    row = int(next(iter(dealt_loader({"x": np.arange(ROWS)}, 4, rank=1, world=2)))["x"][0])
    table["x"][row], table["weight"][row] = np.nan, 1
    return passed(engine_of(world, train=distributed.train_loader(table, 4)))


def wrong_label(world: World) -> dict[str, Any]:
    """A label that is no class, in the second process."""
    table = labelled(16)
    row = int(next(iter(dealt_loader({"x": np.arange(16)}, 4, rank=1, world=2)))["x"][0])
    table["y"][row] = 7
    return passed(engine_of(world, train=distributed.train_loader(table, 4), module=Classes, loss="cross_entropy"))
