"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019), statistics in float32.

    LayerNorm(x) = (x - mean) / sqrt(var + eps) * scale + bias,  var with 1/D (biased)
    RMSNorm(x)   = x / sqrt(mean(x^2) + eps) * scale
Articles S0 §4.1 and S2 §7.2. Epsilon stands inside the root.
"""

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax.config import Config


@struct.dataclass
class Norm:
    """scale_D, and bias_D for LayerNorm only."""

    scale_D: jax.Array
    bias_D: jax.Array | None


def init_norm(config: Config) -> Norm:
    """Scale 1, bias 0, of width D."""
    bias = jnp.zeros(config.D) if config.norm == "layernorm" else None
    return Norm(jnp.ones(config.D), bias)


def norm(params: Norm, x_BTD: jax.Array, config: Config) -> jax.Array:
    """Normalise the last axis, then scale (and shift); same shape and type as x.

    The variance is the mean of squared deviations, so that it is never negative: a
    constant row gives the bias, with a finite gradient.
    """
    x = x_BTD.astype(jnp.float32)
    if config.norm == "layernorm":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + config.norm_epsilon)
    x = x * _like(params.scale_D, x)
    if params.bias_D is not None:
        x = x + _like(params.bias_D, x)
    return x.astype(x_BTD.dtype)


def _like(w_D: jax.Array, x: jax.Array) -> jax.Array:
    """w_D with x's rank, in float32: rank promotion is never silent here."""
    return w_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + w_D.shape)
