"""A step of the user's own under torch: what it sees, what counts, what is undone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nnx_jax.core.errors import ConfigError, NonFiniteError, StepError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.engines.feeds import make_feeds
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
from nnx_jax.params.run import RunSpec
from nnx_jax.params.trainer import NNTrainerParams
from nnx_jax.step.own import default_train_step
from nnx_jax.torch.engine import TorchEngine
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.own import finalize_step
from nnx_jax.torch.own_step import delegates
from tests.torch.engines import advance, columns, engine_of, joined, mlp, spec_of, weights

ADAM = {"kind": "adam", "max_lr": 0.01, "grad_clip_norm": 0.5}


def error(ctx: Any) -> torch.Tensor:
    return ctx.mean((ctx.model(ctx.batch["x"]) - ctx.batch["y"]).square())


def plain(ctx: Any) -> dict[str, Any]:
    """The step as one writes it in torch."""
    loss = error(ctx)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(ctx.model.parameters(), ctx.grad_clip_norm)
    ctx.optimizer.step()
    ctx.report_update()
    return {"loss": loss}


def portable(ctx: Any) -> dict[str, Any]:
    """The step as one writes it for the JAX engine."""
    loss, grads = ctx.value_and_grad(lambda model: ctx.mean((model(ctx.batch["x"]) - ctx.batch["y"]).square()))
    ctx.update(grads)
    ctx.report_update()
    return {"loss": loss}


def whole(ctx: Any) -> dict[str, Any]:
    return finalize_step(error(ctx), ctx, paradigm="squares")


@pytest.mark.parametrize("step", [plain, portable, whole])
def test_three_ways_to_write_the_built_in_step(step: Any) -> None:
    found = []
    for function in (step, None):
        module = mlp(dropout=0.3)
        engine = engine_of(spec_of(columns(), optim=ADAM), module, train_step=function)
        state = engine.start()
        records = advance(engine, state, 9)
        found.append((weights(module), records, state.counters["step"]))
    assert found[0][2] == found[1][2] == 9
    for name, value in found[1][0].items():
        np.testing.assert_allclose(found[0][0][name], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(joined(found[0][1], "loss"), joined(found[1][1], "loss"), rtol=1e-5)
    assert joined(found[0][1], "rate").tolist() == joined(found[1][1], "rate").tolist()
    if step is not plain:  # which clips by itself, so its optimizer sees clipped gradients
        np.testing.assert_allclose(joined(found[0][1], "grad_norm"), joined(found[1][1], "grad_norm"), rtol=1e-4)


def test_a_step_that_returns_the_default_one_trains_bit_for_bit_like_none() -> None:
    """nnx B038, windows and records included."""
    optim = {**ADAM, "accumulate_grad_batches": 4}
    found = []
    for function in (default_train_step, None):
        module = mlp(dropout=0.3)
        spec = spec_of(columns(), optim=optim, record_every="batch")
        engine = engine_of(spec, module, train_step=function)
        assert engine.owns_windows
        assert not engine.never_updates
        records = advance(engine, engine.start(), 12)
        found.append((weights(module), [joined(records, n).tobytes() for n in ("loss", "step", "closed", "grad_norm")]))
    assert found[0][1] == found[1][1]
    assert {n: v.tobytes() for n, v in found[0][0].items()} == {n: v.tobytes() for n, v in found[1][0].items()}
    spec, options = spec_of(columns(), optim=optim), {"device": torch.device("cpu")}
    feed = make_feeds(spec)["train"]
    assert delegates(spec, default_train_step, mlp(), feed, **options)
    assert not delegates(spec, plain, mlp(), feed, **options)


def test_what_the_context_says_of_place_and_settings() -> None:
    """nnx B037: indices, the last batch exactly once an epoch, clip norm, window."""
    seen: list[Any] = []

    def step(ctx: Any) -> dict[str, Any]:
        seen.append((ctx.epoch_idx, ctx.batch_idx, ctx.is_last_batch, ctx.rng.initial_seed(), ctx.model.training))
        assert (ctx.grad_clip_norm, ctx.accumulate_grad_batches, ctx.precision) == (0.5, 2, "float32")
        return {"loss": error(ctx).detach(), "rows": (ctx.mask.sum(), 1.0), "half": 0.5}

    module = mlp()
    before = weights(module)
    engine = engine_of(spec_of(columns(), optim={**ADAM, "accumulate_grad_batches": 2}), module, train_step=step)
    assert len(seen) == 1  # the look at what it records
    assert (engine.accumulate, engine.owns_windows, engine.never_updates) == (1, False, True)
    assert engine.metric_names == ("rows", "half")
    state = engine.start()
    records = advance(engine, state, 12)
    assert [each[:3] for each in seen[1:]] == [(e, b, b == 5) for e in (0, 1) for b in range(6)]
    assert len({each[3] for each in seen[1:]}) == 12
    assert all(each[4] for each in seen)
    assert state.counters["step"] == 0
    sums = {name: np.concatenate([each.sums[name] for each in records]) for name in ("rows", "half", "loss")}
    assert sums["rows"][:, 0].tolist() == [4, 4, 4, 4, 4, 2] * 2
    assert engine.summarize({n: s.sum(0) for n, s in sums.items()})["half"] == 0.5
    assert sums["loss"][:, 1].tolist() == [4, 4, 4, 4, 4, 2] * 2
    assert {n: v.tobytes() for n, v in weights(module).items()} == {n: v.tobytes() for n, v in before.items()}


def test_every_report_moves_the_schedule_at_once() -> None:
    """nnx B050: four reports over four batches, step size 2, factor 0.5: r, r, r/2, r/2."""
    from nnx_jax.params.scheduler import NNSchedulerParams

    scheduler = NNSchedulerParams(kind="step", clock="optimizer_update", step_size=2, factor=0.5)
    spec = spec_of(columns(16), optim={"kind": "sgd", "max_lr": 0.1}, scheduler=scheduler)
    engine = engine_of(spec, mlp(), train_step=plain_unclipped)
    records = advance(engine, engine.start(), 4)
    np.testing.assert_allclose(joined(records, "rate"), [0.1, 0.1, 0.05, 0.05], rtol=1e-6)
    assert [each.updates["main"].tolist() for each in records if each.updates] == [[1, 1, 1, 1]]


def plain_unclipped(ctx: Any) -> Any:
    loss = error(ctx)
    ctx.backward(loss)
    ctx.optimizer.step()
    ctx.report_update()
    return loss


class Marked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x)) * torch.where(x[:, :1].abs().max() > 50, torch.nan, 1.0)


@pytest.mark.parametrize("step", [plain_unclipped, portable, whole])
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_what_is_not_finite_undoes_the_microbatch(step: Any, policy: str) -> None:
    data = columns(16)
    data["x"][9, 0] = 100.0
    module = Marked()
    optim = {"kind": "adam", "max_lr": 0.01}
    spec = spec_of(data, optim=optim, nonfinite=policy, max_consecutive_skips=3, data={"shuffle": False})
    engine = engine_of(spec, module, train_step=step)
    state = engine.start()
    advance(engine, state, 2)
    before = engine.snapshot(state, 0, 2).arrays
    if policy == "fail":
        with pytest.raises(NonFiniteError, match="update 3, microbatch 2: loss term 'loss'"):
            advance(engine, state, 1)
    else:
        (records,) = advance(engine, state, 1)
        assert (records.committed.tolist(), records.step.tolist()) == ([False], [2])
        assert state.counters["skipped"] == 1
    after = engine.snapshot(state, 0, 2).arrays
    same = [name for name, value in before.items() if value.tobytes() == after[name].tobytes()]
    moved = {name for name in set(before) - set(same) if not name.startswith("counters/")}
    assert moved == set()
    assert int(after["counters/updates/main"]) == 2


def trainer_spec() -> RunSpec:
    optims = {
        "body": NNOptimParams(kind="sgd", max_lr=0.1, param_groups=(NNParamGroupSpec(patterns=("0.*",)),)),
        "head": NNOptimParams(kind="adam", max_lr=0.01, param_groups=(NNParamGroupSpec(patterns=("3.*",)),)),
    }
    data = NNDataParams(train=ArrayDataset(**columns(16)), batch_size=4)
    return RunSpec(data=data, trainer=NNTrainerParams(n_epochs=2, optims=optims))


def test_named_optimizers_step_and_report_by_themselves() -> None:
    def step(ctx: Any) -> dict[str, Any]:
        ctx.backward(error(ctx))
        ctx.optimizers["head"].step()
        ctx.report_update("head")
        if ctx.batch_idx % 2:
            ctx.optimizers["body"].update()
            ctx.report_update("body")
        with pytest.raises(ConfigError, match="there is no optimizer 'tail'"):
            ctx.report_update("tail")
        return {"loss": error(ctx)}

    spec = trainer_spec()
    engine = TorchEngine(spec, mlp(), build_loss("mse"), make_feeds(spec), train_step=step)
    state = engine.start()
    (records,) = advance(engine, state, 4)
    assert records.updates is not None
    assert {name: count.tolist() for name, count in records.updates.items()} == {
        "body": [0, 1, 0, 1],
        "head": [1, 1, 1, 1],
    }
    assert (engine.optimizers.parts["head"].count, engine.optimizers.parts["body"].count) == (4, 2)
    assert records.rates is not None
    np.testing.assert_allclose(records.rates["head"], 0.01, rtol=1e-6)


def test_named_optimizers_without_a_step_of_their_own_move_together() -> None:
    spec = trainer_spec()
    module = mlp()
    before = weights(module)
    engine = TorchEngine(spec, module, build_loss("mse"), make_feeds(spec))
    (records,) = advance(engine, engine.start(), 4)
    assert records.updates is not None
    assert {name: count.tolist() for name, count in records.updates.items()} == {"body": [1] * 4, "head": [1] * 4}
    assert not any(np.array_equal(before[name], value) for name, value in weights(module).items())
    assert engine.columns()[7:9] == ("lr_body", "lr_head")


@pytest.mark.parametrize(
    ("step", "error_type", "message"),
    [
        (lambda ctx: 3, StepError, "returned int; return the loss"),
        (lambda ctx: {"loss": 1.0, "v": torch.ones(2)}, StepError, r"records 'v' of shape \[2\]"),
        (lambda ctx: {"loss": 1.0, "lr": 2.0}, ConfigError, "records 'lr'"),
        (lambda ctx: {**default_train_step(ctx), "more": 1.0}, StepError, "returns another record"),
        (lambda ctx: ctx.update(when=1), TypeError, "when must be a bool"),
        (lambda ctx: ctx.report_update("main"), TypeError, "positional"),
        (lambda ctx: ctx.backward(torch.ones(2)), StepError, r"shape \[2\]"),
        (lambda ctx: (default_train_step(ctx), ctx.update()), StepError, "after default_train_step"),
    ],
)
def test_what_a_step_cannot_do_is_said_before_training(step: Any, error_type: Any, message: str) -> None:
    module = mlp()
    before = weights(module)
    with pytest.raises(error_type, match=message):
        engine_of(spec_of(columns(), optim=ADAM), module, train_step=step)
    assert {n: v.tobytes() for n, v in weights(module).items()} == {n: v.tobytes() for n, v in before.items()}


def test_finalize_step_refuses_to_accumulate() -> None:
    """nnx B042."""
    with pytest.raises(ConfigError, match="accumulate_grad_batches is 2"):
        engine_of(spec_of(columns(), optim={**ADAM, "accumulate_grad_batches": 2}), mlp(), train_step=whole)
