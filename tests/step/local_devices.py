"""Run by test_local.py in a process with eight virtual CPU devices; the last line it prints is "fine"."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_jax.core.errors import StepError
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, GradientClipHook
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.optim.build import make_optimizer
from nnx_jax.step import build_step
from nnx_jax.step.plan import HookPlan
from tests.step.test_hooks import Decay, Scale


def forward(params, model_state, batch, key, train):
    return batch["x"] @ params["w"], model_state


def two(outputs, batch):
    error = jnp.square(outputs - batch["t"])
    rows = jnp.float32(batch["t"].shape[0])
    return (
        LossTerm("a", jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"])),
        LossTerm("b", jnp.sum(outputs * batch["t"]), rows, weight=0.5),
    )


class Penalty(Decay):
    def __call__(self, ctx, stage, will_skip):
        if stage.name != "DO_BACKWARD":
            return True, ctx.loss
        return True, ctx.loss + 0.5 * ctx.xp.sum(ctx.params["w"] ** 2)


signature = {"x": ((8, 16), jnp.float32), "t": ((8,), jnp.float32), "mask": ((8,), jnp.float32)}
rng = np.random.default_rng(0)


def batch_of(masked):
    columns = {"x": rng.integers(-2, 3, (8, 16)) / 2, "t": rng.integers(0, 3, 8), "mask": rng.integers(0, 2, 8)}
    columns["mask"] *= not masked
    return {name: value.astype(np.float32) for name, value in columns.items()}


rows = [batch_of(masked=place == 0) for place in range(8)]
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spread, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
params = {"w": jnp.ones(16)}


def run(extra, local, **options):
    hooks = [GradientAccumulationHook(3), *extra]
    plan = HookPlan(update=tuple(sorted(hooks, key=lambda h: h.priority)), mesh=mesh if local else None)
    optimizer = make_optimizer("sgd", params, rate=2.0**-6)
    step = build_step(
        forward, two, optimizer, params=params, model_state={}, signature=signature, accumulate=3, hooks=plan, **options
    )
    carry = step.init(params, {})
    text = None
    if local:
        places = [spread if path.startswith("accum/window/grads") else whole for path in step.paths]
        carry.leaves = [
            jax.device_put(leaf, place) for leaf, place in zip(carry.leaves, [*places, whole, whole], strict=True)
        ]
    for place, batch in enumerate(rows):
        step.step(
            carry,
            {k: jax.device_put(v, spread) for k, v in batch.items()} if local else batch,
            closes=place == len(rows) - 1,
        )
    rec = step.read_records(carry)
    compiles = dict(step.watch.compiles)
    if local:
        like = {k: jax.ShapeDtypeStruct(s, d, sharding=spread) for k, (s, d) in signature.items()}
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in carry.leaves]
        text = {k: getattr(step, "_" + k).lower(leaves, like).compile().as_text() for k in ("micro", "apply")}
    found = {name: np.asarray(leaf) for name, leaf in step.named(carry).items() if "accum" not in name}
    return found, rec, text, compiles


LARGE = re.compile(r"= (?:f32\[(?:1,)?16\]|\([^)]*f32\[(?:1,)?16\][^)]*\))\S* all-reduce")

for extra in ([], [Scale(4.0)], [Scale(4.0, undo=True), GradientClipHook(1.0), EMAHook(decay=0.5)], [Penalty()]):
    one, rec1, *_ = run(extra, False)
    many, rec8, text, compiles = run(extra, True)
    names = [type(h).__name__ for h in extra]
    for path in one:
        exact = not extra or path == "counters"
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-6, "atol": 1e-7}
        np.testing.assert_allclose(many[path], one[path], **tolerance, err_msg=f"{names} {path}")
    np.testing.assert_allclose(rec8.window_loss, rec1.window_loss, rtol=1e-6)
    assert compiles == {"micro": 1, "apply": 1}, compiles
    large = {kind: len(LARGE.findall(program)) for kind, program in text.items()}
    assert large["micro"] == 0, (names, large)
    assert large["apply"] >= 1, (names, large)


def refused(message, **options):
    with pytest.raises(StepError, match=message):
        build_step(forward, two, make_optimizer("sgd", params, rate=0.1), params=params, signature=signature, **options)


refused("window of several microbatches", model_state={}, hooks=HookPlan(mesh=mesh))
windows = HookPlan(update=(GradientAccumulationHook(2),), mesh=mesh)
refused("BatchNorm", model_state={"mean": jnp.zeros(3)}, accumulate=2, hooks=windows)
print("fine")
