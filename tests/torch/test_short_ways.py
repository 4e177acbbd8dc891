"""The short ways of the torch engine give the numbers of the long ones, and are left where anything is to decide."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from nnx_jax.core.errors import DataError
from nnx_jax.data import LoaderFeed
from nnx_jax.data.deal import DealtLoader, dealt_loader
from nnx_jax.torch.batches import Source
from nnx_jax.torch.fused import fused_step
from nnx_jax.torch.losses import build_loss
from nnx_jax.torch.metrics import build_metric
from nnx_jax.torch.rows import UNKNOWN, Rows, span_of
from nnx_jax.torch.work import Measured
from tests.torch.engines import advance, columns, engine_of, joined, mlp, spec_of, weights


def run(common: bool, **training: Any) -> tuple[Any, list[Any]]:
    """(engine, records) of 18 microbatches, three epochs; some rows are too much for the net."""
    data = columns(22, classes=4)
    data["x"][::11] = np.sign(data["x"][::11]) * 3e38
    spec = spec_of(data, metrics=["accuracy", "nll"], nonfinite="skip", **training)
    engine = engine_of(spec, mlp(outputs=4, dropout=0.3), "cross_entropy")
    state = engine.start()
    assert engine.common is True
    engine.common = state.window.takes_whole = common
    return engine, advance(engine, state, 18)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("record_every", ["update", "batch"])
def test_a_window_that_ends_the_short_way_is_the_same_bit_for_bit(kind: str, record_every: str) -> None:
    optim = {"kind": kind, "max_lr": 0.05, "grad_clip_norm": 0.5}
    found = [run(common, optim=optim, record_every=record_every) for common in (True, False)]
    (short, first), (long, second) = found
    for name, value in weights(short.module).items():
        np.testing.assert_array_equal(value, weights(long.module)[name])
    for name in ("batch", "step", "loss", "rate", "grad_norm", "closed", "committed", "accuracy", "nll"):
        np.testing.assert_array_equal(joined(first, name), joined(second, name))
    assert short._state.counters == long._state.counters
    assert short._state.counters["nonfinite"] > 0  # which the long way found


def test_the_short_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(spec_of(columns(20, classes=4)), mlp(outputs=4), "cross_entropy")
    monkeypatch.setattr(engine, "_invalid", lambda *_: pytest.fail("the long way"))
    advance(engine, engine.start(), 5)


@pytest.mark.parametrize(
    ("training", "loss"),
    [
        ({"optim": {"kind": "sgd", "max_lr": 0.1, "accumulate_grad_batches": 2}}, "cross_entropy"),
        ({}, lambda outputs, targets: (outputs[:, 0] - targets).square()),
    ],
)
def test_windows_of_several_microbatches_and_own_losses_end_the_long_way(training: Any, loss: Any) -> None:
    engine = engine_of(spec_of(columns(20, classes=4), **training), mlp(outputs=4), loss)
    seen: list[Measured] = []
    measure = engine.work.measure
    engine.work.measure = lambda batch, train: seen.append(measure(batch, train)) or seen[-1]
    advance(engine, engine.start(), 4)
    assert not engine.common or seen[0].whole is None


@pytest.mark.parametrize("policy", ["pad", "drop"])
def test_dealt_rows_in_memory_are_the_batches_of_their_loader(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnx:S49 A process's batches are gathered from memory as its loader would give them, epoch after epoch."""
    data = columns(22, classes=4)
    loaders = [dealt_loader(data, 4, policy=policy, seed=3, rank=1, world=2) for _ in range(2)]
    quick = Source(LoaderFeed(loaders[0]), torch.device("cpu"))
    monkeypatch.setattr(loaders[1], "arrays", lambda: None)
    slow = Source(LoaderFeed(loaders[1]), torch.device("cpu"))
    assert quick.resident
    assert not slow.resident
    for epoch in (0, 1, 0):
        for place in range(len(loaders[0])):
            first, second = quick.read(epoch, place), slow.read(epoch, place)
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first)
            assert all(first[name].dtype == second[name].dtype for name in first)
    with pytest.raises(DataError, match="epoch 0 ended after"):
        quick.read(0, len(loaders[0]))
    assert [len(batch["mask"]) for batch in quick.whole()] == [len(batch["mask"]) for batch in slow.whole()]


class Halved(DealtLoader):
    """A loader of the user's own, who changes what is served."""

    def __iter__(self) -> Any:
        return ({**batch, "x": batch["x"] / 2} for batch in super().__iter__())


def test_other_dealt_loaders_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a sequence, of a class of the user's, and of more bytes than every process should have."""
    data, cpu = columns(22, classes=4), torch.device("cpu")
    items = Source(LoaderFeed(dealt_loader([(np.full(3, i, np.float32), i) for i in range(5)], 2)), cpu)
    assert not items.resident
    assert len(items.read(0, 0)["x"]) == 2
    plain = dealt_loader(data, 4, seed=3)
    own = Halved(plain._rows, 4, policy="pad", seed=3, rank=0, world=1)
    halved = Source(LoaderFeed(own), cpu)
    assert not halved.resident
    torch.testing.assert_close(halved.read(0, 0)["x"], Source(LoaderFeed(plain), cpu).read(0, 0)["x"] / 2)
    assert plain.nbytes == sum(column.nbytes for column in plain.arrays().values())
    monkeypatch.setattr("nnx_jax.torch.batches.RESIDENT_BYTES", plain.nbytes - 1)
    assert not Source(LoaderFeed(plain), cpu).resident


def test_outputs_that_were_changed_are_read_anew() -> None:
    """An ensemble that is added up in place: the metrics of the sum so far, each time."""
    metric = build_metric("accuracy", 2)
    batch = batch_of(torch.tensor([0, 1]), (0, 1))
    total = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert metric.update(total, batch).tolist() == [1.0, 2.0]
    total += torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    assert metric.update(total, batch).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_by_numpy_are_those_of_torch(dtype: torch.dtype) -> None:
    """Ties and NaN included: the metrics of rows that all count once are those of rows that are weighed one by one."""
    outputs = torch.tensor([[1.0, 1.0, 0.0], [0.0, float("nan"), 2.0], [0.0, 0.5, 3.0], [2.0, 2.0, 2.0]], dtype=dtype)
    y = torch.tensor([1, 1, 2, 0])
    for name in ("accuracy", "f1", "precision", "recall"):
        metric = build_metric(name, 3)
        known = metric.update(outputs, batch_of(y, (0, 2)))
        weighed = metric.update(outputs, batch_of(y, UNKNOWN))
        assert known.dtype == weighed.dtype == dtype
        assert known.tolist() == weighed.tolist()


def batch_of(y: torch.Tensor, span: tuple[float, float]) -> Rows:
    return Rows({"y": y, "mask": torch.ones(len(y))}, span)


@pytest.mark.parametrize("kind", ["cross_entropy", "binary_cross_entropy", "mse", "mae", "huber"])
@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_a_loss_and_its_metrics_are_equal_whether_rows_are_known_to_be_whole_or_not(kind: str, shape: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(*shape, 5, generator=generator) if kind == "cross_entropy" else torch.randn(*shape)
    y = torch.randint(0, 5, shape, generator=generator) if kind == "cross_entropy" else torch.rand(*shape)
    known = batch_of(y, (float(y.min()), float(y.max())))
    loss = build_loss(kind)
    assert loss.whole(outputs, known) is not None
    assert loss.whole(outputs, dict(known)) is None
    (one,), (two,) = loss(outputs, known), loss(outputs, dict(known))
    torch.testing.assert_close(one.numerator, two.numerator)
    assert one.denominator == two.denominator == y.numel()
    assert one.denominator.dtype == torch.float32
    names = {"cross_entropy": ["accuracy", "top_k", "f1", "nll", "brier"], "mse": ["mse", "mae"]}
    for name in names.get(kind, []):
        metric = build_metric(name, 5, loss=kind)
        torch.testing.assert_close(metric.update(outputs, known), metric.update(outputs, dict(known)))


@pytest.mark.parametrize("label", [-1, 5, -100])
def test_labels_that_are_no_class_or_ignored_are_read_the_long_way(label: int) -> None:
    y = torch.tensor([0, label, 2])
    batch = batch_of(y, (float(y.min()), float(y.max())))
    loss, outputs = build_loss("cross_entropy"), torch.randn(3, 5)
    assert loss.whole(outputs, batch) is None
    assert loss(outputs, batch)[0].denominator == 2
    assert loss.invalid_labels(outputs, batch) == (label != -100)


def changed_label(batch: Rows) -> None:
    batch["y"][0] = 99


def other_labels(batch: Rows) -> None:
    batch["y"] = batch["y"].clone()


def changed_mask(batch: Rows) -> None:
    batch["mask"].mul_(0.5)


def other_mask(batch: Rows) -> None:
    batch["mask"] = torch.zeros(len(batch["y"]))


def added_weight(batch: Rows) -> None:
    batch["weight"] = torch.ones(len(batch["y"]))


@pytest.mark.parametrize("change", [changed_label, other_labels, changed_mask, other_mask, added_weight])
def test_what_was_known_of_a_batch_is_forgotten_when_it_changes(change: Any) -> None:
    source = Source(engine_of(spec_of(columns(20, classes=4)), mlp(outputs=4), "cross_entropy").feed, CPU)
    batch: Any = source.read(0, 0)
    assert span_of(batch) == (0, 3)
    change(batch)
    assert span_of(batch) is UNKNOWN
    assert span_of(source.read(0, 1)) == (0, 3)
    assert torch.equal(source.read(0, 1)["mask"], torch.ones(4))


CPU = torch.device("cpu")


def stepped(kind: str, short: bool, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    module = mlp(outputs=4)
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.05, fused=True, **options)
    step = fused_step(optimizer)
    assert step is not None
    for value in module.parameters():
        slots = ("momentum_buffer",) if kind == "SGD" else ("exp_avg", "exp_avg_sq")
        optimizer.state[value].update({slot: torch.zeros_like(value) for slot in slots})
        if kind != "SGD":
            optimizer.state[value]["step"] = torch.zeros(())
    for round_ in range(3):
        module(torch.full((2, 3), 0.5 + round_)).square().sum().backward()
        if short:
            assert step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {"weight_decay": 0.1}),
        ("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ],
)
def test_the_kernel_alone_makes_the_optimizers_step(kind: str, options: dict[str, Any]) -> None:
    for one, two in zip(stepped(kind, True, options).values(), stepped(kind, False, options).values(), strict=True):
        assert torch.equal(one, two)


def test_the_optimizers_own_step_is_made_where_somebody_watches_it_or_a_gradient_is_missing() -> None:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=True)
    step: Any = fused_step(optimizer)
    before = copy.deepcopy(module.state_dict())
    assert not step()  # no gradient
    module(torch.ones(2, 3)).sum().backward()
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert not step()
    handle.remove()
    with torch.profiler.profile():
        assert not step()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert step()
    assert fused_step(torch.optim.SGD(module.parameters(), lr=0.1)) is None
