"""Paths to checkpoints as a user writes them, tags that give up their checkpoint, and files of a later schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnx_jax.core import fsio
from nnx_jax.core.errors import CheckpointError, MissingCheckpointError, ResumePointError, UnsafePathError
from nnx_jax.runs import pointers
from nnx_jax.runs.address import load_address, read_address
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.run import NNRun
from tests.runs.scenario import RUN_ID, commit_epoch, open_store


@pytest.mark.parametrize(
    "address, name", [("", "LAST"), ("BEST", "BEST"), ("checkpoints/FIRST", "FIRST"), ("5", "5"), ("10", "10")]
)
def test_an_address_names_a_run_and_a_checkpoint(pristine: Path, address: str, name: str) -> None:
    paths, found = read_address(pristine / RUN_ID / address)
    assert (paths, found) == (RunPaths(pristine, RUN_ID), name)
    assert load_address(str(pristine / RUN_ID / address)).run_id == RUN_ID


@pytest.mark.parametrize(
    "address, words",
    [
        ("nowhere", "there is no run here"),
        ("nowhere/step_5", "there is no run here"),
        (f"{RUN_ID}/BESTT", "no checkpoint 'BESTT'; did you mean 'BEST'"),
        (f"{RUN_ID}/checkpoints/step_5", "no checkpoint 'step_5'"),
    ],
)
def test_a_missing_checkpoint_is_no_file_found(pristine: Path, address: str, words: str) -> None:
    """nvalchemi:122 for a directory that is not there, and for one without that checkpoint."""
    with pytest.raises(FileNotFoundError, match=words) as caught:
        load_address(pristine / address)
    assert isinstance(caught.value, MissingCheckpointError)
    assert not (pristine / "nowhere").exists()


@pytest.mark.parametrize("inside", ["checkpoints/LAST", "checkpoints/manifests/2.json", "checkpoints/generations/2"])
def test_a_truncated_file_is_a_clear_error(root: Path, inside: str) -> None:
    """nvalchemi:122: half of any file of a checkpoint is refused, naming the file, and nothing is loaded."""
    path = root / RUN_ID / inside
    if path.is_dir():
        path = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ResumePointError, match=path.name):
        load_address(root / RUN_ID)


@pytest.mark.parametrize("file, format", [("LAST", "pointer"), ("manifests/2.json", "manifest")])
def test_a_newer_schema_is_refused_by_its_version(root: Path, file: str, format: str) -> None:
    """nvalchemi:123: not called damaged, which it is not."""
    path = root / RUN_ID / "checkpoints" / file
    later = path.read_bytes().replace(f"nnx_jax.{format}/1".encode(), f"nnx_jax.{format}/2".encode())
    assert later != path.read_bytes()
    path.write_bytes(later)
    paths = RunPaths(root, RUN_ID)
    with pytest.raises(
        ValueError, match=rf"schema 'nnx_jax.{format}/2', newer than .*/1', .*upgrade nnx_jax"
    ) as caught:
        if format == "pointer":
            pointers.read_pointer(paths)
        else:
            from nnx_jax.runs.manifest import read_manifest

            read_manifest(path)
    assert "damaged" not in str(caught.value)


def test_retired_tags_give_their_generation_up(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for epoch in range(4):
            old = (f"step_{epoch - 2}",) if epoch >= 2 else ()
            commit_epoch(store, epoch, names=(), best=False, deferred=(f"step_{epoch}",), retired=old)
    run = NNRun.load(RUN_ID, tmp_path)
    assert run.checkpoints() == ["LAST", "step_2", "step_3"]
    assert sorted(path.name for path in RunPaths(tmp_path, RUN_ID).generations.iterdir()) == ["3", "4"]
    assert load_address(tmp_path / RUN_ID / "step_2").epoch == 2


def test_a_retired_tag_may_be_gone_and_written_in_the_same_commit(tmp_path: Path) -> None:
    """After a crash between LAST and the removal the next commit removes again; a tag just written stays."""
    with open_store(tmp_path) as store:
        commit_epoch(store, 0, names=(), best=False, deferred=("step_1",), retired=("step_1", "step_0"))
    assert NNRun.load(RUN_ID, tmp_path).checkpoints() == ["LAST", "step_1"]


@pytest.mark.parametrize("name", ["LAST", "BEST", "Q1"])
def test_the_stores_own_names_are_never_retired(tmp_path: Path, name: str) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(CheckpointError, match="written by the store itself"):
            commit_epoch(store, 0, retired=(name,))
        with pytest.raises(UnsafePathError, match="written by the store itself"):
            pointers.remove_pointer(store.paths, name)


def test_a_removed_tag_is_synced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, synced = RunPaths(root, RUN_ID), []
    pointers.write_pointer(paths, "mine", pointers.read_pointer(paths) or pytest.fail("no LAST"))
    monkeypatch.setattr(fsio, "sync_dir", synced.append)
    pointers.remove_pointer(paths, "mine")
    assert "mine" not in pointers.pointer_names(paths)
    assert synced == [paths.checkpoints]
