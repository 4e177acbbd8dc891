"""What a hook is, and the orchestrator that orders update hooks."""

from __future__ import annotations

from typing import Any

import pytest

from nnx_jax.core.errors import HookError, HookTypeError
from nnx_jax.core.hooks import (
    CheckpointableHook,
    Hook,
    StatefulUpdateHook,
    TracedHook,
    TrainingUpdateHook,
    TrainingUpdateOrchestrator,
    runs_on,
)
from nnx_jax.core.stages import REPLACEMENT_STAGES, UPDATE_STAGES, TrainingStage

PLACES = {
    "host": (1, 2, 3, 15, 16, 17, 18),
    "both": (4,),
    "traced": (5, 6, 7, 8, 9, 10, 11, 12, 13, 14),
}


class At(TrainingUpdateHook):
    """An update hook of a given priority that notes how it is entered and left."""

    def __init__(self, priority: int = 50, log: list[str] | None = None, name: str = "") -> None:
        self.priority, self.log, self.name = priority, log if log is not None else [], name

    def __enter__(self) -> None:
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"exit {self.name}")


class Closes(TrainingUpdateHook):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def close(self) -> None:
        self.log.append("close")


class Watcher:
    stage, frequency = TrainingStage.AFTER_BATCH, 1

    def __call__(self, ctx: Any, stage: TrainingStage) -> None: ...


class Counts(TrainingUpdateHook):
    """The seed's example of a hook with state."""

    def __init__(self) -> None:
        self.step_count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step_count": self.step_count}

    def load_state_dict(self, state: Any) -> None:
        self.step_count = int(state["step_count"])


class Slot:
    def __init__(self) -> None:
        self.held: Any = 0

    def read(self) -> Any:
        return self.held

    def write(self, state: Any) -> None:
        self.held = state


def test_eighteen_stages() -> None:
    """nvalchemi:1"""
    assert [stage.value for stage in TrainingStage] == list(range(1, 19))
    assert " ".join(stage.name for stage in TrainingStage) == (
        "SETUP BEFORE_TRAINING BEFORE_EPOCH BEFORE_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS "
        "BEFORE_BACKWARD DO_BACKWARD AFTER_BACKWARD BEFORE_OPTIMIZER_STEP DO_OPTIMIZER_STEP AFTER_OPTIMIZER_STEP "
        "AFTER_BATCH AFTER_EPOCH AFTER_TRAINING AFTER_VALIDATION"
    )


def test_where_each_stage_runs() -> None:
    assert {place: tuple(s.value for s in TrainingStage if s.place == place) for place in PLACES} == PLACES
    assert [stage.value for stage in TrainingStage if stage.of_batch] == list(range(4, 16))
    assert [stage.value for stage in TrainingStage if stage.traced] == list(range(4, 15))
    assert [stage.value for stage in UPDATE_STAGES] == [4, 10, 13, 14]
    assert [stage.value for stage in REPLACEMENT_STAGES] == [10, 13]


def test_what_a_host_hook_is() -> None:
    """nvalchemi:25 nvalchemi:26"""
    assert isinstance(Watcher(), Hook)
    assert not isinstance(TrainingUpdateHook(), Hook)
    assert isinstance(TrainingUpdateOrchestrator(), Hook)


def test_who_has_state_for_checkpoints() -> None:
    """nvalchemi:118 (a bare update hook has none, or every hook would)"""
    assert isinstance(Counts(), CheckpointableHook)
    assert isinstance(StatefulUpdateHook(), CheckpointableHook)
    assert not isinstance(TrainingUpdateHook(), CheckpointableHook)
    assert not isinstance(TracedHook(), CheckpointableHook)


def test_priority_then_registration_order() -> None:
    """nvalchemi:38"""
    hooks = [At(30), At(10), At(20), At(10)]
    assert list(TrainingUpdateOrchestrator(*hooks).iter_hooks()) == [hooks[1], hooks[3], hooks[2], hooks[0]]


def test_composition_is_flat() -> None:
    """nvalchemi:39"""
    a, b, c = At(), At(), At()
    for composed in (a + b, TrainingUpdateOrchestrator(a) + b, a + TrainingUpdateOrchestrator(b)):  # type: ignore[operator]
        assert isinstance(composed, TrainingUpdateOrchestrator)
        assert list(composed.iter_hooks()) == [a, b]
    both = TrainingUpdateOrchestrator(a, b) + TrainingUpdateOrchestrator(c)
    assert list(both.iter_hooks()) == [a, b, c]
    with pytest.raises(TypeError):
        _ = a + 42  # type: ignore[operator]
    with pytest.raises(TypeError):
        _ = both + 42


def test_a_list_is_no_argument() -> None:
    """nvalchemi:40"""
    with pytest.raises(HookTypeError, match="argument 0 of TrainingUpdateOrchestrator is list"):
        TrainingUpdateOrchestrator([At(), At()])  # type: ignore[arg-type]


def test_the_same_update_hook_twice() -> None:
    """nvalchemi:30"""
    hook = At()
    with pytest.raises(HookError, match="duplicate: this At"):
        TrainingUpdateOrchestrator(hook, hook)


def test_one_hook_of_an_exclusive_key() -> None:
    """nvalchemi:72"""

    class Mixed(TrainingUpdateHook):
        exclusive_key = "mixed_precision"

    with pytest.raises(HookError, match="at most one Mixed"):
        TrainingUpdateOrchestrator(Mixed(), Mixed())


def test_entered_in_order_and_left_in_reverse() -> None:
    """nvalchemi:56"""
    log: list[str] = []
    closes = Closes(log)
    closes.priority = 30
    with TrainingUpdateOrchestrator(At(40, log, "late"), closes, At(10, log, "early")):
        assert log == ["enter early", "enter late"]
        log.clear()
    assert log == ["exit late", "close", "exit early"]


def test_a_failing_exit_is_a_note_on_the_error_on_its_way() -> None:
    class Sticks(TrainingUpdateHook):
        def close(self) -> None:
            raise OSError("stuck")

    with pytest.raises(ValueError, match="first") as found, TrainingUpdateOrchestrator(Sticks()):
        raise ValueError("first")
    assert found.value.__notes__ == ["then also: OSError: stuck"]
    with pytest.raises(OSError, match="stuck"), TrainingUpdateOrchestrator(Sticks()):
        pass


def test_its_own_rule_alone_decides() -> None:
    """nvalchemi:31"""

    class Never(Watcher):
        def _runs_on_stage(self, stage: TrainingStage) -> bool:
            return False

    assert not any(runs_on(Never(), stage) for stage in TrainingStage)
    assert [stage for stage in TrainingStage if runs_on(Watcher(), stage)] == [TrainingStage.AFTER_BATCH]


def test_state_loaded_before_a_run_goes_into_its_slot() -> None:
    hook, slot = StatefulUpdateHook(), Slot()
    assert hook.state_dict() == {}
    hook.load_state_dict({"state": 7})
    assert hook.state_dict() == {"state": 7}
    hook.bind(slot)
    assert slot.held == 7
    assert hook.state_dict() == {"state": 7}
    hook.load_state_dict({"state": 8})
    assert slot.held == 8


def test_state_loaded_between_two_runs_goes_into_the_next() -> None:
    """A run that went on from a loaded state has used it up."""
    hook, first, second, third = StatefulUpdateHook(), Slot(), Slot(), Slot()
    hook.bind(first)
    hook.load_state_dict({"state": 7})
    hook.bind(second)
    assert (first.held, second.held) == (7, 7)
    hook.bind(third)
    assert third.held == 0
    hook.load_state_dict({"state": 8})
    third.held = 9  # the run goes on
    hook.bind(fourth := Slot())
    assert (third.held, fourth.held, hook.state_dict()) == (9, 0, {"state": 0})


def test_the_arrays_of_a_failed_run_are_not_needed() -> None:
    class Gone(Slot):
        def read(self) -> Any:
            raise RuntimeError("Array has been deleted")

    hook, fresh = StatefulUpdateHook(), Slot()
    hook.bind(Gone())
    hook.load_state_dict({"state": 7})
    hook.bind(fresh)
    assert fresh.held == 7
