"""Random arrays and small models for the checks, drawn by NumPy: compiling the library's own draws takes a second."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import Transformer, forward, init_transformer

U = 2.0**-24  # half a unit in the last place of 1, float32


def normal(seed: int, *shape: int) -> np.ndarray:
    """Normal numbers, float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def model(config: Config, seed: int) -> Transformer:
    """The library's parameters of `config` by shape: norms as they begin, all others N(0, 1/16), biases too."""
    shapes = jax.eval_shape(lambda key: init_transformer(key, config), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.normal(size=leaf.shape, scale=0.25)
        return jnp.asarray(1 + 0 * values if "scale" in str(path[-1]) else values, jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def batch_of(tokens: Any, **parts: Any) -> Batch:
    """A batch of these ids [B, T], every target counted; parts: integers for other fields of it."""
    ids = jnp.asarray(tokens, jnp.int32)
    more = {name: jnp.asarray(part, jnp.int32) for name, part in parts.items()}
    return Batch(ids, ids, jnp.ones(ids.shape), **more)


def logits(params: Transformer, config: Config, batch: Batch) -> np.ndarray:
    """[B, T, V] in float64."""
    made = jax.jit(lambda params, batch: forward(params, config, Hyper(), batch)[0])
    return np.asarray(made(params, batch), np.float64)
