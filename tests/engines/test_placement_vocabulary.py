"""50,000 outputs over four devices: only sums and gradients travel, and no device holds the logits of another."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_jax.data import ArrayDataset
from nnx_jax.fit.job import prepare
from nnx_jax.model import NNModel
from nnx_jax.params.data import NNDataParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.run import RunSpec
from nnx_jax.params.train import NNTrainParams

VOCABULARY, WIDTH, ROWS = 50_000, 4, 64
LOGITS, WEIGHTS = ROWS * VOCABULARY, WIDTH * VOCABULARY


class Head(nnx.Module):
    """From a few inputs to a vocabulary."""

    def __init__(self) -> None:
        self.out = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


def compiled(mesh: dict[str, int], window: int) -> dict[str, Any]:
    """The step's and the validation's programs; nothing is run."""
    rows = ArrayDataset(np.zeros((2 * ROWS, WIDTH), np.float32), np.zeros(2 * ROWS, np.int32), n_classes=VOCABULARY)
    model = NNModelParams.from_state({"loss": "cross_entropy", "metrics": ["accuracy", "perplexity"]})
    data = NNDataParams(train=rows, val=rows, batch_size=ROWS)
    optim: Any = {"accumulate_grad_batches": window}
    spec = RunSpec(model=model, data=data, train=NNTrainParams.from_state({"n_epochs": 1, "optim": optim}), mesh=mesh)
    engine = prepare(NNModel(params=model, module=Head()), spec).engine
    batch = engine.place.signature(engine.feed.signature())
    found = {
        kind: engine.programs.lower(kind, batch).compile() for kind in (["micro"] if window > 1 else []) + ["apply"]
    }
    state, feed = engine.programs.state(engine.start()), engine.feeds["val"]
    scoring, placed = engine.scorer._evaluator, engine.scorer._place(feed)
    assert placed is not None
    shapes = jax.tree.map(_shape, ({**state.frozen, **state.params}, state.model_state, *placed, np.int32(1)))
    return found | {"evaluate": scoring._many.lower(*shapes).compile()}


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def travels(text: str) -> dict[str, int]:
    """The most values that a collective of each kind gives, by kind."""
    found: dict[str, int] = {}
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    for shapes, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        sizes = [math.prod(map(int, dims.split(","))) if dims else 1 for dims in re.findall(r"\[([\d,]*)\]", shapes)]
        found[kind] = max(found.get(kind, 0), *sizes)
    return found


def test_gradients_travel_once_a_window() -> None:
    """nnx:B212 nnx:S53 Inside a window of two microbatches only sums do; at its end each gradient does, once."""
    split = {kind: program.as_text() for kind, program in compiled({"data": 4}, 2).items()}
    assert max(travels(split["micro"]).values()) <= ROWS
    given = [line.split(" all-reduce(")[0] for line in split["apply"].splitlines() if " all-reduce(" in line]
    assert sum(line.count(f"f32[{WIDTH},{VOCABULARY}]") for line in given) == 1


@pytest.mark.parametrize("window", [1, 2])
def test_no_device_gets_the_logits_of_another(window: int) -> None:
    """nnx:S60 What travels is at most a gradient; of the logits each device keeps memory for its own rows alone."""
    split, whole = compiled({"data": 4}, window), compiled({}, window)
    for kind, program in split.items():
        found = travels(program.as_text())
        assert "all-gather" not in found, (kind, found)
        assert max(found.values()) <= (WEIGHTS if kind != "evaluate" else ROWS), (kind, found)
        own, other = (each[kind].memory_analysis().temp_size_in_bytes for each in (split, whole))
        extra = 4 * 4 * WEIGHTS  # gradients and what their reduction needs
        assert own < other / 4 + extra
        assert own < 4 * LOGITS, "the logits of the whole batch fit nowhere"
        assert other > 4 * LOGITS
