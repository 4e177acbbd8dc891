"""Optimizers: golden numbers, bit-equality with optax, masks, groups, 16-bit weights, clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_jax.core.errors import ConfigError, ModelError
from nnx_jax.optim import (
    Group,
    Optimizer,
    OptState,
    build_optimizer,
    build_schedule,
    decay_mask,
    decays,
    describe,
    make_optimizer,
    make_schedule,
    optimizer_names,
    register_optimizer,
    set_rate,
)
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec, optimizer_kinds
from nnx_jax.params.scheduler import NNSchedulerParams

W = "layer.kernel"


def walk(optimizer: Optimizer, params: dict, grads: list[dict]) -> tuple[dict, OptState]:
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    for grad in grads:
        params, state = step(grad, state, params)
    return params, state


def one(kind: str, weight: float, grad: float, **settings: Any) -> float:
    params = {W: jnp.array([[weight]], jnp.float32)}
    new, _ = walk(make_optimizer(kind, params, **settings), params, [{W: jnp.array([[grad]], jnp.float32)}])
    return float(new[W][0, 0])


@pytest.mark.parametrize("kind, wanted", [("adamw", 1.96), ("adam", 1.9), ("lion", 1.96), ("sgd", 1.96)])
def test_coupled_and_decoupled_decay(kind: str, wanted: float) -> None:
    """Rate 0.1, decay 0.2, betas (0, 0), gradient 0, weight 2: AdamW 2 - 0.1*0.2*2, Adam 2 - 0.1*sign(0.4)."""
    assert one(kind, 2.0, 0.0, rate=0.1, weight_decay=0.2, betas=(0.0, 0.0)) == pytest.approx(wanted, abs=1e-6)


def grads_and_params() -> tuple[dict, list[dict]]:
    rng = np.random.default_rng(0)
    shapes = {"a.kernel": (3, 4), "a.bias": (4,), "norm_1.scale": (4,), "embed.embedding": (5, 4)}

    def draw() -> dict:
        return {path: jnp.asarray(rng.normal(size=shape), jnp.float32) for path, shape in shapes.items()}

    return draw(), [draw() for _ in range(5)]


def optax_walk(make: Callable[[], optax.GradientTransformation], params: dict, grads: list[dict]) -> dict:
    tx = make()
    state = tx.init(params)

    @jax.jit
    def step(grad: dict, state: Any, params: dict) -> tuple[dict, Any]:
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state  # type: ignore[return-value]

    for grad in grads:
        params, state = step(grad, state, params)
    return params


MASK = {"a.kernel": True, "a.bias": False, "norm_1.scale": False, "embed.embedding": True}
CHAINS: dict[str, tuple[dict[str, Any], Callable[[], optax.GradientTransformation]]] = {
    "adam": ({}, lambda: optax.adam(0.01)),
    "adam-l2": (
        {"weight_decay": 0.1},
        lambda: optax.chain(optax.add_decayed_weights(0.1, MASK), optax.adam(0.01)),
    ),
    "adamw": (
        {"weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6},
        lambda: optax.adamw(0.01, 0.8, 0.9, 1e-6, weight_decay=0.1, mask=MASK),
    ),
    "lion": (
        {"weight_decay": 0.1, "betas": (0.9, 0.99)},
        lambda: optax.lion(0.01, 0.9, 0.99, weight_decay=0.1, mask=MASK),
    ),
    "sgd": ({}, lambda: optax.sgd(0.01)),
    "sgd-momentum": ({"momentum": 0.9}, lambda: optax.sgd(0.01, 0.9)),
    "sgd-nesterov": (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        lambda: optax.chain(optax.add_decayed_weights(0.1, MASK), optax.sgd(0.01, 0.9, nesterov=True)),
    ),
    "rmsprop": ({"options": {"decay": 0.8, "momentum": 0.5}}, lambda: optax.rmsprop(0.01, 0.8, momentum=0.5)),
    "lamb": ({"weight_decay": 0.1}, lambda: optax.lamb(0.01, weight_decay=0.1, mask=MASK)),
    "adafactor": (
        {"options": {"min_dim_size_to_factor": 2}},
        lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_equal_to_the_optax_chain_bit_for_bit(name: str) -> None:
    settings, make = CHAINS[name]
    params, grads = grads_and_params()
    mine, state = walk(make_optimizer(name.split("-")[0], params, rate=0.01, **settings), params, grads)
    theirs = optax_walk(make, params, grads)
    for path in params:
        np.testing.assert_array_equal(mine[path], theirs[path], err_msg=path)
    assert int(state.count) == 5


@pytest.mark.parametrize("kind", ["adamw", "adadelta"])
def test_a_schedule_reads_the_optimizers_count(kind: str) -> None:
    params, grads = grads_and_params()
    schedule = make_schedule("linear_warmup_decay", 0.1, 8, warmup_steps=3)
    optimizer = make_optimizer(kind, params, schedule=schedule)
    mine, state = walk(optimizer, params, grads)
    if kind == "adamw":
        theirs = optax_walk(lambda: optax.adamw(schedule, weight_decay=0.0), params, grads)
    else:
        theirs = optax_walk(lambda: optax.adadelta(schedule), params, grads)
    for path in params:
        np.testing.assert_allclose(mine[path], theirs[path], rtol=1e-6)
    assert float(state.rate) == pytest.approx(schedule.at(4))


def test_rates_follow_updates_not_microbatches() -> None:
    """case:B01 - lr(n) = 0.1 (n + 1), gradient -1: 4 updates give weight 1.0, and `rate` is the last one used."""
    params = {W: jnp.zeros((1, 1))}
    optimizer = make_optimizer("sgd", params, schedule=lambda n: 0.1 * (n + 1))
    new, state = walk(optimizer, params, [{W: -jnp.ones((1, 1))}] * 4)
    assert float(new[W][0, 0]) == pytest.approx(1.0, rel=1e-6)
    assert float(state.rate) == pytest.approx(0.4)
    assert state.count.dtype == jnp.int32


def test_the_shown_rate_is_the_applied_one() -> None:
    """case:B08 - peak 0.1, warm-up 4: after one update of gradient -1 the weight and `rate` are both 0.025."""
    params = {W: jnp.zeros((1, 1))}
    schedule = make_schedule("linear_warmup_decay", 0.1, 40, warmup_steps=4)
    new, state = walk(make_optimizer("sgd", params, schedule=schedule), params, [{W: -jnp.ones((1, 1))}])
    assert float(new[W][0, 0]) == float(state.rate) == pytest.approx(0.025)


def test_the_host_sets_the_rate_without_a_new_compile() -> None:
    params = {W: jnp.zeros((1, 1))}
    optimizer = make_optimizer("sgd", params, rate=0.1)
    traces = []

    @jax.jit
    def step(grads: dict, state: OptState, params: dict) -> tuple[dict, OptState]:
        traces.append(1)
        return optimizer.update(grads, state, params)

    state = optimizer.init(params)
    for rate in (0.1, 0.2, 0.3):
        params, state = step({W: -jnp.ones((1, 1))}, set_rate(state, rate), params)
    assert float(params[W][0, 0]) == pytest.approx(0.6)
    assert len(traces) == 1


def k01() -> dict:
    return {
        "kernel": jnp.ones((2, 2)),
        "bias": jnp.ones(2),
        "ln_1.scale": jnp.ones(2),
        "embed.embedding": jnp.ones((3, 2)),
    }


def test_decay_leaves_biases_and_norms() -> None:
    """case:K01 - AdamW 0.1, decay 0.1, no gradient: kernel and embedding 0.99, bias and the norm called ln_1 stay."""
    params = k01()
    new, _ = walk(
        make_optimizer("adamw", params, rate=0.1, weight_decay=0.1), params, [jax.tree.map(jnp.zeros_like, params)]
    )
    assert {path: round(float(value.ravel()[0]), 6) for path, value in new.items()} == {
        "kernel": 0.99,
        "bias": 1.0,
        "ln_1.scale": 1.0,
        "embed.embedding": 0.99,
    }


@pytest.mark.parametrize(
    "path, ndim, wanted",
    [
        ("layers.0.kernel", 2, True),
        ("conv.kernel", 4, True),
        ("embed.embedding", 2, True),
        ("layers.bias", 2, False),  # biases of stacked layers
        ("blocks.ln_f.weight", 2, False),
        ("blocks.norm_1.scale", 2, False),
        ("LayerNorm_0.kernel", 2, False),
        ("bn1.kernel", 2, False),
        ("bnb.0.kernel", 2, True),
        ("lnear.kernel", 2, True),
        ("w", 1, False),
        ("w", 0, False),
    ],
)
def test_the_auto_rule(path: str, ndim: int, wanted: bool) -> None:
    assert decays(path, ndim) is wanted


def test_masks_that_match_nothing_are_errors() -> None:
    """case:K01 - a mask, or one pattern of it, that matches no parameter is an error naming the nearest path."""
    params = k01()
    assert decay_mask(("k*", "bias"), params) == {
        "kernel": True,
        "bias": True,
        "ln_1.scale": False,
        "embed.embedding": False,
    }
    for make in (
        lambda: decay_mask(("kernel", "kernels"), params),
        lambda: make_optimizer("adamw", params, weight_decay=0.1, mask=("kernels",)),
        lambda: make_optimizer("adamw", params, mask=("kernels",)),
    ):
        with pytest.raises(
            ConfigError, match="decay_mask pattern 'kernels' matches no parameter; did you mean 'kernel'"
        ):
            make()
    vector = {"w": jnp.ones(3)}
    with pytest.raises(ConfigError, match="decay_mask 'auto' matches no parameter .*write decay_mask: all"):
        make_optimizer("adamw", vector, weight_decay=0.1)
    make_optimizer("adamw", vector)  # no decay, nothing to match
    assert decay_mask("all", vector) == {"w": True}
    with pytest.raises(ConfigError, match="param_groups pattern 'head.*' matches no parameter"):
        make_optimizer("adam", params, groups=[Group(("head.*",), 2.0)])


def test_decay_happens_once_an_update() -> None:
    """One committed update with gradient 0, weight 1, rate 0.1, decay 0.1 decays once: 0.99, count 1."""
    params = {"w": jnp.float32(1.0)}
    new, state = walk(make_optimizer("adamw", params, rate=0.1, weight_decay=0.1, mask="all"), params, [{"w": 0.0}])
    assert float(new["w"]) == pytest.approx(0.99)
    assert int(state.count) == 1


def test_groups_first_match_wins() -> None:
    """nnx:B036 - groups in order, the first match wins and none merge; the rest is the default group."""
    params = {"a.kernel": jnp.ones((1, 1)), "a.bias": jnp.ones(1), "b.kernel": jnp.ones((1, 1))}
    spec = NNOptimParams(
        kind="sgd",
        momentum=0.0,
        max_lr=0.1,
        weight_decay=0.0,
        param_groups=(
            NNParamGroupSpec(patterns="*.bias", lr_scale=0.5, weight_decay=1.0),
            NNParamGroupSpec(patterns=("a.*",), max_lr=0.4),
        ),
    )
    grads = jax.tree.map(jnp.ones_like, params)
    new, _ = walk(build_optimizer(spec, None, params), params, [grads])
    # a.bias: 1 - 0.05 * (1 + 1 * 1) although the auto mask leaves biases out; a.kernel: 1 - 0.4; b.kernel: 1 - 0.1
    assert {k: round(float(v.ravel()[0]), 6) for k, v in new.items()} == {
        "a.kernel": 0.6,
        "a.bias": 0.9,
        "b.kernel": 0.9,
    }


def test_groups_scale_the_schedule() -> None:
    params = {"a": jnp.zeros((1, 1)), "b": jnp.zeros((1, 1))}
    groups = [Group(("b",), 0.5)]
    for kind, options in [("sgd", {}), ("sign_sgd", {})]:
        optimizer = make_optimizer(kind, params, schedule=lambda n: 0.1 * (n + 1), groups=groups, options=options)
        new, _ = walk(optimizer, params, [{"a": -jnp.ones((1, 1)), "b": -jnp.ones((1, 1))}] * 2)
        assert [round(float(v[0, 0]), 6) for v in new.values()] == [0.3, 0.15]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_sixteen_bit_weights_are_updated_in_float32(dtype: Any) -> None:
    """case:C09 - 16-bit weights, gradient exactly 0, Adam: nothing moves and nothing is NaN; state is float32."""
    params = {W: jnp.array([1.0, -2.0, 0.5], dtype)}
    grads = {W: jnp.zeros(3, dtype)}
    new, state = walk(make_optimizer("adam", params, rate=1e-3), params, [grads])
    assert np.asarray(new[W], np.float32).tolist() == [1.0, -2.0, 0.5]
    assert new[W].dtype == dtype
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.inner)} == {"int32", "float32"}
    assert [name for name, leaf in describe(state).items() if leaf["dtype"] == "float16"] == []


def test_frozen_parameters_have_no_state() -> None:
    """Parameters that are not handed over are neither moved nor given moments."""
    params = {"head.kernel": jnp.ones((2, 2))}
    state = make_optimizer("adam", params).init(params)
    assert describe(state) == {
        "count": {"shape": [], "dtype": "int32"},
        "rate": {"shape": [], "dtype": "float32"},
        "inner/count": {"shape": [], "dtype": "int32"},
        "inner/mu/head.kernel": {"shape": [2, 2], "dtype": "float32"},
        "inner/nu/head.kernel": {"shape": [2, 2], "dtype": "float32"},
    }


def test_integers_are_not_trained() -> None:
    """case:L09 - an integer variable can not be a trained parameter."""
    with pytest.raises(ModelError, match="parameter 'counter' is int32; only floating-point"):
        make_optimizer("sgd", {"counter": jnp.zeros((), jnp.int32)})


def test_clip_thresholds_are_checked_by_the_configuration() -> None:
    """case:C08 - clip 0, negative and infinite are refused; None means no clipping."""
    for wrong in (0, 0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="grad_clip_norm"):
            NNOptimParams(grad_clip_norm=wrong)
    assert NNOptimParams(grad_clip_norm=None).grad_clip_norm is None


@pytest.mark.parametrize("kind", [name for name in optimizer_names() if not name.startswith("test_")])
def test_every_kind_lowers_a_parabola(kind: str) -> None:
    """Every name builds from its spec, keeps its state's layout from update to update, and goes downhill."""
    params = {W: jnp.full((2, 3), 2.0)}
    optimizer = build_optimizer(NNOptimParams(kind=kind, max_lr=0.01), None, params)
    state = optimizer.init(params)
    layout = describe(state)
    step = jax.jit(lambda s, p: optimizer.update(jax.tree.map(lambda w: 2 * w, p), s, p))
    for _ in range(3):
        params, state = step(state, params)
    assert describe(state) == layout
    assert float(jnp.max(params[W])) < 2.0
    assert bool(jnp.all(jnp.isfinite(params[W])))


def test_specs_and_factories_know_the_same_names() -> None:
    assert sorted(optimizer_names()) == optimizer_kinds()


def test_names_and_options_are_checked() -> None:
    params = {W: jnp.ones((1, 1))}
    with pytest.raises(ConfigError, match="there is no optimizer 'adamm'; did you mean 'adam'"):
        make_optimizer("adamm", params)
    with pytest.raises(ConfigError, match="'rmsprop' has no option 'decya'; did you mean 'decay'"):
        make_optimizer("rmsprop", params, options={"decya": 0.9})
    with pytest.raises(ConfigError, match="'adam' takes its settings as fields"):
        make_optimizer("adam", params, options={"b1": 0.9})
    with pytest.raises(ConfigError, match="'adagrad' takes no masked weight decay; write weight_decay: 0"):
        make_optimizer("adagrad", params, weight_decay=0.1)
    with pytest.raises(ConfigError, match="'lamb' has one weight decay for all"):
        make_optimizer("lamb", params, groups=[Group((W,), 1.0, 0.1)])


def test_an_optimizer_of_the_users() -> None:
    register_optimizer("test_plain", lambda learning_rate: optax.sgd(learning_rate))
    with pytest.raises(ConfigError, match="'test_plain' is taken"):
        register_optimizer("test_plain", lambda learning_rate: optax.sgd(learning_rate))
    params = {W: jnp.ones((1, 1))}
    new, _ = walk(build_optimizer(NNOptimParams(kind="test_plain", max_lr=0.5), None, params), params, [params])
    assert float(new[W][0, 0]) == 0.5


def test_spec_to_update_clock() -> None:
    """A spec's optimizer and schedule together: base 0.12 over 8 updates, the rates of nnx:B045 as they are applied."""
    params = {W: jnp.zeros((1, 1))}
    spec = NNOptimParams(kind="sgd", max_lr=0.12, momentum=0.0)
    schedule = build_schedule(NNSchedulerParams(kind="linear_warmup_decay", warmup_steps=3), spec.max_lr, 8)
    optimizer = build_optimizer(spec, schedule, params)
    state, used = optimizer.init(params), []
    step = jax.jit(optimizer.update)
    for _ in range(8):
        params, state = step({W: jnp.zeros((1, 1))}, state, params)
        used.append(float(state.rate))
    assert used == pytest.approx([0.04, 0.08, 0.12, 0.12, 0.096, 0.072, 0.048, 0.024], rel=1e-6)
