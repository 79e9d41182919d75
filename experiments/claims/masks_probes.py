"""What chapter D asks of the library: weights under added numbers, an attention made by hand, small models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import Nudge, hidden, init_transformer, logits_of
from transformer_jax.losses import cross_entropy
from transformer_jax.moe import MoE, moe
from transformer_jax.scores import Scoring, attention_scores, masked_softmax, weights_of

EPSILON = float(np.finfo(np.float32).eps)
# Outputs are means of values of size 1, their weights exponentials of scores of a few units, each sum of H products.
ROUNDING = 32 * EPSILON
HALVES = ("bfloat16", "float16")
T, H = 6, 16  # positions, and width of a head: 1/√H is a power of 2, so that scaling rounds nothing


def drawn(queries: int = T, keys: int = T, seed: int = 0) -> list[jax.Array]:
    """q [1, queries, 1, H], k and v [1, keys, 1, H], standard normal float32."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((1, n, 1, H)), jnp.float32) for n in (queries, keys, keys)]


def by_loop(q: jax.Array, k: jax.Array, v: jax.Array, allowed: np.ndarray) -> np.ndarray:
    """Attention of one head, key by key in float64; allowed: booleans [T, S]. A row that sees nothing is 0."""
    q64, k64, v64 = (np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v))
    out = np.zeros((len(q64), v64.shape[1]))
    for i, row in enumerate(allowed):
        powers = {j: np.exp(q64[i] @ k64[j] / np.sqrt(H)) for j in np.flatnonzero(row)}
        for j, power in powers.items():
            out[i] += power / sum(powers.values()) * v64[j]
    return out


def weights_under(q: Any, k: Any, v: Any, biases: Any, dtype: str = "float32") -> np.ndarray:
    """The library's weights [R, T, S], float64, with each of `biases` [R, T, S] added to the scores and no mask."""
    bias = jnp.asarray(np.asarray(biases, np.float32)[:, None])
    rows = [jnp.broadcast_to(x, (len(bias), *x.shape[1:])) for x in (q, k, v)]
    scoring = Scoring(score_dtype=dtype)
    _, weights = jax.jit(lambda q, k, v, bias: attend(q, k, v, bias=bias, scoring=scoring, weights=True))(*rows, bias)
    return np.asarray(weights, np.float64)[:, 0]


def gap_weights(gaps: np.ndarray, dtype: str) -> np.ndarray:
    """The weights of the second of two keys whose score lies `gaps` [R] beside the first's 0: float64 [R]."""
    scores = jnp.asarray(np.stack([np.zeros_like(gaps), gaps], axis=-1).astype(jnp.dtype(dtype)))
    return np.asarray(jax.jit(lambda scores: masked_softmax(scores, None))(scores), np.float64)[:, 1]


def model_weights(config: Config) -> Any:
    """Parameters of the shapes that init_transformer gives, N(0, 1/4): large enough that none underflows."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: init_transformer(key, config), jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), jnp.float32), shapes)


def ids(*shape: int, V: int, seed: int = 0) -> jax.Array:
    """Uniform ids below V, int32."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape), jnp.int32)


def logit_slopes(params: Any, config: Config, hyper: Hyper, batch: Batch) -> np.ndarray:
    """max |d logits_i / d embedding_j| of one row of ids, float32 [T, T], with what enters the first layer as input.

    Operation by operation: of so many small models, programs take longer to compile than to run.
    """
    T = batch.tokens_BT.shape[1]

    def logits(x: jax.Array) -> jax.Array:
        out, _ = hidden(params, config, hyper, batch, nudge=Nudge(x))
        return logits_of(params, config, hyper, out)

    zero, ways = jnp.zeros((1, T, config.D)), np.eye(T * config.D, dtype=np.float32).reshape(-1, 1, T, config.D)
    with jax.disable_jit():
        slopes = jax.vmap(lambda way: jax.jvp(logits, (zero,), (way,))[1])(jnp.asarray(ways))
    return np.abs(np.asarray(slopes)).reshape(T, config.D, T, -1).max(axis=(1, 3)).T


LETTERS, ROWS, WIDTH = 8, 64, 16


def reads(*cases: tuple[int, masks.Mask, int]) -> list[float]:
    """Nats a token of an attention made by hand, in which position t looks for t + offset and writes what is there.

    cases: the offset, the mask, and how many positions after their inputs the targets stand. The text is uniform
    and independent: without the answer itself no model does better than ln LETTERS on average.
    """
    tokens = np.asarray(ids(ROWS, WIDTH, V=LETTERS))
    places, shape = np.eye(WIDTH, dtype=np.float32)[None, :, None], (ROWS, WIDTH, 1, WIDTH)
    k = np.broadcast_to(places, shape)
    v = 40 * np.eye(LETTERS, dtype=np.float32)[tokens][:, :, None]

    @jax.jit
    def nats(k: jax.Array, v: jax.Array, tokens: jax.Array) -> list[jax.Array]:
        out = []
        for offset, mask, shift in cases:
            q = np.broadcast_to(60 * np.roll(places, -offset, axis=1), shape)
            logits: Any = attend(jnp.asarray(q), k, v, mask, scoring=Scoring(dk_exponent=0.0))
            counted = jnp.broadcast_to(np.arange(WIDTH) < WIDTH - shift, tokens.shape)
            out.append(cross_entropy(logits[:, :, 0], jnp.roll(tokens, -shift, axis=1), counted).loss)
        return out

    return [float(x) for x in nats(k, v, tokens)]


def moved_by_the_last() -> tuple[float, float]:
    """How far earlier outputs of causal attention move with the last input: max |Δ|.

    Inputs are normalised before it, each position alone and all of them together.
    """
    x = np.asarray(drawn()[0])[0, :, 0]
    both = np.stack([x, x])
    both[1, -1] += 1
    normed = [(both - both.mean(axis, keepdims=True)) / both.std(axis, keepdims=True) for axis in (2, 1)]
    out = np.asarray(jax.jit(lambda x: attend(x, x, x, masks.causal()))(np.concatenate(normed)[:, :, None]))
    return np.abs(out[0] - out[1])[:-1].max(), np.abs(out[2] - out[3])[:-1].max()


def moved_by_company(real: tuple[int, int]) -> float:
    """max |Δ| of a layer of experts on the first tokens of a row, between rows of so many real tokens."""
    config = Config(d_model=4, num_heads=1, d_ff=4, num_experts=4)  # two experts a token, capacity 1.25
    rng = np.random.default_rng(0)
    shapes = ((4, 4), (4, 4, 4), (4, 4, 4))
    wr, w1, w2 = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    # All alike, and so sent to the same experts.
    x = np.broadcast_to(rng.standard_normal(4).astype(np.float32), (2, real[1], 4))
    real_BT = np.arange(real[1]) < np.array(real)[:, None]
    zeros = jnp.zeros((4, 4))
    net = MoE(wr, w1, w2, None, zeros, zeros, None)
    out = np.asarray(jax.jit(lambda x, real: moe(net, x, config, Hyper(), real_BT=real)[0])(x, real_BT))
    return float(np.abs(out[0] - out[1])[: real[0]].max())


def filled(dtype: str) -> np.ndarray:
    """Weights [2, 3, 3, 3], float64, of scores whose hidden ones are overwritten.

    First axis: a causal mask, one that hides all; second: by -inf, -1e9, the least number of the type.
    """
    scoring, least = Scoring(score_dtype=dtype), float(jnp.finfo(dtype).min)
    allowed = np.stack([np.tri(3, dtype=bool), np.zeros((3, 3), bool)])[:, None, None]
    with np.errstate(over="ignore"):  # −10⁹ in float16
        constants = np.array([-np.inf, -1e9, least]).astype(jnp.dtype(dtype))[None, :, None, None, None]
    q, k, _ = drawn(3, 3)

    @jax.jit
    def weights(q: jax.Array, k: jax.Array, constants: jax.Array) -> jax.Array:
        scores = jnp.where(allowed, attention_scores(q, k, scoring)[0], constants)
        return jax.vmap(lambda scores: weights_of(scores, None, scoring))(scores)

    return np.asarray(weights(q, k, constants), np.float64)[:, :, 0]
