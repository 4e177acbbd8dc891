"""The backend "lightning": Lightning's Trainer makes the updates of a bare torch loop over the same batches."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from nnx_jax.core.errors import ConfigError, ModelError, NonFiniteError
from nnx_jax.core.operator import Operator
from nnx_jax.data import ArrayDataset
from nnx_jax.objectives.operators import KL, MSE
from nnx_jax.torch.lightning import EVALUATION_KEY
from nnx_jax.torch.operators import TorchModelOp
from nnx_jax.training_loop import TrainingLoop
from tests.adapters.told import BATCH, DATA, HALF, STEPS, WANTED, Notes, X, Y, batches

torch.manual_seed(0)
NET = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def loop(**more: Any) -> TrainingLoop:
    given: dict[str, Any] = {
        "model_op": TorchModelOp(NET), "dataset": DATA, "loss": "mse", "max_steps": STEPS, "batch_size": BATCH,
        "backend": "lightning", "optimizer_config": {"name": "adam", "lr": 0.05}, "quiet": True,
    }  # fmt: skip
    return TrainingLoop(**{**given, **more})


def squared(net: Any, x: Any, y: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(net(x), y)


def squared_half(net: Any, x: Any, y: Any) -> torch.Tensor:
    """Of the rows with a positive x; 0 where there is none."""
    return ((net(x) - y) ** 2)[x > 0].sum() / max(1, int((x > 0).sum()))


def bare(
    windows: int = 1, clip: float | None = None, rate: Any = lambda step: 0.05, loss_of: Any = squared,
    losses: list[float] | None = None,
) -> torch.nn.Module:  # fmt: skip
    """The same updates by hand; the mean loss of each window goes into `losses`."""
    net = copy.deepcopy(NET)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    seen = iter(batches())
    for step in range(STEPS):
        optimizer.zero_grad()
        values = []
        for _ in range(windows):
            x, y = next(seen)
            loss = loss_of(net, torch.from_numpy(x), torch.from_numpy(y))
            values.append(float(loss.detach()))
            (loss / windows).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        if losses is not None:
            losses.append(float(np.mean(values)))
    return net


def same(operator: TorchModelOp, net: torch.nn.Module) -> None:
    """Equal to some roundings: the loss is a sum divided by a count here, a mean there, over seven updates."""
    for name, value in net.state_dict().items():
        np.testing.assert_allclose(operator.arrays()[name], value.numpy(), rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def trained() -> Any:
    """(operator, artifact, what its callback was told)."""
    notes = Notes()
    found = loop(val_dataset=DATA, callbacks=(notes,), eval_every_n_steps=3, steps_per_epoch=3).run()
    return *found, notes


def test_updates_are_those_of_a_bare_loop(trained: Any) -> None:
    """Weights after seven updates; the module given is unchanged (pipekit:M1)."""
    operator, artifact, notes = trained
    same(operator, bare())
    assert artifact.backend_info["final_step"] == STEPS
    assert artifact.backend_info["backend"] == "lightning"
    assert artifact.trained_model_hash == operator.content_hash()
    assert TorchModelOp(NET) == loop().model_op
    error = float(np.mean((operator(X) - Y) ** 2))
    assert artifact.backend_info["final_metrics"]["val_loss"] == pytest.approx(error, rel=1e-5)
    assert notes.model is operator


def test_callbacks_are_told(trained: Any) -> None:
    """The events of a loop, in its order, whoever runs it; the losses are those before each update."""
    notes = trained[2]
    assert notes.events == WANTED
    x, y = batches()[0]
    assert notes.losses[0] == pytest.approx(float(np.mean((TorchModelOp(NET)(x) - y) ** 2)), rel=1e-5)


def test_windows_clipping_and_schedules() -> None:
    """Two microbatches of an update, a largest norm, and a rate that moves, as by hand."""
    lr = {"name": "linear", "init_value": 0.05, "end_value": 0.0, "transition_steps": 10}
    notes, losses = Notes(), []
    adam = {"name": "adam", "lr": lr, "clip_norm": 0.1}
    found = loop(accumulate=2, optimizer_config=adam, callbacks=(notes,)).run()[0]
    same(found, bare(windows=2, clip=0.1, rate=lambda step: 0.05 * (1 - step / 10), losses=losses))
    assert notes.losses == pytest.approx(losses, rel=2e-5)  # a window's loss is the mean of its microbatches


def test_weights_of_rows() -> None:
    """Rows of weight 0 count for nothing, in an update and in an evaluation; a function that knows none is refused."""
    operator, artifact = loop(dataset=HALF, val_dataset=HALF).run()
    same(operator, bare(loss_of=squared_half))
    error = float(np.mean((operator(X) - Y)[X > 0] ** 2))
    assert artifact.backend_info["final_metrics"]["val_loss"] == pytest.approx(error, rel=1e-5)
    for rows in ({"dataset": HALF}, {"val_dataset": HALF}):
        with pytest.raises(ConfigError, match="says nothing of the column 'weight'"):
            loop(**rows, loss=torch.nn.functional.mse_loss).run()


def test_a_task_evaluates_itself() -> None:
    """`eval_fn` gives the values, in evaluation mode and a mean over rows; its key is the same every time."""
    keys: list[tuple[str, int]] = []

    class Task:
        def loss_fn(self, model: Any, batch: Any, key: int) -> Any:
            keys.append(("update", key))
            return squared(model, *batch), {"rows": len(batch[0])}

    class Judged(Task):
        def eval_fn(self, model: Any, batch: Any, key: int) -> Any:
            assert not model.training
            keys.append(("eval", key))
            return {"first": batch[0].mean(), "half": 0.5}

    values = loop(loss=None, task=Judged(), max_steps=2, val_dataset=DATA, eval_every_n_steps=1).run()[1]
    found = values.backend_info["final_metrics"]
    assert (found["val_first"], found["val_half"]) == (pytest.approx(float(X.mean()), abs=1e-6), pytest.approx(0.5))
    assert [key for kind, key in keys if kind == "update"] == [0, 1]
    assert [key for kind, key in keys if kind == "eval"] == [EVALUATION_KEY] * 6  # 10 rows in batches of 4, twice
    found = loop(loss=None, task=Task(), max_steps=1, val_dataset=DATA).run()[1].backend_info["final_metrics"]
    assert found["val_rows"] == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)


def test_a_stop_and_a_loss_that_is_not_finite() -> None:
    """A callback ends the run after its update; NaN ends it with an error, and callbacks are ended."""
    notes = Notes(stop_at=2)
    artifact = loop(callbacks=(notes,)).run()[1]
    assert (artifact.backend_info["final_step"], artifact.backend_info["stop_reason"]) == (2, "enough")
    notes = Notes()
    with pytest.raises(NonFiniteError, match="update 1: the loss is nan"):
        loop(dataset=ArrayDataset(X, Y), loss=lambda p, t: (p * float("nan")).sum(), callbacks=(notes,)).run()
    assert notes.events == ["begin", "end"]


def test_losses() -> None:
    """A loss operator, a function and a task of torch tensors make the same updates."""

    class Task:
        def loss_fn(self, model: Any, batch: Any, key: Any) -> Any:
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1]), {}

    wanted = bare()
    for given in ({"loss": MSE()}, {"loss": torch.nn.functional.mse_loss}, {"loss": None, "task": Task()}):
        same(loop(**given).run()[0], wanted)
    with pytest.raises(ConfigError, match="KL computes with JAX arrays"):
        loop(loss=KL()).run()


def test_fields_that_do_not_apply(tmp_path: Any) -> None:
    """Each is refused with its reason, or warned of."""
    for field, value in (
        ("sharding", {"data": 2}), ("on_nonfinite", "skip"), ("checkpoint_dir", tmp_path), ("resume", "full"),
        ("checkpoint_every_n_steps", 5), ("max_checkpoints_to_keep", 1),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"TrainingLoop.{field}: does not apply to the backend 'lightning'"):
            loop(**{field: value}).run()
    with pytest.warns(UserWarning, match="TrainingLoop.debug does not apply"):
        loop(debug=True, max_steps=1).run()
    with pytest.warns(UserWarning, match="has no rows: nothing is evaluated"):
        loop(val_dataset=ArrayDataset(X[:0], Y[:0]), max_steps=1).run()
    with pytest.raises(TypeError, match="TorchModelOp"):
        loop(model_op=_Other()).run()


class _Other(Operator):
    pass


def test_stages() -> None:
    """A second stage goes on from the weights of the first; the state counts the updates of both."""
    first, state = loop()(None, None)
    second, after = loop(max_steps=1)(None, state)
    assert (state.step, after.step) == (STEPS, STEPS + 1)
    assert second.content_hash() != first.content_hash()
    again = loop(max_steps=1, model_op=first).run()[0]
    assert again.content_hash() == second.content_hash()


def test_the_operator() -> None:
    """Its weights are in its hash and in a blob; one sample or a batch; modes and module stay as they are."""
    op = TorchModelOp(NET, input_shape=(1,))
    np.testing.assert_allclose(op(X[0]), op(X)[0], rtol=1e-6)
    other = TorchModelOp(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    assert other.content_hash() != op.content_hash()
    restored = other.with_weights(op.serialize_weights())
    np.testing.assert_array_equal(restored(X), op(X))
    with pytest.raises(ModelError, match="do not fit TorchModelOp"):
        TorchModelOp(torch.nn.Linear(1, 1)).with_weights(op.serialize_weights())
    assert op.module.training
    with pytest.raises(ModelError, match="is in no file"):
        TorchModelOp.from_state(op.state()).outputs(X)


def test_the_backend_is_imported_without_its_library() -> None:
    """Importing the module succeeds; its first use names the extra (pipekit:M2)."""
    code = (
        "import sys; sys.modules['lightning'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'lightning' else find(name, *a)\n"
        "import nnx_jax.backends.lightning as backend\n"
        "try:\n    backend.run(None, None)\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'nnx_jax[lightning]'" in done.stdout
