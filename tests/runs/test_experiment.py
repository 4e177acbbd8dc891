"""What an experiment is said to be: identities, the fingerprint, the two files, and how two experiments differ."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import ConfigError, ResumePointError, UnsafePathError
from nnx_jax.data.arrays import ArrayDataset
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.runs.__main__ import main
from nnx_jax.runs.attempt import recorded
from nnx_jax.runs.audit import verify
from nnx_jax.runs.experiment import (
    Attempt,
    ExperimentManifest,
    IdentityRef,
    compare,
    hash_bytes,
    hash_file,
    load_provenance,
)
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.run import NNRun
from tests.runs.scenario import RUN_ID, commit_epoch, open_store

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # SHA-256 of "abc", FIPS 180-2
Capture = pytest.CaptureFixture[str]


def manifest(**changes: Any) -> ExperimentManifest:
    fields = {"task": {"kind": "multiclass"}, "labels": ("a", "b"), "data": {"train": hash_bytes(b"abc")}}
    return ExperimentManifest(**{**fields, **changes})


# Identities -----------------------------------------------------------------------------------------------------------


def test_a_digest_is_of_the_bytes(tmp_path: Path) -> None:
    """From memory, from a file, and through a link: one identity, that of the published test vector."""
    (tmp_path / "rows.csv").write_bytes(b"abc")
    (tmp_path / "link.csv").symlink_to("rows.csv")
    known = IdentityRef(kind="digest", value=f"sha256:{ABC}")
    for found in (hash_bytes(b"abc"), hash_bytes(memoryview(b"abc")), hash_file(tmp_path / "rows.csv")):
        assert found == known
        assert found.verified
    assert hash_file(tmp_path / "link.csv") == known
    assert hash_file(str(tmp_path / "rows.csv")) == known


def test_what_cannot_be_hashed_is_said(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes bytes, got str; encode text first"):
        hash_bytes("abc")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        hash_file(tmp_path / "none")
    with pytest.raises(UnsafePathError, match="not a regular file"):
        hash_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsafePathError, match="not a regular file"):
        hash_file(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "declared"}, "needs a name"),
        ({"kind": "declared", "value": "  "}, "needs a name"),
        ({"kind": "unknown", "value": "x"}, "what is unknown has no value"),
        ({"kind": "digest", "value": "sha256:12"}, "comes from hash_file"),
        ({"kind": "guessed", "value": "x"}, "expected one of"),
    ],
)
def test_an_identity_is_what_it_says(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IdentityRef(**fields)


def test_data_is_identified_by_what_is_given() -> None:
    """A dataset by its rows, text as a name nobody checked, None as unknown; equal rows have one digest."""
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    data: Any = {"rows": ArrayDataset(x=x, y=np.arange(3)), "name": "v2", "none": None}
    said = manifest(data=data, splits={"seed": "7"})
    again = ArrayDataset(x=x.copy(order="F"), y=np.arange(3))
    assert said.data["rows"] == IdentityRef(kind="digest", value=f"sha256:{again.content_hash()}")
    assert said.data["name"] == IdentityRef.declared("v2")
    assert not said.data["name"].verified
    assert said.data["none"] == IdentityRef.unknown()
    assert said.splits["seed"] == IdentityRef.declared("7")


# The manifest ---------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_the_canonical_text() -> None:
    """SHA-256 of sorted keys without spaces; what is not said is not there, so a new field moves no fingerprint."""
    text = (
        '{"format":"nnx_jax.provenance/1","manifest":{"data":{"train":{"kind":"digest","value":"sha256:' + ABC + '"}},'
        '"labels":["a","b"],"task":{"kind":"multiclass"}}}'
    )
    assert manifest().fingerprint() == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"labels": ("b", "a")},
        {"task": {"kind": "multilabel"}},
        {"data": {"train": hash_bytes(b"abd")}},
        {"data": {"train": IdentityRef.declared(f"sha256:{ABC}")}},
        {"splits": {"val": None}},
        {"objective": {"id": "kd", "version": 2}},
        {"config": {"rate": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_counts(change: dict[str, Any]) -> None:
    assert manifest(**change).fingerprint() != manifest().fingerprint()


def test_numbers_count_as_they_are_written() -> None:
    """1 is not 1.0, the order of keys is nothing, and a list, a tuple and an array's number are plain values."""

    def of(**config: Any) -> str:
        return manifest(config=config).fingerprint()

    assert of(rate=1) != of(rate=1.0) != of(rate=True)
    assert of(a=1, b=[1, 2]) == of(b=(1, 2), a=np.int64(1))


def test_a_specification_stands_for_its_state() -> None:
    optim = NNOptimParams(kind="sgd", max_lr=0.5)
    assert manifest(config={"optim": optim}) == manifest(config={"optim": optim.state()})
    assert manifest(model=optim) == manifest(model=optim.state())


def test_later_changes_do_not_reach_it() -> None:
    config = {"rates": [0.1], "deep": {"x": 1}}
    said = manifest(config=config)
    config["rates"].append(0.2)  # type: ignore[attr-defined]
    config["deep"]["x"] = 2  # type: ignore[index]
    assert said.config == {"rates": (0.1,), "deep": {"x": 1}}
    with pytest.raises(TypeError, match="frozen"):
        said.config["deep"]["x"] = 3
    assert ExperimentManifest.from_state(said.state()) == said


@pytest.mark.parametrize(
    ("fields", "path", "message"),
    [
        ({"config": {"f": print}}, "config", "only plain values"),
        ({"config": {"a": {"when": {1, 2}}}}, "config", "only plain values"),
        ({"config": {"x": float("nan")}}, "config", "finite"),
        ({"config": {"a": {3: "x"}}}, "config", "keys must be text"),
        ({"config": {"x": np.zeros(3)}}, "config", "only plain values"),
        ({"labels": "ab"}, "labels", "expected a list"),
        ({"labels": (1, 2)}, "labels", "expected text"),
        ({"data": {"train": 3}}, "data.train", "IdentityRef"),
        ({"data": "train.csv"}, "data", "expected a mapping"),
        ({"model": 3}, "model", "expected a mapping"),
        ({"dataset": {}}, "dataset", "did you mean 'data'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_no_file_can_hold_is_refused(fields: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ExperimentManifest(**fields)
    assert f"ExperimentManifest.{path}" in str(caught.value)


# The files ------------------------------------------------------------------------------------------------------------


def attempt_at(root: Path, said: ExperimentManifest | None, epochs: int, error: BaseException | None = None) -> None:
    """Commit up to `epochs` epochs, then fail with `error`."""
    with open_store(root) as store, recorded(store, said, None):
        for epoch in range(store.point.epoch + 1 if store.point else 0, epochs):
            commit_epoch(store, epoch)
        if error is not None:
            raise error


def newest(root: Path) -> Attempt:
    """The attempt that the run's file tells of."""
    attempt = NNRun.load(RUN_ID, root).attempt
    assert attempt is not None
    return attempt


def test_a_run_without_a_manifest_has_neither_file(root: Path) -> None:
    assert load_provenance(RUN_ID, root) is None
    assert NNRun.load(RUN_ID, root).provenance is None
    assert NNRun.load(RUN_ID, root).attempt is None
    attempt_at(root, None, 3)
    assert not RunPaths(root, RUN_ID).provenance.exists()
    assert not RunPaths(root, RUN_ID).attempt.exists()


def test_an_unknown_run_is_said_clearly(root: Path) -> None:
    with pytest.raises(ResumePointError, match=f"there is no run 'a1b2' in .*{RUN_ID}"):
        load_provenance("a1b2", root)
    with pytest.raises(UnsafePathError):
        load_provenance("../x", root)


def test_files_are_private_and_plain(tmp_path: Path) -> None:
    attempt_at(tmp_path, manifest(), 1)
    paths = RunPaths(tmp_path, RUN_ID)
    for path in (paths.provenance, paths.attempt):
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(path.read_text())["format"] == "nnx_jax.provenance/1"
    stored = json.loads(paths.provenance.read_text())
    assert stored["fingerprint"] == manifest().fingerprint()
    assert stored["manifest"] == manifest().state()


def test_while_it_runs_the_file_says_so(tmp_path: Path) -> None:
    with open_store(tmp_path) as store, recorded(store, manifest(), None):
        attempt = newest(tmp_path)
        assert (attempt.status, attempt.finished_at, attempt.last_committed) == ("running", None, None)


def test_a_continued_run_keeps_its_manifest(tmp_path: Path) -> None:
    """None keeps what there is; the attempt before is the parent, with the commit that was continued."""
    attempt_at(tmp_path, manifest(), 1)
    first = newest(tmp_path)
    attempt_at(tmp_path, None, 2)
    second = newest(tmp_path)
    assert second.fingerprint == manifest().fingerprint()
    assert second.attempt_id != first.attempt_id
    assert second.parent == {
        "run_id": RUN_ID, "attempt_id": first.attempt_id, "tag": "LAST", "epoch": 0, "step": 5, "generation": 1,
    }  # fmt: skip
    assert second.last_committed == {"tag": "LAST", "epoch": 1, "step": 10, "generation": 2}


def test_a_run_is_of_one_experiment(tmp_path: Path) -> None:
    """Going on under another manifest is refused, what differs is told, and nothing is written."""
    attempt_at(tmp_path, manifest(), 1)
    paths = RunPaths(tmp_path, RUN_ID)
    before = paths.provenance.read_bytes(), paths.attempt.read_bytes()
    with pytest.raises(ConfigError, match=r"labels\[1\]: different: 'b' and 'c'.*leave provenance out.*salt"):
        attempt_at(tmp_path, manifest(labels=("a", "c")), 2)
    assert (paths.provenance.read_bytes(), paths.attempt.read_bytes()) == before
    assert NNRun.load(RUN_ID, tmp_path).last.epoch == 0  # type: ignore[union-attr]


def test_a_manifest_can_be_given_to_a_run_that_has_none(root: Path) -> None:
    attempt_at(root, manifest(), 3)
    attempt = newest(root)
    assert attempt.parent is not None
    assert (attempt.status, attempt.parent["attempt_id"], attempt.parent["epoch"]) == ("completed", None, 1)


def test_files_of_a_start_without_a_commit_are_of_no_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="early"):
        attempt_at(tmp_path, manifest(), 0, RuntimeError("early"))
    assert newest(tmp_path).status == "failed"
    attempt_at(tmp_path, None, 1)
    assert load_provenance(RUN_ID, tmp_path) is None
    assert verify(tmp_path, RUN_ID) == []


def test_an_error_of_any_text_is_kept(tmp_path: Path) -> None:
    """Half a surrogate pair (a file name that is no UTF-8) is no reason to lose the record; a long text is cut."""
    with pytest.raises(RuntimeError):
        attempt_at(tmp_path, manifest(), 1, RuntimeError("\udcff" + "x" * 10_000))
    assert newest(tmp_path).error == {"type": "RuntimeError", "message": "\\udcff" + "x" * 1999}


def test_a_writer_that_lost_its_lease_writes_nothing(tmp_path: Path) -> None:
    told = "this attempt is completed, but attempt.json cannot say so.*was removed"
    with pytest.warns(RuntimeWarning, match=told), open_store(tmp_path) as store, recorded(store, manifest(), None):
        store.paths.lease_lock.unlink()
    assert json.loads(RunPaths(tmp_path, RUN_ID).attempt.read_text())["status"] == "running"


DAMAGE = {
    "edited": ("provenance.json", lambda text: text.replace("multiclass", "binary"), "was edited or damaged"),
    "empty": ("provenance.json", lambda text: "", "cannot be read"),
    "foreign": ("provenance.json", lambda text: text.replace("nnx_jax.provenance/1", "other/9"), "is not of the form"),
    "list": ("attempt.json", lambda text: "[]", "is not of the form"),
    "status": ("attempt.json", lambda text: text.replace("completed", "happy"), "status is 'happy'"),
    "run": ("attempt.json", lambda text: text.replace(RUN_ID, "other"), "of another run or experiment"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_and_the_run_reads_on(tmp_path: Path, kind: str, capsys: Capture) -> None:
    """Everything but the provenance can be read, `verify` has one line for it, and training goes on with a warning."""
    attempt_at(tmp_path, manifest(), 1)
    name, change, message = DAMAGE[kind]
    path = tmp_path / RUN_ID / name
    path.write_text(change(path.read_text()))
    run = NNRun.load(RUN_ID, tmp_path)
    assert run.status == "interrupted"
    assert len(run.records) == 1
    with pytest.raises(ResumePointError, match=message):
        load_provenance(RUN_ID, tmp_path)
    (fault,) = verify(tmp_path, RUN_ID)
    assert name in fault
    assert message in fault
    assert main(["--runs-dir", str(tmp_path), "show", RUN_ID]) == 0
    assert f"provenance: {fault}\nconfiguration:" in capsys.readouterr().out
    assert main(["--runs-dir", str(tmp_path), "show", RUN_ID, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"] == {"error": fault}
    with pytest.warns(RuntimeWarning, match="this attempt is not recorded"):
        attempt_at(tmp_path, None, 2)
    with pytest.warns(RuntimeWarning, match="both files are written anew"):
        attempt_at(tmp_path, manifest(), 3)
    assert newest(tmp_path).last_committed == {"tag": "LAST", "epoch": 2, "step": 15, "generation": 3}


def test_an_attempt_without_its_manifest_is_a_fault(tmp_path: Path) -> None:
    attempt_at(tmp_path, manifest(), 1)
    RunPaths(tmp_path, RUN_ID).provenance.unlink()
    (fault,) = verify(tmp_path, RUN_ID)
    assert "attempt.json: is there without provenance.json" in fault


def test_show(tmp_path: Path, capsys: Capture) -> None:
    attempt_at(tmp_path, manifest(), 2)
    command = ["--runs-dir", str(tmp_path), "show", RUN_ID]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    attempt = newest(tmp_path)
    assert f"attempt {attempt.attempt_id}: completed" in lines
    assert "  last_committed: tag=LAST  epoch=1  step=10  generation=2" in lines
    assert lines[lines.index(f"experiment {manifest().fingerprint()}:") + 1] == "  task:"
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["provenance"] == {**manifest().document(), "fingerprint": manifest().fingerprint()}
    assert found["attempt"] == attempt.state()


def test_show_tells_a_killed_attempt_from_a_running_one(tmp_path: Path, capsys: Capture) -> None:
    command = ["--runs-dir", str(tmp_path), "show", RUN_ID]
    with open_store(tmp_path) as store, recorded(store, manifest(), None):
        left = store.paths.attempt.read_bytes()
        assert main(command) == 0
        assert ": running\n" in capsys.readouterr().out
    RunPaths(tmp_path, RUN_ID).attempt.write_bytes(left)  # as a kill leaves it
    assert main(command) == 0
    assert ": running when it was killed\n" in capsys.readouterr().out


# Comparison -----------------------------------------------------------------------------------------------------------


def test_every_field_is_compared_by_its_path() -> None:
    left = manifest(
        data={"same": hash_bytes(b"1"), "named": "v1", "other": hash_bytes(b"1"), "open": None, "gone": "x"},
        config={"rates": [0.1, 0.2], "seed": 1, "nothing": {}},
    )
    right = manifest(
        labels=("a", "b", "c"),
        data={"same": hash_bytes(b"1"), "named": "v1", "other": hash_bytes(b"2"), "open": "v1"},
        config={"rates": [0.1, 0.3], "seed": 1.0, "nothing": {}},
    )
    found = compare(left, right)
    assert {path: field.status for path, field in found.by_path().items()} == {
        "config.nothing": "equal",
        "config.rates[0]": "equal",
        "config.rates[1]": "different",
        "config.seed": "different",
        "data.gone": "missing",
        "data.named": "declared",
        "data.open": "unknown",
        "data.other": "different",
        "data.same": "verified",
        "labels[0]": "equal",
        "labels[1]": "equal",
        "labels[2]": "missing",
        "task.kind": "equal",
    }
    assert (found.by_path()["labels[2]"].left, found.by_path()["labels[2]"].right) == (None, "c")
    assert len(found.differences) == 7
    assert not found.verified_equal
    assert str(found.by_path()["config.rates[1]"]) == "config.rates[1]: different: 0.2 and 0.3"


def test_equal_needs_proof() -> None:
    """Digests prove it; a name, an unknown, an empty manifest or none at all do not."""
    assert compare(manifest(), manifest()).verified_equal
    for said in (manifest(data={"train": "v1"}), manifest(data={"train": None}), ExperimentManifest()):
        assert not compare(said, said).verified_equal
    assert [each.status for each in compare(None, manifest()).fields] == ["absent"]
    assert not compare(None, None).verified_equal


def test_runs_are_compared_by_their_files(tmp_path: Path, root: Path) -> None:
    attempt_at(tmp_path, manifest(), 1)
    run = NNRun.load(RUN_ID, tmp_path)
    for given in (RUN_ID, run, run.provenance, manifest()):
        assert compare(given, manifest(), root=tmp_path).verified_equal
    assert compare(RUN_ID, manifest(), root=root).fields[0].status == "absent"
    with pytest.raises(TypeError, match="takes manifests, provenance records, runs or run ids, got int"):
        compare(3, manifest())
