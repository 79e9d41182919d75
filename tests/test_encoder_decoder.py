"""Whole models: a float64 loop, PyTorch's layers, causality by gradient, padding, packing, dropout, types."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.fixtures.torch_layers import from_torch, load
from tests.quick import jit
from transformer_jax import masks
from transformer_jax.batch import Batch
from transformer_jax.config import MASKS, NORMS, PLACEMENTS, Config, Hyper
from transformer_jax.embedding import embed, unembed
from transformer_jax.encoder_decoder import (
    Transformer,
    count_parameters,
    decoder_mask,
    encode,
    forward,
    init_probe,
    init_transformer,
)
from transformer_jax.errors import ConfigError
from transformer_jax.layers import Stack, apply_stack

V, T, S = 11, 7, 5
SMALL = Config(
    vocab_size=V,
    d_model=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,  # two pairs for RoPE: with one, layouts and bases are all the same
    d_ff=13,
    seq_len=T,
    max_positions=31,
    block_size=2,
)
HYPER = Hyper(window=3, prefix=3)
logits_of = jit(lambda c, p, h, b, k=None: forward(p, c, h, b, k)[0], static_argnums=0)


def tokens(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape), jnp.int32)


def batch(B: int = 2, T: int = T, **parts: Any) -> Batch:
    ids = tokens(B, T + 1)
    return Batch(ids[:, :-1], ids[:, 1:], jnp.ones((B, T)), **parts)


@functools.cache
def parameters(config: Config) -> Transformer:
    """Fresh parameters with the norms' scales and all biases moved off 1 and 0."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))

    def draw(path: tuple, leaf: Any) -> jax.Array:
        name = path[-1].name
        rank = len(name.split("_")[-1])  # the shape letters
        scale = {1: 0.2, 2: 0.35, 3: 0.5}[rank]
        return jnp.asarray(rng.normal(1.0 if name == "scale_D" else 0.0, scale, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


# --- references --------------------------------------------------------------------

DECODERS = {
    "rope half": {},
    "rope interleaved": {"rope_layout": "interleaved", "norm": "rmsnorm", "norm_placement": "post", "ffn": "swiglu"},
    "rope partial": {
        "rope_fraction": 0.67,
        "head_dim": 6,
        "norm_placement": "sandwich",
        "ffn": "geglu",
        "mask": "prefix",
    },
    "rope partial, interleaved": {"rope_layout": "interleaved", "rope_fraction": 0.5, "head_dim": 8, "mask": "window"},
    "sinusoidal": {"positions": "sinusoidal", "norm_placement": "post", "ffn": "relu", "mask": "block_sparse"},
    "sinusoidal, untied": {"positions": "sinusoidal", "norm": "rmsnorm", "tie_embeddings": False, "ffn": "gelu_tanh"},
    "learned": {
        "positions": "learned",
        "norm": "rmsnorm",
        "norm_placement": "sandwich",
        "ffn": "silu",
        "num_kv_heads": 1,
    },
    "learned, biases": {"positions": "learned", "norm_placement": "none", "ffn": "reglu", "attention_bias": True},
    "none": {
        "positions": "none",
        "norm_placement": "pre",
        "scale_embeddings": False,
        "num_kv_heads": 4,
        "mask": "none",
    },
    "none, inverted": {"positions": "none", "norm": "rmsnorm", "norm_placement": "none", "mask": "inverted"},
    "matched": {"ffn": "swiglu", "match_ffn_parameters": True, "ffn_bias": False, "norm_epsilon": 0.1, "num_layers": 3},
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_equals_the_loop(name: str) -> None:
    config = SMALL.replace(**DECODERS[name])
    p, b = parameters(config), batch(lengths_B=jnp.array([T, 4]))
    hyper = HYPER.replace(dk_exponent=0.4, attention_temperature=0.8, rope_base=100.0)
    got = logits_of(config, p, hyper, b)
    assert got.dtype == jnp.float32
    want = reference.transformer(p, config, hyper, b)
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "sinusoidal", "norm_placement": "post", "ffn": "relu", "attention_bias": True},
        {"norm": "rmsnorm", "ffn": "swiglu", "num_encoder_layers": 1, "num_layers": 3},
        {"positions": "learned", "norm_placement": "sandwich", "num_kv_heads": 1},
        {"architecture": "encoder", "norm_placement": "post", "tie_embeddings": False},
        {"source_vocab_size": V + 5, "output_bias": True, "positions": "learned", "num_layers": 1},
    ],
)
def test_encoder_decoder_equals_the_loop(changes: dict[str, Any]) -> None:
    config = SMALL.replace(**{"architecture": "encoder_decoder", **changes})
    p = parameters(config)
    source = tokens(2, S, seed=1) + config.source_vocab_size // 3  # ids that only a table of its own has
    b = batch(source_BS=source, source_lengths_B=jnp.array([2, S]), lengths_B=jnp.array([T, 4]))
    want = reference.transformer(p, config, HYPER, b)
    np.testing.assert_allclose(logits_of(config, p, HYPER, b), want, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize(("name", "placement", "ffn"), [("post_relu", "post", "relu"), ("pre_gelu", "pre", "gelu")])
def test_equals_pytorch(name: str, placement: str, ffn: str) -> None:
    z = load(f"torch_layer_{name}")
    config = Config(
        d_model=24, num_heads=3, d_ff=40, norm_placement=placement, ffn=ffn, attention_bias=True, positions="none"
    )
    padded = masks.padding(jnp.asarray(z["lengths"], jnp.int32))
    run = functools.partial(apply_stack, config=config, hyper=Hyper(), positions_BT=jnp.zeros((1, 1), jnp.int32))

    def close(got: Any, want: np.ndarray) -> None:
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())

    x, y = z["x"].astype(np.float32), z["y"].astype(np.float32)
    encoded, _ = jit(lambda s, x: run(s, x, mask=padded))(from_torch(z, "enc", cross=False), x)
    close(encoded, z["encoder_out"])

    @jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def decode(stack: Stack, y: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, _ = run(stack, y, mask=masks.causal(), memory=memory, memory_mask=padded)
        return jnp.sum(out**2), out

    (_, out), (slope, slope_y, slope_memory) = decode(from_torch(z, "dec", cross=True), y, x)
    close(out, z["decoder_out"])
    close(slope_y, z["grad_y"])
    close(slope_memory, z["grad_memory"])
    want = from_torch(z, "grad.dec", cross=True)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * largest), slope, want)


# --- who sees whom -----------------------------------------------------------------


def reachable(allowed: np.ndarray, layers: int) -> np.ndarray:
    """[T, T]: whether a query depends on a key's input after some layers; residuals keep the diagonal."""
    step = allowed | np.eye(len(allowed), dtype=bool)
    return np.linalg.matrix_power(step.astype(np.int64), layers) > 0


@functools.partial(jit, static_argnums=0)
def influence(
    config: Config, params: Transformer, inputs: tuple[jax.Array, jax.Array], towards_V: jax.Array
) -> jax.Array:
    """max |d logits_i / d x_j| along a direction of the logits, [M, T, T], for masks [M, T, T] and x [M, T, D]."""

    def of(allowed_and_x: tuple[jax.Array, jax.Array]) -> jax.Array:
        allowed, x = allowed_and_x

        def logits(x: jax.Array) -> jax.Array:
            positions = jnp.arange(T)[None]
            y, _ = apply_stack(
                params.decoder, x[None], config, HYPER, mask=masks.dense(allowed), positions_BT=positions
            )
            return unembed(params.embedding, y, config, HYPER)[0] @ towards_V

        return jnp.max(jnp.abs(jax.jacrev(logits)(x)), axis=-1)

    return jax.lax.map(of, inputs)


@pytest.mark.parametrize("positions", [("rope",), ("sinusoidal", "learned", "none")])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", NORMS)
def test_d03_gradients_are_0_where_the_mask_forbids(norm: str, placement: str, positions: tuple[str, ...]) -> None:
    base = SMALL.replace(norm=norm, norm_placement=placement)
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 3]])
    rows = [(base.replace(mask=kind), batch(1)) for kind in MASKS]
    rows += [(base, batch(1, lengths_B=jnp.array([5]))), (base.replace(mask="none"), batch(1, segments_BT=segments))]
    allowed = np.stack([decoder_mask(config, HYPER, b).dense(T, T)[0, 0] for config, b in rows])
    starts = []
    for kind in positions:
        config = base.replace(positions=kind)
        starts.append(embed(parameters(config).embedding, tokens(1, T), jnp.arange(T)[None], config)[0])
    # Absolute positions are in the input: the three kinds run through one program.
    config = base.replace(positions=positions[-1])
    x = jnp.repeat(jnp.stack(starts), len(rows), axis=0)
    towards = jnp.linspace(-1.0, 2.0, V)
    got = np.asarray(influence(config, parameters(config), (np.tile(allowed, (len(starts), 1, 1)), x), towards))
    for at, seen in enumerate(got):
        m = at % len(rows)
        may = reachable(allowed[m], config.L)
        assert may.all() == (m == MASKS.index("none"))
        np.testing.assert_array_equal(seen[~may], 0)
        np.testing.assert_array_equal(seen > 0, may)


@pytest.mark.parametrize("kind", MASKS)
def test_a6_changing_a_hidden_token_changes_no_bit(kind: str) -> None:
    # Row 0 as it is; row j + 1 with token j changed.
    config = SMALL.replace(mask=kind)
    ids = np.tile(np.asarray(tokens(1, T)), (T + 1, 1))
    ids[np.arange(T) + 1, np.arange(T)] = (ids[0] + 1) % V
    b = batch(T + 1)
    got = np.asarray(logits_of(config, parameters(config), HYPER, Batch(jnp.asarray(ids), b.targets_BT, b.weights_BT)))
    see = reference.predicate(kind, window=3, prefix=3, block=2)
    may = reachable(reference.mask_array(lambda b, n, i, j: see(i, j), 1, 1, T, T)[0, 0], config.L)
    changed = np.any(got[1:] != got[0], axis=-1).T  # [query, key]
    np.testing.assert_array_equal(changed, may)


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_a7_rows_of_a_padded_batch_equal_their_own_run(architecture: str) -> None:
    config = SMALL.replace(architecture=architecture)
    p, b, lengths = parameters(config), batch(3), (7, 4, 2)
    got = logits_of(config, p, HYPER, b.replace(lengths_B=jnp.array(lengths)))
    for row, length in enumerate(lengths):
        alone = jax.tree.map(lambda a, r=row, n=length: a[r : r + 1, :n], b)
        np.testing.assert_allclose(got[row, :length], logits_of(config, p, HYPER, alone)[0], atol=2e-6)
    # Other pads, and other rows, change nothing.
    other = np.array(tokens(3, T, seed=5))
    for row, length in enumerate(lengths):
        other[row, :length] = b.tokens_BT[row, :length]
    again = logits_of(config, p, HYPER, b.replace(tokens_BT=jnp.asarray(other), lengths_B=jnp.array(lengths)))
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(again[row, :length], got[row, :length])
    other[1:] = 0
    again = logits_of(config, p, HYPER, b.replace(tokens_BT=jnp.asarray(other), lengths_B=jnp.array(lengths)))
    np.testing.assert_array_equal(again[0], got[0])


def test_a10_source_padding_changes_nothing() -> None:
    config = SMALL.replace(architecture="encoder_decoder")
    p, source, pad = parameters(config), np.array(tokens(2, S, seed=1)) % (V - 1), V - 1
    b = batch(2).replace(tokens_BT=batch(2).tokens_BT % (V - 1))
    lengths = jnp.array([S, 3])
    source[1, 3:] = pad
    want = logits_of(config, p, HYPER, b.replace(source_BS=jnp.asarray(source), source_lengths_B=lengths))
    moved = np.array(p.embedding.embed_VD)
    moved[pad] += 100
    absurd = p.replace(embedding=p.embedding.replace(embed_VD=jnp.asarray(moved)))
    for pads in (0, 3, 17):
        padded = jnp.asarray(np.pad(source, ((0, 0), (0, pads)), constant_values=pad))
        longer = b.replace(source_BS=padded, source_lengths_B=lengths)
        np.testing.assert_allclose(logits_of(config, p, HYPER, longer), want, atol=1e-5)
        np.testing.assert_allclose(logits_of(config, absurd, HYPER, longer)[..., :pad], want[..., :pad], atol=1e-5)
    alone = b.replace(source_BS=jnp.asarray(source[1:, :3]), tokens_BT=b.tokens_BT[1:])
    np.testing.assert_allclose(logits_of(config, p, HYPER, alone)[0], want[1], atol=1e-5)
    # The real part of the source is seen, all of it, by every query.
    for j in range(3):
        other = source.copy()
        other[1, j] = (other[1, j] + 1) % (V - 1)
        got = logits_of(config, p, HYPER, b.replace(source_BS=jnp.asarray(other), source_lengths_B=lengths))
        assert np.all(np.max(np.abs(got - want), axis=-1)[1] > 1e-5)
        np.testing.assert_array_equal(got[0], want[0])


def test_f15_f16_packed_documents_do_not_see_each_other() -> None:
    config = SMALL.replace(architecture="encoder_decoder")
    p = parameters(config)
    ids, source = tokens(1, T), tokens(1, S, seed=1)
    packed = Batch(
        ids,
        ids,
        jnp.ones((1, T)),
        positions_BT=jnp.array([[0, 1, 2, 0, 1, 2, 3]]),
        segments_BT=jnp.array([[1, 1, 1, 2, 2, 2, 2]]),
        source_BS=source,
        source_positions_BS=jnp.array([[0, 1, 0, 1, 2]]),
        source_segments_BS=jnp.array([[1, 1, 2, 2, 2]]),
    )
    got = logits_of(config, p, HYPER, packed)
    for t, s in ((slice(0, 3), slice(0, 2)), (slice(3, 7), slice(2, 5))):
        alone = Batch(ids[:, t], ids[:, t], jnp.ones((1, t.stop - t.start)), source_BS=source[:, s])
        np.testing.assert_allclose(got[:, t], logits_of(config, p, HYPER, alone), atol=1e-5)
    other = packed.replace(source_BS=source.at[0, :2].set((source[0, :2] + 1) % V))
    np.testing.assert_array_equal(logits_of(config, p, HYPER, other)[:, 3:], got[:, 3:])
    other = packed.replace(tokens_BT=ids.at[0, :3].set((ids[0, :3] + 1) % V))
    np.testing.assert_array_equal(logits_of(config, p, HYPER, other)[:, 3:], got[:, 3:])


# --- programs ----------------------------------------------------------------------

LOSS = jit(
    jax.value_and_grad(lambda p, c, h, b, k: jnp.mean(jax.nn.logsumexp(forward(p, c, h, b, k)[0], axis=-1))),
    static_argnums=1,
)
RATES = {"dropout_rate": 0.3, "attention_dropout_rate": 0.3}


def test_e5_remat_and_unrolling_change_no_gradient() -> None:
    config = SMALL.replace(terms=("dropout", "attention_dropout"), num_layers=3)
    p, hyper, key = parameters(config), HYPER.replace(**RATES), jax.random.key(3)
    loss, want = LOSS(p, config, hyper, batch(), key)
    assert abs(float(loss - LOSS(p, config, hyper, batch(), jax.random.key(4))[0])) > 1e-4
    for changes in ({"remat": True}, {"scan_unroll": 2}, {"scan_unroll": 0, "remat": True}):
        other, got = LOSS(p, config.replace(**changes), hyper, batch(), key)
        assert float(other) == pytest.approx(float(loss), abs=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


def test_a4_one_bfloat16_loss_and_gradient_is_finite() -> None:
    b = batch(3, lengths_B=jnp.array([5, 3, 1]))
    config = SMALL.replace(compute_dtype="bfloat16", score_dtype="bfloat16")
    loss, slope = LOSS(parameters(config), config, HYPER, b, None)
    assert np.isfinite(loss)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(slope))


def test_k1_numbers_do_not_compile_again() -> None:
    config = SMALL.replace(mask="window", terms=("dropout",))

    @functools.partial(jit, static_argnums=1)
    @chex.assert_max_traces(n=1)
    def run(p: Transformer, config: Config, hyper: Hyper, b: Batch, key: jax.Array) -> jax.Array:
        return forward(p, config, hyper, b, key)[0]

    base = {"attention_temperature": 1.0, "dk_exponent": 0.5, "window": 3, "dropout_rate": 0.0, "rope_base": 100.0}
    changes = (
        {},
        {"attention_temperature": 0.3},
        {"dk_exponent": 0.0},
        {"window": 1},
        {"dropout_rate": 0.1},
        {"rope_base": 10.0},
    )
    outs = set()
    for change in (*changes, {}):
        hyper = Hyper(**{name: jnp.asarray(value) for name, value in (base | change).items()})
        # An equal Config is the same program, whoever made it.
        same = SMALL.replace(mask="window", terms=("dropout",))
        outs.add(np.asarray(run(parameters(config), same, hyper, batch(), jax.random.key(0))).tobytes())
    assert len(outs) == len(changes)


def test_traces_and_probes() -> None:
    config = SMALL.replace(architecture="encoder_decoder")
    p, b = parameters(config), batch(source_BS=tokens(2, S), source_lengths_B=jnp.array([S, 2]))

    @jit
    def run(probe: Any) -> Any:
        return forward(p, config, HYPER, b, probe=probe, trace=True)

    probe = init_probe(config, b)
    out, traces = run(probe)
    np.testing.assert_allclose(out, logits_of(config, p, HYPER, b), atol=1e-6)
    shapes = {"encoder": (2, 2, 4, S, S), "decoder": (2, 2, 4, T, T), "cross": (2, 2, 4, T, S)}
    for name, shape in shapes.items():
        trace = getattr(traces, name)
        assert trace.weights_BNTS.shape == trace.scores_BNTS.shape == trace.allowed_BNTS.shape == shape
        powers = np.exp(np.asarray(trace.scores_BNTS)) * np.asarray(trace.allowed_BNTS)
        np.testing.assert_allclose(trace.weights_BNTS, powers / powers.sum(-1, keepdims=True), atol=1e-6)
    assert np.any(run(probe.replace(q_BTNH=probe.q_BTNH + 1))[0] != out)


def test_parts_and_refusals(key: jax.Array) -> None:
    both = SMALL.replace(architecture="encoder_decoder")
    with pytest.raises(ConfigError, match="source_BS"):
        forward(parameters(both), both, HYPER, batch())
    init = jit(init_transformer, static_argnums=1)
    shallow, deep = init(key, SMALL), init(key, SMALL.replace(num_layers=3))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:2]), shallow.decoder.layers, deep.decoder.layers)
    assert not np.array_equal(deep.decoder.layers.ffn.w1_DF[0], deep.decoder.layers.ffn.w1_DF[1])
    assert shallow.encoder is None and shallow.decoder.layers.cross is None
    post = jax.eval_shape(lambda k: init_transformer(k, SMALL.replace(norm_placement="post")), key)
    assert post.decoder.final_norm is None and shallow.decoder.final_norm is not None
    assert count_parameters(SMALL) == sum(leaf.size for leaf in jax.tree.leaves(shallow))
    hidden = jax.eval_shape(lambda p: encode(p, both, HYPER, tokens(2, S))[0], parameters(both))
    assert hidden.shape == (2, S, SMALL.D)
