"""Objectives by themselves: what they take, what they return and what is told of anything else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.objectives.objective import (
    Objective,
    ObjectiveContext,
    ObjectiveResult,
    as_objective,
    average,
    check_result,
    listener,
    supervised_objective,
)
from nnx_jax.objectives.terms import LossTerm, total_value


def context(outputs: Any, *, mask: Any = None, **columns: Any) -> ObjectiveContext:
    """A microbatch whose model gives these outputs for any x."""
    out = jnp.asarray(outputs)
    batch = {
        "x": jnp.zeros((len(out), 1)),
        "mask": jnp.ones(len(out)) if mask is None else jnp.asarray(mask, jnp.float32),
    }
    batch |= {name: jnp.asarray(column) for name, column in columns.items()}
    return ObjectiveContext(lambda x: out, batch, jax.random.key(0), 0, 0, True, "float32")


def test_outputs_of_16_bits_are_widened() -> None:
    assert context(np.ones((2, 3), np.float16)).apply().dtype == jnp.float32


def test_what_an_objective_may_be() -> None:
    """nnx:B041 (the last part: no function)"""
    objective = supervised_objective()
    assert as_objective(objective) is objective
    assert as_objective(len).function is len
    for given, match in ((3, "an Objective or a function of a context, got int"), (Objective, r"Objective\(\)")):
        with pytest.raises(TypeError, match=match):
            as_objective(given)
    with pytest.raises(TypeError, match="function of an ObjectiveContext"):
        Objective(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'fail' or 'skip'"):
        Objective(nonfinite="ignore")
    with pytest.raises(TypeError, match="overrides no __call__"):
        Objective()(context(np.zeros(1)))


def test_the_policy_is_the_runs_or_its_own() -> None:
    policies = [Objective(nonfinite=own).policy(of_run) for own in ("fail", "skip") for of_run in ("fail", "skip")]
    assert policies == ["fail", "skip", "skip", "skip"]


def test_only_an_overridden_after_update_listens() -> None:
    class Listens(Objective):
        def after_update(self, events: Any) -> None: ...

    listens = Listens()
    assert listener(listens) == listens.after_update
    assert listener(Objective()) is listener(len) is listener(None) is None


def test_results() -> None:
    """nnx:B093 terms as a tuple, records as (sum, count), and what is none of these."""
    term = LossTerm("m", 3.0, 2.0)
    terms, record, outputs = check_result(ObjectiveResult(term, {"a": 4, "b": (6.0, 3)}, "out"), "mine")
    assert (terms, outputs) == ((term,), "out")
    assert {name: tuple(map(float, pair)) for name, pair in record.items()} == {"a": (4.0, 1.0), "b": (6.0, 3.0)}
    for result in (term, [term], None, {"loss": 1.0}):
        with pytest.raises(TypeError, match="objective mine returned .*; return ObjectiveResult"):
            check_result(result, "mine")
    with pytest.raises(ConfigError, match="'m' is used 2 times"):
        check_result(ObjectiveResult([term, term]), "mine")
    with pytest.raises(ConfigError, match=r"mine records 'a' of shape \[\[2\], \[\]\]"):
        average(np.ones(2), "a", "mine")


def test_what_is_recorded_has_no_gradient() -> None:
    assert jax.grad(lambda x: average((x, x * x), "a", "mine")[0])(3.0) == 0.0


def test_the_models_loss_is_bound_when_it_is_trained() -> None:
    from nnx_jax.objectives.losses import build_loss

    with pytest.raises(ConfigError, match="takes the model's loss"):
        supervised_objective()(context(np.zeros((1, 2))))
    mse = build_loss("mse")
    assert supervised_objective(nonfinite="skip").bind(mse).policy("fail") == "skip"
    result = supervised_objective().bind(mse)(context(np.array([[1.0], [3.0]]), y=np.zeros((2, 1))))
    assert float(total_value(check_result(result, "s")[0])) == pytest.approx(5.0)
    assert supervised_objective("mae").bind(mse).identity() == "mae"
