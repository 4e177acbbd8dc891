"""The optimizer_config of a TrainingLoop: what it means, what is wrong with it, and the rates of its schedules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_jax.backends.optimizers import read_optimizer
from nnx_jax.core.errors import ConfigError
from nnx_jax.params.optim import NNOptimParams
from tests.training_loop.scenes import Line, Writer, loop, model, weights


def test_no_configuration_is_adamw() -> None:
    """None and {} mean the same, and the loop says what (pipekit:F4)."""
    for empty in (None, {}):
        made = loop(optimizer_config=empty)
        assert dict(made.optimizer_config) == {"name": "adamw", "lr": 3e-4}
        assert made.get_config()["optimizer_config"] == {"name": "adamw", "lr": 3e-4}


def test_a_configuration_is_copied() -> None:
    """What is done to the caller's mapping later changes nothing, at any depth (pipekit:F4)."""
    given: dict[str, Any] = {"name": "adam", "lr": {"name": "cosine", "init_value": 0.1, "decay_steps": 10}}
    made = loop(optimizer_config=given)
    before = made.identity()
    given["name"] = "sgd"
    given["lr"]["init_value"] = 0.5
    assert made.optimizer_config["name"] == "adam"
    assert made.optimizer_config["lr"]["init_value"] == 0.1
    assert made.identity() == before
    with pytest.raises(TypeError, match="frozen"):
        made.optimizer_config["name"] = "sgd"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"name": "frodo", "lr": 1e-3}, r"Unknown optimizer 'frodo'.*adam.*adamw.*lion.*sgd"),
        ({"lr": 1e-3}, r"Unknown optimizer None"),
        ({"name": "adam", "lr": 1e-3, "learning_rate": 1e-3}, r"lr and learning_rate are given"),
        ({"name": "adam"}, r"no rate is given.*lr"),
        ({"name": "adam", "lr": 1e-3, "momentun": 0.9}, r"momentun"),
        ({"name": "adam", "lr": 1e-3, "momentum": 0.9}, r"momentum.*does not apply to adam"),
        ({"name": "adam", "lr": -1.0}, r"lr.*-1"),
        ({"name": "adam", "lr": "fast"}, r"lr.*fast"),
        ({"name": "rmsprop", "lr": 1e-3, "decai": 0.9}, r"rmsprop.*no option 'decai'.*decay"),
        ({"name": "sgd", "lr": 1e-3, "clip_norm": 1.0, "grad_clip_norm": 2.0}, r"clip_norm.*say the same"),
        ({"name": "sgd", "lr": {"name": "cosin", "init_value": 1.0}}, r"no schedule 'cosin'.*cosine"),
        ({"name": "sgd", "lr": {"name": "cosine", "init_value": 1.0}}, r"schedule 'cosine' needs decay_steps"),
        ({"name": "sgd", "lr": {"name": "cosine", "init_value": 1.0, "decay": 3}}, r"no option 'decay'"),
        ({"name": "sgd", "lr": {"name": "cosine", "init_value": 1.0, "decay_steps": -3}}, r"schedule 'cosine'"),
        (
            {
                "name": "sgd",
                "lr": {"name": "linear", "init_value": 0.0, "end_value": 1.0, "transition_steps": 9},
                "param_groups": [{"patterns": ["*.bias"], "max_lr": 0.1}],
            },
            r"param_groups.*lr_scale",
        ),
    ],
)
def test_what_is_wrong_is_told_when_the_loop_is_made(config: dict[str, Any], told: str) -> None:
    """Names, options and rates, before anything is compiled (pipekit:F5)."""
    with pytest.raises(ValueError, match=rf"(?s)TrainingLoop\.optimizer_config.*{told}"):
        loop(optimizer_config=config)


@pytest.mark.parametrize("config", [3, "adam", [1], lambda: None])
def test_an_optimizer_is_a_mapping_or_a_transformation(config: Any) -> None:
    with pytest.raises(TypeError, match="optimizer_config.*mapping or an optax transformation"):
        loop(optimizer_config=config)


def test_both_names_of_the_rate_mean_the_same() -> None:
    """(pipekit:F5)."""
    short = read_optimizer({"name": "adam", "lr": 1e-3})[0]
    assert read_optimizer({"name": "adam", "learning_rate": 1e-3})[0] == short
    assert short.max_lr == 1e-3


def test_an_optimizer_of_the_other_faces_means_here_what_it_means_there() -> None:
    """An NNOptimParams has defaults of its own (momentum 0.9 for sgd), a mapping those of optax (none)."""
    params = NNOptimParams(kind="sgd", max_lr=0.1, grad_clip_norm=2.0)
    made = loop(optimizer_config=params)
    assert read_optimizer(made.optimizer_config)[0] == params
    assert read_optimizer({"name": "sgd", "lr": 0.1})[0].momentum == 0.0
    with pytest.raises(ValueError, match="accumulate="):
        loop(optimizer_config=params.replace(accumulate_grad_batches=2))


# -- against optax ------------------------------------------------------------------------------------------------

UPDATES = 5


def by_optax(transformation: optax.GradientTransformation) -> dict[str, np.ndarray]:
    """Weights after five updates on all 64 rows, by optax and `jax.grad` alone."""
    start = {name: jnp.asarray(value) for name, value in weights(model()).items()}
    columns = Line().arrays()
    x, y = jnp.asarray(columns["x"]), jnp.asarray(columns["y"])
    layer = {value.shape: name.removesuffix(".kernel") for name, value in start.items()}
    hidden, last = layer[1, 16], layer[16, 1]

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        inner = jax.nn.relu(x @ params[f"{hidden}.kernel"] + params[f"{hidden}.bias"])
        return jnp.mean((inner @ params[f"{last}.kernel"] + params[f"{last}.bias"] - y) ** 2)

    state = transformation.init(start)
    for _ in range(UPDATES):
        change, state = transformation.update(jax.grad(loss)(start), state, start)
        start = optax.apply_updates(start, change)
    return {name: np.asarray(value) for name, value in start.items()}


def trained(config: Any, **more: Any) -> dict[str, np.ndarray]:
    return weights(loop(batch_size=64, max_steps=UPDATES, optimizer_config=config, **more)(None, None)[0])


KERNELS = lambda params: {name: "kernel" in name for name in params}  # noqa: E731


@pytest.mark.parametrize(
    ("config", "transformation"),
    [
        ({"name": "adamw", "lr": 0.1}, optax.adamw(0.1)),
        ({"name": "adamw", "lr": 0.1, "weight_decay": 0.5, "mask": ["*.kernel"], "clip_norm": 0.05},
         optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(0.1, weight_decay=0.5, mask=KERNELS))),
        (optax.chain(optax.clip(0.01), optax.rmsprop(0.05)), optax.chain(optax.clip(0.01), optax.rmsprop(0.05))),
    ],
    ids=["defaults", "chain keys", "transformation"],
)  # fmt: skip
def test_the_numbers_are_those_of_optax(config: Any, transformation: optax.GradientTransformation) -> None:
    """Optax's defaults, a clipped gradient, a mask for the decay, and any transformation as it is (pipekit:F7)."""
    writer = Writer()
    found, expected = trained(config, metric_writer=writer), by_optax(transformation)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    (record,) = [values for _, values in writer.records]
    assert record.get("lr") == (
        pytest.approx(0.1) if isinstance(config, dict) else None
    )  # a transformation has its own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "transformation"),
    [
        ({"name": "sgd", "lr": 0.1}, optax.sgd(0.1)),
        ({"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}, optax.sgd(0.1, 0.9, nesterov=True)),
        ({"name": "adam", "lr": 0.1, "b1": 0.5, "b2": 0.9, "eps": 1e-4}, optax.adam(0.1, 0.5, 0.9, 1e-4)),
        ({"name": "lion", "lr": 0.01}, optax.lion(0.01)),
        ({"name": "rmsprop", "lr": 0.05, "momentum": 0.5}, optax.rmsprop(0.05, momentum=0.5)),
        ({"name": "adagrad", "lr": 0.05}, optax.adagrad(0.05)),
    ],
    ids=["sgd", "momentum", "adam", "lion", "rmsprop", "adagrad"],
)
def test_every_name_has_the_defaults_of_optax(config: Any, transformation: optax.GradientTransformation) -> None:
    """(pipekit:F7)."""
    found, expected = trained(config), by_optax(transformation)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


# -- schedules ----------------------------------------------------------------------------------------------------

SCHEDULES = {
    "constant": ({"value": 0.1}, optax.constant_schedule(0.1)),
    "cosine": ({"init_value": 0.1, "decay_steps": 8, "alpha": 0.1}, optax.cosine_decay_schedule(0.1, 8, 0.1)),
    "warmup_cosine": (
        {"init_value": 0.0, "peak_value": 0.1, "warmup_steps": 3, "decay_steps": 9, "end_value": 0.01},
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 9, 0.01),
    ),
    "linear": (
        {"init_value": 0.1, "end_value": 0.0, "transition_steps": 6},
        optax.linear_schedule(0.1, 0.0, 6),
    ),
    "piecewise": (
        {"init_value": 0.1, "boundaries_and_scales": {"3": 0.5, "7": 0.1}},
        optax.piecewise_constant_schedule(0.1, {3: 0.5, 7: 0.1}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_that_of_optax(name: str) -> None:
    """By the arguments of optax's own function (pipekit:F6)."""
    options, schedule = SCHEDULES[name]
    ours = read_optimizer({"name": "sgd", "lr": {"name": name, **options}})[1]
    assert ours is not None
    counts = range(12)
    np.testing.assert_allclose([ours.at(n) for n in counts], [float(schedule(n)) for n in counts], rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_the_rate_of_every_update(name: str) -> None:
    """Ten updates in windows of two microbatches: the k-th uses, and records, optax's rate at count k - 1 (pipekit:F6).

    Counted are updates, not microbatches; the count begins with 0.
    """
    options, schedule = SCHEDULES[name]
    writer = Writer()
    loop(
        optimizer_config={"name": "sgd", "lr": {"name": name, **options}}, max_steps=10, log_every_n_steps=1,
        metric_writer=writer, accumulate=2, batch_size=8,
    )(None, None)  # fmt: skip
    rates = [values["lr"] for _, values in writer.records]
    np.testing.assert_allclose(rates, [float(schedule(count)) for count in range(10)], rtol=1e-6, atol=1e-8)


def test_a_scheduled_rate_is_what_moves_the_weights_and_what_is_recorded() -> None:
    """Five updates of plain gradient descent with a warmup: the numbers are optax's, and so are the rates (pipekit:F6).

    The k-th update uses the rate at count k - 1.
    """
    options, schedule = SCHEDULES["warmup_cosine"]
    writer = Writer()
    config = {"name": "sgd", "lr": {"name": "warmup_cosine", **options}}
    found = trained(config, metric_writer=writer, log_every_n_steps=1)
    rates = [values["lr"] for _, values in writer.records]
    np.testing.assert_allclose(rates, [float(schedule(count)) for count in range(UPDATES)], rtol=1e-6, atol=1e-8)
    for name, value in by_optax(optax.sgd(schedule)).items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_accumulating_twice_is_refused() -> None:
    """optax.MultiSteps alone does; with accumulate= nobody could say what an update is."""
    several = optax.MultiSteps(optax.sgd(0.1), 3)
    assert loop(optimizer_config=several).accumulate == 1
    with pytest.raises(ConfigError, match=r"optimizer_config: is optax.MultiSteps, which accumulates"):
        loop(optimizer_config=several, accumulate=2)
