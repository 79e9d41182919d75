"""The cache equals the full forward pass, however it is filled."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.quick import jit
from transformer_jax.batch import Batch
from transformer_jax.cache import EMPTY, check_cacheable, extend, init_cache, last_real, read_source, ring_slots
from transformer_jax.config import Config, Hyper
from transformer_jax.decode import generate, padded
from transformer_jax.encoder_decoder import Transformer, forward, init_transformer, logits_of
from transformer_jax.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_decoding")
V, T, S = 11, 15, 17
LENGTHS = (T, 5)
SMALL = Config(
    vocab_size=V, d_model=8, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=13, seq_len=T, max_positions=31,
    block_size=3, rope_original_positions=8, relative_buckets=8, relative_distance=11,
)  # fmt: skip
HYPER = Hyper(
    window=3, prefix=3, rope_base=50.0, rope_factor=3.0, attention_softcap=2.0, final_softcap=5.0, dk_exponent=0.4,
    attention_temperature=0.8,
)  # fmt: skip


@functools.cache
def parameters(config: Config) -> Transformer:
    """Fresh parameters, each moved off its first value: norms off 1, biases and sinks off 0."""
    shapes = jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))
    rng = np.random.default_rng(0)

    def draw(path: tuple, leaf: Any) -> jax.Array:
        scales = path[-1].name.startswith(("scale", "q_scale", "k_scale"))
        return jnp.asarray(rng.normal(1.0 if scales else 0.0, 0.4, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def ids(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape), jnp.int32)


def batch_of(config: Config, T: int = T, B: int = 2) -> Batch:
    batch = Batch(ids(B, T), ids(B, T), jnp.ones((B, T)), lengths_B=jnp.asarray(LENGTHS[:B]))
    if config.architecture == "encoder_decoder":
        batch = dataclasses.replace(batch, source_BS=ids(B, 7, seed=1), source_lengths_B=jnp.asarray((7, 3)[:B]))
    return batch


def fed(config: Config, params: Any, hyper: Hyper, cache: Any, tokens: jax.Array, real: jax.Array, size: int) -> Any:
    """Logits of the tokens given in pieces of one size, and the cache."""

    def one(cache: Any, xs: tuple) -> tuple[Any, jax.Array]:
        x, cache = extend(params, config, hyper, cache, *xs)
        return cache, x

    B, T = tokens.shape
    pieces = jax.tree.map(lambda x: x.reshape(B, T // size, size).swapaxes(0, 1), (tokens, real))
    cache, x = jax.lax.scan(one, cache, pieces)
    return logits_of(params, config, hyper, x.swapaxes(0, 1).reshape(B, T, -1)), cache


@functools.partial(jit, static_argnums=(0, 4))
def every_way(
    config: Config, params: Any, hyper: Hyper, batch: Batch, sizes: tuple[int, ...] = (T, 5, 1)
) -> dict[str, jax.Array]:
    """Logits [2B, T, V] by the size of the pieces: the batch's rows, and the same rows padded on the left.

    "forward": without a cache, [B, T, V].
    """
    B, T = batch.tokens_BT.shape
    assert batch.lengths_B is not None
    places, lengths = jnp.arange(T)[None], batch.lengths_B[:, None]
    tokens = jnp.where(places < lengths, batch.tokens_BT, 0)
    both = jnp.concatenate([tokens, jax.vmap(jnp.roll)(tokens, T - batch.lengths_B)])
    real = jnp.concatenate([places < lengths, places >= T - lengths])
    made: dict[str, jax.Array] = {}
    for size in sizes:
        cache = init_cache(config, 2 * B, S)
        if batch.source_BS is not None and batch.source_lengths_B is not None:
            twice = jnp.tile(batch.source_BS, (2, 1)), jnp.tile(batch.source_lengths_B, 2)
            cache = read_source(params, config, hyper, cache, *twice)
        made[str(size)], _ = fed(config, params, hyper, cache, both, real, size)
    made["forward"], _ = forward(params, config, hyper, dataclasses.replace(batch, tokens_BT=tokens))
    return made


# What differs from SMALL. Rows of the table share as many features as can fail apart.
MODELS: dict[str, dict[str, Any]] = {
    "rope": {"attention_bias": True},
    "rope interleaved, post": {"rope_layout": "interleaved", "norm_placement": "post", "qk_norm": True},
    "rope linear, sandwich": {"rope_scaling": "linear", "norm_placement": "sandwich", "norm": "rmsnorm"},
    "rope ntk, soft-caps": {"rope_scaling": "ntk", "terms": ("attention_softcap", "final_softcap")},
    "rope yarn, sink": {"rope_scaling": "yarn", "attention_sink": True, "rope_fraction": 0.5, "head_dim": 8},
    "rope llama3, block-sparse": {"rope_scaling": "llama3", "mask": "block_sparse"},
    "rope dynamic": {"rope_scaling": "dynamic", "rope_original_positions": S},
    "sinusoidal, sigmoid": {"positions": "sinusoidal", "normaliser": "sigmoid", "norm_placement": "post"},
    "learned, relu, multi-query": {"positions": "learned", "normaliser": "relu", "num_kv_heads": 1,
                                   "norm_placement": "none"},
    "alibi, entmax, prefix": {"positions": "alibi", "normaliser": "entmax15", "mask": "prefix"},
    "t5, window": {"positions": "t5", "mask": "window", "num_kv_heads": 4, "scan_unroll": 0},
    "t5, prefix": {"positions": "t5", "mask": "prefix"},
    "none, experts": {"positions": "none", "num_experts": 3, "expert_capacity": 0.0, "ffn": "swiglu"},
    "blockwise": {"attention_implementation": "blockwise", "attention_block": 3, "mask": "window"},
    "banded": {"attention_implementation": "banded", "band": 3, "mask": "window", "remat": True},
    "translation, t5": {"architecture": "encoder_decoder", "positions": "t5", "attention_bias": True},
    "translation, rope": {"architecture": "encoder_decoder", "qk_norm": True, "tie_embeddings": False},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_equals_the_forward_pass_however_it_is_filled(name: str) -> None:
    config = SMALL.replace(**MODELS[name])
    # A prefix of 3 must come at once, which pieces of 3 do for rows that are padded on the right.
    made = every_way(config, parameters(config), HYPER, batch_of(config), (T, 5, 3 if config.mask == "prefix" else 1))
    want = np.asarray(made.pop("forward"))
    for size, got in made.items():
        for b, length in enumerate(LENGTHS):
            right, left = np.asarray(got)[b, :length], np.asarray(got)[2 + b, T - length :]
            for side, row in (("right", right), ("left", left)):
                if (size, side) != ("3", "left"):
                    close(row, want[b, :length], f"pieces of {size}, row {b} padded on the {side}")


def close(got: Any, want: Any, message: str = "") -> None:
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1.0, np.abs(want).max()), err_msg=message)


def test_b5_the_cache_equals_a_loop_in_float64() -> None:
    config = SMALL.replace(mask="window")
    batch, hyper = batch_of(config), HYPER.replace(rope_base=10000.0)
    got = every_way(config, parameters(config), hyper, batch, (1,))["1"]
    close(got[0], reference.transformer(parameters(config), config, hyper, batch)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_d6_half_precision_is_as_good_as_without_a_cache(dtype: str) -> None:
    config = SMALL.replace(norm_placement="post", num_experts=2, expert_capacity=0.0)
    params, batch = parameters(config), batch_of(config)
    exact = np.asarray(every_way(config, params, HYPER, batch, ())["forward"])[0]
    made = every_way(config.replace(compute_dtype=dtype), params, HYPER, batch, (5,))
    errors = {way: np.abs(np.asarray(logits)[0] - exact).max() for way, logits in made.items()}
    assert 0 < errors["5"] < 2 * errors["forward"]
    cache = init_cache(config.replace(compute_dtype=dtype), 1, 4)
    assert cache.held.own.k_BSKH.dtype == dtype


def test_grouped_heads_stay_grouped_in_the_cache() -> None:
    cache = init_cache(SMALL.replace(head_dim=5, rope_fraction=0.8), 3, 7)
    assert cache.held.own.k_BSKH.shape == (2, 3, 7, 2, 5)


@pytest.mark.parametrize("changes", [{}, {"positions": "t5"}, {"positions": "learned", "max_positions": 64}])
def test_a_ring_forgets_what_the_window_does(changes: dict[str, Any]) -> None:
    """44 tokens, some of them pads, in pieces of 4 through a ring of 3 + 4 - 1 slots."""
    config, length = SMALL.replace(mask="window", **changes), 44
    params, tokens = parameters(config), ids(2, length)
    real = jnp.asarray(np.random.default_rng(3).random((2, length)) < [[0.6], [1.0]])

    @jit
    def through(tokens: jax.Array, real: jax.Array) -> Any:
        cache = init_cache(config, 2, ring_slots(HYPER.window, 4), piece=4)
        return fed(config, params, HYPER, cache, tokens, real, 4)

    got, cache = through(tokens, real)
    assert cache.positions_BS.shape == (2, 6) and cache.lengths_B[1] == length
    for b in range(2):
        kept = tokens[b][np.asarray(real[b])][None]
        want = forward_of(config, kept)
        close(np.asarray(got)[b][np.asarray(real[b])], want[0])


def test_a_ring_ends_where_the_positions_do() -> None:
    """Dynamic scaling would change the cached keys; a learned table has no more rows."""
    config = SMALL.replace(mask="window", rope_scaling="dynamic")
    params, tokens = parameters(config), ids(2, 12)

    @jit
    def through(tokens: jax.Array) -> jax.Array:
        cache = init_cache(config, 2, ring_slots(HYPER.window, 4), piece=4)
        real = jnp.asarray([[True], [False]]) | (jnp.arange(12)[None] < 8)
        return fed(config, params, HYPER, cache, tokens, real, 4)[0]

    got = np.asarray(through(tokens))
    close(got[:, :8], forward_of(config, tokens[:, :8]))
    assert np.isnan(got[0, 8:]).all() and np.isfinite(got[1]).all()
    for most, changes in (
        ("rope_original_positions=8", {"rope_scaling": "dynamic"}),
        ("max_positions=15", {"positions": "learned", "max_positions": 15}),
    ):
        config = SMALL.replace(mask="window", **changes)
        held = int(most.split("=")[1]) - 1
        full = dataclasses.replace(init_cache(config, 1, 6, piece=4), lengths_B=jnp.asarray([held]))
        with pytest.raises(ConfigError, match=f"a ring of 6 slots: {held + 2} positions .*{most}"):
            extend(None, config, HYPER, full, tokens[:1, :2])  # pyright: ignore


# --- faults of others ---------------------------------------------------------------


def test_b1_b3_fewer_queries_than_keys_see_all_of_the_past() -> None:
    """The second of two queries on three cached keys sees all five, the first all but the last."""
    config = SMALL.replace(num_layers=1, positions="none")
    params = parameters(config)

    def outputs(embedding: jax.Array) -> jax.Array:
        moved = dataclasses.replace(params, embedding=dataclasses.replace(params.embedding, embed_VD=embedding))
        cache, tokens = init_cache(config, 1, 9), jnp.arange(5)[None]
        _, cache = extend(moved, config, HYPER, cache, tokens[:, :3])
        return extend(moved, config, HYPER, cache, tokens[:, 3:])[0][0].sum(axis=-1)

    reached = jnp.abs(jit(jax.jacrev(outputs))(params.embedding.embed_VD)).sum(axis=-1)[:, :5] > 0
    np.testing.assert_array_equal(reached, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])


def test_b13_a_window_of_4_in_decoding_is_four_keys() -> None:
    config = SMALL.replace(num_layers=1, mask="window", vocab_size=12, num_heads=2, num_kv_heads=1)
    params, hyper = parameters(config), HYPER.replace(window=4)

    def last(embedding: jax.Array) -> jax.Array:
        moved = dataclasses.replace(params, embedding=dataclasses.replace(params.embedding, embed_VD=embedding))
        cache = init_cache(config, 1, ring_slots(4, 1), piece=1)
        return fed(config, moved, hyper, cache, jnp.arange(11)[None], jnp.ones((1, 11), bool), 1)[0][0, 10].sum()

    # Tied logits reach every row of the table by themselves.
    config = config.replace(tie_embeddings=False)
    params = parameters(config)
    reached = jnp.abs(jit(jax.grad(last))(params.embedding.embed_VD)).sum(axis=-1) > 0
    assert np.flatnonzero(reached).tolist() == [7, 8, 9, 10]


TEXT = SMALL.replace(positions="t5", num_layers=2)


@functools.partial(jit, static_argnums=0)
def _forward(config: Config, params: Any, batch: Batch) -> jax.Array:
    return forward(params, config, HYPER, batch)[0]


def forward_of(config: Config, tokens: jax.Array, **parts: Any) -> jax.Array:
    """Logits of whole texts, without a cache."""
    return _forward(config, parameters(config), Batch(tokens, tokens, tokens, **parts))


PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]]


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_b7_the_last_logits_of_a_padded_row_are_those_of_the_unpadded_row(positions: str) -> None:
    config = SMALL.replace(positions=positions)
    params = parameters(config)

    @functools.partial(jit, static_argnums=2)
    def last(tokens: jax.Array, real: jax.Array, rows: int) -> jax.Array:
        x, _ = extend(params, config, HYPER, init_cache(config, rows, 16), tokens, real)
        return logits_of(params, config, HYPER, last_real(x, real)[:, None])[:, 0]

    for side in ("left", "right"):
        tokens, real = map(jnp.asarray, padded(PROMPTS, 12, side))
        got = last(tokens, real, 3)
        for b, prompt in enumerate(PROMPTS):
            row = jnp.asarray([prompt])
            np.testing.assert_allclose(got[b], last(row, jnp.ones(row.shape, bool), 1)[0], atol=1e-5)


def test_b9_positions_past_the_table_are_refused_with_both_numbers() -> None:
    config = SMALL.replace(positions="learned", max_positions=16)
    params, key = parameters(config), jax.random.key(0)
    with pytest.raises(ConfigError, match=r"prompt of 9 and max_new_tokens=8: 17 positions .*max_positions=16"):
        generate(params, config, HYPER, [[1] * 9], key, max_new_tokens=8)
    with pytest.raises(ConfigError, match="17 slots: 17 positions .*max_positions=16"):
        init_cache(config, 1, 17)
    made = generate(params, config, HYPER, [[1] * 9], key, max_new_tokens=7)  # 16 are not too many
    assert np.isfinite(made.logp_BT).all() and made.ids_BT.shape == (1, 7)
    pair = config.replace(architecture="encoder_decoder")
    with pytest.raises(ConfigError, match=r"source of 17 .*max_positions=16"):
        generate(parameters(pair), pair, HYPER, [[1]], key, max_new_tokens=1, sources=[[1] * 17])


def test_b10_nothing_is_written_past_the_cache() -> None:
    params, tokens = parameters(SMALL), ids(2, 10)

    @jit
    def one(cache: Any, token: jax.Array, real: jax.Array) -> Any:
        return extend(params, SMALL, HYPER, cache, token, real)

    _, cache = one(init_cache(SMALL, 2, 8), tokens[:, :7], jnp.ones((2, 7), bool))
    with pytest.raises(ConfigError, match="10 tokens for a cache of 8 slots"):
        extend(params, SMALL, HYPER, cache, tokens[:, 7:])
    with pytest.raises(ConfigError, match="10 tokens for a cache of 8 slots"):
        jax.eval_shape(lambda x: extend(params, SMALL, HYPER, init_cache(SMALL, 2, 8), x), tokens)
    with pytest.raises(ConfigError, match="3 tokens at once for a ring that was made for pieces of 2"):
        window = SMALL.replace(mask="window")
        extend(params, window, HYPER, init_cache(window, 2, 4, piece=2), tokens[:, :3])
    for t in (7, 8, 9):  # row 0 stops in time
        x, cache = one(cache, tokens[:, t : t + 1], jnp.asarray([[t < 8], [True]]))
        if t == 7:
            full = cache
    assert np.isfinite(x[0]).all() and np.isnan(x[1]).all() and cache.lengths_B.tolist() == [8, 10]
    np.testing.assert_array_equal(cache.held.own.k_BSKH, full.held.own.k_BSKH)
    np.testing.assert_array_equal(cache.held.own.v_BSKH, full.held.own.v_BSKH)
    np.testing.assert_array_equal(cache.positions_BS, np.tile(np.arange(8), (2, 1)))


@pytest.mark.parametrize("positions", ["t5", "alibi"])
def test_b12_a_position_bias_is_there_in_every_cached_step(positions: str) -> None:
    config = SMALL.replace(positions=positions)
    params, tokens = parameters(config), ids(1, 24)
    got = jit(lambda x: fed(config, params, HYPER, init_cache(config, 1, 29), x, jnp.ones(x.shape, bool), 1)[0])
    close(got(tokens), forward_of(config, tokens))


@pytest.mark.parametrize("scaling", ["none", "yarn"])
def test_c4_c7_angles_are_one_table_at_position_300(scaling: str) -> None:
    config = SMALL.replace(rope_scaling=scaling, head_dim=8, rope_original_positions=64)
    params, tokens, hyper = parameters(config), ids(1, 311), HYPER.replace(rope_base=10000.0, rope_factor=4.0)

    @jit
    def both(tokens: jax.Array) -> Any:
        x, cache = extend(params, config, hyper, init_cache(config, 1, 320), tokens[:, :300])
        last, _ = fed(config, params, hyper, cache, tokens[:, 300:], jnp.ones((1, 11), bool), 1)
        logits = jnp.concatenate([logits_of(params, config, hyper, x), last], axis=1)
        return logits, forward(params, config, hyper, Batch(tokens, tokens, tokens))[0]

    got, want = both(tokens)
    close(got[:, 200:], want[:, 200:])


# --- refusals ---------------------------------------------------------------------------


def test_more_refusals() -> None:
    with pytest.raises(ConfigError, match="only a window forgets"):
        init_cache(SMALL, 1, 4, piece=1)
    with pytest.raises(ConfigError, match="0 slots"):
        init_cache(SMALL, 1, 0)
    with pytest.raises(ConfigError, match="3 rows for a cache of 2"):
        extend(parameters(SMALL), SMALL, HYPER, init_cache(SMALL, 2, 4), ids(3, 1))
    with pytest.raises(ConfigError, match="read_source"):
        pair = SMALL.replace(architecture="encoder_decoder")
        extend(parameters(pair), pair, HYPER, init_cache(pair, 1, 4), ids(1, 1))
    check_cacheable(SMALL.replace(mask="block_sparse"))
    assert (init_cache(SMALL, 1, 3).positions_BS == EMPTY).all()
