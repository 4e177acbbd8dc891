"""tools/scaling.py: the collectives it tells are the program's, its model is right by hand, its page is whole."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax import load_config
from nnx_jax.model import dry_run

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = 64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10
SMALLEST = ["--nets", "narrow", "--devices", "1", "2", "--processes", "--rows", "128", "--rounds", "1", "--larger"]


@pytest.fixture(scope="module")
def tool() -> Any:
    """The modules of the tool."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("scaling")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The tool's smallest form: its report, and the page that it wrote."""
    page = tmp_path_factory.mktemp("page") / "page.md"
    page.write_text("Before.\n<!-- measured: tools/scaling.py -->\nold\n<!-- end of what was measured -->\nAfter.\n")
    command = [sys.executable, ROOT / "tools" / "scaling.py", "--json", "--write", page, *SMALLEST]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NNX_JAX_", "XLA_FLAGS"))}
    done = subprocess.run(
        command, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), page.read_text()


def test_what_is_measured(found: tuple[dict[str, Any], str]) -> None:
    """One device and two, a fixed global batch and a fixed local one, which meet at two; times are times."""
    rows = found[0]["rows"]
    assert [(row["devices"], row["fixed"], row["rows"]) for row in rows] == [
        (1, "global", 128), (1, "local", 64), (2, "both", 128),
    ]  # fmt: skip
    for row in rows:
        times = [row[name] for name in ("update_seconds", "apart_seconds", "one_device_seconds", "model_seconds")]
        assert all(0 < seconds < 10 for seconds in times)
        assert row["error"] == pytest.approx(row["model_seconds"] / row["update_seconds"] - 1)
    assert rows[0]["one_device_seconds"] == rows[0]["update_seconds"] == rows[2]["one_device_seconds"]


def test_bytes_are_those_of_the_program(found: tuple[dict[str, Any], str], tool: Any, tmp_path: Path) -> None:
    """The gradient of every parameter and a few sums, once; the same as a dry run on that mesh tells."""
    one, _, two = found[0]["rows"]
    assert one["collectives"] == {}
    assert 4 * PARAMETERS < two["bytes"] < 4 * PARAMETERS + 256
    path = tool.write_configs(tmp_path, ["narrow"])["narrow"]
    told = dry_run(load_config(path, ["data.batch_size=128", "mesh={data: 2}"]))
    assert two["collectives"] == told["mesh"]["collectives"]
    assert two["flops"] == pytest.approx(told["flops_per_update"], abs=1)


def test_the_page(found: tuple[dict[str, Any], str]) -> None:
    """Between the two marks stands a table with a line for each point; what is around them stays."""
    lines = found[1].splitlines()
    assert (lines[0], lines[-1], "old" in lines) == ("Before.", "After.", False)
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 1 + 3
    assert len({line.count("|") for line in table}) == 1
    assert any(line.startswith("With 64 rows on each of 2 devices an update takes ") for line in lines)
    assert any(line.startswith("The model's error: 3 points fitted: off by ") for line in lines)


def test_the_documented_page_has_its_marks(tool: Any) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert tool.written(page, "new").count("new") >= 1
    with pytest.raises(SystemExit, match="has no lines"):
        tool.written("nothing", "new")


def program(tool: Any, devices: int, flops: float, moved: int, processes: int = 1) -> Any:
    """A program of one exchange."""
    exchanges = {"all-reduce": {"count": 1, "bytes": moved, "moved": moved}} if devices > 1 else {}
    return tool.Program(devices, processes, flops, 2 * flops**0.5, exchanges)


def test_the_model_by_hand(tool: Any) -> None:
    """Four devices of a machine: 1 call, 4 devices, 4 times the operations, 3 other devices, 4 times the bytes."""
    costs = np.array([1.0, 10.0, 100.0, 0.0, 1000.0, 0.5, 7.0, 7.0])
    assert tool.predict(program(tool, 4, 3.0, 8), costs) == 1 + 40 + 4 * 300 + 3 * 1000 + 4 * 8 * 0.5
    assert tool.predict(program(tool, 2, 3.0, 8, processes=2), costs) == 1 + 20 + 2 * 300 + 7 + 2 * 8 * 7


def test_the_fit_finds_what_made_the_times(tool: Any) -> None:
    """From points of one, two and four devices, with and without exchange, those of eight; what took no time is 0."""
    costs = np.array([2e-4, 5e-5, 2e-11, 0.0, 3e-5, 1e-10, 0.0, 0.0])
    sizes = ((1e6, 1000), (5e7, 4000), (2e8, 10**6))
    known = [program(tool, n, flops, moved) for n in (1, 2, 4) for flops, moved in sizes]
    known += [tool.Program(n, 1, flops, 2 * flops**0.5, {}) for n in (2, 4) for flops, _ in sizes]
    fitted = tool.fit(known, [tool.predict(each, costs) for each in known])
    np.testing.assert_allclose(fitted, costs, rtol=1e-6, atol=1e-15)
    told = tool.told(fitted)
    assert (told["flops_per_second"], told["memory_bytes_per_second"]) == (pytest.approx(5e10), None)
    assert {type(value) for value in told.values()} == {float, type(None)}  # JSON takes no numpy numbers
    more = program(tool, 8, 1e9, 10**7)
    assert tool.predict(more, fitted) == pytest.approx(tool.predict(more, costs), rel=1e-6)


def test_a_cluster_by_hand(tool: Any) -> None:
    """Operations or memory bound computing; 8 devices are 3 latencies apart; hidden behind each other, or not."""
    hardware = tool.Hardware(flops=100.0, memory=10.0, bandwidth=4.0, latency=0.25)
    found = hardware.update(program(tool, 8, 400.0, 2))  # memory: 2 * 20 bytes
    assert found == {"compute": 4.0, "exchange": 0.75 + 0.5, "least": 4.0, "most": 5.25}
    assert hardware.update(program(tool, 1, 1.0, 0)) == {"compute": 0.2, "exchange": 0.0, "least": 0.2, "most": 0.2}
