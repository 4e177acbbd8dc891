"""From a file and words to one run: the documented example loads, everything wrong says where and what to write."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnx_jax.config import load_config
from nnx_jax.core.errors import ConfigError
from nnx_jax.core.registry import kinds
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.params.optim import NNOptimParams
from nnx_jax.params.scheduler import NNSchedulerParams
from nnx_jax.params.train import MonitorSpec

EXAMPLE = """\
imports: []
backend: flax
model:
  net: {kind: feed_forward, hidden_dims: [64], activation: relu, dropout_prob: 0.0}
  loss: cross_entropy
  metrics: [accuracy]
data:
  train: {kind: digits, split: train}
  val: {kind: digits, split: val}
  test: {kind: digits, split: test}
  batch_size: 32
  tail: pad
train:
  n_epochs: 20
  seed: 0
  precision: float32
  record_every: update
  optim: {kind: adamw, max_lr: 1e-3, weight_decay: 1e-2, grad_clip_norm: 1.0, accumulate_grad_batches: 1}
  scheduler: {kind: cosine, clock: optimizer_update}
  monitor: {metric: accuracy, split: val}
hooks: []
callbacks: []
checkpoint: {every_n_epochs: 1, keep: 2}
mesh: {}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Return a function that writes a file and gives its path."""

    def write(text: str | bytes, name: str = "cfg.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def test_the_documented_example_loads(write: Any) -> None:
    """Every key of the documented tree is read, and says what it says."""
    run = load_config(write(EXAMPLE))
    assert run.model.net == FeedForwardParams(hidden_dims=(64,))
    assert run.train.optim == NNOptimParams(kind="adamw", max_lr=1e-3, grad_clip_norm=1.0)
    assert run.train.scheduler == NNSchedulerParams(kind="cosine", clock="optimizer_update")
    assert run.train.monitor == MonitorSpec(metric="accuracy")
    assert run.data is not None
    assert run.data.train.state() == {"kind": "digits"}
    assert run.data.val.state() == {"kind": "digits", "split": "val"}
    assert run.train.n_epochs == 20
    assert run.checkpoint.keep == 2


def test_built_in_datasets_are_known_here(write: Any) -> None:
    load_config(write(EXAMPLE))
    assert {"csv", "digits", "npz", "text_bytes"} <= set(kinds("dataset"))


def test_what_is_dumped_loads_again(write: Any) -> None:
    """nnx:B026: the printed configuration is the configuration, with the same id."""
    run = load_config(write(EXAMPLE), ["train.dispatch=step", "mesh.data=2"])
    again = load_config(write(run.to_yaml(), "again.yaml"))
    assert again == run
    assert again.train.dispatch == "step"
    assert again.mesh == {"data": 2}
    assert again.to_yaml() == run.to_yaml()
    assert again.run_id() == run.run_id()


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-3", 1e-3), ("5e-5", 5e-5), ("1e3", 1000.0), ("1.0e-3", 1e-3), ("1e-08", 1e-8), ("1E2", 100.0), (".5", 0.5)],
)
def test_exponents_are_numbers(write: Any, text: str, number: float) -> None:
    """case:J01: `1e-3` and the like are floats in the file and on the command line, never text."""
    run = load_config(write(f"train: {{n_epochs: 1, optim: {{max_lr: {text}, eps: {text}}}}}"))
    assert run.train.optim.max_lr == run.train.optim.eps == number
    assert load_config(None, ["train.n_epochs=1", f"train.optim.max_lr={text}"]).train.optim.max_lr == number


def test_a_negative_exponent_is_a_number_too(write: Any) -> None:
    """case:J01: `-1e-3` is read as a number, and refused as a rate."""
    with pytest.raises(ConfigError, match=r"max_lr: got -0\.001 \(float\); expected a value >= 0"):
        load_config(write("train: {n_epochs: 1, optim: {max_lr: -1e-3}}"))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "train:\n  n_epochs: 1\n  optim:\n    weigth_decay: 0.1\n",
            4,
            r"train\.optim\.weigth_decay: unknown key 'weigth_decay'; did you mean 'weight_decay'\?",
        ),
        (
            "learning_rate: 0.1\ntrain: {n_epochs: 1}\n",
            1,
            r"learning_rate: unknown key 'learning_rate'; did you mean 'train\.optim\.max_lr'\?",
        ),
        (
            "train:\n  num-epochs: 1\n  max_steps: 1\n",
            2,
            r"train\.num-epochs: unknown key 'num-epochs'; did you mean 'n_epochs'\?",
        ),
        ("train:\n  n_epochs: 1\n  lr: 1\n  lr: 2\n", 4, r"train: has the key 'lr' twice \(first in line 3\)"),
        ("train:\n  n_epochs: 1\ndata: {train: {kind: digts}}\n", 3, r"data\.train: .*no dataset kind 'digts'; did"),
    ],
)
def test_unknown_and_misplaced_keys(write: Any, text: str, line: int, message: str) -> None:
    """case:J02: each fails before any work and names file, line, key, its section and the nearest legal name."""
    path = write(text)
    with pytest.raises(ConfigError, match=rf"^config: {path}:{line}: {message}") as caught:
        load_config(path)
    assert (caught.value.file, caught.value.line) == (path, line)


@pytest.mark.parametrize("word", ["None", "null", "~"])
def test_none_in_a_file(write: Any, word: str) -> None:
    """case:J03: null and ~ are none; `None`, which YAML reads as text, is refused rather than kept as text."""
    text = f"train: {{n_epochs: 1, optim: {{grad_clip_norm: {word}}}}}"
    if word == "None":
        with pytest.raises(ConfigError, match=r"grad_clip_norm: got 'None'; .*none is written null"):
            load_config(write(text))
    else:
        assert load_config(write(text)).train.optim.grad_clip_norm is None


def test_no_in_a_file_stays_text(write: Any) -> None:
    """case:J03: a text field "no" is the text, and a true/false field refuses it."""
    assert load_config(write("train: {n_epochs: 1, salt: no}")).train.salt == "no"
    with pytest.raises(ConfigError, match=r"data\.shuffle: got 'no'; expected true or false"):
        load_config(write("train: {n_epochs: 1}\ndata: {train: digits, shuffle: no}"))


def test_command_line_over_file_over_default(write: Any) -> None:
    """case:J04."""
    path = write("train: {n_epochs: 5, seed: 7}\ndata: {train: digits, shuffle: true}")
    run = load_config(path, ["train.seed=0", "data.shuffle=false"])
    assert run.data is not None
    assert (run.train.seed, run.data.shuffle, run.train.n_epochs, run.data.batch_size) == (0, False, 5, 32)


def test_errors_say_which_of_the_two_gave_the_value(write: Any) -> None:
    path = write("train:\n  n_epochs: 0\n  seed: 1\n")
    with pytest.raises(ConfigError, match="2 problems") as caught:
        load_config(path, ["train.seed=-5"])
    assert f"{path}:2: train.n_epochs: got 0 (int); expected a value >= 1" in str(caught.value)
    assert "--set train.seed=-5: train.seed: got -5 (int); expected a value >= 0" in str(caught.value)


def test_without_a_file_the_words_must_be_enough() -> None:
    assert load_config(None, ["train.max_steps=3"]).train.max_steps == 3
    with pytest.raises(ConfigError, match=r"<defaults>: train: is required"):
        load_config(None)


@pytest.mark.parametrize("text", ["", "# nothing\n", "null\n"])
def test_an_empty_file_lacks_what_is_required(write: Any, text: str) -> None:
    with pytest.raises(ConfigError, match="train: is required"):
        load_config(write(text))


@pytest.mark.parametrize("text", ["- 1\n", "3\n", "text\n"])
def test_a_file_that_is_no_mapping(write: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=r"holds a (list|int|str); expected a mapping with model, data, train"):
        load_config(write(text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """H2 of the reliability notes: a missing file, a folder, a FIFO and a device end at once with a typed error."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path / "none.yaml", tmp_path, fifo, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=rf"{path}: .*give the path of a YAML file"):
            load_config(path)
    assert stat.S_ISFIFO(fifo.stat().st_mode)


# -- imports ----------------------------------------------------------------------------------------------------------

MODULE = """\
from nnx_jax.core.registry import register
from nnx_jax.params.net import NNParams

@register("{kind}")
class Own(NNParams):
    width: int = 3
"""


def test_imports_bring_in_classes_of_your_own(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(MODULE.format(kind="test_config_own"), "test_config_own_nets.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(
        "imports: [test_config_own_nets]\nmodel: {net: {kind: test_config_own, width: 4}}\ntrain: {n_epochs: 1}"
    )
    run = load_config(path)
    assert run.model.net is not None
    assert run.model.net.state() == {"kind": "test_config_own", "width": 4}
    assert run.imports == ("test_config_own_nets",)


def test_imports_from_the_command_line_come_before_the_other_words(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(MODULE.format(kind="test_config_word"), "test_config_word_nets.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["model.net.width=9", "model.net.kind=test_config_word", "imports=test_config_word_nets"]
    net = load_config(None, [*words, "train.n_epochs=1"]).model.net
    assert net is not None
    assert net.state() == {"kind": "test_config_word", "width": 9}


def test_without_the_import_the_kind_is_unknown_and_nothing_runs(write: Any) -> None:
    path = write("model: {net: {kind: test_config_absent}}\ntrain: {n_epochs: 1}")
    with pytest.raises(ConfigError, match=r"model\.net: .*no net kind 'test_config_absent'.*under `imports:`"):
        load_config(path)


def test_a_file_of_unknown_origin_imports_nothing(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("raise SystemExit('the module ran')", "test_config_evil.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write("imports: [test_config_evil]\ntrain: {n_epochs: 1}")
    with pytest.raises(ConfigError, match=r"wants to import \['test_config_evil'\], which is not allowed here"):
        load_config(path, allow_code=False)
    assert "test_config_evil" not in sys.modules


@pytest.mark.parametrize("text", ["imports: 3", "imports: [3]", "imports: ['a b']", "imports: [no_such_module_xyz]"])
def test_wrong_imports_are_told(write: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=r"imports"):
        load_config(write(f"{text}\ntrain: {{n_epochs: 1}}"))


def test_reading_a_configuration_imports_no_framework(write: Any) -> None:
    """`--print-config` and errors come at once: neither jax nor torch, grain or optax is loaded for them."""
    code = (
        "import sys; from nnx_jax.config import load_config; load_config(sys.argv[1]);"
        "print([m for m in ('jax', 'torch', 'grain', 'optax', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, write(EXAMPLE)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_an_installed_package_brings_its_classes_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group is `nnx_jax`; a file of unknown origin loads none, and a broken one is named."""
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nnx_jax]\nrows = plugged_rows\n")
    (tmp_path / "plugged_rows.py").write_text(
        "import numpy as np\nfrom nnx_jax.core.registry import register\n"
        "from nnx_jax.data import InMemoryDataset\n\n"
        "@register('plugged_rows')\nclass Rows(InMemoryDataset):\n"
        "    def load(self):\n        return {'x': np.zeros((2, 1), np.float32), 'y': np.array([0, 1])}\n"
    )
    config = tmp_path / "run.yaml"
    config.write_text("data: {train: plugged_rows}\ntrain: {n_epochs: 1}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="plugged_rows"):
        load_config(config, allow_code=False)
    spec = load_config(config)
    assert spec.data is not None
    assert len(spec.data.train) == 2
    (info / "entry_points.txt").write_text("[nnx_jax]\nrows = not_there\n")
    with pytest.raises(ConfigError, match="entry point 'rows' of plugged cannot be loaded"):
        load_config(config)
