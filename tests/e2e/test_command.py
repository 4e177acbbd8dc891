"""python -m nnx_jax.train, option by option: what it prints, what it exits with, what it leaves on the disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nnx_jax.core.codec import parse_yaml
from nnx_jax.runs.layout import RunPaths
from nnx_jax.runs.resume import read_point
from nnx_jax.runs.run import NNRun

from .command import (
    EPOCHS,
    PATIENCE,
    UPDATES,
    Done,
    Here,
    assert_same_end,
    environment,
    fresh,
    quick_compiles,
    runs_of,
    tree,
    write_case,
)

KEYS = ["run_id", "status", "epoch", "step", "train", "val", "test", "run_dir"]
TOTAL = UPDATES * EPOCHS


@pytest.fixture(scope="module", autouse=True)
def _cached() -> Iterator[None]:
    with quick_compiles():
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder with a finished run that kept every epoch's commit, made by a real process, and what it printed."""
    folder = write_case(tmp_path_factory.mktemp("original"))
    process = fresh(folder, "--json", "--set", "checkpoint.keep=9")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return folder, Done(0, out.decode(), err.decode())


@pytest.fixture
def here(
    original: tuple[Path, Done], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Here:
    """The command in a copy of that folder."""
    return Here(Path(shutil.copytree(original[0], tmp_path / "case", symlinks=True)), capsys, monkeypatch)


@pytest.fixture
def empty(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """The command in a folder without runs."""
    return Here(write_case(tmp_path / "case"), capsys, monkeypatch)


def the_run(folder: Path) -> Path:
    (run,) = runs_of(folder)
    return run


# -- help, schema, configuration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["import nnx_jax.train", "import nnx_jax.train as t; t.main(['--help'])"])
def test_import_and_help_load_no_framework(code: str) -> None:
    """Neither the import of the command nor its help loads jax, flax, numpy, pydantic or YAML."""
    heavy = "('jax', 'jaxlib', 'flax', 'optax', 'orbax', 'grain', 'numpy', 'pydantic', 'yaml', 'torch', 'rich')"
    ask = f"import sys, atexit\natexit.register(lambda: print([m for m in {heavy} if m in sys.modules]))\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", ask], env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_tells_every_option_and_exit_code(empty: Here) -> None:
    done = empty("--help", config=None)
    assert done.code == 0
    options = ("config", "set", "runs-dir", "resume", "from", "salt", "print-config", "schema", "dry-run", "json")
    assert all(f"--{option}" in done.out for option in (*options, "quiet"))
    assert "0 done, 1 the run failed, 2 the configuration is wrong, 130 Ctrl-C, 143 SIGTERM" in " ".join(
        done.out.split()
    )


def test_schema_is_json_and_names_every_key(empty: Here) -> None:
    """`--schema` needs no configuration; what it prints is JSON Schema that an editor can use, closed against typos."""
    done = empty("--schema", config=None)
    schema = json.loads(done.out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) >= {
        "model",
        "data",
        "train",
        "checkpoint",
        "callbacks",
        "hooks",
        "imports",
        "mesh",
    }
    assert schema["additionalProperties"] is False
    assert "feed_forward" in done.out
    assert "npz" in done.out


def test_schema_takes_the_examples_and_not_a_typo(empty: Here) -> None:
    """Every example, and what `--print-config` writes, validates against the schema; a misspelled key does not."""
    schema = json.loads(empty("--schema", config=None).out)
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    for example in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")):
        assert list(check.iter_errors(parse_yaml(example.read_text()))) == [], example
    written = parse_yaml(empty("--print-config").out)
    assert list(check.iter_errors(written)) == []
    assert list(check.iter_errors({**written, "trian": {}}))
    assert list(check.iter_errors({**written, "train": {"n_epochs": "3"}}))


def test_print_config_round_trips(empty: Here) -> None:
    """The printed configuration is whole, has the run's id on top, and is itself a configuration of the same run."""
    first = empty("--print-config", "--set", "train.optim.max_lr=2e-3", "--salt", "a b")
    assert first.code == 0
    assert first.out.startswith("# run id ")
    (empty.folder / "again.yaml").write_text(first.out)
    second = empty("--print-config", config="again.yaml")
    assert second.out == first.out
    assert runs_of(empty.folder) == []
    plain = empty("--print-config")
    assert plain.out.splitlines()[0] != first.out.splitlines()[0]


@pytest.mark.parametrize("json_option", [(), pytest.param(("--json",), marks=pytest.mark.slow)], ids=["table", "json"])
def test_dry_run_costs_and_writes_nothing(empty: Here, json_option: tuple[str, ...]) -> None:
    """Parameters by hand: 4*6+6 dense, 2*6 norm, 6*3+3 out. FLOPs and bytes come from the compiler; no file appears."""
    before = tree(empty.folder)
    done = empty("--dry-run", *json_option)
    lines = [line.split() for line in done.out.splitlines()]
    report: dict[str, Any] = done.result if json_option else {name: _plain(value) for name, value in lines}
    assert done.code == 0
    assert report["parameters"] == report["trainable_parameters"] == 30 + 12 + 21
    assert report["updates_per_epoch"] == UPDATES
    assert report["flops_per_update"] > 4 * 2 * 3 * (4 * 6 + 6 * 3) / 2
    assert report["state_bytes"] > 4 * 3 * 63  # weights and two moments
    assert report["peak_bytes"] >= report["state_bytes"]
    after = tree(empty.folder)
    assert {name for name in after if "__pycache__" not in name} == {n for n in before if "__pycache__" not in n}


def _plain(value: str) -> int | str:
    number = value.replace(",", "")
    return int(number) if number.isdigit() and len(value) < 16 else value


# -- configuration errors -------------------------------------------------------------------------------------------

WRONG = [
    (["--set", "train.optim.weigth_decay=0.1"], ["train.optim.weigth_decay", "weight_decay"]),
    (["--set", "train.optim.max_lr=-1"], ["train.optim.max_lr", "-1"]),
    (["--set", "train.optim.max_lr=nan"], ["train.optim.max_lr", "nan"]),
    (["--set", "train.n_epochs=3.5"], ["train.n_epochs", "3.5"]),
    (["--set", "train.n_epochs=true"], ["train.n_epochs"]),
    (["--set", "train.n_epochs=0"], ["train.n_epochs", "0"]),
    (["--set", "data.shuffle=treu"], ["data.shuffle", "treu"]),
    (["--set", "data.shuffle="], ["data.shuffle"]),
    (["--set", "model.net.kind=feedforward"], ["model.net", "feedforward", "feed_forward"]),
    (["--set", "data.train.path=absent.npz"], ["absent.npz"]),
    (["--set", "train.monitor={metric: acuracy}"], ["train.monitor.metric", "acuracy", "accuracy"]),
    (["--set", "train.monitor={metric: loss}", "--set", "data.val=none"], ["train.monitor.split", "data.val"]),
    (["--set", "data.batch_size=64", "--set", "data.tail=drop"], ["64", "23"]),
    (["--set", "model.net.input_dim=5"], ["5", "4"]),
    (["--salt", " "], ["train.salt"]),
    (["--from", "../../etc/x"], ["../../etc/x"]),
    (["--from", "0123456789abcdef"], ["0123456789abcdef"]),
    (["--set", "train.seed"], ["train.seed", "path=value"]),
    (["--set", "nonsense.seed=1"], ["nonsense"]),
]


@pytest.mark.parametrize("options, told", WRONG, ids=lambda value: " ".join(value[:2]) if value[0][:2] == "--" else "")
def test_wrong_configurations_exit_2_before_anything_is_written(
    empty: Here, options: list[str], told: list[str]
) -> None:
    """case:J02 case:J03 case:J05 case:H13 case:L08: path, value, what to write instead; code 2; no runs directory."""
    done = empty(*options, "--json")
    assert done.code == 2, done.err
    for word in told:
        assert word in done.err
    assert "Traceback" not in done.err
    assert list(done.result) == [*KEYS, "error"]
    assert done.result["status"] == "refused"
    assert not (empty.folder / "runs").exists()


def test_no_rows_is_an_error_before_anything_is_written(empty: Here) -> None:
    """case:L07: an empty file says that it is empty, for training and for validation, with code 2."""
    (empty.folder / "none.csv").write_text("a,b,c,d,label\n")
    for split in ("train", "val"):
        done = empty("--set", f"data.{split}={{kind: csv, path: none.csv, target: label}}")
        assert done.code == 2, done.err
        assert "CsvDataset is empty (0 rows)" in done.err
        assert not (empty.folder / "runs").exists()


@pytest.mark.parametrize(
    "text, told",
    [
        ("train: {n_epochs: 1, n_epochs: 2}", ["cfg.yaml", "n_epochs"]),
        ("train: [", ["cfg.yaml"]),
        ("train: {n_epochs: 1}\nlearning_rate: 0.1", ["learning_rate", "2"]),
        ("train: {n_epochs: 1}\nmodel: !!python/object:os.system {}", ["cfg.yaml"]),
        ("train: {n_epochs: 1}\nmodel: {net: {kind: feed_forward}}", ["data.train"]),
    ],
    ids=["duplicate key", "not YAML", "misplaced key", "tag", "no data"],
)
def test_wrong_files_exit_2(empty: Here, text: str, told: list[str]) -> None:
    """case:J02: the file's own mistakes: named with file, line or path, and nothing is written."""
    (empty.folder / "cfg.yaml").write_text(text)
    done = empty()
    assert done.code == 2
    for word in told:
        assert word in done.err
    assert not (empty.folder / "runs").exists()


@pytest.mark.parametrize(
    "options, config",
    [([], None), ([], "absent.yaml"), (["--resume", "maybe"], "cfg.yaml"), (["--unknown"], "cfg.yaml")],
    ids=["no file given", "no such file", "no such mode", "no such option"],
)
def test_wrong_options_exit_2(empty: Here, options: list[str], config: str | None) -> None:
    """case:J02: wrong options are configuration errors too; an abbreviated option is no option."""
    done = empty(*options, config=config)
    assert done.code == 2
    assert done.err.strip()
    assert not (empty.folder / "runs").exists()


PRINTED = [
    ("data.shuffle=no", "shuffle: false"),
    ("train.seed=0", "seed: 0"),
    ("model.net.dropout_prob=0.0", "dropout_prob: 0.0"),
    ("train.n_epochs=0x10", "n_epochs: 16"),
    ("train.optim.max_lr=1e-4", "max_lr: 0.0001"),
    ("train.optim.grad_clip_norm=none", "~grad_clip_norm"),
    ("model.net.hidden_dims=8,9", "- 9"),
    ("train.salt=no", "salt: 'no'"),
]


@pytest.mark.parametrize("word, line", PRINTED, ids=[word for word, _ in PRINTED])
def test_set_goes_over_the_file(empty: Here, word: str, line: str) -> None:
    """case:J01 case:J03 case:J04 case:J05: the command line wins over the file, also with false, 0 and 0.0."""
    text = empty("--print-config", "--set", word).out
    path, _, _ = word.partition("=")
    key = path.rpartition(".")[2]
    if line.startswith("~"):
        assert line[1:] not in text
    elif line.split(": ")[-1] in ("0", "0.0", "false"):
        assert line in text or f"{key}:" not in text  # a value that is the default is left out
    else:
        assert line.replace("'", '"') in text.replace("'", '"')


# -- a run ----------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_one_json_line(original: tuple[Path, Done]) -> None:
    """Exit 0; the last line of standard output, and the only one, is the result."""
    folder, done = original
    assert len(done.out.splitlines()) == 1
    result = done.result
    assert list(result) == KEYS
    assert (result["status"], result["epoch"], result["step"]) == ("finished", EPOCHS, TOTAL)
    assert result["run_dir"] == f"runs/{result['run_id']}"
    for split in ("train", "val", "test"):
        assert set(result[split]) == {"loss", "accuracy"}
        assert 0 <= result[split]["accuracy"] <= 1
    run = NNRun.load(result["run_id"], folder / "runs")
    ends = [row for row in run.records if row["kind"] == "epoch"]
    assert ends[-1]["train_loss"] == result["train"]["loss"]
    assert ends[-1]["val_accuracy"] == result["val"]["accuracy"]
    updates = [row for row in run.records if row["kind"] == "update"]
    assert [row["step"] for row in updates] == list(range(1, TOTAL + 1))


def test_finished_run_is_left_alone(here: Here, original: tuple[Path, Done]) -> None:
    """case:I13: the same command again says so and exits 0; the same line of JSON; not one byte changes."""
    run = the_run(here.folder)
    before = tree(run)
    done = here("--json", "--set", "checkpoint.keep=9")
    assert done.code == 0
    assert f"run {run.name} is finished already" in done.err
    assert done.result == original[1].result
    plain = here("--set", "checkpoint.keep=9")
    assert plain.out.splitlines()[-1] == f"runs/{run.name}"
    assert tree(run) == before
    assert runs_of(here.folder) == [run]


def test_quiet_says_nothing(here: Here) -> None:
    """`--quiet` prints nothing for a run that works, and the error for one that does not."""
    done = here("--quiet", "--set", "train.n_epochs=1")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = here("--quiet", "--set", "train.n_epochs=0")
    assert done.code == 2
    assert "train.n_epochs" in done.err


@pytest.mark.slow
def test_salt_makes_another_run_of_the_same_numbers_or_not(here: Here) -> None:
    """`--salt` is another id and another directory; the salted run can be repeated by the same salt."""
    first = the_run(here.folder)
    done = here("--salt", "second", "--json")
    assert done.code == 0
    assert done.result["run_id"] != first.name
    assert len(runs_of(here.folder)) == 2
    again = here("--salt", "second", "--json")
    assert again.result == done.result
    assert "finished already" in again.err


def test_other_lengths_are_other_runs(here: Here) -> None:
    """case:I13: more epochs are another run with its own directory: nothing is added to the finished one in silence."""
    first = the_run(here.folder)
    before = tree(first)
    done = here("--set", "train.n_epochs=1", "--json")
    assert (done.code, done.result["step"]) == (0, UPDATES)
    assert done.result["run_id"] != first.name
    assert tree(first) == before


@pytest.mark.parametrize(
    "point, epoch, step",
    [
        ("@BEST", None, None),
        ("@12", 2, 12),
        pytest.param("", 3, 18, marks=pytest.mark.slow),
        pytest.param("@LAST", 3, 18, marks=pytest.mark.slow),
    ],
)
def test_from_starts_a_new_run_and_never_writes_to_its_source(
    here: Here, point: str, epoch: int | None, step: int | None
) -> None:
    """nnx:B136: a continuation has its own directory and names its source, which keeps its bytes."""
    source = the_run(here.folder)
    before = tree(source)
    origin = read_point(RunPaths(source.parent, source.name), point.removeprefix("@") or "LAST")
    done = here("--from", source.name + point, "--set", "train.n_epochs=1", "--json")
    assert done.code == 0, done.err
    assert tree(source) == before
    assert f"continues {source.name}@" in done.err
    assert done.result["run_id"] != source.name
    assert done.result["step"] == origin.step + UPDATES
    if step is not None:
        assert (origin.step, done.result["epoch"]) == (step, (epoch or 0) + 1)
    status = NNRun.load(done.result["run_id"], here.folder / "runs").resume_status
    assert (status.source_run_id, status.source_epoch) == (source.name, origin.epoch)
    assert status.source_generation == origin.generation
    assert status.source_checkpoint_id == origin.manifest_sha256
    assert status.mode == "stateful"


def test_weights_only(here: Here) -> None:
    """`--resume weights_only` takes the weights alone: the steps count from 0 again, and metadata.yaml says so."""
    source = the_run(here.folder)
    done = here("--from", source.name, "--resume", "weights_only", "--set", "train.n_epochs=1", "--json")
    assert done.code == 0, done.err
    assert done.result["step"] == UPDATES
    run = NNRun.load(done.result["run_id"], here.folder / "runs")
    assert run.resume_status.mode == "weights_only"
    assert {"jax", "flax", "numpy"} <= set(run.metadata["versions"])


def test_a_checkpoint_of_another_shape_is_refused(here: Here) -> None:
    """case:I10: `--from` with another optimizer: code 1, the first difference with both sides, no directory left."""
    source = the_run(here.folder)
    before = tree(source)
    done = here("--from", source.name, "--set", "train.optim.kind=sgd", "--json")
    assert done.code == 1, done.err
    assert "adamw" in done.err
    assert "sgd" in done.err
    assert runs_of(here.folder) == [source]
    assert tree(source) == before


def test_a_damaged_source_fails(here: Here) -> None:
    """A source with a changed byte is refused with code 1, and no new run is left."""
    source = the_run(here.folder)
    (source / "checkpoints" / "LAST").write_text("{}")
    done = here("--from", source.name)
    assert done.code == 1
    assert "LAST" in done.err
    assert runs_of(here.folder) == [source]


def test_not_finite_is_a_failure(empty: Here) -> None:
    """A loss that is not finite: code 1, the update by name, and the finished update before it stays committed."""
    done = empty("--set", "train.optim.max_lr=1e38", "--set", "train.optim.kind=sgd", "--json",
                 "--set", "model.net.norm=none", "--set", "train.optim.grad_clip_norm=none")  # fmt: skip
    assert done.code == 1, done.err
    assert "update 2, microbatch 1" in done.err
    assert "Traceback" not in done.err
    assert (done.result["status"], done.result["step"]) == ("failed", 1)


@pytest.mark.parametrize("where", ["a folder/with spaces", "runs/", "../outside"])
def test_runs_directory_anywhere(here: Here, where: str) -> None:
    """case:I17: relative, with spaces, with a slash at the end, above: it lies where it was asked for."""
    moved = (here.folder / where).resolve()
    moved.parent.mkdir(parents=True, exist_ok=True)
    if moved != here.folder / "runs":
        shutil.move(here.folder / "runs", moved)
    done = here("--runs-dir", where, "--json", "--set", "checkpoint.keep=9")
    assert done.code == 0
    assert "finished already" in done.err
    assert (here.folder / done.result["run_dir"]).resolve() == moved / done.result["run_id"]


def test_in_another_directory_from_nothing(here: Here) -> None:
    """case:I17: a run into a path with spaces, from nothing: the bits of the original, and nothing anywhere else."""
    original = the_run(here.folder)
    done = here("--runs-dir", "a folder/with spaces", "--json", "--set", "train.dispatch=step")
    assert done.code == 0
    assert done.result["run_dir"] == f"a folder/with spaces/{original.name}"
    assert_same_end(here.folder / done.result["run_dir"], original)
    assert runs_of(here.folder) == [original]


@pytest.mark.slow
def test_overwriting_is_asked_for(here: Here) -> None:
    """Only `overwrite_existing` trains a finished run again, to the same bits."""
    run = the_run(here.folder)
    kept = {name: (run / name).read_bytes() for name in ("idps.csv", "artifact.json")}
    marker = (run / "checkpoints" / "LAST").stat().st_ino
    done = here("--set", "train.overwrite_existing=true", "--json")
    assert done.code == 0
    assert "finished already" not in done.err
    assert (run / "checkpoints" / "LAST").stat().st_ino != marker
    assert {name: (run / name).read_bytes() for name in kept} == kept
