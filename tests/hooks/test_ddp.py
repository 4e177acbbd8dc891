"""DDPHook: nothing with one process; with several, what it checks before it asks for the data to be split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nnx_jax.core.errors import ProcessGroupError
from nnx_jax.core.hooks import Hook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.hooks import DDPHook


class Owner:
    """Stands for a run under a distributed manager of `world` processes."""

    def __init__(self, world: int | None = None, ready: bool = True, *, methods: bool = False) -> None:
        if world is not None:
            values = {"world_size": world, "is_initialized": ready}
            calls = {name: lambda value=value: value for name, value in values.items()}
            self.distributed_manager = SimpleNamespace(**(calls if methods else values))
        self.loader, self.model = object(), object()

    def setup(self, hook: Any) -> None:
        hook(SimpleNamespace(workflow=self, models={"main": self.model}, global_rank=0), Stage.SETUP)


class Sharing(Owner):
    """One that can split its data."""

    asked: Any = None

    def share_data_parallel(self, hook: Any) -> None:
        self.asked = hook


def test_one_process_changes_nothing() -> None:
    """nvalchemi:126 for the hook alone."""
    for owner in (Sharing(), Sharing(1), Sharing(1, methods=True)):
        before = dict(vars(owner))
        owner.setup(DDPHook(model_keys=("missing",)))
        assert vars(owner) == before
        assert owner.asked is None


def test_it_claims_setup_only() -> None:
    """nvalchemi:162 for the hook alone."""
    hook = DDPHook()
    assert isinstance(hook, Hook)
    assert not isinstance(hook, TrainingUpdateHook)
    assert hook.stage is Stage.SETUP
    assert not hasattr(hook, "_runs_on_stage")


def test_the_seeds_arguments() -> None:
    hook = DDPHook(
        model_keys="main", find_unused_parameters=False, broadcast_buffers=True, static_graph=True, process_group=None,
        backend="nccl", auto_init=False, sampler_cls=None, sampler_kwargs={"seed": 3},
    )  # fmt: skip
    assert hook.model_keys == ("main",)
    assert DDPHook.from_state(hook.state()) == hook


@pytest.mark.parametrize("methods", [False, True])
def test_several_processes_are_asked_for_once(methods: bool) -> None:
    owner, hook = Sharing(2, methods=methods), DDPHook(model_keys=["main"])
    owner.setup(hook)
    assert owner.asked is hook


def test_a_model_that_is_not_there() -> None:
    """nvalchemi:127"""
    with pytest.raises(KeyError, match="'missing', which is no model"):
        Sharing(2).setup(DDPHook(model_keys=("missing",)))


def test_processes_that_do_not_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvalchemi:132: by the manager, and by what a launcher says."""
    with pytest.raises(RuntimeError, match=r"2 processes that do not know each other .*initialize\(\)"):
        Sharing(2, ready=False).setup(DDPHook())
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"4 processes that do not know each other .*initialize\(\)"):
        Sharing().setup(DDPHook())


def test_a_trainer_of_one_process_says_so() -> None:
    with pytest.raises(ProcessGroupError, match="2 processes, but Owner trains in one"):
        Owner(2).setup(DDPHook())
