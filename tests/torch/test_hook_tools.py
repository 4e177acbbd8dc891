"""Hooks around a torch run: profiles, patched modules, data parallel for one process, regions of full precision."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnx_jax.core.errors import ConfigError, HookStateError
from nnx_jax.core.stages import TrainingStage as Stage
from nnx_jax.hooks import (
    DDPHook,
    HookSpec,
    MixedPrecisionHook,
    ModulePatchHook,
    ProfilerHook,
    TorchProfilerHook,
    full_precision,
)
from nnx_jax.torch import NNModel
from tests.torch.test_hook_runs import arrays, different, fit, net


def names_in(path: Path) -> set[str]:
    """Names of what a Chrome trace holds."""
    return {event.get("name", "") for event in json.loads(path.read_bytes())["traceEvents"]}


def traces(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_profile_of_some_batches(tmp_path: Path) -> None:
    """nvalchemi:142: the founding document's example; a Chrome trace a cycle below the process's rank, nothing of the
    batches that pass by, and training as without it."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import schedule as cycles

    seeds: Any = TorchProfilerHook
    hook = seeds(
        output_dir=tmp_path / "profiles", activities=(ProfilerActivity.CPU,), record_shapes=True,
        schedule=cycles(wait=1, warmup=1, active=2, repeat=1),
    )  # fmt: skip
    run, _ = fit(tmp_path / "a", [hook])
    assert traces(tmp_path / "profiles") == ["rank_0/torch/trace_0.json"]
    assert "aten::addmm" in names_in(tmp_path / "profiles/rank_0/torch/trace_0.json")
    assert different(arrays(run), arrays(fit(tmp_path / "b", [])[0])) == []
    with pytest.raises(HookStateError, match="make another one for another run"):
        fit(tmp_path / "c", [hook])


def test_a_lone_batch_starts_it_and_leaving_ends_it(tmp_path: Path) -> None:
    """nvalchemi:143 for the hook alone; rank 1 of a group writes below its own name."""
    ctx = SimpleNamespace(workflow=None, global_rank=1)
    with pytest.raises(ZeroDivisionError), TorchProfilerHook(str(tmp_path / "profiles")) as hook:
        assert not (tmp_path / "profiles").exists()
        hook(ctx, Stage.BEFORE_BATCH)
        with pytest.raises(HookStateError, match="another profiler is active"):
            TorchProfilerHook(str(tmp_path / "second"))(ctx, Stage.BEFORE_BATCH)
        torch.ones(3).sum()
        hook(ctx, Stage.AFTER_BATCH)
        raise ZeroDivisionError
    assert traces(tmp_path / "profiles") == ["rank_1/torch/trace_0.json"]
    assert "aten::sum" in names_in(tmp_path / "profiles/rank_1/torch/trace_0.json")
    hook.close()
    with TorchProfilerHook(str(tmp_path / "none")):
        pass
    assert not (tmp_path / "none").exists()


def test_profilers_say_whose_they_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TorchProfilerHook takes the same"):
        fit(tmp_path, [ProfilerHook(str(tmp_path / "profiles"))])
    made = HookSpec.from_yaml("{kind: torch_profiler, output_dir: out, activities: [CPU], schedule: {wait: 1}}")
    assert made == TorchProfilerHook("out", activities="cpu", schedule={"wait": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the activities are cpu, cuda"):
        TorchProfilerHook("out", activities=("tpu",))
    with pytest.raises(ConfigError, match="got a function"):
        TorchProfilerHook("out", schedule=lambda step: None)  # type: ignore[arg-type]


def test_modules_are_patched_before_the_optimizer_is_built(tmp_path: Path) -> None:
    """nvalchemi:148 on torch modules: replaced by name or by place, all or nothing, and part of the run's id."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = net(), torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    def head(value: float) -> Any:
        made = torch.nn.Linear(3, 3)
        return torch.nn.init.constant_(made.weight, value), torch.nn.init.zeros_(made.bias), made

    module = Two()
    new, tanh = head(0.5)[-1], torch.nn.ReLU()
    run, _ = fit(tmp_path, [ModulePatchHook({"main.head": new, "main.body.1": tanh})], of=NNModel(module=module))
    assert module.head is new
    assert module.body[1] is tanh
    assert "opt_state/head.weight/exp_avg" in arrays(run)
    assert not torch.equal(new.weight, head(0.5)[-1].weight)
    other = ModulePatchHook({"main.head": head(0.25)[-1]}).state()["patches"]
    assert other != ModulePatchHook({"main.head": head(0.5)[-1]}).state()["patches"]
    for target, error in {"other.head": KeyError, "main.tail.head": AttributeError}.items():
        with pytest.raises(error):
            fit(tmp_path / "bad", [ModulePatchHook({target: torch.nn.Identity()})], of=NNModel(module=Two()))
    with pytest.raises(TypeError, match="is a int"):
        fit(tmp_path / "bad", [ModulePatchHook({"main.head": 3})], of=NNModel(module=Two()))


def test_data_parallel_alone_does_nothing(tmp_path: Path) -> None:
    """nvalchemi:126 nvalchemi:130 in either order; a torch process has one device."""
    plain, _ = fit(tmp_path / "plain", [MixedPrecisionHook("bf16")], max_steps=2)
    for place, hooks in enumerate(([DDPHook(), MixedPrecisionHook("bf16")], [MixedPrecisionHook("bf16"), DDPHook()])):
        module = net()
        run, model = fit(tmp_path / str(place), hooks, of=NNModel(module=module), max_steps=2)
        assert model.net is module
        assert run.id == plain.id
        assert different(arrays(run), arrays(plain)) == []
    with pytest.raises(ConfigError, match="a process of the engine 'torch' has one device"):
        fit(tmp_path / "two", [DDPHook(devices=2)], max_steps=1)


def test_a_region_in_full_precision(tmp_path: Path) -> None:
    """nvalchemi:86: `full_precision()`, or torch's own word for it."""
    seen: dict[str, torch.dtype] = {}

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen["a"] = (x := self.a(x)).dtype
            with full_precision():
                seen["b"] = (x := self.b(x.float())).dtype
            with torch.autocast("cpu", enabled=False):
                seen["c"] = (x := self.c(x)).dtype
            return x[:, :3]

    fit(tmp_path, [MixedPrecisionHook("bf16")], of=NNModel(module=Parts()), max_steps=1)
    assert seen == {"a": torch.bfloat16, "b": torch.float32, "c": torch.float32}
