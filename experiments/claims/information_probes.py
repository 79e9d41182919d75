"""What chapter E asks of the library: a model small enough to list all its texts, losses one by one."""

import heapq
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import forward, init_transformer
from transformer_jax.losses import Sums, cross_entropy

EPSILON = float(np.finfo(np.float32).eps)
ROUNDING = 16 * EPSILON  # of a logarithm of a few nats, its sum over a few classes
SMALL = Config(vocab_size=3, d_model=8, num_heads=2, num_layers=1, d_ff=8, seq_len=4)
BOS = 0  # an id like the others: it may come again


def small_model() -> Any:
    """Parameters of SMALL, N(0, 1): its predictions are far from even."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: init_transformer(key, SMALL), jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 1, leaf.shape), jnp.float32), shapes)


def every_row(length: int) -> np.ndarray:
    """All rows of ids of SMALL's vocabulary, int32 [3**length, length], in their order."""
    return np.array(list(itertools.product(range(SMALL.V), repeat=length)), np.int32)


def row_sums(batch: Batch, params: Any, smoothing: float | None = None) -> Sums:
    """The library's loss sums of each row on its own, [R]."""

    def of(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> Sums:
        return cross_entropy(logits[None], targets[None], weights[None], label_smoothing=smoothing)

    @jax.jit
    def run(params: Any, batch: Batch) -> Sums:
        return jax.vmap(of)(forward(params, SMALL, Hyper(), batch)[0], batch.targets_BT, batch.weights_BT)

    return run(params, batch)


def nats_of(logits: Any, targets: Any) -> np.ndarray:
    """The library's loss of each of R predictions: logits [R, V], targets [R] -> nats, float64 [R]."""
    one = lambda z, y: cross_entropy(z[None, None], y[None, None], jnp.ones((1, 1))).nats  # noqa: E731
    with np.errstate(divide="ignore"):
        found = jax.jit(jax.vmap(one))(jnp.asarray(logits, jnp.float32), jnp.asarray(targets, jnp.int32))
    return np.asarray(found, np.float64)


def softmax64(z: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    powers = np.exp(z - z.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def huffman_lengths(p: np.ndarray) -> list[int]:
    """Bits of each symbol in Huffman's code."""
    heap: list[tuple[float, int, tuple[int, ...]]] = [(x, i, (i,)) for i, x in enumerate(p.tolist())]
    lengths = [0] * len(p)
    heapq.heapify(heap)
    while len(heap) > 1:
        a, b = heapq.heappop(heap), heapq.heappop(heap)
        for symbol in a[2] + b[2]:
            lengths[symbol] += 1
        heapq.heappush(heap, (a[0] + b[0], a[1], a[2] + b[2]))
    return lengths
