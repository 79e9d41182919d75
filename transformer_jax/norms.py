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
    if params.bias_D is None:
        return rms(x_BTD, params.scale_D, config.norm_epsilon)
    x = x_BTD.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return (rms(x, params.scale_D, config.norm_epsilon) + _like(params.bias_D, x)).astype(x_BTD.dtype)


def rms(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm of the last axis with a scale of its width; same shape and type as x."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return (y * _like(scale, y)).astype(x.dtype)


def _like(w_D: jax.Array, x: jax.Array) -> jax.Array:
    """w_D with x's rank, in float32: rank promotion is never silent here."""
    return w_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + w_D.shape)
