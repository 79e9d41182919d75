"""Rotary positions: hand values in both layouts, what a rotation keeps, and integer positions."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from transformer_jax import rope

LAYOUTS = ("half", "interleaved")
C, S = np.cos(1.0), np.sin(1.0)
c, s = np.cos(0.01), np.sin(0.01)


@functools.partial(jax.jit, static_argnames=("layout", "rotated"))
def rotated_by(x_BTNH: jax.Array, positions_BT: jax.Array, layout: str, rotated: int, base: float) -> jax.Array:
    return rope.rotate(x_BTNH, rope.rotation(positions_BT, rotated, base), layout)


def turn(x: np.ndarray, positions: object, layout: str, rotated: int = 0, base: float = 10000.0) -> np.ndarray:
    """x [B, T, N, H], or one head [H] at one position."""
    x, positions = np.asarray(x), np.asarray(positions, np.int32)
    whole = x.reshape((1,) * (4 - x.ndim) + x.shape)
    out = rotated_by(
        whole, positions.reshape((1,) * (2 - positions.ndim) + positions.shape), layout, rotated or x.shape[-1], base
    )
    return np.asarray(out).reshape(x.shape)


def normals(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        # x = [1, 2, 3, 4], position 1, angles 1 and 0.01. Pairs (1,3),(2,4) and (1,2),(3,4).
        ("half", [C - 3 * S, 2 * c - 4 * s, S + 3 * C, 2 * s + 4 * c]),
        ("interleaved", [C - 2 * S, S + 2 * C, 3 * c - 4 * s, 3 * s + 4 * c]),
        # The same, in digits: a transcription of the formula cannot err in the same way twice.
        ("half", [-1.984111, 1.959901, 2.462378, 4.019799]),
        ("interleaved", [-1.142640, 1.922076, 2.959851, 4.029799]),
    ],
)
def test_c3_hand_values(layout: str, want: list[float]) -> None:
    np.testing.assert_allclose(turn([1.0, 2.0, 3.0, 4.0], 1, layout), want, atol=2e-6)


def test_c2_positions_256_and_257_differ() -> None:
    angles = rope.rotation(jnp.array([[256, 257]]), 6, 10000.0)
    assert angles.cos.dtype == angles.sin.dtype == jnp.float32
    np.testing.assert_allclose(angles.cos[0, :, 0], np.cos([256, 257]), atol=1e-5)
    np.testing.assert_allclose(angles.sin[0, :, 0], np.sin([256, 257]), atol=1e-5)
    # 257 rounds to 256 in bfloat16: the two rotations of a bfloat16 head must still differ.
    y = rope.rotate(jnp.ones((1, 2, 1, 6), jnp.bfloat16), angles, "half")
    assert y.dtype == jnp.bfloat16
    assert np.max(np.abs(np.diff(np.asarray(y, np.float32), axis=1))) > 0.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_c2_float_positions_are_refused(dtype: jnp.dtype) -> None:
    with pytest.raises(TypeError, match=f"positions are {jnp.dtype(dtype).name}"):
        rope.rotation(jnp.zeros((1, 3), dtype), 4, 10000.0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotated", [2, 6, 10])
def test_equals_complex_rotation(layout: str, rotated: int) -> None:
    positions = np.array([[0, 1, 13, 199, 211], [3, 2, 2, 0, 997]])
    x = normals(0, 2, 5, 3, 10)
    got = turn(x, positions, layout, rotated, base=500.0)
    for b, t, n in np.ndindex(2, 5, 3):
        want = reference.rope(x[b, t, n].astype(np.float64), int(positions[b, t]), rotated, 500.0, layout)
        np.testing.assert_allclose(got[b, t, n], want, atol=1e-6 * (1 + positions[b, t]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a09_scores_depend_on_the_distance_alone(layout: str) -> None:
    q, k = normals(0, 2, 14)

    def score(m: int, n: int) -> float:
        return float(turn(q, m, layout) @ turn(k, n, layout))

    for m, n in [(2, 5), (5, 2), (0, 11)]:
        assert score(m, n) == pytest.approx(score(m + 100, n + 100), abs=2e-4)
    assert abs(score(2, 5) - score(5, 2)) > 0.1  # the sign of the distance counts
    assert abs(score(2, 5) - score(2, 6)) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a05_norms_are_kept(layout: str) -> None:
    x = normals(0, 2, 7, 3, 10)
    y = turn(x, np.arange(7) * 101, layout)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
    assert np.max(np.abs(y - x)) > 1.0
    np.testing.assert_array_equal(y[:, 0], x[:, 0])  # position 0 turns nothing


def test_c3_layouts_are_one_permutation_apart() -> None:
    x, positions = normals(0, 2, 5, 3, 10), np.arange(200, 205)
    p = np.asarray(rope.half_from_interleaved(10))
    assert sorted(p.tolist()) == list(range(10))
    want = turn(x, positions, "interleaved")
    np.testing.assert_allclose(turn(x[..., p], positions, "half"), want[..., p], atol=1e-6)
    # Mixing them is not harmless.
    assert np.max(np.abs(turn(x, positions, "half") - want)) > 0.5


def test_c3_c4_permuted_projections_give_the_same_scores_at_position_200() -> None:
    x, (wq, wk) = normals(0, 1, 7, 5), normals(1, 2, 5, 3, 6)
    p = np.asarray(rope.half_from_interleaved(6))

    def scores(wq: np.ndarray, wk: np.ndarray, layout: str) -> np.ndarray:
        q, k = (turn(np.einsum("btd,dnh->btnh", x, w), np.arange(200, 207), layout) for w in (wq, wk))
        return np.einsum("btnh,bsnh->bnts", q, k)

    want = scores(wq, wk, "interleaved")
    np.testing.assert_allclose(scores(wq[..., p], wk[..., p], "half"), want, atol=1e-4)
    assert np.max(np.abs(scores(wq, wk, "half") - want)) > 1.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_rotation_leaves_the_rest(layout: str) -> None:
    x, positions = normals(0, 2, 5, 3, 7), np.arange(5) + 1
    y = turn(x, positions, layout, rotated=4)
    assert y.shape == x.shape
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(y[..., :4], turn(x[..., :4], positions, layout))
    assert np.min(np.max(np.abs(y - x)[..., :4], axis=(0, 1, 2))) > 0.001  # all of the first four moved
    nothing = rope.rotation(jnp.arange(5)[None], 0, 10000.0)
    np.testing.assert_array_equal(rope.rotate(jnp.asarray(x), nothing, layout), x)


def test_frequencies() -> None:
    want = [10000.0 ** (-2 * i / 64) for i in range(32)]
    np.testing.assert_allclose(rope.frequencies(64, 10000.0), want, rtol=2e-6)
    np.testing.assert_allclose(rope.frequencies(4, 10000.0), [1.0, 0.01], rtol=1e-6)


def test_base_is_a_traced_number() -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def cos(base: jax.Array) -> jax.Array:
        return rope.rotation(jnp.array([[3]]), 4, base).cos[0, 0]

    for base in (100.0, 10000.0, 500000.0):
        np.testing.assert_allclose(cos(jnp.float32(base)), np.cos([3.0, 3 * base**-0.5]), rtol=1e-5)
    # d cos(3 base^-1/2) / d base = sin(3 base^-1/2) * 3/2 base^-3/2
    slope = jax.jit(jax.grad(lambda base: rope.rotation(jnp.array([[3]]), 4, base).cos[0, 0, 1]))(100.0)
    assert float(slope) == pytest.approx(np.sin(0.3) * 1.5 * 100**-1.5, rel=1e-4)
