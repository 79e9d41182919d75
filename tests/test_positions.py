"""The sinusoidal table and its shift matrices, and the learned table and its end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from transformer_jax import positions
from transformer_jax.config import Config
from transformer_jax.errors import ConfigError


def table(P: int, D: int) -> jax.Array:
    return positions.sinusoidal(jnp.arange(P)[None], D)[0]


def test_n7_columns_are_interleaved() -> None:
    np.testing.assert_allclose(table(2, 4)[1], [0.8415, 0.5403, 0.0100, 1.0000], atol=5e-5)
    np.testing.assert_array_equal(table(2, 4)[0], [0.0, 1.0, 0.0, 1.0])


def test_n7_odd_width_is_refused() -> None:
    for make in (lambda: table(3, 7), lambda: positions.shift_matrix(1, 7)):
        with pytest.raises(ConfigError, match="even width, not 7"):
            make()
    with pytest.raises(ConfigError, match="even d_model, not 7"):
        Config(positions="sinusoidal", d_model=7, num_heads=7)


@pytest.mark.parametrize("D", [2, 10, 22])
def test_g05_equals_the_formula(D: int) -> None:
    want = np.stack([reference.sinusoid(t, D) for t in range(101)])
    np.testing.assert_allclose(table(101, D), want, atol=1e-5)
    assert table(3, D).dtype == jnp.float32


def test_positions_are_per_row() -> None:
    ids = jnp.array([[0, 0, 1], [5, 256, 257]])
    got = positions.sinusoidal(ids, 6)
    for b, t in np.ndindex(2, 3):
        np.testing.assert_allclose(got[b, t], reference.sinusoid(int(ids[b, t]), 6), atol=5e-5)


def test_g08_shift_matrices() -> None:
    D = 22
    rows = np.stack([reference.sinusoid(t, D) for t in range(500)])
    for k in (0, 1, 7, 101):
        M = positions.shift_matrix(k, D)
        assert M.dtype == np.float64
        np.testing.assert_allclose(rows[: 500 - k] @ M.T, rows[k:], atol=1e-12)
        np.testing.assert_allclose(M @ M.T, np.eye(D), atol=1e-15)
    a, b, ab = (positions.shift_matrix(k, D) for k in (3, 8, 11))
    np.testing.assert_allclose(a @ b, ab, atol=1e-14)
    np.testing.assert_allclose(positions.shift_matrix(-3, D), a.T, atol=1e-15)
    # The float32 table that the model adds obeys it too.
    np.testing.assert_allclose(table(40, D)[:29] @ jnp.float32(ab).T, table(40, D)[11:], atol=1e-5)


def test_g11_later_columns_turn_more_slowly() -> None:
    # M_1 turns pair i by 2 pi / period: with D = 512 from 6.283 to 60,611.
    M = positions.shift_matrix(1, 512)
    angles = np.array([np.arctan2(M[2 * i, 2 * i + 1], M[2 * i, 2 * i]) for i in range(256)])
    periods = 2 * np.pi / angles
    assert np.all(np.diff(periods) > 0)
    assert periods[0] == pytest.approx(6.283, abs=1e-3)
    assert periods[-1] == pytest.approx(60_611, rel=1e-4)
    # The table that the model adds has these periods: a column is back where it was.
    assert float(positions.sinusoidal(jnp.array([[30306]]), 512)[0, 0, -1]) == pytest.approx(-1.0, abs=1e-3)


def test_learned_rows(key: jax.Array) -> None:
    position_PD = positions.init_learned(key, 11, 5)
    assert position_PD.shape == (11, 5)
    ids = jnp.array([[0, 10, 3], [7, 7, 1]])
    np.testing.assert_array_equal(positions.learned(position_PD, ids), np.asarray(position_PD)[np.asarray(ids)])
    wide = positions.init_learned(key, 211, 101)
    assert float(jnp.std(wide)) == pytest.approx(101**-0.5, rel=0.02)


def test_b9_length_past_the_table_names_both() -> None:
    position_PD = jnp.zeros((16, 5))
    positions.learned(position_PD, jnp.arange(16)[None])
    with pytest.raises(ConfigError, match=r"17\b.*\b16\b"):
        positions.learned(position_PD, jnp.arange(17)[None])
    with pytest.raises(ConfigError, match=r"17\b.*\b16\b"):
        jax.jit(positions.learned)(position_PD, jnp.arange(17)[None])
    Config(positions="learned", max_positions=16, seq_len=16)
    with pytest.raises(ConfigError, match=r"17\b.*\b16\b"):
        Config(positions="learned", max_positions=16, seq_len=17)


@pytest.mark.parametrize("position", [16, 23, -1, -16])
def test_b9_a_position_past_the_table_reuses_no_row(key: jax.Array, position: int) -> None:
    rows = jax.jit(positions.learned)(positions.init_learned(key, 16, 5), jnp.array([[3, position]]))
    assert jnp.all(jnp.isfinite(rows[0, 0])) and jnp.all(jnp.isnan(rows[0, 1]))
