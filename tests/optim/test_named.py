"""Named optimizers: who owns what, and that each does exactly what it would do alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, StepError
from nnx_jax.optim import (
    OptState,
    build_epoch_schedules,
    build_optimizer,
    build_schedules,
    describe,
    find_owners,
    named_optimizers,
)
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.trainer import NNTrainerParams

PATHS = ("dec.kernel", "dec.bias", "enc.kernel", "enc.bias")


def owning(*patterns: str, **fields: Any) -> NNOptimParams:
    return NNOptimParams(param_groups=[{"patterns": list(patterns)}], **fields)


def draw(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {"dec.kernel": (8, 32), "dec.bias": (32,), "enc.kernel": (3, 4), "enc.bias": (4,)}
    return {path: jnp.asarray(rng.normal(size=shape), jnp.float32) for path, shape in shapes.items()}


def of(values: dict[str, Any], head: str) -> dict[str, Any]:
    return {path: value for path, value in values.items() if path.startswith(head)}


def trainer(**fields: Any) -> NNTrainerParams:
    optims = {"enc": owning("enc.*", max_lr=0.1), "dec": owning("dec.*", max_lr=0.2)}
    return NNTrainerParams(**{"n_epochs": 2, "optims": optims} | fields)


def equal(left: Any, right: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), left, right))


def plain(values: tuple[float, ...]) -> dict[str, jax.Array]:
    """Two parameters of two numbers each: a.w, b.w."""
    return {"a.w": jnp.array(values[:2], jnp.float32), "b.w": jnp.array(values[2:], jnp.float32)}


def sgd(**fields: Any) -> dict[str, NNOptimParams]:
    """Optimizers a and b: plain descent at rate 1, with settings of their own."""
    base = {"kind": "sgd", "momentum": 0.0, "max_lr": 1.0}
    return {name: owning(f"{name}.*", **{**base, **fields.get(name, {})}) for name in ("a", "b")}


# -- ownership --------------------------------------------------------------------------------------------------------


def test_every_parameter_has_one_owner() -> None:
    owners = find_owners({"enc": owning("enc.*"), "dec": owning("dec.kernel", "dec.*")}, PATHS[:3])
    assert owners.owned == {"dec": ("dec.kernel", "dec.bias"), "enc": ("enc.kernel",)}
    assert list(owners.owned) == ["dec", "enc"]
    assert owners.unowned == ()


def test_one_optimizer_alone_owns_everything() -> None:
    assert find_owners({"main": NNOptimParams()}, PATHS).owned == {"main": PATHS}


@pytest.mark.parametrize(
    ("optims", "message"),
    [
        (
            {"b": owning("dec.*", "enc.*"), "a": owning("enc.b*")},
            r"trainer\.optims: parameter 'enc\.bias' is claimed by 'a' \(by 'enc\.b\*'\) and 'b' \(by 'enc\.\*'\)",
        ),
        (
            {"a": owning("enc.*"), "b": owning("dec.kernel", "dec.bais")},
            r"trainer\.optims\.b\.param_groups\[0\]: pattern 'dec\.bais' matches no parameter.*mean 'dec\.bias'",
        ),
        ({"a": owning("enc.*"), "b": NNOptimParams()}, r"trainer\.optims\.b\.param_groups: is empty"),
        ({"main": owning("head.*")}, r"trainer\.optims\.main\.param_groups\[0\]: pattern 'head\.\*' matches no"),
    ],
)
def test_ownership_that_is_not_strict_is_refused(optims: dict[str, NNOptimParams], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_optimizers(optims, {}, draw(0))


def test_what_nobody_owns_is_not_trained_and_told() -> None:
    """nnx:B036: unmatched trainable parameters are excluded in a Trainer, here those of a single optimizer, too."""
    params, told = draw(0), r"no optimizer owns parameter 'enc\.kernel' and 1 more, so it is not trained; add a pattern"
    with pytest.warns(UserWarning, match=told):
        optimizer = named_optimizers({"main": owning("dec.*")}, {}, params)
    state = optimizer.init(params)
    assert not [path for path in describe(state) if "enc" in path]
    moved, _ = optimizer.update(draw(1), state, params)
    assert list(moved) == list(params)
    assert equal(of(moved, "enc"), of(params, "enc"))
    assert not any(np.array_equal(moved[path], params[path]) for path in ("dec.kernel", "dec.bias"))


def test_errors_of_an_optimizer_name_it() -> None:
    optims = {"enc": owning("enc.bias", kind="adamw"), "dec": owning("dec.*", "enc.kernel")}
    with pytest.raises(ConfigError, match=r"trainer\.optims\.enc: decay_mask 'auto' matches no parameter"):
        named_optimizers(optims, {}, draw(0))


# -- each as if alone -------------------------------------------------------------------------------------------------


def test_each_does_bit_for_bit_what_it_would_do_alone() -> None:
    """Kinds, decay, groups with factors, schedules: five compiled updates against each by itself."""
    groups = [{"patterns": "dec.bias", "lr_scale": 3.0}, {"patterns": "dec.*"}]
    params = trainer(
        optims={
            "enc": owning("enc.*", kind="adamw", max_lr=0.1),
            "dec": NNOptimParams(kind="sgd", max_lr=0.2, weight_decay=0.01, param_groups=groups),
        },
        schedulers={"enc": {"kind": "warmup_cosine", "clock": "optimizer_update", "total_steps": 5}},
    )
    schedules = build_schedules(params, None)
    start, grads = draw(0), [draw(seed) for seed in range(1, 6)]
    both = named_optimizers(params.optims, schedules, start)
    values, state, step = start, both.init(start), jax.jit(both.update)
    for grad in grads:
        values, state = step(grad, state, values)
    for name in ("enc", "dec"):
        alone = build_optimizer(params.optims[name], schedules.get(name), of(start, name))
        mine, own, update = of(start, name), alone.init(of(start, name)), jax.jit(alone.update)
        for grad in grads:
            mine, own = update(of(grad, name), own, mine)
        assert equal(of(values, name), mine)
        assert equal(state.inner[name], own)
    assert isinstance(state, OptState)
    assert int(state.count) == 5


def test_each_clips_its_own_parameters_by_its_own_norm() -> None:
    """nnx:B091: gradients (3, 4) and (6, 8), divided already, limits 1 and 20, momentum 0.5.

    a: (0.6, 0.8) each update, by momentum 1.5 times that in the second; b: norm 10 is below its limit. One norm over
    both would be sqrt(125) = 11.18, and a would move by a ninth of its gradient or b would be clipped, too.
    """
    own = {"momentum": 0.5}
    optims = sgd(a={**own, "grad_clip_norm": 1.0}, b={**own, "grad_clip_norm": 20.0})
    optimizer, params = named_optimizers(optims, {}, plain((0, 0, 0, 0))), plain((0, 0, 0, 0))
    state, grads = optimizer.init(params), plain((3, 4, 6, 8))
    params, state = optimizer.update(grads, state, params)
    assert params["a.w"].tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)
    assert params["b.w"].tolist() == [-6.0, -8.0]
    params, state = jax.jit(optimizer.update)(grads, state, params)
    assert params["a.w"].tolist() == pytest.approx([-0.6 * 2.5, -0.8 * 2.5], rel=1e-6)
    assert params["b.w"].tolist() == [-15.0, -20.0]


def test_one_without_a_limit_is_not_clipped_with_the_other() -> None:
    optimizer = named_optimizers(sgd(b={"grad_clip_norm": 5.0}), {}, plain((0, 0, 0, 0)))
    moved, _ = optimizer.update(plain((30, 40, 6, 8)), optimizer.init(plain((0,) * 4)), plain((0,) * 4))
    assert moved["a.w"].tolist() == [-30.0, -40.0]
    assert moved["b.w"].tolist() == pytest.approx([-3.0, -4.0], rel=1e-6)


# -- one at a time ----------------------------------------------------------------------------------------------------


def test_updates_of_one_move_neither_the_other_nor_its_schedule() -> None:
    """nnx:B059 (the arithmetic): only "a" is on the update clock; updates of "b" never step it.

    Halving at every update of a: 1, 0.5. Gradient 1 throughout, so a moves by 1, then by 0.5, whatever b does between.
    """
    half = {"kind": "step", "step_size": 1, "factor": 0.5, "clock": "optimizer_update"}
    given = trainer(optims=sgd(b={"max_lr": 0.25}), schedulers={"a": half})
    optimizer = named_optimizers(given.optims, build_schedules(given, None), plain((0,) * 4))
    params, grads = plain((0,) * 4), plain((1,) * 4)
    state = optimizer.init(params)
    one = jax.jit(optimizer.update_one, static_argnums=0)
    for name, a, b in (("b", 0.0, -0.25), ("b", 0.0, -0.5), ("a", -1.0, -0.5), ("b", -1.0, -0.75), ("a", -1.5, -0.75)):
        before = state.inner
        params, state = one(name, grads, state, params)
        assert (params["a.w"].tolist(), params["b.w"].tolist()) == ([a, a], [b, b])
        other = {"a": "b", "b": "a"}[name]
        assert equal(state.inner[other], before[other])
    assert [int(state.count), int(state.inner["a"].count), int(state.inner["b"].count)] == [5, 2, 3]
    assert {name: float(rate) for name, rate in optimizer.rates(state).items()} == {"a": 0.5, "b": 0.25}


def test_one_needs_only_its_own_gradients() -> None:
    optimizer, params = named_optimizers(sgd(), {}, plain((0,) * 4)), plain((0,) * 4)
    state = optimizer.init(params)
    moved, _ = optimizer.update_one("a", {"a.w": jnp.ones(2)}, state, params)
    assert (moved["a.w"].tolist(), moved["b.w"].tolist()) == ([-1.0, -1.0], [0.0, 0.0])
    with pytest.raises(StepError, match=r"parameter 'b\.w' of optimizer 'b' has no value here"):
        optimizer.update({"a.w": jnp.ones(2)}, state, params)


@pytest.mark.parametrize("call", ["update_one", "set_rates"])
def test_an_unknown_name_is_refused_with_the_known_ones(call: str) -> None:
    optimizer, params = named_optimizers(sgd(), {}, plain((0,) * 4)), plain((0,) * 4)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="there is no optimizer 'zz'; the optimizers are a, b"):
        optimizer.update_one("zz", params, state, params) if call == "update_one" else optimizer.set_rates(
            state, {"zz": 0.1}
        )


# -- rates ------------------------------------------------------------------------------------------------------------


def test_the_host_sets_rates_by_name_without_a_new_compile() -> None:
    optimizer, params = named_optimizers(sgd(), {}, plain((0,) * 4)), plain((0,) * 4)
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    _, state = step(plain((1,) * 4), state, params)
    assert float(state.rate) == 1.0
    state = optimizer.set_rates(state, {"b": 0.5})
    assert float(state.rate) == 1.0  # that of the first by name
    state = optimizer.set_rates(state, {"a": 0.125})
    assert float(state.rate) == 0.125
    moved, state = step(plain((1,) * 4), state, params)
    assert (moved["a.w"].tolist(), moved["b.w"].tolist()) == ([-0.125] * 2, [-0.5] * 2)
    assert {name: float(rate) for name, rate in optimizer.rates(state).items()} == {"a": 0.125, "b": 0.5}
    assert step._cache_size() == 1


def test_the_state_can_be_donated() -> None:
    """No buffer is in it twice, neither at first nor after an update nor after `set_rates`."""
    optimizer, params = named_optimizers(sgd(), {}, plain((0,) * 4)), plain((0,) * 4)
    step = jax.jit(optimizer.update, donate_argnums=(1, 2))
    state = optimizer.init(params)
    for _ in range(2):
        params, state = step(plain((1,) * 4), state, params)
        state = optimizer.set_rates(state, {"a": 0.5})
    assert params["a.w"].tolist() == [-1.5, -1.5]


CLOCKS = {
    "enc": {"kind": "step", "step_size": 1, "factor": 0.5, "clock": "optimizer_update"},
    "dec": {"kind": "step", "step_size": 1, "factor": 0.5},
}


def test_every_schedule_is_on_its_own_clock() -> None:
    given = trainer(schedulers=CLOCKS)
    updates, epochs = build_schedules(given, 10), build_epoch_schedules(given, 2)
    assert (list(updates), list(epochs)) == (["enc"], ["dec"])
    assert [updates["enc"].at(k) for k in range(3)] == pytest.approx([0.1, 0.05, 0.025])
    assert [epochs["dec"].rate, epochs["dec"].step(), epochs["dec"].step()] == pytest.approx([0.2, 0.1, 0.05])
    constant = build_epoch_schedules(trainer(), 2)
    assert [constant["enc"].rate, constant["enc"].step()] == [0.1, 0.1]


def test_schedules_that_are_not_stepped_leave_every_rate() -> None:
    """nnx:B061 (of schedules): with `auto_step_schedulers=False` neither clock has anything to move.

    The same trainer with it on moves both, which the test before shows.
    """
    given = trainer(schedulers=CLOCKS, auto_step_schedulers=False)
    assert build_schedules(given, 10) == build_epoch_schedules(given, 2) == {}
    optimizer, params = named_optimizers(given.optims, build_schedules(given, 10), draw(0)), draw(0)
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    for seed in range(1, 4):
        params, state = step(draw(seed), state, params)
        assert {name: float(rate) for name, rate in optimizer.rates(state).items()} == {
            "dec": pytest.approx(0.2),
            "enc": pytest.approx(0.1),
        }


def test_a_schedule_without_a_length_names_its_optimizer() -> None:
    cosine = {"dec": {"kind": "cosine", "clock": "optimizer_update"}}
    with pytest.raises(ConfigError, match=r"trainer\.schedulers\.dec: the length of this run is not known.*give T_max"):
        build_schedules(trainer(schedulers=cosine), None)
    with pytest.raises(ConfigError, match=r"trainer\.schedulers\.dec: the length of this run is not known"):
        build_epoch_schedules(trainer(schedulers={"dec": {"kind": "cosine"}}), None)


def test_plateaus_take_the_direction_of_the_monitor() -> None:
    given = trainer(schedulers={"dec": {"kind": "reduce_on_plateau", "patience": 0, "factor": 0.5}})
    made = build_epoch_schedules(given, None, monitor_mode="max", min_delta=0.1)["dec"]
    assert [made.step(0.5), made.step(0.7), made.step(0.75)] == pytest.approx([0.2, 0.2, 0.1])


# -- state ------------------------------------------------------------------------------------------------------------


def test_the_topology_names_every_optimizer() -> None:
    """The layout that a stored state is compared with; it does not depend on the order of the mappings."""
    optims = {"b": owning("b.*", kind="sgd"), "a": owning("a.*", kind="sgd", momentum=0.0)}
    there = named_optimizers(optims, {}, plain((0,) * 4))
    back = named_optimizers(dict(reversed(optims.items())), {}, dict(reversed(plain((0,) * 4).items())))
    layout = describe(there.init(plain((0,) * 4)))
    assert list(layout) == [
        "count", "rate", "inner/a/count", "inner/a/rate", "inner/b/count", "inner/b/rate", "inner/b/inner/trace/b.w",
    ]  # fmt: skip
    assert describe(back.init(plain((0,) * 4))) == layout
