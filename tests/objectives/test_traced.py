"""Functions of the user's that do not fit the trace: the error names their own line, or what they are called with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nnx_jax import NNModel, Objective, ObjectiveResult
from nnx_jax.core.errors import ConfigError, StepError
from tests.e2e import helpers


class Branches(Objective):
    """One that is no function, so that its own file is found by where it is."""

    def __call__(self, ctx: Any) -> Any:
        per_row = ctx.apply()[:, 0]
        if per_row.sum() > 0:
            per_row = -per_row
        return ObjectiveResult(ctx.mean("sign", per_row))


def branching(outputs: Any, batch: Any) -> Any:
    return outputs[:, 0] if outputs.sum() > 0 else outputs[:, 1]


def train(runs: Path, *, loss: Any = None, objective: Any = None, **changes: Any) -> None:
    of = NNModel(helpers.net_params(norm=None), loss=loss)
    params = helpers.train_params(**{"n_epochs": 1, **changes})
    of.train(params, objective=objective, data=helpers.data_params(), runs_dir=runs, quiet=True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"objective": Branches()}, r"Branches, .*test_traced\.py:\d+: `if per_row\.sum\(\) > 0:` needs the value"),
        ({"loss": branching}, r"loss 'branching', .*test_traced\.py:\d+: `return outputs"),
        ({"extra_metrics": {"mine": branching}}, r"metric 'mine', .*test_traced\.py:\d+: `return outputs"),
    ],
    ids=["objective", "loss", "metric"],
)
def test_python_that_needs_a_value_is_named_by_its_line(tmp_path: Path, given: Any, told: str) -> None:
    with pytest.raises(StepError, match=told):
        train(tmp_path, **given)
    assert not list(tmp_path.glob("[0-9a-f]*"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"loss": lambda y_true, y_pred: y_pred - y_true}, r"fn\(outputs, targets\).*takes 'y_true' first"),
        ({"extra_metrics": {"m": lambda truth, prediction: truth}}, "'m' is called as .*takes 'truth' first"),
        ({"extra_metrics": {"m": lambda outputs: outputs}}, "'m' is called as .*does not take that"),
    ],
    ids=["loss", "metric", "one argument"],
)
def test_functions_in_the_order_of_other_libraries_are_refused(tmp_path: Path, given: Any, told: str) -> None:
    """Silently the targets would stand for the outputs, which a symmetric function never tells."""
    with pytest.raises(ConfigError, match=told):
        train(tmp_path, **given)
