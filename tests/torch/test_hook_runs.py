"""Hooks in whole runs of a torch model: the stages beside JAX's, what watchers see, checkpoints, averages, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nnx_jax.core.errors import ConfigError, TraceBoundaryError
from nnx_jax.core.hooks import TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.data import ArrayDataset
from nnx_jax.hooks import (
    CheckpointHook,
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    SkipNonFinite,
    SpikeSkipHook,
    StageTimingHook,
    TrainableParameterHook,
)
from nnx_jax.loop.progress import QuietProgress
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import CheckpointParams, NNTrainParams
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun
from nnx_jax.torch import NNModel


def net(seed: int = 0, *, dropout: float = 0.0, norm: bool = False) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle = [torch.nn.BatchNorm1d(5)] if norm else []
        layers = [torch.nn.Linear(4, 5), *middle, torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(5, 3)]
        return torch.nn.Sequential(*layers)


def rows(count: int = 24, seed: int = 0) -> ArrayDataset:
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return ArrayDataset(x=x, y=x[:, :3].argmax(axis=1).astype(np.int32))


def fit(
    runs: Path, hooks: Any, *, of: Any = None, val: bool = False, optim: Any = None, **train: Any
) -> tuple[NNRun, Any]:
    """Train the little net on 24 rows in batches of 4: six batches an epoch."""
    if "max_steps" not in train:
        train.setdefault("n_epochs", 1)
    params = NNTrainParams(
        optim=NNOptimParams(**(optim or {"kind": "adamw", "max_lr": 1e-2})),
        scheduler=NNSchedulerParams(kind="constant", clock="optimizer_update"),
        **train,
    )
    data = NNDataParams(train=rows(), val=rows(8, seed=1) if val else None, batch_size=4)
    model = of or NNModel(module=net(), params=NNModelParams())
    quiet = {"checkpoint": CheckpointParams(every_n_epochs=None), "progress": QuietProgress()}
    return model.train(params, data=data, hooks=hooks, runs_dir=runs, **quiet), model


def arrays(run: NNRun, name: str = "LAST") -> dict[str, np.ndarray]:
    return read_point(RunPaths(run.root, run.id), name).load_all()


def different(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> list[str]:
    both = {**left, **right}
    return [n for n in both if n not in left or n not in right or left[n].tobytes() != right[n].tobytes()]


class Watch:
    """Notes the stages, and what `look` finds in the context of each."""

    frequency, stage = 1, None

    def __init__(self, look: Any = lambda ctx, stage: None, stages: Any = tuple(Stage)) -> None:
        self.look, self.stages, self.seen = look, stages, []

    def _runs_on_stage(self, stage: Stage) -> bool:
        return stage in self.stages

    def __call__(self, ctx: Any, stage: Stage) -> None:
        self.seen.append((stage.name, ctx.batch_count, ctx.step_count, self.look(ctx, stage)))


# -- stages and what they show -----------------------------------------------------------------------------------------


def test_all_stages_in_order(tmp_path: Path) -> None:
    """nvalchemi:1 nvalchemi:2 nvalchemi:3 nvalchemi:4 nvalchemi:33 (one batch, watched also where hooks may replace)"""
    watch = Watch()
    fit(tmp_path, [watch], val=True, steps_per_epoch=1)
    names = [stage.name for stage in Stage if stage is not Stage.AFTER_VALIDATION]
    names.insert(names.index("AFTER_TRAINING"), "AFTER_VALIDATION")
    assert [name for name, *_ in watch.seen] == names
    counts = {name: (batch, step) for name, batch, step, _ in watch.seen}
    assert (counts["AFTER_OPTIMIZER_STEP"], counts["AFTER_BATCH"]) == ((0, 0), (1, 1))


@pytest.mark.slow
def test_all_stages_come_in_the_order_of_the_jax_executor(tmp_path: Path) -> None:
    """nvalchemi:2 nvalchemi:3 nvalchemi:33 nvalchemi:160: order and counters of 18 stages, with a window of two."""
    from flax import nnx

    from nnx_jax.model import NNModel as JaxModel

    class One(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.layer(x)

    ours, theirs = Watch(), Watch()
    hooks: list[Any] = [GradientAccumulationHook(2)]
    options: dict[str, Any] = {"val": True, "steps_per_epoch": 1, "optim": {"kind": "sgd", "max_lr": 0.1}}
    fit(tmp_path / "torch", [ours, *hooks], **options)
    fit(tmp_path / "jax", [theirs, *hooks], of=JaxModel(module=One()), dispatch="eager", **options)
    assert ours.seen == theirs.seen
    assert {name for name, *_ in ours.seen} == set(Stage.__members__)


def test_watchers_see_the_values_of_their_stage(tmp_path: Path) -> None:
    """Each at its very place, asked for beforehand or not; copies, so nothing can be written."""

    def look(ctx: Any, stage: Stage) -> Any:
        inside = Stage.BEFORE_FORWARD.value <= stage.value <= Stage.AFTER_BATCH.value
        if not inside:
            return None
        found = {"w": ctx.params["0.weight"].clone(), "loss": ctx.loss}
        if stage.value >= Stage.AFTER_FORWARD.value:
            found["out"] = ctx.predictions
        if stage.value >= Stage.AFTER_BACKWARD.value:
            found["grad"] = ctx.gradients["0.weight"].clone()
            ctx.gradients["0.weight"].zero_()
        ctx.params["0.weight"].zero_()
        return found

    watch = Watch(look)
    module = net()
    run, _ = fit(tmp_path / "a", [watch], of=NNModel(module=module), max_steps=1, optim={"kind": "sgd", "max_lr": 0.1})
    seen = {name: value for name, _, _, value in watch.seen if value is not None}
    assert seen["BEFORE_LOSS"]["loss"] is None
    assert seen["AFTER_LOSS"]["loss"].shape == ()
    assert seen["AFTER_FORWARD"]["out"].shape == (4, 3)
    first = net()
    assert torch.equal(seen["BEFORE_OPTIMIZER_STEP"]["w"], first[0].weight)
    moved = first[0].weight.detach() - 0.1 * seen["AFTER_BACKWARD"]["grad"]
    torch.testing.assert_close(seen["AFTER_OPTIMIZER_STEP"]["w"], moved)
    plain, _ = fit(tmp_path / "b", [], max_steps=1, optim={"kind": "sgd", "max_lr": 0.1})
    assert different(arrays(run), arrays(plain)) == []  # the watcher wrote into copies
    assert run.id == plain.id
    with pytest.raises(TraceBoundaryError, match="ctx.gradients is there from AFTER_BACKWARD on"):
        fit(tmp_path / "c", [Watch(lambda ctx, stage: ctx.gradients, (Stage.AFTER_LOSS,))], max_steps=1)


def test_the_gradient_that_is_watched_has_no_scale_and_no_clip(tmp_path: Path) -> None:
    """nvalchemi:83 and the note on BEFORE_OPTIMIZER_STEP: unscaled there, and what was before clipping afterwards."""
    stages = (Stage.AFTER_BACKWARD, Stage.BEFORE_OPTIMIZER_STEP)
    found = {}
    for name, hooks in {"plain": [], "scaled": [MixedPrecisionHook("fp16", 1024.0), GradientClipHook(1e-3)]}.items():
        watch = Watch(lambda ctx, stage: ctx.gradients["0.weight"], stages)
        fit(tmp_path / name, [*hooks, watch], max_steps=1)
        found[name] = [value for *_, value in watch.seen]
    for plain, scaled in zip(found["plain"], found["scaled"], strict=True):
        torch.testing.assert_close(scaled, plain, rtol=2e-2, atol=2e-4)


def test_times_of_stages_are_those_of_the_stages(tmp_path: Path) -> None:
    """nvalchemi:144 nvalchemi:33 with an interval for every pair of stages, and training as without it."""
    hook = StageTimingHook("all")
    run, _ = fit(tmp_path / "a", [hook], max_steps=3)
    assert len(hook.summary()) == 11
    assert hook.summary()["BEFORE_FORWARD->AFTER_FORWARD"]["n_samples"] == 3
    assert different(arrays(run), arrays(fit(tmp_path / "b", [], max_steps=3)[0])) == []


# -- whole lists of hooks ----------------------------------------------------------------------------------------------


def everything() -> list[Any]:
    return [
        GradientAccumulationHook(2),
        MixedPrecisionHook("fp16", init_scale=2.0**14, growth_interval=2),
        SkipNonFinite(),
        GradientClipHook(0.5),
        SpikeSkipHook(factor=1.2, decay=0.5, warmup=2, max_consecutive=None),
        EMAHook(decay=0.8),
        CheckpointHook(step_interval=2),
    ]


class Thirds(TrainingUpdateHook):
    """Keeps what is accumulated over three microbatches, by its own decision."""

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> Any:
        if stage is Stage.BEFORE_BATCH:
            return ctx.batch_count % 3 == 0, ctx.loss
        return stage is not Stage.DO_OPTIMIZER_STEP or ctx.batch_count % 3 == 2, ctx.loss


def thirds() -> list[Any]:
    return [Thirds(), EMAHook(decay=0.8), CheckpointHook(step_interval=1)]


@pytest.mark.parametrize("stop, make", [(5, everything), (6, everything), (8, thirds)])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, stop: int, make: Any) -> None:
    """nvalchemi:67 nvalchemi:82 nvalchemi:96 nvalchemi:107 nvalchemi:113: stopped inside a window or after one, every
    weight, moment, scale, count, average and gradient sum of the run is that of one that was never stopped."""

    class Stop(Watch):
        def __call__(self, ctx: Any, stage: Stage) -> None:
            if ctx.batch_count == stop and stage is Stage.AFTER_BATCH:
                ctx.request_commit()
            elif ctx.batch_count == stop:
                raise InterruptedError

    def model() -> NNModel:
        return NNModel(module=net(dropout=0.2, norm=True))

    whole, _ = fit(tmp_path / "whole", make(), of=model(), n_epochs=3)
    stops = Stop(stages=(Stage.BEFORE_BATCH, Stage.AFTER_BATCH))
    with pytest.raises(InterruptedError):
        fit(tmp_path / "parts", [*make(), stops], of=model(), n_epochs=3)
    hooks = make()
    run, _ = fit(tmp_path / "parts", hooks, of=model(), n_epochs=3)
    assert run.id == whole.id
    left, right = arrays(run), arrays(whole)
    assert [name for name in different(left, right) if not name.startswith("rng/")] == []
    assert "slots/EMAHook/average/0.weight" in left
    if make is everything:
        assert {"slots/MixedPrecisionHook/scale", "slots/SpikeSkipHook/mean"} < set(left)
    assert [n for n in run.checkpoints() if n.startswith("step_")] == [
        n for n in whole.checkpoints() if n.startswith("step_")
    ]
    ema = next(hook for hook in hooks if isinstance(hook, EMAHook))
    assert ema.get_averaged_model().n_averaged == int(right["slots/EMAHook/updates"])


def test_a_run_with_other_hooks_is_another_state(tmp_path: Path) -> None:
    """The stored state says which hooks it fits, as the JAX engine's does."""
    run, _ = fit(tmp_path, [EMAHook(decay=0.5)], max_steps=1)
    stored = run.checkpoint("LAST").host["topology"]["hooks"]
    assert stored == {"EMAHook": {"class": "nnx_jax.hooks.ema.EMAHook", "kind": "ema", "decay": 0.5}}


class Adapted(torch.nn.Sequential):
    """A module whose copies need to be adapted."""

    calls = 0

    def modify_ema_methods(self) -> None:
        self.calls += 1
        self.adapted = True


def test_averages_are_those_of_torchs_averaged_model(tmp_path: Path) -> None:
    """nvalchemi:98 nvalchemi:102 nvalchemi:106 against `torch.optim.swa_utils.AveragedModel`, buffers too; the copy is
    adapted once, before weights come into it, and the trained module never."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    module = Adapted(*net(norm=True))
    kept: list[Any] = []

    def keep(ctx: Any, stage: Stage) -> None:
        if not kept:
            kept.append(AveragedModel(net(norm=True), multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True))
        kept[0].update_parameters(torch.nn.Sequential(*ctx.model))

    ema = EMAHook(decay=0.7)
    fit(tmp_path, [ema, Watch(keep, (Stage.AFTER_OPTIMIZER_STEP,))], of=NNModel(module=module))
    averaged = ema.get_averaged_model()
    for mine, theirs in zip(averaged.module.state_dict().values(), kept[0].module.state_dict().values(), strict=True):
        if mine.is_floating_point():
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
        else:
            assert mine == 6  # torch averages the count of batches too, and rounds it down to 3
    assert averaged.n_averaged == 6
    ema.get_averaged_model()
    assert (averaged.module.calls, module.calls) == (1, 0)
    assert {p.data_ptr() for p in averaged.module.parameters()}.isdisjoint(p.data_ptr() for p in module.parameters())
    assert averaged(torch.zeros(2, 4)).shape == (2, 3)


def test_averages_are_nobody_elses(tmp_path: Path) -> None:
    """nvalchemi:111 nvalchemi:101: copied buffers are those of the last update, not those of the open window."""
    ema = EMAHook(decay=0.5, use_buffers=False)
    seen: list[tuple[int, int]] = []

    def look(ctx: Any, stage: Stage) -> None:
        if ctx.step_count:
            counts = ema.get_averaged_model().module[1].num_batches_tracked, ctx.model[1].num_batches_tracked
            seen.append((int(counts[0]), int(counts[1])))

    fit(
        tmp_path,
        [GradientAccumulationHook(2), ema, Watch(look, (Stage.AFTER_BATCH,))],
        of=NNModel(module=net(norm=True)),
    )
    assert seen == [(2, 2), (2, 3), (4, 4), (4, 5), (6, 6)]


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
def test_the_model_computes_in_the_hooks_precision(tmp_path: Path, precision: str) -> None:
    """nvalchemi:73 nvalchemi:74 nvalchemi:85 nvalchemi:86: layers in 16 bits but those that are kept, gradients and
    weights float32; validation computes as training does; autocast is open from BEFORE_BATCH to DO_BACKWARD."""
    dtype, seen = getattr(torch, precision), {"0": set[Any](), "3": set[Any]()}
    module = net()
    for name in seen:
        note = lambda part, args, out, n=name: seen[n].add((out.dtype, part.training))  # noqa: E731
        module[int(name)].register_forward_hook(note)
    cast: dict[str, bool] = {}

    class Look(TrainingUpdateHook):
        observes = True

        def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> Any:
            cast[stage.name] = torch.is_autocast_enabled("cpu")
            return True, ctx.loss

    kinds: Any = lambda ctx, stage: {grad.dtype for grad in ctx.gradients.values()}  # noqa: E731
    watch = Watch(kinds, (Stage.AFTER_BACKWARD,))
    hook = MixedPrecisionHook(precision, keep_fp32=("3.*",))
    run, _ = fit(tmp_path, [hook, Look(), watch], of=NNModel(module=module), val=True)
    assert {out for out, _ in seen["0"]} == {dtype}
    assert {train for _, train in seen["0"]} == {True, False}
    assert {out for out, _ in seen["3"]} == {torch.float32}
    assert watch.seen[0][-1] == {torch.float32}
    assert all(value.dtype == torch.float32 for value in module.parameters())
    half = dtype != torch.float32
    after = {"DO_OPTIMIZER_STEP": False, "AFTER_OPTIMIZER_STEP": False}
    assert cast == {"BEFORE_BATCH": half, "DO_BACKWARD": half, **after}
    assert ("slots/MixedPrecisionHook/scale" in arrays(run)) is (precision == "float16")


def test_layers_that_are_not_trained(tmp_path: Path) -> None:
    """nvalchemi:146 nvalchemi:147: without gradients, or with gradients that no update uses."""
    for mode in ("requires_grad", "optimizer_only"):
        module = net()
        watch = Watch(lambda ctx, stage: sorted(ctx.gradients), (Stage.AFTER_BACKWARD,))
        hook = TrainableParameterHook(trainable_patterns=("main.3.*",), freeze_mode=mode)
        run, _ = fit(tmp_path / mode, [hook, watch], of=NNModel(module=module))
        assert torch.equal(module[0].weight, net()[0].weight)
        assert not torch.equal(module[3].weight, net()[3].weight)
        assert not [name for name in arrays(run) if name.startswith("opt_state/0.")]
        every = ["0.bias", "0.weight", "3.bias", "3.weight"]
        assert watch.seen[0][-1] == (every if mode == "optimizer_only" else every[2:])


def test_hooks_of_a_run_with_an_objective(tmp_path: Path) -> None:
    """The stages are those of any run, predictions are the outputs it gives, and a scale and a clip take part."""
    from nnx_jax.torch.objectives import supervised_objective

    found = {}
    for name, more in {"plain": {}, "asked": {"objective": supervised_objective()}}.items():
        watch = Watch(lambda ctx, stage: ctx.predictions, (Stage.AFTER_FORWARD,))
        module, hooks = net(), [MixedPrecisionHook("fp16", 64.0), GradientClipHook(0.1), watch]
        data = NNDataParams(train=rows(), batch_size=4)
        params = NNTrainParams(n_epochs=1, optim=NNOptimParams(kind="sgd", max_lr=0.1))
        NNModel(module=module).train(params, data=data, hooks=hooks, runs_dir=tmp_path / name, quiet=True, **more)
        found[name] = module[0].weight.detach(), [value for *_, value in watch.seen]
    assert torch.equal(found["plain"][0], found["asked"][0])
    assert all(map(torch.equal, found["plain"][1], found["asked"][1]))
    assert len(found["asked"][1]) == 6


def test_hooks_and_a_step_of_ones_own_exclude_each_other(tmp_path: Path) -> None:
    def step(ctx: Any) -> Any:
        return ctx.default_train_step()

    with pytest.raises(ConfigError, match="hooks take no part in a step of your own"):
        model = NNModel(module=net())
        data = NNDataParams(train=rows(), batch_size=4)
        model.train(NNTrainParams(n_epochs=1), data=data, hooks=[EMAHook()], train_step_fn=step, runs_dir=tmp_path)
