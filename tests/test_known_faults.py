"""Faults that others were bitten by, in every way that attention is computed: masks, NaN, windows, tails.

Numbers are those of the list of faults. What dense attention does under them is in test_masks,
test_attention and test_encoder_decoder; here the others are held to the same, and to dense.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.quick import jit
from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.batch import Batch
from transformer_jax.config import MASKS, Config, Hyper
from transformer_jax.encoder_decoder import encode, forward, init_transformer
from transformer_jax.errors import ConfigError
from transformer_jax.masks import Mask
from transformer_jax.optim import global_norm
from transformer_jax.scores import Scoring
from transformer_jax.train import gradients

B, N, K, H = 2, 4, 2, 3
SOFTMAX = ("blockwise", "banded")
OTHERS = (*SOFTMAX, "linear")
DTYPES = ("float32", "bfloat16", "float16")


def inputs(T: int, S: int, *, B: int = B, width: int = H, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, width)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def by(implementation: str, q: Any, k: Any, v: Any, mask: Mask, *, block: int = 3, **rest: Any) -> Any:
    """attend() in an implementation; banded attention gets a window that hides nothing where the mask has none."""
    T = q.shape[1]
    if implementation == "banded" and not any(isinstance(part, masks.Window) for part in mask.parts):
        mask = mask & Mask((masks.Window(T),))
    return attend(q, k, v, mask, implementation=implementation, block=block, **rest)


run = jit(by, static_argnums=0, static_argnames=("block", "band"))


@functools.partial(jit, static_argnums=0)
def value_and_slopes(implementation: str, q: Any, k: Any, v: Any, mask: Mask, counts: Any, bias: Any = None) -> Any:
    """Output, and gradients by q, k, v (and the bias) of the squares of the rows that count."""

    def loss(q: Any, k: Any, v: Any, bias: Any) -> tuple[jax.Array, jax.Array]:
        out = by(implementation, q, k, v, mask, bias=bias)
        return jnp.sum(counts[None, :, None, None] * out.astype(jnp.float32) ** 2), out

    which = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    slopes, out = jax.grad(loss, argnums=which, has_aux=True)(q, k, v, bias)
    return out, slopes


def f32(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def linear_loop(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """phi(q).phi(k) over their sum, phi(x) = elu(x) + 1, in float64."""

    def phi(x: np.ndarray) -> np.ndarray:
        return np.array([u + 1 if u > 0 else math.exp(u) for u in x])

    out, group = np.zeros((*q.shape[:3], v.shape[3])), q.shape[2] // k.shape[2]
    for b, i, n in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(allowed[b, n, i])
        weights = [phi(q[b, i, n] / math.sqrt(q.shape[3])) @ phi(k[b, j, n // group]) for j in seen]
        for j, weight in zip(seen, weights, strict=True):
            out[b, i, n] += weight / sum(weights) * v[b, j, n // group]
    return out


def wanted(implementation: str, q: Any, k: Any, v: Any, allowed: np.ndarray) -> np.ndarray:
    """The loop of the implementation's function, in float64."""
    q, k, v = map(np.float64, (q, k, v))
    allowed = np.broadcast_to(allowed, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    return linear_loop(q, k, v, allowed) if implementation == "linear" else reference.attend(q, k, v, allowed)[0]


# --- rows without a key ------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", SOFTMAX)
def test_a1_a2_rows_without_a_key_are_0_with_gradient_0(implementation: str, dtype: str) -> None:
    q, k, v = (jnp.asarray(a, dtype) for a in inputs(8, 8))
    bias = jnp.asarray(np.random.default_rng(4).standard_normal((1, N, 8, 8)), jnp.float32)
    allowed = np.zeros((8, 8), bool)
    allowed[:4, :4] = np.tri(4, dtype=bool)
    allowed[2] = False
    mask, rest = masks.dense(allowed), np.array([0, 1, 3])
    small = masks.dense(allowed[rest][:, :4])
    # The same without the empty rows and the keys that nobody sees, dense.
    alone = value_and_slopes("dense", q[:, rest], k[:, :4], v[:, :4], small, np.ones(3), bias[:, :, rest, :4])
    want, slopes = f32(alone)
    for counts in (np.ones(8), np.isin(np.arange(8), rest).astype(np.float64)):  # whether or not the loss counts them
        out, got = value_and_slopes(implementation, q, k, v, mask, counts, bias)
        assert out.dtype == jnp.dtype(dtype)
        out, got = f32((out, got))
        empty = np.array([2, 4, 5, 6, 7])
        np.testing.assert_array_equal(out[:, empty], 0)
        np.testing.assert_array_equal(got[0][:, empty], 0)
        np.testing.assert_array_equal(got[3][:, :, empty], 0)
        np.testing.assert_array_equal(got[1][:, 4:], 0)
        np.testing.assert_array_equal(got[2][:, 4:], 0)
        np.testing.assert_allclose(out[:, rest], want, atol=1e-6 if dtype == "float32" else 2e-2)
        trimmed = (got[0][:, rest], got[1][:, :4], got[2][:, :4], got[3][:, :, rest, :4])
        for a, b in zip(trimmed, slopes, strict=True):
            assert np.max(np.abs(b)) > 0.05
            np.testing.assert_allclose(a, b, atol=1e-5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a1_a2_linear_rows_without_a_key(dtype: str) -> None:
    q, k, v = (jnp.asarray(a, dtype) for a in inputs(7, 7))
    out, slopes = f32(value_and_slopes("linear", q, k, v, masks.padding(jnp.array([0, 4])), np.ones(7)))
    for x in (out, *slopes):
        np.testing.assert_array_equal(x[0], 0)
        assert np.all(np.isfinite(x)) and np.max(np.abs(x[1])) > 0.05
    want = wanted("linear", *f32((q, k, v)), np.arange(7)[None, None, None] < np.array([0, 4])[:, None, None, None])
    np.testing.assert_allclose(out, want, atol=1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("implementation", SOFTMAX)
def test_a5_fill_constants_are_none(implementation: str) -> None:
    q, k, v = inputs(7, 7)
    mask = masks.causal() & masks.padding(jnp.array([7, 3]))
    want = wanted(implementation, q, k, v, np.asarray(mask.dense(7, 7)))
    got = run(implementation, *(jnp.asarray(a, jnp.float16) for a in (q, k, v)), mask)
    np.testing.assert_allclose(f32(got), want, atol=2e-3)
    # One allowed score of about -20000 beside masked ones of 0: it has all the weight.
    for dtype in DTYPES:
        low, k2 = jnp.full((1, 2, 1, 1), -100.0, dtype), jnp.array([200.0, 0.0], dtype).reshape(1, 2, 1, 1)
        v2 = jnp.array([3.0, 5.0], dtype).reshape(1, 2, 1, 1)
        out = run(implementation, low, k2, v2, masks.dense(np.array([[True, False]] * 2)))
        assert f32(out).ravel().tolist() == [3.0, 3.0]
    # A score of 90000 is past float16's end, and still no infinity.
    high, k3 = jnp.full((1, 2, 1, 1), 300.0, "float16"), jnp.array([300.0, 299.0], "float16").reshape(1, 2, 1, 1)
    out = run(implementation, high, k3, v2, masks.causal())
    assert f32(out).ravel().tolist() == [3.0, 3.0]


# --- causality, padding, kinds of masks ----------------------------------------------


@pytest.mark.parametrize("implementation", OTHERS)
def test_a6_later_keys_change_no_bit(implementation: str) -> None:
    T = 11
    q, k, v = (np.repeat(x, T + 1, axis=0) for x in inputs(T, T, B=1))
    for t in range(T):  # row t + 1 has key and value t changed
        k[t + 1, t] += 1.0
        v[t + 1, t] -= 1.0
    out = np.asarray(run(implementation, q, k, v, masks.causal(), block=4))
    changed = np.any(out[1:] != out[:1], axis=(2, 3)).T  # [query, key]
    np.testing.assert_array_equal(changed, np.tri(T, dtype=bool))


@pytest.mark.parametrize("implementation", OTHERS)
def test_a7_rows_of_a_padded_batch_equal_their_own_run(implementation: str) -> None:
    lengths = (7, 4, 2)
    q, k, v = inputs(7, 7, B=3)
    out = np.asarray(run(implementation, q, k, v, masks.causal() & masks.padding(jnp.array(lengths))))
    for row, n in enumerate(lengths):
        alone = (x[row : row + 1, :n] for x in (q, k, v))
        want = wanted(implementation, *alone, np.tri(n, dtype=bool)[None, None])
        np.testing.assert_allclose(out[row, :n], want[0], atol=2e-6)


def every_mask(T: int) -> dict[str, Mask]:
    rng = np.random.default_rng(1)
    named = {kind: masks.from_config(Config(mask=kind, block_size=2), Hyper(window=3, prefix=4)) for kind in MASKS}
    padded, packed = masks.padding(jnp.array([T, 3])), masks.segments(jnp.asarray(rng.integers(1, 3, (B, T))))
    return {
        **named,
        "padding": padded,
        "causal & padding": masks.causal() & padded,
        "packed": masks.causal() & packed & padded,
        "dense": masks.dense(rng.random((B, N, T, T)) < 0.6),
    }


@pytest.mark.parametrize("implementation", OTHERS)
def test_a8_every_mask_is_obeyed_or_refused_by_name(implementation: str) -> None:
    T = 7
    q, k, v = inputs(T, T)
    made = every_mask(T)
    able = ("none", "causal", "padding", "causal & padding") if implementation == "linear" else tuple(made)
    obeyed = jit(lambda q: [by(implementation, q, k, v, made[name]) for name in able])  # one program for all of them
    for name, out in zip(able, obeyed(q), strict=True):
        allowed = np.asarray(made[name].dense(T, T))
        np.testing.assert_allclose(out, wanted(implementation, q, k, v, allowed), atol=1e-5, err_msg=name)
    for name in set(made) - set(able):
        with pytest.raises(ConfigError, match=r"linear attention cannot do a (Inverted|Window|PrefixLM|Bl|Seg|Dense)"):
            by(implementation, q, k, v, made[name])
    with pytest.raises(ConfigError, match="banded attention needs a window"):
        attend(q, k, v, masks.causal(), implementation="banded")


@pytest.mark.parametrize("implementation", OTHERS)
def test_a9_nan_in_padding_stays_there(implementation: str) -> None:
    q, k, v = inputs(8, 8)
    lengths = np.array([3, 5])
    hidden = np.arange(8)[None] >= lengths[:, None]
    made = [masks.padding(jnp.array(lengths)) & masks.causal()]
    if implementation != "linear":
        made += [masks.segments(jnp.ones((2, 8), jnp.int32), jnp.asarray(~hidden, jnp.int32)) & masks.causal()]
    for mask in made:
        clean = f32(value_and_slopes(implementation, q, k, v, mask, np.ones(8)))
        assert np.max(np.abs(clean[1][0])) > 0.1
        np.testing.assert_array_equal(clean[1][2][hidden], 0)
        for bad in (np.nan, np.inf, 1e30):
            dirty = (np.where(hidden[:, :, None, None], bad, x).astype(np.float32) for x in (k, v))
            got = f32(value_and_slopes(implementation, q, *dirty, mask, np.ones(8)))
            jax.tree.map(np.testing.assert_array_equal, got, clean)


@pytest.mark.parametrize("implementation", SOFTMAX)
def test_a9_shapes_of_a_padding_mask_agree(implementation: str) -> None:
    q, k, v = inputs(8, 8)
    lengths = jnp.array([3, 5])
    seen = (np.arange(8)[None] < lengths[:, None])[:, None, None]  # [B, 1, 1, S]
    want = run(implementation, q, k, v, masks.padding(lengths))
    np.testing.assert_allclose(want, wanted(implementation, q, k, v, np.asarray(seen)), atol=1e-5)
    for heads, rows in ((1, 1), (1, 8), (N, 8)):
        mask = masks.dense(jnp.tile(seen, (1, heads, rows, 1)))
        np.testing.assert_allclose(run(implementation, q, k, v, mask), want, atol=1e-6)


# --- windows, tails, the factor -----------------------------------------------------


@pytest.mark.parametrize("implementation", ["dense", *SOFTMAX])
def test_b13_a_window_of_4_sees_keys_7_to_10(implementation: str) -> None:
    T = 17
    q, k, _ = inputs(T, T)
    names = np.tile(np.eye(T, dtype=np.float32)[None, :, None], (B, 1, K, 1))  # value j is the unit vector j
    for block in (3, 16) if implementation == "blockwise" else (1, 3, 4, 16):
        # The width is traced here; banded attention is told what it may become.
        out = np.asarray(run(implementation, q, k, names, masks.window(4), block=block, band=6 if block == 3 else 4))
        assert out.shape == (B, T, N, T)
        for i in range(T):
            nearest = np.isin(np.arange(T), range(i - 3, i + 1))
            np.testing.assert_array_equal(out[:, i] > 0, np.broadcast_to(nearest, (B, N, T)))
        assert np.flatnonzero(out[0, 10, 0]).tolist() == [7, 8, 9, 10]
    both_ways = run(implementation, q, k, names, Mask((masks.Window(4),)), block=3, band=4)
    assert np.flatnonzero(both_ways[1, 10, 2]).tolist() == list(range(7, 14))


@pytest.mark.parametrize(("T", "block"), [(1, 64), (127, 64), (128, 128), (129, 128), (192, 64)])
def test_k7_lengths_that_are_no_multiple_of_the_block(T: int, block: int) -> None:
    q, k, v = inputs(T, T, B=1)
    # Both ways: a causal mask would hide the slots past the end by itself.
    full, near = masks.full(), Mask((masks.Window(min(33, T)),))

    def linear(q: Any, k: Any, v: Any) -> jax.Array:
        """Linear attention with all its weights [T, T] at once."""
        phi = [jax.nn.elu(x) + 1 for x in (q * H**-0.5, jnp.repeat(k, N // K, axis=2))]
        weights = jnp.einsum("btnh,bsnh->bnts", *phi) * jnp.tri(T)[None, None]
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, N // K, axis=2))

    def attending(implementation: str, mask: Mask) -> Any:
        return lambda *qkv: by(implementation, *qkv, mask, block=block)

    pairs = [(attending("blockwise", full), attending("dense", full))]
    # Compiling is what takes time here: the other two get a lone query, a ragged end, and whole blocks.
    if T in (1, 129, 192):
        pairs += [(attending("banded", near), attending("dense", near))]
    if T in (1, 127, 192):
        pairs += [(attending("linear", masks.causal()), linear)]

    @jit
    def all_of_them(*qkv: Any) -> Any:
        def of(f: Any) -> Any:
            def loss(*qkv: Any) -> Any:
                out = f(*qkv)
                return jnp.sum(jnp.sin(out)), out

            return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*qkv)

        return [(of(f), of(same)) for f, same in pairs]

    for got, want in all_of_them(q, k, v):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(want))


@pytest.mark.parametrize("implementation", ["dense", *SOFTMAX])
def test_n6_the_score_of_ones_is_over_the_root_of_the_head_width(implementation: str) -> None:
    # d_model 64, four heads of 16: a key of ones scores 16, 4 or 1 against a key of zeros.
    q, k = jnp.ones((1, 2, 4, 16)), jnp.ones((1, 2, 4, 16)).at[:, 1].set(0)
    v = jnp.zeros((1, 2, 4, 1)).at[:, 0].set(1)
    for exponent, score in ((0.0, 16.0), (0.5, 4.0), (1.0, 1.0)):
        got = run(implementation, q, k, v, masks.full(), scoring=Scoring(dk_exponent=exponent))
        np.testing.assert_allclose(got, 1 / (1 + math.exp(-score)), rtol=1e-6)


# --- whole models --------------------------------------------------------------------

V = 11
SMALL = Config(
    vocab_size=V, d_model=8, num_heads=N, num_kv_heads=K, d_ff=13, seq_len=7, num_layers=1, attention_block=3
)
logits_of = jit(lambda c, p, h, b: forward(p, c, h, b)[0], static_argnums=0)


def tokens(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, V - 1, shape), jnp.int32)


def made(config: Config) -> Any:
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.4, s.shape), jnp.float32), shapes)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("dense", "bfloat16"), ("dense", "float16"), ("blockwise", "bfloat16"), ("banded", "float16"),
        ("linear", "bfloat16"),
    ],
)  # fmt: skip
def test_a4_half_precision_loss_and_norm_are_finite_and_a_step_helps(implementation: str, dtype: str) -> None:
    ids = tokens(4, 7)
    batch = Batch(ids, ids, jnp.ones((4, 7)), lengths_B=jnp.array([5, 3, 1, 0]))
    changes: dict[str, Any] = {"mask": "window", "band": 3} if implementation == "banded" else {}
    changes |= {"score_dtype": dtype} if implementation in ("dense", "banded") else {}
    config = SMALL.replace(attention_implementation=implementation, compute_dtype=dtype, **changes)
    slopes, sums = jit(gradients, static_argnums=1)(made(config), config, Hyper(window=3), batch)
    norm = float(global_norm(slopes))
    assert math.isfinite(float(sums.loss)) and math.isfinite(norm) and norm > 0.01
    stepped = jax.tree.map(lambda p, g: p - 0.1 * g / norm, made(config), slopes)
    _, after = jit(gradients, static_argnums=1)(stepped, config, Hyper(window=3), batch)
    assert float(after.loss) < float(sums.loss)


@pytest.mark.parametrize("implementation", ["blockwise", "linear"])
def test_a10_source_padding_changes_nothing(implementation: str) -> None:
    config = SMALL.replace(architecture="encoder_decoder", attention_implementation=implementation)
    p, source, pad = made(config), np.asarray(tokens(2, 5, seed=1)).copy(), V - 1
    lengths = jnp.array([5, 3])
    source[1, 3:] = pad
    absurd = p.embedding.embed_VD.at[pad].add(100.0)
    wants = []
    for pads in (0, 3, 17) if implementation == "blockwise" else (0, 17):
        padded = jnp.asarray(np.pad(source, ((0, 0), (0, pads)), constant_values=pad))
        batch = Batch(tokens(2, 7), tokens(2, 7), jnp.ones((2, 7)), source_BS=padded, source_lengths_B=lengths)
        wants.append(logits_of(config, p, Hyper(), batch))
        np.testing.assert_allclose(wants[-1], wants[0], atol=1e-5)
        moved = p.replace(embedding=p.embedding.replace(embed_VD=absurd))
        # The pad's own logit reads the row that was moved.
        got = logits_of(config, moved, Hyper(), batch)
        np.testing.assert_array_equal(got[..., :pad], wants[-1][..., :pad])


def test_b9_every_way_in_refuses_a_row_past_the_table() -> None:
    config = SMALL.replace(positions="learned", max_positions=16, architecture="encoder_decoder")
    p = jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))

    def batch(T: int, S: int) -> Batch:
        return Batch(tokens(2, T), tokens(2, T), jnp.ones((2, T)), source_BS=tokens(2, S))

    for use in (
        lambda p, T, S: forward(p, config, Hyper(), batch(T, S))[0],
        lambda p, T, S: gradients(p, config, Hyper(), batch(T, S))[0],
        lambda p, T, S: encode(p, config, Hyper(), tokens(2, max(T, S)))[0],
    ):
        jax.eval_shape(functools.partial(use, T=16, S=16), p)
        for T, S in ((17, 5), (5, 17)):
            with pytest.raises(ConfigError, match=r"17\b.*\b16\b"):
                jax.eval_shape(functools.partial(use, T=T, S=S), p)
