"""What a strategy takes as given: every argument does something or is refused, and what is stored or edited counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nnx_jax.core.errors import ConfigError, DataError, HookError, HookStateError
from nnx_jax.core.hook_registry import HookRegistry
from nnx_jax.hooks import CheckpointHook, DDPHook, EMAHook, GradientAccumulationHook
from nnx_jax.training import TrainingStrategy, ValidationConfig, ValidationLoop
from tests.training.toys import Loader, S, Toy, Watch, batches, squared, strategy, toy, w

# -- batches that are handed over ------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [False, True])
def test_batches_outside_of_a_context_reach_cadences(tmp_path: Path, reads: bool) -> None:
    """Three updates, one checkpoint for each, also when another hook has read the count before."""
    hook = CheckpointHook(str(tmp_path / "run"), step_interval=1)
    made = strategy(models=toy, hooks=[hook, *([Watch(S.AFTER_BATCH)] if reads else [])])
    for batch in batches(1, 1, 1):
        made.train_batch(batch)
    for step, weight in ((1, 0.8), (2, 0.64), (3, 0.512)):
        again = TrainingStrategy.load_checkpoint(tmp_path / "run" / f"step_{step}")
        assert (again.step_count, w(again)) == (step, pytest.approx(weight))


def test_a_longer_cadence_is_reached_where_every_count_is_read(tmp_path: Path) -> None:
    """Every second of five: 2 and 4."""
    hook = CheckpointHook(str(tmp_path / "run"), step_interval=2)
    made = strategy(hooks=[hook, Watch(S.AFTER_BATCH)])
    with made:
        for batch in batches(1, 1, 1, 1, 1):
            made.train_batch(batch)
    assert hook.checkpoints == ("step_2", "step_4")


# -- stored and edited weights ---------------------------------------------------------------------------------


def test_stored_averages_are_scored_before_training(tmp_path: Path) -> None:
    """e = (0.8 + 0.64) / 2 = 0.72 after two updates; the loss of x = 1 is 0.72 squared, before and after loading."""
    config = ValidationConfig(batches(1))
    made = strategy(models=toy, hooks=[EMAHook(decay=0.5)], num_steps=2, validation_config=config)
    made.run(batches(1))
    made.save_checkpoint(tmp_path / "run")
    again = TrainingStrategy.load_checkpoint(tmp_path / "run", hooks=[EMAHook(decay=0.5)], validation_config=config)
    found = again.validate()
    assert (found["model_source"], found["total_loss"]) == ("ema", pytest.approx(0.72**2))
    assert found["total_loss"] == made.validate()["total_loss"]


@pytest.mark.parametrize("inside", [False, True])
def test_weights_put_in_between_two_runs_count(inside: bool) -> None:
    """One update, w = 10 by hand, one more: 10 - 0.1 * 20 = 8; without the edit nothing is taken over."""
    made = strategy(num_steps=1)
    with made if inside else jax.default_matmul_precision("float32"):
        made.run(batches(1))
        made.models["main"].w.set_value(jnp.float32(10.0))  # type: ignore[union-attr]
        made.num_steps = 2
        made.run(batches(1))
        assert w(made) == pytest.approx(8.0)
        made.train_batch(batches(1)[0])
        made.train_batch(batches(1)[0])
    assert w(made) == pytest.approx(8.0 * 0.64)


def test_the_last_validation_is_known_in_the_next_run() -> None:
    """Scored after the first run, w = 0.8: the next run's first batch sees 0.64."""
    watch = Watch(S.BEFORE_BATCH, look=lambda ctx: ctx.validation and ctx.validation["total_loss"])
    made = strategy(num_steps=1, hooks=[watch], validation_config=ValidationConfig(batches(1)))
    made.run(batches(1))
    made.num_steps = 2
    made.run(batches(1))
    assert watch.at(S.BEFORE_BATCH) == [None, pytest.approx(0.64)]


# -- lengths ---------------------------------------------------------------------------------------------------


def test_windows_that_end_with_the_epoch_are_counted_by_epoch() -> None:
    """K=4, 6 batches: 2 updates an epoch, 8 in four, and half of them are 4."""
    hooks = [GradientAccumulationHook(4, on_partial="flush")]
    made = strategy(num_epochs=4, epoch_step_modifier=0.5, hooks=hooks)
    made.run(Loader(6))
    assert (made.step_count, made.batch_count) == (4, 12)


class Unsized:
    """Two batches, again and again, and no length."""

    def __iter__(self) -> Any:
        return iter(batches(1, 1))


def test_a_pass_without_length_cannot_end() -> None:
    with pytest.raises(DataError, match="the loader has no length; give it __len__"):
        strategy(num_steps=4).run(Unsized())


# -- arguments -------------------------------------------------------------------------------------------------


class Four:
    """Four workers."""

    world_size = 4


def test_the_device_is_the_default_one() -> None:
    """A device that would not be used is refused."""
    assert strategy(devices=jax.devices()[:1], num_steps=1).devices is not None
    for wrong in ("tpu:7", jax.devices()[1] if len(jax.devices()) > 1 else "cpu:9"):
        with pytest.raises(ConfigError, match="trains on JAX's default device"):
            strategy(devices=[wrong])


def test_updates_of_all_workers_are_those_of_one_times_their_number() -> None:
    made = strategy(step_count=2, global_step_count=8, distributed_manager=Four())
    assert made.global_step_count == 8
    with pytest.raises(ConfigError, match="global_step_count is 9, but step_count=2 with 4 workers make 8"):
        strategy(step_count=2, global_step_count=9, distributed_manager=Four())


@pytest.mark.parametrize("name", ["grad_enabled", "distributed_manager"])
def test_a_validation_takes_nothing_it_does_not_use(name: str) -> None:
    given: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        ValidationLoop(batches(1), model=Toy(), loss_fn=squared, validation_fn=lambda m, b: m(b["x"]), **given)


def test_another_length_than_the_stored_one_takes_no_modifier(tmp_path: Path) -> None:
    made = strategy(models=toy, num_epochs=1, epoch_step_modifier=0.5)
    made.run(batches(1, 1))
    made.save_checkpoint(tmp_path / "run")
    assert TrainingStrategy.load_checkpoint(tmp_path / "run", num_steps=3).epoch_step_modifier == 1.0
    assert TrainingStrategy.load_checkpoint(tmp_path / "run").epoch_step_modifier == 0.5


# -- hooks -----------------------------------------------------------------------------------------------------


def timed(stage: S, **settings: Any) -> Watch:
    """A hook with settings at one stage."""
    hook = Watch(stage)
    vars(hook).update(settings)
    return hook


def test_epochs_are_not_counted_inside_of_them() -> None:
    HookRegistry([timed(S.AFTER_EPOCH, cadence_epochs=2)])
    with pytest.raises(HookError, match="cadence_epochs counts finished epochs, so at AFTER_BATCH"):
        HookRegistry([timed(S.AFTER_BATCH, cadence_epochs=2)])


@pytest.mark.parametrize("need", ["gradients", "predictions"])
def test_between_microbatches_nothing_of_them_is_there(need: str) -> None:
    HookRegistry([timed(S.AFTER_BATCH, needs=("params",), cadence_steps=2)])
    with pytest.raises(HookError, match=f"needs names '{need}', which only a hook that is called at every microbatch"):
        HookRegistry([timed(S.AFTER_BATCH, needs=(need,), cadence_steps=2)])


@pytest.mark.parametrize("make", [lambda: CheckpointHook("somewhere", step_interval=1), DDPHook])
def test_a_stage_that_a_class_fixes_is_not_given(make: Callable[[], Any]) -> None:
    made = strategy()
    with pytest.raises(HookError, match="decides itself at which stage"):
        made.register_hook(make(), stage=S.AFTER_BATCH)
    assert made.hooks == []


def test_a_commit_needs_a_place() -> None:
    """Without a directory a checkpoint that is asked for would be lost."""
    asks = Watch(S.AFTER_BATCH, look=lambda ctx: ctx.request_commit("mine"))
    with pytest.raises(HookStateError, match="asks for a commit, but this training has no directory"):
        strategy(hooks=[asks]).run(batches(1))
    late = Watch(S.AFTER_VALIDATION, look=lambda ctx: ctx.request_commit("mine"))
    with pytest.raises(HookStateError, match="nothing was trained yet"):
        strategy(hooks=[late], validation_config=ValidationConfig(batches(1))).validate()
