"""docs/hooks.md tells of every stage and every built-in hook what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from nnx_jax import hooks
from nnx_jax.core.registry import kinds, lookup
from nnx_jax.core.stages import REPLACEMENT_STAGES, UPDATE_STAGES, TrainingStage

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Rows of the first table below a heading, cells without backticks."""
    part = TEXT.partition(f"\n## {heading}\n")[2].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def test_the_stages() -> None:
    """nvalchemi:1 as the page has it: names, values, and who runs them."""
    found = [(int(value), name, place) for value, name, place, _ in table("The stages")]
    assert found == [(stage.value, stage.name, stage.place) for stage in TrainingStage]
    replaced = {name for _, name, _, when in table("The stages") if "replacement stage" in when}
    assert replaced == {stage.name for stage in REPLACEMENT_STAGES}


def test_the_contract() -> None:
    assert [row[0] for row in table("The contract of update hooks")] == [stage.name for stage in UPDATE_STAGES]


def test_every_built_in_hook() -> None:
    hooks.register_builtin()
    built_in = {
        (lookup("hook", kind).__name__, kind)
        for kind in kinds("hook")
        if lookup("hook", kind).__module__.startswith("nnx_jax.")
    }
    assert {(row[0], row[1]) for row in table("What is built in")} == built_in


def test_priorities() -> None:
    """The numbers in the text are those of the classes."""
    classes = {
        "accumulation": hooks.GradientAccumulationHook,
        "mixed": hooks.MixedPrecisionHook,
        "what": hooks.SkipNonFinite,
        "clipping": hooks.GradientClipHook,
        "spikes": hooks.SpikeSkipHook,
        "averages": hooks.EMAHook,
    }
    told = re.search(r"lower `priority` first \((.*?)\)", TEXT, re.DOTALL)
    assert told is not None
    found = dict(re.findall(r"(\d+)\s+(\w+)", told[1]))
    assert len(found) >= 5
    assert {word: classes[word].priority for word in found.values()} == {word: int(n) for n, word in found.items()}
