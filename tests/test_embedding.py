"""Embedding and output layer: gather is a one-hot product, scale, tie, positions, and ids out of range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from transformer_jax.config import Config, Hyper
from transformer_jax.embedding import Embedding, embed, init_embedding, of_source, unembed
from transformer_jax.errors import ConfigError

V, D = 13, 6
TOKENS = jnp.array([[0, 12, 5, 5], [7, 1, 3, 12]])
POSITIONS = jnp.arange(4)[None]


def config(**changes: object) -> Config:
    return Config(**{"vocab_size": V, "d_model": D, "num_heads": 1, "positions": "none", "seq_len": 4, **changes})


@pytest.fixture
def params(key: jax.Array) -> Embedding:
    return init_embedding(key, config(tie_embeddings=False, positions="learned", max_positions=11))


def test_initial_parameters(key: jax.Array) -> None:
    tied = init_embedding(key, config())
    assert tied.wout_DV is None and tied.position_PD is None
    both = init_embedding(key, config(tie_embeddings=False, positions="learned", max_positions=11))
    assert both.wout_DV.shape == (D, V) and both.position_PD.shape == (11, D)
    np.testing.assert_array_equal(tied.embed_VD, both.embed_VD)  # other parts do not reshuffle it
    more = config(tie_embeddings=False, architecture="encoder_decoder", source_vocab_size=997, output_bias=True)
    own = init_embedding(key, more)
    np.testing.assert_array_equal(own.embed_VD, both.embed_VD)
    np.testing.assert_array_equal(own.wout_DV, both.wout_DV)
    assert own.source_VD.shape == (997, D) and float(np.std(own.source_VD)) == pytest.approx(D**-0.5, rel=0.05)
    assert not np.isin(own.embed_VD, own.source_VD).any()
    assert own.bout_V.shape == (V,) and not own.bout_V.any()
    assert both.source_VD is None and both.bout_V is None
    large = init_embedding(key, config(vocab_size=997, d_model=101, tie_embeddings=False))
    assert float(np.std(large.embed_VD)) == pytest.approx(101**-0.5, rel=0.02)
    assert float(np.std(large.wout_DV)) == pytest.approx(101**-0.5, rel=0.02)
    assert abs(np.corrcoef(np.ravel(large.embed_VD), np.ravel(large.wout_DV.T))[0, 1]) < 0.02


def test_g01_gather_is_a_one_hot_product(params: Embedding) -> None:
    bare = Embedding(params.embed_VD, None, None)
    # x_i = W^T one_hot: a column, where the article writes W one_hot.
    want = jnp.einsum("btv,vd->btd", jax.nn.one_hot(TOKENS, V), params.embed_VD)
    np.testing.assert_array_equal(embed(bare, TOKENS, POSITIONS, config(scale_embeddings=False)), want)


def test_scale_is_the_root_of_the_width(params: Embedding) -> None:
    bare = Embedding(params.embed_VD, None, None)
    x = embed(bare, TOKENS, POSITIONS, config())
    np.testing.assert_allclose(x, np.sqrt(D) * np.asarray(params.embed_VD)[np.asarray(TOKENS)], rtol=1e-6)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none", "rope"])
@pytest.mark.parametrize("scale", [True, False])
def test_equals_the_loop(params: Embedding, positions: str, scale: bool) -> None:
    c = config(positions=positions, scale_embeddings=scale, max_positions=11)
    p = params if positions == "learned" else Embedding(params.embed_VD, None, None)
    want = reference.embed(reference.to_float64(p), np.asarray(TOKENS), c)
    np.testing.assert_allclose(embed(p, TOKENS, POSITIONS, c), want, atol=1e-5)


def test_positions_are_those_given(params: Embedding) -> None:
    for c in (config(positions="sinusoidal"), config(positions="learned", max_positions=11)):
        p = params if c.positions == "learned" else Embedding(params.embed_VD, None, None)
        ids = jnp.array([[0, 0, 0, 1], [4, 5, 6, 7]])
        got = embed(p, jnp.zeros((2, 4), jnp.int32), ids, c)
        np.testing.assert_array_equal(got[0, 0], got[0, 2])
        straight = embed(p, jnp.zeros((1, 8), jnp.int32), jnp.arange(8)[None], c)
        np.testing.assert_allclose(got[1], straight[0, 4:], atol=1e-6)
        assert np.max(np.abs(straight[0, 4] - straight[0, 0])) > 0.1


def test_tied_output_is_the_transpose(params: Embedding) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, D)), jnp.float32)
    tied = Embedding(params.embed_VD, None, None)
    np.testing.assert_allclose(
        unembed(tied, x, Config(), Hyper()),
        np.asarray(x) @ np.asarray(params.embed_VD).T,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        unembed(params, x, Config(), Hyper()),
        np.asarray(x) @ np.asarray(params.wout_DV),
        atol=1e-5,
    )
    assert np.max(np.abs(unembed(params, x, Config(), Hyper()) - unembed(tied, x, Config(), Hyper()))) > 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_the_bias_is_added_after_the_factor_and_before_the_cap(params: Embedding, tied: bool) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, D)), jnp.float32)
    bare = Embedding(params.embed_VD, None, None if tied else params.wout_DV)
    bias = jnp.arange(V, dtype=jnp.float32)
    c, hyper = config(scale_logits=True, terms=("final_softcap",)), Hyper(final_softcap=3.0)
    want = np.asarray(unembed(bare, x, config(scale_logits=True), Hyper())) + np.arange(V)
    got = unembed(bare.replace(bout_V=bias), x, c, hyper)
    np.testing.assert_allclose(got, 3 * np.tanh(want / 3), atol=1e-5)


def test_the_encoder_reads_its_own_table_where_it_has_one(params: Embedding) -> None:
    own = params.replace(source_VD=params.embed_VD[::-1])
    c = config(positions="learned", max_positions=11)
    np.testing.assert_array_equal(
        embed(of_source(own), TOKENS, POSITIONS, c), embed(params, V - 1 - TOKENS, POSITIONS, c)
    )
    np.testing.assert_array_equal(embed(of_source(params), TOKENS, POSITIONS, c), embed(params, TOKENS, POSITIONS, c))
    short = own.replace(source_VD=own.source_VD[:5])  # an id that the decoder has and the encoder has not
    assert np.isnan(embed(of_source(short), jnp.asarray([[7]]), POSITIONS[:, :1], c)).all()


def test_tied_weights_get_both_gradients(params: Embedding) -> None:
    c, tied = config(), Embedding(params.embed_VD, None, None)
    tokens = jnp.array([[2, 3]])

    def total(p: Embedding) -> jax.Array:
        return jnp.sum(unembed(p, embed(p, tokens, jnp.arange(2)[None], c), c, Hyper()) ** 2)

    slope = np.asarray(jax.jit(jax.grad(total))(tied).embed_VD)
    assert np.all(np.abs(slope).max(axis=1) > 0)  # every row is an output; rows 2 and 3 are inputs, too
    untied = jax.jit(jax.grad(total))(Embedding(params.embed_VD, None, params.embed_VD.T))
    np.testing.assert_array_equal(np.flatnonzero(np.abs(untied.embed_VD).max(axis=1)), [2, 3])
    np.testing.assert_allclose(slope, untied.embed_VD + untied.wout_DV.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("token", [V, V + 7, -1, -V])
def test_f17_an_id_outside_the_vocabulary_is_no_other_token(params: Embedding, token: int) -> None:
    bare = Embedding(params.embed_VD, None, None)
    x = jax.jit(embed, static_argnums=3)(bare, jnp.array([[3, token]]), jnp.arange(2)[None], config())
    assert np.all(np.isfinite(x[0, 0])) and np.all(np.isnan(x[0, 1]))


def test_b9_past_the_table(params: Embedding) -> None:
    c = config(positions="learned", max_positions=11)
    with pytest.raises(ConfigError, match=r"\b13\b.*\b11\b"):
        embed(params, jnp.zeros((1, 13), jnp.int32), jnp.arange(13)[None], c)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_d4_types(params: Embedding, dtype: str, positions: str) -> None:
    c = config(compute_dtype=dtype, positions=positions, max_positions=11)
    p = params if positions == "learned" else Embedding(params.embed_VD, None, params.wout_DV)
    x = jax.eval_shape(lambda t: embed(p, t, POSITIONS, c), TOKENS)
    assert x.dtype == jnp.dtype(dtype)
    for q in (p, Embedding(p.embed_VD, None, None)):
        assert jax.eval_shape(lambda y, q=q: unembed(q, y, Config(), Hyper()), x).dtype == jnp.float32


def test_g12_bfloat16_does_not_alias_positions(params: Embedding) -> None:
    # 257 is no bfloat16: the sum is rounded, the position is not.
    c = config(positions="sinusoidal", compute_dtype="bfloat16")
    bare = Embedding(jnp.zeros((V, D)), None, None)
    x = np.asarray(embed(bare, jnp.zeros((1, 2), jnp.int32), jnp.array([[256, 257]]), c), np.float32)[0]
    for row, position in zip(x, (256, 257), strict=True):
        np.testing.assert_allclose(row, reference.sinusoid(position, D), atol=4e-3)
