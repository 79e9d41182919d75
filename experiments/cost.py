"""What training costs, by count and by this machine's speed: for --plan."""

import time

import jax
import jax.numpy as jnp

from transformer_jax.config import Config


def train_flops(config: Config, parameters: int) -> float:
    """Products of one training step, in FLOPs: 6 per parameter and token, 12 T N H per layer and token for attention.

    Kaplan et al. 2020 §2.1, with the output layer counted (it is, when tied, the embedding)
    and the whole T x T computed, as dense attention does.
    """
    tokens = config.batch_size * config.seq_len
    layers = config.L if config.architecture == "decoder" else config.L + config.encoder_layers
    tables = config.vocab_size * config.D if not config.tie_embeddings else 0
    return tokens * (6.0 * (parameters - tables) + 12.0 * layers * config.seq_len * config.N * config.H)


def product_speed(config: Config) -> float:
    """FLOP/s of the feed-forward layer's product on one device, forward: a moment's measurement."""
    x = jnp.ones((config.batch_size * config.seq_len, config.D))
    w = jnp.ones((config.D, config.F))
    product = jax.jit(lambda x, w: jax.lax.fori_loop(0, 20, lambda _, y: x + 1e-9 * ((y @ w) @ w.T), x))
    jax.block_until_ready(product(x, w))
    start = time.perf_counter()
    jax.block_until_ready(product(x, w))
    return 20 * 4.0 * x.shape[0] * config.D * config.F / (time.perf_counter() - start)
