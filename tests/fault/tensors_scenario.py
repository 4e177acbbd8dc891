"""The scenario of the crash tests with generations stored as safetensors; whoever pickles fails."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import safetensors.numpy

from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.tensors import FILE, TensorWriter
from tests import pickles
from tools.fault.ops import Shim


def _own_scenario() -> Any:
    """A copy of `scenario.py` of this file's own, since the one with a journal sets the other way to store."""
    found = importlib.util.spec_from_file_location("fault_scenario_of_tensors", Path(__file__).with_name("scenario.py"))
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


scenario = _own_scenario()
scenario.MAKE_WRITER = TensorWriter


def serve(shim: Shim, request: dict[str, Any]) -> Any:
    """Entry point of the server."""
    pickles.forbid()
    return scenario.serve(shim, request)


def check(root: Path, epoch: int, **given: Any) -> str | None:
    """As of `scenario.py`; and after that LAST's file of arrays is that of an undisturbed run, byte for byte."""
    if (problem := scenario.check(root, epoch, **given)) is not None:
        return problem
    if (last := scenario.standing(root)) is None:
        return None
    found = (RunPaths(root, scenario.RUN).generation(last.generation) / FILE).read_bytes()
    if found != safetensors.numpy.save(scenario.expected_arrays(last.epoch)):
        return f"I4: {FILE} of epoch {last.epoch} has other bytes than that of a run that was never interrupted"
    return None
