"""A decoder-only transformer for next-token prediction: pre-norm, causal, float32 where 16 bits would hurt."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError, nearest
from nnx_jax.core.precision import sum_dtype, widened
from nnx_jax.nets.layers import LayerNorm, ShardingRules, maybe_dropout

INIT_STD = 0.02  # GPT-2; layers that add to the residual stream get it divided by sqrt(2 * n_layers)
ROTARY_BASE = 10000.0


class TransformerLM(nnx.Module):
    """Token ids x [B, T] (any integer type) -> logits [B, T, vocab_size]; position t sees ids 0..t only.

    Parameters: `embed.embedding`, `positions` (learned positions), `blocks.<i>.{norm_1,qkv,out,norm_2,up,down}.*`,
    `norm.*`, and `head.kernel` when the output is not tied to the embedding.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        *,
        d_model: int = 128,
        n_layers: int = 2,
        n_heads: int = 4,
        mlp_ratio: float = 4,
        dropout_prob: float = 0.0,
        tie_embeddings: bool = True,
        position: str = "learned",
        rngs: nnx.Rngs,
    ) -> None:
        if position not in ("learned", "rotary"):
            raise ConfigError(f"there is no position encoding '{position}'{nearest(position, ('learned', 'rotary'))}")
        if d_model % n_heads:
            raise ModelError(f"d_model {d_model} does not split into {n_heads} heads; choose a multiple of {n_heads}")
        if position == "rotary" and (d_model // n_heads) % 2:
            raise ModelError(
                f"rotary positions need an even head size, got {d_model} / {n_heads} = {d_model // n_heads}"
            )
        init = nnx.initializers.normal(INIT_STD)
        self.context_length = context_length
        self.embed = nnx.Embed(vocab_size, d_model, embedding_init=init, rngs=rngs)
        self.embed.dtype = None  # type: ignore[assignment]  # Embed would pin float32; follow the weights instead
        learned = position == "learned"
        self.positions = nnx.Param(init(rngs.params(), (context_length, d_model), jnp.float32)) if learned else None
        self.dropout = maybe_dropout(dropout_prob, rngs=rngs)
        self.blocks = nnx.List(
            Block(d_model, n_heads, int(mlp_ratio * d_model), n_layers, dropout_prob, rotary=not learned, rngs=rngs)
            for _ in range(n_layers)
        )
        self.norm = LayerNorm(d_model, rngs=rngs)
        self.head = (
            None if tie_embeddings else nnx.Linear(d_model, vocab_size, use_bias=False, kernel_init=init, rngs=rngs)
        )

    def sharding_rules(self) -> ShardingRules:
        """Attention and perceptron split by outputs and then by inputs; the embedding, and so the logits, by tokens."""
        return {
            "embed.embedding": ("tensor", None),
            "blocks.*.qkv.kernel": (None, "tensor"),
            "blocks.*.qkv.bias": ("tensor",),
            "blocks.*.out.kernel": ("tensor", None),
            "blocks.*.up.kernel": (None, "tensor"),
            "blocks.*.up.bias": ("tensor",),
            "blocks.*.down.kernel": ("tensor", None),
            "head.kernel": (None, "tensor"),
        }

    def __call__(self, x: Any) -> jax.Array:
        """x int [B, T] -> [B, T, vocab_size] in the type of the weights.

        Raises:
            ModelError: for ids that are not integers, or more of them than `context_length`.
        """
        ids = jnp.asarray(x)
        if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.ndim != 2:
            raise ModelError(f"transformer_lm needs integer ids [batch, time], got {ids.dtype} {ids.shape}")
        length = ids.shape[1]
        if length > self.context_length:
            raise ModelError(f"transformer_lm has context_length {self.context_length}, the batch has {length} tokens")
        h = self.embed(ids.astype(jnp.int32))
        if self.positions is not None:
            h = h + self.positions[:length].astype(h.dtype)
        if self.dropout is not None:
            h = self.dropout(h)
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        return self.embed.attend(h) if self.head is None else self.head(h)


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each on the normed stream and added back to it."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        hidden: int,
        n_layers: int,
        dropout_prob: float,
        *,
        rotary: bool,
        rngs: nnx.Rngs,
    ) -> None:
        init = nnx.initializers.normal(INIT_STD)
        init_back = nnx.initializers.normal(INIT_STD / math.sqrt(2 * n_layers))
        self.n_heads, self.rotary = n_heads, rotary
        self.norm_1 = LayerNorm(d_model, rngs=rngs)
        self.qkv = nnx.Linear(d_model, 3 * d_model, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(d_model, d_model, kernel_init=init_back, rngs=rngs)
        self.norm_2 = LayerNorm(d_model, rngs=rngs)
        self.up = nnx.Linear(d_model, hidden, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(hidden, d_model, kernel_init=init_back, rngs=rngs)
        self.dropout = maybe_dropout(dropout_prob, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        """h [B, T, d_model] -> the same shape and type."""
        h = h + self._drop(self._attend(self.norm_1(h)))
        return h + self._drop(self.down(jax.nn.gelu(self.up(self.norm_2(h)))))

    def _attend(self, h: jax.Array) -> jax.Array:
        batch, length, width = h.shape
        parts = self.qkv(h).reshape(batch, length, 3, self.n_heads, width // self.n_heads)
        q, k, v = jnp.transpose(parts, (2, 0, 3, 1, 4))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        mixed = causal_attention(q, k, v)
        return self.out(jnp.transpose(mixed, (0, 2, 1, 3)).reshape(batch, length, width))

    def _drop(self, h: jax.Array) -> jax.Array:
        return h if self.dropout is None else self.dropout(h)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(size)) v over positions up to one's own; all [B, heads, T, size], scores in float32 or wider.

    Written out: half the time of jax.nn.dot_product_attention on a CPU (heads before time saves its transposes).
    """
    length, size = q.shape[-2:]
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=sum_dtype(q.dtype)) / math.sqrt(size)
    past = jnp.tril(jnp.ones((length, length), bool))
    share = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", share.astype(v.dtype), v)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions for x [..., T, size]: pairs (i, i + size/2) turned by t * base^(-2i/size), float32 or wider."""
    half, wide = x.shape[-1] // 2, widened(x)
    speed = ROTARY_BASE ** (-jnp.arange(half, dtype=wide.dtype) / half)
    angle = jnp.arange(x.shape[-2], dtype=wide.dtype)[:, None] * speed
    first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
