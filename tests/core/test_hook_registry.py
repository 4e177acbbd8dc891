"""HookRegistry: what may be registered together, and what is told to whom."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from nnx_jax.core.errors import HookError, HookTypeError
from nnx_jax.core.hook_registry import HookRegistry
from nnx_jax.core.hooks import TracedHook, TrainingUpdateHook, TrainingUpdateOrchestrator
from nnx_jax.core.stages import TrainingStage as Stage


class Host:
    """A host hook, by default after each batch."""

    def __init__(self, stage: Any = Stage.AFTER_BATCH, frequency: Any = 1) -> None:
        self.stage, self.frequency = stage, frequency

    def __call__(self, ctx: Any, stage: Stage) -> None: ...


class Everywhere(Host):
    """Watches all eighteen stages, as a timer does."""

    def __init__(self) -> None:
        super().__init__(None)

    def _runs_on_stage(self, stage: Stage) -> bool:
        return True


class Update(TrainingUpdateHook):
    def __init__(self, priority: int = 50) -> None:
        self.priority = priority


class Mixed(TrainingUpdateHook):
    exclusive_key = "mixed_precision"


class Backward(TracedHook):
    """Owns DO_BACKWARD."""

    stage, claims_replacement = Stage.DO_BACKWARD, True


class OtherBackward(Backward):
    pass


class Foreign(Enum):
    AFTER_BATCH = 15


class Announced(Host):
    def __init__(self) -> None:
        super().__init__()
        self.owners: list[Any] = []

    def on_register(self, owner: Any) -> None:
        self.owners.append(owner)


@pytest.mark.parametrize("frequency", [0, -1, "2", 1.0, True])
def test_frequency_is_a_positive_integer(frequency: Any) -> None:
    """nvalchemi:27"""
    with pytest.raises(HookError, match=r"Host.frequency must be a positive integer, got"):
        HookRegistry([Host(frequency=frequency)])


@pytest.mark.parametrize("name", ["cadence_steps", "cadence_epochs"])
def test_a_cadence_is_a_positive_integer(name: str) -> None:
    hook = Host()
    setattr(hook, name, 0)
    with pytest.raises(HookError, match=rf"Host.{name} must be a positive integer, got 0"):
        HookRegistry([hook])


@pytest.mark.parametrize("needs", [("grads",), "gradients"])
def test_what_can_be_needed(needs: Any) -> None:
    hook = Host()
    hook.needs = needs  # type: ignore[attr-defined]
    with pytest.raises(HookError, match="Host.needs names '(grads|gradients)'; it is a tuple of"):
        HookRegistry([hook])


def test_a_single_hook_is_no_list() -> None:
    with pytest.raises(HookTypeError, match="hooks is a list of hooks, got Host"):
        HookRegistry(Host())  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", [Host(None), TracedHook()])
def test_a_hook_has_a_stage(hook: Any) -> None:
    """nvalchemi:28"""
    with pytest.raises(HookTypeError, match="no stage assigned"):
        HookRegistry([hook])


@pytest.mark.parametrize("stage", [Foreign.AFTER_BATCH, 15, "AFTER_BATCH"])
def test_a_stage_of_another_enumeration(stage: Any) -> None:
    """nvalchemi:29 (15 of a foreign enumeration is not TrainingStage 15)"""
    with pytest.raises(TypeError, match="member of TrainingStage"):
        HookRegistry([Host(stage)])
    with pytest.raises(TypeError, match="member of TrainingStage"):
        HookRegistry().add(Host(), stage)


def test_the_same_object_twice() -> None:
    """nvalchemi:30"""
    host, update, traced = Host(), Update(), Backward()
    for twice in ([host, host], [update, update], [traced, traced], [TrainingUpdateOrchestrator(update), update]):
        with pytest.raises(ValueError, match="duplicate"):
            HookRegistry(twice)


@pytest.mark.parametrize("hook", [Host, 3, None])
def test_what_is_no_hook(hook: Any) -> None:
    with pytest.raises(HookTypeError, match=r"is a class; register an object|a hook is called as"):
        HookRegistry([hook])


# Owners of the replacement stages ------------------------------------------------------------------------------------


def test_watching_every_stage_owns_none() -> None:
    """nvalchemi:33 nvalchemi:160"""
    registry = HookRegistry([Everywhere()])
    assert registry.update is None
    assert registry.traced == ()


@pytest.mark.parametrize("stage", [Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP])
def test_a_silent_owner_is_refused(stage: Stage) -> None:
    """nvalchemi:33"""

    class Silent(TracedHook):
        pass

    for hook in (Host(), Silent()):
        with pytest.raises(HookError, match=rf"{stage.name}.*use BEFORE_{stage.name[3:]}.*claims_replacement = True"):
            HookRegistry().add(hook, stage)


def test_two_owners_are_refused() -> None:
    """nvalchemi:35"""
    with pytest.raises(ValueError, match="DO_BACKWARD; Backward and OtherBackward"):
        HookRegistry([Backward(), OtherBackward()])


def test_an_owner_beside_update_hooks_is_refused() -> None:
    """nvalchemi:36"""
    for hooks in ([Backward(), Update()], [TrainingUpdateOrchestrator(Update()), Backward()]):
        with pytest.raises(ValueError, match="DO_BACKWARD; Backward does.*TrainingUpdateHook"):
            HookRegistry(hooks)


def test_an_owner_is_part_of_the_step() -> None:
    """nvalchemi:34 (a host hook cannot do in place of the step what is compiled into it)"""

    class Claims(Host):
        claims_replacement = True

    assert HookRegistry([Backward()]).traced[0].claims_replacement
    with pytest.raises(HookTypeError, match="Claims claims DO_OPTIMIZER_STEP.*derive it from TracedHook"):
        HookRegistry([Claims(Stage.DO_OPTIMIZER_STEP)])


def test_a_traced_hook_stands_inside_the_step() -> None:
    with pytest.raises(HookTypeError, match="AFTER_BATCH is not part of it"):
        HookRegistry().add(TracedHook(), Stage.AFTER_BATCH)
    registry = HookRegistry()
    registry.add(hook := TracedHook(), Stage.AFTER_BACKWARD)
    assert registry.traced == (hook,)


# Update hooks share one orchestrator ---------------------------------------------------------------------------------


def test_the_orchestrator_stands_at_the_first_update_hook() -> None:
    """nvalchemi:54"""
    a, one, b, two = Host(), Update(30), Host(), Update(10)
    registry = HookRegistry([a, one, b, two])
    assert registry.update is not None
    assert registry.entries == (a, registry.update, b)
    assert list(registry.update.iter_hooks()) == [two, one]
    assert list(registry) == [a, two, one, b]
    assert registry.host == (a, b)


def test_ties_keep_the_order_of_registration() -> None:
    """nvalchemi:38 (also for a hook that comes later)"""
    one, two, three = Update(), Update(), Update(10)
    registry = HookRegistry([one, two])
    registry.add(three)
    assert registry.update is not None
    assert list(registry.update.iter_hooks()) == [three, one, two]


def test_an_explicit_orchestrator() -> None:
    """nvalchemi:51"""
    explicit, bare = TrainingUpdateOrchestrator(Update()), Update()
    assert HookRegistry([explicit]).update is explicit
    merged = HookRegistry([bare, explicit]).update
    assert merged is not None
    assert set(merged.iter_hooks()) == {bare, *explicit.iter_hooks()}


def test_two_orchestrators_are_refused() -> None:
    """nvalchemi:52"""
    registry = HookRegistry([TrainingUpdateOrchestrator(Update()), Update()])
    with pytest.raises(ValueError, match=r"with \+"):
        registry.add(TrainingUpdateOrchestrator(Update()))


@pytest.mark.parametrize("hook", [Update(), TrainingUpdateOrchestrator()])
def test_update_hooks_have_stages_of_their_own(hook: Any) -> None:
    """nvalchemi:53"""
    with pytest.raises(ValueError, match="without stage="):
        HookRegistry().add(hook, Stage.AFTER_BATCH)


def test_at_most_one_of_an_exclusive_key() -> None:
    """nvalchemi:72"""
    with pytest.raises(ValueError, match="at most one Mixed"):
        HookRegistry([Mixed(), Mixed()])
    registry = HookRegistry([Mixed()])
    with pytest.raises(ValueError, match="at most one Mixed"):
        registry.add(Mixed())


# All or nothing ------------------------------------------------------------------------------------------------------


def test_a_failed_registration_changes_nothing() -> None:
    """nvalchemi:55"""
    host, update = Host(), Update()
    registry = HookRegistry([host, update])
    before = registry.entries
    moved = Host(Stage.BEFORE_EPOCH, frequency=0)
    for hook, stage in ((Host(frequency=0), None), (update, None), (Backward(), None), (moved, Stage.AFTER_EPOCH)):
        with pytest.raises(HookError):
            registry.add(hook, stage)
        assert registry.entries == before
    assert moved.stage is Stage.BEFORE_EPOCH
    registry.add(moving := Host(), Stage.AFTER_EPOCH)
    assert moving.stage is Stage.AFTER_EPOCH


def test_on_register() -> None:
    """nvalchemi:37"""
    owner, hook = object(), Announced()
    registry = HookRegistry([hook], owner=owner)
    registry.add(Host())
    assert hook.owners == [owner]
    broken = Host()
    broken.on_register = 3  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="on_register is int 3"):
        registry.add(broken)


def test_on_register_of_the_hooks_of_an_orchestrator() -> None:
    """nvalchemi:37"""
    owners: list[Any] = []

    class Tells(TrainingUpdateHook):
        def on_register(self, owner: Any) -> None:
            owners.append(owner)

    HookRegistry([TrainingUpdateOrchestrator(Tells(), Tells())], owner="run")
    assert owners == ["run", "run"]


def test_what_a_run_id_knows() -> None:
    """Watchers change no number; settings and the text of the class do."""
    first = HookRegistry([Host(), Update(10), Everywhere()]).identity()
    assert [found["settings"] for found in first] == [{"priority": "10"}]
    assert first[0]["class"].endswith("Update")
    assert HookRegistry([Update(20)]).identity() != first
    update = Update(10)
    assert HookRegistry([update]).identity(known=[update]) == []
