"""The two entries and the three hooks behind them, where their runs lie, and that nothing beside them owns a loop."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from nnx_jax.loop.callbacks import Callback, TrainContext
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.objectives.objective import supervised_objective
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
from nnx_jax.params.run import RunSpec
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.runs.run import NNRun
from nnx_jax.step.own import finalize_step
from nnx_jax.trainer import Trainer
from tests.e2e.helpers import data_params, model, train_params

ROOT = Path(__file__).resolve().parents[2]
LAYERS = [
    "your code", "two entries", "three hooks", "specializations", "the loop", "the callback bus", "listeners",
    "persistence",
]  # fmt: skip


def step_factory(optimizer: str | None) -> Callable[[Any], dict[str, Any]]:
    """A step for either entry: the tail is the shared one."""

    def step(ctx: Any) -> dict[str, Any]:
        return finalize_step(lambda net: jnp.mean(net(ctx.batch["x"]) ** 2), ctx, optimizer=optimizer)

    return step


def validate(ctx: Any) -> dict[str, float]:
    return {"loss": 1.0, "epoch": float(ctx.epoch_idx)}


def by_model(runs: Path, **changes: Any) -> NNRun:
    return model(norm=None, dropout_prob=0.0).train(
        train_params(**{"n_epochs": 1, "scheduler": {"kind": "constant"}, **changes}),
        train_step_fn=step_factory(None),
        eval_step_fn=validate,
        data=data_params(),
        runs_dir=runs,
        progress=QuietProgress(),
    )


def optimizers(*names: str) -> dict[str, NNOptimParams]:
    """One optimizer for the hidden layers, one for the head, by these names."""
    groups = [NNParamGroupSpec(patterns=(pattern,), max_lr=0.1) for pattern in ("layers.*", "head.*")]
    made = [NNOptimParams(kind="sgd", max_lr=0.1, param_groups=(group,)) for group in groups]
    return dict(zip(names, made, strict=True))


def by_trainer(runs: Path, *callbacks: Callback, step: Any = None, names: tuple[str, str] = ("body", "head")) -> NNRun:
    return Trainer(model(norm=None, dropout_prob=0.0)).train(
        NNTrainerParams(optims=optimizers(*names), n_epochs=1),
        trainer_step_fn=step,
        objective=None if step is not None else supervised_objective(),
        eval_step_fn=validate,
        callbacks=callbacks,
        data=data_params(),
        runs_dir=runs,
        progress=QuietProgress(),
    )


@pytest.mark.parametrize("train", [by_model, lambda runs: by_trainer(runs, step=step_factory("head"))])
def test_a_run_lies_below_its_id_which_is_its_content(tmp_path: Path, train: Callable[[Path], NNRun]) -> None:
    """nnx:S01 two entries, a step of one's own for each, and one validation of one's own for both.

    Steps made by one factory share the tail `finalize_step`. Equal content gives one id, wherever it is trained.
    """
    run = train(tmp_path / "runs")
    assert run.path == tmp_path / "runs" / run.id
    assert re.fullmatch("[0-9a-f]{16}", run.id)
    assert (run.epochs[0]["val_loss"], run.epochs[0]["val_epoch"]) == (1.0, 0.0)
    assert train(tmp_path / "others").id == run.id


def test_other_content_is_another_run(tmp_path: Path) -> None:
    """nnx:S01"""
    one, other = by_model(tmp_path), by_model(tmp_path, seed=1)
    assert one.id != other.id
    assert {run.id for run in NNRun.all(tmp_path)} == {one.id, other.id}


class First(Callback):
    def on_epoch_end(self, ctx: TrainContext) -> None:
        assert ctx.optimizer is not None
        self.name, self.names = ctx.optimizer.name, list(ctx.optimizers)


def test_a_trainers_run_is_read_back(tmp_path: Path) -> None:
    """nnx:B234 `run.yaml` has a `trainer` block that gives equal parameters; `ctx.optimizer` is the first by name."""
    first = First()
    run = by_trainer(tmp_path, first, names=("zebra", "ape"))
    again = NNRun.load(run.id, tmp_path)
    assert "train" not in again.state
    assert NNTrainerParams.from_state(again.state["trainer"]) == NNTrainerParams(
        optims=optimizers("zebra", "ape"), n_epochs=1
    )
    assert (first.name, first.names) == ("ape", ["ape", "zebra"])


def test_a_configuration_names_the_run_that_python_names(tmp_path: Path) -> None:
    """nnx:S01 nothing but content: from a file's text, from Python, with other data objects of equal rows."""
    net = FeedForwardParams(hidden_dims=(6,))
    params = train_params(n_epochs=1)
    run = NNModel(net).train(params, data=data_params(), runs_dir=tmp_path, progress=QuietProgress())
    spec = RunSpec(model={"net": net.state()}, data=data_params(), train=params.state())  # pyright: ignore[reportArgumentType]
    assert spec.run_id() == run.id


# Who owns the loop ---------------------------------------------------------------------------------------------------


def calls(name: str) -> set[str]:
    """The files of the package that call a function or method of this name."""
    found = set()
    for path in (ROOT / "nnx_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if getattr(called, "attr", getattr(called, "id", None)) == name:
                found.add(path.relative_to(ROOT / "nnx_jax").as_posix())
    return found


def test_there_is_one_loop() -> None:
    """nnx:S02 updates are asked for by the loop alone, and the loop is begun by the entries' sessions alone.

    Objectives, hooks, transforms, exporters, inference and diagnostics are called by it, or stand beside it.
    """
    assert calls("run_span") == {"loop/lifecycle.py", "loop/watched.py", "training/engine.py"}
    assert calls("LoopPlan") == {"fit/session.py", "training/strategy.py"}
    assert calls("Session") <= {"loop/lifecycle.py", "training/session.py"}
    assert calls("train_spec") == {"model.py", "trainer.py", "train.py", "backends/gradient.py"}


def test_the_layers_are_where_the_page_says() -> None:
    """nnx:S09 eight layers from the user's code to the disk, and the page names the files of each."""
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    table = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ")]
    rows = {name.strip(): re.findall("`([^`]+)`", where) for name, _, where in table if name.strip() in LAYERS}
    assert list(rows) == LAYERS
    assert all((ROOT / path).exists() for paths in rows.values() for path in paths)
    assert [name for name, paths in rows.items() if not paths] == ["your code"]


def test_a_layer_knows_none_above_it() -> None:
    """nnx:S09 by what is imported when a file runs: from the entries down to the run store."""
    floors = ["model.py", "fit/session.py", "loop/lifecycle.py", "runs/store.py"]
    for place, path in enumerate(floors):
        tree = ast.parse((ROOT / "nnx_jax" / path).read_text(encoding="utf-8"))
        names = {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
        rooms = {name.split(".")[1] for name in names if name.startswith("nnx_jax.")}
        assert not rooms & {above.split("/")[0].removesuffix(".py") for above in floors[:place]}
