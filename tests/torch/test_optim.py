"""Optimizers of a torch run against optax, update by update, and what torch does not have."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nnx_jax.core.errors import ConfigError
from nnx_jax.optim.specs import build_optimizer
from nnx_jax.params.optim import NNOptimParams, NNParamGroupSpec
from nnx_jax.torch.optim import Optimizers, Part, leaf_decay

SHAPES = {"body.weight": (4, 3), "body.bias": (4,), "norm.weight": (4, 4), "head.weight": (2, 4)}


class Slide:
    """A rate that falls with every update."""

    def at(self, count: int) -> float:
        return 0.1 / (1 + count)

    def __call__(self, count: Any) -> Any:
        return 0.1 / (1 + count)


def params(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def steps(optim: NNOptimParams, schedule: Any, count: int = 12) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Parameters after so many updates, of torch and of optax, by the same gradients."""
    start, grads = params(), [params(seed) for seed in range(1, count + 1)]
    held = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in start.items()}
    part = Part(optim, schedule, held)
    other = build_optimizer(optim, schedule, start)
    theirs = {name: jnp.asarray(value) for name, value in start.items()}
    state = other.init(theirs)
    for grad in grads:
        for name, value in grad.items():
            part.give(name, torch.from_numpy(value))
        part.step()
        theirs, state = other.update({n: jnp.asarray(v) for n, v in grad.items()}, state, theirs)
    assert part.count == int(state.count) == count
    assert part.used == pytest.approx(float(state.rate), rel=1e-6)
    ours = {name: value.detach().numpy() for name, value in held.items()}
    return ours, {name: np.asarray(value) for name, value in theirs.items()}


GROUPS = (
    NNParamGroupSpec(patterns=("head.*",), max_lr=0.5),
    NNParamGroupSpec(patterns=("*.bias",), weight_decay=0.3),
    NNParamGroupSpec(patterns=("norm.*",), lr_scale=0.0),
)


@pytest.mark.parametrize("schedule", [None, Slide()], ids=["epoch", "update"])
@pytest.mark.parametrize(
    "given",
    [
        {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.1},
        {"kind": "sgd", "momentum": 0.9, "nesterov": True, "decay_mask": "all", "weight_decay": 0.1},
        {"kind": "adam", "betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.1},
        {"kind": "adamw", "weight_decay": 0.2, "decay_mask": ("body.*",)},
        {"kind": "adamw", "weight_decay": 0.2, "param_groups": GROUPS},
        {"kind": "lion", "weight_decay": 0.1},
        {"kind": "lion", "param_groups": GROUPS},
        {"kind": "sign_sgd"},
        {"kind": "adadelta", "options": {"rho": 0.8}},
        {"kind": "adamax", "options": {"b1": 0.8}},
        {"kind": "rmsprop", "options": {"eps_in_sqrt": False, "centered": True}},
    ],
    ids=lambda given: f"{given['kind']}-{len(given)}",
)
def test_numbers_are_optax_s(given: dict[str, Any], schedule: Any) -> None:
    """Twelve updates of size 0.1: the rounding of each, and of optax's 1 - beta^t in float32 (24 bits less 10)."""
    ours, theirs = steps(NNOptimParams(max_lr=0.1, **given), schedule)
    bound = 12 * 0.1 * (2.0**-13 if given["kind"] in ("adam", "adamw", "adamax", "rmsprop") else 2.0**-20)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=2e-6, atol=bound, err_msg=name)


def test_decay_is_that_of_the_group_else_of_the_mask() -> None:
    optim = NNOptimParams(kind="adamw", weight_decay=0.2, param_groups=GROUPS[:2])
    wanted = {"body.weight": 0.2, "body.bias": 0.3, "norm.weight": 0.0, "head.weight": 0.2}
    assert leaf_decay(optim, {name: np.zeros(shape) for name, shape in SHAPES.items()}) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "adagrad"}, "backend torch has sgd, adam, adamw, lion, adadelta, adamax, rmsprop, sign_sgd"),
        ({"kind": "rmsprop"}, "eps_in_sqrt: false"),
        ({"kind": "adamax", "options": {"nu_dtype": "x"}}, "has no option 'nu_dtype'; its options: b1, b2, eps"),
        ({"kind": "adadelta", "weight_decay": 0.1}, "takes no weight decay"),
        ({"kind": "adam", "decay_mask": ("nothing",), "weight_decay": 0.1}, "matches no parameter"),
    ],
)
def test_what_torch_does_not_have_is_named(given: dict[str, Any], message: str) -> None:
    held = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    with pytest.raises(ConfigError, match=message):
        Part(NNOptimParams(**given), None, held)


def test_several_optimizers_have_rates_and_counts_of_their_own() -> None:
    optims = {
        "body": NNOptimParams(kind="sgd", max_lr=0.1, param_groups=(NNParamGroupSpec(patterns=("body.*", "norm.*")),)),
        "head": NNOptimParams(kind="adam", max_lr=0.2, param_groups=(NNParamGroupSpec(patterns=("head.*",)),)),
    }
    held = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    made = Optimizers(optims, {"head": Slide()}, held, several=True)
    assert made.first is made.parts["body"]
    made.set_rate({"body": 0.25})
    made.parts["head"].give("head.weight", torch.ones(2, 4))
    made.parts["head"].step()
    assert (made.parts["head"].count, made.parts["body"].count) == (1, 0)
    assert made.rates() == {"body": 0.25, "head": pytest.approx(0.1)}
    assert made.parts["head"].rate == pytest.approx(0.05)
    with pytest.raises(ConfigError, match="there is no optimizer 'tail'; the optimizers are body, head"):
        made.set_rate({"tail": 1.0})
