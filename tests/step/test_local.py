"""Deferred reduction over eight virtual CPU devices: the numbers of one device, and one reduction a window."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import re
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from nnx_jax.core.errors import StepError
from nnx_jax.objectives.terms import LossTerm
from nnx_jax.optim.build import make_optimizer
from nnx_jax.step import build_step, stack_batches
from nnx_jax.step.plan import HookPlan
from nnx_jax.hooks import EMAHook, GradientAccumulationHook, GradientClipHook
from tests.step.test_hooks import Decay, Scale

def forward(params, model_state, batch, key, train):
    return batch["x"] @ params["w"], model_state

def two(outputs, batch):
    error = jnp.square(outputs - batch["t"])
    return (LossTerm("a", jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"])),
            LossTerm("b", jnp.sum(outputs * batch["t"]), jnp.float32(8.0) if batch["t"].shape[0] == 8 else jnp.float32(1.0), weight=0.5))

class Penalty(Decay):
    def __call__(self, ctx, stage, will_skip):
        if stage.name != "DO_BACKWARD": return True, ctx.loss
        return True, ctx.loss + 0.5 * ctx.xp.sum(ctx.params["w"] ** 2)

signature = {"x": ((8, 16), jnp.float32), "t": ((8,), jnp.float32), "mask": ((8,), jnp.float32)}
rng = np.random.default_rng(0)
rows = [{"x": rng.integers(-2, 3, (8, 16)) / 2, "t": rng.integers(0, 3, 8), "mask": rng.integers(0, 2, 8)} for _ in range(8)]
rows[0]["mask"][:] = 0
rows = [{name: value.astype(np.float32) for name, value in batch.items()} for batch in rows]
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spread, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
params = {"w": jnp.ones(16)}

def run(extra, local, **options):
    hooks = [GradientAccumulationHook(3), *extra]
    plan = HookPlan(update=tuple(sorted(hooks, key=lambda h: h.priority)), mesh=mesh if local else None)
    optimizer = make_optimizer("sgd", params, rate=2.0**-6)
    step = build_step(forward, two, optimizer, params=params, model_state={}, signature=signature, accumulate=3,
                      hooks=plan, **options)
    carry = step.init(params, {})
    text = None
    if local:
        place = lambda path: spread if path.startswith("accum/window/grads") else whole
        n = len(step.paths)
        carry.leaves = [jax.device_put(leaf, place(path)) for leaf, path in
                        zip(carry.leaves, [*step.paths, "rows", "status"], strict=True)]
    for place, batch in enumerate(rows):
        step.step(carry, {k: jax.device_put(v, spread) for k, v in batch.items()} if local else batch,
                  closes=place == len(rows) - 1)
    rec = step.read_records(carry)
    compiles = dict(step.watch.compiles)
    if local:
        like = {k: jax.ShapeDtypeStruct(s, d, sharding=spread) for k, (s, d) in signature.items()}
        leaves = [jax.ShapeDtypeStruct(l.shape, l.dtype, sharding=l.sharding) for l in carry.leaves]
        text = {k: getattr(step, "_" + k).lower(leaves, like).compile().as_text() for k in ("micro", "apply")}
    return step, carry, {name: np.asarray(leaf) for name, leaf in step.named(carry).items() if "accum" not in name}, rec, text, compiles

for extra in ([], [Scale(4.0)], [Scale(4.0, undo=True), GradientClipHook(1.0), EMAHook(decay=0.5)], [Penalty()]):
    _, _, one, rec1, *_ = run(extra, False)
    step, carry, many, rec8, text, compiles = run(extra, True)
    names = [type(h).__name__ for h in extra]
    for path in one:
        exact = not extra or path == "counters"
        check = np.testing.assert_array_equal if exact else lambda a, b, err_msg: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7, err_msg=err_msg)
        check(many[path], one[path], err_msg=f"{names} {path}")
    np.testing.assert_allclose(rec8.window_loss, rec1.window_loss, rtol=1e-6)
    assert compiles == {"micro": 1, "apply": 1}, compiles
    large = {k: len(re.findall(r"= (?:f32\\\\[(?:1,)?16\\\\]|\\\\([^)]*f32\\\\[(?:1,)?16\\\\][^)]*\\\\))\\\\S* all-reduce", t)) for k, t in text.items()}
    assert large["micro"] == 0 and large["apply"] >= 1, (names, large)
    print(names, large)
for wrong in (dict(hooks=[], k=1),):
    try:
        build_step(forward, two, make_optimizer("sgd", params, rate=0.1), params=params, model_state={},
                   signature=signature, hooks=HookPlan(mesh=mesh))
        raise SystemExit("not refused")
    except StepError as error:
        assert "window of several microbatches" in str(error)
try:
    build_step(lambda p, m, b, k, t: (forward(p, m, b, k, t)[0], m), two, make_optimizer("sgd", params, rate=0.1),
               params=params, model_state={"mean": jnp.zeros(3)}, signature=signature, accumulate=2,
               hooks=HookPlan(update=(GradientAccumulationHook(2),), mesh=mesh))
    raise SystemExit("not refused")
except StepError as error:
    assert "BatchNorm" in str(error)
print("fine")
"""


def test_gradients_stay_on_their_device_until_the_window_ends() -> None:
    """Dyadic data, so the plain sums are exact; a microbatch whose rows are all masked is among them."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("\\\\", "\\")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("fine")
