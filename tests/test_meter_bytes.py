"""Live bytes of a program, by hand and by growth: dense attention is quadratic, chunks are linear."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

from tests.test_meter import SHAPE, core, f32, products, repeat
from transformer_jax.errors import ConfigError
from transformer_jax.meter import measure, slope


@pytest.mark.parametrize(("dtype", "width"), [(jnp.float32, 4), (jnp.bfloat16, 2), (jnp.float16, 2), (jnp.int8, 1)])
def test_bytes_of_a_sum_and_of_a_chain(dtype: Any, width: int) -> None:
    n = 1009
    x = SHAPE((n,), dtype)
    cost = measure(lambda a, b, unused: a + b, x, x, x)
    assert (cost.argument_bytes, cost.output_bytes, cost.peak_bytes) == (3 * n * width, n * width, 4 * n * width)
    # Whatever its length, a chain holds what it reads and what it writes.
    for length in (2, 7):
        chain = measure(lambda a, n=length: functools.reduce(lambda v, _: -v, range(n), a), x)
        assert (chain.working_bytes, chain.argument_bytes) == (2 * n * width, n * width)
    kept = measure(lambda a: functools.reduce(lambda v, _: (*v, -v[-1]), range(7), (a,)), x)
    assert kept.working_bytes == 7 * n * width


def test_bytes_of_two_big_arrays_from_small_ones() -> None:
    n = 101
    cost = measure(lambda u, v: (lax.dot(u, v) + jnp.sin(lax.dot(u, v))).sum(), f32(n, 1), f32(1, n))
    # At the sum: a, sin(b), and their sum; before it, at the sine: a, b, and sin(b).
    assert cost.peak_bytes == 4 * (2 * n + 3 * n * n)
    assert cost.output_bytes == 4


def test_bytes_of_closed_over_constants_keys_and_integer_tangents() -> None:
    n = 53
    table = np.ones((n, n), np.float32)
    assert measure(lambda x: x @ table, f32(1, n)).argument_bytes == 4 * (n * n + n)
    assert measure(lambda k: jax.random.bits(k, (n,)), jax.random.key(0)).working_bytes == 4 * n
    tangent = jax.grad(lambda x, i: (x * i).sum(), argnums=(0, 1), allow_int=True)
    assert measure(tangent, f32(n), SHAPE((n,), jnp.int32)).output_bytes == 4 * n


def test_bytes_of_a_scan() -> None:
    n, L = 31, 17
    row, rows = 4 * n, 4 * n * L

    def f(c: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.scan(lambda c, x: (c + x, c * x), c, xs)

    # Arguments; the stacked outputs in full; in a step: the carry, the slice, the sum and the product.
    assert measure(f, f32(n), f32(L, n)).peak_bytes == (row + rows) + rows + 4 * row
    # A first carry that nobody reads again becomes the loop's; one that is read again stays beside it.
    assert measure(lambda a, xs: f(-a, xs), f32(n), f32(L, n)).working_bytes == rows + 4 * row
    assert measure(lambda a, xs: (b := -a, *f(b, xs)), f32(n), f32(L, n)).working_bytes == rows + 5 * row
    # What it slices is there in full to the end.
    assert measure(lambda a, xs: f(a, -xs), f32(n), f32(L, n)).working_bytes == 2 * rows + 4 * row


def test_bytes_of_inner_programs_are_those_of_the_same_lines_without_them() -> None:
    n = 31

    def f(x: jax.Array) -> jax.Array:
        return -jnp.sin(jnp.cos(x))

    wraps: list[Callable[..., Any]] = [jax.jit, jax.checkpoint, lambda g: repeat(g, 3)]
    wraps.append(lambda g: lambda x: lax.cond(x[0] > 0, g, g, x))
    for wrap in wraps:
        inner = wrap(f)
        found = measure(lambda x, g=inner: -g(-x), f32(n)).working_bytes
        assert 0 <= found - 2 * 4 * n <= 4  # a cond has its index beside them

    def loop(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * jnp.sin(c[1])), (0, x))[1]

    # In a step: the carry, its sine, the new carry, and the counter.
    assert measure(lambda x: -loop(-x), f32(n)).working_bytes == 3 * 4 * n + 4
    # One operand given twice is one buffer.
    twice = jax.jit(lambda a, b: jnp.sin(a) * b)
    assert measure(lambda x: twice(y := -x, y), f32(n)).working_bytes == 3 * 4 * n
    wide = measure(lambda x: lax.cond(x[0] > 0, lambda a: jnp.outer(a, a)[0], f, x), f32(n))
    assert wide.peak_bytes > 4 * n * n


def test_residuals_of_a_scan_are_counted_and_a_checkpoint_saves_them() -> None:
    n, L = 101, 64

    def grad(wrap: Callable[..., Any]) -> int:
        step = wrap(lambda c: jnp.sin(jnp.sin(jnp.sin(jnp.sin(c)))))
        return measure(jax.grad(lambda x: repeat(step, L)(x).sum()), f32(n)).working_bytes

    kept, again = grad(lambda f: f), grad(jax.checkpoint)
    # Four cosines of each step, or the carry alone; the rest is a handful of rows.
    assert 4 * L <= kept / (4 * n) <= 4 * L + 9
    assert L <= again / (4 * n) <= L + 9


# --- growth ------------------------------------------------------------------------


def chunked(q: jax.Array, k: jax.Array, v: jax.Array, block: int = 16) -> jax.Array:
    """Attention of one head, [T, H]: a checkpointed map over query blocks around a scan over key blocks."""
    parts = [a.reshape(-1, block, a.shape[-1]) for a in (q, k, v)]

    @jax.checkpoint
    def rows(q: jax.Array) -> jax.Array:
        def keys(carry: tuple, kv: tuple) -> tuple[tuple, None]:
            out, total = carry
            powers = jnp.exp(q @ kv[0].T)
            return (out + powers @ kv[1], total + powers.sum(1)), None

        (out, total), _ = lax.scan(keys, (jnp.zeros_like(q), jnp.zeros(block)), tuple(parts[1:]))
        return out / total[:, None]

    return lax.map(rows, parts[0]).reshape(q.shape)


def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return core(q[None, :, None], k[None, :, None], v[None, :, None])[0, :, 0]


def test_dense_attention_grows_quadratically_and_chunks_linearly() -> None:
    sizes = [512, 1024, 2048, 4096, 8192]

    def grown(f: Callable[..., Any], number: str) -> float:
        found = [getattr(measure(f, *[f32(T, 8)] * 3), number) for T in sizes]
        return slope(sizes, found).value

    for f in (dense, chunked):
        backward = jax.grad(lambda *a, f=f: jnp.square(f(*a)).sum(), argnums=(0, 1, 2))
        for part in (f, backward):
            assert grown(part, "products") == pytest.approx(2, abs=1e-9)
            if f is dense:
                assert grown(part, "peak_bytes") == pytest.approx(2, abs=0.03)
            else:
                assert 0.9 < grown(part, "peak_bytes") <= 1.05
    T, H, block = 64, 8, 16
    assert products(chunked, *[f32(T, H)] * 3) == products(dense, *[f32(T, H)] * 3) == 4 * T * T * H
    # And they are the same function.
    q, k, v = (jax.random.normal(jax.random.key(i), (T, H)) for i in range(3))
    assert jnp.allclose(chunked(q, k, v, block), dense(q, k, v), atol=1e-5)


def test_slope_against_another_fit() -> None:
    sizes = [2, 3, 5, 11, 17]
    exact = slope(sizes, [0.3 * s**1.7 for s in sizes])
    assert exact.value == pytest.approx(1.7, abs=1e-12) and exact.error < 1e-12
    noisy = [s**1.2 * (1 + 0.1 * (-1) ** s) for s in (2, 3, 4, 7, 8)]
    want: Any = stats.linregress(np.log(sizes), np.log(noisy))
    assert slope(sizes, noisy) == pytest.approx((want.slope, want.stderr), rel=1e-10)
    for x, y in (([1, 2], [1, 2]), ([1, 2, 3], [1, 2]), ([1, 2, 3], [1, 0, 1]), ([2, 2, 2], [1, 2, 3])):
        with pytest.raises(ConfigError, match="slope"):
            slope(x, y)
