"""Words of the command line: read the way the field asks for, checked by path, said to be wrong with near matches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_jax.core.errors import ConfigError
from nnx_jax.params.net import FeedForwardParams
from nnx_jax.params.overrides import apply_overrides, split_overrides
from nnx_jax.params.run import RunSpec

BASE: dict[str, Any] = {
    "model": {"net": {"kind": "feed_forward"}, "metrics": ["accuracy", "f1"]},
    "data": {"train": {"kind": "test_rows"}},
    "train": {"n_epochs": 2, "seed": 7, "optim": {"kind": "adam", "max_lr": 0.1}},
}


def spec(*words: str, base: dict[str, Any] = BASE) -> RunSpec:
    merged, origins = apply_overrides(RunSpec, base, words)
    return RunSpec.from_state(merged, source="a.yaml", given=origins)


def value(word: str, *more: str) -> Any:
    """Return what `path=text` gives at that path."""
    found: Any = spec(word, *more)
    for step in word.partition("=")[0].split("."):
        found = getattr(found, step)
    return found


@pytest.mark.parametrize("text", ["false", "False", "FALSE", "0", "no", "off", "No"])
def test_every_spelling_of_false(text: str) -> None:
    """case:J03: a default of True can be switched off by any of them."""
    assert value(f"data.shuffle={text}") is False


@pytest.mark.parametrize("text", ["true", "True", "1", "yes", "on"])
def test_every_spelling_of_true(text: str) -> None:
    """case:J03."""
    assert value(f"train.overwrite_existing={text}") is True


@pytest.mark.parametrize("text", ["treu", "2", "1.0", "[true]", "none"])
def test_what_is_neither_true_nor_false(text: str) -> None:
    """case:J03: a misspelling is an error, never True."""
    with pytest.raises(ConfigError, match=r"data\.shuffle: got .*; expected true or false"):
        spec(f"data.shuffle={text}")


@pytest.mark.parametrize("word", ["data.shuffle=", "data.shuffle=  ", "train.salt="])
def test_an_empty_value_is_refused(word: str) -> None:
    """case:J03."""
    with pytest.raises(ConfigError, match=r"has no value; write none for none"):
        spec(word)


@pytest.mark.parametrize("text", ["none", "None", "null", "~", "NULL"])
def test_every_spelling_of_none(text: str) -> None:
    """case:J03: clip is None for all of them."""
    base = {**BASE, "train": {"n_epochs": 1, "optim": {"grad_clip_norm": 1.0}}}
    assert spec(f"train.optim.grad_clip_norm={text}", base=base).train.optim.grad_clip_norm is None


def test_none_where_none_is_illegal_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set train\.seed=none: train\.seed: got None; expected an integer"):
        spec("train.seed=none")


@pytest.mark.parametrize("text", ["no", "yes", "123", "1e-3", "true", "a,b", "x=y"])
def test_a_text_field_keeps_the_word(text: str) -> None:
    """case:J03: a text field "no" stays text."""
    assert value(f"train.salt={text}") == text


def test_a_quoted_word_is_the_text_inside() -> None:
    assert value("train.salt='none'") == "none"


def test_command_line_over_file_over_default() -> None:
    """case:J04: an explicit False, 0 or 0.0 wins; the order is command line over file over default."""
    file = {
        "model": {"net": {"kind": "feed_forward", "dropout_prob": 0.5}},
        "data": {"train": "test_rows", "shuffle": True, "batch_size": 16},
        "train": {"n_epochs": 1, "seed": 7, "save_phase_checkpoints": True},
    }
    words = ["data.shuffle=false", "train.seed=0", "model.net.dropout_prob=0.0", "train.save_phase_checkpoints=false"]
    merged = spec(*words, base=file)
    assert merged.data is not None
    assert merged.data.shuffle is False
    assert merged.train.seed == 0
    assert isinstance(merged.model.net, FeedForwardParams)
    assert merged.model.net.dropout_prob == 0.0
    assert merged.train.save_phase_checkpoints is False
    assert merged.data.batch_size == 16
    assert merged.data.tail == "pad"
    assert file["train"]["seed"] == 7  # the file's own mapping is untouched


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.optim.betas=[0.9,0.95]", (0.9, 0.95)),
        ("train.optim.betas=0.9,0.95", (0.9, 0.95)),
        ("model.net.hidden_dims=1,2,3", (1, 2, 3)),
        ("model.net.hidden_dims=[1, 2]", (1, 2)),
        ("model.net.hidden_dims=7", (7,)),
        ("model.net.hidden_dims=[]", ()),
        ("data.batch_size=0x10", 16),
        ("train.optim.max_lr=1e-3", 0.001),
        ("train.optim.max_lr=.5", 0.5),
        ("train.optim.max_lr=1", 1.0),
        ("train.n_epochs=3", 3),
        ("mesh.data=2", 2),
        ("train.optim.decay_mask=*.kernel", ("*.kernel",)),
        ("train.optim.decay_mask=[a, b]", ("a", "b")),
        ("imports=os,json", ("os", "json")),
    ],
)
def test_numbers_and_lists_arrive_as_such(word: str, expected: object) -> None:
    """case:J05: tuples of floats and of ints; hexadecimal is YAML 1.2's."""
    if word.startswith("mesh"):
        assert spec(word).mesh == {"data": expected}
    else:
        assert value(word) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.n_epochs=3.0", r"got 3\.0 \(float\); expected an integer"),
        ("train.n_epochs=3.5", r"got 3\.5 \(float\); expected an integer"),
        ("train.n_epochs=1e1", r"got 10\.0 \(float\); expected an integer"),
        ("train.n_epochs=true", r"got True \(bool\); expected an integer"),
        ("train.n_epochs=0", r"got 0 \(int\); expected a value >= 1"),
        ("train.n_epochs=ten", r"got 'ten'; expected an integer"),
        ("train.optim.max_lr=nan", r"got 'nan'; expected a number"),
        ("train.optim.max_lr=-1", r"got -1 \(int\); expected a value >= 0"),
        ("train.optim.max_lr=true", r"got True \(bool\); expected a number"),
        ("data.tail=pat", r"got 'pat'; expected one of .*did you mean 'pad'"),
    ],
)
def test_numbers_of_the_wrong_type(word: str, message: str) -> None:
    """case:J05: the message names field, value and expected type, and the word that gave it."""
    path, _, text = word.partition("=")
    with pytest.raises(ConfigError, match=rf"^config: --set {path}={text}: {path}: {message}"):
        spec(word)


def test_yaml_infinity_is_refused() -> None:
    """case:J05."""
    with pytest.raises(ConfigError, match=r"--set train\.optim\.max_lr=\.nan.*finite"):
        spec("train.optim.max_lr=.nan")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("learning_rate=0.1", r"there is no 'learning_rate' here; did you mean 'train\.optim\.max_lr'\?"),
        ("train.optim.weigth_decay=0.1", r"no 'weigth_decay' here; did you mean 'weight_decay'"),
        ("train.num-epochs=3", r"no 'num-epochs' here; did you mean 'n_epochs'"),
        ("tarin.seed=3", r"no 'tarin' here; did you mean 'train'"),
        ("a.__class__=1", r"no 'a' here"),
        ("train.__class__=1", r"no '__class__' here"),
        ("train.optim.__class__.__init__=1", r"no '__class__' here"),
        ("train.optim.kind.__class__=1", r"no '__class__' here"),
        ("train.model_config=1", r"no 'model_config' here"),
        ("train.train_loader=1", r"no 'train_loader' here"),
        ("train.seed.x=1", r"no 'x' here"),
        ("model.net.channels=1", r"no 'channels' here"),
        ("train.optim.betas.first=1", r"there is no 'first' here"),
        ("callbacks[0].patience=1", r"no 'patience' here"),
        ("model.metrics[5]=f1", r"the list model\.metrics has 2 items; set it as a whole"),
        ("model.metrics[5].k=1", r"no 'k' here"),
    ],
)
def test_unknown_paths_name_near_matches(word: str, message: str) -> None:
    """case:J02 and H9 of the reliability notes: unknown paths and Python's own attributes are refused."""
    with pytest.raises(ConfigError, match=message) as caught:
        spec(word)
    assert caught.value.file == "--set"


@pytest.mark.parametrize(
    "word", ["train.seed", "=3", "", "train..seed=3", ".seed=3", "--flag=3", "$(rm -rf /)=1", "`id`=1", "a;b=1"]
)
def test_what_is_no_override(word: str) -> None:
    """H9 of the reliability notes: no `=`, no path, shell text."""
    with pytest.raises(ConfigError, match=r"--set: .*(expected path=value|there is no)"):
        spec(word)


@pytest.mark.parametrize("text", ["$(id)", "`id`", "; rm", "&& x", "| y", "> z", "../x"])
def test_shell_text_is_only_text(text: str) -> None:
    """H9 of the reliability notes: it reaches the field's own rules and nothing else."""
    assert value(f"train.salt={text}") == text
    with pytest.raises(ConfigError, match=r"train\.seed: got|is not valid YAML|train\.seed="):
        spec(f"train.seed={text}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.seed=1", "train.seed=1"], r"train\.seed: is given twice"),
        (["train.seed=1", "train={n_epochs: 1}"], r"train: overlaps with train\.seed"),
        (["model.net=conv", "model.net.kernel_size=3"], r"model\.net\.kernel_size: overlaps with model\.net"),
    ],
)
def test_a_value_is_given_once(words: list[str], message: str) -> None:
    """case:J02 and H9 of the reliability notes: duplicates are refused."""
    with pytest.raises(ConfigError, match=message):
        spec(*words)


def test_the_kind_is_applied_first() -> None:
    net = spec("model.net.channels=8,8", "model.net.kind=conv").model.net
    assert net is not None
    assert net.state() == {"kind": "conv", "channels": [8, 8]}


def test_a_bare_kind_in_the_file_can_be_refined() -> None:
    base = {**BASE, "model": {"loss": "huber", "net": "feed_forward", "metrics": ["top_k"]}}
    merged = spec("model.loss.delta=2", "model.metrics[0].k=3", base=base)
    assert merged.model.state()["loss"] == {"kind": "huber", "delta": 2.0}
    assert merged.model.metrics[0].key == "top_3"


def test_a_mapping_that_is_missing_is_built() -> None:
    merged = spec("train.monitor.metric=accuracy", "train.monitor.split=train")
    assert merged.train.monitor is not None
    assert merged.train.monitor.metric == "accuracy"


def test_a_value_in_the_way_is_named() -> None:
    with pytest.raises(ConfigError, match=r"train\.optim is 3, which has no 'max_lr'"):
        spec("train.optim.max_lr=1", base={"train": {"n_epochs": 1, "optim": 3}})


@given(st.lists(st.text(max_size=30), max_size=4))
def test_any_words_give_a_run_or_a_typed_error(words: list[str]) -> None:
    """H9 of the reliability notes: nothing else than ConfigError ever comes out."""
    try:
        spec(*words)
    except ConfigError:
        return


PATHS = ["train.seed", "train.salt", "model.net.hidden_dims", "train.optim", "mesh", "data.train"]


@given(st.sampled_from(PATHS), st.text())
def test_any_text_gives_a_run_or_a_typed_error(path: str, text: str) -> None:
    """H9 of the reliability notes: type confusion."""
    try:
        spec(f"{path}={text}")
    except ConfigError:
        return


def test_paths_are_returned_with_kinds_first() -> None:
    assert split_overrides(["b=1", "a.kind=x", "c[0].d = 2"]) == {("a", "kind"): "x", ("b",): "1", ("c", 0, "d"): "2"}
