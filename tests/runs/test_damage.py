"""Damaged, foreign and hostile run directories: refused with one named error, read by nobody, changed by nobody."""

from __future__ import annotations

import builtins
import json
import os
import pickle  # noqa: TID251 - planted, to show that nobody reads it
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnx_jax.core.errors import CheckpointError, HistoryCorruptionError, NnxError, ResumePointError, UnsafePathError
from nnx_jax.runs import audit, pointers, resume
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.leaves import Leaf, index_bytes, read_index
from nnx_jax.runs.manifest import Manifest, read_manifest, verify_files
from nnx_jax.runs.pointers import parse_pointer
from nnx_jax.runs.resume import find_point, read_point
from nnx_jax.runs.run import NNRun
from tests.runs import scenario
from tests.runs.scenario import RUN_ID, commit_epoch, open_store


def snapshot(root: Path) -> dict[str, bytes | None]:
    """Every file of a runs directory with its bytes (leases aside), for "nothing was changed"."""
    paths = [path for path in sorted(root.rglob("*")) if ".leases" not in path.parts]
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in paths}


def committed_files(root: Path) -> list[Path]:
    """Every file below the generations and manifests, and the pointers."""
    return sorted(path for path in (root / RUN_ID / "checkpoints").rglob("*") if path.is_file())


def newest(root: Path) -> Path:
    return root / RUN_ID / "checkpoints" / "generations" / "2"


def refused(root: Path, *, match: str) -> None:
    """LAST is refused by a reader and by a writer, and neither changes a byte."""
    before = snapshot(root)
    with pytest.raises(ResumePointError, match=match):
        read_point(RunPaths(root, RUN_ID))
    with pytest.raises(ResumePointError, match=match):
        open_store(root)
    assert snapshot(root) == before


# LAST ----------------------------------------------------------------------------------------------------------------


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "blank": lambda data: b" \n",
    "half": lambda data: data[: len(data) // 2],
    "no newline": lambda data: data[:-1],
    "random": lambda data: bytes(range(200)),
    "pickle": lambda data: pickle.dumps({"generation": 2}),
    "not an object": lambda data: b"[]\n",
    "other format": lambda data: data.replace(b"pointer/1", b"pointer/9"),
    "extra field": lambda data: data.replace(b'{"artifact"', b'{"a":1,"artifact"'),
    "missing field": lambda data: data.replace(b'"batch":10,', b""),
    "float counter": lambda data: data.replace(b'"epoch":1', b'"epoch":1.0'),
    "negative": lambda data: data.replace(b'"epoch":1', b'"epoch":-1'),
    "spaces": lambda data: data.replace(b":", b": "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_last_is_refused(root: Path, damage: str) -> None:
    """nnx:B103 nnx:S29 case:I05 one error class naming the file, for a reader and for a start; never "no history"."""
    last = RunPaths(root, RUN_ID).pointer("LAST")
    data = last.read_bytes()
    last.write_bytes(DAMAGES[damage](data))
    assert last.read_bytes() != data
    refused(root, match="LAST: is (empty|damaged|of schema)")
    with pytest.raises(ResumePointError, match="LAST: is (empty|damaged|of schema)"):
        NNRun.load(RUN_ID, root)
    assert any("LAST" in fault for fault in audit.verify(root, RUN_ID))


def test_a_foreign_last_is_refused(root: Path, tmp_path: Path) -> None:
    """nnx:B103 nnx:B127 LAST of another run."""
    scenario.run(tmp_path / "other", 1, "other")
    shutil.copy(tmp_path / "other" / "other" / "checkpoints" / "LAST", RunPaths(root, RUN_ID).pointer("LAST"))
    refused(root, match="belongs to run 'other'")
    with pytest.raises(ResumePointError, match="belongs to run 'other'"):
        NNRun.load(RUN_ID, root)


def test_a_deleted_last_means_no_records(root: Path) -> None:
    """nnx:B104 nnx:S29 zero records rather than unfiltered ones; and a start does not silently begin anew."""
    RunPaths(root, RUN_ID).pointer("LAST").unlink()
    before = snapshot(root)
    run = NNRun.load(RUN_ID, root)
    assert (run.records, run.status) == ([], "fresh")
    with pytest.raises(ResumePointError, match="LAST: is gone, though BEST, FIRST, Q2 name checkpoints"):
        open_store(root)
    assert snapshot(root) == before
    assert audit.verify(root, RUN_ID) != []


def test_every_byte_of_last_and_manifest_counts(pristine: Path) -> None:
    """case:I04 D6: any changed byte of LAST or of the manifest is an error that names the file."""
    paths = RunPaths(pristine, RUN_ID)
    last = paths.pointer("LAST")
    data = last.read_bytes()
    good = parse_pointer(data, last, RUN_ID)
    for at in range(len(data)):
        for bit in (0, 3, 7):
            flipped = data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
            try:
                found = parse_pointer(flipped, last, RUN_ID)
            except ResumePointError as error:
                assert str(last) in str(error)  # noqa: PT017 - most flips end here, the rest are checked below
            else:  # a digit became another digit: caught by the manifest's digest or by the counters beside it
                assert found != good
                assert found.generation != 2 or disagrees(paths, found)


def disagrees(paths: RunPaths, found: pointers.Pointer) -> bool:
    """Return whether a flipped pointer is contradicted elsewhere, or differs only where a resume never looks."""
    try:
        manifest = read_manifest(paths.manifest(found.generation), sha256=found.manifest)
    except ResumePointError:
        return True
    if any(getattr(found, name) != getattr(manifest, name) for name in ("epoch", "step", "batch")):
        return True
    good = pointers.read_pointer(paths)
    assert good is not None
    return found.history != good.history or found.fencing != good.fencing or found.score != good.score


# Files of a generation -----------------------------------------------------------------------------------------------


def test_single_bit_flips_are_found_everywhere(root: Path) -> None:
    """case:I04 nnx:B126 D6: one flipped bit in the head, middle or tail of every file is refused and named."""
    rng = random.Random(4)
    paths = RunPaths(root, RUN_ID)
    count = 0
    for path in [*newest(root).rglob("*"), paths.manifest(2)]:
        if not path.is_file():
            continue
        data = path.read_bytes()
        for low, high in ((0, 1), (1, len(data) - 1), (len(data) - 1, len(data))):
            at = rng.randrange(low, max(high, low + 1)) % len(data)
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
            with pytest.raises(ResumePointError, match=path.name):
                read_point(paths)
            count += 1
        path.write_bytes(data)
    assert count >= 25
    assert read_point(paths).epoch == 1


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def add(path: Path) -> None:
    path.with_name("added").write_bytes(b"x")


FAULTS: dict[str, Callable[[Path], object]] = {
    "truncate": truncate,
    "empty": lambda path: os.truncate(path, 0),
    "extend": extend,
    "delete": Path.unlink,
    "add": add,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_file_every_fault(pristine: Path, tmp_path: Path, fault: str) -> None:
    """case:I05 case:I04 D7 nnx:B127: each file of a generation and its manifest: cut, grown, gone, or one more."""
    relative = [path.relative_to(pristine) for path in committed_files(pristine)]
    relative = [path for path in relative if "generations/2/" in path.as_posix() or path.name == "2.json"]
    assert len(relative) >= 12
    copy = tmp_path / "runs"
    shutil.copytree(pristine, copy, symlinks=True)
    for path in relative:
        victim = copy / path
        data = victim.read_bytes()
        FAULTS[fault](victim)
        if fault == "add" and path.name == "2.json":
            victim.with_name("added").unlink()
            continue
        named = "added" if fault == "add" else path.name
        with pytest.raises(ResumePointError, match=named):
            read_point(RunPaths(copy, RUN_ID))
        assert any(named in line for line in audit.verify(copy, RUN_ID))
        victim.with_name("added").unlink(missing_ok=True)
        victim.write_bytes(data)
    assert audit.verify(copy, RUN_ID) == []


def test_two_files_swapped(root: Path) -> None:
    """D7: the bytes are all there, under each other's names."""
    first, second = newest(root) / "host.json", newest(root) / "arrays.json"
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    refused(root, match="the manifest says|SHA-256 differs")


def test_two_generations_swapped(root: Path) -> None:
    """D7 nnx:B127: directories 1 and 2 change places, then their manifests too: mixed files."""
    paths = RunPaths(root, RUN_ID)
    swap(paths.generation(1), paths.generation(2))
    refused(root, match="generations/2/.*(missing|differs|bytes)")
    swap(paths.manifest(1), paths.manifest(2))
    refused(root, match=r"2\.json: is not the manifest its pointer names \(mixed")


def swap(a: Path, b: Path) -> None:
    spare = a.with_name("spare")
    a.rename(spare)
    b.rename(a)
    spare.rename(b)


def test_a_pointer_that_disagrees_with_its_manifest(root: Path) -> None:
    """nnx:B127 the epoch of LAST was edited: mixed."""
    last = RunPaths(root, RUN_ID).pointer("LAST")
    last.write_bytes(last.read_bytes().replace(b'"epoch":1', b'"epoch":7'))
    refused(root, match="epoch differs from the manifest's; the files are mixed")


@pytest.mark.parametrize("field", ["generation", "run_id"])
def test_a_manifest_of_something_else(root: Path, field: str) -> None:
    """nnx:B127 a manifest naming another run is torn, another generation mixed (even with a matching digest)."""
    paths = RunPaths(root, RUN_ID)
    old, new = {"generation": (b'"generation":2', b'"generation":3'), "run_id": (RUN_ID.encode(), b"other")}[field]
    path = paths.manifest(2)
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ResumePointError, match={"generation": "mixed", "run_id": "torn"}[field]):
        resume.read_generation(paths, 2)


def test_an_unreadable_checkpoint_names_the_others(root: Path) -> None:
    """case:I05 no silent fall-back: the error says which other checkpoints there are, and one of them loads."""
    (newest(root) / "host.json").unlink()
    refused(root, match=r"checkpoint LAST of run .*host\.json: is missing; other checkpoints of this run: BEST, FIRST")
    assert find_point(root, f"{RUN_ID}@FIRST").epoch == 0


def test_missing_history_is_corruption(root: Path) -> None:
    """nnx:B103 the history LAST speaks of is gone: refused by readers and by a start."""
    (root / RUN_ID / "idps.csv").unlink()
    run = NNRun.load(RUN_ID, root)
    with pytest.raises(HistoryCorruptionError, match=r"idps\.csv: the committed history cannot be read"):
        run.column("loss")
    with pytest.raises(HistoryCorruptionError, match=r"idps\.csv"):
        open_store(root)


def test_rows_past_last_are_hidden_and_left_alone(root: Path) -> None:
    """nnx:B102 nnx:S29 `load` stops at LAST and does not touch the file."""
    path = root / RUN_ID / "idps.csv"
    with path.open("ab") as file:
        file.write(b'2,15,0.25,"late"\n3,20,')
    before = snapshot(root)
    assert [row["epoch"] for row in NNRun.load(RUN_ID, root).records] == [0, 1]
    assert audit.verify(root, RUN_ID) == []
    assert snapshot(root) == before


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=80))
def test_random_bytes_as_pointer(data: bytes) -> None:
    """Q10: parsing anything raises the typed error, never another one."""
    with pytest.raises(ResumePointError, match="/x/LAST"):
        parse_pointer(data, Path("/x/LAST"), "r")


# Names, links, code --------------------------------------------------------------------------------------------------


BAD_IDS = ["../x", "a/b", "", "..", ".", "a*", "a?", "a\0b", "/etc/x", "a/../../b", "~", "x" * 300, "é", "a\\b"]
BAD_IDS += ["best", ".leases"]


@pytest.mark.parametrize("run_id", BAD_IDS)
def test_run_ids_that_could_leave_the_root(tmp_path: Path, run_id: str) -> None:
    """nnx:B109 case:J06 H3: a ValueError from every door, before any file is touched."""
    root = tmp_path / "runs"
    with pytest.raises(UnsafePathError, match="run id"):
        NNRun.load(run_id, root)
    with pytest.raises(ValueError, match="run id"):
        open_store(root, run_id)
    with pytest.raises(ValueError, match="run id"):
        resume.probe(root, run_id)
    with pytest.raises(ValueError, match="run id"):
        find_point(root, f"{run_id}@LAST")
    assert list(tmp_path.iterdir()) == []


LINKS = {
    "run": lambda root: root / RUN_ID,
    "generation": newest,
    "file": lambda root: newest(root) / "host.json",
    "array file": lambda root: next(path for path in (newest(root) / "state" / "d").iterdir()),
    "LAST": lambda root: root / RUN_ID / "checkpoints" / "LAST",
    "manifest": lambda root: root / RUN_ID / "checkpoints" / "manifests" / "2.json",
}


@pytest.mark.parametrize("what", LINKS)
def test_links_are_refused(root: Path, tmp_path: Path, what: str) -> None:
    """H5 case:J06: every part of a run replaced by a link to the very same bytes elsewhere."""
    victim = LINKS[what](root)
    outside = tmp_path / "outside"
    victim.rename(outside)
    victim.symlink_to(outside)
    with pytest.raises((ResumePointError, UnsafePathError), match="symbolic link"):
        read_point(RunPaths(root, RUN_ID))
    with pytest.raises(CheckpointError, match="symbolic link"):
        open_store(root)


def test_hard_links_are_refused(root: Path, tmp_path: Path) -> None:
    """H5: a file with a second name outside could be changed from there."""
    os.link(newest(root) / "host.json", tmp_path / "outside")
    refused(root, match="hard links")


def test_a_link_in_the_root_is_no_run(root: Path, tmp_path: Path) -> None:
    """case:J06 a link in the runs directory that leads elsewhere is not listed and not opened."""
    shutil.copytree(root / RUN_ID, tmp_path / "elsewhere")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    assert [run.id for run in NNRun.all(root)] == [RUN_ID]
    with pytest.raises(UnsafePathError, match="symbolic link"):
        NNRun.load("linked", root)


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        return (builtins.open, (os.environ["NNX_TEST_MARKER"], "w"))


AUDITED = """
import json, sys
armed = False
def hook(event, args):
    if armed and event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        print("CAUGHT", event, args, flush=True)
        raise RuntimeError(event)
sys.addaudithook(hook)
from pathlib import Path
from nnx_jax.core.errors import NnxError
from nnx_jax.runs import audit
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun
import numpy, orbax.checkpoint
root, victims = Path(sys.argv[1]), json.loads(sys.argv[2])
payloads = [Path(name).read_bytes() for name in json.loads(sys.argv[3])]
run_id = sys.argv[4]
armed = True
for victim in victims:
    path = root / victim
    data = path.read_bytes()
    for payload in payloads:
        path.write_bytes(payload)
        outcomes = []
        for read in (lambda: read_point(RunPaths(root, run_id)).load_all(), lambda: NNRun.load(run_id, root).records):
            try:
                read()
                outcomes.append("read")
            except NnxError as error:
                outcomes.append(type(error).__name__)
        assert outcomes != ["read", "read"] or victim.endswith("/1.json"), (victim, outcomes)
        assert audit.verify(root, run_id) != [], victim
    path.write_bytes(data)
assert audit.verify(root, run_id) == []
read_point(RunPaths(root, run_id)).load_all()
print("done")
"""


def test_nothing_in_a_run_is_ever_unpickled(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """case:J07 H4: a pickle or an object .npy in the place of every file; an audit hook forbids any use of it."""
    marker = tmp_path / "marker"
    monkeypatch.setenv("NNX_TEST_MARKER", str(marker))
    payloads = [tmp_path / "a.pkl", tmp_path / "b.npy", tmp_path / "c.npz"]
    payloads[0].write_bytes(pickle.dumps(Boom()))
    np.save(payloads[1], np.asarray([Boom()], dtype=object), allow_pickle=True)
    np.savez(payloads[2], x=np.asarray([Boom()], dtype=object))
    assert not marker.exists()
    victims = [path for path in (root / RUN_ID).rglob("*") if path.is_file() and "/generations/1/" not in str(path)]
    names = [str(path.relative_to(root)) for path in victims]
    arguments = [str(root), json.dumps(names), json.dumps([str(path) for path in payloads]), RUN_ID]
    done = subprocess.run([sys.executable, "-c", AUDITED, *arguments], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stdout + done.stderr
    assert not marker.exists()


@pytest.mark.parametrize("name", ["run.yaml", "metadata.yaml"])
def test_yaml_tags_run_no_code(root: Path, tmp_path: Path, name: str) -> None:
    """case:J07 a `!!python/object/apply` in the run's YAML is refused."""
    marker = tmp_path / "marker"
    (root / RUN_ID / name).write_text(f"!!python/object/apply:builtins.open ['{marker}', 'w']\n")
    with pytest.raises(ResumePointError, match=name):
        NNRun.load(RUN_ID, root)
    assert not marker.exists()
    assert any(name in fault for fault in audit.verify(root, RUN_ID))


def test_a_manifest_full_of_escapes(tmp_path: Path) -> None:
    """H3: paths in a manifest never leave the generation; they are refused when it is read."""
    path = tmp_path / "1.json"
    for name in ("../x", "/etc/passwd", "a//b", "a/./b", ""):
        entry = f'"{name}":{{"sha256":"{"0" * 64}","size":0}}'
        head = '"batch":0,"epoch":0,"format":"nnx_jax.manifest/1","generation":1,"run_id":"r","step":0'
        path.write_text(f'{{{head},"files":{{{entry}}}}}')
        with pytest.raises(ResumePointError, match=r"1\.json: the manifest is damaged"):
            read_manifest(path)


def test_sizes_are_compared_before_bytes_are_read(root: Path) -> None:
    """H6: a file grown to a terabyte (sparse) is refused by its size, at once."""
    paths = RunPaths(root, RUN_ID)
    victim = newest(root) / "host.json"
    os.truncate(victim, 2**40)
    faults = verify_files(newest(root), read_manifest(paths.manifest(2)))
    assert faults == [f"{victim}: has {2**40} bytes, the manifest says {faults[0].split()[-1]}"]


def test_every_refusal_is_one_family(root: Path) -> None:
    """Whatever is wrong with a run, `NnxError` catches it."""
    commit = open_store(root)
    commit_epoch(commit, 2)
    commit.close()
    (root / RUN_ID / "checkpoints" / "LAST").unlink()
    (root / RUN_ID / "checkpoints" / "LAST").mkdir()
    with pytest.raises(NnxError, match="LAST"):
        read_point(RunPaths(root, RUN_ID))


def test_a_manifest_and_an_index_of_a_large_model_are_read(tmp_path: Path) -> None:
    """Tens of thousands of files and of leaves are legal, more values than other JSON files may hold."""
    digest = "0" * 64
    files = {f"state/d/{number}": (digest, number) for number in range(70_000)}
    path = tmp_path / "1.json"
    path.write_bytes(Manifest("r", 1, 0, 0, 0, files).to_bytes())
    assert read_manifest(path).files == files
    leaves = {f"params/{number}": Leaf((3, 3, 8, number), "float32") for number in range(30_000)}
    (tmp_path / "arrays.json").write_bytes(index_bytes(leaves))
    assert read_index(tmp_path) == leaves
