"""Checkpoints of a Trainer and of NNModel.train: their optimizers are compared by name before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax import (
    NNModel,
    NNOptimParams,
    NNParamGroupSpec,
    NNRun,
    NNTrainerParams,
    ResumePointError,
    Trainer,
    supervised_objective,
)
from nnx_jax.engines.inference import weights_of
from tests.e2e import helpers


def of_trainer(runs: Path, names: tuple[str, str], **changes: Any) -> NNRun:
    groups = [NNParamGroupSpec(patterns=(pattern,)) for pattern in ("layers.*", "head.*")]
    optims = {name: NNOptimParams(kind="sgd", param_groups=(group,)) for name, group in zip(names, groups, strict=True)}
    params = NNTrainerParams(optims=optims, n_epochs=1, **changes)
    return Trainer(net()).train(
        params, objective=supervised_objective(), data=helpers.data_params(), runs_dir=runs, quiet=True
    )


def of_model(runs: Path, of: NNModel | None = None, **changes: Any) -> NNRun:
    params = helpers.train_params(**{"n_epochs": 1, "scheduler": {"kind": "constant"}, **changes})
    return (of or net()).train(params, data=helpers.data_params(), runs_dir=runs, quiet=True)


def net() -> NNModel:
    return NNModel(helpers.net_params(norm=None, dropout_prob=0.0))


def test_other_names_are_refused_with_both_sides(tmp_path: Path) -> None:
    """nnx:B138"""
    source = of_trainer(tmp_path, ("a", "b"))
    with pytest.raises(
        ResumePointError, match="a Trainer's with a, b; this run's are a Trainer's with a, c"
    ) as refused:
        of_trainer(tmp_path, ("a", "c"), resume_from_run_id=source.id)
    assert isinstance(refused.value, ValueError)


def test_a_trainers_checkpoint_and_a_models_are_exchanged_by_their_weights_alone(tmp_path: Path) -> None:
    """nnx:B137 either way; a refused one leaves the model as it was."""
    of_two, of_one, fresh = of_trainer(tmp_path, ("a", "b")), of_model(tmp_path), net()
    with pytest.raises(ResumePointError, match="a Trainer's with a, b; this run's are NNModel.train's only one"):
        of_model(tmp_path, fresh, resume_from_run_id=of_two.id)
    with pytest.raises(ResumePointError, match="NNModel.train's only one; this run's are a Trainer's with a, b"):
        of_trainer(tmp_path, ("a", "b"), resume_from_run_id=of_one.id)
    moved = of_model(tmp_path, resume_from_run_id=of_two.id, resume_mode="weights_only", optim={"max_lr": 0.0})
    weights = [weights_of(NNModel.from_checkpoint(run.id, runs_dir=tmp_path).net) for run in (of_two, moved)]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    back = of_trainer(tmp_path, ("a", "b"), resume_from_run_id=of_one.id, resume_mode="weights_only")
    assert back.resume_status.mode == moved.resume_status.mode == "weights_only"
