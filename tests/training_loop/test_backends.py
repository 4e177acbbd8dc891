"""Backends of others: registered by hand or by an entry point, and what is refused."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.backends import base
from nnx_jax.backends.base import backend_names, register_backend
from tests.training_loop.scenes import loop

NAMESPACE = "scene_outside"
SOURCE = '''
"""A backend that trains nothing: it counts."""

from nnx_jax.backends.base import Trained
from nnx_jax.backends.carry import TrainerCarryState


def run(loop, state):
    done = (0 if state is None else state.step) + loop.max_steps
    state = TrainerCarryState(loop.model_op, step=done, loop=loop.identity())
    return Trained(loop.model_op, state, {"backend": loop.backend, "final_step": done})
'''


def install(folder: Path, name: str, declared: str, source: str | None = SOURCE) -> None:
    """Put a distribution into a folder as an installer does: a package, and its metadata beside it."""
    if source is not None:
        (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        textwrap.dedent(f"""\
        [nnx_jax.backends]
        {declared}
    """)
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed distributions, gone again afterwards with what was imported and registered."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(base, "_MODULES", dict(base._MODULES))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(NAMESPACE):
            del sys.modules[name]


def test_a_distribution_brings_a_backend(site: Path) -> None:
    """Its entry point is enough: the name is known, and the module is imported when a loop runs (pipekit:M4).

    A loop is made and described before that (pipekit:F11), and carries a state like any other.
    """
    install(site, f"{NAMESPACE}_counts", f"scene-counts = {NAMESPACE}_counts")
    assert any(point.name == "scene-counts" for point in entry_points(group="nnx_jax.backends"))
    assert "scene-counts" in backend_names()
    made = loop(backend="scene-counts", max_steps=7)
    assert loop(backend="scene-counts").to_config()["backend"] == "scene-counts"
    assert f"{NAMESPACE}_counts" not in sys.modules
    operator, artifact = made.run()
    assert operator is made.model_op
    assert artifact.backend_info == {"backend": "scene-counts", "final_step": 7}
    assert (made | made)(None, None)[1].step == 14


def test_a_module_may_be_registered_by_hand(site: Path) -> None:
    """`register_backend(name, module)`; again with the same module is fine, with another one is not (pipekit:M4)."""
    (site / f"{NAMESPACE}_hand.py").write_text(SOURCE)
    register_backend("scene-hand", f"{NAMESPACE}_hand")
    register_backend("scene-hand", f"{NAMESPACE}_hand")
    assert loop(backend="scene-hand", max_steps=3)(None, None)[1].step == 3
    with pytest.raises(ValueError, match=f"'scene-hand' is taken by {NAMESPACE}_hand.*replace=True"):
        register_backend("scene-hand", "another")
    with pytest.raises(ValueError, match="'nnx' is taken by nnx_jax.backends.nnx"):
        register_backend("nnx", "another")
    register_backend("scene-hand", "another", replace=True)
    assert loop(backend="scene-hand").backend == "scene-hand"


def test_a_name_that_a_distribution_has_is_taken(site: Path) -> None:
    """By hand it can only be replaced on purpose; two distributions with one name are an error (pipekit:M4)."""
    install(site, f"{NAMESPACE}_one", f"scene-both = {NAMESPACE}_one")
    with pytest.raises(ValueError, match=f"'scene-both' is taken by {NAMESPACE}_one"):
        register_backend("scene-both", "another")
    install(site, f"{NAMESPACE}_two", f"scene-both = {NAMESPACE}_two")
    with pytest.raises(ValueError, match="two packages declare the backend 'scene-both'"):
        loop(backend="scene-both")
    register_backend("scene-both", f"{NAMESPACE}_one", replace=True)
    assert loop(backend="scene-both", max_steps=2)(None, None)[1].step == 2


def test_a_backend_that_cannot_be_imported_says_so_when_it_runs(site: Path) -> None:
    """The loop can be made (pipekit:F11); a module without `run` is named, too (pipekit:M3)."""
    install(site, f"{NAMESPACE}_gone", f"scene-gone = {NAMESPACE}_gone", source=None)
    with pytest.raises(ImportError, match=f"'scene-gone' is the module {NAMESPACE}_gone.*install the package"):
        loop(backend="scene-gone")(None, None)
    install(site, f"{NAMESPACE}_bare", f"scene-bare = {NAMESPACE}_bare", source='"""Nothing."""\n')
    with pytest.raises(ValueError, match=rf"'scene-bare' is the module {NAMESPACE}_bare, which has no run\("):
        loop(backend="scene-bare")(None, None)


@pytest.mark.parametrize(("name", "module"), [("", "module"), ("name", ""), (3, "module"), ("name", sys)])
def test_a_backend_is_a_name_and_the_name_of_a_module(name: Any, module: Any) -> None:
    with pytest.raises(ValueError, match="a name and a module's dotted name"):
        register_backend(name, module)


def test_a_near_name_is_suggested() -> None:
    """(pipekit:F1)."""
    with pytest.raises(ValueError, match="did you mean 'numpyro-svi'"):
        loop(backend="numpyro_svi")
