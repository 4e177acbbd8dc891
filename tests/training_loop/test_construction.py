"""What a TrainingLoop refuses, all of it when it is made, and how it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.operator import Operator
from nnx_jax.engines.bayes import NumpyroTask
from nnx_jax.engines.equinox import EquinoxModelOp
from nnx_jax.engines.operators import NNXModelOp
from nnx_jax.loop.step_builtin import Checkpoint
from nnx_jax.objectives.operators import MSE
from nnx_jax.training_loop import TrainerConfig, TrainingLoop
from tests.processes import ROOT, SCRUBBED
from tests.training_loop.scenes import Line, loop, model


class Own(Operator):
    """An operator that no backend trains."""

    def _apply(self, x: Any) -> Any:
        return x


class Task:
    """The mean squared error as a task."""

    def loss_fn(self, model: Any, batch: Any, key: Any) -> Any:
        x, y = batch
        return ((model(x) - y) ** 2).mean()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model_op", 3, "an Operator"),
        ("model_op", nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "an Operator"),
        ("dataset", [(1, 2)], "a TrainingDataset"),
        ("dataset", None, "a TrainingDataset"),
        ("dataset", MSE(), "a TrainingDataset"),
        ("val_dataset", np.zeros(3), "a TrainingDataset"),
        ("val_dataset", MSE(), "a TrainingDataset"),
    ],
)
def test_parts_of_another_class_are_refused(field: str, value: Any, expected: str) -> None:
    """A TypeError that names the field and what to give (pipekit:F1)."""
    with pytest.raises(TypeError, match=rf"TrainingLoop\.{field}.*{expected}"):
        loop(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_steps", 0), ("batch_size", 0), ("eval_every_n_steps", 0), ("log_every_n_steps", 0),
        ("steps_per_epoch", 0), ("max_checkpoints_to_keep", 0), ("checkpoint_every_n_steps", 0), ("max_steps", 2.5),
        ("eval_every_n_steps", 2.0), ("log_every_n_steps", True), ("max_steps", "10"), ("accumulate", 0), ("seed", -1),
    ],
)  # fmt: skip
def test_lengths_and_cadences_are_whole_numbers_from_one(field: str, value: Any) -> None:
    """Never truncated, never a division by zero in the middle of a run (pipekit:F1, pipekit:F3)."""
    with pytest.raises(ValueError, match=rf"TrainingLoop\.{field}"):
        loop(**{field: value})


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    """(pipekit:F1)."""
    with pytest.raises(ValueError, match="no backend 'tensorflow'.*equinox.*nnx.*numpyro-svi"):
        loop(backend="tensorflow")


def test_a_length_must_be_given() -> None:
    """In updates: the message has the formula for epochs (pipekit:F2, pipekit:D10.1)."""
    with pytest.raises(TypeError, match=r"max_steps.*epochs \* rows // batch_size"):
        TrainingLoop(model_op=model(), dataset=Line(), loss="mse")


def test_there_must_be_something_to_minimise() -> None:
    """(pipekit:F13)."""
    with pytest.raises(ValueError, match="loss or task"):
        loop(loss=None)


def test_a_posterior_needs_priors() -> None:
    """A loss alone says nothing of them: a backend that infers a posterior takes a task."""
    with pytest.raises(ValueError, match=r"TrainingLoop\.task.*task-first"):
        loop(backend="numpyro-svi", model_op=None)


def test_of_a_loss_and_a_task_the_task_is_trained_with() -> None:
    """Both may be given; the loss is then not called (pipekit:F13)."""

    def never(predicted: Any, target: Any) -> Any:
        raise AssertionError("the task goes before the loss")

    alone = loop(loss=None, task=Task(), max_steps=2)(None, None)[0]
    assert loop(loss=never, task=Task(), max_steps=2)(None, None)[0].content_hash() == alone.content_hash()


@pytest.mark.parametrize("task", [3, object(), type("Half", (), {"loss_fn": 3})()])
def test_a_task_has_a_loss_fn(task: Any) -> None:
    """(pipekit:F14)."""
    with pytest.raises(TypeError, match="TrainTask"):
        loop(loss=None, task=task)


@pytest.mark.parametrize("sharding", [3, "data", object(), jax.devices()])
def test_a_sharding_is_a_spec(sharding: Any) -> None:
    """(pipekit:F14)."""
    with pytest.raises(TypeError, match="ShardingSpec"):
        loop(sharding=sharding)


def test_rows_must_split_over_the_devices() -> None:
    with pytest.raises(ValueError, match="batch_size.*2 devices"):
        loop(sharding={"data": 2}, batch_size=15)


def test_a_model_that_the_backend_does_not_train_is_refused() -> None:
    """The error names the class that it does train (pipekit:F15)."""
    with pytest.raises(TypeError, match="Own.*backend 'nnx'.*NNXModelOp"):
        loop(model_op=Own())
    with pytest.raises(TypeError, match="NNXModelOp.*backend 'equinox'.*EquinoxModelOp"):
        loop(backend="equinox")


LIBRARIES = {
    "equinox": "equinox", "numpyro-svi": "numpyro", "numpyro-mcmc": "numpyro", "blackjax": "blackjax",
    "lightning": "lightning", "keras": "keras",
}  # fmt: skip


def parts_for(backend: str) -> dict[str, Any]:
    """A model or a task that stands for one of the backend's, made without its library."""
    if backend == "equinox":
        return {"model_op": EquinoxModelOp(module_class="somewhere.Net")}
    if backend in ("lightning", "keras"):
        return {}
    return {"model_op": None, "loss": None, "task": NumpyroTask(model=lambda x, y=None: None)}


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_loop_for_a_library_that_is_not_there_can_be_made(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made, described and told from others (pipekit:F11, pipekit:M1)."""
    for package in LIBRARIES.values():
        monkeypatch.setitem(sys.modules, package, None)
    made = loop(backend=backend, **parts_for(backend))
    if backend in ("lightning", "keras"):  # its parts are of registered classes
        assert TrainingLoop.from_yaml(made.to_yaml()) == made
    assert made.get_config()["backend"] == backend
    assert made.replace(max_steps=7).identity() == made.identity()
    assert made.replace(seed=7).identity() != made.identity()


@pytest.mark.parametrize("backend", ["numpyro-svi", "numpyro-mcmc"])
def test_only_running_it_asks_for_the_library(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError that says what to install (pipekit:F11)."""
    monkeypatch.setitem(sys.modules, LIBRARIES[backend], None)
    with pytest.raises(ImportError, match=rf"nnx_jax\[{LIBRARIES[backend]}\]"):
        loop(backend=backend, **parts_for(backend)).run()


def test_importing_the_package_imports_no_library() -> None:
    """Neither does the loop's module, nor making a loop for a backend of one (pipekit:F12, pipekit:F11)."""
    code = """
import sys
import nnx_jax
at_first = sorted(set(sys.modules) & {"jax", "flax", "optax"})
import nnx_jax.training_loop, nnx_jax.backends
heavy = ["equinox", "numpyro", "blackjax", "torch", "tensorflow", "lightning", "keras", "jax"]
print(at_first, [name for name in heavy if name in sys.modules])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["[]", "[]"]


# -- settings kept apart ------------------------------------------------------------------------------------------


def test_settings_may_be_kept_apart() -> None:
    """A TrainerConfig says the same as keywords do (pipekit:F10, pipekit:D11.1)."""
    settings = TrainerConfig(
        max_steps=7, seed=3, batch_size=8, eval_every_n_steps=2, log_every_n_steps=3, checkpoint_every_n_steps=4,
        max_checkpoints_to_keep=5, steps_per_epoch=2, accumulate=2, on_nonfinite="skip",
    )  # fmt: skip
    fields = {"model_op": model(), "dataset": Line(), "loss": "mse"}
    apart = TrainingLoop(config=settings, **fields)
    together = TrainingLoop(**{name: getattr(settings, name) for name in type(settings).model_fields}, **fields)
    assert apart == together
    assert apart.identity() == together.identity()
    assert (apart.max_steps, apart.keep, apart.commit_every) == (7, 5, 4)


def test_one_setting_is_given_once() -> None:
    """Two words on one thing are an error, in a TrainerConfig and in a callback (pipekit:F10)."""
    fields = {"model_op": model(), "dataset": Line(), "loss": "mse"}
    with pytest.raises(ValueError, match="seed.*give one"):
        TrainingLoop(config=TrainerConfig(max_steps=7, seed=3), seed=4, **fields)
    with pytest.raises(TypeError, match="TrainerConfig"):
        TrainingLoop(config={"max_steps": 7}, **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checkpoint_every_n_steps.*every_n_steps=10"):
        loop(checkpoint_every_n_steps=5, callbacks=[Checkpoint(every_n_steps=10)])
    with pytest.raises(ValueError, match="max_checkpoints_to_keep.*keep_last=9"):
        loop(max_checkpoints_to_keep=2, callbacks=[Checkpoint(keep_last=9)])
    with pytest.raises(ValueError, match="checkpoint_dir.*save_dir=there"):
        loop(checkpoint_dir="here", callbacks=[Checkpoint(save_dir="there")])


def test_a_checkpoint_callback_says_where_the_loop_is_silent() -> None:
    """Its cadence, number and place count; its defaults give way to what the loop says (pipekit:F10)."""
    said = loop(callbacks=[Checkpoint(every_n_steps=10, keep_last=9, save_dir="there")])
    assert (said.commit_every, said.keep, said.directory) == (10, 9, "there")
    told = {"checkpoint_every_n_steps": 5, "max_checkpoints_to_keep": 2, "checkpoint_dir": "here"}
    silent = loop(callbacks=[Checkpoint()], **told)
    assert (silent.commit_every, silent.keep, silent.directory) == (5, 2, "here")
    assert loop(callbacks=[Checkpoint()]).commit_every == 1000


def test_a_callback_that_only_has_the_names_of_a_checkpoint_is_none() -> None:
    class Gallery:
        every_n_steps, keep_last, save_dir = 10, 3, "pictures"

        def on_train_end(self, loop: Any, state: Any) -> None: ...

    alone = loop(callbacks=[Gallery()])
    assert (alone.commit_every, alone.directory) == (None, None)


# -- who is responsible -------------------------------------------------------------------------------------------


class Lines(nnx.Module):
    """Takes two inputs where the data has one."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.layer(x)


class Pair(Task):
    """A task whose loss is two numbers."""

    def loss_fn(self, model: Any, batch: Any, key: Any) -> Any:
        return super().loss_fn(model, batch, key) * np.float32([1, 2])


def refused(**changes: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        loop(**changes)(None, None)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_names_the_part_that_is_responsible() -> None:
    """Data, model, task, optimizer, backend, callbacks, sharding (pipekit:M3)."""
    assert refused(dataset=Line(rows=0)).startswith("DataError: data: ")
    assert refused(model_op=NNXModelOp(Lines())).startswith("ModelError: model: ")
    assert "task: Pair.loss_fn returned a loss of shape [2]" in refused(loss=None, task=Pair())
    assert "TrainingLoop.optimizer_config" in refused(optimizer_config={"name": "adam"})
    assert "TrainingLoop.backend" in refused(backend="tensorflow")
    assert "TrainingLoop.callbacks" in refused(callbacks=[3])
    assert "TrainingLoop.hooks" in refused(hooks=[3])
    assert "TrainingLoop.metric_writer" in refused(metric_writer=3)
    assert "TrainingLoop.loss" in refused(loss="mes")
    assert "batch_size" in refused(dataset=Line(rows=8))


def test_metrics_are_known_ones() -> None:
    with pytest.raises(ValueError, match=r"TrainingLoop\.metrics.*mea"):
        loop(metrics=("mea",))


def test_the_function_of_an_evaluation_is_one() -> None:
    task = Task()
    task.eval_fn = 3  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="eval_fn is int"):
        loop(loss=None, task=task)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="2 problems") as caught:
        loop(backend="tensorflow", optimizer_config={"name": "frodo", "lr": 1})
    assert "Unknown optimizer" in str(caught.value)


@pytest.mark.parametrize("hook", [3, object(), object])
def test_a_hook_is_called_with_a_context(hook: Any) -> None:
    with pytest.raises(TypeError, match=r"TrainingLoop\.hooks.*hook\(ctx, stage\)"):
        loop(hooks=[hook])
