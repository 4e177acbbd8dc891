"""CheckpointHook: when it asks for a commit, under which name, what it keeps, and what it remembers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nnx_jax.core.errors import ConfigError, HookStateError
from nnx_jax.core.hooks import CheckpointableHook, Hook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.hooks import CheckpointHook


class Owner:
    """Stands for a run: takes the requests of its hooks."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, tuple[str, ...], bool]] = []

    def context(self, step: int, epoch: int = 0, rank: int = 0, loss: float | None = None) -> Any:
        ask = lambda tag, retired=(), wait=False: self.requests.append((tag, retired, wait))  # noqa: E731
        values = {"workflow": self, "global_rank": rank, "step_count": step, "epoch": epoch, "request_commit": ask}
        return SimpleNamespace(**values, validation=None if loss is None else {"total_loss": loss})

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _, _ in self.requests]

    def standing(self) -> list[str]:
        """The tags there are after every request was served."""
        found: list[str] = []
        for tag, retired, _ in self.requests:
            found = [name for name in [*found, tag] if name not in retired or name == tag]
        return found


@pytest.mark.parametrize("fields", [{}, {"step_interval": 2, "epoch_interval": 1}, {"step_interval": 0}])
def test_exactly_one_interval(fields: dict[str, int]) -> None:
    """nvalchemi:112"""
    with pytest.raises(ValueError, match="step_interval"):
        CheckpointHook("somewhere", **fields)


def test_it_is_a_host_hook_with_state(tmp_path: Path) -> None:
    hook = CheckpointHook(tmp_path, step_interval=2)
    assert isinstance(hook, Hook)
    assert isinstance(hook, CheckpointableHook)
    assert not isinstance(hook, TrainingUpdateHook)
    assert hook.checkpoint_dir == str(tmp_path)
    assert (hook.stage, hook.cadence_steps, hook.cadence_epochs) == (Stage.AFTER_BATCH, 2, None)
    by_epoch = CheckpointHook(epoch_interval=3)
    assert (by_epoch.stage, by_epoch.cadence_steps, by_epoch.cadence_epochs) == (Stage.AFTER_EPOCH, None, 3)


def test_there_is_one_place_to_write_to(tmp_path: Path) -> None:
    model, strategy = SimpleNamespace(), SimpleNamespace(own_stores=set())
    CheckpointHook(step_interval=1).on_register(model)
    CheckpointHook(tmp_path, step_interval=1).on_register(strategy)
    with pytest.raises(ValueError, match="runs_dir.*leave checkpoint_dir out"):
        CheckpointHook(tmp_path, step_interval=1).on_register(model)
    with pytest.raises(ValueError, match="give it a directory"):
        CheckpointHook(step_interval=1).on_register(strategy)


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.AFTER_BATCH])
def test_it_runs_at_its_own_stage_only(stage: Stage) -> None:
    assert not CheckpointHook(step_interval=1)._runs_on_stage(stage)


def test_a_parked_count_is_not_saved_twice() -> None:
    """nvalchemi:69 for the hook alone: vetoed batches call it again on the same update."""
    owner, hook = Owner(), CheckpointHook(step_interval=2)
    for step in (0, 0, 1, 2, 2, 2, 3, 4, 4):
        hook(owner.context(step), Stage.AFTER_BATCH)
    assert owner.tags == ["step_2", "step_4"]
    assert hook.last_checkpoint_index == 1


def test_epochs() -> None:
    owner, hook = Owner(), CheckpointHook(epoch_interval=2)
    for epoch in (1, 2, 3, 4):
        hook(owner.context(10 * epoch, epoch), Stage.AFTER_EPOCH)
    assert owner.tags == ["epoch_2", "epoch_4"]


def test_without_a_run() -> None:
    with pytest.raises(HookStateError, match="no run to checkpoint"):
        CheckpointHook(step_interval=1)(SimpleNamespace(workflow=None), Stage.AFTER_BATCH)


def test_only_the_first_process_asks() -> None:
    """nvalchemi:117"""
    given = {"step_interval": 1, "checkpoint_dir": "somewhere"}
    owner, hook, every = Owner(), CheckpointHook(**given), CheckpointHook(**given, rank_zero_only=False)
    hook(owner.context(1, rank=1), Stage.AFTER_BATCH)
    assert owner.requests == []
    assert hook.last_checkpoint_index is None
    every(owner.context(1, rank=1), Stage.AFTER_BATCH)
    assert owner.tags == ["step_1"]


def test_every_process_asks_for_a_checkpoint_of_its_run() -> None:
    """One of them writes the run, whichever it is; what the hook remembers is the same on all."""
    owner, hook = Owner(), CheckpointHook(step_interval=1)
    hook(owner.context(1, rank=1), Stage.AFTER_BATCH)
    assert (owner.tags, hook.checkpoints) == (["step_1"], ("step_1",))


@pytest.mark.parametrize("given", [True, False])
def test_waiting_for_the_files(given: bool) -> None:
    owner, hook = Owner(), CheckpointHook(step_interval=1, async_save=given)
    hook(owner.context(1), Stage.AFTER_BATCH)
    assert owner.requests == [("step_1", (), not given)]


def test_the_newest_are_kept() -> None:
    owner, hook = Owner(), CheckpointHook(step_interval=1, keep_last=2)
    for step in range(1, 6):
        hook(owner.context(step), Stage.AFTER_BATCH)
    assert owner.standing() == list(hook.checkpoints) == ["step_4", "step_5"]


@pytest.mark.parametrize("before", [True, False], ids=["validated first", "saved first"])
def test_the_best_are_kept_by_the_loss_of_their_own_update(before: bool) -> None:
    owner, hook = Owner(), CheckpointHook(step_interval=1, keep_best=2)
    for step, loss in enumerate([0.5, 0.1, 0.9, 0.2, 0.8, 0.7], start=1):
        save = lambda step=step: hook(owner.context(step), Stage.AFTER_BATCH)  # noqa: E731
        score = lambda step=step, loss=loss: hook(owner.context(step, loss=loss), Stage.AFTER_VALIDATION)  # noqa: E731
        for act in (score, save) if before else (save, score):
            act()
    assert owner.standing() == ["step_2", "step_4", "step_6"]


def test_the_last_and_the_best_are_kept() -> None:
    owner, hook = Owner(), CheckpointHook(step_interval=1, keep_last=2, keep_best=1)
    for step, loss in enumerate([0.1, 0.5, 0.4, float("nan"), 0.6], start=1):
        hook(owner.context(step), Stage.AFTER_BATCH)
        hook(owner.context(step, loss=loss), Stage.AFTER_VALIDATION)
    assert owner.standing() == ["step_1", "step_4", "step_5"]


def test_a_clean_up_that_was_killed_is_done_again() -> None:
    """The state that is stored with the second commit knows which names that commit was to remove."""
    owner, hook = Owner(), CheckpointHook(step_interval=1, keep_last=1)
    for step in (1, 2):
        hook(owner.context(step), Stage.AFTER_BATCH)
    stored = hook.state_dict()
    again = CheckpointHook(step_interval=1, keep_last=1)
    again.load_state_dict(stored)
    later = Owner()
    again(later.context(3), Stage.AFTER_BATCH)
    assert later.requests == [("step_3", ("step_1", "step_2"), False)]


def test_its_state_continues_in_the_same_instance_and_in_another() -> None:
    owner, hook = Owner(), CheckpointHook(step_interval=2, keep_last=2)
    for step in (2, 4):
        hook(owner.context(step), Stage.AFTER_BATCH)
    stored = hook.state_dict()
    hook(owner.context(6), Stage.AFTER_BATCH)
    for target in (hook, CheckpointHook(step_interval=2, keep_last=2)):
        target.load_state_dict(stored)
        assert target.last_checkpoint_index == 1
        resumed = Owner()
        for step in (4, 5, 6):  # a vetoed batch right after the resume does not save update 4 again
            target(resumed.context(step), Stage.AFTER_BATCH)
        assert resumed.requests == [("step_6", ("step_2",), False)]
        assert target.last_checkpoint_index == 2


def test_another_run_starts_from_nothing() -> None:
    hook, first, second = CheckpointHook(step_interval=2, keep_last=1), Owner(), Owner()
    for owner in (first, second):
        hook(owner.context(2), Stage.AFTER_BATCH)
        assert owner.requests == [("step_2", (), False)]
        assert hook.last_checkpoint_index == 0


@pytest.mark.parametrize("state", [{}, {"last_checkpoint_index": 0, "at": 3, "kept": [], "retired": []}])
def test_a_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    hook = CheckpointHook(step_interval=1)
    with pytest.raises(ValueError, match="no state of a CheckpointHook"):
        hook.load_state_dict(state)
    assert hook.last_checkpoint_index is None


def test_it_is_written_as_configuration() -> None:
    hook = CheckpointHook(step_interval=5, keep_best=1)
    assert hook.state() == {"kind": "checkpoint", "step_interval": 5, "keep_best": 1}
    with pytest.raises(ConfigError, match="every_n_steps"):
        CheckpointHook(every_n_steps=5)
