"""One call a microbatch, stacked spans and device-resident spans: the same numbers, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_jax.optim.build import make_optimizer
from nnx_jax.step import build_step, place_columns, place_table, stack_batches
from nnx_jax.step.evaluate import build_eval

Kit = SimpleNamespace
ROWS, WIDTH, CLASSES, BATCH, MICROS = 30, 6, 4, 4, 8


def data() -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = draw.integers(0, CLASSES, ROWS).astype(np.int32)
    padded = [np.append(draw.permutation(ROWS), [-1, -1]).astype(np.int32) for _ in range(2)]
    return x, y, [order.reshape(MICROS, BATCH) for order in padded]


class Net(nnx.Module):
    """Linear, BatchNorm, ReLU, Dropout, Linear."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one, self.norm = nnx.Linear(WIDTH, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop, self.two = nnx.Dropout(0.3), nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x: Any, key: Any) -> Any:
        return self.two(self.drop(jax.nn.relu(self.norm(self.one(x))), rngs=nnx.Rngs(key)))


def normed_net() -> tuple[dict[str, Any], dict[str, Any], Any]:
    """A Flax NNX net with BatchNorm and Dropout as flat dicts and a forward."""
    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
    flat = lambda state: {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}  # noqa: E731

    def put(state: Any, values: dict[str, Any]) -> Any:
        pairs = nnx.to_flat_state(state)
        return nnx.from_flat_state([(path, leaf.replace(values[".".join(map(str, path))])) for path, leaf in pairs])

    def forward(p: Any, m: Any, batch: Any, key: Any, train: bool) -> tuple[Any, Any]:
        net = nnx.merge(graph, put(params, p), put(rest, m), copy=True)
        net = nnx.view(net, deterministic=not train, use_running_average=not train)
        outputs = net(batch["x"], key)
        return outputs, flat(nnx.split(net, nnx.Param, ...)[2])

    return flat(params), flat(rest), forward


CASES = {
    "mlp, adamw, one microbatch": dict(net="mlp", optimizer=("adamw", dict(weight_decay=0.1)), accumulate=1),
    "BatchNorm and dropout, sgd with momentum, clip, windows of 3": dict(
        net="norm", optimizer=("sgd", dict(momentum=0.9, nesterov=True)), accumulate=3, clip_norm=0.5
    ),
    "BatchNorm and dropout, lion, a row an update": dict(
        net="norm", optimizer=("lion", {}), accumulate=1, record_every="update"
    ),
}
MORE = {
    "mlp, adam, windows of 4": dict(net="mlp", optimizer=("adam", {}), accumulate=4, record_every="update"),
    "mlp, rmsprop, windows of 2": dict(net="mlp", optimizer=("rmsprop", {}), accumulate=2),
    "BatchNorm and dropout, adamw, one microbatch": dict(net="norm", optimizer=("adamw", {}), accumulate=1),
    "BatchNorm and dropout, lamb, windows of 3": dict(net="norm", optimizer=("lamb", {}), accumulate=3),
}
PARAMS = [pytest.param(options, id=name) for name, options in CASES.items()]
PARAMS += [pytest.param(options, id=name, marks=pytest.mark.slow) for name, options in MORE.items()]


def make(kit: Kit, options: dict[str, Any]) -> tuple[Any, Any]:
    options = dict(options)
    params, forward = kit.mlp([WIDTH, 8, CLASSES])
    state: dict[str, Any] = {}
    if options.pop("net") == "norm":
        params, state, forward = normed_net()
    kind, extra = options.pop("optimizer")
    rate = lambda n: 0.05 / (1.0 + n.astype(jnp.float32))  # noqa: E731
    optimizer = make_optimizer(kind, params, schedule=rate, **extra)
    x, y, orders = data()
    sample = kit.block(x, y, orders[0][0])
    programs = build_step(
        forward, kit.ce_terms, optimizer, params=params, model_state=state, signature=kit.signature(sample),
        metrics=[kit.Accuracy()], **options,
    )  # fmt: skip
    return programs, lambda: programs.init(params, state, seed=7)


def outcome(programs: Any, carry: Any, rows: list[Any]) -> dict[str, np.ndarray]:
    """Every number of the run: state by name and record columns."""
    found = {name: np.array(leaf) for name, leaf in programs.named(carry).items()}
    for number, read in enumerate(rows):
        columns = dict(rate=read.rate, norm=read.grad_norm, loss=read.loss, window=read.window_loss, **read.ints)
        found |= {f"{number}/{name}": column for name, column in {**columns, **read.metrics}.items()}
    return found


def assert_equal_bits(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    assert one.keys() == two.keys()
    different = [name for name in one if one[name].tobytes() != two[name].tobytes()]
    assert different == []


@pytest.mark.parametrize("options", PARAMS)
def test_every_way_to_call_gives_the_same_bits(kit: Kit, options: dict[str, Any]) -> None:
    """Two epochs with a padded tail and a shorter last window; spans of other lengths; one compile each.

    case:E05 (the random stream is a function of the microbatch) and case:L15 (tails compile nothing new).
    """
    programs, start = make(kit, options)
    x, y, orders = data()
    columns = place_columns({"x": x, "y": y})

    carry, rows = start(), []
    for order in orders:
        programs.start_epoch(carry)
        for number, places in enumerate(order):
            programs.step(carry, kit.block(x, y, places), closes=number == MICROS - 1)
        rows.append(programs.read_records(carry))
    stepped = outcome(programs, carry, rows)
    updates = -(-MICROS // programs.accumulate)
    assert list(stepped["counters"][:4]) == [2 * MICROS, 0, 2 * updates, updates]
    assert len(rows[0]) == (MICROS if programs.layout.every == "batch" else updates)

    carry, rows = start(), []
    for order in orders:
        programs.start_epoch(carry)
        table, cut = place_table(order), (2 if programs.accumulate < 4 else 1) * programs.accumulate
        programs.span_resident(carry, columns, table, 0, cut)
        programs.span_resident(carry, columns, table, cut, MICROS - cut)
        rows.append(programs.read_records(carry))
    assert_equal_bits(stepped, outcome(programs, carry, rows))

    carry, rows = start(), []
    for order in orders:
        programs.start_epoch(carry)
        batches = [kit.block(x, y, places) for places in order]
        first = 6  # two windows of 3, six of 1, three of 2; a window of 4 is then cut, so take whole ones
        first = first // programs.accumulate * programs.accumulate
        programs.span_stacked(carry, stack_batches(batches[:first], 6), first)
        programs.span_stacked(carry, stack_batches(batches[first:], 6), MICROS - first)
        rows.append(programs.read_records(carry))
    assert_equal_bits(stepped, outcome(programs, carry, rows))

    used = ["apply", "span_resident", "span_stacked"] + ["micro"] * (programs.accumulate > 1)
    assert programs.watch.compiles == dict.fromkeys(used, 1)
    assert programs.watch.check() == []


@pytest.fixture(scope="module")
def windows_of_3(kit: Kit) -> tuple[Any, Any]:
    return make(kit, CASES["BatchNorm and dropout, sgd with momentum, clip, windows of 3"])


def test_saved_in_the_middle_of_a_window(kit: Kit, windows_of_3: tuple[Any, Any]) -> None:
    """case:F07 accumulator, BatchNorm, random stream and counts are stored; a span finishes the open window.

    The end equals the straight run's, bit for bit, from any microbatch on.
    """
    programs, start = windows_of_3
    x, y, (order, _) = data()
    straight = start()
    programs.span_resident(straight, place_columns({"x": x, "y": y}), place_table(order), 0, MICROS)
    wanted = outcome(programs, straight, [])

    carry = start()
    for places in order[:4]:
        programs.step(carry, kit.block(x, y, places))
    assert carry.micro == 1
    saved = {name: np.array(leaf) for name, leaf in programs.named(carry).items()}
    again = programs.load_named(saved)
    assert (again.batch, again.micro) == (4, 1)
    programs.span_resident(again, place_columns({"x": x, "y": y}), place_table(order), 4, MICROS - 4)
    assert_equal_bits(wanted, outcome(programs, again, []))


def test_dropped_window_leaves_batch_statistics(kit: Kit) -> None:
    """BatchNorm statistics of a vetoed window are those from before it, though two microbatches had updated them."""
    options = dict(CASES["BatchNorm and dropout, sgd with momentum, clip, windows of 3"], nonfinite="skip")
    programs, start = make(kit, options)
    x, y, (order, _) = data()
    carry = start()
    batches = [kit.block(x, y, places) for places in order[:6]]
    batches[4]["x"][1, 2] = np.nan
    for batch in batches[:3]:
        programs.step(carry, batch)
    before = {name: np.array(leaf) for name, leaf in programs.named(carry).items()}
    for batch in batches[3:5]:
        programs.step(carry, batch)
    moved = {name: np.array(leaf) for name, leaf in programs.named(carry).items() if name.startswith("model_state")}
    assert any(moved[name].tobytes() != before[name].tobytes() for name in moved)
    programs.step(carry, batches[5])
    after = {name: np.array(leaf) for name, leaf in programs.named(carry).items()}
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == ["counters"]
    assert programs.read_records(carry).ints["bad_batch"][-1] == 4


def test_scoring_between_updates_changes_nothing(kit: Kit, windows_of_3: tuple[Any, Any]) -> None:
    """case:E07 the same weights with and without scoring after every update, and two scorings agree."""
    programs, start = windows_of_3
    x, y, (order, _) = data()
    evaluate = build_eval(normed_net()[2], kit.ce_terms, [kit.Accuracy()])
    table, columns = place_table(order), place_columns({"x": x, "y": y})
    carries = start(), start()
    for number, places in enumerate(order):
        for carry in carries:
            programs.step(carry, kit.block(x, y, places), closes=number == MICROS - 1)
        state = programs.state(carries[1])
        one = evaluate.resident(state.params, state.model_state, columns, table)
        two = evaluate.resident(state.params, state.model_state, columns, table)
        assert (one.loss, one.rows) == (two.loss, ROWS)
    assert_equal_bits(outcome(programs, carries[0], []), outcome(programs, carries[1], []))
