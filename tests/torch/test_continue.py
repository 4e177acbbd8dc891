"""A torch training that was stored and goes on elsewhere is bit for bit the one that was never interrupted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nnx_jax.core.errors import ResumePointError
from nnx_jax.loop.engine import Records
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.torch.streams import Streams, capture, put, stream_seed
from tests.torch.engines import advance, columns, engine_of, joined, mlp, spec_of, weights

SCHEDULE = NNSchedulerParams(kind="one_cycle", clock="optimizer_update")


class Net(torch.nn.Module):
    """Dropout, BatchNorm, and noise of python's and numpy's own streams."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(seed=3, dropout=0.4)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = random.random() + np.random.rand() if self.training else 0.0
        return self.body(self.norm(x)) * (1 + 0.1 * noise)


def run(engine: Any, state: Any, batches: int, *, closes: bool = True) -> list[Records]:
    return advance(engine, state, batches, closes=closes)


def same_bits(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    return {n: v.tobytes() for n, v in left.items()} == {n: v.tobytes() for n, v in right.items()}


@pytest.mark.parametrize(
    ("kind", "window", "stop", "precision"),
    [
        ("adam", 1, 4, "float32"),  # in the middle of an epoch
        ("adamw", 3, 4, "float32"),  # in the middle of a window
        ("lion", 3, 8, "float32"),
        ("sgd", 2, 6, "float32"),  # between two epochs
        ("adam", 2, 3, "bfloat16"),
    ],
)
def test_goes_on_bit_for_bit(kind: str, window: int, stop: int, precision: str) -> None:
    optim = {"kind": kind, "max_lr": 0.01, "accumulate_grad_batches": window}
    spec = spec_of(columns(), optim=optim, scheduler=SCHEDULE, precision=precision, record_every="batch")
    whole = engine_of(spec, Net())
    state = whole.start()
    random.seed(1)
    np.random.seed(1)  # the stream that is stored
    run(whole, state, stop, closes=False)
    stored = whole.snapshot(state, 0, 0)
    copies = {name: value.copy() for name, value in stored.arrays.items()}
    rest = run(whole, state, 18 - stop)
    assert same_bits(stored.arrays, copies), "a snapshot does not move with the training"

    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    other = engine_of(spec, Net())
    begun = other.start()
    advance(other, begun, 2)  # whatever it did before is gone
    assert other.abstract(begun) == {n: (v.shape, v.dtype.name) for n, v in copies.items()}
    begun = other.restore(begun, copies)
    again = run(other, begun, 18 - stop)
    assert same_bits(weights(whole.module), weights(other.module))
    assert same_bits(whole.snapshot(state, 3, 0).arrays, other.snapshot(begun, 3, 0).arrays)
    for name in ("loss", "rate", "grad_norm", "step", "batch", "committed"):
        np.testing.assert_array_equal(joined(rest, name), joined(again, name))


def test_noise_of_a_microbatch_does_not_depend_on_who_looked() -> None:
    """Scoring, logging and draws of others between the steps change nothing; nor do the steps change others' draws."""
    data = columns()
    nets = [mlp(dropout=0.5), mlp(dropout=0.5)]
    for net, looks in zip(nets, (False, True), strict=True):
        engine = engine_of(spec_of(data, val=data), net)
        state = engine.start()
        torch.manual_seed(5 + looks)
        drawn = []
        for _ in range(4):
            advance(engine, state, 1)
            if looks:
                engine.evaluate(state, "val")
                drawn.append(torch.rand(1).item())
        if looks:
            torch.manual_seed(6)
            assert drawn == [torch.rand(1).item() for _ in range(4)]
    assert same_bits(weights(nets[0]), weights(nets[1]))


def test_streams_of_microbatches_differ_in_the_bits_that_torch_looks_at() -> None:
    lower = {stream_seed(7, 2, 0, count) & 0xFFFFFFFF for count in range(50_000)}
    assert len(lower) == 50_000
    apart = {stream_seed(seed, purpose, rank, 0) for seed in (0, 1, 2**40, -1) for purpose in (2, 3) for rank in (0, 1)}
    assert len(apart) == 16
    streams = Streams(torch.device("cpu"), 7)
    before = torch.default_generator.get_state()
    with streams.lent():
        streams.begin(2, 4)
        first = torch.rand(3)
        streams.begin(2, 5)
        assert not torch.equal(first, torch.rand(3))
        streams.begin(2, 4)
        assert torch.equal(first, torch.rand(3))
    assert torch.equal(before, torch.default_generator.get_state())


def test_every_global_stream_is_kept_exactly() -> None:
    device, loader = torch.device("cpu"), torch.Generator().manual_seed(3)
    random.gauss(0, 1)
    np.random.randn()  # half of a pair is held back
    states = capture(device, loader)

    def draw() -> list[float]:
        found = [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()]
        return [*found, torch.rand(1).item(), torch.rand(1, generator=loader).item()]

    first = draw()
    draw()
    put(states, device, loader)
    assert draw() == first


@pytest.mark.parametrize("stop", [3, 9])
@pytest.mark.parametrize("seeded", [True, False])
def test_a_loader_that_shuffles_by_a_stream_goes_on_in_its_order(seeded: bool, stop: int) -> None:
    """torch's DataLoader draws an epoch's order when it is begun, from its generator, or from the global stream."""
    data = columns(24)
    dataset = TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))

    def fresh() -> Any:
        generator = torch.Generator().manual_seed(2) if seeded else None
        return DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)

    torch.manual_seed(11)
    whole = engine_of(spec_of(train_loader=fresh()), mlp(dropout=0.3))
    state = whole.start()
    advance(whole, state, stop)
    stored = whole.snapshot(state, stop // 6, stop % 6).arrays
    advance(whole, state, 18 - stop)

    torch.manual_seed(12)
    other = engine_of(spec_of(train_loader=fresh()), mlp(dropout=0.3))
    begun = other.start()
    begun = other.restore(begun, stored)
    advance(other, begun, 18 - stop)
    assert same_bits(weights(whole.module), weights(other.module))


def damaged(arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    yield "it has no 'opt_state/0.bias/exp_avg'", {n: v for n, v in arrays.items() if n != "opt_state/0.bias/exp_avg"}
    yield "it has 'params/more'", {**arrays, "params/more": np.zeros(2, np.float32)}
    yield (
        r"expected float32\[5, 3\], found float32\[3, 5\]",
        {**arrays, "params/0.weight": np.zeros((3, 5), np.float32)},
    )
    yield "expected float32.*found float64", {**arrays, "params/0.weight": np.zeros((5, 3))}


def test_what_does_not_fit_is_refused_and_nothing_changes() -> None:
    engine = engine_of(spec_of(columns(), optim={"kind": "adam", "accumulate_grad_batches": 2}), mlp())
    state = engine.start()
    advance(engine, state, 3, closes=False)
    stored = dict(engine.snapshot(state, 0, 3).arrays)
    advance(engine, state, 2, closes=False)
    before = dict(engine.snapshot(state, 0, 5).arrays)
    for message, arrays in damaged(stored):
        with pytest.raises(ResumePointError, match=message):
            engine.restore(state, arrays)
        assert same_bits(before, dict(engine.snapshot(state, 0, 5).arrays))


def test_weights_only_begins_anew_with_the_stored_weights() -> None:
    engine = engine_of(spec_of(columns(), optim={"kind": "adam"}), mlp())
    state = engine.start()
    advance(engine, state, 3)
    stored = dict(engine.snapshot(state, 0, 3).arrays)
    other = engine_of(spec_of(columns(), optim={"kind": "adam"}), mlp(seed=4))
    fresh = other.restore(other.start(), stored, weights_only=True)
    assert same_bits(weights(other.module), weights(engine.module))
    assert (fresh.counters["step"], other.optimizers.first.count) == (0, 0)
    assert not other.snapshot(fresh, 0, 0).arrays["opt_state/0.weight/exp_avg"].any()
    with pytest.raises(ResumePointError, match="has no 'params/0.bias'"):
        other.restore(fresh, {"params/0.weight": stored["params/0.weight"]}, weights_only=True)


def test_sixteen_bit_weights_are_stored_and_updated_in_float32() -> None:
    """One SGD step of a bfloat16 weight: float32 arithmetic, rounded once."""
    module = torch.nn.Linear(3, 1, bias=False).bfloat16()
    start = module.weight.detach().float().numpy().copy()
    data = columns(4)
    optim = {"kind": "sgd", "max_lr": 1e-3, "momentum": 0.0}
    engine = engine_of(spec_of({**data, "x": data["x"]}, optim=optim, precision="bfloat16"), module)
    state = engine.start()
    advance(engine, state, 1)
    x = torch.from_numpy(data["x"]).bfloat16()
    own = torch.from_numpy(start).bfloat16().requires_grad_()
    (torch.nn.functional.linear(x, own).float() - torch.from_numpy(data["y"])).square().mean().backward()
    assert own.grad is not None
    wanted = (torch.from_numpy(start) - 1e-3 * own.grad.float()).bfloat16()
    assert (module.weight.float() - wanted.float()).abs().max() <= 2**-8 * wanted.float().abs().max()
    stored = engine.snapshot(state, 0, 1).arrays
    assert stored["params/weight"].dtype.name == "bfloat16"
    assert engine.restore(state, stored) is state
