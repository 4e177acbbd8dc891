"""Hooks of a strategy from its first call to its last: cadences without a run, late registration, leaving on errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nnx_jax.core.hooks import TrainingUpdateHook
from nnx_jax.hooks import CheckpointHook
from nnx_jax.training import ValidationConfig, ValidationLoop
from tests.step.test_hooks import Every
from tests.training.toys import S, Watch, batches, squared, strategy


class Doors(TrainingUpdateHook):
    """Notes when it is entered and left."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __enter__(self) -> Doors:
        self.log.append("enter")
        return self

    def __exit__(self, *error: Any) -> None:
        self.log.append("exit")


def test_single_batches_reach_the_cadences(tmp_path: Path) -> None:
    hook = CheckpointHook(tmp_path / "c", step_interval=1)
    made = strategy(hooks=[hook], num_steps=9)
    with made:
        for _ in range(3):
            made.train_batch(batches(1)[0])
    assert [Path(name).name for name in hook.checkpoints] == ["step_1", "step_2", "step_3"]


def test_a_checkpoint_elsewhere_leaves_the_own_directory_open(tmp_path: Path) -> None:
    hook = CheckpointHook(tmp_path / "b", step_interval=1)
    made = strategy(hooks=[hook], num_steps=2)
    made.run(batches(1, 1))
    made.save_checkpoint(tmp_path / "elsewhere")
    made.num_steps = 4
    made.run(batches(1, 1))
    assert [Path(name).name for name in hook.checkpoints][-1] == "step_4"


def test_an_update_hook_registered_late_is_entered_once_and_leaves_the_others_alone() -> None:
    first, second = Doors(), Doors()
    made = strategy(hooks=[first])
    with made:
        made.register_hook(second)
        assert (first.log, second.log) == (["enter"], ["enter"])
    assert first.log == second.log == ["enter", "exit"]


def test_hooks_are_left_and_the_real_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Watch):
        def __call__(self, ctx: Any, stage: Any) -> None:
            raise ValueError("the real error")

    doors = Doors()
    made = strategy(hooks=[doors, Breaks(S.AFTER_BATCH)])

    def sync() -> None:
        raise RuntimeError("the arrays are gone")

    monkeypatch.setattr(made, "sync_models", sync)
    with pytest.raises(ValueError, match="the real error") as found:
        made.run(batches(1, 1))
    assert doors.log == ["enter", "exit"]
    assert any("the arrays are gone" in note for note in found.value.__notes__)


def test_a_hook_registered_after_training_sees_the_next_validation() -> None:
    made = strategy(num_steps=1, validation_config=ValidationConfig(batches(1)))
    made.run(batches(1))
    late = Watch(S.AFTER_VALIDATION)
    made.register_hook(late)
    made.validate()
    assert [stage for stage, _ in late.seen] == [S.AFTER_VALIDATION]


def test_a_standalone_validation_assembles_the_targets() -> None:
    def shifted(predictions: Any, batch: Any) -> Any:
        return squared(predictions, {"y": batch["t"]})

    config = ValidationConfig(batches(1))
    made = strategy(
        num_steps=1, loss_fn=shifted, loss_target_assembler=lambda batch: {"t": batch["y"]}, validation_config=config
    )
    made.run(batches(1))
    with ValidationLoop.from_training_strategy(made) as loop:
        assert loop.execute()["total_loss"] == made.validate()["total_loss"] == pytest.approx(0.64)


def test_a_window_of_ones_own_may_be_long() -> None:
    """A user's hook that accumulates 200 microbatches is not taken for one that never lets the optimizer step."""
    made = strategy(hooks=[Every(200)], num_steps=1)
    made.run(batches(*[1.0] * 10))
    assert (made.step_count, made.batch_count) == (1, 200)


def test_the_modifier_belongs_to_epochs() -> None:
    with pytest.raises(ValueError, match="epoch_step_modifier is for num_epochs"):
        strategy(num_steps=2, epoch_step_modifier=0.5)
