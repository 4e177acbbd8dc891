"""Objectives over torch modules: what they see, what they return, and distillation beside JAX's."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group

from nnx_jax.core.errors import ConfigError, DataError, ModelError
from nnx_jax.objectives import objective as of_jax
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.objectives.terms import total_value as jax_total
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.objectives import (
    Frozen,
    Objective,
    ObjectiveContext,
    ObjectiveResult,
    as_objective,
    check_result,
    kd_objective,
    listener,
    supervised_objective,
)
from nnx_jax.torch.terms import total_value

X = torch.arange(6, dtype=torch.float32).reshape(3, 2)
BATCH = {"x": X, "mask": torch.tensor([1.0, 1.0, 0.0]), "shift": torch.full((3,), 10.0)}
DRAW = np.random.default_rng(9)


def context(model: Any, batch: Mapping[str, Any], *, train: bool = True) -> ObjectiveContext:
    """A microbatch; all rows are real where the batch has no mask."""
    columns = {name: torch.as_tensor(values) for name, values in batch.items()}
    columns = {"mask": torch.ones(len(columns["x"])), **columns}
    return ObjectiveContext(model, columns, torch.Generator().manual_seed(0), 0, 0, train, "float32")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> Any:
        return {"score": (x @ self.w).bfloat16(), "rest": [(x @ self.w).double()]}


class Masked(Plain):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return x @ self.w + (100.0 if mask is None else mask)


class Whole(Plain):
    takes_batch: ClassVar[bool] = True

    def forward(self, batch: Mapping[str, torch.Tensor]) -> Any:  # type: ignore[override]
        return batch["x"] @ self.w + batch["shift"]


# -- what an objective sees ----------------------------------------------------------------------------------------


def test_the_model_is_called_as_without_an_objective() -> None:
    plain = context(Plain(), BATCH).apply()
    assert (plain["score"].dtype, plain["rest"][0].dtype) == (torch.float32, torch.float64)
    assert plain["score"].tolist() == [2.0, 8.0, 14.0]
    assert context(Masked(), BATCH).apply(2 * X).tolist() == [5.0, 17.0, 28.0]
    assert context(Whole(), BATCH).apply(2 * X).tolist() == [14.0, 26.0, 38.0]
    assert context(lambda x: x[:, 0], BATCH).apply().tolist() == [0.0, 2.0, 4.0]


def test_what_wraps_a_model_hides_nothing(tmp_path: Path) -> None:
    """A compiled module, and one of several processes, is asked for what the module inside takes."""
    compiled = torch.compile(Masked(), backend="eager")
    assert context(compiled, BATCH).apply().tolist() == [3.0, 9.0, 14.0]
    init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Whole())
        assert context(wrapped, BATCH).apply().tolist() == [12.0, 18.0, 24.0]
        assert type(Frozen(wrapped, "it").net) is Whole
        del wrapped  # else it would hold the group's last reference, whose end may then wait for ever for its threads
        gc.collect()
    finally:
        destroy_process_group()


def test_a_mean_is_over_real_rows_by_their_weight() -> None:
    values = torch.tensor([[1.0, 3.0], [5.0, 7.0], [float("nan"), float("inf")]])
    plain = context(Plain(), BATCH).mean("m", values, weight=2.0)
    assert (float(plain.numerator), float(plain.denominator), plain.weight) == (16.0, 4.0, 2.0)
    weighted = context(Plain(), {**BATCH, "weight": torch.tensor([0.5, 0.0, 9.0])}).mean("m", values)
    assert (float(weighted.numerator), float(weighted.denominator)) == (2.0, 1.0)
    by_row = context(Plain(), BATCH).mean("m", values[:, 0].half())
    assert (float(by_row.numerator), float(by_row.denominator), by_row.numerator.dtype) == (6.0, 2.0, torch.float32)
    with pytest.raises(DataError, match="column 'weight' has shape"):
        context(Plain(), {**BATCH, "weight": torch.ones(3, 2)}).mean("m", values[:, 0])


# -- what it returns -----------------------------------------------------------------------------------------------


def test_the_classes_and_their_rules_are_jaxs() -> None:
    assert (Objective, ObjectiveResult) == (of_jax.Objective, of_jax.ObjectiveResult)
    assert issubclass(ObjectiveContext, of_jax.ObjectiveContext)
    objective = supervised_objective(nonfinite="skip")
    assert as_objective(objective) is objective
    assert (objective.policy("fail"), objective.scores, objective.labels) == ("skip", "loss", True)
    assert listener(objective) is None
    with pytest.raises(ConfigError, match="'fail' or 'skip'"):
        supervised_objective(nonfinite="ignore")


def test_results() -> None:
    """nnx:B093 terms as a tuple of tensors, records as (sum, count) without a gradient, and what is none of these."""
    x = torch.tensor(3.0, requires_grad=True)
    given = ObjectiveResult(LossTerm("m", x * 2, 2), {"a": 4, "b": (x * 2, 3), "c": np.float64(0.5)}, "out")
    (term,), record, outputs = check_result(given, "mine")
    assert (term.numerator.requires_grad, term.denominator.dtype, outputs) == (True, torch.float32, "out")
    assert {n: (float(a), float(b)) for n, (a, b) in record.items()} == {"a": (4, 1), "b": (6, 3), "c": (0.5, 1)}
    assert not any(part.requires_grad for pair in record.values() for part in pair)
    for result in (given.terms, [given.terms], torch.ones(2), None, {"loss": 1.0}):
        with pytest.raises(TypeError, match="objective mine returned .*; return ObjectiveResult"):
            check_result(result, "mine")
    with pytest.raises(ConfigError, match="'m' is used 2 times"):
        check_result(ObjectiveResult([LossTerm("m", x, 1), LossTerm("m", x, 1)]), "mine")
    with pytest.raises(ConfigError, match=r"mine records 'a' of shape \[\[2\], \[\]\]"):
        check_result(ObjectiveResult(LossTerm("m", x, 1), {"a": torch.ones(2)}), "mine")


def test_the_models_loss_is_bound_when_it_is_trained() -> None:
    ctx = context(lambda x: x, {"x": torch.tensor([[1.0], [3.0]]), "y": torch.zeros(2, 1)})
    with pytest.raises(ConfigError, match="takes the model's loss"):
        supervised_objective()(ctx)
    mse = build_loss("mse")
    bound = supervised_objective(nonfinite="skip").bind(mse)
    assert (bound.policy("fail"), bound.identity()) == ("skip", "mse")
    terms, _, outputs = check_result(bound(ctx), "s")
    assert float(total_value(terms)) == float(total_value(mse(outputs, ctx.batch))) == 5.0
    assert supervised_objective("mae").bind(mse).identity() == "mae"
    # The one of `nnx_jax` itself is bound to the loss of whichever world trains it.
    assert float(total_value(check_result(of_jax.supervised_objective().bind(mse)(ctx), "s")[0])) == 5.0


# -- distillation --------------------------------------------------------------------------------------------------

INPUTS, LABELS = DRAW.normal(size=(6, 3)).astype(np.float32), np.array([0, 1, -100, 1, 0, 2], np.int32)
WEIGHTS = {"student": DRAW.normal(size=(3, 3)), "teacher": 2 * DRAW.normal(size=(3, 3))}


def linear(name: str) -> nn.Linear:
    layer = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(WEIGHTS[name]))
    return layer


def matrix(name: str) -> jax.Array:
    return jnp.asarray(WEIGHTS[name].T, jnp.float32)


@pytest.mark.parametrize("alpha, temperature", [(0.5, 4.0), (1.0, 1.0), (0.0, 2.0)])
def test_distillation_and_its_gradient_are_jaxs(alpha: float, temperature: float) -> None:
    """With an unlabelled row, a masked one and a weight; sums of 6 rows of 3 logits of size 10, to rounding."""
    batch = {
        "x": INPUTS,
        "y": LABELS,
        "mask": np.array([1, 1, 1, 1, 0, 1], np.float32),
        "weight": np.array([1, 2, 1, 0.5, 1, 1], np.float32),
    }
    teach = of_jax.kd_objective(lambda x: x @ matrix("teacher"), alpha, temperature)

    def theirs(kernel: jax.Array) -> jax.Array:
        columns = {name: jnp.asarray(values) for name, values in batch.items()}
        ctx = of_jax.ObjectiveContext(lambda x: x @ kernel, columns, jax.random.key(0), 0, 0, True, "float32")
        return jax_total(of_jax.check_result(teach(ctx), "kd")[0])

    value, grad = jax.value_and_grad(theirs)(matrix("student"))
    student = linear("student")
    result = kd_objective(linear("teacher"), alpha, temperature)(context(student, batch))
    terms, _, outputs = check_result(result, "kd")
    mine = total_value(terms)
    mine.backward()
    assert mine.item() == pytest.approx(float(value), rel=1e-5)
    assert student.weight.grad is not None
    np.testing.assert_allclose(student.weight.grad.numpy().T, grad, atol=2e-5)
    assert torch.equal(outputs, student(torch.from_numpy(INPUTS)))
    assert [term.weight for term in terms] == [1 - alpha, alpha * temperature**2]
    assert [term.denominator.item() for term in terms] == [4.5, 5.5]


def test_a_divergence_by_hand() -> None:
    """KL of (3/4, 1/4) from (1/2, 1/2) is 0.130812, its gradient by the student's logits (-1/4, 1/4)."""
    objective = kd_objective(lambda x: torch.log(torch.tensor([[0.75, 0.25]])), alpha=1.0, temperature=1.0)
    logits = torch.zeros(1, 2, requires_grad=True)
    result = objective(context(lambda x: logits, {"x": torch.zeros(1, 2), "y": torch.zeros(1, dtype=torch.int64)}))
    value = total_value(check_result(result, "kd")[0])
    value.backward()
    assert value.item() == pytest.approx(0.130812, abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([-0.25, 0.25])


def test_rows_that_are_all_masked_teach_nothing() -> None:
    batch = {"x": INPUTS, "y": LABELS, "mask": np.zeros(6, np.float32)}
    terms, _, _ = check_result(kd_objective(linear("teacher"))(context(linear("student"), batch)), "kd")
    assert [(term.numerator.item(), term.denominator.item()) for term in terms] == [(0.0, 0.0), (0.0, 0.0)]


class Noisy(nn.Module):
    """What differs between training and evaluation; its attribute `net` is a part, not the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.dropout = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * self.dropout(self.norm(self.net(x)))


def test_a_teacher_is_asked_in_evaluation_mode_with_its_weights_of_then() -> None:
    """And what it was made of keeps its mode, its gradients' flags, and its statistics."""

    class Model:
        """As an NNModel holds its network."""

        net: nn.Module

    teacher, model, x = Noisy(), Model(), torch.from_numpy(INPUTS)
    model.net = teacher
    expected = (2.0 * teacher.net(x) / (1 + 1e-5) ** 0.5).detach()
    asked = [Frozen(given, "it") for given in (teacher, model)]
    with torch.no_grad():
        teacher.net.bias.fill_(9.0)
    before = torch.get_rng_state()
    for frozen in asked:
        torch.testing.assert_close(frozen(x), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training for part in teacher.modules())
    assert all(value.requires_grad for value in teacher.parameters())
    assert not teacher.norm.state_dict()["running_mean"].any()


def test_no_gradient_goes_through_a_teacher() -> None:
    x = torch.tensor([[3.0, 1.0, 2.0]], requires_grad=True)
    assert not Frozen(lambda x: x**2, "it")(x).requires_grad
    assert Frozen(lambda x: x.bfloat16(), "it")(x).dtype == torch.float32
    frozen = Frozen(linear("teacher"), "it")
    full = frozen(x)
    with torch.autocast("cpu", torch.bfloat16):  # of the student; the teacher stays in full precision
        assert frozen.net(x).dtype == torch.bfloat16
        assert torch.equal(frozen(x), full)
    assert not any(value.requires_grad for value in frozen.net.parameters())


def test_what_is_no_distillation_is_refused() -> None:
    teacher = linear("teacher")
    for alpha in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="kd_objective: alpha is .*; it is a share, from 0 to 1"):
            kd_objective(teacher, alpha)
    for temperature in (0.0, float("inf")):
        with pytest.raises(ConfigError, match="kd_objective: temperature is .*; give a number above 0"):
            kd_objective(teacher, 0.5, temperature)
    with pytest.raises(TypeError, match="the teacher of kd_objective is called with tensors: give an NNModel"):
        kd_objective(None)
    with pytest.raises(ModelError, match=r"teacher and student have shapes \[6, 1\] and \[6, 3\]; they must be equal"):
        kd_objective(lambda x: x[:, :1])(context(linear("student"), {"x": INPUTS, "y": LABELS}))


# -- without JAX ---------------------------------------------------------------------------------------------------

WITHOUT_JAX = """
import jax, torch
from jax._src import xla_bridge
def refused(*args, **kwargs): raise AssertionError("JAX's devices were asked for")
jax.devices = jax.local_devices = xla_bridge.backends = xla_bridge.get_backend = refused
from nnx_jax.objectives.weights import LinearWeight
from nnx_jax.params.losses import CrossEntropyParams
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.metrics import build_metric, user_metric
from nnx_jax.torch.objectives import ObjectiveContext, check_result, kd_objective, supervised_objective
from nnx_jax.torch.terms import total_value

x = torch.randn(4, 3, requires_grad=True)
batch = {"x": x.detach(), "y": torch.tensor([0, 1, 2, 9]), "mask": torch.ones(4)}
ce, own = build_loss(CrossEntropyParams(class_weights=(1.0, 2.0, 3.0))), lambda outputs, batch: outputs.square().sum(-1)
for loss in (ce, build_loss(own), build_loss(ce + 2.0 * build_loss(own))):
    total_value(loss(x, batch)).backward()
    assert int(loss.invalid_labels(x, batch)) == (0 if loss.name == "<lambda>" else 1)
total_value((LinearWeight(1, 2, 9) * ce).at(3, 0)(x, batch)).backward()
float_batch = {**batch, "y": torch.rand(4, 3)}
for name in ("binary_cross_entropy", "mse", "mae", "huber"):
    total_value(build_loss(name)(x, float_batch)).backward()
for kind in ("accuracy", "top_k", "f1", "precision", "recall", "nll", "brier", "perplexity"):
    metric = build_metric(kind, 6)
    metric.compute(metric.update(torch.randn(4, 6), batch).double().numpy())
user_metric("own", own).update(x, batch)
model = torch.nn.Linear(3, 3)
for objective in (supervised_objective().bind(ce), kd_objective(torch.nn.Linear(3, 3))):
    ctx = ObjectiveContext(model, batch, torch.Generator(), 0, 0, True, "float32")
    total_value(check_result(objective(ctx), "it")[0]).backward()
assert not xla_bridge._backends, "JAX was started"
"""


@pytest.mark.slow
def test_nothing_starts_jax() -> None:
    """Losses, compositions, metrics and objectives of torch, in a process whose JAX refuses to give devices."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
