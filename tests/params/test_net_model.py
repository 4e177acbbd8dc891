"""Nets, losses, metrics, models: what a file may say about them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from nnx_jax.core.errors import ConfigError
from nnx_jax.core.registry import kinds, register
from nnx_jax.params.losses import CrossEntropyParams, HuberParams, LossParams
from nnx_jax.params.metrics import AccuracyParams, F1Params, MetricParams, TopKParams
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import ConvParams, FeedForwardParams, NetBuilder, NNParams, TransformerLMParams
from nnx_jax.params.optim import NNOptimParams


def test_the_family_name_builds_each_kind() -> None:
    assert NNParams(kind="feed_forward", hidden_dims=[3]) == FeedForwardParams(hidden_dims=(3,))
    assert NNParams(kind="conv") == ConvParams()
    assert NNParams(kind="transformer_lm") == TransformerLMParams()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "feed_forward", "hidden_dims": [0]}, r"hidden_dims\[0\]: got 0 \(int\); expected a value >= 1"),
        ({"kind": "feed_forward", "hidden_dims": [10**9]}, r"hidden_dims\[0\]: got 1000000000"),
        ({"kind": "feed_forward", "hidden_dims": 64}, r"hidden_dims: got 64 \(int\); expected a list"),
        ({"kind": "feed_forward", "dropout_prob": 1.0}, r"dropout_prob: got 1\.0.*expected a value < 1"),
        ({"kind": "feed_forward", "dropout_prob": -0.1}, r"dropout_prob: got -0\.1.*expected a value >= 0"),
        ({"kind": "feed_forward", "activation": "rely"}, r"activation: got 'rely'.*did you mean 'relu'"),
        ({"kind": "feed_forward", "dropout": 0.1}, r"unknown key 'dropout'; did you mean 'dropout_prob'"),
        ({"kind": "conv", "channels": []}, r"channels: got \(\) \(tuple\); expected at least 1 items"),
        ({"kind": "conv", "input_shape": [8, 8]}, r"input_shape\[2\]: is required"),
        ({"kind": "transformer_lm", "d_model": 10, "n_heads": 4}, r"n_heads: got 4, which does not divide d_model=10"),
    ],
)
def test_impossible_nets_are_refused(values: dict[str, Any], message: str) -> None:
    """Every message names the field, the value and what is expected."""
    with pytest.raises(ConfigError, match=message):
        NNParams(**values)


def test_a_model_reads_bare_kinds_and_mappings() -> None:
    model = NNModelParams.from_yaml(
        "net: {kind: feed_forward}\nloss: {kind: cross_entropy, label_smoothing: 0.1, class_weights: [1, 2]}\n"
        "metrics: [accuracy, {kind: top_k, k: 3}, {kind: f1, average: micro}]\n"
    )
    assert model.loss == CrossEntropyParams(label_smoothing=0.1, class_weights=(1.0, 2.0))
    assert model.metrics == (AccuracyParams(), TopKParams(k=3), F1Params(average="micro"))
    assert [metric.key for metric in model.metrics] == ["accuracy", "top_3", "f1_micro"]
    assert NNModelParams(loss="huber").loss == HuberParams(delta=1.0)
    assert NNModelParams(loss="cross_entropy").state() == {}


def test_the_built_in_kinds() -> None:
    assert {"conv", "feed_forward", "transformer_lm"} <= set(kinds("net"))
    assert {"binary_cross_entropy", "cross_entropy", "huber", "mae", "mse"} <= set(kinds("loss"))
    built_in = ["accuracy", "brier", "f1", "mae", "mse", "nll", "perplexity", "precision", "recall", "top_k"]
    assert set(built_in) <= set(kinds("metric"))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["accuracy", "accuracy"], r"metrics\[1\]: the name 'accuracy' is given twice"),
        ([{"kind": "top_k", "k": 2}, {"kind": "accuracy", "name": "top_2"}], r"metrics\[1\]: the name 'top_2'"),
        ([{"kind": "mse", "name": "loss"}], r"metrics\[0\]: 'loss' is recorded by the trainer itself"),
        ([{"kind": "mse", "name": "error"}], r"metrics\[0\]: 'error' is recorded by the trainer itself"),
    ],
)
def test_metric_names_are_unique_and_free(metrics: list[Any], message: str) -> None:
    """nnx:B076: duplicate metric names, or one named "loss" or "error", are a ValueError."""
    with pytest.raises(ValueError, match=message):
        NNModelParams(metrics=metrics)


def test_two_of_a_kind_under_two_names_are_fine() -> None:
    names = [metric.key for metric in NNModelParams(metrics=["f1", {"kind": "f1", "name": "again"}]).metrics]
    assert names == ["f1", "again"]


@pytest.mark.parametrize("name", ["", " ", "a b", "a\n", "../x", "é", "x" * 65, "-x"])
def test_a_metric_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\[0\]\.name: got .*expected a letter"):
        NNModelParams(metrics=[{"kind": "accuracy", "name": name}])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("cross_entropi", r"loss: got 'cross_entropi'; there is no loss kind.*did you mean 'cross_entropy'"),
        ({"kind": "huber", "delta": 0}, r"loss\.delta: got 0 \(int\); expected a value > 0"),
        ({"kind": "cross_entropy", "label_smoothing": 1.5}, r"loss\.label_smoothing: got 1\.5.*<= 1"),
        ({"kind": "cross_entropy", "class_weights": [0, 0]}, r"loss\.class_weights: all weights are 0"),
        ({"kind": "cross_entropy", "class_weights": [1, -1]}, r"loss\.class_weights\[1\]: got -1"),
        ({"kind": "mse", "delta": 1.0}, r"loss\.delta: unknown key 'delta'"),
    ],
)
def test_wrong_losses_say_what_to_write(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"NNModelParams\.{message}"):
        NNModelParams(loss=loss)


def test_a_loss_of_your_own_is_a_registered_operator() -> None:
    @register("test_own_loss")
    class Own(LossParams):
        power: int = 2

        def __call__(self, outputs: Any, batch: Any) -> Any:
            return abs(outputs - batch["y"]) ** self.power

    model = NNModelParams.from_yaml("loss: {kind: test_own_loss, power: 3}")
    assert model.loss == Own(power=3)
    assert model.loss(5.0, {"y": 3.0}) == 8.0
    assert model.state() == {"loss": {"kind": "test_own_loss", "power": 3}}


def test_a_metric_of_your_own_has_no_direction_unless_it_says_so() -> None:
    @register("test_own_metric")
    class Own(MetricParams):
        pass

    assert Own().mode is None
    assert Own().key == "test_own_metric"
    assert AccuracyParams().mode == "max"


# -- builders ---------------------------------------------------------------------------------------------------------


def test_a_builder_needs_a_variant() -> None:
    """nnx:B032."""
    with pytest.raises(ValueError, match=r"NNParams builder has no variant yet; call one of \.feed_forward\(\), "):
        NNParams.builder().dropout_prob(0.5).build()


def test_the_last_variant_wins_and_modifiers_survive() -> None:
    """nnx:B032."""
    net = NNParams.builder().feed_forward(hidden_dims=[5]).dropout_prob(0.25).conv(kernel_size=5).build()
    assert net == ConvParams(kernel_size=5, dropout_prob=0.25)


def test_a_copy_is_independent_and_built_values_stay() -> None:
    """nnx:B033: changing a copy leaves the builder and what it built alone."""
    builder = NNParams.builder().feed_forward(hidden_dims=[5])
    built = builder.build()
    builder.copy().conv().dropout_prob(0.5)
    assert builder.build() == built == FeedForwardParams(hidden_dims=(5,))


@pytest.mark.parametrize(
    "net", [FeedForwardParams(), ConvParams(dropout_prob=0.5, channels=(4,)), TransformerLMParams(tie_embeddings=False)]
)
def test_a_builder_from_params_builds_the_same(net: NNParams) -> None:
    """nnx:B033."""
    assert NetBuilder.from_params(net).build() == net


def test_a_builder_refuses_other_params() -> None:
    """nnx:B033."""
    with pytest.raises(TypeError, match="NetBuilder builds NNParams, got a NNOptimParams"):
        NetBuilder.from_params(NNOptimParams())  # type: ignore[arg-type]
