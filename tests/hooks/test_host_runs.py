"""Host hooks and preparing hooks in whole runs: what they write, and that they change nothing they should not."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.errors import CheckpointError
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.data import ArrayDataset
from nnx_jax.hooks import (
    CheckpointHook,
    DDPHook,
    GradientAccumulationHook,
    MixedPrecisionHook,
    ModulePatchHook,
    ProfilerHook,
    SkipNonFinite,
    StageTimingHook,
    TrainableParameterHook,
)
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.runs import pointers
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun


class Net(nnx.Module):
    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.body, self.head = nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.body(x)))


def rows(count: int = 24, seed: int = 0) -> ArrayDataset:
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return ArrayDataset(x=x, y=x[:, :3].argmax(axis=1).astype(np.int32))


def fit(
    runs: Path, hooks: Any, *, of: NNModel | None = None, val: bool = False, optim: Any = None, **train: Any
) -> NNRun:
    """Train the little net on 24 rows in batches of 4: six batches an epoch."""
    if "max_steps" not in train:
        train.setdefault("n_epochs", 1)
    params = NNTrainParams(
        optim=NNOptimParams(**(optim or {"kind": "adamw", "max_lr": 1e-2})),
        scheduler=NNSchedulerParams(kind="constant", clock="optimizer_update"),
        **train,
    )
    data = NNDataParams(train=rows(), val=rows(8, seed=1) if val else None, batch_size=4)
    model = of or NNModel(module=Net(), params=NNModelParams())
    quiet = {"checkpoint": CheckpointParams(every_n_epochs=None), "progress": QuietProgress()}
    return model.train(params, data=data, hooks=hooks, runs_dir=runs, **quiet)


def arrays(run: NNRun, name: str = "LAST") -> dict[str, np.ndarray]:
    return read_point(RunPaths(run.root, run.id), name).load_all()


def tags(run: NNRun) -> list[str]:
    return [name for name in run.checkpoints() if name.startswith(("step_", "epoch_"))]


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return set(left) == set(right) and all(np.array_equal(left[n], right[n], equal_nan=True) for n in left)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_by_steps(tmp_path: Path) -> None:
    """nvalchemi:113: two checkpoints, of updates 2 and 4, each of which can be loaded."""
    hook = CheckpointHook(step_interval=2)
    run = fit(tmp_path, [hook], max_steps=4)
    assert tags(run) == ["step_2", "step_4"]
    assert [run.checkpoint(name).step for name in tags(run)] == [2, 4]
    assert not same(arrays(run, "step_2"), arrays(run, "step_4"))
    assert hook.last_checkpoint_index == 1


def test_parked_updates_are_saved_once(tmp_path: Path) -> None:
    """nvalchemi:69: windows of four, two updates, two checkpoints."""
    run = fit(tmp_path, [CheckpointHook(step_interval=1), GradientAccumulationHook(3)], max_steps=2)
    assert tags(run) == ["step_1", "step_2"]
    generations = {run.pointers[name].generation for name in tags(run)}
    assert len(generations) == 2


def test_parked_updates_are_saved_once_batch_by_batch(tmp_path: Path) -> None:
    """nvalchemi:69 with a hook that makes the run go batch by batch."""
    hooks = [CheckpointHook(step_interval=1), GradientAccumulationHook(3), StageTimingHook("step")]
    assert tags(fit(tmp_path, hooks, max_steps=2)) == ["step_1", "step_2"]


def test_by_epochs(tmp_path: Path) -> None:
    """nvalchemi:115: finished epochs are counted, and the next one has not begun."""
    run = fit(tmp_path, [CheckpointHook(epoch_interval=1)], n_epochs=2)
    assert tags(run) == ["epoch_1", "epoch_2"]
    for number, name in enumerate(tags(run), start=1):
        position = run.checkpoint(name).host["position"]
        assert (position["epoch"], position["batch"]) == (number, 0)


@pytest.mark.parametrize("given", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_files_are_complete_after_the_run(tmp_path: Path, given: bool) -> None:
    """nvalchemi:116"""
    hook = CheckpointHook(step_interval=3, async_save=given)
    run = fit(tmp_path, [hook], max_steps=6)
    assert hook.last_checkpoint_index == 1
    for name in tags(run):
        assert arrays(run, name)


def test_without_async_the_files_are_there_before_training_goes_on(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Look:
        stage, frequency, cadence_steps = Stage.AFTER_BATCH, 1, 1

        def __call__(self, ctx: Any, stage: Stage) -> None:
            run = next(path for path in tmp_path.iterdir() if path.name != ".leases")
            seen.append(sorted(path.name for path in (run / "checkpoints").glob("step_*")))

    fit(tmp_path, [Look(), CheckpointHook(step_interval=2, async_save=False)], max_steps=4)
    assert seen == [[], [], ["step_2"], ["step_2"]]


def test_a_failed_save_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvalchemi:116: the writer runs in the background, its failure does not stay there."""
    real = pointers.write_pointer

    def write(paths: RunPaths, name: str, pointer: Any) -> None:
        if name == "step_2":
            raise OSError(28, "No space left on device")
        real(paths, name, pointer)

    monkeypatch.setattr(pointers, "write_pointer", write)
    with pytest.raises(CheckpointError, match="No space left"):
        fit(tmp_path, [CheckpointHook(step_interval=2)], max_steps=4)


def test_retention_frees_the_checkpoints(tmp_path: Path) -> None:
    hook = CheckpointHook(step_interval=1, keep_last=2)
    run = fit(tmp_path, [hook], max_steps=6, save_phase_checkpoints=False)
    assert tags(run) == ["step_5", "step_6"]
    kept = {path.name for path in RunPaths(run.root, run.id).generations.iterdir()}
    assert kept == {str(pointer.generation) for pointer in run.pointers.values()}


def test_the_best_of_a_run_are_kept(tmp_path: Path) -> None:
    """The validation loss of the very update decides."""
    hook = CheckpointHook(step_interval=2, keep_best=2)
    run = fit(tmp_path, [hook], val=True, max_steps=12, eval_every_n_steps=2, optim={"kind": "sgd", "max_lr": 4.0})
    table = [row for row in run.records if row["kind"] in ("eval", "epoch")]
    losses = {row["step"]: row["val_loss"] for row in table if row["val_loss"] is not None}
    before = sorted((step for step in losses if step < 12), key=lambda step: losses[step])[:2]
    assert sorted(losses) == [2, 4, 6, 8, 10, 12]
    assert sorted(tags(run)) == sorted(f"step_{step}" for step in {*before, 12})


def test_an_interrupted_clean_up_is_finished_by_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvalchemi:121 for names that retention gives up: the run goes on from the last commit, and nothing leaks."""
    calls: list[str] = []
    real = pointers.remove_pointer

    def die(paths: RunPaths, name: str) -> None:
        calls.append(name)
        if calls == ["step_1", "step_1", "step_2"]:
            raise OSError(5, "killed here")
        real(paths, name)

    monkeypatch.setattr(pointers, "remove_pointer", die)
    with pytest.raises(CheckpointError, match="killed here"):
        fit(tmp_path, [CheckpointHook(step_interval=1, keep_last=1)], max_steps=6)
    monkeypatch.setattr(pointers, "remove_pointer", real)
    left = NNRun.all(tmp_path)[0]
    assert {"step_2", "step_3"} <= set(tags(left))
    run = fit(tmp_path, [CheckpointHook(step_interval=1, keep_last=1)], max_steps=6)
    assert (run.id, tags(run)) == (left.id, ["step_6"])


def test_hooks_that_watch_change_no_number_and_no_id(tmp_path: Path) -> None:
    plain = fit(tmp_path / "a", [], max_steps=4)
    watched = fit(tmp_path / "b", [CheckpointHook(step_interval=1), StageTimingHook("all")], max_steps=4)
    assert watched.id == plain.id
    left, right = arrays(watched), arrays(plain)
    assert [name for name in {**left, **right} if not np.array_equal(left[name], right[name])] == []


# Times and profiles --------------------------------------------------------------------------------------------------


class One(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.float32(1.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x[:, 0] * self.w[...]


@pytest.mark.parametrize("dispatch", ["auto", "staged"])
def test_timing_every_stage_learns_all_the_same(tmp_path: Path, dispatch: Any) -> None:
    """nvalchemi:33: it stands at both replacement stages, and the weight after one step is 0.8."""
    hook = StageTimingHook("all")
    data = NNDataParams(train=ArrayDataset(x=np.ones((1, 1), np.float32), y=np.zeros(1, np.float32)), batch_size=1)
    model = NNModel(module=One(), loss=lambda outputs, y: (outputs - y) ** 2)
    sgd = NNOptimParams(kind="sgd", max_lr=0.1)
    scheduler = NNSchedulerParams(kind="constant")
    params = NNTrainParams(n_epochs=1, optim=sgd, scheduler=scheduler, dispatch=dispatch)
    run = model.train(params, data=data, hooks=[hook], runs_dir=tmp_path, quiet=True)
    assert run.last is not None
    assert run.last.step == 1
    assert float(model.net.w[...]) == pytest.approx(0.8, abs=1e-6)
    assert len(hook.summary()) >= 9


@pytest.mark.parametrize("dispatch", ["auto", "staged", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_batch_has_one_interval(tmp_path: Path, dispatch: Any) -> None:
    """nvalchemi:144"""
    path = tmp_path / "times.csv"
    hook = StageTimingHook({Stage.BEFORE_BATCH, Stage.AFTER_BATCH}, log_path=path)
    fit(tmp_path / "runs", [hook], n_epochs=2, dispatch=dispatch)
    told = hook.summary()
    assert list(told) == ["BEFORE_BATCH->AFTER_BATCH"]
    assert told["BEFORE_BATCH->AFTER_BATCH"]["n_samples"] == 12
    lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    assert len(lines) == 13
    assert {len(line) for line in lines} == {5}
    assert [int(line[1]) for line in lines[1:]] == list(range(1, 13))


def test_staged_times_are_those_of_the_stages(tmp_path: Path) -> None:
    """With the stages in place, waiting inside the forward pass is seen between its two stages and nowhere else."""
    import time

    class Slow(nnx.Module):
        def __init__(self) -> None:
            self.inner = Net()

        def __call__(self, x: jax.Array) -> jax.Array:
            out = self.inner(x)

            def wait(value: np.ndarray) -> np.ndarray:
                time.sleep(0.05)
                return value

            return (
                jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x)).sum() * 0
                + out
            )

    hook = StageTimingHook("detailed")
    fit(tmp_path, [hook], of=NNModel(module=Slow()), dispatch="staged", max_steps=3)
    told = {name: seconds["min_s"] for name, seconds in hook.summary().items()}
    assert told["BEFORE_FORWARD->AFTER_FORWARD"] > 0.05
    assert told["AFTER_OPTIMIZER_STEP->AFTER_BATCH"] < 0.05
    assert told["AFTER_FORWARD->BEFORE_LOSS"] < 0.05


def test_a_run_is_profiled_below_its_rank(tmp_path: Path) -> None:
    """nvalchemi:142: not before training, once, and with the names of the stages in the trace."""
    hook = ProfilerHook(tmp_path / "profile")
    seen: list[bool] = []

    class Before:
        stage, frequency = Stage.SETUP, 1

        def __call__(self, ctx: Any, stage: Stage) -> None:
            seen.append((tmp_path / "profile").exists())

    fit(tmp_path / "runs", [Before(), hook], max_steps=3)
    assert seen == [False]
    found = list((tmp_path / "profile" / "rank_0" / "jax").rglob("*.trace.json.gz"))
    assert len(found) == 1
    with pytest.raises(RuntimeError, match="make another one for another run"):
        fit(tmp_path / "again", [hook], max_steps=3)


def test_a_schedule_profiles_some_batches(tmp_path: Path) -> None:
    hook = ProfilerHook(tmp_path / "profile", schedule={"wait": 1, "active": 2, "repeat": 2})
    fit(tmp_path / "runs", [hook], max_steps=6)
    root = tmp_path / "profile" / "rank_0" / "jax"
    assert sorted(path.name for path in root.iterdir()) == ["cycle_0", "cycle_1"]
    assert len(list(root.rglob("*.trace.json.gz"))) == 2


def test_a_failing_run_closes_the_profile(tmp_path: Path) -> None:
    class Fails:
        stage, frequency = Stage.AFTER_BATCH, 1

        def __call__(self, ctx: Any, stage: Stage) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "runs", [ProfilerHook(tmp_path / "profile"), Fails()], max_steps=3)
    assert len(list((tmp_path / "profile").rglob("*.trace.json.gz"))) == 1


# Preparing a model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_process_under_ddp_is_the_plain_run(tmp_path: Path, first: bool) -> None:
    """nvalchemi:126 and nvalchemi:130: bit for bit, with MixedPrecisionHook before or after it."""
    mixed = MixedPrecisionHook("bfloat16")
    plain = fit(tmp_path / "a", [mixed], max_steps=4)
    alone = DDPHook(find_unused_parameters=False, devices=1)
    hooks = [alone, mixed] if first else [mixed, alone]
    ddp = fit(tmp_path / "b", hooks, max_steps=4)
    assert ddp.id == plain.id
    assert same(arrays(ddp), arrays(plain))


def test_only_the_head_is_trained(tmp_path: Path) -> None:
    """nvalchemi:146: the rest keeps its weights and has no optimizer state."""
    hook = TrainableParameterHook(("main.*",), ("main.head.*",))
    run, start = fit(tmp_path, [hook], max_steps=4), Net()
    now = arrays(run)
    assert np.array_equal(now["frozen/body.kernel"], start.body.kernel[...])
    assert not np.array_equal(now["params/head.kernel"], start.head.kernel[...])
    assert not [name for name in now if name.startswith("opt") and "body" in name]
    assert [name for name in now if name.startswith("opt") and "head" in name]


def test_gradients_without_updates(tmp_path: Path) -> None:
    """nvalchemi:147: excluded parameters have fresh gradients each time, no state, and do not move."""
    norms: list[float] = []

    class Look:
        stage, frequency, needs = Stage.AFTER_BACKWARD, 1, ("gradients",)

        def __call__(self, ctx: Any, stage: Stage) -> None:
            norms.append(float(jnp.linalg.norm(ctx.gradients["body.kernel"])))

    hook = TrainableParameterHook("main.body.*", freeze_mode="optimizer_only")
    still = {"kind": "sgd", "max_lr": 1e-9}  # so that the gradients of two passes over the rows are the same
    run = fit(tmp_path, [hook, Look()], n_epochs=3, optim={"kind": "adamw", "max_lr": 1e-2})
    now, start = arrays(run), Net()
    assert np.array_equal(now["params/body.kernel"], start.body.kernel[...])
    assert not np.array_equal(now["params/head.kernel"], start.head.kernel[...])
    assert not [name for name in now if name.startswith("opt") and "body" in name]
    assert min(norms) > 0
    norms.clear()
    fit(tmp_path / "slow", [hook, Look()], n_epochs=2, optim=still, of=NNModel(module=Net()))
    assert sum(norms[:6]) == pytest.approx(sum(norms[6:]), rel=0.2)


def test_the_choice_is_this_runs_alone(tmp_path: Path) -> None:
    model = NNModel(module=Net())
    chosen = fit(tmp_path, [TrainableParameterHook("main.body.*")], of=model, max_steps=2)
    free = fit(tmp_path, [], of=model, max_steps=2)
    assert "frozen/body.kernel" in arrays(chosen)
    assert "params/body.kernel" in arrays(free)
    assert chosen.id != free.id


def test_a_patch_is_trained(tmp_path: Path) -> None:
    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.inner = nnx.Linear(3, 3, rngs=nnx.Rngs(7))

        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * self.inner(x)

    patch = ModulePatchHook({"main.head": Scaled})
    plain = fit(tmp_path, [SkipNonFinite()], max_steps=2)
    run = fit(tmp_path, [SkipNonFinite(), ModulePatchHook({"main.head": lambda: Scaled()})], max_steps=2)
    assert "params/head.inner.kernel" in arrays(run)
    assert not np.array_equal(arrays(run)["params/head.inner.kernel"], Scaled().inner.kernel[...])
    assert run.id != plain.id
    with pytest.raises(TypeError, match="give a module"):
        fit(tmp_path, [patch], max_steps=2)
