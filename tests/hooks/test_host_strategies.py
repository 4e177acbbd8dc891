"""Host hooks and preparing hooks under a TrainingStrategy: the founding document's checkpoint example, and the rest."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_jax.core.errors import ResumePointError
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.hooks import (
    CheckpointHook,
    DDPHook,
    GradientAccumulationHook,
    MixedPrecisionHook,
    ModulePatchHook,
    ProfilerHook,
    StageTimingHook,
    TrainableParameterHook,
    TrainingUpdateHook,
)
from nnx_jax.runs.address import load_address
from nnx_jax.training import OptimizerConfig, TrainingStrategy


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.body, self.head = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.body(x)))


def net() -> Net:
    """A model that a checkpoint can name."""
    return Net()


def squared(predictions: Any, batch: Any) -> Any:
    return jnp.mean((predictions - batch["y"]) ** 2)


def loader(count: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(4, 3), "y": draw(4, 2)} for _ in range(count)]


def strategy(*hooks: Any, **given: Any) -> TrainingStrategy:
    adam = OptimizerConfig(optax.adam, {"learning_rate": 0.05})
    if "num_epochs" not in given:
        given.setdefault("num_steps", 8)
    return TrainingStrategy(models=net, optimizer_configs=adam, loss_fn=squared, hooks=list(hooks), **given)


def weights(made: TrainingStrategy) -> dict[str, np.ndarray]:
    made.sync_models()
    state = nnx.to_flat_state(nnx.state(made.models["main"], nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}


def same(left: TrainingStrategy, right: TrainingStrategy) -> bool:
    one, two = weights(left), weights(right)
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def tags(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("*_*"))


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_the_founding_documents_example(tmp_path: Path) -> None:
    """nvalchemi:114: path of a step, the same hook instance; the rest is bit for bit the uninterrupted run."""
    straight = strategy(num_steps=12)
    straight.run(loader())
    directory = tmp_path / "runs" / "my-model" / "checkpoints"
    checkpoint = CheckpointHook(directory, step_interval=5)
    strategy(checkpoint, num_steps=7).run(loader())
    assert checkpoint.last_checkpoint_index == 0
    resumed = TrainingStrategy.load_checkpoint(directory / "step_5", hooks=[checkpoint], num_steps=12)
    assert resumed.step_count == 5
    resumed.run(loader())
    assert resumed.step_count == 12
    assert same(resumed, straight)
    assert checkpoint.last_checkpoint_index == 1
    assert tags(directory) == ["step_10", "step_5"]


def test_the_hooks_state_is_back_once_loaded(tmp_path: Path) -> None:
    """nvalchemi:114: index and update of the checkpoint that was loaded, not of the last one the hook made."""
    hook = CheckpointHook(tmp_path / "run", step_interval=2)
    strategy(hook, num_steps=6).run(loader())
    assert hook.last_checkpoint_index == 2
    resumed = TrainingStrategy.load_checkpoint(tmp_path / "run" / "step_4", hooks=[hook], num_steps=8)
    assert hook.last_checkpoint_index == 1
    assert hook.checkpoints == ("step_2", "step_4")
    resumed.run(loader())
    assert hook.last_checkpoint_index == 3
    assert hook.checkpoints == ("step_2", "step_4", "step_6", "step_8")


def test_the_middle_of_a_window_continues(tmp_path: Path) -> None:
    """nvalchemi:67 through the hook: an open window is part of a checkpoint, and its end is the uninterrupted one."""
    hooks = [GradientAccumulationHook(3, on_partial="carry")]
    straight = strategy(*hooks, num_epochs=2)
    straight.run(loader())
    strategy(*hooks, CheckpointHook(tmp_path / "run", epoch_interval=1), num_epochs=1).run(loader())
    point = load_address(tmp_path / "run" / "epoch_1")
    assert (point.step, point.host["position"]["epoch"]) == (2, 1)
    resumed = TrainingStrategy.load_checkpoint(tmp_path / "run" / "epoch_1", hooks=hooks, num_epochs=2)
    resumed.run(loader())
    assert resumed.step_count == straight.step_count == 5
    assert same(resumed, straight)


def test_epochs_that_are_finished(tmp_path: Path) -> None:
    """nvalchemi:115"""
    strategy(CheckpointHook(tmp_path / "run", epoch_interval=1), num_epochs=2).run(loader(3))
    for number in (1, 2):
        loaded = TrainingStrategy.load_checkpoint(tmp_path / "run" / f"epoch_{number}")
        assert (loaded.epoch_count, loaded.epoch_step_count) == (number, 0)


def test_another_process_writes_nothing(tmp_path: Path) -> None:
    """nvalchemi:117: the process of rank 1 of two makes no checkpoint."""
    manager = SimpleNamespace(rank=1, world_size=2, is_initialized=True, distributed=True)
    hook = CheckpointHook(tmp_path / "run", step_interval=1)
    made = strategy(hook, num_steps=3, distributed_manager=manager)
    made.events.global_rank = 1
    made.run(loader())
    assert hook.last_checkpoint_index is None
    assert tags(tmp_path / "run") == []


class Counts(TrainingUpdateHook):
    """The founding document's StatefulHook: an int that it keeps itself."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = int(state["count"])


def test_hooks_with_a_state_of_their_own(tmp_path: Path) -> None:
    """nvalchemi:118, nvalchemi:119 and nvalchemi:120: by class and order; what has no state or no hook is left out."""
    hook = CheckpointHook(tmp_path / "run", step_interval=2)
    timing = StageTimingHook("step")
    strategy(hook, Counts(3), timing, Counts(5), num_steps=2).run(loader())
    first, second, third = Counts(), Counts(), Counts(9)
    loaded = TrainingStrategy.load_checkpoint(tmp_path / "run", hooks=[first, hook, second, third], num_steps=4)
    assert (first.count, second.count, third.count) == (3, 5, 9)
    loaded.run(loader())
    assert (first.count, second.count, third.count) == (3, 5, 9)
    alone = TrainingStrategy.load_checkpoint(tmp_path / "run" / "step_2", num_steps=3)
    alone.run(loader())
    assert alone.step_count == 3


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    """nvalchemi:122 and nvalchemi:123 as a strategy meets them."""
    with pytest.raises(FileNotFoundError, match="there is no run here"):
        TrainingStrategy.load_checkpoint(tmp_path / "nowhere")
    strategy(CheckpointHook(tmp_path / "run", step_interval=2), num_steps=2).run(loader())
    with pytest.raises(FileNotFoundError, match="no checkpoint 'step_4'; did you mean 'step_2'"):
        TrainingStrategy.load_checkpoint(tmp_path / "run" / "step_4")
    pointer = tmp_path / "run" / "checkpoints" / "step_2"
    whole = pointer.read_bytes()
    pointer.write_bytes(whole.replace(b"pointer/1", b"pointer/2"))
    with pytest.raises(ValueError, match="newer than"):
        TrainingStrategy.load_checkpoint(tmp_path / "run" / "step_2")
    pointer.write_bytes(whole)
    generation = tmp_path / "run" / "checkpoints" / "generations" / str(json.loads(whole)["generation"])
    data = max((path for path in generation.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ResumePointError, match="bytes, the manifest says"):
        TrainingStrategy.load_checkpoint(tmp_path / "run" / "step_2")


# Times and profiles --------------------------------------------------------------------------------------------------


def test_a_lone_batch_is_profiled(tmp_path: Path) -> None:
    """nvalchemi:143: started by the batch, complete after leaving; without a batch there is no file."""
    found = lambda: list((tmp_path / "profile").rglob("*.trace.json.gz"))  # noqa: E731
    with strategy(ProfilerHook(tmp_path / "profile")):
        pass
    assert not (tmp_path / "profile").exists()
    with strategy(ProfilerHook(tmp_path / "profile")) as made:
        made.train_batch(loader(1)[0])
        assert found() == []
    assert len(found()) == 1
    assert found()[0].relative_to(tmp_path / "profile").parts[:2] == ("rank_0", "jax")


def test_batches_are_timed(tmp_path: Path) -> None:
    """nvalchemi:144 for a strategy."""
    hook = StageTimingHook("step")
    strategy(hook, num_epochs=2).run(loader(3))
    assert hook.summary()["BEFORE_BATCH->AFTER_BATCH"]["n_samples"] == 6


# Preparing a model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 4])
def test_ddp_with_one_process(devices: int) -> None:
    """nvalchemi:126, nvalchemi:130 and nvalchemi:162: before or after MixedPrecisionHook, nothing changes.

    On four devices what is left is the rounding of bfloat16 sums.
    """
    plain = strategy(MixedPrecisionHook("bf16"))
    plain.run(loader())
    for order in (0, 1):
        hooks = [DDPHook(find_unused_parameters=False, devices=devices), MixedPrecisionHook("bf16")]
        made = strategy(*(hooks if order else reversed(hooks)))
        model = made.models["main"]
        made.run(loader())
        assert made.models["main"] is model
        if devices == 1:
            assert same(made, plain)
        for name, value in weights(plain).items():
            np.testing.assert_allclose(weights(made)[name], value, rtol=0.02, atol=1e-3)


def test_ddp_of_several_processes_says_what_is_missing() -> None:
    """nvalchemi:127 and nvalchemi:132: a wrong key first, then the processes that do not know each other."""
    waiting = SimpleNamespace(world_size=2, rank=0, is_initialized=False)
    with pytest.raises(RuntimeError, match=r"initialize\(\)"):
        strategy(DDPHook(), distributed_manager=waiting).run(loader())
    with pytest.raises(KeyError, match="'missing', which is no model"):
        strategy(DDPHook(model_keys=("missing",)), distributed_manager=waiting).run(loader())


def test_only_the_head(tmp_path: Path) -> None:
    """nvalchemi:146: only the head changes, and nothing else has optimizer state."""
    hook = CheckpointHook(tmp_path / "run", step_interval=8)
    made = strategy(TrainableParameterHook(("main.*",), ("main.head.*",)), hook)
    before = weights(made)
    made.run(loader())
    moved = {name for name, value in weights(made).items() if not np.array_equal(value, before[name])}
    assert moved == {"head.kernel", "head.bias"}
    stored = [name for name in load_address(tmp_path / "run").leaves if name.startswith("opt_state")]
    assert any("head" in name for name in stored)
    assert not any("body" in name for name in stored)


@pytest.mark.parametrize("fields", [{"freeze_patterns": "main.tail.*"}, {"trainable_patterns": "other.*"}])
def test_a_pattern_without_a_match(fields: dict[str, Any]) -> None:
    """nvalchemi:146"""
    with pytest.raises(ValueError, match="matches no parameter"):
        strategy(TrainableParameterHook(**fields)).run(loader())


def test_gradients_that_no_update_uses() -> None:
    """nvalchemi:147: there, not moving anything, and not growing from batch to batch."""
    norms: list[float] = []

    class Look:
        stage, frequency, needs = Stage.AFTER_BACKWARD, 1, ("gradients",)

        def __call__(self, ctx: Any, stage: Stage) -> None:
            found = [leaf for name, leaf in ctx.gradients.items() if name.endswith("body.kernel")]
            norms.append(float(jnp.linalg.norm(found[0])))

    held = TrainableParameterHook(["main.body.*"], freeze_mode="optimizer_only")
    made = strategy(held, Look(), num_steps=6)
    before = weights(made)
    made.run(loader(1) * 6)
    after = weights(made)
    assert np.array_equal(after["body.kernel"], before["body.kernel"])
    assert not np.array_equal(after["head.kernel"], before["head.kernel"])
    assert 0 < max(norms) < 3 * norms[0]


def test_patches_before_training_and_too_late() -> None:
    """nvalchemi:148 and nvalchemi:161: the patch is trained; after training began it is refused, once is enough."""
    patch = ModulePatchHook({"main.head": lambda: nnx.Linear(4, 2, use_bias=False, rngs=nnx.Rngs(5))})
    made = strategy(patch, num_steps=2)
    before = weights(made)
    assert "head.bias" not in before
    made.run(loader())
    after = weights(made)
    assert not np.array_equal(after["head.kernel"], before["head.kernel"])
    with pytest.raises(RuntimeError, match="before training starts"):
        made.register_hook(ModulePatchHook({"main.head": lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(6))}))
    assert np.array_equal(weights(made)["head.kernel"], after["head.kernel"])
    with pytest.raises(AttributeError, match="main has no 'neck'"):
        strategy(ModulePatchHook({"main.neck.head": lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(6))}))


def test_a_late_choice_is_said() -> None:
    made = strategy(num_steps=1)
    made.run(loader())
    with pytest.warns(UserWarning, match="after the optimizer was built"):
        made.register_hook(TrainableParameterHook("main.body.*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy(TrainableParameterHook("main.body.*"))


def test_preparing_hooks_make_no_orchestrator() -> None:
    """nvalchemi:161"""
    patch = ModulePatchHook({"main.head": lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(5))})
    assert strategy(patch, TrainableParameterHook("main.body.*")).registry.update is None
