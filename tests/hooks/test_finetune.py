"""ModulePatchHook and TrainableParameterHook: what they change in a model before its optimizer is built."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.hooks import Hook
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.hooks import ModulePatchHook, TrainableParameterHook
from nnx_jax.hooks.finetune import left_out

NAMES = ["main.body.0.kernel", "main.body.0.bias", "main.body.1.kernel", "main.head.kernel", "main.head.bias"]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(3, 2, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x: Any) -> Any:
        for layer in self.body:
            x = layer(x)
        return self.head(x) * self.scale[...]


class Owner:
    """Stands for a trainer at the moment its hooks are registered."""

    def __init__(self, *, began: bool = False) -> None:
        self.models = {"main": Net(nnx.Rngs(0))}
        self.training_began = began


def linear() -> nnx.Linear:
    return nnx.Linear(3, 7, rngs=nnx.Rngs(1))


@pytest.mark.parametrize("hook", [ModulePatchHook({"main.head": linear}), TrainableParameterHook("main.*")])
def test_they_claim_no_stage(hook: Any) -> None:
    """nvalchemi:161"""
    assert isinstance(hook, Hook)
    assert not any(hook._runs_on_stage(stage) for stage in Stage)


# Patches ---------------------------------------------------------------------------------------------------------


def test_children_are_replaced_and_added() -> None:
    owner, head, second = Owner(), linear(), linear()
    ModulePatchHook({"main.head": head, "main.body.1": lambda: second, "main.extra": linear}).on_register(owner)
    net = owner.models["main"]
    assert net.head is head
    assert net.body[1] is second
    assert net.extra.out_features == 7
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(net, nnx.Param))}
    assert {"extra.kernel", "body.1.kernel"} <= names


@pytest.mark.parametrize(
    "target, error, words",
    [
        ("other.head", KeyError, "names no model"),
        ("main.neck.head", AttributeError, "main has no 'neck'"),
        ("main.body.5", AttributeError, "main.body has 2 modules"),
        ("main.body.5.kernel", AttributeError, "main.body has no '5'"),
        ("main.scale", TypeError, "would replace a Param"),
        ("main.head.out_features.x", TypeError, "main.head.out_features is a int"),
    ],
)
def test_a_target_that_is_not_there_changes_nothing(target: str, error: type[Exception], words: str) -> None:
    """nvalchemi:148 for a missing parent; all targets are looked up before the first is changed."""
    owner = Owner()
    before = owner.models["main"].head
    with pytest.raises(error, match=words):
        ModulePatchHook({"main.head": linear(), target: linear()}).on_register(owner)
    assert owner.models["main"].head is before


@pytest.mark.parametrize("value", [3, nnx.Linear, "linear", lambda: 3])
def test_only_modules_go_in(value: Any) -> None:
    owner = Owner()
    with pytest.raises(TypeError, match="give a module"):
        ModulePatchHook({"main.head": value}).on_register(owner)
    assert isinstance(owner.models["main"].head, nnx.Linear)


def test_one_module_at_two_places_is_said() -> None:
    """nvalchemi:148"""
    shared = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    with pytest.warns(UserWarning, match=r"main\.body\.0 and main\.body\.1; they will share"):
        ModulePatchHook({"main.body.0": shared, "main.body.1": shared}).on_register(Owner())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModulePatchHook({"main.body.0": linear(), "main.body.1": linear()}).on_register(Owner())


def test_too_late() -> None:
    """nvalchemi:148"""
    with pytest.raises(RuntimeError, match="before training starts"):
        ModulePatchHook({"main.head": linear()}).on_register(Owner(began=True))


def test_a_trainer_is_patched_once() -> None:
    """What was trained since is not thrown away when training is prepared again."""
    owner, hook = Owner(), ModulePatchHook({"main.head": linear})
    hook.on_register(owner)
    trained = owner.models["main"].head = linear()
    owner.training_began = True
    hook.prepare_strategy(owner)
    hook.on_register(owner)
    assert owner.models["main"].head is trained
    other = Owner()
    hook.on_register(other)
    assert other.models["main"].head.out_features == 7


def test_a_model_that_is_built_later_is_patched_later() -> None:
    owner, hook = Owner(), ModulePatchHook({"main.head": linear})
    models, owner.models = owner.models, {}
    hook.on_register(owner)
    owner.models = models
    hook.prepare_strategy(owner)
    assert owner.models["main"].head.out_features == 7


@pytest.mark.parametrize("patches", [{}, None, {"main": 1}, {"main..head": 1}, {3: 1}])
def test_targets_are_checked_first(patches: Any) -> None:
    with pytest.raises(ConfigError, match="patches"):
        ModulePatchHook(patches)


def test_a_run_id_knows_the_weights_of_a_patch() -> None:
    def state(seed: int) -> dict[str, Any]:
        return ModulePatchHook({"main.head": lambda: nnx.Linear(3, 7, rngs=nnx.Rngs(seed))}).state()

    assert state(0) == state(0)
    assert state(0) != state(1)


# Trainable parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "freeze, trainable, frozen",
    [
        (("main.body.*",), (), NAMES[:3]),
        ((), ("main.head.*",), NAMES[:3]),
        (("main.*",), ("main.head.*",), NAMES[:3]),
        (("*.bias", "main.body.1.*"), ("main.head.bias",), [NAMES[1], NAMES[2]]),
    ],
)
@pytest.mark.parametrize("mode", ["requires_grad", "optimizer_only"])
def test_what_is_left_out(freeze: tuple[str, ...], trainable: tuple[str, ...], frozen: list[str], mode: Any) -> None:
    """nvalchemi:146 and nvalchemi:147 for the choice alone."""
    chosen, none = set(frozen), set()
    expected = (chosen, none) if mode == "requires_grad" else (none, chosen)
    assert left_out([object(), TrainableParameterHook(freeze, trainable, mode)], NAMES) == expected


@pytest.mark.parametrize("fields", [{"freeze_patterns": "main.tail.*"}, {"trainable_patterns": ("main.head.*", "x")}])
def test_a_pattern_without_a_match(fields: dict[str, Any]) -> None:
    """nvalchemi:146"""
    with pytest.raises(ValueError, match="matches no parameter"):
        left_out([TrainableParameterHook(**fields)], NAMES)


def test_nothing_left() -> None:
    with pytest.raises(ValueError, match="leaves no parameter to train"):
        left_out([TrainableParameterHook("main.*")], NAMES)
    body, head = TrainableParameterHook("main.body.*"), TrainableParameterHook("main.head.*", (), "optimizer_only")
    with pytest.raises(ValueError, match="together leave no parameter"):
        left_out([body, head], NAMES)


def test_two_hooks_add_up_and_no_gradient_wins() -> None:
    one, two = TrainableParameterHook("main.body.0.*"), TrainableParameterHook("main.body.*", (), "optimizer_only")
    assert left_out([one, two], NAMES) == (set(NAMES[:2]), {NAMES[2]})
    assert left_out([], NAMES) == (set(), set())


def test_no_pattern() -> None:
    with pytest.raises(ConfigError, match="give one or both"):
        TrainableParameterHook()


def test_late_is_said() -> None:
    with pytest.warns(UserWarning, match="after the optimizer was built"):
        TrainableParameterHook("main.body.*").on_register(Owner(began=True))


def test_it_is_written_as_configuration() -> None:
    hook = TrainableParameterHook(["main.body.*"], freeze_mode="optimizer_only")
    state = {"kind": "trainable_parameters", "freeze_patterns": ["main.body.*"], "freeze_mode": "optimizer_only"}
    assert hook.state() == state
    assert TrainableParameterHook.from_state(state) == hook
