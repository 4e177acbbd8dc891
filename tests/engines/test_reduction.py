"""train.reduction: what it is to a configuration, what the canonical one computes whole, and what it cannot train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nnx_jax import (
    FeedForwardParams,
    NNDataParams,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNTrainParams,
    default_train_step,
    finalize_step,
)
from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hooks import TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.data import ArrayDataset
from nnx_jax.hooks import GradientAccumulationHook, GradientClipHook, MixedPrecisionHook
from nnx_jax.objectives.objective import ObjectiveContext, ObjectiveResult
from nnx_jax.step.shards import WholeBatches
from nnx_jax.testing.cases import read
from nnx_jax.testing.report import compare
from tests.testing import toys

DRAW = np.random.default_rng(0)
ROWS = ArrayDataset(DRAW.normal(size=(32, 4)).astype(np.float32), DRAW.integers(0, 3, 32))


def train(runs: Path, *, params: dict[str, Any] | None = None, **given: Any) -> Any:
    """One epoch of two batches, canonical."""
    settings = {"n_epochs": 1, "reduction": "canonical", "optim": NNOptimParams(max_lr=1e-2), **(params or {})}
    model = given.pop("model", None) or NNModel(FeedForwardParams(hidden_dims=[8]))
    data = NNDataParams(train=ROWS, val=given.pop("val", None), batch_size=16, eval_batch_size=7)
    return model.train(NNTrainParams(**settings), data=data, runs_dir=runs, quiet=True, **given)


def test_it_is_part_of_the_configuration_and_its_default_is_not(tmp_path: Path) -> None:
    """Last bits depend on it, so a canonical run has an id of its own; `fast` written out moves none."""
    ids = [train(tmp_path / str(n), params=p).id for n, p in enumerate([{}, {"reduction": "fast"}])]
    plain = NNTrainParams(n_epochs=1)
    assert ids[0] != ids[1]
    assert plain.content_hash() == NNTrainParams(n_epochs=1, reduction="fast").content_hash()


@pytest.mark.parametrize(
    "given, said",
    [
        ({"reduction": "canonical", "reduction_shards": 12}, "got 12; write a power of two, 8 or 16"),
        ({"reduction_shards": 4}, "got 4, which needs reduction: canonical"),
        ({"reduction": "slow"}, "'fast' or 'canonical'"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NNTrainParams(n_epochs=1, **given)


def compares(ctx: ObjectiveContext) -> ObjectiveResult:
    """A loss of differences between the rows of a batch."""
    outputs = ctx.apply()
    apart = ((outputs[:, None] - outputs[None]) ** 2).sum(-1).mean(1)
    return ObjectiveResult(ctx.mean("apart", apart), outputs=outputs)


def compares_a_little(ctx: ObjectiveContext) -> ObjectiveResult:
    """A loss of rows, of which a few thousandths are the differences between them."""
    outputs = ctx.apply()
    apart = ((outputs[:, None] - outputs[None]) ** 2).sum(-1).mean(1)
    return ObjectiveResult(ctx.mean("size", (outputs**2).sum(-1) + 0.002 * apart), outputs=outputs)


def finalized(ctx: Any) -> Any:
    """A step of one's own."""
    return finalize_step(lambda model: ctx.mean((model(ctx.batch["x"]) ** 2).sum(-1)), ctx)


@pytest.mark.parametrize(
    "params, given, said",
    [
        ({"reduction_shards": 2}, {"mesh": {"data": 3}}, "leaves 1 of 3 devices without a shard; write 4 or more"),
        ({"dispatch": "staged"}, {}, "dispatch: staged computes operations one by one and rounds after each"),
    ],
)
def test_what_it_cannot_train_is_refused_at_the_start(
    tmp_path: Path, params: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    """With the reason and the way out, and no run directory."""
    with pytest.raises(ConfigError, match=said) as caught:
        train(tmp_path, params=params, **given)
    assert str(caught.value.path).startswith("train.reduction")
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


class Louder(TrainingUpdateHook):
    """Doubles the loss."""

    def __call__(self, ctx: Any, stage: Stage, will_skip: Any) -> tuple[Any, Any]:
        return True, ctx.loss * 2 if stage is Stage.DO_BACKWARD else ctx.loss


WHOLE = {
    "statistics": ({"model": lambda: NNModel(module=toys.Noisy(norm=True))}, "the BatchNorm 'norm'"),
    "own step": ({"train_step_fn": finalized}, "a step of your own"),
    "default step": ({"train_step_fn": default_train_step}, "a step of your own"),
    "means": ({"hooks": lambda: [GradientAccumulationHook(2, normalize="mean")]}, "adds up the microbatches' means"),
    "objective": ({"objective": compares}, "the loss of a batch is not the sum over its rows"),
    "loss scale": (
        {"hooks": lambda: [MixedPrecisionHook("float16"), GradientClipHook(0.1)]},
        "a hook changes the loss before the backward pass",
    ),
    "loss": ({"hooks": lambda: [Louder()]}, "a hook changes the loss before the backward pass"),
}
FAST_MESHES = {"own step": {"data": 3}, "loss scale": {"fsdp": 2}}


@pytest.mark.filterwarnings("ignore:batches of")  # rows are added where three devices share sixteen
@pytest.mark.parametrize(
    "name, mesh",
    [
        *FAST_MESHES.items(),
        *(
            pytest.param(name, mesh, marks=pytest.mark.slow)
            for name in WHOLE
            for mesh in ({"data": 3}, {"data": 2, "fsdp": 2})
        ),
    ],
)
def test_what_no_shard_can_compute_every_device_computes_whole(tmp_path: Path, name: str, mesh: dict[str, int]) -> None:
    """With a warning that says why and what it costs, and with the bits of one device."""
    given, why = WHOLE[name]
    found = []
    for place in (None, mesh):
        asked = {key: value() if key in ("model", "hooks") else value for key, value in given.items()}
        with pytest.warns(WholeBatches, match=f"since .*{why}.*: the numbers are the same on any devices"):
            train(tmp_path / str(place), mesh=place, val=ROWS, **asked)
        found.append(read(tmp_path / str(place)))
    assert all(each.exact for each in compare(found[1], found[0], same_window=True).values())


def test_rows_that_know_little_of_each_other_are_seen_in_float64(tmp_path: Path) -> None:
    """There is little rounding that could hide it; 16 bits leave room for a twentieth."""
    model = NNModel(FeedForwardParams(hidden_dims=(8,)), NNModelParams(precision="float64"))
    with jax.enable_x64(True), pytest.warns(WholeBatches, match=r"in 8 parts it is off by 0\.\d%"):
        train(tmp_path, model=model, objective=compares_a_little)


def test_an_objective_of_rows_is_trained(tmp_path: Path) -> None:
    """Equal bits on one device and on two, with a deferred reduction that does nothing, and is told so."""

    def rows(ctx: ObjectiveContext) -> ObjectiveResult:
        return ObjectiveResult(ctx.mean("size", (ctx.apply() ** 2).sum(-1)))

    one = train(tmp_path / "one", objective=rows, hooks=[GradientAccumulationHook(2)])
    hooks = [GradientAccumulationHook(2, defer_reduce=True)]
    with pytest.warns(UserWarning, match="defer_reduce does nothing here: with reduction: canonical"):
        two = train(tmp_path / "two", objective=rows, hooks=hooks, mesh={"data": 2})
    assert [row["train_loss"] for row in one.records] == [row["train_loss"] for row in two.records]
