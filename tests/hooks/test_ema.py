"""Averages of weights: when they move, what they hold, who may see them, and how they are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.core.hooks import CheckpointableHook, TrainingUpdateHook
from nnx_jax.core.stages import TrainingStage as S
from nnx_jax.engines.nnx_forward import ModuleCopies
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, HookSpec, MixedPrecisionHook, SkipNonFinite, SpikeSkipHook
from tests.hooks.toy import Toy


def averages(toy: Toy, hook: EMAHook, xs) -> list[float]:
    """The average after each microbatch."""
    found = []
    for x in xs:
        toy.step(x)
        found.append(float(toy.slot(hook)["average"]["w"]))
    return found


class Rejects(TrainingUpdateHook):
    """Vetoes the microbatches of the given numbers."""

    priority = 40

    def __init__(self, *batches: int) -> None:
        self.batches = batches

    def __call__(self, ctx, stage, will_skip):
        if stage is S.DO_OPTIMIZER_STEP:
            return ~jnp.isin(ctx.batch_count, jnp.array(self.batches)), ctx.loss
        return True, ctx.loss


# -- when and what ---------------------------------------------------------------------------------------------------


def test_the_first_is_a_copy_and_then_it_decays() -> None:
    """nvalchemi:98"""
    ema = EMAHook("main", 0.9)
    np.testing.assert_allclose(averages(Toy(ema), ema, [1.0] * 4), [0.8, 0.784, 0.7568, 0.72208], rtol=1e-6)


def test_decay_zero_is_the_weight_itself() -> None:
    ema = EMAHook(decay=0.0)
    toy = Toy(ema)
    for _ in range(3):
        assert averages(toy, ema, [1.0]) == [toy.w]


def test_every_second_update_from_the_third_on() -> None:
    """nvalchemi:99"""
    ema = EMAHook(decay=0.9, update_every=2, start_step=3)
    toy = Toy(ema)
    counts, held = [], []
    for _ in range(8):
        toy.step(1.0)
        slot = toy.slot(ema)
        counts.append(int(slot["updates"]))
        held.append(float(slot["average"]["w"]))
    assert counts == [0, 0, 0, 1, 1, 2, 2, 3]
    np.testing.assert_allclose(held[3::2], [0.4096, 0.3949, 0.3721], atol=5e-5)


def test_the_multiple_is_of_the_update_and_not_of_the_start() -> None:
    """nvalchemi:100"""
    ema = EMAHook(decay=0.9, update_every=10, start_step=5)
    toy = Toy(ema, rate=0.01)
    moved = [0]
    for _ in range(20):
        toy.step(1.0)
        moved.append(int(toy.slot(ema)["updates"]))
    assert [step for step in range(1, 21) if moved[step] > moved[step - 1]] == [10, 20]


def test_a_vetoed_update_is_none() -> None:
    """nvalchemi:101 case:D04 (0.1 of 1 and of 2 from a first average at 0, one rejected between: 0.29)"""
    ema = EMAHook(decay=0.9)
    toy = Toy(Rejects(0), ema)
    toy.trace([1.0, 1.0])
    assert toy.slot(ema)["updates"] == 1

    ema = EMAHook(decay=0.9)
    toy = Toy(Rejects(2), ema, w=0.0, rate=1.0, slope=True)
    np.testing.assert_allclose(averages(toy, ema, [0, -1, -5, -1]), [0, 0.1, 0.1, 0.29], rtol=1e-6)


def test_it_moves_with_windows() -> None:
    """case:D01 (windows of four: first average 0, then w = 1, 2: 0.1, 0.29)"""
    ema = EMAHook(decay=0.9)
    toy = Toy(GradientAccumulationHook(4), ema, w=0.0, rate=1.0, slope=True)
    found = averages(toy, ema, [0.0] * 4 + [-1.0] * 8)
    np.testing.assert_allclose(found[3::4], [0, 0.1, 0.29], rtol=1e-6)


def test_averages_are_not_trained_with() -> None:
    """case:D03 (the weight is 2 whatever the average is)"""
    ema = EMAHook(decay=0.9)
    toy = Toy(ema, w=0.0, rate=1.0, slope=True)
    assert toy.trace([0.0, -1.0, -1.0])[-1] == 2.0
    assert toy.slot(ema)["average"]["w"] == pytest.approx(0.29)


def test_two_models_have_averages_of_their_own() -> None:
    """nvalchemi:105 (each holds its own model's weights, at its own rate)"""

    def forward(params, model_state, batch, key, train):
        return (params["a.w"] + params["b.w"]) * batch["x"], model_state

    slow, fast = EMAHook("a", 0.9), EMAHook("b", 0.5)
    toy = Toy(
        slow, fast, w={"a.w": jnp.float32(1.0), "b.w": jnp.float32(2.0)}, forward=forward, slope=True,
        plan={"model_keys": ("a", "b")},
    )  # fmt: skip
    for _ in range(2):
        toy.step(1.0)
    assert list(toy.slot(slow)["average"]) == ["a.w"]
    assert toy.slot(slow)["average"]["a.w"] == pytest.approx(0.9 * 0.9 + 0.1 * 0.8)
    assert toy.slot(fast)["average"]["b.w"] == pytest.approx(0.5 * 1.9 + 0.5 * 1.8)


@pytest.mark.parametrize("keys, known", [((), "main"), (("a", "b"), "a, b")])
def test_an_unknown_model_is_told(keys, known) -> None:
    """nvalchemi:104"""
    params = {"w": np.float32(0)}
    with pytest.raises(KeyError, match=f"model_key is 'ghost', but the models are: {known}") as error:
        EMAHook("ghost").init_slot(params, {}, keys)
    assert str(error.value).startswith("step: EMAHook.model_key")
    if not keys:
        with pytest.raises(KeyError, match="ghost"):
            Toy(EMAHook("ghost"))


OPTIONS: list[dict[str, Any]] = [
    {"decay": 1.0}, {"decay": -0.1}, {"update_every": 0}, {"start_step": -1}, {"model_key": "  "}, {"warmup": 1},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_options_are_checked(options) -> None:
    """nvalchemi:103"""
    with pytest.raises(ValueError, match=f"EMAHook.{next(iter(options))}"):
        EMAHook(**options)


def test_it_is_a_configuration() -> None:
    assert EMAHook(" main ").model_key == "main"
    assert HookSpec.from_yaml("{kind: ema, decay: 0.99, update_every: 10}") == EMAHook(decay=0.99, update_every=10)


# -- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_buffers, wanted", [(True, [10, 11, 12.9]), (False, [10, 20, 30])])
def test_what_the_model_keeps_is_averaged_or_copied(use_buffers, wanted) -> None:
    """nvalchemi:111 (a buffer of 10, 20, 30 after the updates; a counter is always copied)"""

    def forward(params, model_state, batch, key, train):
        moved = {"sum": model_state["sum"] + 10, "count": model_state["count"] + 1}
        return params["w"] * batch["x"], moved

    ema = EMAHook(decay=0.9, use_buffers=use_buffers)
    toy = Toy(ema, forward=forward, model_state={"sum": jnp.float32(0), "count": jnp.int32(0)})
    for number, value in enumerate(wanted, 1):
        toy.step(1.0)
        buffers = toy.slot(ema)["buffers"]
        assert buffers["sum"] == pytest.approx(value, rel=1e-6)
        assert buffers["count"] == number
        if not use_buffers:
            assert buffers["sum"] == toy.state.model_state["sum"]


# -- the averaged model ----------------------------------------------------------------------------------------------


class Net(nnx.Module):
    """One weight, and a patch that a copy loses."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.float32(1.0))
        self.calls: tuple[str, ...] = ()

    def __call__(self, x):
        return self.w * x

    def modify_ema_methods(self) -> None:
        log.append((self, float(self.w[...])))


log: list[Any] = []


def trained(ema: EMAHook, net: nnx.Module, steps: int) -> Toy:
    toy = Toy(ema)
    toy.bind(ema)
    ema.attach(ModuleCopies(net))
    toy.trace([1.0] * steps)
    return toy


def test_no_averaged_model_before_there_is_one() -> None:
    """nvalchemi:102 (nothing is handed out before the first average either)"""
    with pytest.raises(RuntimeError, match="takes part in no run yet"):
        EMAHook().get_averaged_model()
    ema = EMAHook(start_step=10)
    toy = trained(ema, Net(), 3)
    assert ema.averages(toy.slot(ema)) is None
    with pytest.raises(RuntimeError, match="first update averaged is number 10 or later"):
        ema.get_averaged_model()
    toy.trace([1.0] * 7)
    params, _ = ema.averages(toy.slot(ema)) or pytest.fail("no averages")
    assert params["w"] == toy.w


def test_the_averaged_model_shares_nothing() -> None:
    """nvalchemi:102"""
    ema, net = EMAHook(decay=0.9), Net()
    trained(ema, net, 4)
    model = ema.get_averaged_model()
    assert model.n_averaged == 4
    assert float(model.module.w[...]) == pytest.approx(0.72208)
    assert float(model(2.0)) == pytest.approx(1.44416)
    assert float(net.w[...]) == 1.0
    assert model.module.w is not net.w


def test_the_copy_is_adapted_once_and_before_weights_go_in() -> None:
    """nvalchemi:106"""
    log.clear()
    ema, net = EMAHook(decay=0.9), Net()
    toy = trained(ema, net, 2)
    first = ema.get_averaged_model().module
    toy.step(1.0)
    assert ema.get_averaged_model().module is first
    assert len(log) == 1
    copy, weight = log[0]
    assert copy is first
    assert copy is not net
    assert weight == 1.0


def test_an_attribute_of_that_name_that_is_no_method_is_ignored() -> None:
    """nvalchemi:106"""

    class Plain(nnx.Module):
        modify_ema_methods = "no"

        def __init__(self) -> None:
            self.w = nnx.Param(jnp.float32(1.0))

    ema = EMAHook(decay=0.9)
    trained(ema, Plain(), 1)
    assert float(ema.get_averaged_model().module.w[...]) == pytest.approx(0.8)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_resume_continues_the_averages() -> None:
    """nvalchemi:107 case:D02 (the count is the stored one)"""
    whole, first, second = (Toy(EMAHook(decay=0.9), optimizer="adam") for _ in range(3))
    whole.trace([1.0] * 3)
    first.trace([1.0] * 2)
    second.carry = second.programs.load_named(dict(first.programs.named(first.carry)))
    second.trace([1.0])
    assert second.leaves() == whole.leaves()
    assert second.slot(second.plan.update[0])["updates"] == 3


def test_state_dict_holds_fields_count_and_weights() -> None:
    """nvalchemi:107 nvalchemi:163 (fields first, arrays after; and back into a live run)"""
    ema = EMAHook(decay=0.9)
    assert isinstance(ema, CheckpointableHook)
    toy = Toy(ema)
    toy.bind(ema)
    toy.trace([1.0] * 2)
    stored = ema.state_dict()
    fields = {"model_key": "main", "decay": 0.9, "update_every": 1, "start_step": 0, "use_buffers": True}
    assert {name: stored[name] for name in fields} == fields
    assert stored["num_updates"] == 2
    assert stored["averaged_model_state"]["w"] == pytest.approx(0.784)
    toy.trace([1.0])
    ema.load_state_dict(stored)
    assert toy.slot(ema)["average"]["w"] == pytest.approx(0.784)
    assert toy.slot(ema)["updates"] == 2


def test_a_state_loaded_early_waits_for_the_run() -> None:
    """nvalchemi:107 (kept until the run begins, and given out again meanwhile)"""
    stored = {"num_updates": 5, "averaged_model_state": {"w": np.float32(0.5)}}
    ema = EMAHook(decay=0.9)
    ema.load_state_dict(stored)
    again = ema.state_dict()
    assert again["num_updates"] == 5
    assert again["averaged_model_state"] == stored["averaged_model_state"]
    toy = Toy(ema)
    toy.bind(ema)
    toy.step(1.0)
    slot = toy.slot(ema)
    assert slot["updates"] == 6
    assert slot["average"]["w"] == pytest.approx(0.9 * 0.5 + 0.1 * 0.8)


def test_a_state_loaded_between_two_runs_goes_into_the_next() -> None:
    """(a hook that was bound before; a run that went on from the loaded state has used it up)"""
    stored = {"num_updates": 5, "averaged_model_state": {"w": np.float32(0.5)}}
    ema = EMAHook(decay=0.9)
    first, second, third = Toy(ema), Toy(ema), Toy(ema)
    first.bind(ema)
    first.trace([1.0] * 2)
    ema.load_state_dict(stored)
    second.bind(ema)
    second.step(1.0)
    slot = second.slot(ema)
    assert slot["updates"] == 6
    assert slot["average"]["w"] == pytest.approx(0.9 * 0.5 + 0.1 * 0.8)
    ema.load_state_dict(stored)
    second.step(1.0)
    third.bind(ema)
    assert third.slot(ema)["updates"] == 0


def test_another_field_is_a_conflict_with_both_values() -> None:
    """nvalchemi:108 nvalchemi:163"""
    with pytest.raises(ValueError, match=r"EMAHook checkpoint conflict: decay is 0.9 in the checkpoint and 0.999 here"):
        EMAHook().load_state_dict({"decay": 0.9, "num_updates": 3})
    EMAHook().load_state_dict({"num_updates": 3})
    EMAHook(num_updates=1).load_state_dict({"num_updates": 3})


def test_a_state_without_weights_clears_and_one_without_a_count_keeps() -> None:
    """nvalchemi:109"""
    ema = EMAHook(decay=0.9)
    toy = Toy(ema)
    toy.bind(ema)
    toy.trace([1.0] * 2)
    ema.load_state_dict({})
    slot = toy.slot(ema)
    assert (slot["updates"], slot["held"]) == (2, 0)
    assert "averaged_model_state" not in ema.state_dict()
    toy.step(1.0)
    assert toy.slot(ema)["average"]["w"] == np.float32(toy.w)
    assert toy.slot(ema)["updates"] == 3

    pending = EMAHook()
    pending.load_state_dict({"averaged_model_state": {"w": 1.0}})
    pending.load_state_dict({})
    assert "averaged_model_state" not in pending.state_dict()


def test_weights_of_another_model_are_refused() -> None:
    ema = EMAHook()
    toy = Toy(ema)
    toy.bind(ema)
    with pytest.raises(ValueError, match="only the checkpoint has 'v'"):
        ema.load_state_dict({"averaged_model_state": {"w": 1.0, "v": 1.0}})


def test_the_average_has_the_type_of_its_weight() -> None:
    ema = EMAHook(decay=0.9)
    toy = Toy(MixedPrecisionHook("fp16"), SkipNonFinite(), SpikeSkipHook(), ema, w={"w": jnp.bfloat16(1.0)})
    toy.trace([1.0] * 3)
    assert jax.tree.leaves(toy.slot(ema)["average"])[0].dtype == jnp.bfloat16
