"""The torch engine against plain torch and numpy: one window, its update, its records, its halts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nnx_jax.core.errors import ConfigError, DataError, ModelError, NonFiniteError
from nnx_jax.loop.engine import Span
from nnx_jax.objectives.terms import LossTerm
from tests.torch.engines import advance, columns, engine_of, joined, mlp, spec_of, weights


def plain_sgd(module: torch.nn.Module, batches: list[tuple[np.ndarray, np.ndarray]], rate: float, window: int) -> None:
    """Windows of squared errors, in plain torch: the gradient of the mean over all rows of a window."""
    for start in range(0, len(batches), window):
        part = batches[start : start + window]
        x, y = (torch.from_numpy(np.concatenate([each[i] for each in part])) for i in (0, 1))
        module.zero_grad()
        (module(x) - y).square().mean().backward()
        with torch.no_grad():
            for value in module.parameters():
                assert value.grad is not None
                value -= rate * value.grad


def served(spec: Any, epochs: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    from nnx_jax.engines.feeds import make_feeds

    feed, found = make_feeds(spec)["train"], []
    for epoch in range(epochs):
        for batch in feed.batches(epoch):
            real = batch["mask"] > 0
            found.append((batch["x"][real], batch["y"][real]))
    return found


@pytest.mark.parametrize("window", [1, 2, 4])
def test_updates_are_those_of_plain_torch_on_the_union_of_a_window(window: int) -> None:
    """22 rows in batches of 4: the last batch has 2 rows, and the last window fewer batches."""
    optim = {"kind": "sgd", "max_lr": 0.05, "momentum": 0.0, "accumulate_grad_batches": window}
    spec = spec_of(columns(), optim=optim)
    module, other = mlp(), mlp()
    engine = engine_of(spec, module)
    records = advance(engine, engine.start(), 12)
    for epoch in range(2):
        plain_sgd(other, served(spec, 2)[6 * epoch : 6 * epoch + 6], 0.05, window)
    for name, value in weights(other).items():
        np.testing.assert_allclose(weights(module)[name], value, rtol=2e-5, atol=2e-6)
    assert joined(records, "step")[-1] == 2 * -(-6 // window)
    assert joined(records, "closed").all()


def test_every_record_has_the_sums_of_its_window() -> None:
    spec = spec_of(columns(), optim={"kind": "sgd", "max_lr": 0.0, "accumulate_grad_batches": 2})
    module = mlp()
    engine = engine_of(spec, module)
    records = advance(engine, engine.start(), 6)
    batches = served(spec)
    errors = [((module(torch.from_numpy(x)).detach().numpy() - y) ** 2).sum() for x, y in batches]
    counts = [len(x) for x, _ in batches]
    wanted = [[sum(errors[i : i + 2]), sum(counts[i : i + 2])] for i in (0, 2, 4)]
    np.testing.assert_allclose(joined(records, "loss"), [top / below for top, below in wanted], rtol=1e-6)
    np.testing.assert_allclose(np.concatenate([each.sums["loss"] for each in records]), wanted, rtol=1e-6)
    assert joined(records, "batch").tolist() == [1, 3, 5]
    assert joined(records, "rate").tolist() == [0.0, 0.0, 0.0]


def test_rows_by_microbatch_close_at_the_windows_end() -> None:
    optim = {"kind": "sgd", "max_lr": 0.1, "accumulate_grad_batches": 4}
    engine = engine_of(spec_of(columns(), optim=optim, record_every="batch"), mlp())
    state = engine.start()
    early = advance(engine, state, 3, closes=False)  # three rows are told before the window ends
    assert joined(early, "closed").tolist() == [False] * 3
    assert engine.open_batches(state) == 3
    late = advance(engine, state, 3)
    assert joined(late, "batch").tolist() == [3, 4, 5]
    assert joined(late, "closed").tolist() == [True, False, True]
    assert joined(late, "step").tolist() == [1, 1, 2]
    assert joined([*early, *late], "loss").shape == (6,)
    assert np.concatenate([each.sums["loss"][:, 1] for each in [*early, *late]]).tolist() == [4, 4, 4, 4, 4, 2]


def test_a_microbatch_without_a_real_row_counts_nothing() -> None:
    """Not even BatchNorm's statistics see it; a whole window of such rows is no update and moves no clock."""
    x, y = columns(8)["x"], columns(8)["y"]
    loader = [
        {"x": x[:4], "y": y[:4], "mask": np.zeros(4)},
        {"x": x[:4], "y": y[:4], "mask": np.ones(4)},
        {"x": x[4:], "y": y[4:], "mask": np.zeros(4)},
        {"x": x[4:], "y": y[4:], "mask": np.zeros(4)},
    ]
    module: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optim = {"kind": "sgd", "max_lr": 0.1, "accumulate_grad_batches": 2}
    engine = engine_of(spec_of(train_loader=loader, optim=optim), module)
    state = engine.start()
    records = advance(engine, state, 4)
    assert joined(records, "committed").tolist() == [True, False]
    assert joined(records, "step").tolist() == [1, 1]
    assert math.isnan(joined(records, "loss")[1])
    assert int(module[1].num_batches_tracked) == 1
    assert state.counters["skipped"] == 1
    assert engine.optimizers.first.count == 1


def test_padded_rows_are_left_out_of_batch_norm() -> None:
    """6 rows in batches of 4: the second batch's statistics are those of its 2 real rows."""
    data = columns(6)
    module: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    engine = engine_of(spec_of(data, data={"shuffle": False}), module)
    advance(engine, engine.start(), 2)
    mean = 0.9 * (0.1 * data["x"][:4].mean(0)) + 0.1 * data["x"][4:].mean(0)
    np.testing.assert_allclose(module[0].running_mean.numpy(), mean, rtol=1e-5)


def test_several_terms_are_divided_each_by_its_own_count() -> None:
    """A mean over rows, a mean over positive targets and a sum, in windows of two: against one batch of the union."""

    def loss(outputs: torch.Tensor, batch: Any) -> list[LossTerm]:
        error = (outputs - batch["y"]).square()
        up = (batch["y"] > 0).float()
        return [
            LossTerm("rows", error.sum(), torch.tensor(float(len(error)))),
            LossTerm("up", (error * up).sum(), up.sum(), weight=0.5),
            LossTerm("small", outputs.square().sum(), reduction="sum", weight=0.01),
            LossTerm("seen", error.abs().sum(), torch.tensor(1.0), weight=0.0),
        ]

    data = columns(8)
    results = []
    for size, window in ((8, 1), (4, 2), (2, 4)):
        module = mlp()
        optim = {"kind": "sgd", "max_lr": 0.1, "accumulate_grad_batches": window, "grad_clip_norm": 0.5}
        engine = engine_of(spec_of(data, batch_size=size, optim=optim, data={"shuffle": False}), module, loss)
        records = advance(engine, engine.start(), 2 * window)
        results.append((weights(module), joined(records, "loss"), joined(records, "grad_norm")))
    for found in results[1:]:
        for name, value in results[0][0].items():
            np.testing.assert_allclose(found[0][name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1], results[0][1], rtol=1e-5)
        np.testing.assert_allclose(found[2], results[0][2], rtol=1e-5)


def test_clipping_brings_the_gradient_to_the_limit() -> None:
    module, free = mlp(), mlp()
    options = {"kind": "sgd", "max_lr": 1.0, "momentum": 0.0}
    for net, limit in ((module, 1e-3), (free, None)):
        engine = engine_of(spec_of(columns(4), optim={**options, "grad_clip_norm": limit}), net)
        (records,) = advance(engine, engine.start(), 1)
    assert records.grad_norm[0] > 1e-3
    before = weights(mlp())
    moved = np.sqrt(sum(((weights(module)[n] - before[n]) ** 2).sum() for n in before))
    assert moved == pytest.approx(1e-3, rel=1e-3)


class Poisoned(torch.nn.Module):
    """Gives NaN for batches whose first value is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x)) * torch.where(x[:, :1].abs().max() > 50, torch.nan, 1.0)


def poisoned_data() -> dict[str, np.ndarray]:
    data = columns(16)
    data["x"][9, 0] = 100.0
    return data


@pytest.mark.parametrize("window", [1, 2])
def test_what_is_not_finite_halts_with_the_state_before_it(window: int) -> None:
    optim = {"kind": "adam", "accumulate_grad_batches": window}
    module: Any = Poisoned()
    engine = engine_of(spec_of(poisoned_data(), optim=optim, data={"shuffle": False}), module)
    state = engine.start()
    advance(engine, state, 2)
    before, counters = weights(module), dict(state.counters)
    _, done = engine.run_span(state, Span(0, 2, 2, True), lambda _: False)
    records, failure = engine.read_records(state)
    assert isinstance(failure, NonFiniteError)
    assert f"update {2 // window + 1}, microbatch 2: loss term 'mse'" in str(failure)
    assert "'params/norm." in str(failure)
    assert sum(map(len, records)) == 0
    assert done == window
    assert state.counters == counters
    assert {n: v.tobytes() for n, v in weights(module).items()} == {n: v.tobytes() for n, v in before.items()}


def test_skipped_windows_leave_no_trace_but_their_row_until_there_are_too_many() -> None:
    module: Any = Poisoned()
    data = {"shuffle": False}
    engine = engine_of(spec_of(poisoned_data(), nonfinite="skip", max_consecutive_skips=1, data=data), module)
    state = engine.start()
    advance(engine, state, 2)
    before = weights(module)
    (records,) = advance(engine, state, 1)
    assert records.committed.tolist() == [False]
    assert records.closed.tolist() == [True]
    assert {n: v.tobytes() for n, v in weights(module).items()} == {n: v.tobytes() for n, v in before.items()}
    assert (state.counters["skipped"], state.counters["nonfinite"], state.counters["step"]) == (1, 1, 2)
    advance(engine, state, 1)
    assert state.counters["consecutive"] == 0
    advance(engine, state, 2)
    with torch.no_grad():
        module.layer.weight[:] = torch.nan
    with pytest.raises(NonFiniteError, match="after 2 bad windows in a row"):
        advance(engine, state, 2)


def test_impossible_labels_of_a_loader_halt_with_nothing_applied() -> None:
    data = columns(8, classes=3)
    bad = data["y"].copy()
    bad[5] = 7
    loader = [(data["x"][:4], data["y"][:4]), (data["x"][4:], bad[4:])]
    module = mlp(outputs=3)
    engine = engine_of(spec_of(train_loader=loader), module, "cross_entropy")
    state = engine.start()
    with pytest.raises(DataError, match="microbatch 1 has 1 labels that no class has"):
        advance(engine, state, 2)
    assert state.counters["step"] == 1
    with pytest.raises(DataError, match="label 7 at row 5"):
        engine_of(spec_of({"x": data["x"], "y": bad}), mlp(outputs=3), "cross_entropy")


def test_frozen_and_still_parameters_stay_and_flags_and_modes_come_back() -> None:
    module = mlp()
    module[3].eval()
    module[0].bias.requires_grad_(False)
    engine = engine_of(spec_of(columns()), module, freeze=("0.weight",), still=frozenset({"3.bias"}))
    before = weights(module)
    (records,) = advance(engine, engine.start(), 1)
    same = {name for name, value in weights(module).items() if np.array_equal(value, before[name])}
    assert same == {"0.weight", "0.bias", "3.bias"}
    assert module[0].weight.requires_grad
    assert not module[0].bias.requires_grad
    assert module.training
    assert not module[3].training
    assert set(engine.net.frozen) == {"0.weight", "0.bias"}
    # What is still has a gradient, which counts in the norm.
    x, y = served(spec_of(columns()))[0]
    other = mlp()
    (other(torch.from_numpy(x)) - torch.from_numpy(y)).square().mean().backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in other[3].parameters()))
    assert records.grad_norm[0] == pytest.approx(norm, rel=1e-5)


def test_tied_and_unused_parameters() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.unused = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    module: Any = Tied()
    data = {"x": columns()["x"], "y": columns()["x"]}
    engine = engine_of(spec_of(data, optim={"kind": "adamw", "decay_mask": "all"}), module)
    state = engine.start()
    advance(engine, state, 2)
    names = set(engine.snapshot(state, 0, 2).arrays)
    assert {"params/first.weight", "params/first.bias", "params/second.bias", "params/unused"} <= names
    assert "params/second.weight" not in names
    assert not [name for name in names if "scratch" in name]
    assert module.second.weight is module.first.weight
    assert (module.unused < 1).all()  # no gradient, but it decays as it does in the other engine


def test_what_the_model_does_not_take_is_said_before_training() -> None:
    with pytest.raises(ModelError, match=r"Sequential does not take a batch x of float32\[2, 3\]"):
        engine_of(spec_of(columns()), mlp(features=4))
    with pytest.raises(ModelError, match="no parameter is left to train: Flatten has none"):
        engine_of(spec_of(columns()), torch.nn.Flatten())
    with pytest.raises(ModelError, match="every one is frozen"):
        engine_of(spec_of(columns()), mlp(), freeze=("*",))
    with pytest.raises(ModelError, match="matches no parameter"):
        engine_of(spec_of(columns()), mlp(), freeze=("nothing",))
    with pytest.raises(ModelError, match="device is 'cuda:99'"):
        engine_of(spec_of(columns()), mlp(), device="cuda:99")
    with pytest.raises(DataError, match="BatchNorm"):
        engine_of(spec_of(columns(5)), torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)))
    with pytest.raises(ConfigError, match="adagrad"):
        engine_of(spec_of(columns(), optim={"kind": "adagrad"}), mlp())


def test_lazy_layers_take_their_sizes_from_the_data() -> None:
    module: Any = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.ReLU(), torch.nn.LazyLinear(1))
    engine = engine_of(spec_of(columns()), module)
    advance(engine, engine.start(), 2)
    assert module[0].weight.shape == (4, 3)


def test_the_stop_is_asked_for_at_windows_ends_and_obeyed() -> None:
    optim = {"kind": "sgd", "max_lr": 0.1, "accumulate_grad_batches": 2}
    engine = engine_of(spec_of(columns(), optim=optim), mlp())
    state = engine.start()
    asked: list[int] = []
    _, done = engine.run_span(state, Span(0, 0, 6), lambda at: asked.append(at) or True)
    assert (done, asked) == (2, [2])
    assert engine.open_batches(state) == 0


def test_undo_gives_back_the_first_weights() -> None:
    module: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    engine = engine_of(spec_of(columns()), module)
    before = weights(module)
    advance(engine, engine.start(), 3)
    assert engine.wrote
    engine.undo()
    assert {n: v.tobytes() for n, v in weights(module).items()} == {n: v.tobytes() for n, v in before.items()}
    assert not engine.wrote


def test_bfloat16_computes_low_and_keeps_float32_weights() -> None:
    seen: list[torch.dtype] = []

    class Watched(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            found = super().forward(input)
            seen.append(found.dtype)
            return found

    module: Any = Watched(3, 1)
    engine = engine_of(spec_of(columns(), precision="bfloat16"), module)
    (records,) = advance(engine, engine.start(), 1)
    assert set(seen) == {torch.bfloat16}
    assert module.weight.dtype == torch.float32
    assert records.loss.dtype == np.float64


def test_float64_is_float64_throughout() -> None:
    data = columns()
    wide = {name: value.astype(np.float64) + 1e-12 for name, value in data.items()}
    module = mlp()
    engine = engine_of(spec_of(wide, precision="float64", optim={"kind": "sgd", "max_lr": 0.05}), module)
    records = advance(engine, engine.start(), 2)
    assert module[0].weight.dtype == torch.float64
    assert joined(records, "rate").tolist() == [0.05, 0.05]
    with pytest.raises(ModelError, match="is float64, but precision is 'float32'"):
        engine_of(spec_of(data), mlp().double())


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_who_looks_at_a_batch_takes_nothing_from_training(kind: str) -> None:
    data = columns(16)
    parts = [(data["x"][i : i + 4], data["y"][i : i + 4]) for i in range(0, 16, 4)]
    spec = spec_of(data, data={"shuffle": False}) if kind == "dataset" else spec_of(train_loader=parts)
    plain, looked = mlp(), mlp()
    engine = engine_of(spec, plain)
    advance(engine, engine.start(), 4)
    engine = engine_of(spec, looked)
    state = engine.start()
    for place in range(4):
        np.testing.assert_array_equal(engine.batch(0, place)["x"].numpy(), data["x"][4 * place : 4 * place + 4])
        engine.run_span(state, Span(0, place, 1), lambda _: False)
        np.testing.assert_array_equal(engine.batch(0, place)["y"].numpy(), data["y"][4 * place : 4 * place + 4])
    assert {n: v.tobytes() for n, v in weights(plain).items()} == {n: v.tobytes() for n, v in weights(looked).items()}
    assert engine.look(state, "models") == {"main": looked}
    seen = engine.look(state, "params")["0.weight"]
    assert torch.equal(seen, looked[0].weight)
    assert seen.data_ptr() != looked[0].weight.data_ptr()
    assert engine.look(state, "learning_rate").item() == pytest.approx(0.02)
    assert engine.look(state, "nothing") is None
    assert isinstance(engine.parts()["optimizers"][0], torch.optim.SGD)
