"""Live bytes of each implementation of attention by hand, to the byte, and compiled programs' memory beside them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.masks import Mask
from transformer_jax.meter import measure
from transformer_jax.train import token_sums


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def working(T: int, H: int, mask: Mask | None, B: int = 1, N: int = 1, **how: Any) -> int:
    """Bytes beside q, k and v at the forward pass's peak."""
    return measure(functools.partial(attend, mask=mask, **how), *[shape(B, T, N, H)] * 3).working_bytes


# --- by hand -----------------------------------------------------------------------


@pytest.mark.parametrize("T", [64, 192])
@pytest.mark.parametrize("H", [8, 32])
def test_dense(T: int, H: int) -> None:
    """Without a mask the quotient: powers, the weights made of them, each row's sum. Values count for nothing.

    With one, where it is laid over the scores: scores, -inf in their shape, the result, and booleans.
    """
    assert working(T, H, None) == (4 + 4) * T**2 + 4 * T
    assert working(T, H, None, B=2, N=3) == 2 * 3 * ((4 + 4) * T**2 + 4 * T)
    assert working(T, H, masks.causal()) == (4 + 4 + 4 + 1) * T**2


@pytest.mark.parametrize("T", [256, 1024])
@pytest.mark.parametrize(("H", "block"), [(8, 32), (8, 64), (32, 64)])
def test_blockwise(T: int, H: int, block: int) -> None:
    """Linear in T: q, k, v in blocks, the output, keys and values once more without gradient, three lists of slots.

    And a block of dense attention, its queries and keys, two columns of its rows, and three counters.
    """
    arrays, slots = 4 * (3 + 1 + 2) * T * H, 4 * 3 * T
    one_block = (4 + 4 + 4 + 1) * block**2 + 4 * 2 * block * H + 4 * 2 * block + 4 * 3
    assert working(T, H, masks.causal(), implementation="blockwise", block=block) == arrays + slots + one_block


@pytest.mark.parametrize("T", [128, 512, 1024, 2048])
@pytest.mark.parametrize("reach", [1, 2])
def test_banded(T: int, reach: int) -> None:
    """q and the output, k and v with `reach` blocks before each group of at most 512 queries, and their slots.

    And of one group: q, the keys that each block reaches, and the values, still where they are laid beside each other.
    """
    H, block, groups = 64, 16, max(1, T // 512)
    pieces, of_group = reach + 1, T // groups
    arrays = 4 * 4 * T * H + 4 * 2 * groups * reach * block * H
    one_group = 4 * (1 + pieces + 2 * pieces) * of_group * H
    slots = 4 * (1 + pieces) * (T + of_group)
    mask = masks.window(reach * block + 1)
    assert working(T, H, mask, implementation="banded", block=block) == arrays + one_group + slots


@pytest.mark.parametrize("T", [256, 1024])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
def test_linear(T: int, mask: Mask | None) -> None:
    """Where the features of the keys are made, after those of the queries: q, k, k + 1, two booleans, and a choice
    between two arrays as large as the third that it makes; and which keys are shown. No [T, S], no state worth naming.
    """
    H = 32
    assert working(T, H, mask, implementation="linear", block=32) == (4 * 5 + 2) * T * H + T


# --- compiled ----------------------------------------------------------------------


def compiled_bytes(f: Any, *args: Any) -> int:
    """XLA's temporary buffers, without its optimisations of code, which change none of them."""
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", ["blockwise", "banded", "linear"])
def test_k6_compiled_memory_of_packed_attention_grows_linearly(name: str) -> None:
    def needed(T: int) -> int:
        def total(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
            mask = {
                "blockwise": masks.causal() & masks.segments(ids),
                "banded": masks.window(128) & masks.segments(ids),
                "linear": masks.causal() & masks.padding(ids[:, 0]),
            }[name]
            return jnp.sum(jnp.sin(attend(q, k, v, mask, implementation=name)))  # type: ignore[arg-type]

        arrays = [shape(1, T, 1, 16)] * 3
        return compiled_bytes(jax.grad(total, argnums=(0, 1, 2)), *arrays, shape(1, T, dtype=jnp.int32))

    short, long = needed(8192), needed(16384)
    assert math.log2(long / short) <= 1.1
    assert long < 16384**2 / 8  # one bit a pair


def test_k5_compiled_memory_falls_by_the_chunks() -> None:
    T, V, chunks = 4096, 50_000, 16

    def needed(loss_chunks: int) -> int:
        config = Config(
            vocab_size=V, d_model=16, num_heads=1, num_layers=1, attention_implementation="blockwise", seq_len=T,
            loss_chunks=loss_chunks,
        )  # fmt: skip
        params = jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))
        ids = shape(1, T, dtype=jnp.int32)
        loss = lambda p, b: token_sums(p, config, Hyper(), b).objective  # noqa: E731
        return compiled_bytes(jax.grad(loss), params, Batch(ids, ids, shape(1, T)))

    plain, chunked = needed(1), needed(chunks)
    assert plain >= 4 * T * V  # the logits, float32
    assert chunked < 1.3 * plain / chunks  # the embedding's own gradient does not shrink
