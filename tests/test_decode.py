"""The cache equals the full forward pass, however it is filled; generated rows know nothing of each other."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.quick import jit
from transformer_jax import decode
from transformer_jax.batch import Batch
from transformer_jax.cache import EMPTY, check_cacheable, extend, init_cache, last_real, read_source, ring_slots
from transformer_jax.config import Config, Hyper
from transformer_jax.decode import bucket, generate, padded, stream
from transformer_jax.encoder_decoder import Transformer, forward, init_transformer, logits_of
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.samplers import GREEDY, Sampler

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
def test_half_precision_is_as_good_as_without_a_cache(dtype: str) -> None:
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


def alone(prompt: list[int], **options: Any) -> np.ndarray:
    return np.asarray(generate(parameters(TEXT), TEXT, HYPER, [prompt], jax.random.key(0), **options).ids_BT)[0]


PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b6_b8_a_row_of_a_padded_batch_is_as_alone(side: str, temperature: float) -> None:
    sampler, key = Sampler(temperature=temperature, repetition_penalty=4.0), jax.random.key(0)
    asked, room = decode._request(TEXT, HYPER, PROMPTS, key, max_new_tokens=9, sampler=sampler)
    tokens, real = padded(PROMPTS, asked.tokens_BT.shape[1], side)
    asked = dataclasses.replace(asked, tokens_BT=jnp.asarray(tokens + 9 * ~real), real_BT=jnp.asarray(real))
    made = decode._write(parameters(TEXT), TEXT, decode._numbers(HYPER), asked, room)
    for b, prompt in enumerate(PROMPTS):
        want = alone(prompt, max_new_tokens=9, sampler=sampler, row_ids=[b])
        np.testing.assert_array_equal(made.ids_BT[b, :9], want)


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


@pytest.mark.parametrize("length", [1, 2, 9])
def test_b11_prompts_of_any_length_where_the_heads_are_not_the_width(length: int) -> None:
    prompt = ids(length).tolist()
    assert TEXT.N * TEXT.H != TEXT.D
    made = alone(prompt, max_new_tokens=5, sampler=GREEDY)
    logits = forward_of(TEXT, jnp.asarray([[*prompt, *made]]))
    np.testing.assert_array_equal(jnp.argmax(logits[0, length - 1 : -1], axis=-1), made)


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


def test_k1_a_program_for_a_bucket_of_lengths() -> None:
    params, key = parameters(TEXT), jax.random.key(0)
    before, sizes = decode._write._cache_size(), set()
    for length in range(1, 65):
        prompt = [length % V] * length
        generate(params, TEXT, HYPER, [prompt, prompt], key, max_new_tokens=1 + length % 7, sampler=Sampler(top_k=3))
        sizes.add(bucket(length))
    assert sizes == {16, 32, 64}
    assert decode._write._cache_size() - before <= len(sizes)


def test_m1_finished_rows_are_pads_with_a_fixed_score_and_the_loop_ends_with_the_last() -> None:
    params, key, prompts = parameters(TEXT), jax.random.key(5), [[3], [4]]
    free = generate(params, TEXT, HYPER, prompts, key, max_new_tokens=9)
    stops = (int(free.ids_BT[0, 0]), int(free.ids_BT[1, 4]))
    assert not set(stops) & set(np.asarray(free.ids_BT)[1, :4].tolist())
    made = generate(params, TEXT, HYPER, prompts, key, max_new_tokens=9, stop_ids=stops, pad_id=7)
    assert made.lengths_B.tolist() == [1, 5]
    for b, length in enumerate((1, 5)):
        np.testing.assert_array_equal(made.ids_BT[b, :length], free.ids_BT[b, :length])
        assert (made.ids_BT[b, length:] == 7).all()
        for name in ("logp_BT", "sampler_logp_BT"):
            np.testing.assert_array_equal(getattr(made, name)[b, :length], getattr(free, name)[b, :length])
            assert (getattr(made, name)[b, length:] == 0).all()
    columns = list(stream(params, TEXT, HYPER, prompts, key, max_new_tokens=9, stop_ids=stops, pad_id=7))
    assert len(columns) == 5
    np.testing.assert_array_equal(np.stack(columns, axis=1), made.ids_BT[:, :5])


# --- generate and stream ------------------------------------------------------------


def test_probabilities_are_those_of_the_forward_pass() -> None:
    sampler = Sampler(temperature=0.5)
    made = generate(parameters(TEXT), TEXT, HYPER, [[3, 1]], jax.random.key(1), max_new_tokens=6, sampler=sampler)
    assert made.lengths_B.tolist() == [6] and made.ids_BT.shape == made.logp_BT.shape == (1, 6)
    text = jnp.asarray([[3, 1, *np.asarray(made.ids_BT)[0]]])
    logits = np.float64(forward_of(TEXT, text))[0, 1:-1]
    for got, scale in ((made.logp_BT, 1.0), (made.sampler_logp_BT, 0.5)):
        logp = logits / scale - np.log(np.exp(logits / scale).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(got[0], logp[np.arange(6), text[0, 2:]], atol=1e-5)


def test_seeds_reproduce_and_differ() -> None:
    def texts(seed: int) -> list:
        options: Any = {"max_new_tokens": 9}
        return generate(parameters(TEXT), TEXT, HYPER, [[3], [3]], jax.random.key(seed), **options).ids_BT.tolist()

    assert texts(0) == texts(0) != texts(1)
    assert texts(0)[0] != texts(0)[1]  # equal prompts in two rows are two draws


def test_logits_that_are_not_finite_are_refused_where_they_begin() -> None:
    config = TEXT.replace(tie_embeddings=False, num_layers=1)
    params, key, prompts = parameters(config), jax.random.key(4), [[3], [4]]
    made = generate(params, config, HYPER, prompts, key, max_new_tokens=9)
    bad = int(made.ids_BT[1, 2])  # the id whose reading gives NaN; where it is drawn last, nobody reads it
    step, row = next((t, b) for t in range(8) for b in range(2) if made.ids_BT[b, t] == bad)
    embedding = dataclasses.replace(params.embedding, embed_VD=params.embedding.embed_VD.at[bad].set(jnp.nan))
    params = dataclasses.replace(params, embedding=embedding)
    assert bad not in (3, 4)
    message = f"logits are not finite at new token {step + 1} of row {row}"
    with pytest.raises(ConfigError, match=message):
        generate(params, config, HYPER, prompts, key, max_new_tokens=9)
    columns = stream(params, config, HYPER, prompts, key, max_new_tokens=9)
    for t in range(step + 1):
        np.testing.assert_array_equal(next(columns), made.ids_BT[:, t])
    with pytest.raises(ConfigError, match=message):
        next(columns)
    # What comes after a row's end is not read.
    stopped = generate(params, config, HYPER, prompts, key, max_new_tokens=9, stop_ids=(bad,))
    assert (stopped.ids_BT[row, : step + 1] == made.ids_BT[row, : step + 1]).all()


def test_a_batch_of_other_rows_in_another_order_changes_no_row() -> None:
    key = jax.random.key(2)
    options: Any = {"max_new_tokens": 8, "stop_ids": (2,)}
    sampler = Sampler(temperature=jnp.asarray([0.0, 0.7, 1.0]), top_k=jnp.asarray([0, 3, 0]))
    params = parameters(TEXT)
    made = generate(params, TEXT, HYPER, PROMPTS, key, sampler=sampler, **options)
    order = [2, 0]
    some = generate(
        params, TEXT, HYPER, [PROMPTS[b] for b in order], key, row_ids=order,
        sampler=jax.tree.map(lambda x: x[np.asarray(order)], sampler.of_rows(3)), **options,
    )  # fmt: skip
    np.testing.assert_array_equal(some.ids_BT, made.ids_BT[np.asarray(order)])


def test_prompts_in_pieces_and_a_ring_give_the_same_ids() -> None:
    config = TEXT.replace(mask="window", positions="rope")
    params, prompts, key = parameters(config), [[*range(11)] * 3, [4]], jax.random.key(0)
    whole = generate(params, config, HYPER, prompts, key, max_new_tokens=30)
    _, room = decode._request(config, HYPER, prompts, key, max_new_tokens=30, piece=5)
    assert room.ring and room.slots == 3 + 5 - 1
    cut = generate(params, config, HYPER, prompts, key, max_new_tokens=30, piece=5)
    np.testing.assert_array_equal(cut.ids_BT, whole.ids_BT)


def test_translations_are_as_alone_and_as_without_a_cache() -> None:
    """Also where the encoder's angles follow the length: that of the source, not of its bucket."""
    config = SMALL.replace(architecture="encoder_decoder", rope_scaling="dynamic", rope_original_positions=6)
    params, sources = parameters(config), [[3, 4, 5, 6, 7, 8, 9], [8]]
    options: Any = {"max_new_tokens": 5, "sampler": GREEDY, "stop_ids": (0,)}
    made = generate(params, config, HYPER, [[1], [1]], jax.random.key(0), sources=sources, **options)
    for b, source in enumerate(sources):
        text = jnp.asarray([[1, *np.asarray(made.ids_BT)[b]]])
        logp = jax.nn.log_softmax(forward_of(config, text, source_BS=jnp.asarray([source]))[0, :-1], axis=-1)
        length = int(made.lengths_B[b])
        np.testing.assert_array_equal(jnp.argmax(logp, axis=-1)[:length], made.ids_BT[b, :length])
        np.testing.assert_allclose(jnp.max(logp, axis=-1)[:length], made.logp_BT[b, :length], atol=1e-5)


def test_experts_drop_no_token_in_decoding() -> None:
    config = SMALL.replace(num_experts=3, expert_capacity=0.3)
    made = every_way(config, parameters(config), HYPER, batch_of(config), (5,))
    want = every_way(config.replace(expert_capacity=0.0), parameters(config), HYPER, batch_of(config), ())
    close(made["5"][0], want["forward"][0])
    assert np.abs(made["forward"] - want["forward"]).max() > 0.01


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask=none lets a position see later ones": ({"mask": "none"}, {}),
    "mask=inverted lets a position see later ones": ({"mask": "inverted"}, {}),
    "attention_implementation=linear reads sums": ({"attention_implementation": "linear"}, {}),
    "architecture=encoder has no decoder": ({"architecture": "encoder"}, {}),
    "22 positions are past rope_original_positions=20": (
        {"rope_scaling": "dynamic", "rope_original_positions": 20}, {"max_new_tokens": 20}),
    "prefix=3 with 2 prompt tokens": ({"mask": "prefix"}, {}),
    "architecture=decoder has no sources": ({}, {"sources": [[1]]}),
    "architecture=encoder_decoder needs sources": ({"architecture": "encoder_decoder"}, {}),
    "2 sources for 1 prompts": ({"architecture": "encoder_decoder"}, {"sources": [[1], [2]]}),
    "source 0 is empty": ({"architecture": "encoder_decoder"}, {"sources": [[]]}),
    "max_new_tokens=0 is out of range": ({}, {"max_new_tokens": 0}),
    "prompt 0 is empty": ({}, {"prompts": [[]]}),
    "no prompts": ({}, {"prompts": []}),
    "id 11 at 1 is outside the vocabulary of 11": ({}, {"prompts": [[0, 11]]}),
    "id 12 at 0 is outside": ({}, {"stop_ids": (12,)}),
    "id -1 at 0 is outside": ({}, {"pad_id": -1}),
    "2 row_ids for 1 prompts": ({}, {"row_ids": [0, 1]}),
    "top_k=12 is out of range": ({}, {"sampler": Sampler(top_k=12)}),
}  # fmt: skip


@pytest.mark.parametrize("message", MISTAKES)
def test_what_cannot_be_done_is_refused_in_one_line(message: str) -> None:
    changes, options = MISTAKES[message]
    config = SMALL.replace(**changes)
    options = {"prompts": [[1, 2]], "max_new_tokens": 4} | options
    with pytest.raises((ConfigError, DataError)) as error:
        stream(None, config, HYPER, options.pop("prompts"), jax.random.key(0), **options)  # pyright: ignore
    assert message in str(error.value) and "\n" not in str(error.value)


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
