"""The tool that times engines against the bare loops of their libraries: what a round is, and that both sides agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import ROOT, SCRUBBED


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import bench_engines  # pyright: ignore[reportMissingImports]

    return bench_engines


def test_a_round_ends_with_the_files_of_earlier_commits(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is all from one round's end to the next, with the wait for the disk; the bare loop's steps are not in it."""
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    made: list[int] = []
    job = SimpleNamespace(bare=lambda steps: (made.append(steps), passes(5.0)))
    committer = SimpleNamespace(drain=lambda: passes(0.25))
    clock = bench._Clock(job, 20)
    clock.start()
    for step in (10, 20, 30, 40, 40):  # two commits a round; the last one comes again when the run ends
        passes(1.0)
        clock.commit(committer, SimpleNamespace(step=step))
    assert (clock.ours, clock.theirs, clock.waits) == ([2.25, 2.25], [5.0, 5.0], [0.25, 0.25])
    assert made == [20, 20]
    assert clock.told() == {"commit_wait_ms_per_round": 250.0}


def test_sides_that_do_not_end_alike_have_no_line(bench: Any) -> None:
    job = SimpleNamespace(losses=[2.0, 0.5])
    agreement = bench.Equinox.agreement
    assert agreement(job, None, [2.0, 0.51]) == {"first_loss": [2.0, 2.0], "last_loss": [0.51, 0.5]}
    with pytest.raises(RuntimeError, match=r"first loss is 2\.01 here and 2\.0 in the bare loop"):
        agreement(job, None, [2.01, 0.5])
    with pytest.raises(RuntimeError, match=r"last loss is 0\.8 here"):
        agreement(job, None, [2.0, 0.8])


def test_rounds_end_at_commits(bench: Any) -> None:
    with pytest.raises(ValueError, match="a round of 10 steps does not end at a commit when there is one every 4"):
        bench.time_case("equinox", steps=10, every=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "package", "steps", "told"),
    [
        ("equinox_tiny", "equinox", 20, "first_loss"),
        ("numpyro_svi", "numpyro", 1000, "posterior_mean"),
        ("blackjax", "blackjax", 300, "share_of_equal_draws"),
        ("blackjax_chains", "blackjax", 300, "share_of_equal_draws"),
        ("numpyro_mcmc", "numpyro", 2000, "posterior_mean"),
    ],
)
def test_both_sides_of_an_engine_agree(case: str, package: str, steps: int, told: str) -> None:
    """In the smallest form; the tool raises where they do not, so a line is proof."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    env = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
    words = ["--case", case, "--rounds", "1", "--steps", str(steps)]
    command = [sys.executable, ROOT / "tools" / "bench_engines.py", "--json", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
    assert (line["case"], line["rounds"]) == (case, 1)
    assert told in line
    assert line[package]
    ours, theirs = (line[f"{side}_ms_per_step"]["median"] for side in ("loop", "bare"))
    assert line["ratio_to_bare"] == pytest.approx(ours / theirs, rel=0.05)
