"""Torch runs trained by objectives: against the plain run, against plain torch, and through the face."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nnx_jax.core.errors import ConfigError, NonFiniteError, StepError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.losses import MSEParams
from nnx_jax.params.metrics import AccuracyParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import NNTrainParams
from nnx_jax.torch.model import NNModel
from nnx_jax.torch.objectives import (
    Objective,
    ObjectiveContext,
    ObjectiveResult,
    UpdateEvent,
    kd_objective,
    supervised_objective,
)
from tests.torch.engines import advance, columns, engine_of, joined, mlp, spec_of, weights

SGD = {"kind": "sgd", "max_lr": 0.1, "momentum": 0.0}


def squares(ctx: ObjectiveContext) -> ObjectiveResult:
    """A mean and a sum, noise of its own, and what it saw as its record."""
    outputs = ctx.apply()
    error = (outputs - ctx.batch["y"]).square().sum(-1)
    noise = torch.rand((), generator=ctx.rng)
    terms = [ctx.mean("squares", error), LossTerm("size", outputs.abs().sum(), reduction="sum", weight=0.25)]
    place = 100 * ctx.epoch_idx + ctx.batch_idx
    return ObjectiveResult(terms, {"place": place, "noise": noise, "rows": (error.sum(), len(error))}, outputs)


def validated(engine: Any, state: Any) -> dict[str, float]:
    found = engine.evaluate(state, "val")
    assert found is not None
    return dict(found.values)


@pytest.mark.parametrize("window", [1, 3])
def test_the_models_own_loss_as_an_objective_changes_nothing(window: int) -> None:
    """Bit for bit, dropout and metrics included; the validation as well."""
    results = []
    for objective in (None, supervised_objective()):
        optim = {**SGD, "accumulate_grad_batches": window}
        spec = spec_of(columns(classes=3), val=columns(7, classes=3), optim=optim, metrics=[AccuracyParams()])
        module = mlp(outputs=3, dropout=0.5)
        engine = engine_of(spec, module, "cross_entropy", objective=objective)
        state = engine.start()
        records = advance(engine, state, 12)
        results.append((weights(module), joined(records, "accuracy"), validated(engine, state)))
    (plain, sums, scores), (mine, my_sums, my_scores) = results
    for name, value in plain.items():
        np.testing.assert_array_equal(mine[name], value)
    np.testing.assert_array_equal(my_sums, sums)
    assert my_scores == scores


def test_terms_and_records_are_those_of_plain_torch() -> None:
    """Windows of two batches, 4 and 2 rows: the mean over 6 rows, the sum as it is; each record as it was given."""
    data = columns(6)
    spec = spec_of(data, optim={**SGD, "accumulate_grad_batches": 2}, data={"shuffle": False})
    module, other = mlp(), mlp()
    engine = engine_of(spec, module, objective=Objective(squares))
    records = advance(engine, engine.start(), 4)
    x, y = (torch.from_numpy(data[name]) for name in ("x", "y"))
    for _ in range(2):
        outputs = other(x)
        other.zero_grad()
        ((outputs - y).square().sum(-1).mean() + 0.25 * outputs.abs().sum()).backward()
        with torch.no_grad():
            for value in other.parameters():
                assert value.grad is not None
                value -= 0.1 * value.grad
    for name, value in weights(other).items():
        np.testing.assert_allclose(weights(module)[name], value, rtol=2e-5, atol=2e-6)
    assert joined(records, "place").tolist() == [[1.0, 2.0], [201.0, 2.0]]  # batches 0 and 1 of epochs 0 and 1
    assert joined(records, "rows")[:, 1].tolist() == [6.0, 6.0]
    noise = joined(records, "noise")[:, 0]
    assert noise[0] != noise[1]
    again = engine_of(spec, mlp(), objective=Objective(squares))
    np.testing.assert_array_equal(joined(advance(again, again.start(), 4), "noise")[:, 0], noise)


def test_validation_asks_the_objective_in_evaluation_mode() -> None:
    modes: list[tuple[bool, bool, bool]] = []

    def own(ctx: ObjectiveContext) -> ObjectiveResult:
        modes.append((ctx.train, ctx.model.training, torch.is_grad_enabled()))
        return ObjectiveResult(ctx.mean("level", ctx.apply().abs()), {"noise": torch.rand((), generator=ctx.rng)})

    spec = spec_of(columns(), val=columns(7), optim=SGD)
    module = mlp()
    engine = engine_of(spec, module, objective=Objective(own))
    state = engine.start()
    advance(engine, state, 1)
    modes.clear()
    found, again = validated(engine, state), validated(engine, state)
    assert set(modes) == {(False, False, False)}
    with torch.no_grad():
        assert found["loss"] == pytest.approx(float(module(torch.from_numpy(columns(7)["x"])).abs().mean()), rel=1e-6)
    assert found == again  # its noise too
    assert 0 < found["noise"] < 1


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_term_that_is_not_finite(policy: str) -> None:
    """nnx:B087 - "fail" ends the run with nothing stepped, "skip" leaves the window out."""

    def broken(ctx: ObjectiveContext) -> ObjectiveResult:
        bad = ctx.batch_idx == 1
        return ObjectiveResult(ctx.mean("level", ctx.apply() * (float("nan") if bad else 1.0)))

    objective = Objective(broken, nonfinite=policy)
    module = mlp()
    engine = engine_of(spec_of(columns(), optim=SGD), module, objective=objective, nonfinite=objective.policy("fail"))
    state = engine.start()
    advance(engine, state, 1)
    before = weights(module)
    if policy == "fail":
        with pytest.raises(NonFiniteError, match="loss term 'level'"):
            advance(engine, state, 1)
    else:
        (record,) = advance(engine, state, 1)
        assert not record.committed.any()
    for name, value in before.items():
        np.testing.assert_array_equal(weights(module)[name], value)


@pytest.mark.parametrize("window", [1, 2])
def test_distillation_in_windows_is_that_of_all_rows(window: int) -> None:
    """6 rows at once, and 4 and 2; the validation scores the loss alone; the teacher stays as it was."""
    data = columns(6, classes=3)
    teacher, module, other = mlp(outputs=3, seed=1, dropout=0.5), mlp(outputs=3), mlp(outputs=3)
    before = copy.deepcopy(teacher.state_dict())
    optim, size = {**SGD, "accumulate_grad_batches": window}, 6 if window == 1 else 4
    spec = spec_of(data, val=data, optim=optim, batch_size=size, data={"shuffle": False})
    engine = engine_of(spec, module, "cross_entropy", objective=kd_objective(teacher, 0.5, 2.0))
    state = engine.start()
    advance(engine, state, 3 * window)
    x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    sure = copy.deepcopy(teacher).eval()
    for _ in range(3):
        other.zero_grad()
        outputs = other(x)
        soft = torch.nn.functional.log_softmax(sure(x) / 2, -1).detach()
        student = torch.nn.functional.log_softmax(outputs / 2, -1)
        apart = torch.nn.functional.kl_div(student, soft, log_target=True, reduction="batchmean")
        (0.5 * torch.nn.functional.cross_entropy(outputs, y) + 0.5 * 4.0 * apart).backward()
        with torch.no_grad():
            for value in other.parameters():
                assert value.grad is not None
                value -= 0.1 * value.grad
    for name, value in weights(other).items():
        np.testing.assert_allclose(weights(module)[name], value, rtol=2e-5, atol=2e-6)
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(module(x), y))
    assert validated(engine, state)["loss"] == pytest.approx(loss, rel=1e-6)
    assert teacher.training
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_what_an_objective_may_not_do_is_said_before_training() -> None:
    def returning(result: Any) -> Objective:
        return Objective(lambda ctx: result(ctx))

    term = lambda ctx: ctx.mean("m", ctx.apply())  # noqa: E731
    spec = spec_of(columns(), optim=SGD)
    with pytest.raises(TypeError, match="returned LossTerm; return ObjectiveResult"):
        engine_of(spec, mlp(), objective=returning(term))
    taken = returning(lambda ctx: ObjectiveResult(term(ctx), {"loss": 1.0}))
    with pytest.raises(ConfigError, match=r"records \['loss'\], which the run records itself"):
        engine_of(spec, mlp(), objective=taken)
    asked = spec_of(columns(classes=3), optim=SGD, metrics=[AccuracyParams()])
    with pytest.raises(ConfigError, match="got accuracy, but the objective gives no outputs"):
        engine_of(asked, mlp(outputs=3), "cross_entropy", objective=returning(lambda ctx: ObjectiveResult(term(ctx))))
    moody = Objective(lambda ctx: ObjectiveResult(term(ctx), {f"at_{ctx.batch_idx}": 1.0}))
    engine = engine_of(spec, mlp(), objective=moody)
    with pytest.raises(StepError, match=r"recorded \['at_0'\] and then \['at_1'\]"):
        advance(engine, engine.start(), 2)


def test_a_run_by_an_objective(tmp_path: Path) -> None:
    """nnx:B082 (its events) - 5 microbatches in windows of 2 commit at batches 1, 3 and 4, of 2, 2 and 1.

    The listener of the objective gets every committed update, and the record is in the history.
    """

    class Listens(Objective):
        def __init__(self) -> None:
            super().__init__(squares)
            self.heard: list[UpdateEvent] = []

        def identity(self) -> Any:
            return "listens"

        def after_update(self, events: Any) -> None:
            self.heard += events

    objective, module = Listens(), mlp()
    data = NNDataParams(train=ArrayDataset(**columns(18)), batch_size=4, shuffle=False)
    optim = NNOptimParams(**SGD, accumulate_grad_batches=2)  # type: ignore[arg-type]
    params = NNTrainParams(n_epochs=1, optim=optim, scheduler=NNSchedulerParams(kind="constant"))
    model = NNModel(module=module, params=NNModelParams(loss=MSEParams()))
    run = model.train(params, objective=objective, data=data, runs_dir=tmp_path, quiet=True)
    events = [(event.update_idx, event.batch_idx, event.microbatches) for event in objective.heard]
    assert events == [(1, 1, 2), (2, 3, 2), (3, 4, 1)]
    assert set(objective.heard[0].losses) == {"squares", "size"}
    event = objective.heard[0]
    assert event.loss == pytest.approx(event.losses["squares"] + 0.25 * event.losses["size"], rel=1e-6)
    assert run.epochs[0]["train_place"] == 2.0  # the mean over batches 0 to 4
    assert 0 < run.epochs[0]["train_noise"] < 1
